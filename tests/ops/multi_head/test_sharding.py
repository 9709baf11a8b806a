"""Heads over a mesh, each device with a share of the output."""

from functools import partial

import jax
import pytest
from helpers import assert_close, thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.multi_head.calls import EK, EO, EQ, EV, HV, H, draw, inputs, layer, leaves_close, vjp

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.plan import Tiles


def params_of_8_heads():
    return layer(
        "out_bias",
        query_kernel=draw(EQ, 8, H),
        query_bias=draw(8, H),
        sink=draw(8),
        key_kernel=draw(EK, 4, H),
        key_bias=draw(4, H),
        value_kernel=draw(EV, 4, HV),
        value_bias=draw(4, HV),
        out_kernel=draw(8, HV, EO),
        bias_k=draw(4, H),
        bias_v=draw(4, HV),
    )


def test_shards_of_heads_hold_shares_of_the_output():
    """Inside shard_map the caller sums the shares; JAX sums gradients of what every shard reads."""
    params = params_of_8_heads()
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    specs = MultiHeadAttentionParams(
        query_kernel=P(None, "h"),
        query_bias=P("h"),
        key_kernel=P(None, "h"),
        key_bias=P("h"),
        value_kernel=P(None, "h"),
        value_bias=P("h"),
        out_kernel=P("h"),
        bias_k=P("h"),
        bias_v=P("h"),
        sink=P("h"),
    )

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P())
    def sharded(params, q, k, v):
        return jax.lax.psum(multi_head_attention(params, q, k, v, is_causal=True), "h")

    out, grads = vjp(jax.jit(sharded), params, *inputs())
    expected_out, expected = vjp(partial(multi_head_attention, is_causal=True), params, *inputs())
    assert_close(out, expected_out, 1e-12)
    leaves_close(grads, expected)


MIXED = {  # what alone is sharded
    "query": ("query_kernel",),
    "keys": ("key_kernel", "value_kernel"),
    "output": ("out_kernel",),
    "bias": ("query_bias",),
}


@pytest.mark.parametrize("save", ["inputs", pytest.param("qkv", marks=thorough)])
@pytest.mark.parametrize(
    "names", [pytest.param(n, id=k, marks=[thorough] * (k != "keys")) for k, n in MIXED.items()]
)
def test_heads_sharded_in_some_kernels_on_an_explicit_mesh(names, save, monkeypatch):
    """In tiles, too, whose products take no heads that lie differently."""

    def small(operands, sizes, parts=1):
        return Tiles(4, 4, str(operands.query.dtype), parts=parts)

    jax.clear_caches()
    monkeypatch.setattr(planning, "default_schedule", small)
    params = params_of_8_heads()
    attend = partial(multi_head_attention, is_causal=True, save=save)
    expected_out, expected = vjp(attend, params, *inputs())
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = {"out_kernel": P("h"), "query_bias": P("h")}
        placed = params._replace(
            **{name: jax.device_put(getattr(params, name), specs.get(name, P(None, "h"))) for name in names}
        )
        out, grads = vjp(jax.jit(attend), placed, *inputs())
    jax.clear_caches()
    assert_close(out, expected_out, 1e-12)
    leaves_close(grads, expected)
