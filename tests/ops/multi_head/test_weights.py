"""Attention weights that come back: before dropout, with a sink, in a loss of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.multi_head.calls import B, N, S, T, draw, inputs, layer, leaves_close, vjp

from jax_attn_bwd import multi_head_attention, multi_head_attention_bwd
from jax_attn_bwd.ops.multi_head import reference


@thorough
def test_the_output_is_the_same_with_weights_residual_and_save():
    params, x = layer(), inputs()
    dropped = dict(dropout_rate=0.3, out_dropout_rate=0.2, dropout_key=jax.random.key(4))
    run = partial(multi_head_attention, params, *x, add_zero_attn=True, **dropped)
    out = run()
    for options in (
        dict(return_weights=True),
        dict(return_residual=True),
        dict(return_weights=True, save="probs"),
    ):
        assert_close(run(**options)[0], out, 1e-14)
    assert_close(jax.jit(run)(), out, 1e-14)


def test_weights_are_those_before_dropout_and_sum_to_one_with_the_sink():
    params, x = layer("sink"), inputs()
    dropped = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
    _, weights = multi_head_attention(params, *x, add_zero_attn=True, return_weights=True, **dropped)
    assert weights.shape == (B, N, T, S + 2)
    assert_close(weights.sum(-1), jnp.ones((B, N, T)), 1e-14)
    _, mean = multi_head_attention(params, *x, add_zero_attn=True, return_weights=True, average_weights=True)
    assert_close(mean, weights.mean(1), 1e-14)


@thorough
@pytest.mark.parametrize("save", ["inputs", "qkv", "probs"])
def test_a_loss_of_the_weights_alone(save):
    """The output projection, to which no cotangent leads, has the gradient 0."""
    params, x = layer(), inputs()
    dweights = draw(B, N, T, S + 1, seed=3)

    def loss(function, params, **options):
        return (function(params, *x, is_causal=True, **options)[1] * dweights).sum()

    got = jax.grad(partial(loss, multi_head_attention))(params, return_weights=True, save=save)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.grad(partial(loss, reference.multi_head_attention))(params)
    leaves_close(got, expected)
    plain = multi_head_attention_bwd(
        None, params, *x, is_causal=True, dweights=dweights, save=save, wrt="params"
    )
    leaves_close(plain.params, expected)
    assert not any(jnp.any(g) for g in jax.tree.leaves(multi_head_attention_bwd(None, params, *x)))


def test_weights_of_a_query_that_sees_nothing_beside_a_sink_of_minus_infinity():
    params = layer("bias_k", "bias_v", sink=jnp.asarray([-jnp.inf, 1.0, 2.0, 3.0]))
    mask = jnp.asarray(np.arange(T)[:, None] != 2)

    def weights(sink):
        given = params._replace(sink=sink)
        return multi_head_attention(given, *inputs(), mask=mask, return_weights=True)[1]

    out, (dsink,) = vjp(weights, params.sink)
    assert dsink[0] == 0
    assert jnp.isfinite(dsink).all()
    assert not out[:, :, 2].any()
