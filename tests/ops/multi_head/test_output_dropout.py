"""Dropout of the output, and beside that of the probabilities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from ops.multi_head.calls import QUICK, draw, inputs, layer

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention


@pytest.mark.thorough
def test_output_dropout_exports_with_a_symbolic_batch():
    (b,) = jax.export.symbolic_shape("b")
    run = partial(multi_head_attention, layer(), out_dropout_rate=0.5, dropout_key=jax.random.key(0))
    shapes = (jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in inputs())
    exported = jax.export.export(jax.jit(run))(*shapes)
    assert_close(exported.call(*inputs()), run(*inputs()), 1e-12)


def test_output_dropout_without_a_kernel_multiplies_by_the_same_factor_in_both_directions():
    """In bfloat16: 1 / (1 - 0.1) rounds to 1.109 there."""
    x = jnp.ones((1, 64, 64), jnp.bfloat16)

    def run(value):
        return multi_head_attention(
            MultiHeadAttentionParams(),
            x,
            x,
            value,
            num_heads=1,
            local_window_size=0,
            out_dropout_rate=0.1,
            dropout_key=jax.random.key(1),
        )

    value = (draw(1, 64, 64) + 3).astype(jnp.bfloat16)
    out, pullback = jax.vjp(run, value)
    np.testing.assert_array_equal(out, pullback(value)[0])


def test_both_dropouts_of_a_part_are_those_of_the_whole():
    """The part holds the second batch entry's queries from the third on, as `dropout_offset` tells it."""
    x = draw(2, 4, 6)
    rates = dict(num_heads=2, dropout_rate=0.4, out_dropout_rate=0.5, dropout_key=jax.random.key(2))
    run = partial(multi_head_attention, MultiHeadAttentionParams(), **rates)
    both = lambda: (run(x[1:, 2:], x[1:], dropout_offset=(1, 0, 2, 0)), run(x, x)[1:, 2:])
    assert_close(*jax.jit(both, compiler_options=QUICK)(), 1e-12)


def test_a_gradient_with_appended_rows_draws_no_mask_twice():
    """Fused into all that reads the factors, the cipher made derivatives of order 3 compile for minutes."""
    q, o = jnp.ones((4, 2, 2)), jnp.ones((2, 2, 4))
    params = MultiHeadAttentionParams(query_kernel=q, key_kernel=q, value_kernel=q, out_kernel=o)
    options = {"add_zero_attn": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(0)}
    loss = jax.jit(jax.grad(lambda x: (multi_head_attention(params, x, **options) ** 2).sum()))
    lowered = loss.lower(jnp.ones((2, 3, 4)))
    written = lowered.as_text().count("stablehlo.shift_left")
    assert 0 < lowered.compile().as_text().count(" shift-left(") <= written
