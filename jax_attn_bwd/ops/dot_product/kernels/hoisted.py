"""What `mask_mod` and `score_mod` read of arrays, in kernels: XLA reads it, and hands them values.

A function is traced on one element and cut in two, see `hoisting.py`. What is made of arrays and of no more
than a batch entry, a head and a row, or a column or the distance instead (`document[row]`, `lengths[batch]`,
`table[head, column - row]`), is a value for each of these, and computed before the kernel: `values`. So is
what a mask has one value of in each block of rows and columns (`chosen[row // 64, column // 64]`), see
`blocks.py`. What is left is made of those values and of the logits, row and column together: `OnValues`,
which is evaluated on tiles, and must be elementwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import jaxprs, pallas
from jax_attn_bwd.ops.dot_product.kernels import hoisting
from jax_attn_bwd.ops.dot_product.kernels.blocks import Blocks
from jax_attn_bwd.ops.dot_product.kernels.hoisting import PLACE, SHORTEST_WORD, Cut, Value


@dataclass(frozen=True)
class OnValues:
    """`function` for kernels: handed `values` in the place of the arrays that it reads."""

    function: Callable[..., Any]
    is_score: bool
    tree: Any  # the structure of `mod_args`
    types: tuple[Any, ...]  # (shape, dtype) of its leaves

    def on_leaves(self, *given: Any) -> Any:
        """`function`, with the leaves of `mod_args` one after the other."""
        count = len(PLACE) + self.is_score
        return self.function(*given[:count], *jax.tree.unflatten(self.tree, given[count:]))

    @property
    def program(self) -> Any:
        """The jaxpr of `on_leaves` on a tile."""
        index = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        logits = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * self.is_score
        place = index(1, 1), index(1, 1), index(1, 8), index(8, 1)
        with hoisting.unsharded():
            return jax.make_jaxpr(self.on_leaves)(
                *logits, *place, *(jax.ShapeDtypeStruct(*x) for x in self.types)
            )

    @property
    def reads_arrays(self) -> bool:
        """Whether it is given arrays, or closes over one."""
        return bool(self.types or self.program.consts)

    @property
    def cut(self) -> Cut:
        """Its parts."""
        return hoisting.cut(self)

    def examples(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of what it may be handed on a tile of two axes."""
        dtypes = (jax.eval_shape(_as_handed, v.aval).dtype for v in self.cut.handed)
        return tuple(jax.ShapeDtypeStruct((1, 1), dtype) for dtype in dtypes)

    def __call__(self, *given: Any) -> Any:
        """On a tile: arrays of one rank that broadcast to it, or scalars."""
        count = len(PLACE) + self.is_score
        names = ("logits", *PLACE) if self.is_score else PLACE
        found = dict(zip(names, given[:count], strict=True))
        values = zip(self.cut.handed, given[count:], strict=True)
        return _on_tile(self.cut.result, found, {v: _as_before(x, v.aval.dtype) for v, x in values})


def of(function: Callable[..., Any], is_score: bool, mod_args: Any) -> OnValues:
    """`function` of a call with these `mod_args`."""
    leaves, tree = jax.tree.flatten(mod_args)
    return OnValues(function, is_score, tree, tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves))


def values(
    function: OnValues, mod_args: Any, batch: jax.Array, heads: jax.Array, rows: jax.Array, columns: jax.Array
) -> tuple[Any, ...]:
    """What it is handed: 32 bits `[B|1, N|1, T|1, S|1]`, of which no more than one of the last two is not 1.

    A value for each distance is `[B|1, N|1, T + S]`, entry `S + row - column`; one for each block `Blocks`.

    Args:
      batch, heads: their numbers, `[B]` and `[N]`.
      rows, columns: as the function is handed them, `[B|1, T]` and `[B|1, S]`; where a value is one of the
        distance or of a block, indices.
    """
    given = pallas.vary_alike((jax.tree.leaves(mod_args), batch, heads, {"row": rows, "column": columns}))
    arrays, batch, heads, tokens = given
    with jax.enable_x64(False):
        return tuple(_laid(value, arrays, batch, heads, tokens) for value in function.cut.handed)


def _laid(value: Value, arrays: list[Any], batch: Any, heads: Any, tokens: dict[str, Any]) -> Any:
    if value.block is not None:
        return _of_blocks(value, value.block, arrays, batch, heads, tokens)
    if value.is_of_distance:
        along = _distances(tokens["row"], tokens["column"])
    else:
        along = {name: x for name, x in tokens.items() if name in value.reads}
    (lead,) = {x.shape[0] for x in along.values()} or {1}

    def of_element(b, n, t):
        return _as_handed(_outside(value, arrays, {"batch": b, "head": n, **t}))

    of_batch = None if lead == 1 else 0
    run = jax.vmap(of_element, (None, None, 0)) if along else of_element
    run = jax.vmap(jax.vmap(run, (None, 0, None)), (0, None, of_batch))
    batch = batch if of_batch == 0 or "batch" in value.reads else batch[:1]
    heads = heads if "head" in value.reads else heads[:1]
    found = run(batch, heads, {n: x[0] for n, x in along.items()} if of_batch is None else along)
    if value.is_of_distance:
        return found
    found = found if along else found[..., None]
    return found[..., None, :] if "column" in along else found[..., None]


def _of_blocks(
    value: Value, block: tuple[int, int], arrays: list[Any], batch: Any, heads: Any, tokens: dict[str, Any]
) -> Blocks:
    rows, columns = (tokens[name][:, ::n] for name, n in zip(("row", "column"), block, strict=True))

    def of_element(b, n, row, column):
        found = _outside(value, arrays, {"batch": b, "head": n, "row": row, "column": column})
        return found if found.dtype == jnp.bool_ else _as_handed(found)

    run = jax.vmap(jax.vmap(of_element, (None, None, None, 0)), (None, None, 0, None))
    of_batch = tuple(None if x.shape[0] == 1 else 0 for x in (rows, columns))
    run = jax.vmap(jax.vmap(run, (None, 0, None, None)), (0, None, *of_batch))
    batch = batch if "batch" in value.reads or 0 in of_batch else batch[:1]
    heads = heads if "head" in value.reads else heads[:1]
    rows, columns = (x[0] if axis is None else x for x, axis in zip((rows, columns), of_batch, strict=True))
    return Blocks(run(batch, heads, rows, columns), *block)


def _distances(rows: jax.Array, columns: jax.Array) -> dict[str, jax.Array]:
    """A row and a column for each distance of padded ones; what lies beyond the ends stands at these."""
    S = columns.shape[-1]
    distance = jnp.arange(rows.shape[-1] + S, dtype=jnp.int32) - S
    distance = jnp.clip(distance, -columns.max(), rows.max())[None]
    return {"row": jnp.maximum(distance, 0), "column": jnp.maximum(-distance, 0)}


def _as_handed(x: jax.Array) -> jax.Array:
    """In 32 bits: bools and narrow numbers widened."""
    if x.dtype.itemsize == 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _as_before(x: Any, dtype: Any) -> Any:
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def unsupported(function: OnValues, name: str, distances: bool) -> str | None:
    """Why a kernel cannot be handed what it reads of arrays; None if it can.

    Args:
      function: read under the name `name`.
      distances: whether the kernel takes a value for each distance.
    """
    try:
        cut = function.cut
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        return f"{name} reads arrays and cannot be traced on one element: {type(error).__name__}: {words}"
    takes, array = ("a row, a column, " + "a distance row - column, " * distances), "bias"
    if not function.is_score:
        takes, array = takes + "a block (row // a, column // b) of 8 elements or more, ", "mask"
    both = (
        f"{name} reads an array at places that depend on row and column together, and it is handed one value "
        f"{takes}or a batch entry and head: read it so, hand over a {array} array, or write "
        f"implementation='xla'"
    )
    short = any(x.aval.dtype != jnp.bool_ and x.block and x.block[1] < SHORTEST_WORD for x in cut.of_blocks)
    if (cut.of_distance and not distances) or short:
        return both
    for value in cut.made:
        operation = value.equation.primitive.name
        if operation in ("dynamic_slice", "gather"):
            return both
        if value.aval.shape:
            return f"{name} reads arrays and is not elementwise: {operation!r} makes several numbers of one"
    return None


def _outside(value: Value, arrays: list[Any], place: dict[Any, Any]) -> Any:
    """It, of one element."""

    def of_inputs(value, inputs):
        return jaxprs.bound(value.equation, pallas.vary_alike(inputs))[value.output]

    return _made(value, {}, place | dict(enumerate(arrays)), of_inputs)


def _on_tile(value: Value, place: dict[Any, Any], handed: dict[Value, Any]) -> Any:
    return _made(value, dict(handed), place, _elementwise)


def _made(value: Value, known: dict[Value, Any], given: dict[Any, Any], of_inputs: Callable[..., Any]) -> Any:
    """It, by what is `given` by name or number; each value that it is made of once."""
    if value not in known:
        if value.equation is not None:
            inputs = [_made(x, known, given, of_inputs) for x in value.inputs]
            known[value] = of_inputs(value, inputs)
        else:
            (name,) = value.reads or (value.argument,)
            known[value] = jnp.asarray(value.constant, value.aval.dtype) if name is None else given[name]
    return known[value]


def _elementwise(value: Value, inputs: list[Any]) -> Any:
    """The equation of one element, of all elements of arrays that broadcast."""
    name = value.equation.primitive.name
    if name in hoisting.OF_ONE_ELEMENT:
        return inputs[0]
    shape, alike = jnp.broadcast_shapes(*(x.shape for x in inputs)), name in ("select_n", "clamp")
    if name.startswith("custom_"):  # with its own derivative, as jax.nn.relu
        run = lambda *inputs: jaxprs.bound(value.equation, inputs)[value.output]
        for _ in shape:
            run = jax.vmap(run)
        return run(*(jnp.broadcast_to(x, shape) for x in inputs))
    if jaxprs.called_jaxpr(value.equation) is not None:  # jnp's own // or %
        return getattr(jnp, value.equation.params["name"])(*inputs)
    laid = [jnp.broadcast_to(x, shape) if alike or x.shape else x for x in inputs]
    return jaxprs.bound(value.equation, laid)[value.output]
