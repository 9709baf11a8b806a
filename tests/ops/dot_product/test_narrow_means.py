"""Gradients and tangents in bfloat16 and float16, where keys and values have a mean.

The error of a rounded output is one error of delta for all keys of a row, and a mean makes it large, as it
does those of rounded derivatives of logits, whose sum over a row is 0. What they are held against is the
definition in float32, rounded at the end: in the narrow dtype it rounds as we do. Forward and backward are
two programs, as in a model under `jax.checkpoint`: in one, XLA may hand on what was not rounded yet.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit, saved_arrays, thorough

from jax_attn_bwd import MultiHeadAttentionParams, check, dot_product_attention, multi_head_attention
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.dot_product.reference import dot_product_attention as definition

B, T, N, K, H = 2, 192, 4, 2, 8
MEAN, TIMES = 3, 3  # of keys and values; as large as the definition's error an error may be


def layer(q, k, v, forward_mode=False):
    """Its heads are those arrays, side by side."""
    arrays = dict(zip(("query", "key", "value"), (q, k, v), strict=True))
    x = jnp.concatenate([y.reshape(*y.shape[:2], -1) for y in arrays.values()], -1)
    one, kernels, start = np.eye(x.shape[-1], dtype=x.dtype), {}, 0
    for name, y in arrays.items():
        end = start + y.shape[2] * H
        kernels[f"{name}_kernel"] = one[:, start:end].reshape(-1, y.shape[2], H)
        start = end
    params = MultiHeadAttentionParams(*(None,) * len(MultiHeadAttentionParams._fields))._replace(**kernels)
    out = multi_head_attention(params, x, num_heads=N, is_causal=True, forward_mode=forward_mode)
    return out.reshape(q.shape)


def dense(q, k, v, **options):
    return dot_product_attention(q, k, v, is_causal=True, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=thorough)])
@pytest.mark.parametrize("form", [dense, layer])
@pytest.mark.usefixtures("tiles")
def test_every_error_is_that_of_rounding_at_the_end(form, dtype):
    compare(form, dtype)


@pytest.mark.parametrize("form", [dense, pytest.param(layer, marks=thorough)])
@pytest.mark.usefixtures("tiles", "narrow_products")
def test_every_error_is_that_of_rounding_at_the_end_with_narrow_products(form):
    compare(form, "bfloat16")


def compare(form, dtype):
    """Compares gradients, the sum over all keys of those of keys, which is 0, and a tangent."""
    rng = np.random.default_rng(0)
    draw = lambda heads, mean=0: jnp.asarray(rng.standard_normal((B, T, heads, H)) + mean, dtype)
    given = draw(N), draw(K, MEAN), draw(K, MEAN)
    along, dout = (draw(N), draw(K), draw(K)), draw(N)

    def derivatives(call, forward, compiled, to):
        arrays, moved, ct = jax.tree.map(lambda x: np.asarray(x, np.float64).astype(to), (given, along, dout))
        _, pullback = compiled(lambda *arrays: jax.vjp(call, *arrays))(*arrays)
        dq, dk, dv = compiled(lambda pullback, ct: pullback(ct))(pullback, ct)
        tangent = compiled(lambda *both: jax.jvp(forward, *both)[1])(arrays, moved)
        return {"query": dq, "key": dk, "value": dv, "tangent": tangent}

    plain = lambda *arrays: definition(*arrays, is_causal=True)[0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exact = derivatives(plain, plain, quick_jit, "float64")
        wide = derivatives(plain, plain, quick_jit, "float32")
    got = derivatives(form, lambda *arrays: form(*arrays, forward_mode=True), jax.jit, dtype)
    rounded = {name: np.asarray(x).astype(dtype) for name, x in wide.items()}
    for name, x in got.items():
        limit = TIMES * check.relative_error(rounded[name], exact[name])
        assert check.relative_error(x, exact[name]) <= limit, name
    sums = [np.abs(np.asarray(x["key"], np.float64).sum(1)).max() for x in (got, rounded)]
    assert sums[0] <= TIMES * sums[1]


def test_what_is_saved_on_a_cpu_and_elsewhere(monkeypatch):
    """The output before it is rounded, too, on a CPU; for a GPU the rounded one alone."""
    x = jnp.ones((1, 64, 2, 8), jnp.bfloat16)
    for platform, wide in (("cpu", 1), ("gpu", 0)):
        monkeypatch.setattr(targets, "platform", lambda platform=platform: platform)
        jax.clear_caches()
        shapes = jax.eval_shape(lambda x: jax.vjp(lambda *a: dot_product_attention(*a), x, x, x)[1], x)
        of_heads = [str(y.dtype) for y in saved_arrays(shapes) if y.ndim == 4]
        assert sorted(of_heads) == [*["bfloat16"] * 4, *["float32"] * wide]
    jax.clear_caches()
