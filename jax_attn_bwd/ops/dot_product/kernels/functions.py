"""`mask_mod` and `score_mod` in the kernels of any chip: which of them lower, and what they are handed.

For a tile a kernel has one batch entry, one head, and the indices or positions of its queries and keys. The
functions are traced on these, the derivative of `score_mod` with them; so they may hold what the compiler of
the chip has vector instructions for. What they read of arrays is handed over, see `hoisting.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.jaxpr import walk
from jax_attn_bwd._core.jaxpr.interval_rules import gathered
from jax_attn_bwd._core.jaxpr.intervals import Interval
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import hoisting
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands

_ON_BOOLS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n"))
_ON_NUMBERS = frozenset(("add", "sub", "mul", "div", "rem", "neg", "abs", "max", "min", "clamp", "sign"))
# operations that the compiler of every chip has vector instructions for
EVERYWHERE = _ON_BOOLS | _ON_NUMBERS | {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze"}


def any_given(options: KernelOptions) -> bool:
    """Tells whether a call has a function."""
    return options.mask_mod is not None or options.score_mod is not None


def with_numbers(operands: Operands) -> Operands:
    """Adds the numbers of batch entries and heads, each laid as the query.

    To be called before the operands are cut into shards, which do not know where they lie.
    """
    mask, q = operands.mask, operands.query
    if mask.batch_number is None:
        return operands
    batch = reshard_like(mask.batch_number, q, tuple(range(q.ndim - 3)))
    heads = reshard_like(mask.head_number, q, (-2,))
    return operands._replace(mask=mask.replace(batch_number=batch, head_number=heads))


def on_values(options: KernelOptions, operands: Operands) -> KernelOptions:
    """Replaces functions that read arrays by what kernels trace, an `OnValues`."""

    def replaced(function, is_score):
        if function is None:
            return None
        found = hoisting.of(function, is_score, operands.mod_args)
        return found if found.reads_arrays else function

    mask, score = replaced(options.mask_mod, False), replaced(options.score_mod, True)
    return dataclasses.replace(options, mask_mod=mask, score_mod=score)


def floats_of_distance(options: KernelOptions, operands: Operands) -> int:
    """Counts the floats of each distance that `score_mod` is handed."""
    score = on_values(options, operands).score_mod
    found = score.cut.of_distance if isinstance(score, hoisting.OnValues) else ()
    return sum(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in found)


def values(options: KernelOptions, operands: Operands, place: tuple[jax.Array, ...]) -> tuple[tuple, tuple]:
    """Computes what `mask_mod` and `score_mod` of `on_values` are handed; `place` as in `hoisting.values`."""
    options = on_values(options, operands)
    mask, score = (
        hoisting.values(f, operands.mod_args, *place) if isinstance(f, hoisting.OnValues) else ()
        for f in (options.mask_mod, options.score_mod)
    )
    return mask, score


def args_for_bounds(options: KernelOptions, operands: Operands) -> tuple[Any, ...]:
    """Returns the `mod_args` that `mask_for_bounds` reads, if it does."""
    mask_mod = on_values(options, operands).mask_mod
    return (operands.mod_args or ()) if _reads_blocks(mask_mod) else ()


def _reads_blocks(mask_mod: Any) -> bool:
    """Tells whether a kernel is handed values of blocks for it."""
    return isinstance(mask_mod, hoisting.OnValues) and bool(mask_mod.cut.of_blocks)


def mask_for_bounds(options: KernelOptions, refs: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Returns (the function whose bounds on tiles of that size are taken, what it reads beside the place).

    Where a kernel is handed values of blocks it is the caller's own `mask_mod` of `mod_args`: values do not
    say what `intervals.told` knows of them. Beyond the ends nothing is read.
    """
    mask_mod = options.mask_mod
    if not _reads_blocks(mask_mod):
        return mask_mod, value_bounds(refs, rows, columns)
    # the last row and column of each batch entry, in the layout of tiles
    ends = (refs.rows_end, refs.columns_end)
    lasts = tuple(None if x is None else (x - 1).clip(0).reshape(-1, 1, 1, 1, 1) for x in ends)

    def within(batch, head, row, column, lasts, *args):
        at = (
            x if last is None else jnp.minimum(x, last) for x, last in zip((row, column), lasts, strict=True)
        )
        return mask_mod.function(batch, head, *at, *args)

    return within, mod_functions.Places(*_numbers(refs), (lasts, *refs.mod_args))


def _numbers(refs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of batch entries and heads, in the layout of tiles."""
    heads = refs.head_number.reshape(1, refs.k.shape[2], -1, 1, 1)
    return refs.batch_number.reshape(-1, 1, 1, 1, 1), heads


def value_bounds(refs: Any, rows: int, columns: int) -> mod_functions.Places | None:
    """Bounds, in each tile of that size, what a mask reads of `Inputs` before a kernel lays them out."""
    if refs.batch_number is None:
        return None
    K = refs.k.shape[2]

    def between(x):
        """Reduces one value a row, a column or a distance to its bounds in each tile."""
        if x.dtype != jnp.float32:
            x = x.astype(jnp.int32)
        if is_of_distance(x):
            return _distance_bounds(x, refs, rows, columns)
        # an axis of 1 broadcasts, and has one tile of one element: [B|1, K|1, G|1, tiles|1, n, tiles|1, n]
        B, N, T, S = x.shape
        rows_of, columns_of = (1 if n == 1 else block for n, block in ((T, rows), (S, columns)))
        x = x.reshape(
            B, *((K, N // K) if N != 1 else (1, 1)), T // rows_of, rows_of, S // columns_of, columns_of
        )
        return Interval(x.min((-3, -1)), x.max((-3, -1)))

    return mod_functions.Places(*_numbers(refs), tuple(map(between, refs.mask_values)))


def is_of_distance(x: Any) -> bool:
    """Tells whether what `values` gave is one value for each distance."""
    return x.ndim == 3


def _distance_bounds(x: jax.Array, refs: Any, rows: int, columns: int) -> Interval:
    """Bounds a value of each distance, on tiles of that size."""
    # the distances of each tile, from its last column to its last row: [query tiles, key tiles]
    B, N, _ = x.shape
    T, (S, K) = refs.q.shape[1], refs.k.shape[1:3]
    row, column = (np.arange(0, n, size, dtype=np.int32) for n, size in ((T, rows), (S, columns)))
    first: Any = row[:, None] - column + S  # entry of a tile's first row and column
    pair = first - (columns - 1), first + (rows - 1)
    # the least and greatest value between these, of each batch entry and head
    batch, head = (
        np.arange(n, dtype=np.int32).reshape(-1, *ones) for n, ones in ((B, (1, 1, 1)), (N, (1, 1)))
    )
    found = gathered(x, [(batch, batch), (head, head), pair], "clip")
    by_group = (B, *((K, N // K) if N != 1 else (1, 1)), *first.shape)
    return Interval(*(x.reshape(by_group) for x in found))


def on_tile(function: Callable[..., Any], *given: Any) -> Any:
    """Calls `function` in a kernel: nothing is sharded, and Python numbers are narrow in x64 mode, too."""
    with jax.enable_x64(False), hoisting.unsharded():
        return function(*given)


def tanh(x: jax.Array, cap: float) -> jax.Array:
    """Computes the tanh of x / cap from exp2."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * math.log2(math.e) / cap)) + 1.0)


def _power(x: jax.Array, y: int) -> jax.Array:
    """Raises x to the power of y, by products."""
    result = jnp.ones_like(x)
    for _ in range(abs(y)):
        result = result * x
    return 1.0 / result if y < 0 else result


def for_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rewrites `function` with `== False` in the place of `not`, which the compiler for GPUs fails at,
    and with tanh by exp2: the hardware's own has an error of 2^-11.
    """

    def rule(equation, inputs):
        """Evaluates an equation, those that the compiler lacks by others."""
        name = equation.primitive.name
        if name == "not" and inputs[0].dtype == bool:
            return [inputs[0] == False]  # noqa: E712
        if name == "tanh":
            return [tanh(inputs[0], 1.0)]
        if name == "one_minus_square":  # which it does not know
            return [1.0 - inputs[0] * inputs[0]]
        if name in ("integer_pow", "square"):  # which the derivative of a quotient holds
            return [_power(inputs[0], equation.params.get("y", 2))]
        return walk.bound(equation, inputs, **{"sharding": None} if "sharding" in equation.params else {})

    # traced, and its equations evaluated by the rule while the kernel is traced
    def call(*given):
        closed, form = jax.make_jaxpr(function, return_shape=True)(*given)
        results = walk.evaluate(closed, given, rule, lambda x, _: x, literal=lambda x, _: jnp.asarray(x))
        return jax.tree.unflatten(jax.tree.structure(form), results)

    return call


def unsupported(
    options: KernelOptions, operands: Operands, lowers: frozenset[str], distances: bool = False
) -> str | None:
    """Returns why a kernel cannot trace the functions of a call; None if it can.

    It `lowers` these operations. With `distances` it takes values for each distance between row and column.
    """
    if not any_given(options):
        return None
    # what they read of arrays must be values that XLA can make
    if reason := _unsupported_arrays(options, operands, distances):
        return reason
    # what is left must be made of what the compiler has vector instructions for, in 32 bits
    with hoisting.unsharded():
        programs = list(_programs(on_values(options, operands)))
    for name, closed in programs:
        for equation in walk.equations(closed.jaxpr):
            if (operation := equation.primitive.name) not in lowers:
                return f"it cannot lower {operation!r}, which {name} is made of"
        if (reason := _too_wide(name, closed)) is not None:
            return reason
    return None


def _too_wide(name: str, closed: Any) -> str | None:
    """Returns why it cannot be traced on tiles of 32 bits a number; None if it can."""
    for equation in walk.equations(closed.jaxpr):
        avals = [x.aval for x in (*equation.invars, *equation.outvars)]
        # Python numbers are weakly typed, and narrow in `on_tile`
        wide = [x.dtype for x in avals if x.dtype.itemsize > 4 and not x.weak_type]
        if wide:
            return f"its tiles hold 32 bits a number, and {name} computes in {wide[0]}"
    return None


def _unsupported_arrays(options: KernelOptions, operands: Operands, distances: bool) -> str | None:
    """Returns why a kernel cannot be handed what the functions read of arrays; None if it can."""
    for name, function in (("mask_mod", options.mask_mod), ("score_mod", options.score_mod)):
        if function is None:
            continue
        found = hoisting.of(function, name == "score_mod", operands.mod_args)
        if not found.reads_arrays:
            continue
        # as a program of one element, and in its parts
        reason = _too_wide(name, found.program) or hoisting.unsupported(found, name, distances)
        if reason is not None:
            return reason
        # one value a distance or a block is taken of indices, which positions would replace
        for handed, at, one, other in (
            (found.cut.of_distance, "row - column", "difference", "bias"),
            (found.cut.of_blocks, "blocks of rows and columns", "block", "mask"),
        ):
            if handed and operands.mask.has_positions:
                return (
                    f"{name} reads an array at {at}, and it is handed one value for each {one} of indices, "
                    f"not of query_positions and key_value_positions: leave these out, or hand over a "
                    f"{other} array"
                )
    return None


def _programs(options: KernelOptions) -> Iterator[tuple[str, Any]]:
    """Yields (name, jaxpr) of the functions on a tile, and of the derivative of `score_mod`."""
    # places and logits of a tile of 8 x 8, and what the functions are handed for it
    index = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    at, logits = (index(1, 1), index(1, 1), index(1, 8), index(8, 1)), jax.ShapeDtypeStruct((8, 8), "float32")
    mask, score = options.mask_mod, options.score_mod
    given = lambda function: function.examples() if isinstance(function, hoisting.OnValues) else ()
    if mask is not None:
        yield "mask_mod", jax.make_jaxpr(mask)(*at, *given(mask))
    if score is not None:

        def back(logits, batch, head, row, column, *values):
            at = mod_functions.Elements(batch, head, row, column, None)
            values = tuple(jnp.broadcast_to(x, logits.shape) for x in values)
            return mod_functions.pulled_back(options, logits, at, values, logits, to_args=True)

        yield "score_mod", jax.make_jaxpr(score)(logits, *at, *given(score))
        yield "the derivative of score_mod", jax.make_jaxpr(back)(logits, *at, *given(score))
