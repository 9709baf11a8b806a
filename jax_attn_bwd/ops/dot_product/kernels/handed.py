"""What `mask_mod` and `score_mod` read of arrays, in kernels: XLA reads it, and hands them values.

A function is traced on one element and cut in two. What is made of arrays and of no more than a batch entry,
a head and a row, or a column instead (`document[row]`, `lengths[batch]`, `width[head]`), is a value for each
of these, and computed before the kernel: `values`. What is left is made of those values and of the logits,
row and column together: `OnValues`, which is evaluated on tiles, and must be elementwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.intervals import called_jaxpr, is_floored
from jax_attn_bwd._core.jaxprs import is_literal

_PLACE = ("batch", "head", "row", "column")
_OF_ONE_ELEMENT = frozenset(("broadcast_in_dim", "reshape", "squeeze"))  # which move nothing


@dataclass(frozen=True, eq=False)
class _Value:
    """A value in a function of one element.

    Attributes:
      aval: its type.
      reads: what of an element's place it depends on, or "logits".
      of_arrays: whether it is made of arrays, and not of row and column together: kernels do not make it.
      equation, inputs, output: what computes it from what, and which of the results it is.
      constant: what it is, if it is that.
      argument: its number, if it is an array.
    """

    aval: Any
    reads: frozenset[str] = frozenset()
    of_arrays: bool = False
    equation: Any = None
    inputs: tuple["_Value", ...] = ()
    output: int = 0
    constant: Any = None
    argument: int | None = None

    @property
    def is_of_tile(self) -> bool:
        """Whether it has a value for each element, not each row or column alone."""
        return "logits" in self.reads or {"row", "column"} <= self.reads


@dataclass(frozen=True)
class Cut:
    """A function of one element, cut in two.

    Attributes:
      result: the value that it returns.
      handed: the values that its kernel part begins with.
      made: the values that its kernel part makes.
    """

    result: _Value
    handed: tuple[_Value, ...]
    made: tuple[_Value, ...]


@dataclass(frozen=True)
class OnValues:
    """`function` for kernels: handed `values` in the place of the arrays that it reads."""

    function: Callable[..., Any]
    is_score: bool
    tree: Any  # of `mod_args`
    types: tuple[Any, ...]  # (shape, dtype) of its leaves

    def on_leaves(self, *given: Any) -> Any:
        """`function`, with the leaves of `mod_args` one after the other."""
        count = len(_PLACE) + self.is_score
        return self.function(*given[:count], *jax.tree.unflatten(self.tree, given[count:]))

    @property
    def program(self) -> Any:
        """The jaxpr of `on_leaves` on a tile."""
        index = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        logits = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * self.is_score
        place = index(1, 1), index(1, 1), index(1, 8), index(8, 1)
        with unsharded():
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
        return _cut(self)

    def examples(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of what it may be handed on a tile of two axes."""
        dtypes = (jax.eval_shape(_as_handed, v.aval).dtype for v in self.cut.handed)
        return tuple(jax.ShapeDtypeStruct((1, 1), dtype) for dtype in dtypes)

    def __call__(self, *given: Any) -> Any:
        """On a tile: arrays of one rank that broadcast to it, or scalars."""
        count = len(_PLACE) + self.is_score
        names = ("logits", *_PLACE) if self.is_score else _PLACE
        found = dict(zip(names, given[:count], strict=True))
        values = zip(self.cut.handed, given[count:], strict=True)
        return _on_tile(self.cut.result, found, {v: _as_before(x, v.aval.dtype) for v, x in values})


def unsharded() -> Any:
    """A mesh of the device aimed at that has no axes: what stands in a kernel is not sharded."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def of(function: Callable[..., Any], is_score: bool, mod_args: Any) -> OnValues:
    """`function` of a call with these `mod_args`."""
    leaves, tree = jax.tree.flatten(mod_args)
    return OnValues(function, is_score, tree, tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves))


def values(
    function: OnValues, mod_args: Any, batch: jax.Array, heads: jax.Array, rows: jax.Array, columns: jax.Array
) -> tuple[jax.Array, ...]:
    """What it is handed: 32 bits `[B|1, N|1, T|1, S|1]`, of which no more than one of the last two is not 1.

    Args:
      batch, heads: their numbers, `[B]` and `[N]`.
      rows, columns: as the function is handed them, `[B|1, T]` and `[B|1, S]`.
    """
    given = pallas.vary_alike((jax.tree.leaves(mod_args), batch, heads, {"row": rows, "column": columns}))
    arrays, batch, heads, tokens = given
    with jax.enable_x64(False):
        return tuple(_laid(value, arrays, batch, heads, tokens) for value in function.cut.handed)


def _laid(value: _Value, arrays: list[Any], batch: Any, heads: Any, tokens: dict[str, Any]) -> jax.Array:
    side = next((name for name in tokens if name in value.reads), None)
    along = jnp.zeros((1, 1), jnp.int32) if side is None else tokens[side]

    def of_element(b, n, t):
        return _as_handed(_outside(value, arrays, {"batch": b, "head": n, side: t}))

    of_batch = None if along.shape[0] == 1 else 0
    run = jax.vmap(of_element, (None, None, 0))
    run = jax.vmap(jax.vmap(run, (None, 0, None)), (0, None, of_batch))
    batch = batch if of_batch == 0 or "batch" in value.reads else batch[:1]
    heads = heads if "head" in value.reads else heads[:1]
    found = run(batch, heads, along[0] if of_batch is None else along)
    return found[..., None, :] if side == "column" else found[..., None]


def _as_handed(x: jax.Array) -> jax.Array:
    """In 32 bits: bools and narrow numbers widened."""
    if x.dtype.itemsize == 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _as_before(x: Any, dtype: Any) -> Any:
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def unsupported(function: OnValues, name: str) -> str | None:
    """Why a kernel cannot be handed what it reads of arrays; None if it can."""
    try:
        cut = function.cut
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        return f"{name} reads arrays and cannot be traced on one element: {type(error).__name__}: {words}"
    for value in cut.made:
        operation = value.equation.primitive.name
        if operation in ("dynamic_slice", "gather"):
            return (
                f"{name} reads an array at places that depend on row and column together, and it is handed "
                f"one value a row, a column, or a batch entry and head: read it so, or hand over a bias array"
            )
        if value.aval.shape:
            return f"{name} reads arrays and is not elementwise: {operation!r} makes several numbers of one"
    return None


@lru_cache(maxsize=256)
def _cut(function: OnValues) -> Cut:
    element = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    place = [element(jnp.int32) for _ in _PLACE]
    lead = [element(jnp.float32), *place] if function.is_score else place
    names = ("logits", *_PLACE) if function.is_score else _PLACE
    arrays = [jax.ShapeDtypeStruct(*x) for x in function.types]
    with jax.enable_x64(False), unsharded():
        closed = jax.make_jaxpr(function.on_leaves)(*lead, *arrays)
    inputs = [_Value(v.aval, frozenset((n,))) for n, v in zip(names, closed.jaxpr.invars, strict=False)]
    inputs += [
        _Value(v.aval, of_arrays=True, argument=i) for i, v in enumerate(closed.jaxpr.invars[len(lead) :])
    ]
    (result,) = _traced(closed, inputs)
    handed: dict[_Value, None] = {}
    made: dict[_Value, None] = {}
    _walk(result, handed, made)
    return Cut(result, tuple(handed), tuple(made))


def _traced(closed: Any, inputs: Sequence[_Value]) -> list[_Value]:
    jaxpr = closed.jaxpr
    consts = [
        _Value(v.aval, of_arrays=True, constant=x)
        for v, x in zip(jaxpr.constvars, closed.consts, strict=True)
    ]
    found = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    read = lambda x: _Value(x.aval, constant=x.val) if is_literal(x) else found[x]
    for equation in jaxpr.eqns:
        given = tuple(read(x) for x in equation.invars)
        called = called_jaxpr(equation)
        whole = called is None or equation.primitive.name.startswith("custom_")
        if whole or (is_floored(equation) and not any(x.of_arrays for x in given)):
            results = _results(equation, given)
        else:
            results = _traced(called, given)
        found |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _results(equation: Any, given: tuple[_Value, ...]) -> list[_Value]:
    reads = frozenset().union(*(x.reads for x in given))
    of_tile = _Value(None, reads).is_of_tile
    of_arrays = not of_tile and any(x.of_arrays for x in given)
    return [
        _Value(v.aval, reads, of_arrays, equation, given, output) for output, v in enumerate(equation.outvars)
    ]


def _walk(value: _Value, handed: dict[_Value, None], made: dict[_Value, None]) -> None:
    """Notes what the kernel part of `value` begins with, and what it makes."""
    if value.of_arrays:
        handed[value] = None
    elif value.equation is not None and value not in made:
        made[value] = None
        for x in value.inputs:
            _walk(x, handed, made)


def _outside(value: _Value, arrays: list[Any], place: dict[Any, Any]) -> Any:
    """It, of one element."""
    known: dict[_Value, Any] = {}

    def find(value):
        if value in known:
            return known[value]
        if value.argument is not None:
            found = arrays[value.argument]
        elif value.equation is None:
            (name,) = value.reads or (None,)
            found = jnp.asarray(value.constant, value.aval.dtype) if name is None else place[name]
        else:
            inputs = pallas.vary_alike([find(x) for x in value.inputs])
            found = _bound(value, inputs)
        known[value] = found
        return found

    return find(value)


def _bound(value: _Value, inputs: list[Any]) -> Any:
    primitive = value.equation.primitive
    found = primitive.bind(*inputs, **primitive.get_bind_params(value.equation.params))
    return found[value.output] if primitive.multiple_results else found


def _on_tile(value: _Value, place: dict[str, Any], handed: dict[_Value, Any]) -> Any:
    known = dict(handed)

    def find(value):
        if value in known:
            return known[value]
        if value.equation is None:
            (name,) = value.reads or (None,)
            found = jnp.asarray(value.constant, value.aval.dtype) if name is None else place[name]
        else:
            found = _elementwise(value, [find(x) for x in value.inputs])
        known[value] = found
        return found

    return find(value)


def _elementwise(value: _Value, inputs: list[Any]) -> Any:
    """The equation of one element, of all elements of arrays that broadcast."""
    name = value.equation.primitive.name
    if name in _OF_ONE_ELEMENT:
        return inputs[0]
    if called_jaxpr(value.equation) is not None:  # jnp's own // or %
        return getattr(jnp, value.equation.params["name"])(*inputs)
    shape, alike = jnp.broadcast_shapes(*(x.shape for x in inputs)), name in ("select_n", "clamp")
    return _bound(value, [jnp.broadcast_to(x, shape) if alike or x.shape else x for x in inputs])
