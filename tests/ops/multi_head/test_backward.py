"""The plain backward: its residual, shared inputs, and what is asked for."""

import ast
import re
from functools import partial

import jax
import pytest
from helpers import assert_close, thorough
from ops.multi_head.calls import EO, EQ, HV, QUICK, B, H, K, T, draw, inputs, layer, leaves_close, vjp

from jax_attn_bwd import multi_head_attention, multi_head_attention_bwd


@pytest.mark.parametrize(
    "save", [*(pytest.param(save, marks=thorough) for save in ("inputs", "qkv")), "probs"]
)
def test_plain_backward_with_the_residual_of_the_forward(save):
    params, x = layer(), inputs()
    options = dict(save=save, is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(1))

    @partial(jax.jit, compiler_options=QUICK)
    def run(params, *x):
        out, residual = multi_head_attention(params, *x, return_residual=True, **options)
        dout = draw(*out.shape, seed=9)
        again = multi_head_attention_bwd(dout, params, *x, **options)
        return again, multi_head_attention_bwd(dout, params, *x, residual=residual, **options)

    again, got = run(params, *x)
    _, expected = vjp(partial(multi_head_attention, **options), params, *x)
    for grads in (got, again):
        leaves_close((grads.params, grads.query, grads.key, grads.value), expected)


@thorough
def test_plain_backward_puts_shared_inputs_together():
    params = layer(key_kernel=draw(EQ, K, H), value_kernel=draw(EQ, K, HV))
    x = draw(B, T, EQ)
    out, (_, dx) = vjp(partial(multi_head_attention), params, x)
    dout = draw(*out.shape, seed=9)
    run = jax.jit(lambda *x: multi_head_attention_bwd(dout, params, *x), compiler_options=QUICK)
    lone, apart = run(x), run(x, x, x)
    assert lone.key is None
    assert lone.value is None
    assert_close(lone.query, dx, 1e-12)
    assert_close(apart.query + apart.key + apart.value, dx, 1e-12)
    some = multi_head_attention_bwd(dout, params, x, wrt=("params",))
    assert some.query is None
    leaves_close(some.params, lone.params)


@pytest.mark.parametrize(
    ("wrt", "most"), [("out_bias", 0), ("out_kernel", 1), (("out_kernel", "out_bias"), 1)], ids=str
)
def test_gradients_of_the_output_projection_alone_take_no_other_product(wrt, most):
    params, x = layer(), inputs()
    *_, residual = multi_head_attention(params, *x, return_residual=True)
    backward = partial(multi_head_attention_bwd, residual=residual, wrt=wrt)
    program = str(jax.make_jaxpr(lambda dout: backward(dout, params, *x))(draw(B, T, EO)))
    assert program.count("dot_general") == most


def test_products_sum_axes_in_the_order_in_which_they_lie():
    """So that heads and head size are one axis to XLA, which turns both factors for any other order."""
    params, x = layer(), inputs()
    step = lambda *args: jax.vjp(multi_head_attention, *args)[1](draw(B, T, EO))
    program = str(jax.make_jaxpr(step)(params, *x))
    summed = re.findall(r"dimension_numbers=\(\((\[.*?\]), (\[.*?\])\)", program)
    axes = [ast.literal_eval(factor) for product in summed for factor in product]
    assert max(map(len, axes)) > 1
    assert axes == [sorted(one) for one in axes]


def test_a_residual_has_no_gradient():
    params, x = layer(), inputs()

    def loss(params):
        return multi_head_attention(params, *x, return_residual=True)[1].lse.sum()

    with pytest.raises(NotImplementedError, match="residual of return_residual has no gradient"):
        jax.grad(loss)(params)
