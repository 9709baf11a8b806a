"""NaN where nothing reads it reaches nothing; NaN in a bias is no mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close
from ops.graph.calls import FUNCTIONS, QUICK, D, H, each_kind, inputs, normal, random_edges

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC


def test_nan_in_the_cotangent_of_a_hidden_weight_reaches_nothing():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    query, key, value = normal(2, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)
    bias = jnp.zeros((3, 1)).at[0].set(-jnp.inf)
    options = {"num_heads": 2, "score_bias": bias, "wrt": ("query", "key", "value")}
    dweights = normal(3, 2, seed=3)
    given = (None, graph, query, key, value)
    clean = jab.graph_transformer_attention_bwd(*given, dweights=dweights, **options)
    dirty = jab.graph_transformer_attention_bwd(*given, dweights=dweights.at[0].set(jnp.nan), **options)
    for name in options["wrt"]:
        assert_close(getattr(dirty, name), getattr(clean, name), 0, name)


def test_the_tangent_of_a_bias_that_hides_is_not_read():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    query, key, value, bias = normal(2, 4), normal(3, 4, seed=1), normal(3, 4, seed=2), normal(3, 2, seed=3)
    call = lambda bias: jab.graph_transformer_attention(
        graph, query, key, value, num_heads=2, score_bias=bias, forward_mode=True
    )
    push = jax.jit(lambda along: jax.jvp(call, (bias.at[0, 0].set(-jnp.inf),), (along,))[1])
    clean, dirty = (push(normal(3, 2, seed=4).at[0, 0].set(x)) for x in (0, jnp.nan))
    assert np.abs(clean[0, 2:]).min() > 0  # of the head that sees two edges
    assert_close(dirty, clean, 0)


def test_nan_in_a_bias_is_no_mask():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    bias = jnp.zeros((3, 1)).at[0].set(jnp.nan)
    query, key = normal(2, 4), normal(3, 4, seed=1)
    out = jab.graph_transformer_attention(graph, query, key, key, num_heads=2, score_bias=bias)
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()


@each_kind("transformer")
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_poison_that_no_edge_refers_to_reaches_nothing(kind, order):
    """NaN in nodes without edges, in their dout, in edge data of the padding, behind a bias of -inf."""
    src, dst = random_edges(nnz=20)
    src[:3], dst[:3] = 5, 0  # source 5 has edges, all hidden by the bias of the transformer
    graph = BipartiteCSC.from_coo(src, dst, 7, 5, capacity=26)
    arrays = inputs(kind, 7, 5, edge=26)
    clean, dirty = dict(arrays), dict(arrays)
    edge = np.array(arrays["edge"])
    edge[20:] = np.nan
    dirty["edge"] = jnp.asarray(edge)
    first = 5 if kind == "transformer" else 6
    for name, nodes in {"src": first, "key": first, "value": first, "dst": 3, "query": 3}.items():
        if name in dirty:
            dirty[name] = dirty[name].at[nodes:].set(jnp.nan)
    if kind == "transformer":
        bias = normal(26, H, seed=7).at[:3].set(-jnp.inf)
        clean["score_bias"] = dirty["score_bias"] = bias
    dout = normal(5, H * D, seed=5)
    bad_dout = dout.at[3:].set(jnp.nan)

    def step(arrays, dout):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
        return {"out": out} | pullback(dout)[0]

    def again(arrays, dout):
        def form(arrays, dout):
            found = step(arrays, dout)
            return sum(jnp.vdot(x, normal(*x.shape, seed=8)) for x in found.values())

        return jax.grad(form)(arrays, dout)

    run = jax.jit(step if order == 1 else again, compiler_options=QUICK)
    assert_trees_close(run(dirty, bad_dout), run(clean, dout), 1e-12)
