"""Blocks of keys make up the whole: out and lse, and gradients by the row values of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.programs import running
from helpers import OPERATORS, assert_close, assert_trees_close, thorough

from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result

dense = next(o for o in OPERATORS if o.name == "dot_product_attention")
T, S, N, K, H = 10, 14, 4, 2, 3
WANTED = ("query", "key", "value")
FAR = Mask(  # no query sees a key
    is_causal=True,
    query_positions=jnp.zeros((1, T), jnp.int32),
    key_value_positions=jnp.ones((1, S), jnp.int32),
)


def operands(rng, **more):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    return Operands(draw(2, T, N, H), draw(2, S, K, H), draw(2, S, K, H + 1), **more)


def cut(whole, size):
    """The blocks of `size` keys; who sees whom is told by positions."""
    for start in range(0, S, size):
        keys = slice(start, start + size)
        yield whole._replace(
            key=whole.key[:, keys],
            value=whole.value[:, keys],
            mask=whole.mask.replace(
                query_positions=jnp.arange(2, T + 2, dtype=jnp.int32)[None],
                key_value_positions=jnp.arange(S, dtype=jnp.int32)[None, keys],
            ),
            sink=whole.sink if start == 0 else None,
        )


def merged(results):
    """The row values of blocks of disjoint keys together."""
    lse = jax.nn.logsumexp(jnp.stack([r.lse for r in results]), axis=0)
    shares = [jnp.exp(r.lse - jnp.where(lse == -jnp.inf, 0, lse))[..., None] * r.out for r in results]
    return results[0]._replace(out=sum(shares), lse=lse, lse_rounding=None)


@pytest.mark.parametrize("with_sink", [pytest.param(False, marks=thorough), True])
def test_blocks_make_up_the_whole(with_sink, rng):
    options = Options(scale=0.7, logits_soft_cap=2.0)
    sink = jnp.asarray(rng.standard_normal(N)) if with_sink else None
    one = operands(rng, sink=sink, mask=Mask(is_causal=True, window=(5, 0)))
    dout, dlse = (
        jnp.asarray(rng.standard_normal((2, T, N, H + 1))),
        jnp.asarray(rng.standard_normal((2, T, N))),
    )
    wanted = (*WANTED, "sink") if with_sink else WANTED

    @jax.jit
    def run(one):
        (whole,) = cut(one, S)
        plan = blockwise.planned("xla", options, whole)
        result = blockwise.forward(plan, whole)
        grads = blockwise.backward(plan, whole, result, wanted, dout, dlse)
        blocks = list(cut(one, 5))
        plans = [blockwise.planned("xla", options, x) for x in blocks]
        total = merged([blockwise.forward(plan, x) for plan, x in zip(plans, blocks, strict=True)])
        of_blocks = [
            blockwise.backward(plan, x, total, wanted if x.sink is not None else WANTED, dout, dlse)
            for x in blocks
        ]
        return result, grads, total, of_blocks

    result, grads, total, of_blocks = run(one)
    assert_trees_close({"out": total.out, "lse": total.lse}, {"out": result.out, "lse": result.lse}, 1e-13)
    assert_close(sum(g.query for g in of_blocks), grads.query, 1e-12, "query")
    for name in ("key", "value"):
        joined = jnp.concatenate([getattr(g, name) for g in of_blocks], 1)
        assert_close(joined, getattr(grads, name), 1e-12, name)
    if with_sink:
        assert_close(of_blocks[0].sink, grads.sink, 1e-12, "sink")


@thorough
def test_a_block_that_nothing_sees_adds_nothing(rng):
    hidden = operands(rng, mask=FAR)
    plan = blockwise.planned("xla", Options(scale=1.0), hidden)
    result = blockwise.forward(plan, hidden)
    assert not result.out.any()
    assert (result.lse == -jnp.inf).all()
    total = result._replace(out=jnp.ones_like(result.out), lse=jnp.ones_like(result.lse), lse_rounding=None)
    grads = blockwise.backward(plan, hidden, total, WANTED, jnp.ones_like(result.out))
    assert not any(x.any() for x in (grads.query, grads.key, grads.value))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic_tpu", marks=pytest.mark.kernel)])
def test_a_sink_of_a_block_that_nothing_sees_has_the_gradient_of_the_row(implementation, rng):
    """dsink = - sum exp(sink - lse) <dout, out>, with lse and out of the keys elsewhere."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    hidden = Operands(
        *(draw(2, n, heads, 8) for n, heads in ((T, N), (S, K), (S, K))), sink=draw(N), mask=FAR
    )
    out, lse, dout = draw(2, T, N, 8), 3 + draw(2, T, N), draw(2, T, N, 8)
    total = Result(out, lse, None)
    with running(dense, implementation):
        plan = blockwise.plan("test", implementation, Options(scale=1.0), hidden)
        grads = blockwise.backward(plan, hidden, total, (*WANTED, "sink"), dout)
    expected = -(jnp.exp(hidden.sink[None, None] - lse) * (dout * out).sum(-1)).sum((0, 1))
    assert_close(grads.sink, expected, 1e-6, "sink")
    assert not any(x.any() for x in (grads.query, grads.key, grads.value))


@thorough
def test_whole_planes_agree_with_tiles(rng):
    """The same equations: probabilities times values, and gradients, with dropout and a bias."""
    options = Options(scale=0.7, dropout_rate=0.3)
    bias = jnp.asarray(np.where(rng.random((2, N, T, S)) < 0.2, -np.inf, rng.standard_normal((2, N, T, S))))
    words = jnp.asarray([3, 5], jnp.uint32)
    given = operands(rng, bias=bias, mask=Mask(is_causal=True), dropout_words=words)
    dout = jnp.asarray(rng.standard_normal((2, T, N, H + 1)))
    wanted = (*WANTED, "bias")

    @jax.jit
    def run(given):
        plan, plane = blockwise.planned("xla", options, given), blockwise.plane(options, given)
        result = blockwise.forward(plan, given)
        tiles = blockwise.backward(plan, given, result, wanted, dout)
        p, z = blockwise.probabilities(plane, result), blockwise.dropout_factors(options, given)
        v = jnp.swapaxes(given.value, 1, 2)
        out = blockwise.merge_heads(jnp.einsum("bkgts,bksh->bkgth", z * p, v))
        split = blockwise.split_heads(dout, N // K)
        dp = plane.through_values(split)
        delta = (p * dp).sum(-1, keepdims=True)
        planes = blockwise.gradients(plane, wanted, p, split, dp, delta)
        return {"out": out, **planes}, {"out": result.out, **tiles._asdict()}

    got, expected = ({n: x for n, x in side.items() if x is not None} for side in run(given))
    assert_trees_close(got, expected, 1e-12)
    assert blockwise.dropout_factors(dataclasses.replace(options, dropout_rate=0.0), given) is None
