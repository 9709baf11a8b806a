"""Bounds of functions on tiles of indices enclose what the functions give, whatever they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd._core.jaxpr import intervals
from jax_attn_bwd._core.jaxpr.interval_rules import gathered
from jax_attn_bwd._core.jaxpr.intervals import Interval

i32 = np.int32
COMPARISONS = (jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal, jnp.equal, jnp.not_equal)


def number(rng, depth):
    """A random function `(batch, row, column, ids, table) -> int32`."""
    if depth == 0 or rng.random() < 0.15:
        constant = i32(rng.integers(-9, 10))
        leaves = (
            lambda b, r, c, ids, t: r,
            lambda b, r, c, ids, t: c,
            lambda b, r, c, ids, t: r - c,
            lambda b, r, c, ids, t: ids[b, r],
            lambda b, r, c, ids, t: ids[b, c],
            lambda b, r, c, ids, t: ids[0, jnp.abs(r - c)],
            lambda b, r, c, ids, t: t[r // 8, c // 8].astype(i32),
            lambda b, r, c, ids, t: b + constant,
            lambda b, r, c, ids, t: jnp.full_like(r, constant),
        )
        return leaves[rng.integers(len(leaves))]
    x, y = number(rng, depth - 1), number(rng, depth - 1)
    condition, n = condition_of(rng, depth - 1), i32(rng.choice([-5, -1, 1, 2, 3, 4, 7, 16]))
    big = i32(rng.choice([3, 1 << 12, 1 << 30]))
    forms = (
        lambda *a: x(*a) + y(*a),
        lambda *a: x(*a) - y(*a),
        lambda *a: x(*a) * y(*a),
        lambda *a: x(*a) * big,
        lambda *a: x(*a) ** 2,
        lambda *a: (lambda v: v * v)(x(*a)),
        lambda *a: x(*a) // n,
        lambda *a: x(*a) % n,
        lambda *a: x(*a) // y(*a),
        lambda *a: x(*a) % y(*a),
        lambda *a: jax.lax.div(x(*a), n),
        lambda *a: jax.lax.rem(x(*a), n),
        lambda *a: jnp.abs(x(*a)),
        lambda *a: -x(*a),
        lambda *a: jnp.sign(x(*a)),
        lambda *a: jnp.minimum(x(*a), y(*a)),
        lambda *a: jnp.maximum(x(*a), y(*a)),
        lambda *a: jnp.clip(x(*a), -abs(n), abs(n)),
        lambda *a: x(*a) >> 2,
        lambda *a: jnp.where(condition(*a), x(*a), y(*a)),
        lambda *a: jnp.floor(x(*a).astype(np.float32) * np.float32(0.3) + np.float32(n)).astype(i32),
        lambda *a: (x(*a) & i32(7)) | i32(1),  # no rule
        lambda *a: x(*a).astype(np.uint8).astype(i32),
    )
    return forms[rng.integers(len(forms))]


def condition_of(rng, depth):
    """A random function of the same arguments to bool."""
    if depth == 0 or rng.random() < 0.4:
        x, y = number(rng, max(depth - 1, 0)), number(rng, max(depth - 1, 0))
        compare = COMPARISONS[rng.integers(len(COMPARISONS))]
        if rng.random() < 0.15:
            return lambda *a: x(*a).astype(bool)
        return lambda *a: compare(x(*a), y(*a))
    p, q = condition_of(rng, depth - 1), condition_of(rng, depth - 1)
    forms = (
        lambda *a: p(*a) & q(*a),
        lambda *a: p(*a) | q(*a),
        lambda *a: p(*a) ^ q(*a),
        lambda *a: ~p(*a),
        lambda *a: jnp.where(p(*a), q(*a), ~q(*a)),
        lambda b, r, c, ids, t: t[r // 8, c // 8] & p(b, r, c, ids, t),
    )
    return forms[rng.integers(len(forms))]


def drawn(rng):
    """(elements `[2, T, 1]` and `[2, 1, S]`, (least, greatest) of blocks, arrays, blocks)."""
    T, S, block_q, block_k = 24, 32, *(int(n) for n in rng.choice([1, 4, 8], 2))
    at = [np.arange(n, dtype=i32) for n in (T, S)]
    if rng.random() < 0.3:
        at = [np.sort(rng.integers(0, n, n)).astype(i32) for n in (T, S)]
    ranges = [x.reshape(-1, block) for x, block in zip(at, (block_q, block_k), strict=True)]
    rows, columns = ([x.min(-1), x.max(-1)] for x in ranges)
    rows, columns = [x[None, :, None] for x in rows], [x[None, None, :] for x in columns]
    ids = np.sort(rng.integers(-3, 9, (2, S)), -1) if rng.random() < 0.7 else rng.integers(-3, 9, (2, S))
    arrays = np.arange(2, dtype=i32)[:, None, None], ids.astype(i32), rng.random((3, 4)) < 0.5
    return (at[0][None, :, None], at[1][None, None, :]), (rows, columns), arrays, (block_q, block_k)


def check_encloses(function, rng, traced):
    (row, column), (rows, columns), (batch, ids, table), (block_q, block_k) = drawn(rng)

    def bound(batch, ids, table):
        exact = [intervals.exact(x) for x in (batch, ids, table)]
        found = intervals.bounds(function, exact[0], Interval(*rows), Interval(*columns), *exact[1:])
        return found.least, found.greatest

    least, greatest = (jax.jit(bound) if traced else bound)(batch, ids, table)
    if not traced:
        assert isinstance(least, np.ndarray)
        assert isinstance(greatest, np.ndarray)
    with np.errstate(divide="ignore", over="ignore"):  # integers: 0, and round
        value = np.asarray(function(batch, row, column, jnp.asarray(ids), jnp.asarray(table)))
    value = np.broadcast_to(value, (2, row.shape[1], column.shape[2]))
    tiles = value.reshape(2, -1, block_q, value.shape[2] // block_k, block_k)
    assert (np.asarray(least) <= tiles.min((2, 4))).all()
    assert (np.asarray(greatest) >= tiles.max((2, 4))).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_bounds_enclose(seed):
    rng = np.random.default_rng(seed)
    check_encloses(condition_of(rng, 2), rng, traced=False)


@thorough
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_bounds_of_deep_functions_enclose(seed, depth, is_number):
    rng = np.random.default_rng(seed)
    check_encloses((number if is_number else condition_of)(rng, depth), rng, traced=False)


BY_BYTE = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
OPERATIONS = {  # beside those of random functions
    "selected by a number": lambda b, r, c, ids, t: jax.lax.select_n(
        (r // 8 + 0 * c) % 3, c <= r, c > r + 3, r - c > 9
    ),
    "selected by one of two": lambda b, r, c, ids, t: jax.lax.select_n(
        (r // 8 + 0 * c) % 2, c <= r, c > r + 3
    ),
    "selected by a number out of range": lambda b, r, c, ids, t: jax.lax.select_n(
        r // 4 - 2 + 0 * c, c + 0 * r, r - c
    ),
    "selected by conditions": lambda b, r, c, ids, t: jnp.select(
        [c <= r - 5, c <= r], [c % 7 < 3, c > 4], c < 20
    ),
    "numbers that it makes": lambda b, r, c, ids, t: jnp.arange(8, dtype=i32)[r % 8] < c // 4,
    "numbers that it sorts": lambda b, r, c, ids, t: jnp.sort(jnp.array([3, 1, 2], i32))[r // 8] < c,
    "a triangle that it makes": lambda b, r, c, ids, t: jnp.tril(jnp.ones((4, 4), bool))[r // 8, c // 8],
    "a float that it computes": lambda b, r, c, ids, t: c.astype(np.float32) < 4 * jnp.exp(np.float32(1)),
    "places told by a byte": lambda b, r, c, ids, t: jax.lax.gather(
        jnp.asarray(np.arange(256) < 100),
        (c * 37 % 256 + 0 * r).astype(np.uint8)[..., None],
        BY_BYTE,
        (1,),
        mode="clip",
    ),
    "floats too small": lambda b, r, c, ids, t: jnp.asarray(c + 1, np.float32) * np.float32(1e-42) > 0,
    "made again": lambda b, r, c, ids, t: jax.checkpoint(lambda x, y: x >= y)(r, c),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_bounds_of_operations_enclose(name, traced):
    for seed in range(3):
        check_encloses(OPERATIONS[name], np.random.default_rng(seed), traced)


def test_a_quotient_of_what_is_unknown():
    """Whose least value has no absolute value."""
    anything = intervals.unknown((1,), i32)
    found = intervals.bounds(lambda x: jax.lax.div(x, jnp.full_like(x, 16)), anything)
    assert (found.least, found.greatest) == (-(2**27), 2**27 - 1)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_bounds_enclose_at_run_time(seed):
    rng = np.random.default_rng(seed)
    check_encloses(condition_of(rng, 2), rng, traced=True)


@thorough
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_bounds_of_deep_functions_enclose_at_run_time(seed):
    rng = np.random.default_rng(seed)
    check_encloses(condition_of(rng, 3), rng, traced=True)


def interval(least, greatest):
    return Interval(*(np.asarray([x], i32) for x in (least, greatest)))


EXACT = {
    "sum": (lambda x: x + 3, (-2, 5), (1, 8)),
    "product": (lambda x: x * -3, (-2, 5), (-15, 6)),
    "square": (lambda x: x * x, (-2, 5), (0, 25)),
    "floor": (lambda x: x // 4, (-5, 9), (-2, 2)),
    "remainder in one period": (lambda x: x % 8, (-7, -2), (1, 6)),
    "remainder over periods": (lambda x: x % 8, (-7, 2), (0, 7)),
    "absolute": (lambda x: jnp.abs(x), (-7, 2), (0, 7)),
    "known branch": (lambda x: jnp.where(x < 10, x, 99), (2, 5), (2, 5)),
    "either branch": (lambda x: jnp.where(x < 4, x, 99), (2, 5), (2, 99)),
    "clipped": (lambda x: jnp.clip(x, 3, 4), (2, 9), (3, 4)),
    "shifted": (lambda x: x >> 1, (2, 9), (1, 4)),
    "wrapping": (lambda x: x * (1 << 20), (2, 1 << 12), (-(2**31), 2**31 - 1)),
    "read": (lambda x: jnp.asarray([5, 1, 4, 9, 2], i32)[x], (1, 3), (1, 9)),
    "read outside": (lambda x: jnp.asarray([5, 1], i32)[x], (1, 3), (-(2**31), 2**31 - 1)),
    "unknown operation": (lambda x: jax.lax.population_count(x), (1, 3), (-(2**31), 2**31 - 1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_bounds_are_tight(name):
    function, given_bounds, expected = EXACT[name]
    found = intervals.bounds(function, interval(*given_bounds))
    assert (int(found.least[0]), int(found.greatest[0])) == expected


@pytest.mark.parametrize("count", [2, 60], ids=["read", "counted"])
def test_rectangles_of_bools(count):
    rng = np.random.default_rng(0)
    chosen = rng.random((9, 12)) < 0.8
    rows, columns = (np.sort(rng.integers(0, n, (2, count)), 0).astype(i32) for n in chosen.shape)
    least, greatest = gathered(chosen, [tuple(rows), tuple(columns)], "clip")
    found = [chosen[a : b + 1, c : d + 1] for a, b, c, d in zip(*rows, *columns, strict=True)]
    np.testing.assert_array_equal(least, [x.all() for x in found])
    np.testing.assert_array_equal(greatest, [x.any() for x in found])


def test_a_function_that_has_the_name_of_another_is_not_taken_for_it():
    @jax.jit
    def remainder(x, y):
        return x + y

    found = intervals.bounds(lambda x: remainder(x, i32(4)), interval(1, 2))
    assert (int(found.least[0]), int(found.greatest[0])) == (5, 6)


def test_not_a_number_is_never_definite():
    """Bounds of floats that hold NaN or infinity decide nothing."""
    x = np.array([1, np.nan, 3, np.inf, 5], np.float32)
    read = lambda i: intervals.exact(x).least is x and jnp.asarray(x)[i]
    for function in (lambda i: read(i) > 0, lambda i: read(i) - read(i) == 0, lambda i: read(i) * 0 < 1):
        found = intervals.bounds(function, Interval(np.array([0, 2, 4], i32), np.array([1, 3, 4], i32)))
        values = np.asarray(function(np.arange(5))).reshape(-1)
        for k, (first, last) in enumerate(((0, 1), (2, 3), (4, 4))):
            assert found.least[k] <= values[first : last + 1].min()
            assert found.greatest[k] >= values[first : last + 1].max()


def test_what_is_not_known_yet_is_vague():
    ids = intervals.unknown((8,), i32, vague=True)
    function = lambda r, ids: (r < 3) | (ids[r] == 2)
    found = intervals.bounds(function, Interval(np.array([0, 4], i32), np.array([2, 6], i32)), ids)
    assert found.vague
    assert found.least.tolist() == [True, False]
    assert found.greatest.tolist() == [True, True]
    assert not intervals.bounds(lambda r, ids: r < 3, interval(0, 4), ids).vague
