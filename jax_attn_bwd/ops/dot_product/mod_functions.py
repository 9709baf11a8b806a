"""`mask_mod` and `score_mod`: the caller's own functions of where an element stands, on tiles of indices.

    visible_ts = mask_mod(batch, head, row, column, *mod_args)
    logits_ts  = score_mod(logits_ts, batch, head, row, column, *mod_args)

Indices are handed over as arrays that broadcast to the tile, so the functions are elementwise. They are
traced on a small tile first: one that is not elementwise would compute something else on each size of tile,
so it is refused; so is one that closes over traced arrays, or has side effects. Which tiles a mask leaves
alive is told by interval arithmetic on its jaxpr, without evaluating it on the plane. The derivative of the
caller's function is JAX's, tile by tile; nothing else is differentiated here.
"""

import contextlib
import inspect
import math
import warnings
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import checks, pallas, trees
from jax_attn_bwd._core.jaxpr import elementwise, intervals
from jax_attn_bwd._core.jaxpr.walk import guarded
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Options

APART = 1 << 20  # numbers: 4 MiB


class Places(NamedTuple):
    """Numbers and arrays that the functions read beside row and column."""

    batch: Any  # int32 [..., 1, 1, 1, 1]
    head: Any  # int32 [1..., K, G, 1, 1]
    args: tuple[Any, ...]


def places(mask: Mask, batch_rank: int, groups: int) -> Places | None:
    """Returns the numbers that a mask holds, in the layout of tiles; None where no function is given."""
    if mask.batch_number is None:
        return None
    head = mask.head_number.reshape(-1, groups)
    batch, head = (to_rank(x, n) for x, n in ((mask.batch_number, batch_rank), (head, batch_rank + 2)))
    return Places(batch[..., None, None, None, None], head[..., None, None], mask.mod_args or ())


def seen(mask_mod: Any, at: Places | None, row: jax.Array, column: jax.Array) -> jax.Array | None:
    """Tells what `mask_mod` lets be seen of a tile, in its rank; None = all."""
    if mask_mod is None:
        return None
    assert at is not None  # prepared with the function
    return to_rank(jnp.asarray(mask_mod(at.batch, at.head, row, column, *at.args)), at.batch.ndim)


def sees_diagonal(mask: Mask) -> bool:
    """Tells whether `mask_mod` certainly lets each row see the column of its own position."""
    assert mask.mask_mod is not None
    index = jax.ShapeDtypeStruct((), jnp.int32)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask.mod_args)
    return elementwise.is_true_on_diagonal(mask.mask_mod, (index, index), index, args)


class Elements(NamedTuple):
    """Where the elements of a tile stand, all in one order of axes."""

    batch: jax.Array
    head: jax.Array
    row: jax.Array
    column: jax.Array
    seen: jax.Array | None  # which are; None = all


def scored(options: Options, logits: jax.Array, tile: Elements, args: tuple[Any, ...]) -> jax.Array:
    """Puts `logits` of a tile through `score_mod`; where they are not seen anything, with derivative 0."""
    score, seen = options.score_mod, tile.seen
    if score is None:
        return logits
    elements = (logits, *tile[:4])
    return score(*elements, *args) if seen is None else guarded(score, seen, elements, args)


def pulled_back(
    options: Options,
    logits: jax.Array,
    tile: Elements,
    args: tuple[Any, ...],
    dlogits: jax.Array,
    to_args: bool,
) -> tuple[jax.Array, Any]:
    """Returns (cotangent of what `scored` was handed; of the floats in `args`, None unless `to_args`)."""
    numbers = trees.floats(args)
    of = lambda logits, numbers: scored(options, logits, tile, trees.filled(args, numbers))
    if to_args:
        return jax.vjp(of, logits, numbers)[1](dlogits)
    return *jax.vjp(lambda logits: of(logits, numbers), logits)[1](dlogits), None


def pushed_forward(
    options: Options, logits: jax.Array, tile: Elements, args: tuple[Any, ...], dlogits: jax.Array, dargs: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns (what `scored` gives, its tangent) by tangents of logits and of floats in `args`; None = 0."""
    numbers = trees.floats(args)
    of = lambda logits, numbers: scored(options, logits, tile, trees.filled(args, numbers))
    if dargs is None:
        return jax.jvp(lambda logits: of(logits, numbers), (logits,), (dlogits,))
    return jax.jvp(of, (logits, numbers), (dlogits, dargs))


def tangents_of_args(args: Any, tangents: Any) -> Any:
    """Returns tangents of the floats in `args`, with zeros in place of None; None if all are zero."""
    if not jax.tree.leaves(tangents):
        return None
    zero = lambda t, x: t if t is not None or x is None else jnp.zeros_like(x)
    return jax.tree.map(zero, tangents, trees.floats(args), is_leaf=lambda t: t is None)


def pulled_back_to(numbers: Any, read: Callable[..., Any], cotangents: Callable[..., Any]) -> Any:
    """Returns the cotangent of `numbers` from `cotangents(read(numbers))`, of what is `read` of them."""
    found, pull_back = jax.vjp(read, numbers)
    return pull_back(cotangents(found))[0]


def pulled_back_apart(
    options: Options,
    logits: jax.Array,
    tile: Elements,
    args: tuple[Any, ...],
    dlogits: jax.Array,
    groups: int,
) -> tuple[jax.Array, Any]:
    """Does what `pulled_back` does, each batch entry and head apart: cotangents `[..., K, G, *shape]`.

    Where these lie on several devices, their sum is the caller's to take once. `groups` is the axis of G.
    """
    axes = [*range(-logits.ndim, -4), -4, groups]

    def apart(*given):
        logits, dlogits, args, *tile = pallas.vary_alike(given)  # else each tile's share would be summed

        def of_head(logits, dlogits, *tile):
            places = Elements(*tile, *(None for _ in Elements._fields[len(tile) :]))
            return pulled_back(options, logits, places, args, dlogits, to_args=True)

        return _over(of_head, axes, (logits, dlogits, *tile))

    def out_specs(spec, dlogits, of_args, *tile):
        lead = [spec[axis] for axis in axes]
        specs = jax.tree.map(lambda x: PartitionSpec(*lead, *(None for _ in x.shape)), trees.floats(args))
        return spec, specs

    places = (reshard_like(x, logits, range(logits.ndim)) for x in tile if x is not None)
    return pallas.on_local_shards(apart, out_specs, (logits, dlogits, args, *places))


def _over(f: Callable[..., Any], axes: list[int], arrays: tuple[Any, ...]) -> Any:
    """Maps `f` over the entries along `axes`, of which all arrays but the first two may have size 1."""
    if not axes:
        return f(*arrays)
    axis, *rest = axes
    mapped = [axis if i < 2 or x.shape[axis] != 1 else None for i, x in enumerate(arrays)]
    arrays = tuple(jnp.squeeze(x, axis) if a is None else x for x, a in zip(arrays, mapped, strict=True))
    return jax.vmap(lambda *xs: _over(f, rest, xs), tuple(mapped), (axis, 0))(*arrays)


def may_lie_apart(at: Places, q: jax.Array) -> bool:
    """Tells whether cotangents of each batch entry and head of q `[..., K, G, T, H]` have room."""
    sizes = [x.size for x in jax.tree.leaves(trees.floats(at.args))]
    known = all(isinstance(n, int) for n in (*q.shape, *sizes))
    return known and math.prod(q.shape[:-2]) * sum(sizes) <= APART


class TileBounds(NamedTuple):
    """Bounds of each tile, `[..., query tiles, key tiles]`; NumPy where known at trace time."""

    some: Any  # False: nothing is seen
    every: Any  # True: all is seen
    final: bool  # whether nothing more can be known at run time


def of_tiles(mask_mod: Callable[..., Any], at: Places, row: Any, column: Any) -> TileBounds:
    """Bounds the tiles by (least, greatest) row `[..., query tiles, 1]` and column `[..., 1, key tiles]`."""
    rank = at.batch.ndim

    def laid(pair):
        between = (x.reshape(*x.shape[:-2], 1, 1, *x.shape[-2:]) for x in pair)
        return intervals.Interval(*(to_rank(x, rank) for x in between))

    as_interval = lambda x: x if isinstance(x, intervals.Interval) else intervals.exact(x)
    row, column, exact = laid(row), laid(column), jax.tree.map(as_interval, at)
    found = intervals.bounds(mask_mod, exact.batch, exact.head, row, column, *exact.args)
    return _of_all_heads(found, rank)


def known_tiles(
    mask_mod: Callable[..., Any],
    at: Places,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    by_index: bool,
) -> TileBounds:
    """Bounds the tiles at trace time, where no array is known; nor are positions, unless they are indices."""
    # Arrays are unknown; a block of positions ranges over its indices, or is unknown, too.
    rank = at.batch.ndim
    vague = jax.tree.map(lambda x: intervals.unknown(x.shape, x.dtype, vague=True), at)
    ranges = []
    for n, block, axis in zip(lengths, blocks, (-2, -1), strict=True):
        start = np.arange(0, n, block, dtype=np.int32)
        shape = [1] * rank
        shape[axis] = len(start)
        last = np.minimum(start + np.int32(block), np.int32(n)) - np.int32(1)
        known = intervals.Interval(start.reshape(shape), last.reshape(shape))
        ranges.append(known if by_index else intervals.unknown(shape, np.int32, vague=True))

    # What holds for any entry and head holds for the tile, `[query tiles, key tiles]`.
    found = intervals.bounds(mask_mod, vague.batch, vague.head, *ranges, *vague.args)
    some, every, final = _of_all_heads(found, rank)
    grid = tuple(-(-n // block) for n, block in zip(lengths, blocks, strict=True))
    lead = tuple(range(some.ndim - 2))
    some, every = (np.broadcast_to(x, grid) for x in (some.any(lead), every.all(lead)))
    return TileBounds(some, every, final)


def _of_all_heads(found: intervals.Interval, rank: int) -> TileBounds:
    least, greatest = (to_rank(x, rank) for x in (found.least, found.greatest))
    return TileBounds(greatest.any((-4, -3)), least.all((-4, -3)), not found.vague)


_HALVES = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_ELEMENTWISE = "be elementwise jnp operations that broadcast over batch, head, row and column"


class ReadSizes(NamedTuple):
    """The sizes of a call, for functions that have a method `check` of what they read."""

    batch: tuple[Any, ...]
    heads: Any
    tokens: Any  # the more of rows and columns, where their positions are indices; else 0
    rows: Any = None  # None where they have positions
    columns: Any = None


def prepared(
    operator: str, mask_mod: Any, score_mod: Any, mod_args: Any, sizes: ReadSizes, K: int, dtype: Any
) -> tuple[Any, ...]:
    """Returns the checked `mod_args`, floats in `dtype`; the functions are traced on a small tile."""
    # The shapes of a tile of 2 x 3, of what it stands at, and of the arrays.
    args = _arguments(operator, mod_args, dtype)
    _check_arguments(operator, (mask_mod, score_mod), args, sizes)
    batch, G = sizes.batch, sizes.heads // K
    rank, plane = len(batch) + 4, (*batch, K, G, 2, 3)
    index = lambda *shape: jax.ShapeDtypeStruct((1,) * (rank - len(shape)) + shape, jnp.int32)
    at = (index(*batch, 1, 1, 1, 1), index(K, G, 1, 1), index(2, 1), index(1, 3))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)

    # Each is elementwise, and gives what it is to give; a score may be handed its axes in another order.
    if mask_mod is not None:
        _check_mask(operator, mask_mod, at, given, plane)
    if score_mod is not None:
        logits = jax.ShapeDtypeStruct(plane, dtype)
        closed = _traced(operator, "score_mod", score_mod, (logits, *at, *given))
        result = closed.out_avals[0]
        if result.dtype != dtype:
            expected, remedy = f"return {dtype}, the dtype of the logits", "cast what it adds to logits.dtype"
            got = f"dtype {result.dtype}"
            remedy = "a function of who attends is mask_mod" if got == "dtype bool" else remedy
            raise TypeError(checks.message(operator, "score_mod", expected, got, remedy))
        if result.shape != plane:
            expected = f"return logits of the shape that it is handed, here {plane}"
            raise ValueError(checks.message(operator, "score_mod", expected, result.shape))
        _elementwise(operator, "score_mod", closed, 1 + len(at))
        turned = (index(*batch, 1, 1, 1, 1), index(K, 1, G, 1), index(2), index(3, 1, 1))
        logits = jax.ShapeDtypeStruct((*batch, K, 3, G, 2), dtype)
        _any_order(operator, score_mod, (logits, *turned, *given))
    for argument, function in (("mask_mod", mask_mod), ("score_mod", score_mod)):
        _warn_of_functions_made_anew(operator, argument, function)
    return args


def prepared_mask(operator: str, mask_mod: Any, mod_args: Any) -> tuple[Any, ...]:
    """Checks `mod_args` of a mask alone, where it is not known for how many heads and tokens it is."""
    args, n = _arguments(operator, mod_args, jnp.float32), getattr(mask_mod, "num_args", None)
    if n is not None and len(args) != n:
        expected = f"hold the {n} that are read"
        raise ValueError(checks.message(operator, "mod_args", expected, f"{len(args)}"))
    index = lambda *shape: jax.ShapeDtypeStruct((1, 1, *shape), jnp.int32)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    _check_mask(operator, mask_mod, (index(1, 1), index(1, 1), index(2, 1), index(1, 3)), given, (1, 1, 2, 3))
    return args


def _arguments(operator: str, mod_args: Any, dtype: Any) -> tuple[Any, ...]:
    if not isinstance(mod_args, tuple | list):
        got = f"{type(mod_args).__name__}"
        remedy = "write (x,) for one array"
        raise TypeError(checks.message(operator, "mod_args", "be a tuple of arrays", got, remedy))
    return jax.tree.map(lambda x: _argument(operator, x, dtype), tuple(mod_args))


def _check_mask(operator: str, mask_mod: Any, at: Any, given: Any, plane: tuple[Any, ...]) -> None:
    closed = _traced(operator, "mask_mod", mask_mod, (*at, *given))
    result = closed.out_avals[0]
    if result.dtype != np.bool_:
        raise TypeError(checks.message(operator, "mask_mod", "return bool", f"dtype {result.dtype}"))
    shape, sizes = result.shape, zip(reversed(result.shape), reversed(plane), strict=False)
    if len(shape) > len(plane) or any(a != b and a != 1 for a, b in sizes):
        expected = f"return what broadcasts to the tile that it is handed, here {plane}"
        raise ValueError(checks.message(operator, "mask_mod", expected, shape))
    _elementwise(operator, "mask_mod", closed, len(at))


def _check_arguments(operator: str, functions: Any, args: tuple[Any, ...], sizes: ReadSizes) -> None:
    """Raises where functions that know it do not find what they read, or leave something."""
    given = [function for function in functions if function is not None]
    for function in given:
        if hasattr(function, "check"):
            function.check(operator, args, sizes)
    counts = [getattr(function, "num_args", None) for function in given]
    known = [n for n in counts if n is not None]
    if given and len(known) == len(counts) and len(args) > sum(known):
        expected = f"hold the {sum(known)} that are read"
        raise ValueError(checks.message(operator, "mod_args", expected, f"{len(args)}"))


def _argument(operator: str, x: Any, dtype: Any) -> jax.Array:
    x = x if checks.is_array(x) else np.asarray(x)
    kinds, is_half = (jnp.floating, jnp.integer, np.bool_), str(x.dtype) in _HALVES
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds) or is_half:
        expected = "hold arrays of floats, integers or bools" + ", of whole bytes" * is_half
        raise TypeError(checks.message(operator, "mod_args", expected, f"dtype {x.dtype}"))
    x = jnp.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _elementwise(operator: str, argument: str, closed: Any, tile_inputs: int) -> None:
    if (got := elementwise.violation(closed, tile_inputs)) is not None:
        remedy = "it is evaluated on tiles of any size: hand over what it computes of all in mod_args"
        raise ValueError(checks.message(operator, argument, _ELEMENTWISE, got, remedy))


def _any_order(operator: str, score_mod: Any, shapes: tuple[Any, ...]) -> None:
    """Raises unless it takes the axes of its tile, here columns before heads, in any order."""
    with contextlib.suppress(Exception):  # whatever its operations say of a shape
        closed = jax.make_jaxpr(lambda *given: score_mod(*given))(*shapes)
        (result,) = closed.out_avals
        if result.shape == shapes[0].shape and elementwise.violation(closed, 5) is None:
            return
    got = "one that takes or drops an axis of its tile by its place"
    remedy = "a tile may have its axes in another order: let arrays broadcast with all of theirs"
    raise ValueError(checks.message(operator, "score_mod", _ELEMENTWISE, got, remedy))


def _traced(operator: str, argument: str, function: Any, shapes: tuple[Any, ...]) -> Any:
    """Returns the jaxpr, of one result; raises unless the function may be static and is pure."""
    # A function of its own, with a hash, that takes what it will be handed.
    if not callable(function):
        expected, given = "be a function or None", argument.replace("mask_mod", "mask")
        remedy = f"an array goes in {given.replace('score_mod', 'bias')}" if checks.is_array(function) else ""
        raise TypeError(checks.message(operator, argument, expected, type(function).__name__, remedy))
    try:
        hash(function)
    except TypeError:
        remedy = "it is a static argument: make it a function, or a frozen dataclass with __call__;"
        remedy += " its arrays go in mod_args"
        got = f"an unhashable {type(function).__name__}"
        raise TypeError(checks.message(operator, argument, "be hashable", got, remedy)) from None
    module = getattr(function, "__module__", None) or ""  # None for what `exec` defines
    if inspect.isfunction(function) and module.startswith("jax_attn_bwd.mods"):
        got, remedy = f"mods.{function.__name__} itself", "call it: what it returns is the function"
        raise TypeError(checks.message(operator, argument, "be a function of places", got, remedy))
    _check_signature(operator, argument, function, shapes)

    # Its jaxpr: whatever fails here would fail in every tile.
    try:
        closed = jax.make_jaxpr(lambda *given: function(*given))(*shapes)
    except Exception as error:
        words, remedy = (str(error).splitlines() or [""])[0], ""
        got = f"{type(error).__name__}: {words}"
        if isinstance(error, jax.errors.TracerBoolConversionError) or "truth value" in words:
            got = f"{_called(function)}, which asks in Python whether an array is true"
            remedy = "write jnp.where for if, and & | ~ for and, or, not"
        raise TypeError(checks.message(operator, argument, _ELEMENTWISE, got, remedy)) from error

    # Pure, and of one result.
    if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
        expected, remedy = "not close over traced arrays", "hand them over in mod_args"
        raise TypeError(checks.message(operator, argument, expected, "one that does", remedy))
    if closed.effects:
        remedy = "it is traced and evaluated any number of times"
        got = ", ".join(sorted(map(str, closed.effects)))
        raise TypeError(checks.message(operator, argument, "have no side effects", got, remedy))
    if len(closed.out_avals) != 1:
        got = f"{len(closed.out_avals)} of them"
        raise TypeError(checks.message(operator, argument, "return one array", got))
    return closed


def _check_signature(operator: str, argument: str, function: Any, shapes: tuple[Any, ...]) -> None:
    """Raises unless it takes as many arguments as it will be handed."""
    own = 5 if argument == "score_mod" else 4
    if (taken := takes_other(function, len(shapes))) is not None:
        names = ("logits, " if own == 5 else "") + "batch, head, row, column"
        expected = f"take ({names}) and the {len(shapes) - own} arrays of mod_args"
        remedy = "both functions are handed all of mod_args: write *args for what one does not read"
        raise TypeError(checks.message(operator, argument, expected, taken, remedy))


def takes_other(function: Any, count: int) -> str | None:
    """Describes the function where it takes another number of arguments than `count`; else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # not told of some callables
    try:
        signature.bind(*range(count))
    except TypeError as error:
        return f"{_called(function)}{signature}, {error}"
    return None


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _Partial(partial[Any]):
    """A `functools.partial` that equals another of the same function and the same bound values."""

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Partial and _value(self) == _value(other)

    def __hash__(self) -> int:
        return hash(_value(self))


def by_value(function: Any) -> Any:
    """Returns `function`; a `functools.partial` equals another of the same parts, and is compiled once."""
    if not isinstance(function, partial):
        return function
    try:
        return _first_of_equals(_Partial(function.func, *function.args, **function.keywords))
    except TypeError:  # it binds what has no hash, such as an array
        return function


@lru_cache(maxsize=1024)
def _first_of_equals(function: _Partial) -> _Partial:
    return function


def _value(x: Any) -> Any:
    """Returns what tells `x` from others; numbers of two types, and 0.0 and -0.0, trace to two programs."""
    if isinstance(x, partial):
        keywords = tuple((name, _value(value)) for name, value in sorted(x.keywords.items()))
        return type(x), _value(x.func), _value(x.args), keywords
    if type(x) is tuple:
        return tuple(map(_value, x))
    return type(x), repr(x) if isinstance(x, float | np.generic) else x


_made: dict[Any, int] = {}  # how many functions a code object has been made into, and were compiled
_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def _warn_of_functions_made_anew(operator: str, argument: str, function: Any) -> None:
    """Warns once, at the third function of one code object outside of `jax.jit`: all were compiled."""
    inner = getattr(function, "function", function)  # a named one holds it
    code = getattr(getattr(inner, "func", inner), "__code__", None)  # as a partial one does
    if code is None or function in _compiled or isinstance(jnp.zeros(()), jax.core.Tracer):
        return
    _compiled.add(function)
    _made[code] = _made.get(code, 0) + 1
    if _made[code] == 3:
        expected = "be defined once: it is a static argument, and compiled anew for each function object"
        got = f"the third one that {code.co_filename}:{code.co_firstlineno} makes"
        remedy = "hand over what changes in mod_args, or write a frozen dataclass with __call__"
        warnings.warn(checks.message(operator, argument, expected, got, remedy), stacklevel=2)
