"""Cases of linear attention that tests and full compilation alone read."""

from jax_attn_bwd.ops.linear_attention.cases import case

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
