"""Masks and biases of -inf in the kernels of dense attention: tiles that they hide are passed over."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, interpreted, thorough
from jax.sharding import AxisType
from ops.dot_product.kernel_calls import BF16, OPERATOR, measured
from ops.dot_product.test_kernels_tpu import SMALL, long_case, set_tiling
from ops.dot_product.test_kernels_tpu_schedule import visited
from ops.dot_product.test_mods import kinds

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles, tpu_tiles
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

pytestmark = pytest.mark.kernel
T, S, N, TILE = 300, 400, 2, 128
KERNELS = ["mosaic_tpu", pytest.param("mosaic_gpu", marks=interpreted)]
# 0 nothing is seen, 1 something, 2 everything; a hole in the first row, nothing in the second
KINDS = np.array([[2, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])


def holes(rng, kinds=KINDS, T=T, S=S):
    """A mask of tiles of those kinds, `[T, S]`; the first element of a tile that is seen in part is seen."""
    of_element = np.kron(kinds, np.ones((TILE, TILE), int))[:T, :S]
    first = np.zeros((TILE, TILE), bool)
    first[0, 0] = True
    first = np.tile(first, kinds.shape)[:T, :S]
    return (of_element == 2) | (of_element == 1) & ((rng.random((T, S)) < 0.1) | first)


MASKS = {
    "of all": lambda rng: holes(rng),
    "of batch entries": lambda rng: np.stack([holes(rng), holes(rng, KINDS[::-1])])[:, None],
    "of heads": lambda rng: np.stack([holes(rng), holes(rng, KINDS[:, ::-1])]),
    "of both": lambda rng: np.stack(
        [np.stack([holes(rng, k), holes(rng, k[:, ::-1])]) for k in (KINDS, KINDS[::-1])]
    ),
    "of keys": lambda rng: holes(rng)[200:201] | holes(rng)[:1],
    "of queries": lambda rng: holes(rng)[:, -1:],
}


ARRAYS = ("mask", "bias")
FIRST = (("mask", "of both", True), ("mask", "of queries", False), ("bias", "of heads", True))


def given(array, elements):
    """The mask, or a bias that hides what it hides."""
    return {array: elements if array == "mask" else np.where(elements, np.float32(1.5), -np.float32(np.inf))}


@pytest.mark.parametrize(
    ("array", "name", "is_causal"),
    [
        pytest.param(*pair, marks=[thorough] * (pair not in FIRST))
        for pair in itertools.product(ARRAYS, MASKS, (False, True))
    ],
)
def test_flags_are_those_of_the_array(array, name, is_causal, rng):
    """Exactly, for the TPU's steps and for the lists of Hopper kernels; causality leaves steps out.

    Where a bias is finite it is added: the tiles that must be compared are those of causality.
    """
    elements = MASKS[name](rng)
    x = jnp.zeros((2, S, N, 2), BF16)

    @jax.jit
    def found(plane):
        mask = Mask(is_causal, elements=plane.get("mask"))
        operands = Operands(x[:, :T], x, x, plane.get("bias"), mask=mask)
        options = KernelOptions.of(Options(scale=1.0), mask)
        refs = kernel_inputs.inputs(options, operands, None, SMALL.padding)
        flags = tile_flags(options, refs, TILE, TILE)
        steps = [tpu_tiles.schedule(flags, by_key).steps for by_key in (False, True)]
        bounds = partial(hopper_tiles.bounds, options, refs, TILE, TILE)
        return *steps, bounds().words, bounds(by_key=True).words, bounds(each=True).words

    arrays = found(given(array, jnp.asarray(elements)))
    steps, steps_by_key, by_query, by_key, each = map(np.asarray, arrays)
    assert steps.shape[1] == (1 + 2 + 3 if is_causal else 12)
    assert steps_by_key.shape[1] == (3 + 2 + 1 + 1 if is_causal else 12)  # one where nothing is visited
    padding = [(0, (-n % TILE) * (n > 1)) for n in elements.shape[-2:]]
    padded = np.pad(elements, [(0, 0)] * (elements.ndim - 2) + padding)
    padded = padded.reshape(-1, N if elements.shape[-3:-2] == (N,) else 1, *padded.shape[-2:])
    band = (np.arange(512) < S) & (np.tri(384, 512, dtype=bool) if is_causal else True)
    band = kinds(np.broadcast_to(band, (384, 512)), TILE, TILE)
    for b, of_heads in enumerate(padded):
        of_tiles = np.stack([kinds(np.broadcast_to(x, (384, 512)), TILE, TILE) for x in of_heads])
        of_tiles = np.where((of_tiles == 2).all(0), 2, np.minimum(of_tiles.max(0), 1))
        if array == "bias":
            of_tiles = 2 * np.minimum(of_tiles, 1)
        expected = np.minimum(of_tiles, band)
        live = {tuple(map(int, place)): expected[tuple(place)] == 1 for place in np.argwhere(expected)}
        for words in (steps, steps_by_key):
            assert visited(tpu_tiles.Schedule(words, True, True), b)[0] == live
        np.testing.assert_array_equal(each[b], np.array([0, 2, 1])[expected])
        for words, wanted in ((by_query[b], expected), (by_key[b], expected.T)):
            for (count, *tiles), row in zip(words, wanted, strict=True):
                assert [(t // 2, t % 2) for t in tiles[:count]] == [
                    (j, row[j] == 1) for j in np.flatnonzero(row)
                ]


def test_a_narrow_band_has_no_full_tile():
    mask, x = Mask(True, (5, 0)), jnp.zeros((1, 3 * TILE, 1, 2), BF16)
    options = KernelOptions.of(Options(scale=1.0), mask)
    refs = kernel_inputs.inputs(options, Operands(x, x, x, mask=mask), None, SMALL.padding)
    found = np.moveaxis(np.asarray(hopper_tiles.bounds(options, refs, TILE, TILE)), -1, 0)
    first, full_first, full_end, end = found
    np.testing.assert_array_equal((first, end), [[[0, 0, 1]], [[1, 2, 3]]])
    assert (np.minimum(full_end, end) <= np.maximum(full_first, first)).all()


@thorough
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("implementation", KERNELS)
def test_hidden_tiles_are_not_touched(implementation, array, monkeypatch):
    """NaN in values times a weight of 0 is NaN, as in rows of queries and dout times a gradient of 0.

    So only a tile that is passed over keeps it from what its rows and its keys have of other tiles.
    """
    set_tiling(monkeypatch, SMALL)
    kinds = np.array([[1, 1, 0, 0], [0, 0, 1, 2], [0, 1, 0, 1]])
    rng = np.random.default_rng(0)
    plane = given(array, jnp.asarray(holes(rng, kinds)))
    q, k, v, dout = (jnp.asarray(rng.standard_normal((1, n, 1, 64)), BF16) for n in (T, S, S, T))

    @jax.jit
    def run(q, k, v, dout):
        call = partial(dot_product_attention, **plane, implementation=implementation)
        out, pullback = jax.vjp(call, q, k, v)
        return out, *pullback(dout)

    def of_tiles(x):
        whole = np.pad(np.asarray(x, np.float32)[0, :, 0], ((0, -x.shape[1] % TILE), (0, 0)))
        return np.isnan(whole).reshape(-1, TILE, 64).any((1, 2))

    with pallas.interpreting(implementation), jax.enable_x64(True):
        out, dq, dk, dv = run(q, k, v.at[:, :TILE].set(jnp.nan), dout)
        assert of_tiles(out).tolist() == of_tiles(dq).tolist() == [True, False, False]
        assert of_tiles(dk).tolist() == [True, True, False, False]
        assert not of_tiles(dv).any()
        out, dq, dk, dv = run(q, k, v, dout.at[:, TILE : 2 * TILE].set(jnp.nan))
        assert of_tiles(dq).tolist() == [False, True, False]
        assert of_tiles(dk).tolist() == of_tiles(dv).tolist() == [False, False, True, True]


LONG = {
    ("mask", "of all"): {},
    ("mask", "of batch entries"): {"B": 2, "K": 2, "is_causal": True},
    ("mask", "of heads"): {"logits_soft_cap": 3.0},
    ("mask", "of keys"): {"B": 2},
    ("mask", "of queries"): {"local_window_size": (90, 200)},
    ("bias", "of all"): {"B": 2},
    ("bias", "of heads"): {"B": 2, "is_causal": True},
}


@thorough
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("array", "name"), LONG)
def test_against_definition(array, name, implementation, monkeypatch):
    """Holes in the middle of a row, rows that see nothing, tiles in which all is seen."""
    set_tiling(monkeypatch, SMALL)

    def arrays(rng):
        found = given(array, MASKS[name](rng))
        return {"bias": rng.standard_normal((N, T, S))} | found if name == "of heads" else found

    with pallas.interpreting(implementation), jax.enable_x64(True):
        measured(OPERATOR, implementation, long_case(name, arrays, T=T, S=S, N=N, **LONG[array, name]))


@thorough
@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap_over_masks(implementation, monkeypatch, rng):
    """Each has its own tiles; forward and gradients."""
    set_tiling(monkeypatch, SMALL)
    masks = jnp.stack([jnp.asarray(holes(rng)), jnp.asarray(holes(rng, KINDS[::-1]))])
    q, k, dout = (jnp.asarray(rng.standard_normal((1, n, 1, 16)), BF16) for n in (T, S, T))

    def step(mask):
        call = partial(dot_product_attention, mask=mask, implementation=implementation)
        out, pullback = jax.vjp(call, q, k, k)
        return out, *pullback(dout)

    with pallas.interpreting(implementation), jax.enable_x64(True):
        got = jax.block_until_ready(jax.jit(jax.vmap(step))(masks))
        rows = [jax.block_until_ready(jax.jit(step)(mask)) for mask in masks]
    for x, *expected in zip(got, *rows, strict=True):
        assert_close(x, jnp.stack(expected), 0.0)


@thorough
@pytest.mark.parametrize("array", ARRAYS)
def test_on_shards_and_to_second_order(array, monkeypatch, rng):
    """Each shard has tiles of its own batch entries and heads; derivatives of gradients are portable."""
    set_tiling(monkeypatch, SMALL)
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)
    q, k, dout = (jnp.asarray(rng.standard_normal((2, n, N, 8)), np.float32) for n in (T, S, T))
    elements = np.stack([MASKS["of heads"](rng), MASKS["of heads"](rng)[:, ::-1]])
    plane = jnp.asarray(given(array, elements)[array])

    def step(implementation, q, k, dout, plane):
        def gradients(q, k):
            call = partial(dot_product_attention, **{array: plane}, implementation=implementation)
            out, pullback = jax.vjp(call, q, k, k)
            return out, *pullback(dout)

        squares = lambda q, k: sum(jnp.sin(x).sum() for x in gradients(q, k))
        return gradients(q, k), jax.grad(squares, (0, 1))(q, k)

    expected = jax.jit(partial(step, "xla"))(q, k, dout, plane)
    with pallas.interpreting("mosaic_tpu"), jax.set_mesh(mesh):
        specs = jax.P("b", None, "n"), jax.P("b", None, "n"), jax.P("b", None, "n"), jax.P("b", "n")
        placed = map(jax.device_put, (q, k, dout, plane), (jax.NamedSharding(mesh, x) for x in specs))
        got = jax.jit(partial(step, "mosaic_tpu"))(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-5)
