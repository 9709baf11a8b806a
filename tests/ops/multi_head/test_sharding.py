"""Heads over a mesh, each device with a share of the output."""

from functools import partial

import jax
from helpers import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.multi_head.calls import EK, EO, EQ, EV, HV, H, draw, inputs, layer, leaves_close, vjp

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention


def test_shards_of_heads_hold_shares_of_the_output():
    """Inside shard_map the caller sums the shares; JAX sums gradients of what every shard reads."""
    params = layer(
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
