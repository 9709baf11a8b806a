"""Named inputs of linear attention."""

from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.linear_attention import api, reference

_NORM = {"l2_norm_epsilon": 1e-6}


def case(
    name, *, B=(2,), T=9, K=2, N=4, H=4, Hv=5, decay="head", delta=True, state=False, lengths=None,
    segments=0, growth=1.0, tags=("ci",), dtype="bfloat16", means=None, extra=None, **options,
) -> Case:  # fmt: skip
    """Returns a case; `decay` is "none", "constant", "head" or "channel", `lengths` one of each entry.

    `growth` scales minus the logarithm of the decays; `extra(rng, arrays)` replaces some arrays.
    """
    decays = {"constant": (N,), "head": (*B, T, N), "channel": (*B, T, N, H)}

    def build(rng):
        arrays: dict[str, Any] = {
            "query": rng.standard_normal((*B, T, K, H)),
            "key": rng.standard_normal((*B, T, K, H)),
            "value": rng.standard_normal((*B, T, N, Hv)),
        }
        if decay in decays:
            arrays["log_decay"] = -growth * np.log1p(np.exp(rng.standard_normal(decays[decay])))
        if delta:
            arrays["beta"] = 1 / (1 + np.exp(-rng.standard_normal((*B, T, N))))
        if state:
            arrays["initial_state"] = rng.standard_normal((*B, N, H, Hv))
        if lengths is not None:
            arrays["seq_lengths"] = np.array(lengths, np.int32)
        if segments:
            arrays["segment_ids"] = np.sort(rng.integers(0, segments, (*B, T)), -1).astype(np.int32)
        return arrays | (extra(rng, arrays) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype, means=means or {})


def _resets(rng, arrays):
    """Draws decays of which some are 0, and some underflow."""
    g = arrays["log_decay"].copy()
    g[rng.random(g.shape) < 0.1] = -np.inf
    g[rng.random(g.shape) < 0.1] = -1000
    return {"log_decay": g}


def _steps_to_two(rng, arrays):
    return {"beta": 2 * arrays["beta"]}


def _measured(**options):
    for B, T, N, H in ((1, 1024, 4, 64), (1, 4096, 8, 128), (8, 512, 4, 64)):
        sizes = {"B": (B,), "T": T, "K": N, "N": N, "H": H, "Hv": H}
        tags = ("bench", "bench_gpu", *(["timed"] if T == 4096 else []))
        yield case(f"B{B}, T={T}, {N} x {H}", **sizes, tags=tags, dtype="float32", **options)
    small = {"B": (1,), "T": 128, "K": 2, "N": 2, "H": 16, "Hv": 16}
    yield case("B1, T=128, 2 x 16", **small, tags=("quick",), dtype="float32", **options)


def _scaling(**options):
    for T in (128, 256, 1024, 2048, 4096, 8192, 16384):
        sizes = {"B": (1,), "T": T, "K": 4, "N": 4, "H": 64, "Hv": 64}
        tags = ("scaling",) if T >= 1024 else ("quick_scaling",)
        yield case(f"4 heads of 64: T={T}", **sizes, tags=tags, dtype="float32", **options)


_CHECKED = ("ci", "check")
_DELTA = (
    case("plain", **_NORM, tags=(*_CHECKED, "compile")),
    case("channels", decay="channel", T=21, state=True, tags=_CHECKED, **_NORM),
    case("chunks", T=150, state=True, lengths=(150, 71), segments=3, tags=_CHECKED, **_NORM),
    case("constant", decay="constant", T=20, K=4, extra=_steps_to_two, tags=_CHECKED, **_NORM),
    case("resets", T=70, extra=_resets, state=True, **_NORM),
    case("resets of channels", decay="channel", T=40, extra=_resets, segments=2, state=True, **_NORM),
    case("channels of chunks", decay="channel", T=133, lengths=(20, 133), growth=5.0, **_NORM),
    case("no decay", decay="none", K=1, scale=0.3, lengths=(9, 0), segments=3, state=True, **_NORM),
    case("without a norm", B=(), T=5, growth=2.0),
    case("means", T=20, state=True, means={"value": 3.0}, tags=("means",), **_NORM),
    *_measured(**_NORM),
    *_scaling(**_NORM),
)
_LINEAR = (
    case("plain", delta=False, tags=(*_CHECKED, "compile")),
    case("channels", decay="channel", delta=False, T=21, state=True, tags=_CHECKED),
    case("chunks", delta=False, T=150, state=True, lengths=(150, 71), segments=3, tags=_CHECKED),
    case("constant", decay="constant", delta=False, T=20, tags=_CHECKED, **_NORM),
    case("resets", delta=False, T=70, extra=_resets, state=True),
    case("resets of channels", decay="channel", delta=False, T=40, extra=_resets, segments=2),
    case("no decay", decay="none", delta=False, K=1, lengths=(9, 0), state=True, scale=0.3),
    case("means", delta=False, T=20, state=True, means={"value": 3.0}, tags=("means",), **_NORM),
    *_measured(delta=False),
    *_scaling(delta=False),
)


def _called(function):
    """Makes calls that hand a state over in the dtype of sums, whatever that of a case is."""

    def call(*, initial_state=None, **arguments):
        if initial_state is not None:
            initial_state = initial_state.astype(accumulator_dtype(initial_state.dtype))
        return function(**arguments, initial_state=initial_state, return_final_state=True)

    return call


def _delta(*, log_decay=None, **arguments):
    return api.gated_delta_rule(log_decay=log_decay, **arguments)


def _defined(function):
    def reference(**arguments):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(**arguments)

    return reference


def _hidden(arrays, options):
    """Tokens at or beyond the lengths."""
    if "seq_lengths" not in arrays:
        return {}
    beyond = np.arange(arrays["value"].shape[-3]) >= np.asarray(arrays["seq_lengths"])[..., None]
    tokens = ["query", "key", "value", "beta", "out"]
    if "log_decay" in arrays and arrays["log_decay"].ndim > 1:
        tokens.append("log_decay")
    return dict.fromkeys(tokens, beyond)


OPERATORS = tuple(
    Operator(
        name=name,
        outputs=("out", "final_state"),
        differentiable=differentiable,
        implementations=api.IMPLEMENTATIONS,
        call=_called(call),
        reference=_defined(definition),
        cases=cases,
        hidden=_hidden,
    )
    for name, differentiable, call, definition, cases in (
        ("gated_delta_rule", api.DIFFERENTIABLE, _delta, reference.gated_delta_rule, _DELTA),
        (
            "gated_linear_attention",
            api.WITHOUT_BETA,
            api.gated_linear_attention,
            reference.gated_linear_attention,
            _LINEAR,
        ),
    )
)
