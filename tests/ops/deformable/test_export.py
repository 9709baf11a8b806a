"""Export with symbolic batch, queries, heads and channels."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from ops.deformable.small import LEVELS, sample

from jax_attn_bwd import multi_scale_deformable_attention


@pytest.mark.thorough
def test_export_with_symbolic_sizes():
    options = {"normalize": "softmax", "padding_mode": "border"}
    b, q, m, d = jax.export.symbolic_shape("b, q, m, d")
    shapes = ((b, 14, m, d), (b, q, m, 2, 2, 2), (b, q, m, 2, 2))

    def loss(value, at, weights):
        return jnp.sin(multi_scale_deformable_attention(value, LEVELS, at, weights, **options)).sum()

    exported = jax.export.export(jax.jit(loss))(*(jax.ShapeDtypeStruct(s, np.float64) for s in shapes))
    restored = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    arrays = sample()
    for part in (slice(None), slice(0, 1)):
        inputs = tuple(jnp.asarray(x[part]) for x in arrays.values())
        got, expected = (jax.grad(f, (0, 1, 2))(*inputs) for f in (restored, loss))
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-12)
