"""Which tiles the Hopper kernels of dense attention visit."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from ops.dot_product.kernel_calls import BF16

from jax_attn_bwd import mods
from jax_attn_bwd.ops.dot_product.cases import seen
from jax_attn_bwd.ops.dot_product.kernels import functions, hopper_tiles
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as kernel_tiles
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

pytestmark = pytest.mark.kernel


def visited(options, operands, rows, columns, by_key):
    """[B, tiles of one side, 4]; all and all full where the kernels are told nothing."""
    refs = kernel_tiles.inputs(options, operands, None)
    found = hopper_tiles.bounds(options, refs, rows, columns, by_key)
    n_q, n_k = refs.q.shape[1] // rows, refs.k.shape[1] // columns
    outer, inner = (n_k, n_q) if by_key else (n_q, n_k)
    found = np.array([[[0, 0, inner, inner]] * outer]) if found is None else np.asarray(found)
    assert found.shape[1:] == (outer, 4)
    return np.broadcast_to(found, (refs.q.shape[0], outer, 4)), (n_q, n_k)


def tile_flags(plane, rows, columns, grid, T):
    """(some, every) element of each tile of a plane `[B, T, S]`; rows that are thrown away count not."""
    (B, t, S), (n_q, n_k) = plane.shape, grid
    padded = np.zeros((2, B, n_q * rows, n_k * columns), bool)
    padded[:, :, :t, :S] = plane
    for b in range(B):
        padded[1, b, T[b] :] = True
    cut = padded.reshape(2, B, n_q, rows, n_k, columns)
    return cut[0].any((2, 4)), cut[1].all((2, 4))


BLOCKS = [(128, 64, False), (128, 128, False), (64, 128, True), (32, 128, True)]


@thorough
@pytest.mark.parametrize("seed", range(12))
def test_bounds_miss_nothing_and_call_nothing_full_that_is_not(seed):
    rng = np.random.default_rng(seed)
    B, T, S = 3, *((300, 500), (500, 131), (128, 256))[seed % 3]
    q, k = jnp.zeros((B, T, 1, 2), BF16), jnp.zeros((B, S, 1, 2), BF16)
    window = (None, None, None, (90, 20), (0, 200))[rng.integers(5)]
    is_causal = bool(rng.random() < 0.3)
    given = {}
    for side, n in (("query", T), ("key_value", S)):
        if rng.random() < 0.5:
            given[f"{side}_seq_lengths"] = rng.integers(0, n + 1, B)
        if rng.random() < 0.4:
            given[f"{side}_positions"] = np.sort(rng.integers(0, 600, (B, n)), -1)
    if rng.random() < 0.4:
        for side, n in (("query", T), ("key_value", S)):
            given[f"{side}_segment_ids"] = np.sort(rng.integers(0, 4, (B, n)), -1)
    mask = Mask(is_causal, window, **{n: jnp.asarray(x, np.int32) for n, x in given.items()})
    operands, options = Operands(q, k, k, mask=mask), KernelOptions.of(Options(scale=1.0), mask)
    local = {"is_causal": is_causal} | ({"local_window_size": window} if window else {})
    plane = np.stack(
        [seen({n: x[b : b + 1] for n, x in given.items()}, local, (1, 1, T, S))[0, 0] for b in range(B)]
    )
    ends = given.get("query_seq_lengths", [T] * B)
    for rows, columns, by_key_ in BLOCKS:
        found, grid = visited(options, operands, rows, columns, by_key_)
        some, every = tile_flags(plane, rows, columns, grid, ends)
        if by_key_:
            some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
        step = np.arange(some.shape[-1])
        first, full_first, full_end, end = (found[..., i, None] for i in range(4))
        within = (first <= step) & (step < end)
        assert not (some & ~within).any()
        assert not (within & (full_first <= step) & (step < full_end) & ~every).any()


@thorough
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(512, 512), (256, 640), (640, 256)])
@pytest.mark.parametrize("window", [None, (64, 64), (0, 0), (127, 1), (200, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bounds_of_fixed_shapes_are_exact(shape, window, is_causal, blocks):
    (T, S), (rows, columns, order) = shape, blocks
    mask = Mask(is_causal, window)
    operands = Operands(*(jnp.zeros((1, n, 1, 2), BF16) for n in (T, S, S)), mask=mask)
    options = KernelOptions.of(Options(scale=1.0), mask)
    found, grid = visited(options, operands, rows, columns, order)
    local = {"is_causal": is_causal} | ({"local_window_size": window} if window else {})
    plane = seen({}, local, (1, 1, T, S))[:, 0]
    some, every = (x.swapaxes(1, 2) if order else x for x in tile_flags(plane, rows, columns, grid, [T]))
    first, full_first, full_end, end = (found[..., i] for i in range(4))
    np.testing.assert_array_equal(end - first, some.sum(-1))
    full = np.minimum(full_end, end) - np.maximum(full_first, first)
    np.testing.assert_array_equal(np.maximum(full, 0), every.sum(-1))


HOLES = {
    "window and first tokens": (mods.sliding_window(70) | mods.global_tokens(5), ()),
    "far or near": (~mods.sliding_window(300, 300) | mods.sliding_window(9), ()),
    "documents in turns": (mods.document, (np.repeat([0, 1, 2, 0, 1, 0], 128).astype(np.int32),)),
    "causal": (mods.causal, ()),  # without holes
}


@pytest.mark.parametrize(
    "blocks", [BLOCKS[1], *(pytest.param(b, marks=thorough) for b in BLOCKS[::2])], ids=str
)
@pytest.mark.parametrize("name", HOLES)
def test_visited_are_the_tiles_of_the_evaluated_mask(name, blocks):
    """Exactly: those of a hole are not visited, and those that are full are not compared."""
    (mask, args), (rows, columns, by_key), n = HOLES[name], blocks, 768
    args = tuple(map(jnp.asarray, args))
    x, number = jnp.zeros((1, n, 1, 2), BF16), jnp.zeros(1, jnp.int32)
    given = Mask(mask_mod=mask, mod_args=args, batch_number=number, head_number=number)
    options, operands = KernelOptions.of(Options(scale=1.0), given), Operands(x, x, x, mask=given)
    refs, at = kernel_tiles.inputs(options, operands, None), jnp.arange(n)
    options = functions.on_values(options, operands)
    plane = np.asarray(mask(0, 0, at[:, None], at[None], *args))[None]
    grid = n // rows, n // columns
    some, every = tile_flags(plane, rows, columns, grid, [n])
    each = hopper_tiles.bounds(options, refs, rows, columns, each=True)
    if name == "causal":
        assert each.shape == (1, grid[0], 4)
        return
    np.testing.assert_array_equal(each.words, np.where(every, 1, 2 * some))
    some, every = (x[0].T if by_key else x[0] for x in (some, every))
    (words,) = np.asarray(hopper_tiles.bounds(options, refs, rows, columns, by_key).words)
    assert len(words) == len(some)
    for (count, *steps), live, full in zip(words, some, every, strict=True):
        visited = {step // 2: bool(step % 2) for step in steps[:count]}
        assert list(visited) == np.flatnonzero(live).tolist()
        assert visited == {j: not full[j] for j in visited}
