"""Masks and scores as functions: which tiles are visited, and gradients of what the functions read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, quick_jit, saved_arrays, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention, dot_product_attention_bwd, mods
from jax_attn_bwd.ops.dot_product import mod_functions, reference, visibility
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.arguments import prepare
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Tiles
from jax_attn_bwd.ops.dot_product.portable import tiles
from jax_attn_bwd.ops.dot_product.spec import Sizes

N = 96
IDS = np.repeat(np.arange(7), [5, 20, 1, 30, 16, 8, 16]).astype(np.int32)
# in depth-first order: of each token the next of the path that it is, or of what branches off above it
PARENTS, _path = [], []
for _i in range(N):
    _path = _path[: len(_path) - (0, 0, 3, 0, 1, 0, 0, 9)[_i % 8]] if len(_path) > 9 else _path
    PARENTS.append(_path[-1] if _path else -1)
    _path = [*_path, _i]
NAMED = {
    "causal": (mods.causal, ()),
    "sliding_window": (mods.sliding_window(9), ()),
    "sliding_window of both sides": (mods.sliding_window(9, 4), ()),
    "prefix_lm": (mods.prefix_lm, (np.int32(21),)),
    "static_prefix_lm": (mods.static_prefix_lm(21), ()),
    "document": (mods.document, (IDS,)),
    "dilated": (mods.dilated(4), ()),
    "global_tokens": (mods.global_tokens(5), ()),
    "tree": (mods.tree, mods.tree_intervals(PARENTS)),
    "and": (mods.causal & mods.document, (IDS,)),
    "or": (mods.sliding_window(9) | mods.global_tokens(5), ()),
    "not": (~mods.sliding_window(40), ()),
    "dilated window": (mods.dilated(4) & mods.sliding_window(24), ()),
    "prefix of documents": (mods.prefix_lm & mods.document, (np.int32(21), IDS)),
}


def evaluated(mask, args, T=N, S=N):
    """The mask of the whole plane."""
    index = lambda n: jnp.arange(n, dtype=jnp.int32)
    zero = jnp.zeros((1, 1), jnp.int32)
    found = mask(zero, zero, index(T)[:, None], index(S)[None], *map(jnp.asarray, args))
    return np.broadcast_to(found, (T, S))


def kinds(plane, block_q, block_k):
    """2 all, 1 some, 0 nothing, of each tile of an evaluated mask."""
    T, S = plane.shape
    rows, columns = (range(0, n, block) for n, block in ((T, block_q), (S, block_k)))
    tiles = [[plane[i : i + block_q, j : j + block_k] for j in columns] for i in rows]
    return np.array([[int(x.any()) + int(x.all()) for x in row] for row in tiles])


@pytest.mark.parametrize("blocks", [(8, 16), (16, 8), (1, 1), (13, 7)], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_tiles_are_those_of_the_evaluated_mask(name, blocks):
    """Exactly: none is visited in vain, and none is compared that is full."""
    mask, args = NAMED[name]
    got, expected = mods.tiles(mask, N, N, args, block=blocks), kinds(evaluated(mask, args), *blocks)
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_array_equal(got == 2, expected == 2)


def walked(mask_mod, args, T, blocks, **given):
    """(tiles of the static list, those of them that are live at run time)."""
    x = jnp.zeros((1, T, 1, 2))
    names = ("scale", "query_seq_lengths", "key_value_seq_lengths", "local_window_size", "query_segment_ids",
             "key_value_segment_ids", "query_positions", "key_value_positions", "logits_soft_cap", "sink",
             "dropout_key", "dropout_offset", "precision")  # fmt: skip
    options = dict.fromkeys(names) | {"is_causal": False, "dropout_rate": 0.0, "broadcast_dropout": False}
    options |= {"deterministic_sums": True, "mask_mod": mask_mod, "mod_args": args} | given
    _, operands = prepare("test", x, x, x, None, None, **options)

    def live(operands):
        found = visibility.tile_mask(operands.mask, None, operands.sizes, *blocks)
        static = np.zeros([-(-T // block) for block in blocks], bool)
        for pairs in tiles.static_pairs(found, *blocks)[:2]:
            static[tuple(pairs.T)] = True
        flags = tiles.live_tiles(found, *blocks)
        return static, None if flags is None else flags & static

    known = []

    def traced(operands):
        static, flags = live(operands)
        known.append((static, flags is None))
        return jnp.asarray(static) if flags is None else flags

    visited = np.asarray(jax.jit(traced)(operands))
    return visited, *known[0]


@pytest.mark.parametrize("name", NAMED)
def test_the_walk_visits_the_tiles_of_the_evaluated_mask(name):
    mask, args = NAMED[name]
    visited, static, is_static = walked(mask, args, N, (8, 16))
    expected = kinds(evaluated(mask, args), 8, 16) > 0
    np.testing.assert_array_equal(visited, expected)
    assert is_static == (not args)  # known at trace time unless arrays decide
    if name == "and":
        np.testing.assert_array_equal(static, kinds(evaluated(mods.causal, ()), 8, 16) > 0)


def test_the_walk_by_positions():
    """Bounds of the positions of each tile: exact where these are in order."""
    at = jnp.asarray(np.arange(N) * 2, jnp.int32)
    visited, _, is_static = walked(
        mods.causal, (), N, (8, 16), query_positions=at, key_value_positions=at + 33
    )
    plane = np.arange(N)[None] * 2 + 33 <= np.arange(N)[:, None] * 2
    np.testing.assert_array_equal(visited, kinds(plane, 8, 16) > 0)
    assert not is_static


def by_width(batch, head, row, column, ids, width):
    """Heads of several widths, the last of none; one document each."""
    return (ids[row] == ids[column]) & (jnp.abs(row - column) <= width[head])


MORE = [
    {"query_seq_lengths": 290},
    *(pytest.param(x, marks=thorough) for x in ({}, {"mask": True}, {"causal": True})),
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_who_sees_and_is_seen_tile_after_tile(rng, monkeypatch, more):
    """Against the plane: rows that see nothing, and keys that no head of their group sees."""
    T, S, heads = 300, 700, 4
    ids = jnp.asarray(np.sort(rng.integers(0, 9, S)) * np.where(np.arange(S) % 50, 1, -1), jnp.int32)
    width = jnp.asarray([40, 300, 2, -1], jnp.int32)
    mask = Mask(
        is_causal="causal" in more,
        mask_mod=by_width,
        mod_args=(ids, width),
        batch_number=jnp.arange(2, dtype=jnp.int32),
        head_number=jnp.arange(heads, dtype=jnp.int32),
    )
    if "mask" in more:
        mask = mask.replace(elements=jnp.asarray(rng.random((1, 1, 1, S)) < 0.5))
    if "query_seq_lengths" in more:
        mask = mask.replace(query_seq_lengths=jnp.asarray([290, 3], jnp.int32))
    run = lambda: jax.jit(lambda m: visibility.used_queries_and_keys(m, None, Sizes((1,), T, S, 1, 2)))(mask)
    expected = run()
    monkeypatch.setattr(visibility, "BLOCK_ELEMENTS", 1)
    for got, wanted in zip(run(), expected, strict=True):
        full = np.broadcast_shapes(got.shape, wanted.shape)
        np.testing.assert_array_equal(*(np.broadcast_to(x, full) for x in (got, wanted)))
    assert not np.asarray(expected[0])[..., -1, -1, :].any()


def test_queries_beyond_their_length_count_in_no_tile(monkeypatch):
    """Nor do keys that they alone would see, in tiles that are full for the others."""
    T, end = 1200, 1100
    monkeypatch.setattr(visibility, "BLOCK_ELEMENTS", 1)
    numbers = {"batch_number": jnp.zeros(1, jnp.int32), "head_number": jnp.zeros(1, jnp.int32)}
    mask = Mask(mask_mod=mods.causal, mod_args=(), query_seq_lengths=jnp.asarray([end], jnp.int32), **numbers)
    for found in jax.jit(lambda m: visibility.used_queries_and_keys(m, None, Sizes((1,), T, T, 1, 1)))(mask):
        np.testing.assert_array_equal(found.reshape(-1), np.arange(T) < end)


def inputs(rng, T, *, B=1, heads=2, size=4):
    return tuple(jnp.asarray(rng.standard_normal((B, T, heads, size))) for _ in range(4))


def test_the_bias_form_of_alibi(rng):
    """Against the same numbers as an array: results, and the gradient of the slopes by the chain rule."""
    q, k, v, dout = inputs(rng, 23, B=2)
    slopes = jnp.asarray(rng.random(2))
    distance = jnp.abs(jnp.arange(23)[:, None] - jnp.arange(23)[None]).astype(jnp.float64)

    def by_array(q, slopes):
        bias = -slopes[:, None, None] * distance[None]
        return dot_product_attention(q, k, v, bias, is_causal=True)

    def by_function(q, slopes):
        return dot_product_attention(q, k, v, is_causal=True, score_mod=mods.alibi, mod_args=(slopes,))

    got, expected = (quick_jit(lambda q, s, f=f: jax.vjp(f, q, s)[1](dout))(q, slopes)
                     for f in (by_function, by_array))  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-12)


def scaled(logits, batch, head, row, column, arrays, slope):
    factor = arrays["factor"][head] * arrays["old"].astype(logits.dtype)[row]
    return logits * factor + slope[0] * column.astype(logits.dtype)


def test_gradients_of_trees_of_arguments(rng):
    """In the structure, shapes and dtypes of the arguments; None in the place of integers."""
    q, k, v, dout = (x.astype(jnp.float32) for x in inputs(rng, 9))
    factor = jnp.asarray(rng.random(2), jnp.bfloat16)
    args = ({"factor": factor, "old": jnp.arange(9, dtype=jnp.int32)}, (jnp.float32(0.5),))
    call = dict(score_mod=scaled, mod_args=args)
    out, lse = dot_product_attention(q, k, v, **call, return_residual=True)
    grads = dot_product_attention_bwd(dout, q, k, v, out=out, lse=lse, wrt="mod_args", **call)
    assert grads.query is None
    got, (shift,) = grads.mod_args
    assert got["old"] is None
    assert (got["factor"].dtype, got["factor"].shape) == (jnp.bfloat16, (2,))

    def loss(factor, shift):
        tree = ({"factor": factor, "old": args[0]["old"]}, (shift,))
        return (dot_product_attention(q, k, v, score_mod=scaled, mod_args=tree) * dout).sum()

    by_jax = jax.grad(loss, (0, 1))(factor, args[1][0])
    assert_close(got["factor"], by_jax[0], 1e-2)
    assert_close(shift, by_jax[1], 1e-5)


def test_what_no_query_reads_has_gradient_zero(rng):
    q, k, v = inputs(rng, 9)[:3]
    loss = lambda s: dot_product_attention(q[:, :0], k, v, score_mod=mods.alibi, mod_args=(s,)).sum()
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(2)), [0, 0])


def test_documents_of_no_token(rng):
    q, k, v = (x[:, :0] for x in inputs(rng, 9)[:3])
    call = dict(mask_mod=mods.document, score_mod=mods.alibi)
    loss = lambda s: dot_product_attention(q, k, v, **call, mod_args=(jnp.zeros(0, jnp.int32), s)).sum()
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(2)), [0, 0])


def test_nothing_is_differentiated_that_is_not_asked_for(rng):
    """Fixed slopes get no gradient, and masks read none of the scores' arguments."""
    q, k, v, dout = inputs(rng, 9)
    ids, slopes = jnp.zeros(9, jnp.int32), jnp.asarray(rng.random(2))
    call = dict(mask_mod=mods.document, score_mod=mods.alibi)

    def gradient(q, slopes):
        attend = lambda q: dot_product_attention(q, k, v, **call, mod_args=(ids, slopes))
        return jax.vjp(attend, q)[1](dout)

    assert "scatter" not in str(jax.make_jaxpr(gradient)(q, slopes))
    assert all(x.size <= q.size for x in saved_arrays(jax.vjp(
        lambda q: dot_product_attention(q, k, v, **call, mod_args=(ids, slopes)), q)[1]))  # fmt: skip


def test_vmap_over_what_the_functions_read(rng):
    q, k, v, dout = inputs(rng, 9)
    ids = jnp.asarray(rng.integers(0, 3, (3, 9)), jnp.int32)
    slopes = jnp.asarray(rng.random((3, 2)))

    def gradients(ids, slopes):
        call = dict(mask_mod=mods.document, score_mod=mods.alibi)
        attend = lambda q, s: dot_product_attention(q, k, v, **call, mod_args=(ids, s))
        return jax.vjp(attend, q, slopes)[1](dout)

    got, single = jax.jit(jax.vmap(gradients))(ids, slopes), jax.jit(gradients)
    for i in range(3):
        for a, b in zip(got, single(ids[i], slopes[i]), strict=True):
            assert_close(a[i], b, 1e-12)


def test_a_score_may_hide_whole_rows(rng):
    """-inf hides as a mask does: such rows give 0, and gradient 0, also where other tiles are full."""
    q, k, v, dout = inputs(rng, 9)

    def hide(logits, batch, head, row, column):
        return jnp.where(row == 3, -jnp.inf, logits)

    out, lse = dot_product_attention(q, k, v, score_mod=hide, return_residual=True)
    assert not np.asarray(out)[:, 3].any()
    assert (np.asarray(lse)[:, 3] == -np.inf).all()
    dq, dk = jax.vjp(lambda q, k: dot_product_attention(q, k, v, score_mod=hide), q, k)[1](dout)
    mask = (jnp.arange(9) != 3)[:, None]
    expected = jax.vjp(lambda q, k: dot_product_attention(q, k, v, mask=mask), q, k)[1](dout)
    for a, b in zip((dq, dk), expected, strict=True):
        assert_close(a, b, 1e-12)


def score_of_causal_rows(safe):
    """A score of causal rows alone; the `safe` one has other numbers where they see nothing."""

    def score(logits, batch, head, row, column, power, factor, shift):
        distance = (row - column).astype(logits.dtype)
        distance = jnp.where(column <= row, distance, 1.0) if safe else distance
        at_row = jnp.where(row < 3, 1, row) if safe else row  # in rows that see nothing shift is NaN
        near = jnp.log1p(distance) * power[head] + jnp.sqrt(distance + factor) / (distance + 1)
        return jnp.tanh(logits * jnp.log(factor + distance)) + near * shift[at_row]

    return score


@pytest.mark.parametrize("form", ["whole", *(pytest.param(x, marks=thorough) for x in ("tiles", "together"))])
def test_hidden_elements_give_no_gradient(rng, monkeypatch, form):
    """Where the derivative of the score is NaN or infinite, they give nothing, to second order."""
    T = 23
    q, k, v, dout = inputs(rng, T, B=2)
    if form != "whole":
        schedule = Tiles(8, 16, "float64")
        monkeypatch.setattr(planning, "default_schedule", lambda *_: schedule)
    if form == "together":
        monkeypatch.setattr(mod_functions, "may_lie_apart", lambda *_: False)
    live = (jnp.arange(T) >= 3)[:, None]
    shift = jnp.asarray(rng.random(T)).at[0].set(jnp.nan).at[2].set(jnp.inf)
    point = (q, jnp.asarray(rng.random(2)), jnp.asarray(rng.random()), shift)

    def gradients(score):
        def loss(q, power, factor, shift):
            out = dot_product_attention(
                q, k, v, mask=live, mask_mod=mods.causal, score_mod=score, mod_args=(power, factor, shift)
            )
            return (out * dout).sum()

        gradient = jax.grad(loss, (0, 1, 2, 3))
        again = jax.grad(lambda *point: sum((g**2).sum() for g in gradient(*point)), (0, 1, 2, 3))
        return quick_jit(lambda *point: (gradient(*point), again(*point)))(*point)

    got, expected = gradients(score_of_causal_rows(safe=False)), gradients(score_of_causal_rows(safe=True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(b).all()
        assert_close(a, b, 1e-11)


@thorough
@pytest.mark.parametrize("name", ["document", "or"])
def test_memory_is_not_that_of_the_plane(name):
    """Forward and backward at T = 16,384 take less than 1/40 of the bytes that the mask would."""
    T = 16384
    mask = {"document": mods.document & mods.causal, "or": NAMED["or"][0]}[name]
    args = (jax.ShapeDtypeStruct((T,), jnp.int32),) if name == "document" else ()
    x = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)

    def step(dout, q, k, v, args):
        attend = lambda *a: dot_product_attention(*a, mask_mod=mask, mod_args=args)
        return jax.vjp(attend, q, k, v)[1](dout)

    memory = jax.jit(step).lower(x, x, x, x, args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < T * T / 40


@thorough
def test_second_order_over_many_tiles(rng):
    """Hessian-vector products, by the arguments of the score too, with tiles that only the run time drops."""
    T = 520
    q, k, v, dout = inputs(rng, T, heads=1)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, T)), jnp.int32)
    point = {"q": q, "table": jnp.asarray(rng.standard_normal((1, 33)))}
    direction = {"q": dout, "table": jnp.asarray(rng.standard_normal((1, 33)))}
    near, mask = mods.relative_bias(16), mods.causal & mods.document

    def loss(attend, point):
        out, lse = attend(point["q"], k, v, mask_mod=mask, score_mod=near, mod_args=(ids, point["table"]))
        return (out * v).sum() + (lse**2).sum()

    def products(attend):
        gradient = jax.grad(lambda point: loss(attend, point))
        along = lambda p: sum(
            (g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient(p), direction)), strict=True)
        )
        return jax.jit(lambda p: (jax.jvp(gradient, (p,), (direction,))[1], jax.grad(along)(p)))(point)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = products(reference.dot_product_attention)
    attend = lambda *a, **o: dot_product_attention(*a, **o, return_residual=True)
    for got, wanted in zip(jax.tree.leaves(products(attend)), jax.tree.leaves(expected), strict=True):
        assert_close(got, wanted, 1e-10)


@thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_collective_stands_in_a_loop(kind):
    """Batch and heads over 8 devices, many tiles: the gradient of what the score reads is summed outside."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)
    whole = NamedSharding(mesh, P(None))
    x = jax.ShapeDtypeStruct((4, 1024, 8, 4), jnp.float32, sharding=NamedSharding(mesh, P("b", None, "h")))
    ids = jax.ShapeDtypeStruct((1024,), jnp.int32, sharding=whole)
    slopes = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=whole)

    def step(dout, q, k, v, ids, slopes):
        functions = dict(mask_mod=mods.causal & mods.document, score_mod=mods.alibi)
        attend = lambda q, k, v, s: dot_product_attention(q, k, v, **functions, mod_args=(ids, s))
        return jax.vjp(attend, q, k, v, slopes)[1](dout)

    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(x, x, x, x, ids, slopes).compile().as_text()
    collective = re.compile(r"= .*? (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)")
    parts = re.split(r"\n(?=%|ENTRY)", text)
    found = {part.split(" ")[0]: len(collective.findall(part)) for part in parts if collective.search(part)}
    assert found.keys() <= {"ENTRY"}, found
    assert sum(found.values()) <= 2
