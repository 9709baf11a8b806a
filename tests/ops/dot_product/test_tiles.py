"""Which tiles are visited: none that holds something to see is missed, none that holds nothing is kept."""

import jax.numpy as jnp
import numpy as np
from helpers import thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Materialized, count, plan
from jax_attn_bwd.ops.dot_product.portable import tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Sizes

lengths = st.integers(1, 70)
blocks = st.sampled_from([1, 3, 8, 16])


def band(T, S, mask):
    """The visible elements of the whole plane, by their definition."""
    row, column = np.arange(T)[:, None], np.arange(S)[None]
    seen = np.ones((T, S), bool)
    if mask.is_causal:
        seen &= column <= row
    if mask.window is not None:
        seen &= (row - column <= mask.window[0]) & (column - row <= mask.window[1])
    return seen


@settings(max_examples=200, deadline=None)
@given(
    lengths,
    lengths,
    blocks,
    blocks,
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_static_pairs_are_exact(T, S, block_q, block_k, is_causal, window):
    mask = Mask(is_causal, window)
    found = visibility.tile_mask(mask, None, Sizes((1,), T, S, 1, 1))
    full, mixed, final = tiles.static_pairs(found, block_q, block_k)
    assert final
    seen = band(T, S, mask)
    kind = np.full((count(T, block_q), count(S, block_k)), "dead", "U5")
    kind[tuple(full.T)] = "full"
    kind[tuple(mixed.T)] = "mixed"
    for (i, j), value in np.ndenumerate(kind):
        tile = seen[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        whole = tile.shape == (block_q, block_k)
        expected = "dead" if not tile.any() else "full" if tile.all() and whole else "mixed"
        assert value == expected, (i, j)


def live(T, S, blocks, **conditions):
    """The run-time flags of a call with one head."""
    given = visibility.tile_mask(Mask(**conditions), None, Sizes((1,), T, S, 1, 1), *blocks)
    return np.asarray(tiles.live_tiles(given, *blocks))


@thorough
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_run_time_flags_miss_nothing(T, S, seed):
    rng = np.random.default_rng(seed)
    blocks = (8, 16)
    q_at = rng.integers(0, 60, (2, T)).astype(np.int32)
    k_at = rng.integers(0, 60, (2, S)).astype(np.int32)
    q_segment = np.sort(rng.integers(0, 4, (2, T)), -1).astype(np.int32)
    k_segment = np.sort(rng.integers(0, 4, (2, S)), -1).astype(np.int32)
    q_length, k_length = rng.integers(0, T + 1, 2), rng.integers(0, S + 1, 2)
    flags = live(
        T,
        S,
        blocks,
        is_causal=True,
        window=(9, 3),
        query_positions=jnp.asarray(q_at),
        key_value_positions=jnp.asarray(k_at),
        query_segment_ids=jnp.asarray(q_segment),
        key_value_segment_ids=jnp.asarray(k_segment),
        query_seq_lengths=jnp.asarray(q_length, jnp.int32),
        key_value_seq_lengths=jnp.asarray(k_length, jnp.int32),
    )
    distance = q_at[..., :, None] - k_at[..., None, :]
    seen = (distance >= 0) & (distance <= 9)
    seen &= q_segment[..., :, None] == k_segment[..., None, :]
    seen &= (np.arange(T)[:, None] < q_length[:, None, None]) & (np.arange(S) < k_length[:, None, None])
    for (i, j), alive in np.ndenumerate(flags):
        assert alive or not seen[:, i * 8 : i * 8 + 8, j * 16 : j * 16 + 16].any(), (i, j)


def test_run_time_flags_drop_dead_tiles():
    blocks = (16, 16)
    packed = jnp.asarray(np.repeat(np.arange(4), 16)[None], jnp.int32)
    flags = live(64, 64, blocks, query_segment_ids=packed, key_value_segment_ids=packed)
    np.testing.assert_array_equal(flags, np.eye(4, dtype=bool))
    flags = live(64, 64, blocks, key_value_seq_lengths=jnp.asarray([5, 32], jnp.int32))
    np.testing.assert_array_equal(flags, np.tile([True, True, False, False], (4, 1)))
    flags = live(64, 64, blocks, query_seq_lengths=jnp.asarray([0, 17], jnp.int32))
    np.testing.assert_array_equal(flags, np.tile([[True], [True], [False], [False]], (1, 4)))
    shifted = {"query_positions": jnp.arange(48, 112, dtype=jnp.int32)[None]}
    flags = live(64, 64, blocks, window=(15, 0), is_causal=True, **shifted)
    expected = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(flags, np.asarray(expected, bool))


def test_tiles_of_a_mask_array(rng):
    """Those in which no head of any batch entry sees anything are dead, whatever the mask broadcasts over."""
    blocks, T, S = (8, 16), 41, 70
    for shape in ((2, 1, T, S), (1, 1, T, S), (1, 1, 1, S), (2, 1, T, 1), (1, 1, 1, 1)):
        mask = rng.random(shape) < (0.004 if shape[-2:] == (T, S) else 0.1)
        padded = np.zeros((48, 80), bool)
        padded[:T, :S] = np.broadcast_to(mask.any((0, 1)), (T, S))
        expected = padded.reshape(6, 8, 5, 16).any((1, 3))
        np.testing.assert_array_equal(live(T, S, blocks, elements=jnp.asarray(mask)), expected)
        assert shape[-2:] != (T, S) or 0 < expected.sum() < expected.size


def test_tiles_of_segments(rng):
    """None that shares a segment is missed, none whose ranges are apart kept; full are those of one."""
    for _ in range(50):
        q, k = np.cumsum(rng.random(16) < 0.2), np.cumsum(rng.random(32) < 0.2)
        rows, columns = visibility.Tokens(16, segment=q[None]), visibility.Tokens(32, segment=k[None])
        some, every = visibility.of_tiles(Mask(), rows, columns, 4, 8)
        q, k = q.reshape(4, 1, 4), k.reshape(1, 4, 8)
        met = (q[..., :, None] == k[..., None, :]).any((-1, -2))
        apart = (q.max(-1) < k.min(-1)) | (k.max(-1) < q.min(-1))
        of_one = (q.min(-1) == k.max(-1)) & (q.max(-1) == k.min(-1))
        np.testing.assert_array_equal(np.asarray(some)[0] & ~apart, np.asarray(some)[0])
        assert not (met & ~np.asarray(some)[0]).any()
        np.testing.assert_array_equal(np.asarray(every)[0], of_one)


def test_tiles_of_lengths():
    """Exactly, of each length of the keys; queries beyond theirs hide nothing."""
    T, S = 9, 12
    ends = np.repeat([T, 4], S + 1), np.tile(np.arange(S + 1), 2)
    rows, columns = (visibility.Tokens(n, valid_length=end) for n, end in zip((T, S), ends, strict=True))
    some, every = visibility.of_tiles(Mask(), rows, columns, 3, 4)
    seen = np.arange(S) < ends[1][:, None, None]
    is_row = np.arange(T)[:, None] < ends[0][:, None, None]
    for found, plane, reduce in ((some, is_row & seen, np.any), (every, seen | ~is_row, np.all)):
        tiles = np.broadcast_to(plane, (len(ends[0]), T, S)).reshape(-1, T // 3, 3, S // 4, 4)
        expected = reduce(tiles, (2, 4))
        expected = expected if reduce is np.any else expected & np.asarray(some)
        np.testing.assert_array_equal(found, expected)


def test_default_tiles_cover_any_length(monkeypatch):
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)
    for T in (0, 1, 2, 7, 8, 255, 256, 257, 1000, 4096, 4099):
        operands = Operands(*(jnp.zeros((1, T, 1, 1)),) * 3)
        schedule = plan("xla", Options(scale=1.0), operands).schedule
        for block, limit in ((schedule.block_q, 256), (schedule.block_k, 512)):
            assert 1 <= block <= limit
            padding = count(T, block) * block - T
            assert 0 <= padding <= max(8 * count(T, block), 0)
            assert T <= 1 or block % 8 == 0


def test_planes_are_whole_up_to_a_size():
    def is_materialized(shape):
        operands = Operands(*(jnp.zeros(shape),) * 3)
        return isinstance(plan("xla", Options(scale=1.0), operands).schedule, Materialized)

    assert all(map(is_materialized, [(1, 512, 8, 1), (4, 197, 6, 1), (1, 1, 1, 1)]))
    assert not any(map(is_materialized, [(1, 1024, 4, 1), (1, 0, 1, 1), (0, 8, 1, 1)]))
