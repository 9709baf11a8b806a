"""Logits that are huge and alike, where the logarithm of a sum is lost beside them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.multi_head.calls import QUICK, draw

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention
from jax_attn_bwd.ops.multi_head import reference

HUGE = 2.0**22  # next to it, float32 has steps of 1/2
B, T, S, N, H = 2, 3, 5, 2, 4


def operands():
    """Logits HUGE + 0, 1, ... of keys, appended row and sink, exact in float32."""
    rng = np.random.default_rng(0)
    small = lambda *shape: rng.integers(0, 3, shape).astype(np.float32)
    query, key, row = small(B, T, H), small(B, S, H), small(N, H)
    for x in (query, key, row):
        x[..., 0] = HUGE**0.5
    params = {"bias_k": row, "bias_v": np.asarray(draw(N, H), np.float32)}
    params["sink"] = np.asarray([HUGE, HUGE + 1], np.float32)
    return params, (query, key, np.asarray(draw(B, S, H), np.float32))


def results(function, dtype, weights):
    params, arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), operands())
    more = {"return_weights": True} if weights and function is not reference.multi_head_attention else {}

    @partial(jax.jit, compiler_options=QUICK)
    def run(params, arrays):
        def call(params, arrays):
            params = MultiHeadAttentionParams(**params)
            found = function(params, *arrays, num_heads=N, scale=1.0, **more)
            return found[: 1 + weights] if isinstance(found, tuple) else (found,)

        out, pullback = jax.vjp(call, params, arrays)
        return out, pullback(tuple(draw(*x.shape).astype(dtype) for x in out))

    return run(params, arrays)


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=thorough)], ids=["out", "weights"])
def test_huge_logits_that_are_nearly_tied(weights):
    """Values and gradients in float32 as in float64, tile by tile and on whole planes."""
    with jax.numpy_rank_promotion("allow"):
        out, (params, arrays) = results(reference.multi_head_attention, np.float64, weights)
    got_out, (got_params, got_arrays) = results(multi_head_attention, np.float32, weights)
    for x, y in zip(got_out, out, strict=True):
        assert_close(x, y, 1e-5)
    names = ("query", "key", "value")
    got = got_params | dict(zip(names, got_arrays, strict=True))
    for name, x in (params | dict(zip(names, arrays, strict=True))).items():
        first = name in ("query", "key", "bias_k")  # its first feature is summed times a huge number
        assert_close(got[name][..., first:], x[..., first:], 2e-5, name)
