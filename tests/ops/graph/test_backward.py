"""The plain backward functions, and `dst=None`."""

from functools import partial

import chex
import jax
from helpers import assert_close, assert_trees_close
from ops.graph.calls import FUNCTIONS, QUICK, D, H, each_kind, inputs, normal, random_edges

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC


def test_dst_none_means_the_first_sources():
    src, dst = random_edges()
    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    x, a, dout = normal(7, H * D), normal(2 * H * D, seed=1), normal(5, H * D, seed=2)

    @partial(jax.jit, compiler_options=QUICK)
    def run(x, a, dout):
        both = []
        for take in (lambda x: None, lambda x: x[:5]):
            call = lambda x, a, take=take: jab.graph_attention(graph, x, take(x), a, num_heads=H)
            out, pullback = jax.vjp(call, x, a)
            both.append((out, *pullback(dout)))
        return *both, jab.graph_attention_bwd(dout, graph, x, None, a, num_heads=H)

    shared, spelt, grads = run(x, a, dout)
    assert grads.dst is None
    chex.assert_trees_all_close(shared, spelt, rtol=1e-12, atol=1e-12)
    assert_close(grads.src, spelt[1], 1e-12)
    assert_close(grads.attention_weights, spelt[2], 1e-12)


@each_kind("gatv2")
def test_bwd_recomputes_what_it_is_not_given(kind):
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5)
    function = FUNCTIONS[kind][0]
    backward = getattr(jab, f"{function.__name__}_bwd")
    dout = normal(5, D, seed=5)
    options = {"num_heads": H, "concat_heads": False}

    @partial(jax.jit, compiler_options=QUICK)
    def run(graph, arrays, dout):
        _, pullback = jax.vjp(lambda a: function(graph, **a, **options), arrays)
        out, lse = function(graph, **arrays, num_heads=H, return_residual=True)
        alone = backward(dout, graph, **arrays, **options)
        return pullback(dout)[0], alone, backward(dout, graph, **arrays, **options, out=out, lse=lse)

    expected, *others = run(graph, arrays, dout)
    for grads in others:
        got = {n: x for n, x in grads._asdict().items() if x is not None}
        assert_trees_close(got, expected, 1e-12)
