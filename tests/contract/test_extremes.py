"""Extremes: logits of 1e4 in float32, and a NaN that must be seen. What no one reads: `test_values.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close

from jax_attn_bwd import (
    MultiHeadAttentionParams,
    dot_product_attention,
    multi_head_attention,
    scaled_masked_softmax,
)

B, N, K, H, HV = 2, 4, 2, 8, 6


def attend(**arguments):
    return dot_product_attention(**arguments, return_residual=True)


def in_pairs(arrays):
    """(floating, the rest): what is differentiated, and what is not."""
    floating = {n: x for n, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
    return floating, {n: x for n, x in arrays.items() if n not in floating}


def first_order(function, options):
    """`(arrays, cts) -> outputs and gradients by name`, one compiled program for all poisons."""

    @jax.jit
    def run(arrays, cts):
        inputs, rest = in_pairs(arrays)
        out, pullback = jax.vjp(lambda i: function(**i, **rest, **options), inputs)
        out = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(out))}
        return out | {f"d{name}": x for name, x in pullback(cts)[0].items()}

    return run


@pytest.mark.parametrize("sign", [1, -1])
def test_attention_with_logits_of_1e4_in_float32(rng, sign):
    """Small integers make the logits exact, so that float32 has no excuse."""
    t, s = 9, 13
    shapes = {"query": (B, t, N, H), "key": (B, s, K, H)}
    arrays = {n: rng.integers(-4, 5, shape).astype(np.float32) for n, shape in shapes.items()}
    arrays["value"] = rng.standard_normal((B, s, K, HV)).astype(np.float32)
    cts = (rng.standard_normal((B, t, N, HV)), rng.standard_normal((B, t, N)))
    options = {"scale": sign * 1e4 / 64, "is_causal": True}
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    logits = np.einsum("btkgh,bskh->bkgts", wide["query"].reshape(B, t, K, 2, H), wide["key"])
    assert np.abs(logits * options["scale"]).max() > 1e4
    run = first_order(attend, options)
    got = run(arrays, tuple(ct.astype(np.float32) for ct in cts))
    expected = run(wide, cts)
    for name, x in got.items():
        assert np.isfinite(x).all(), name
        # the backward starts from lse, whose float32 neighbours near 1e4 lie 1e-3 apart
        assert_close(x, expected[name], 1e-6 if name.startswith("output") else 1e-3, name)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3.0])
def test_softmax_with_logits_of_1e4_in_float32(rng, scale):
    """Integers, so that the logits are exact and the answer is known."""
    x = 1e4 + rng.integers(-5, 6, (3, 9, 13))
    x[0, :, :4] *= -1
    dy = rng.standard_normal(x.shape)
    run = first_order(scaled_masked_softmax, {"scale": scale})
    got = run({"x": x.astype(np.float32)}, dy.astype(np.float32))
    z = scale * x
    e = np.exp(z - z.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    expected = {"output 0": y, "dx": scale * y * (dy - (dy * y).sum(-1, keepdims=True))}
    assert_trees_close(got, expected, 2e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bias_that_is_not_a_number_is_not_a_mask(poison):
    """Only -inf hides: a bias that has diverged shows in the output of its row, and of no other."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((B, 5, N, H))) for _ in range(3))
    bias = jnp.zeros((5, 5)).at[1, 2].set(poison)
    out = dot_product_attention(q, k, v, bias)
    weights = scaled_masked_softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), bias=bias)
    layer = multi_head_attention(MultiHeadAttentionParams(), q[:, :, 0], num_heads=2, bias=bias)
    for x, row in ((out, 1), (weights, 2), (layer, 1)):
        broken = np.isnan(np.moveaxis(np.asarray(x), row, 0)).reshape(5, -1)
        assert broken[1].all(), poison
        assert not broken[[0, 2, 3, 4]].any(), poison
