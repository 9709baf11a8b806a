"""Cases of linear attention that tests, benchmarks and full compilation alone read."""

import numpy as np

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.linear_attention import api
from jax_attn_bwd.ops.linear_attention.cases import NORM, OPERATORS, case

_SMALL = dict(B=(1,), T=4, K=1, N=2, H=2, Hv=3, tags=("second",))
_SHARD = dict(B=(4,), T=9, K=4, N=8, H=3, Hv=5, tags=("shard",))


def _resets(rng, arrays):
    """Draws decays of which some are 0, and some underflow."""
    g = arrays["log_decay"].copy()
    g[rng.random(g.shape) < 0.1] = -np.inf
    g[rng.random(g.shape) < 0.1] = -1000
    return {"log_decay": g}


def _measured(**options):
    for B, T, N, H in ((1, 1024, 4, 64), (1, 4096, 8, 128), (8, 512, 4, 64)):
        sizes = {"B": (B,), "T": T, "K": N, "N": N, "H": H, "Hv": H}
        tags = ("bench", "bench_gpu", *(["timed"] if T == 4096 else []))
        yield case(f"B{B}, T={T}, {N} x {H}", **sizes, tags=tags, dtype="float32", **options)
    small = {"B": (1,), "T": 128, "K": 2, "N": 2, "H": 16, "Hv": 16}
    yield case("B1, T=128, 2 x 16", **small, tags=("quick",), dtype="float32", **options)
    for T in (128, 256, 1024, 2048, 4096, 8192, 16384):
        sizes = {"B": (1,), "T": T, "K": 4, "N": 4, "H": 64, "Hv": 64}
        tags = ("scaling",) if T >= 1024 else ("quick_scaling",)
        yield case(f"4 heads of 64: T={T}", **sizes, tags=tags, dtype="float32", **options)


_ON_TPUS = dict(B=(1,), T=256, K=2, N=2, H=128, Hv=128, tags=("v5e", "v5p", "v6e", "tpu7x"))
_ON_TPUS_AND_HOPPER = _ON_TPUS | dict(tags=(*_ON_TPUS["tags"], "mosaic_gpu"))


def _both(**delta):
    """Cases of both operators; `delta` are options of them."""
    return (
        case("no tokens", T=0, state=True, tags=("edge",), **delta),
        case("one token", T=1, state=True, tags=("edge",), **delta),
        case("no batch", B=(0,), T=3, tags=("edge",), **delta),
        case("one channel", H=1, Hv=1, decay="channel", T=5, tags=("edge",), **delta),
        case("two batch axes", B=(2, 1), T=65, K=4, state=True, tags=("edge",), **delta),
        case("hidden", T=70, lengths=(0, 33), segments=2, state=True, tags=("hidden",), **delta),
        case("hidden channels", decay="channel", T=20, lengths=(3, 16), tags=("hidden",), **delta),
        case("second", state=True, lengths=(3,), segments=2, **_SMALL, **delta),
        case("second_channels", decay="channel", l2_norm_epsilon=0.1, **_SMALL, **delta),
        case("second_constant", decay="constant", **_SMALL, **delta),
        case("shard", state=True, lengths=(9, 4, 0, 7), **_SHARD, **delta),
        case("shard_constant", decay="constant", segments=2, **_SHARD, **delta),
        case("keys of 128", state=True, **_ON_TPUS, **delta),
        case("keys of 128, channels", decay="channel", **_ON_TPUS_AND_HOPPER, **delta),
    )


CASES = {
    "gated_delta_rule": (
        case("resets", T=70, extra=_resets, state=True, **NORM),
        case("resets of channels", decay="channel", T=40, extra=_resets, segments=2, state=True, **NORM),
        case("channels of chunks", decay="channel", T=133, lengths=(20, 133), growth=5.0, **NORM),
        case("no decay", decay="none", K=1, scale=0.3, lengths=(9, 0), segments=3, state=True, **NORM),
        case("without a norm", B=(), T=5, growth=2.0),
        *_both(),
        *_measured(**NORM),
    ),
    "gated_linear_attention": (
        case("resets", delta=False, T=70, extra=_resets, state=True),
        case("resets of channels", decay="channel", delta=False, T=40, extra=_resets, segments=2),
        case("no decay", decay="none", delta=False, K=1, lengths=(9, 0), state=True, scale=0.3),
        *_both(delta=False),
        *_measured(delta=False),
    ),
    "dplr_linear_attention": (
        case("resets", erasing="values", T=70, extra=_resets, state=True),
        case(
            "resets of channels", decay="channel", erasing="keys", T=40, extra=_resets, segments=2, state=True
        ),
        case("channels of chunks", decay="channel", erasing="values", T=133, lengths=(20, 133), growth=5.0),
        case(
            "no decay", decay="none", K=1, erasing="keys", scale=0.3, lengths=(9, 0), segments=3, state=True
        ),
        *_both(erasing="keys"),
    ),
}


def _backward_of(function):
    def backward(cotangents, outputs, arrays, options, wrt):
        dout, dfinal = cotangents
        state = arrays.get("initial_state")
        wide = accumulator_dtype(arrays["value"].dtype)
        given = arrays | {"log_decay": arrays.get("log_decay")}
        if state is not None:
            given["initial_state"] = state.astype(wide)
        grads = function(dout, **given, **options, dfinal_state=dfinal.astype(wide), wrt=wrt)
        found = {name: x for name, x in grads._asdict().items() if x is not None}
        return {name: x.astype(arrays[name].dtype) for name, x in found.items()}

    return backward


def _hidden(arrays, options):
    """Tokens at or beyond the lengths."""
    if "seq_lengths" not in arrays:
        return {}
    beyond = np.arange(arrays["value"].shape[-3]) >= np.asarray(arrays["seq_lengths"])[..., None]
    tokens = ["query", "key", "value", "beta", "erase_key", "erase_query", "out"]
    if "log_decay" in arrays and arrays["log_decay"].ndim > 1:
        tokens.append("log_decay")
    return dict.fromkeys(tokens, beyond)


_AXES = {
    "query": "BTND", "key": "BTND", "value": "BTND", "log_decay": "BTN", "beta": "BTN",
    "erase_key": "BTND", "erase_query": "BTND",
    "initial_state": "BNDV", "out": "BTND", "final_state": "BNDV", "seq_lengths": "B", "segment_ids": "BT",
}  # fmt: skip
TRAITS = {
    operator.name: {
        "backward": _backward_of(getattr(api, f"{operator.name}_bwd")),
        "backward_wrt": operator.differentiable,
        "axes": _AXES,
        "wide": ("final_state",),
        "hidden": _hidden,
    }
    for operator in OPERATORS
}
