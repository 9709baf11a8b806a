"""The plain backward: differentiated itself, and given arrays of NumPy."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import dot_product_attention, dot_product_attention_bwd


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_second_order_of_the_plain_backward():
    """dot_product_attention_bwd is itself differentiable, in both modes."""
    q, k, v, dout = (normal(1, 5, 2, 4, seed=s) for s in range(4))
    out, lse = dot_product_attention(q, k, v, return_residual=True)

    def dq(dout):
        grads = dot_product_attention_bwd(dout, q, k, v, out=out, lse=lse, wrt=("query",))
        return grads.query

    tangent = normal(1, 5, 2, 4, seed=9)
    _, got = jax.jvp(dq, (dout,), (tangent,))
    step = 1e-6  # dq is linear in dout, but out and lse are held fixed
    assert_close(got, (dq(dout + step * tangent) - dq(dout - step * tangent)) / (2 * step), 1e-7)


def test_plain_backward_of_blocks_of_keys(rng):
    """With `out` and `lse` of all keys, disjoint blocks of them add up to the whole."""
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal(s)) for s in ((2, 3, 4, 8), *[(2, 7, 2, 8)] * 2, (2, 3, 4, 8))
    )
    out, lse = dot_product_attention(q, k, v, return_residual=True)

    def grads(keys):
        return dot_product_attention_bwd(dout, q, k[:, keys], v[:, keys], out=out, lse=lse)

    whole, blocks = grads(slice(7)), (grads(slice(4)), grads(slice(4, 7)))
    assert_close(blocks[0].query + blocks[1].query, whole.query, 1e-12, "query")
    for name in ("key", "value"):
        joined = jnp.concatenate([getattr(block, name) for block in blocks], 1)
        assert_close(joined, getattr(whole, name), 1e-12, name)


def test_plain_backward_takes_numpy_arrays_of_another_width(rng):
    """With x64 off, NumPy's float64 is float32, in cotangents as in operands."""
    q, k, v, dout = (rng.standard_normal((1, 5, 2, 4)) for _ in range(4))
    with jax.enable_x64(False):
        out, lse = dot_product_attention(q, k, v, return_residual=True)
        grads = dot_product_attention_bwd(dout, q, k, v, out=np.asarray(out, float), lse=lse)
        _, pullback = jax.vjp(dot_product_attention, *(jnp.asarray(x) for x in (q, k, v)))
        assert_close(grads.key, pullback(jnp.asarray(dout))[1], 1e-6)
        with pytest.raises(TypeError, match="lse must be a floating-point array, got NoneType"):
            dot_product_attention_bwd(dout, q, k, v, out=out, lse=None)
