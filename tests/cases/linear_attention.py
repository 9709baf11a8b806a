"""Cases of linear attention that tests and full compilation alone read."""

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.linear_attention import api
from jax_attn_bwd.ops.linear_attention.cases import OPERATORS, case

_SMALL = dict(B=(1,), T=4, K=1, N=2, H=2, Hv=3, tags=("second",))
_SHARD = dict(B=(4,), T=9, K=4, N=8, H=3, Hv=5, tags=("shard",))


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
    )


CASES = {"gated_delta_rule": _both(), "gated_linear_attention": _both(delta=False)}


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


_AXES = {
    "query": "BTND", "key": "BTND", "value": "BTND", "log_decay": "BTN", "beta": "BTN",
    "initial_state": "BNDV", "out": "BTND", "final_state": "BNDV", "seq_lengths": "B", "segment_ids": "BT",
}  # fmt: skip
TRAITS = {
    operator.name: {
        "backward": _backward_of(getattr(api, f"{operator.name}_bwd")),
        "backward_wrt": operator.differentiable,
        "axes": _AXES,
        "wide": ("final_state",),
    }
    for operator in OPERATORS
}
