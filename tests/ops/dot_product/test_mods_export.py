"""Masks and scores as functions, exported for sizes that are not known."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, thorough

from jax_attn_bwd import dot_product_attention, mods


@thorough
def test_export_of_documents_with_symbolic_sizes():
    """What is read of an array of unknown length is not bounded."""
    b, t = jax.export.symbolic_shape("b, t")
    shapes = ((b, t, 2, 4), np.float32), ((b, t), np.int32), ((2,), np.float32)

    def loss(x, ids, slopes):
        modified = {"mask_mod": mods.causal & mods.document, "score_mod": mods.alibi}
        out = dot_product_attention(x, x, x, **modified, mod_args=(ids, slopes))
        return (out * jnp.cos(jnp.arange(4, dtype=out.dtype)).reshape(1, 1, 1, 4)).sum()

    function = jax.jit(jax.value_and_grad(loss, (0, 2)))
    exported = jax.export.export(function)(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((3, 11, 2, 4)), np.sort(rng.integers(0, 3, (3, 11)), -1)
    args = np.float32(x), np.int32(ids), np.float32([0.3, 1.2])
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), exported.call(*args), function(*args))
