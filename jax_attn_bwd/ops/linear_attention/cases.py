"""Named inputs of linear attention."""

from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.linear_attention import api, reference

NORM = {"l2_norm_epsilon": 1e-6}


def case(
    name, *, B=(2,), T=9, K=2, N=4, H=4, Hv=5, decay="head", delta=True, state=False, lengths=None,
    segments=0, growth=1.0, tags=("ci",), dtype="bfloat16", means=None, extra=None, erasing=None, **options,
) -> Case:  # fmt: skip
    """Returns a case; `decay` is "none", "constant", "head" or "channel", `lengths` one of each entry.

    `growth` scales minus the logarithm of the decays; `erasing`, in the place of `delta`, tells whether what
    erases has the heads of the "keys" or of the "values"; `extra(rng, arrays)` replaces some arrays.
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
        if erasing is not None:
            for name in ("erase_key", "erase_query"):  # of length 1 or so, that nothing diverges
                arrays[name] = rng.standard_normal((*B, T, K if erasing == "keys" else N, H)) / H**0.5
        elif delta:
            arrays["beta"] = 1 / (1 + np.exp(-rng.standard_normal((*B, T, N))))
        if state:
            arrays["initial_state"] = rng.standard_normal((*B, N, H, Hv))
        if lengths is not None:
            arrays["seq_lengths"] = np.array(lengths, np.int32)
        if segments:
            arrays["segment_ids"] = np.sort(rng.integers(0, segments, (*B, T)), -1).astype(np.int32)
        return arrays | (extra(rng, arrays) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype, means=means or {})


def _steps_to_two(rng, arrays):
    return {"beta": 2 * arrays["beta"]}


_CHECKED = ("ci", "check")
_DELTA = (
    case("plain", **NORM, tags=(*_CHECKED, "compile")),
    case("channels", decay="channel", T=21, state=True, tags=_CHECKED, **NORM),
    case("chunks", T=150, state=True, lengths=(150, 71), segments=3, tags=_CHECKED, **NORM),
    case("constant", decay="constant", T=20, K=4, extra=_steps_to_two, tags=_CHECKED, **NORM),
    case("means", T=20, state=True, means={"value": 3.0}, tags=("means",), **NORM),
)
_ERASING = (
    case("plain", erasing="keys", tags=(*_CHECKED, "compile")),
    case("channels", decay="channel", erasing="values", T=21, state=True, tags=_CHECKED, **NORM),
    case("chunks", erasing="values", T=150, state=True, lengths=(150, 71), segments=3, tags=_CHECKED),
    case("constant", decay="constant", erasing="keys", T=20, tags=_CHECKED, **NORM),
    case("means", erasing="keys", T=20, state=True, means={"value": 3.0}, tags=("means",), **NORM),
)
_LINEAR = (
    case("plain", delta=False, tags=(*_CHECKED, "compile")),
    case("channels", decay="channel", delta=False, T=21, state=True, tags=_CHECKED),
    case("chunks", delta=False, T=150, state=True, lengths=(150, 71), segments=3, tags=_CHECKED),
    case("constant", decay="constant", delta=False, T=20, tags=_CHECKED, **NORM),
    case("means", delta=False, T=20, state=True, means={"value": 3.0}, tags=("means",), **NORM),
)


def _called(function):
    """Makes calls that hand a state over in the dtype of sums, whatever that of a case is."""

    def call(*, log_decay=None, initial_state=None, **arguments):
        if initial_state is not None:
            initial_state = initial_state.astype(accumulator_dtype(initial_state.dtype))
        arguments |= {"log_decay": log_decay, "initial_state": initial_state}
        return function(**arguments, return_final_state=True)

    return call


def _defined(function):
    def reference(**arguments):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(**arguments)

    return reference


OPERATORS = tuple(
    Operator(
        name=name,
        outputs=("out", "final_state"),
        differentiable=differentiable,
        implementations=implementations,
        call=_called(getattr(api, name)),
        reference=_defined(getattr(reference, name)),
        cases=cases,
    )
    for name, differentiable, implementations, cases in (
        ("gated_delta_rule", api.DIFFERENTIABLE, api.IMPLEMENTATIONS, _DELTA),
        ("gated_linear_attention", api.WITHOUT_BETA, api.IMPLEMENTATIONS, _LINEAR),
        ("dplr_linear_attention", api.OF_ERASING, api.OF_ERASING_KEYS, _ERASING),
    )
)
