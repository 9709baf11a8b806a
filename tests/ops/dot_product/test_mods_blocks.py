"""Chosen blocks and packed masks: the tiles, values and gradients of the same mask as an array."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.dot_product.test_mods import evaluated, inputs, kinds, walked

from jax_attn_bwd import BipartiteCSC, dot_product_attention, mods
from jax_attn_bwd._core.jaxpr.intervals import Interval, bounds, exact
from jax_attn_bwd._core.jaxpr.walk import equations

T = 96


def pattern(rng, name, T=T, S=T):
    """A mask with holes, rows of nothing, full tiles and single elements."""
    if name == "empty":
        return np.zeros((T, S), bool)
    if name == "full":
        return np.ones((T, S), bool)
    if name == "corner":  # all other cells are empty
        mask = (rng.random((T, S)) < 0.5) & (np.arange(T)[:, None] < 20) & (np.arange(S) < 20)
        mask[:16, :16] = True
        return mask
    mask = rng.random((T, S)) < (0.002 if name == "scattered" else 0.3)
    if name == "clustered":
        coarse = rng.random((-(-T // 16), -(-S // 16))) < 0.3
        mask = (mask | (rng.random((T, S)) < 0.5)) & np.kron(coarse, np.ones((16, 16), bool))[:T, :S]
        mask[32:64, :40] = True
    return mask


def forms(mask):
    """The mask as each kind of argument of `packed`."""
    sparse = pytest.importorskip("scipy.sparse")
    rows, columns = np.nonzero(mask)
    graph = BipartiteCSC.from_coo(columns, rows, *mask.shape[::-1], capacity=len(rows) + 3)
    stored = sparse.csr_array((np.ones(len(rows) + 1), ([*rows, 0], [*columns, 1])), shape=mask.shape)
    stored = sparse.coo_array(
        (np.append(np.ones(len(rows)), 0), ([*rows, 0], [*columns, 1])), shape=mask.shape
    )
    return {"array": mask, "sparse": stored, "graph": graph}


@pytest.mark.parametrize("name", ["scattered", "clustered", "dense", "empty", "full", "corner"])
def test_packed_masks_are_the_array(rng, name):
    """Element by element, from each form, and tile by tile in tiles of multiples of 8."""
    for shape in ((T, T), (70, 45)):
        mask = pattern(rng, name, *shape)
        (mask_mod, args), *others = map(mods.packed, forms(mask).values())
        np.testing.assert_array_equal(evaluated(mask_mod, args, *shape), mask)
        for other, arrays in others:
            assert other == mask_mod
            jax.tree.map(np.testing.assert_array_equal, arrays, args)
        for blocks in ((8, 16), (24, 40)):
            found = mods.tiles(mask_mod, *shape, args, block=blocks)
            np.testing.assert_array_equal(found, kinds(mask, *blocks))


def test_packed_masks_leave_out_empty_cells(rng):
    """One bit an element at most, and little more than that for each 8 x 8."""
    size = 2048
    near = np.abs(np.arange(size)[:, None] - np.arange(size)) < 40
    scattered = rng.random((size, size)) < 0.01
    stored = [sum(x.nbytes for x in mods.packed(mask)[1]) for mask in (near, scattered)]
    assert stored[0] < size * size / 8 / 3
    assert stored[1] <= size * size * (1 / 8 + 1 / 64)


@pytest.mark.parametrize(
    ("size", "block"),
    [((16, 16), (8, 16)), ((32, 8), (13, 7)), ((40, 24), (32, 32)), ((40, 24), (1, 96))],
    ids=str,
)
def test_tiles_of_blocks_are_exact(rng, size, block):
    """For tiles of any size, known and at run time, where queries count from elsewhere, too."""
    counts = [-(-T // n) for n in size]
    chosen = rng.random((1, *counts)) < 0.2
    chosen[:, :2, :2] = True
    mask = np.kron(chosen[0], np.ones(size, bool))[:T, :T]
    mask_mod = mods.blocks(*size)
    np.testing.assert_array_equal(evaluated(mask_mod, (chosen,)), mask)
    np.testing.assert_array_equal(mods.tiles(mask_mod, T, T, (chosen,), block=block), kinds(mask, *block))
    positions = jnp.arange(T, dtype=jnp.int32)
    for given in ({}, {"query_positions": positions, "key_value_positions": positions}):
        visited, _, is_static = walked(mask_mod, (chosen,), T, block, **given)
        np.testing.assert_array_equal(visited, kinds(mask, *block) > 0)
        assert not is_static


def test_bounds_of_tiles_take_memory_of_their_number():
    """Not of its square: 32 x 32 tiles of blocks that are read when the call runs."""
    row, column = (
        Interval(start, start + 31)
        for start in (np.arange(0, 1024, 32, dtype=np.int32).reshape(s) for s in ((1, -1, 1), (1, 1, -1)))
    )
    number = exact(np.zeros((1, 1, 1), np.int32))
    tiles = lambda chosen: bounds(mods.blocks(16), number, number, row, column, exact(chosen)).greatest
    program = jax.make_jaxpr(tiles)(jax.ShapeDtypeStruct((1, 64, 64), np.bool_))
    assert program.out_avals[0].shape == (1, 32, 32)
    sizes = [v.aval.size for equation in equations(program.jaxpr) for v in equation.outvars]
    assert max(sizes) <= 4 * 64 * 64


def test_blocks_of_heads_and_batch_entries(rng):
    """Against the array: values, and gradients through chosen blocks alone; no new trace for new blocks."""
    size, B, N = 8, 2, 2
    q, k, v, dout = inputs(rng, 40, B=B, heads=N)
    traces = []

    @jax.jit
    def run(chosen):
        traces.append(1)
        attend = partial(dot_product_attention, mask_mod=mods.blocks(size) & mods.causal, mod_args=(chosen,))
        return jax.vjp(attend, q, k, v)[1](dout)

    by_array = jax.jit(lambda mask: jax.vjp(partial(dot_product_attention, mask=mask), q, k, v)[1](dout))
    for shape in ((B, N), (B, N), (1,)):
        chosen = rng.random((*shape, 5, 5)) < 0.4
        mask = np.kron(chosen, np.ones((size, size), bool)) & np.tri(40, dtype=bool)
        expected = by_array(mask)
        for a, b in zip(run(chosen), expected, strict=True):
            assert_close(a, b, 1e-12)
    assert len(traces) == 2


@pytest.mark.parametrize("lead", [(2, 3), (2, 1), (1, 3), (3,), (1,)], ids=str)
def test_blocks_are_those_of_the_entry_and_the_head(rng, lead):
    chosen = rng.random((*lead, 3, 2)) < 0.5
    at = (jnp.asarray(i, jnp.int32) for i in np.ix_(range(2), range(3), range(6), range(8)))
    expected = np.broadcast_to(np.kron(chosen, np.ones((2, 4), bool)), (2, 3, 6, 8))
    seen = np.broadcast_to(mods.blocks(2, 4)(*at, jnp.asarray(chosen)), expected.shape)
    np.testing.assert_array_equal(seen, expected)


def test_blocks_from_indices(rng):
    indices = np.array([[[0, 2], [1, -1], [-1, -1]]], np.int32)
    expected = [[[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]]
    for found in (
        mods.blocks_from_indices(indices, 4),
        jax.jit(lambda i: mods.blocks_from_indices(i, 4))(indices),
    ):
        np.testing.assert_array_equal(found, np.array(expected, bool))


@thorough
def test_many_tiles_of_blocks_and_bits(rng):
    """Forward and backward beyond one tile, against the array."""
    size = 1100
    q, k, v, dout = inputs(rng, size, heads=1)
    chosen = rng.random((1, 18, 18)) < 0.1
    blocks = np.kron(chosen[0], np.ones((64, 64), bool))[:size, :size]
    clustered = pattern(rng, "clustered", size, size)
    packed, bits = mods.packed(clustered)
    for mask_mod, args, mask in ((mods.blocks(64), (chosen,), blocks), (packed, bits, clustered)):
        of_function = partial(dot_product_attention, mask_mod=mask_mod, mod_args=args)
        both = [
            jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1](dout))(q, k, v)
            for f in (of_function, partial(dot_product_attention, mask=mask))
        ]
        for a, b in zip(*both, strict=True):
            assert_close(a, b, 1e-12)
