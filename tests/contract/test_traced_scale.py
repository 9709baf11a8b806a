"""A scale of logits that is traced or differentiated, where the operators with a `scale` take it in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn_bwd as jab
from jax_attn_bwd import MultiHeadAttentionParams
from jax_attn_bwd.check import quick_jit

GRAPH = jab.BipartiteCSC.from_coo([0, 2, 1, 1], [1, 0, 1, 0], 3, 2)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def dense(scale, x, call=jab.dot_product_attention, **options):
    return call(x["query"], x["key"], x["value"], scale=scale, is_causal=True, **options)


def dense_bwd(scale, x, dout):
    out, lse = dense(scale, x, return_residual=True)
    call = lambda *arrays, **options: jab.dot_product_attention_bwd(
        dout, *arrays, out=out, lse=lse, **options
    )
    return dense(scale, x, call)._asdict()


def layer(scale, x, call=jab.multi_head_attention, **options):
    params = MultiHeadAttentionParams(**{n: a for n, a in x.items() if n.endswith(("_kernel", "_bias"))})
    return call(params, x["query"], scale=scale, **options)


def layer_bwd(scale, x, dout):
    grads = layer(scale, x, lambda *arrays, **options: jab.multi_head_attention_bwd(dout, *arrays, **options))
    return grads.params._asdict() | {"query": grads.query}


def graph(scale, x, call=jab.graph_transformer_attention):
    return call(GRAPH, x["query"], x["key"], x["value"], num_heads=2, scale=scale)


def graph_bwd(scale, x, dout):
    return graph(scale, x, lambda *a, **o: jab.graph_transformer_attention_bwd(dout, *a, **o))._asdict()


HEADS = {"query": draw(2, 5, 4, 3), "key": draw(2, 5, 2, 3, seed=1), "value": draw(2, 5, 2, 6, seed=2)}
NODES = {"query": draw(2, 4), "key": draw(3, 4, seed=1), "value": draw(3, 6, seed=2)}
LAYER = {"query": draw(2, 5, 7), "query_kernel": draw(7, 4, 3, seed=1), "query_bias": draw(4, 3, seed=2)}
LAYER |= {"key_kernel": draw(7, 2, 3, seed=3), "out_kernel": draw(4, 7, 6, seed=4)}


@pytest.mark.parametrize(
    ("call", "bwd", "arrays"),
    [(dense, dense_bwd, HEADS), (layer, layer_bwd, LAYER), (graph, graph_bwd, NODES)],
    ids=["dot_product_attention", "multi_head_attention", "graph_transformer_attention"],
)
def test_a_traced_scale_is_that_number_and_has_a_gradient(call, bwd, arrays):
    known, step = 0.37, 1e-5
    dout = draw(*jax.eval_shape(call, known, arrays).shape, seed=9)
    loss = lambda scale, arrays: (call(scale, arrays) * dout).sum()

    def all_of(scale, arrays):
        by_number = jax.value_and_grad(lambda arrays: loss(known, arrays))(arrays)
        return jax.value_and_grad(loss, (0, 1))(scale, arrays), by_number, bwd(scale, arrays, dout)

    run = quick_jit(all_of)
    (value, (of_scale, of_arrays)), (expected, of_number), written = run(known, arrays)
    # the same value and gradients as with the number, and the slope between two numbers
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    slope = (run(known + step, arrays)[0][0] - run(known - step, arrays)[0][0]) / (2 * step)
    np.testing.assert_allclose(of_scale, slope, rtol=1e-7)
    for name, x in of_arrays.items():
        np.testing.assert_allclose(x, of_number[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(x, written[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [np.float32(0.25), np.asarray(0.25), jnp.asarray(0.25, "bfloat16"), 1])
def test_a_known_scale_is_a_number_of_any_kind(scale):
    expected = dense(float(scale), HEADS)
    np.testing.assert_array_equal(dense(scale, HEADS), expected)


def test_padding_reaches_no_gradient_of_a_scale():
    x = HEADS | {"query": HEADS["query"].at[:, 3:].set(jnp.nan)}
    of_scale = quick_jit(jax.grad(lambda scale, x: dense(scale, x, query_seq_lengths=3).sum()))
    np.testing.assert_array_equal(of_scale(0.5, x), of_scale(0.5, HEADS))


def test_a_narrow_query_is_multiplied_in_float32():
    q, k, v = (x.astype("bfloat16") for x in HEADS.values())
    scale = jnp.float32(1 / 3)  # which bfloat16 does not hold
    got = jax.jit(lambda scale: jab.dot_product_attention(q, k, v, scale=scale))(scale)
    expected = jab.dot_product_attention((q.astype("float32") * scale).astype("bfloat16"), k, v, scale=1.0)
    assert got.dtype == "bfloat16"
    np.testing.assert_array_equal(got, expected)


def test_heads_that_are_not_projected_take_a_number():
    call = jax.jit(
        lambda scale, x: jab.multi_head_attention(MultiHeadAttentionParams(), x, scale=scale, num_heads=2)
    )
    with pytest.raises(TypeError, match=r"scale must be known .*query_kernel is None, .*; multiply query"):
        call(0.5, jnp.ones((1, 3, 4)))
