"""What functions read of arrays in kernels: which values XLA computes beforehand, and that they are right."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.dot_product.kernel_calls import tpu

from jax_attn_bwd import dot_product_attention, explain, mods
from jax_attn_bwd.ops.dot_product.kernels import functions, hoisting

T, S, N = 24, 16, 3
TABLE = np.random.default_rng(0).standard_normal((N, 90)).astype(np.float32)


def bucketed(x, batch, head, row, column, table):
    near = jnp.abs(column - row)
    far = 8 + jnp.log(jnp.maximum(near, 1).astype(jnp.float32) / 8).astype(jnp.int32)
    return x + table[head, jnp.where(near < 8, near, far) + jnp.where(column > row, 16, 0)]


OF_DISTANCES = {
    "relative bias": mods.relative_bias(40),
    "buckets": bucketed,
    "floor": lambda x, b, h, r, c, table: x + table[h, (r - c) // 3 % 7],
    "farther minus nearer": lambda x, b, h, r, c, table: x + table[h, jnp.maximum(r, c) - jnp.minimum(r, c)],
    "shifted": lambda x, b, h, r, c, table: x + table[h, (r + 30) - (c - 2)],
    "beside a row's": lambda x, b, h, r, c, table: jnp.maximum(x, table[h, r]) + jax.nn.relu(table[b, r - c]),
    "order": lambda x, b, h, r, c, table: x + table[h, jnp.where(r > c, 5, 7)],
}


@pytest.mark.parametrize("name", OF_DISTANCES)
def test_values_of_distances(name):
    score = OF_DISTANCES[name]
    function = hoisting.of(score, True, (TABLE,))
    assert hoisting.unsupported(function, "score_mod", distances=True) is None
    assert "row and column together" in hoisting.unsupported(function, "score_mod", distances=False)
    rows, columns = (
        np.minimum(np.arange(n), n - 3).astype(np.int32)[None] for n in (T, S)
    )  # three of padding
    numbers = np.arange(2, dtype=np.int32), np.arange(N, dtype=np.int32)
    found = hoisting.values(function, (TABLE,), *numbers, rows, columns)
    assert len(function.cut.of_distance) == 1
    (vector,) = (x for x, of in zip(found, function.cut.handed, strict=True) if of.is_of_distance)
    ends = S - columns.max(), S + rows.max()  # entries: what lies beyond is as far, or it may be NaN
    for beyond, end in ((vector[..., : ends[0]], ends[0]), (vector[..., ends[1] :], ends[1])):
        np.testing.assert_array_equal(beyond, jnp.broadcast_to(vector[..., end, None], beyond.shape))
    row, column = np.arange(T - 2)[:, None], np.arange(S - 2)[None]
    x = jnp.linspace(0.5, 2.0, row.size * column.size, dtype=np.float32).reshape(row.size, column.size)
    for batch in range(2):
        for head in range(N):
            given = []
            for value, of in zip(found, function.cut.handed, strict=True):
                entry = value[batch % value.shape[0], head % value.shape[1]]
                given.append(entry[S + row - column] if of.is_of_distance else entry[: T - 2])
            got = function(x, *(np.full((1, 1), i, np.int32) for i in (batch, head)), row, column, *given)
            np.testing.assert_array_equal(got, score_of_each_element(score, x, batch, head))


def score_of_each_element(score, x, batch, head):
    """Element by element."""
    row, column = (i.astype(np.int32) for i in np.indices(x.shape))
    of_element = lambda x, r, c: score(x, jnp.int32(batch), jnp.int32(head), r, c, jnp.asarray(TABLE))
    return jax.jit(jax.vmap(jax.vmap(of_element)))(x, row, column)


def test_values_of_batch_entries():
    lengths = np.array([3, 5, 4], np.int32)
    function = hoisting.of(lambda b, h, r, c, lengths: c < lengths[b], False, (lengths,))
    at = np.arange(8, dtype=np.int32)[None]
    (found,) = hoisting.values(function, (lengths,), np.arange(3, dtype=np.int32), at[0, :1], at, at)
    np.testing.assert_array_equal(found.reshape(3, 8), at < lengths[:, None])


ELSEWHERE = {
    "sum": lambda r, c: r + c,
    "weighted": lambda r, c: 2 * r - c,
    "of a plane": lambda r, c: r // 7 - c // 7,
    "either": lambda r, c: jnp.where(r > 5, r, c),
    "clipped on one side": lambda r, c: jnp.maximum(r, 5) - c,
    "order from a row on": lambda r, c: jnp.where((r > 5) & (c > r), 5, 7),
}


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_of_no_distance_is_refused(place):
    function = hoisting.of(lambda x, b, h, r, c, table: x + table[h, place(r, c)], True, (TABLE,))
    assert not function.cut.of_distance
    assert "row and column together" in hoisting.unsupported(function, "score_mod", distances=True)


def test_what_a_kernel_makes_itself_is_not_handed_for_each_distance():
    function = hoisting.of(mods.alibi, True, (TABLE[:, 0],))
    assert [value.aval.shape for value in function.cut.handed] == [()]
    assert not function.cut.of_distance


@pytest.mark.parametrize(("block_q", "block_k"), [(8, 8), (4, 16), (16, 8)])
def test_bounds_on_tiles_are_exact(block_q, block_k, rng):
    T, S = 48, 32
    vector = rng.integers(-50, 50, (2, 4, T + S)).astype(np.int32)
    refs = SimpleNamespace(
        q=np.zeros((2, T, 4, 1)), k=np.zeros((2, S, 2, 1)), mask_values=(vector,),
        batch_number=np.arange(2), head_number=np.arange(4),
    )  # fmt: skip
    (bounds,) = functions.value_bounds(refs, block_q, block_k).args
    plane = vector[:, :, S + np.arange(T)[:, None] - np.arange(S)]
    tiles = plane.reshape(2, 2, 2, T // block_q, block_q, S // block_k, block_k)
    np.testing.assert_array_equal(bounds.least, tiles.min((-3, -1)))
    np.testing.assert_array_equal(bounds.greatest, tiles.max((-3, -1)))


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.relu6])
def test_functions_with_a_derivative_of_their_own(function):
    """Beside an array, on a tile: with that derivative, which of relu is 0 at 0."""
    score = hoisting.of(lambda x, b, h, r, c, table: function(x) + table[h, r], True, (TABLE,))
    zero, x = np.zeros((1, 1), np.int32), jnp.asarray([[-1.5, 0.25], [0.0, 7.0]], np.float32)
    call = lambda x: score(x, zero, zero, np.arange(2)[:, None], np.arange(2)[None], TABLE[:1, :2].T)
    of = lambda x: function(x) + TABLE[0, :2, None]
    np.testing.assert_array_equal(call(x), of(x))
    np.testing.assert_array_equal(*(jax.vjp(f, x)[1](jnp.ones_like(x))[0] for f in (call, of)))


def test_gradients_of_too_many_distances_are_refused():
    def reason(T):
        shapes = {"query": (1, T, 8, 64), "key": (1, T, 1, 64), "value": (1, T, 1, 64)}
        given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
        table = jax.ShapeDtypeStruct((8, 81), "float32")
        with tpu():
            found = explain(
                dot_product_attention, **given, score_mod=mods.relative_bias(40), mod_args=(table,)
            )
        return found.refused.get("mosaic_tpu", "ok")

    assert reason(2**15) == "ok"
    assert "up to 524288 distances, of all query heads of a key head, got 1048576" in reason(2**16)


@pytest.mark.parametrize("chip", ["H200", "v6e"])
def test_a_dtype_that_no_kernel_takes_is_refused_before_functions_are_traced(chip):
    """Kernels trace them on float32, and here nothing is promoted."""
    q = jax.ShapeDtypeStruct((1, 16, 2, 8), "float64")
    slopes = jax.ShapeDtypeStruct((2,), "float64")
    found = explain(dot_product_attention, q, q, q, score_mod=mods.alibi, mod_args=(slopes,), platform=chip)
    kernel = "mosaic_gpu" if chip == "H200" else "mosaic_tpu"
    assert "it multiplies" in found.refused[kernel]
    assert found["xla"] == "ok"
