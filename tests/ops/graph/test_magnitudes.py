"""Scores that are huge and alike, where the logarithm of a sum is lost beside them."""

import jax
import numpy as np
from helpers import assert_close
from ops.graph.calls import FUNCTIONS, D, H, each_kind, inputs, random_edges, values_and_gradients

from jax_attn_bwd import BipartiteCSC

HUGE = 2.0**22  # next to it, float32 has steps of 1/2


def huge(kind):
    """(arrays, options): scores HUGE + 0, 1 or 2, exact in float32."""
    rng = np.random.default_rng(0)
    small = lambda *shape: rng.integers(0, 3, shape).astype(np.float32)
    arrays = {name: np.array(x) for name, x in inputs(kind, 7, 5, dtype=np.float32).items()}
    if kind == "transformer":
        arrays |= {"query": small(5, H * D) / 2, "key": small(7, H * D)}
        return arrays | {"score_bias": np.full((23, H), HUGE, np.float32)}, {"scale": 1.0}
    first = np.arange(H * D) % D == 0  # the one feature of a head that its scores are made of
    arrays["src"][:, first], arrays["dst"][:, first] = small(7, H), HUGE
    arrays["attention_weights"] = np.resize(first, arrays["attention_weights"].shape).astype(np.float32)
    return arrays, {}


@each_kind("gatv2", "transformer")
def test_huge_scores_that_are_nearly_tied(kind):
    """Values, weights and gradients in float32 as in float64."""
    graph = BipartiteCSC.from_coo(*random_edges(), 7, 5)
    narrow, options = huge(kind)
    wide = {name: x.astype(np.float64) for name, x in narrow.items()}
    operator, definition = FUNCTIONS[kind]
    asked = {"return_attention_weights": True, "return_residual": True}
    got = values_and_gradients(operator, narrow, graph=graph, **options, **asked)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = values_and_gradients(definition, wide, graph=graph, **options)
    if kind != "transformer":  # what is summed over the edges and times HUGE
        for found in (got, expected):
            huge_part = np.resize(np.arange(H * D) % D == 0, found["attention_weights"].shape)
            huge_part[: H * D] &= kind == "gatv2"
            found["attention_weights"] = np.where(huge_part, 0, found["attention_weights"])
    for name, x in expected.items():
        assert_close(got[name], x, 1e-5, name)
