"""Errors about what is traced, too large, explained or sharded: their types, and words that help a reader."""

import jax
import jax.numpy as jnp
import pytest
from contract.errors import (
    STATIC,
    attention,
    cann_backward,
    cann_forward,
    check,
    graph_attention,
    graph_transformer_attention,
    multi_head_attention,
    ones,
    softmax,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_attn_bwd


def test_traced_options():
    """A traced rate or flag is refused by name, not by a tracer error of JAX."""
    for argument, words in (
        ("dropout_rate", "dropout_rate must be a Python float, got a traced array"),
        ("is_causal", "is_causal must be a Python bool"),
        ("local_window_size", "local_window_size must be a non-negative int"),
    ):
        traced = jax.jit(lambda x, argument=argument: attention(**{argument: x}))
        words = f"{words}.*{STATIC}"
        check(lambda f=traced: f(jnp.float32(0.5)), "dot_product_attention", TypeError, words, {})
    for name, exception, call in (
        ("scaled_masked_softmax", TypeError, lambda n: softmax(axis=n)),
        ("graph_attention", TypeError, lambda n: graph_attention(num_heads=n)),
        ("multi_head_attention", TypeError, lambda n: multi_head_attention(num_heads=n)),
    ):
        traced = jax.jit(call)
        check(lambda f=traced: f(2), name, exception, STATIC, {})


TOO_LARGE = (  # for float32, which float32 and bfloat16 are accumulated in
    ("multi_head_attention", "scale", multi_head_attention, {"num_heads": 2}),
    ("graph_transformer_attention", "scale", graph_transformer_attention, {"num_heads": 2}),
    ("graph_attention", "alpha", graph_attention, {"num_heads": 2}),
    ("cann.scaled_masked_softmax", "scale", cann_forward, {}),
    ("cann.scaled_masked_softmax_backward", "scale", cann_backward, {}),
)


@pytest.mark.parametrize(("operator", "argument", "call", "options"), TOO_LARGE)
def test_a_number_that_float32_cannot_hold(operator, argument, call, options):
    words = rf"{argument} must be finite in float32, got 1e\+39"
    check(call, operator, ValueError, words, {argument: 1e39} | options)


def test_explain_of_a_function_without_operator():
    with pytest.raises(ValueError, match=r"explain: .* calls no operator of jax_attn_bwd"):
        jax_attn_bwd.explain(jnp.sin, jnp.ones(3))


@pytest.fixture
def explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def on_mesh(specs: dict, **sizes):
    """Query, key and value of a batch of 4, sharded."""
    n, k = sizes.get("N", 8), sizes.get("K", 4)
    shapes = {"query": (4, 12, n, 5), "key": (4, 16, k, 5), "value": (4, 16, k, 3)}
    return {name: jax.device_put(ones(*shapes[name]), specs[name]) for name in shapes}


def alike(spec):
    return dict.fromkeys(("query", "key", "value"), spec)


def test_explicit_mesh_with_a_sharded_head_size(explicit_mesh):
    arrays = on_mesh(alike(P("b")))
    arrays["query"] = jax.device_put(ones(4, 12, 8, 8), P("b", None, None, "h"))
    arrays["key"] = jax.device_put(ones(4, 16, 4, 8), P("b"))
    words = "query must not be sharded along .* head size, got .*'h'.*; reshard it"
    check(attention, "dot_product_attention", ValueError, words, arrays)


def test_explicit_mesh_with_operands_sharded_differently(explicit_mesh):
    arrays = on_mesh(alike(P("b")) | {"value": P(None)})
    words = "value must be sharded like query, .*'b'.*, in batch and heads, got .*; reshard it"
    check(attention, "dot_product_attention", ValueError, words, arrays)


def test_explicit_mesh_whose_head_axis_does_not_divide_the_key_heads(explicit_mesh):
    """8 query heads split over 4, 2 key heads: "reshard it" would be advice nobody can follow."""
    arrays = on_mesh(alike(P("b")) | {"query": P("b", None, "h")}, K=2)
    words = "key heads K must be a multiple of the size 4 of mesh axis 'h', got 2; .*repeat key"
    check(attention, "dot_product_attention", ValueError, words, arrays)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"query_kernel": P(None, "b")}, r"params\.query_kernel .* along N over 'b', which shards the batch"),
        ({"value_bias": P(("h", "b"))}, r"params\.value_bias .* along K over 'b', which shards the batch"),
        ({"out_kernel": P(None, None, "b")}, r"params\.out_kernel .* along Eo over 'b', which shards the"),
        (
            {n: P(None, "h") for n in ("query_kernel", "key_kernel", "value_kernel")}
            | {"out_kernel": P("h"), "out_bias": P("h")},
            r"params\.out_bias .* along Eo over 'h', which shards heads",
        ),
    ],
    ids=["heads", "pair", "width", "heads_and_width"],
)
def test_explicit_mesh_with_one_axis_for_two_things(explicit_mesh, place, words):
    """Once it is resharded the layer runs, forward and backward."""
    kernels = dict.fromkeys(("query_kernel", "key_kernel", "value_kernel"), ones(8, 8, 4))
    rest = {"value_bias": ones(8, 4), "out_kernel": ones(8, 4, 16), "out_bias": ones(16)}
    query = jax.device_put(ones(4, 6, 8), P("b"))

    def gradients(specs):
        arrays = {n: jax.device_put(x, specs.get(n, P())) for n, x in (kernels | rest).items()}
        params = jax_attn_bwd.MultiHeadAttentionParams(**arrays)
        loss = lambda params: jnp.sin(jax_attn_bwd.multi_head_attention(params, query)).sum()
        return jax.grad(loss)(params)

    with pytest.raises(ValueError, match=rf"{words}.*, got .*; reshard it .*two axes of the mesh"):
        gradients(place)
    *_, last = place
    assert getattr(gradients(place | {last: P()}), last).sharding.is_fully_replicated
