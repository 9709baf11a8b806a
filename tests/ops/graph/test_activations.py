"""Every activation of the scores, with its slope at the kink."""

import jax
import pytest
from helpers import assert_trees_close, thorough
from ops.graph.calls import FUNCTIONS, D, H, inputs, normal, random_edges, values_and_gradients

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph.spec import ACTIVATIONS

KEPT = [("gat", name) for name in ("leaky_relu", "linear", "relu", "scalar")]
ALL = [*(("gat", name) for name in ACTIVATIONS), ("gatv2", "leaky_relu")]  # v2 applies the same functions


@pytest.mark.parametrize(
    ("kind", "activation"), [*KEPT, *(pytest.param(*x, marks=thorough) for x in ALL if x not in KEPT)]
)
def test_activations(kind, activation):
    """With one source of zeros beside one destination of zeros: at the kink as in `jax.nn`."""
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5, edge=len(src))
    arrays |= {"src": arrays["src"].at[src[0]].set(0), "dst": arrays["dst"].at[dst[0]].set(0)}
    arrays["edge"] = arrays["edge"].at[0].set(0)
    options = {"activation": activation, "alpha": -0.7}
    operator, definition = FUNCTIONS[kind]
    cts = [normal(5, H * D, seed=5)]
    got = values_and_gradients(operator, arrays, cts, graph=graph, **options)

    def plain(**arguments):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return definition(**arguments)[0]

    expected = values_and_gradients(plain, arrays, cts, graph=graph, **options)
    assert_trees_close(got, expected, 1e-12)
