"""`mha_simple_n2n` against segment sums."""

import jax
import jax.numpy as jnp
import pytest
from compat.cugraph.calls import DIM, N_DST, N_SRC, NNZ, D, H, cotangent, structure
from helpers import assert_close, thorough

from jax_attn_bwd.compat import cugraph


@pytest.mark.parametrize(
    ("concat", "edge", "norm"),
    [(True, True, True), pytest.param(True, False, False, marks=thorough), (False, True, False)],
)
def test_mha_simple(rng, edges, concat, edge, norm):
    src, dst = edges
    key, value = rng.standard_normal((2, N_SRC, DIM))
    query, e = rng.standard_normal((N_DST, DIM)), rng.standard_normal((NNZ, DIM))
    bias, graph = rng.standard_normal((NNZ, H)), structure(edges)
    e = e if edge else None
    bias = bias if norm else None

    def plain(key, query, value, e, bias):
        at = lambda x: jnp.reshape(x, (len(x), H, D))
        k, v, q = at(key)[src], at(value)[src], at(query)[dst]
        k, v = (k, v) if e is None else (k + at(e), v + at(e))
        s = (q * k).sum(-1) / (D**0.5 if norm else 1.0)
        s = s if bias is None else s + bias
        terms = jnp.exp(s - s.max())
        p = terms / jax.ops.segment_sum(terms, dst, N_DST)[dst]
        out = jax.ops.segment_sum(p[..., None] * v, dst, N_DST)
        return out.reshape(N_DST, DIM) if concat else out.mean(1)

    operands = tuple(None if x is None else jnp.asarray(x) for x in (key, query, value, e, bias))
    g = jnp.asarray(cotangent(rng, cugraph.mha_params(H, concat)))
    expected, pullback = jax.vjp(plain, *operands)
    key, query, value, e, bias = operands
    arguments = (key, query, value, graph, H, concat, e, norm, bias)
    assert_close(cugraph.mha_simple_n2n(*arguments), expected, 1e-13)
    grads = cugraph.mha_simple_n2n_bwd(g, *arguments)
    for got, gradient, name in zip(grads, pullback(g), grads._fields, strict=True):
        assert (got is None) == (gradient is None)
        if gradient is not None:
            assert_close(got, gradient, 1e-12, name)
    refused = cugraph.mha_simple_n2n_bwd(g, *arguments, grad_query_emb=None, grad_edge_emb=False)
    assert refused.grad_query_emb is None
    assert refused.grad_edge_emb is None
    assert_close(refused.grad_key_emb, grads.grad_key_emb, 1e-13)
