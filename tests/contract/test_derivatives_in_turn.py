"""One jitted function differentiated by this operand and by that: no derivative takes another's for its own.

JAX keeps one structure of residuals for a call in a jitted function, that of the last forward that it traced.
"""

import functools

import jax
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough
from parallel.sequences import AXIS, TOKENS, draw, mesh

import jax_attn_bwd as jab


def dense(q, k, v):
    return jab.dot_product_attention(q, k, v, is_causal=True)


def layer(q, k, v):
    heads = lambda x: x[..., 0, :]
    params = jab.MultiHeadAttentionParams(value_kernel=v[0, :3])
    return jab.multi_head_attention(params, heads(q), heads(k), heads(k), num_heads=2)


@functools.cache
def plan():
    with jax.ensure_compile_time_eval():
        return jab.BipartiteCSC.from_coo(np.array([0, 1, 2, 3, 0]), np.array([0, 0, 1, 2, 3]), 4, 4)


def graph(q, k, v):
    rows = lambda x: x[0, :4].reshape(4, -1)
    return jab.graph_transformer_attention(plan(), rows(q), rows(k), rows(v), num_heads=2)


def deformable(q, k, v):
    value = q[:, :4, :, :]
    at = jax.nn.sigmoid(k[:, :3, :, :2].reshape(1, 3, 2, 1, 1, 2))
    weights = v[:, :3, :, :1].reshape(1, 3, 2, 1, 1)
    return jab.multi_scale_deformable_attention(value, ((2, 2),), at, weights)


def ring(q, k, v):
    attend = functools.partial(jab.parallel.ring_attention, axis_name=AXIS, is_causal=True)
    return jax.shard_map(attend, mesh=mesh(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)(q, k, v)


OTHERS = [pytest.param(f, marks=thorough) for f in (layer, graph, deformable, ring)]


@pytest.mark.parametrize("function", [dense, *OTHERS], ids=lambda f: f.__name__)
def test_gradients_do_not_depend_on_those_before(function, rng):
    qkv = [draw(rng, 1, 8, 2, 3) for _ in range(3)]
    once = jax.jit(function)

    def gradients(function, wrt):
        """Of a new function each time: what is cached is `once`."""
        loss = lambda *qkv: (function(*qkv) ** 2).sum()
        return jax.jit(jax.grad(loss, wrt), compiler_options=QUICK)(*qkv)

    expected = gradients(function, (0, 1, 2))
    plain = lambda f: f
    for around, wrt in ((plain, (0, 1, 2)), (plain, (1,)), (jax.checkpoint, (0, 1, 2))):
        for i, got in zip(wrt, gradients(around(once), wrt), strict=True):
            assert_close(got, expected[i], 1e-12, f"{wrt}[{i}]")
