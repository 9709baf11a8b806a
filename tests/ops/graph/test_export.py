"""Export with symbolic widths and a graph as an argument."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, assert_trees_close
from jax import export
from ops.graph.calls import FUNCTIONS, D, H, every_kind, inputs

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC


@pytest.mark.thorough
@every_kind
def test_export_of_symbolic_widths(kind):
    """And of a graph as an argument, through bytes and back."""
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    (d,) = export.symbolic_shape("d")
    given = {n: x for n, x in inputs(kind, 3, 2).items() if n != "edge"}
    options = {"num_heads": H} | ({"scale": 0.5} if kind == "transformer" else {})

    def step(graph, arrays):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, **options), arrays)
        return out, pullback(jnp.cos(out))[0]

    def abstract(x):
        heads = x.shape[-1] // D
        return jax.ShapeDtypeStruct((*x.shape[:-1], heads * d), x.dtype)

    shapes = jax.tree.map(abstract, given)
    exported = export.deserialize(export.export(jax.jit(step))(graph, shapes).serialize())
    out, grads = exported.call(graph, given)
    expected, expected_grads = step(graph, given)
    assert_close(out, expected, 1e-12)
    assert_trees_close(grads, expected_grads, 1e-12)


def test_symbolic_head_size_asks_for_a_scale():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    (d,) = export.symbolic_shape("d")
    q, k = (jax.ShapeDtypeStruct((n, 2 * d), jnp.float32) for n in (2, 3))
    with pytest.raises(ValueError, match="scale must be given where the size of a head is symbolic"):
        export.export(jax.jit(lambda q, k: jab.graph_transformer_attention(graph, q, k, k, num_heads=2)))(
            q, k
        )
