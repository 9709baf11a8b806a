"""Strips whose width is told at run time: where they are chosen, what they meet, and that they are exact."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core.targets import aimed_at
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import reference
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Strips, plan
from jax_attn_bwd.ops.dot_product.portable import strips
from jax_attn_bwd.ops.dot_product.portable.strips import StripSource
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

PLAIN = Options(scale=1.0)


def segments(ids, keys=None):
    return {"query_segment_ids": ids, "key_value_segment_ids": ids if keys is None else keys}


def test_they_are_for_masks_of_run_time_and_for_many_strips():
    def found(shape, ids=None, **mask):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        mask |= {} if ids is None else segments(jax.ShapeDtypeStruct(ids, jnp.int32))
        with aimed_at("H200"):
            schedule = plan("xla", PLAIN, Operands(x, x, x, mask=Mask(**mask))).schedule
        is_wide = isinstance(schedule, Strips) and schedule.runtime_extent
        return schedule.block_q if is_wide else None, getattr(schedule, "head_slices", 0)

    shape = (4, 4096, 16, 128)
    assert found(shape, (1, 4096), is_causal=True) == (512, 1)
    assert found(shape, (4, 4096), is_causal=True) == (1024, 4)
    assert found((64, 2048, 2, 64), (64, 2048)) == (1024, 16)  # so many turns that each has work
    assert found(shape, is_causal=True) == (None, 1)
    assert found((1, 8192, 16, 128), is_causal=True) == (1024, 1)
    assert found((1, 1 << 17, 16, 128)) == (1024, 1)
    assert found((1, 1 << 18, 16, 128)) == (None, 0)  # the widest has no room


def extents(ids, blocks, turns, axis, vmapped=False):
    """Those of a call with these segments of queries and of keys, under `vmap` of those of one of B calls."""
    widths = []

    def found(*ids):
        q, k = (jax.ShapeDtypeStruct((*x.shape, 1, 4), jnp.float32) for x in ids)
        schedule = Strips(*blocks, turns, runtime_extent=True)
        plane = StripSource.of(schedule, Operands(q, k, k, mask=Mask(**segments(*ids))))
        *met, known = strips.extents(plane, axis)
        widths.extend(known)
        return met

    run = jax.vmap(lambda *ids: found(*(x[None] for x in ids))) if vmapped else found
    first, width = jax.jit(run, compiler_options=QUICK)(*ids)
    return np.asarray(first), np.asarray(widths)[width]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_strip_meets_all_that_it_sees_and_little_more(is_sorted, rng):
    """By entries that are taken in turn, and of all where not; any order of the ids is right."""
    (B, T, S), blocks = (4, 96, 50), (8, 10)
    ids = [rng.integers(0, 9, size=(B, n)).astype(np.int32) for n in (T, S)]
    ids = [np.sort(x) if is_sorted else x for x in ids]
    seen = ids[0][:, :, None] == ids[1][:, None]
    for turns, axis in ((1, 0), (2, 1)):
        entries = seen.reshape(turns, -1, T, S).any(1)
        first, width = extents(ids, blocks, turns, axis)
        own, other = blocks[axis], blocks[1 - axis]
        for turn, elements in enumerate(entries if axis == 0 else entries.swapaxes(1, 2)):
            for i, rows in enumerate(elements.reshape(-1, own, elements.shape[1])):
                begin, end = first[turn, i], first[turn, i] + width[turn, i]
                met = np.flatnonzero(rows.any(0)) // other
                assert 0 <= begin < end <= rows.shape[1] // other
                assert ((met >= begin) & (met < end)).all()
                if is_sorted and len(met):  # bounds of unsorted ids tell less
                    assert end - begin <= met[-1] - met[0] + 1 + 2


def test_under_vmap_a_strip_meets_what_it_sees_in_any_call(rng):
    ids = [np.sort(rng.integers(0, 9, size=(3, n))).astype(np.int32) for n in (40, 50)]
    together, each = (extents(ids, (8, 10), 1, 0, vmapped) for vmapped in (False, True))
    for one, many in zip(together, each, strict=True):
        np.testing.assert_array_equal(many, np.broadcast_to(one, many.shape))


@pytest.mark.parametrize("axis", [0, 1])
def test_strips_of_a_window_of_indices_end_within_the_plane(axis):
    """Five blocks at the end are taken as six, of which the first lies before them."""
    (T, S), blocks = ((46, 94), (94, 46))[axis], ((8, 12), (12, 8))[axis]
    window = ((2, 50), (50, 2))[axis]
    q, k = (jax.ShapeDtypeStruct((1, n, 1, 4), jnp.float32) for n in (T, S))
    schedule = Strips(*blocks, head_slices=1, runtime_extent=True)
    first, width, widths = strips.extents(
        StripSource.of(schedule, Operands(q, k, k, mask=Mask(window=window))), axis
    )
    row, column = np.ogrid[:T, :S]
    seen = (row - column <= window[0]) & (column - row <= window[1])
    for i, (begin, size) in enumerate(zip(np.asarray(first[0]), np.asarray(width[0]), strict=True)):
        met = np.flatnonzero(seen.take(range(8 * i, min(8 * i + 8, 46)), axis).any(axis)) // 12
        assert 0 <= begin <= met[0]
        assert met[-1] < begin + widths[size] <= 8


def test_widths_are_few_and_near():
    widths = strips._widths(32, np.asarray([32]), is_known=False)
    assert widths == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert strips._widths(8, np.arange(1, 9), is_known=True) == [1, 2, 3, 4, 6, 8]
    assert strips._widths(8, np.asarray([8]), is_known=True) == [8]  # no branch
    assert strips._widths(8, np.asarray([3]), is_known=False) == [1, 2, 3]  # a window is no wider


@pytest.fixture
def played(monkeypatch):
    def play(turns):
        small = Strips(8, 12, turns, runtime_extent=True)
        monkeypatch.setattr(planning, "on_gpu", lambda *_: small)

    jax.clear_caches()  # what was traced with other tiles
    yield play
    jax.clear_caches()


def ids(rng, *shape):
    return jnp.asarray(rng.integers(0, 4, size=shape), jnp.int32)


def documents(rng, *shape):
    return jnp.sort(ids(rng, *shape), -1)


CALLS = {  # turns; T, S, query heads, key heads; options; arrays of the mask
    "unsorted, grouped, sink": (
        2, 21, 14, 2, 1, {"is_causal": True, "sink": True},
        lambda rng: segments(ids(rng, 2, 21).at[:, 18:].set(7), ids(rng, 2, 14).at[:, 6:10].set(8)),
    ),
    "documents, entries at once": (
        1, 24, 36, 4, 2, {}, lambda rng: segments(documents(rng, 2, 24), documents(rng, 2, 36)),
    ),
    "documents of all": (1, 64, 64, 4, 2, {"is_causal": True}, lambda rng: segments(documents(rng, 1, 64))),
    "documents of each, at once": (1, 64, 64, 4, 2, {}, lambda rng: segments(documents(rng, 2, 64))),
    "documents of each, axes apart": (0, 64, 64, 4, 2, {}, lambda rng: segments(documents(rng, 2, 64))),
    "lengths": (
        2, 40, 50, 2, 2, {"logits_soft_cap": 3.0},
        lambda _: {"query_seq_lengths": jnp.int32([40, 9]), "key_value_seq_lengths": jnp.int32([0, 33])},
    ),
    "positions": (
        2, 40, 50, 2, 1, {"local_window_size": (9, 4)},
        lambda rng: {"query_positions": 9 * ids(rng, 2, 40), "key_value_positions": 9 * ids(rng, 2, 50)},
    ),
    "shapes alone": (1, 56, 64, 2, 1, {"is_causal": True}, lambda _: {}),
    "shapes alone, window": (1, 46, 94, 1, 1, {"local_window_size": (2, 50)}, lambda _: {}),
}  # fmt: skip

DEFAULT = ("unsorted, grouped, sink", "documents, entries at once")


def outputs_and_gradients(function, arrays, options, mask, second):
    *operands, dout, dlse, along = arrays

    def both(q):
        call = lambda q, k, v, sink: function(q, k, v, sink=sink, **options, **mask)
        out, pull = jax.vjp(call, q, *operands[1:])
        return out, pull((dout, dlse))

    of_sum = lambda q: (both(q)[1][0] * along).sum() + (both(q)[0][0] * dout).sum()
    return both(operands[0]), jax.grad(of_sum)(operands[0]) if second else None


def compared(arrays, options, mask, second=False, poisoned=False):
    """Ours beside the definition, both compiled."""
    run = lambda f, arrays: jax.jit(
        lambda arrays, mask: outputs_and_gradients(f, arrays, options, mask, second), compiler_options=QUICK
    )(arrays, mask)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = run(reference.dot_product_attention, arrays)
    if poisoned:
        hidden = slice(18, 21), slice(6, 10), slice(6, 10)
        bad = [x.at[:, at].set(np.nan) for x, at in zip(arrays[:3], hidden, strict=True)]
        arrays = [*bad, *arrays[3:]]
    found = run(partial(dot_product_attention, return_residual=True), arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-10)


def random_arrays(rng, B, T, S, N, K, sink):
    shapes = (T, N, 8), (S, K, 8), (S, K, 6), (T, N, 6), (T, N), (T, N, 8)
    q, k, v, *others = (jnp.asarray(rng.normal(size=(B, *shape))) for shape in shapes)
    return [q, k, v, jnp.asarray(rng.normal(size=N)) if sink else None, *others]


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if call in DEFAULT else thorough) for call in CALLS]
)
def test_they_give_the_definition(call, played, rng):
    """Outputs, gradients for both cotangents, and of some calls a derivative of these.

    NaN in queries that see nothing, and in keys that are not seen, reaches nothing.
    """
    turns, T, S, N, K, options, mask = CALLS[call]
    played(turns)
    options = dict(options)
    arrays = random_arrays(rng, 2, T, S, N, K, options.pop("sink", False))
    compared(arrays, options, mask(rng), second="documents of" in call, poisoned="unsorted" in call)


def test_vmap_leaves_one_branch_to_take(played, rng):
    """Of all entries the widest, rather than all branches of each."""
    played(1)
    q, own = jnp.zeros((3, 64, 1, 4)), documents(rng, 3, 64)
    call = lambda q, ids: dot_product_attention(q, q, q, **segments(ids))
    assert str(jax.make_jaxpr(jax.vmap(call))(q, own)).count("cond[") == 1


@thorough
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=["both", "arrays", "ids"])
def test_vmapped_and_rematerialised(axes, played, rng):
    played(1)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, 64, 2, 4))) for _ in range(4))

    def step(function, arrays, ids):
        *operands, dout = arrays
        call = jax.checkpoint(lambda q, k, v: function(q, k, v, is_causal=True, **segments(ids)))
        out, pull = jax.vjp(call, *operands)
        return out, pull(dout)

    own = documents(rng, 2, 64)
    arrays, own = [x if axes[0] == 0 else x[0] for x in (q, k, v, dout)], own if axes[1] == 0 else own[0]
    found = jax.jit(jax.vmap(partial(step, dot_product_attention), in_axes=axes))(arrays, own)
    with jax.numpy_rank_promotion("allow"):
        definition = lambda *args, **options: reference.dot_product_attention(*args, **options)[0]
        expected = jax.jit(jax.vmap(partial(step, definition), in_axes=axes))(arrays, own)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-10)


@thorough
def test_heads_of_wide_strips_are_computed_in_slices(played, rng, monkeypatch):
    monkeypatch.setattr(strips, "SLICE_LOGITS", 512)
    for turns in (1, 2):
        played(turns)
        arrays = random_arrays(rng, 2, 64, 64, 8, 4, sink=True)
        compared(arrays, {}, segments(documents(rng, 2, 64)))
        jax.clear_caches()


@thorough
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_shards_of_batch_and_heads(kind, spec, played, rng):
    """On an Explicit mesh each device has strips of its own."""
    played(1 if kind == AxisType.Explicit else 0)
    arrays = random_arrays(rng, 2, 40, 40, 4, 2, sink=False)
    own = documents(rng, 2, 40)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.numpy_rank_promotion("allow"):
        definition = reference.dot_product_attention
        expected = outputs_and_gradients(definition, arrays, {}, segments(own), False)[0]
    ours = partial(dot_product_attention, return_residual=True)
    with jax.set_mesh(mesh):
        put = lambda x, spec: None if x is None else jax.device_put(x, NamedSharding(mesh, spec))
        arrays = [put(x, spec) for x in arrays]
        own = put(own, spec if spec == P("x") else P())
        step = jax.jit(lambda arrays, ids: outputs_and_gradients(ours, arrays, {}, segments(ids), False)[0])
        found = step(arrays, own)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(np.asarray(x), y, 1e-10)
