"""What is saved, and what is never formed."""

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import saved_arrays
from ops.multi_head.calls import HV, B, H, K, N, S, T, draw, inputs, layer

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention
from jax_attn_bwd.ops.dot_product import plan as planning


@pytest.mark.parametrize("save", ["inputs", "qkv", "probs"])
def test_what_is_saved(save):
    """The inputs, the heads' output and lse with its rounding; heads and probabilities only where asked."""
    params, x = layer(), inputs()
    _, pullback = jax.vjp(partial(multi_head_attention, save=save), params, *x)
    kept = Counter(a.shape for a in saved_arrays(pullback))
    kept -= Counter(a.shape for a in jax.tree.leaves((params, x)))
    sizes = sorted(math.prod(shape) for shape in kept.elements())
    expected = [B * T * N * HV, B * T * N, B * T * N]
    if save != "inputs":
        expected += [B * T * N * H, B * S * K * H, B * S * K * HV]
    if save == "probs":
        expected += [B * N * T * S]
    assert sizes == sorted(expected)


def test_nothing_of_size_t_times_s(monkeypatch):
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)  # no plane counts as small
    long = dict(
        zip(("query", "key", "value"), (draw(1, 640, 4), draw(1, 704, 4), draw(1, 704, 4)), strict=True)
    )
    params = MultiHeadAttentionParams(draw(4, 1, 4), None, draw(4, 1, 4), None, draw(4, 1, 4), None,
                                      draw(1, 4, 4), None, draw(1, 4), draw(1, 4), draw(1))  # fmt: skip

    def loss(params, arrays, **options):
        return jnp.sin(multi_head_attention(params, **arrays, is_causal=True, **options)).sum()

    jaxpr = lambda **o: str(jax.make_jaxpr(jax.grad(partial(loss, **o)))(params, long))
    whole = "640,704]"
    assert whole not in jaxpr()
    assert whole in jaxpr(save="probs")
