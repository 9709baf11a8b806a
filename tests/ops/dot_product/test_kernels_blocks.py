"""Masks that read arrays at blocks of rows and columns, or bits, in the kernels: what a tile is handed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted, thorough
from ops.dot_product.kernel_calls import OPERATOR, measured, shapes
from ops.dot_product.test_kernels_tpu import NAME, PARTS, SMALL, long_case, set_tiling
from ops.dot_product.test_kernels_tpu_schedule import visited
from ops.dot_product.test_mods import kinds

from jax_attn_bwd import dot_product_attention, mods
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions, hoisting, tpu_tiles
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_backward as mosaic_tpu_backward
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

pytestmark = pytest.mark.kernel
T, S, N = 300, 270, 2
NEAR = np.abs(np.arange(T)[:, None] - np.arange(S)) < 7  # packed by cells
HOLES = np.add.outer(3 * np.arange(T), 2 * np.arange(S)) % 7 < 2  # by words


def chosen(rng, rows, columns, lead=(1,), T=T, S=S, share=0.3):
    return rng.random((*lead, -(-T // rows), -(-S // columns))) < share


def of_blocks(rows, columns, heads=1):
    return lambda rng: (mods.blocks(rows, columns), (chosen(rng, rows, columns, (heads,)),))


def shifted(batch, head, row, column, table):
    """Blocks of rows that begin elsewhere: one row has a value, and 16 columns."""
    return table[0, (row + 5) // 16, column // 16]


def counted(batch, head, row, column, table):
    """More than bools: numbers of blocks of 32 columns, which meet the row and the column."""
    return (table[head, row, column // 32] + row + column) % 3 != 0


MASKS = {
    "blocks(64)": of_blocks(64, 64),
    "of heads, that divide nothing": of_blocks(100, 12, heads=N),
    "of more columns than a tile": of_blocks(8, 200),
    "the others": lambda rng: (~mods.blocks(32), (chosen(rng, 32, 32),)),
    "words": lambda rng: mods.packed(HOLES),
    "cells": lambda rng: mods.packed(NEAR),
    "numbers": lambda rng: (counted, (rng.integers(0, 9, (N, T, 9)).astype(np.int32),)),
    "sizes that do not divide each other": lambda rng: (
        mods.blocks(16) & mods.blocks(24),
        (chosen(rng, 16, 16, share=0.7), chosen(rng, 24, 24, share=0.7)),
    ),
    "of shifted rows": lambda rng: (shifted, (chosen(rng, 16, 16, T=T + 5),)),
    "both": lambda rng: (
        mods.blocks(64) & mods.packed(HOLES)[0] | mods.sliding_window(3),
        (chosen(rng, 64, 64, share=0.7), *mods.packed(HOLES)[1]),
    ),
}


FIRST = ("of heads, that divide nothing", "sizes that do not divide each other", "of shifted rows", "both")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[thorough] * (n not in FIRST)) for n in MASKS])
def test_a_tile_is_what_the_function_says(name, rng):
    """Element by element, in a part of two tiles each; what is handed has a bit an element, or less."""
    mask_mod, args = MASKS[name](rng)
    function = hoisting.of(mask_mod, False, args)
    assert hoisting.unsupported(function, "mask_mod", distances=False) is None
    (rows, columns), block_k, tile = (384, 512), 256, slice(128, 384)  # of queries; keys have two
    row, column = (np.minimum(np.arange(n), m - 1).astype(np.int32) for n, m in ((rows, T), (columns, S)))
    numbers = np.zeros(1, np.int32), np.arange(N, dtype=np.int32)

    @jax.jit
    def both(args):
        handed = hoisting.values(function, args, *numbers, row[None], column[None])
        laid = [blocks.words(x, rows, block_k) for x in handed]
        assert all(x.words[0, 0].size * 32 <= rows * columns for x in laid)
        found = []
        for head in range(N):
            for number, start in ((0, 128), (1, 0)):
                refs = (replace(x, words=x.words[0, head % x.shape[1], number, :, tile]) for x in laid)
                values = [x.spread((slice(64, 256), slice(start, start + 128))) for x in refs]
                at = np.zeros((1, 1), np.int32), np.full((1, 1), head, np.int32)
                at = (*at, row[None, 192:], column[number * block_k + start :][:128, None])
                found.append(jnp.broadcast_arrays(function(*at, *values), mask_mod(*at, *args)))
        return found

    for got, expected in both(args):
        np.testing.assert_array_equal(got, expected)


def test_blocks_are_handed_for_each_batch_entry(rng):
    tables, at = chosen(rng, 64, 64, (2, 1), 128, 128), np.arange(128, dtype=np.int32)[None]
    function = hoisting.of(mods.blocks(64), False, (tables,))
    numbers = np.arange(2, dtype=np.int32), np.zeros(1, np.int32)
    (given,) = hoisting.values(function, (tables,), *numbers, at, at)
    np.testing.assert_array_equal(given.x, tables)


def live_tiles(mask_mod, args, T, S):
    """{tile: whether it must be compared} of those of 128 x 128 that are visited when the call runs."""

    @jax.jit
    def steps(args):
        numbers = {"batch_number": jnp.zeros(1, np.int32), "head_number": jnp.arange(N, dtype=np.int32)}
        mask = Mask(mask_mod=mask_mod, mod_args=args, **numbers)
        q, k = (jnp.zeros((1, n, N, 2), np.float32) for n in (T, S))
        operands, options = Operands(q, k, k, mask=mask), Options(scale=1.0)
        options = KernelOptions.of(options, mask)
        refs = kernel_inputs.inputs(options, operands, None, SMALL.padding)
        options = functions.on_values(options, operands)
        return tpu_tiles.schedule(tile_flags(options, refs, 128, 128)).steps

    return visited(tpu_tiles.Schedule(steps(args), True, True), 0)[0]


def test_empty_tiles_are_left_out_of_the_list(rng):
    """Known when the call runs, exactly, for blocks that divide no tile and for bits."""
    bits = NEAR | (rng.random((T, S)) < 0.3) & (np.arange(S) >= 128)
    of_elements = chosen(rng, 100, 48)
    apart = lambda batch, head, row, column, table: table[row - column + 400]
    pairs = (
        (mods.blocks(100, 48), (of_elements,), np.kron(of_elements[0], np.ones((100, 48), bool))[:T, :S]),
        (*mods.packed(bits), bits),
        (apart, (np.arange(800) == 527,), np.subtract.outer(np.arange(T), np.arange(S)) == 127),
    )
    for mask_mod, args, plane in pairs:
        live = live_tiles(mask_mod, args, T, S)
        expected = np.zeros((384, 384), bool)
        expected[:T, :S] = plane
        wanted = set(map(tuple, np.argwhere(kinds(expected, 128, 128) > 0)))
        assert live.keys() == wanted or (mask_mod is apart and live.keys() > wanted)  # by padding


def test_a_tile_is_compared_unless_all_heads_see_all_of_it():
    of_heads = np.array([[[1, 1], [0, 1]], [[1, 0], [0, 1]]], bool)
    live = live_tiles(mods.blocks(128), (of_heads,), 256, 256)
    assert live == {(0, 0): False, (0, 1): True, (1, 1): False}


LONG = (
    long_case(
        "blocks",
        lambda rng: {
            "mod_args_0": chosen(rng, 40, 20, (2, 4)), "bias": rng.standard_normal((4, T, S)),
            "query_seq_lengths": np.array([300, 130], np.int32),
        },
        B=2, N=4, K=2, mask_mod=mods.blocks(40, 20) | mods.sliding_window(9, 2),
    ),
    long_case(
        "bits", lambda rng: {f"mod_args_{i}": x for i, x in enumerate(mods.packed(NEAR)[1])},
        mask_mod=mods.packed(NEAR)[0] & mods.causal,
    ),
)  # fmt: skip


@thorough
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_against_definition(case, monkeypatch):
    """Tiles of several parts; dq is too much for the memory it is given, so queries are cut."""
    set_tiling(monkeypatch, SMALL if case.name == "blocks" else PARTS)
    monkeypatch.setattr(mosaic_tpu_backward, "RESIDENT", 1)
    with pallas.interpreting(NAME), jax.enable_x64(True):
        measured(OPERATOR, NAME, case)


def case_of_gpus(head, T=200, S=140):
    holes, lead = NEAR[:T, :S] | HOLES[:T, :S] & (np.arange(S) < 60), (1, 2)
    mask_mod, bits = mods.packed(holes)
    return long_case(
        f"H={head}",
        lambda rng: {"mod_args_0": chosen(rng, 24, 20, lead, T, S)}
        | {f"mod_args_{i}": x for i, x in enumerate(bits, 1)},
        T=T, S=S, H=head, Hv=head, mask_mod=mods.blocks(24, 20) | mask_mod,
    )  # fmt: skip


@thorough
@interpreted
@pytest.mark.parametrize("head", [16, 96])
def test_on_hopper_against_definition(head):
    with pallas.interpreting("mosaic_gpu"), jax.enable_x64(True):
        measured(OPERATOR, "mosaic_gpu", case_of_gpus(head))


@pytest.mark.parametrize(
    "at",
    [
        lambda row, column: 700 - row - column,
        lambda row, column: -row - column,
        lambda row, column: (row.astype(jnp.int8) < column.astype(jnp.int8)).astype(jnp.int32),
        lambda row, column: abs(row.astype(jnp.bfloat16) - column.astype(jnp.bfloat16)).astype(jnp.int32),
    ],
    ids=["sum", "negative sum", "numbers that wrap", "numbers that are rounded"],
)
def test_what_only_looks_like_a_distance_is_refused(at):
    """By row and column together, not by what they differ."""
    function = hoisting.of(lambda b, h, r, c, table: table[at(r, c)], False, (np.ones(1400, bool),))
    assert "row and column together" in hoisting.unsupported(function, "mask_mod", distances=True)


@pytest.mark.parametrize(
    ("size", "remedy"), [((2, 3), "hand over a mask array"), ((8, 8), "leave these out")]
)
def test_what_does_not_fit_is_refused(size, remedy):
    """Blocks of too few elements; and those of positions, which are no stretches of indices."""
    given = shapes(T=40, S=48)
    counts = [-(-n // m) for n, m in zip((40, 48), size, strict=True)]
    call = partial(dot_product_attention, mask_mod=mods.blocks(*size))
    positions = {"query_positions": np.arange(40)} if size == (8, 8) else {}
    for name in (NAME, "mosaic_gpu"):
        run = partial(call, **positions, implementation=name)
        with pallas.interpreting(name), pytest.raises(NotImplementedError, match=remedy):
            jax.eval_shape(lambda a, x, run=run: run(**a, mod_args=(x,)), given, np.ones((1, *counts), bool))
