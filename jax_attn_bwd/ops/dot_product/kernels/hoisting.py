"""A function of one element, traced and cut in two: what XLA makes of arrays, and what a kernel makes of it.

XLA makes what depends on arrays and on no more than a batch entry and a head, beside these on a row, on a
column, or on the distance between the two: then on row and column through their difference alone, as in
`table[head, clip(column - row)]`. For a mask it also makes what is one value in each block of rows and
columns, as in `chosen[row // 64, column // 64]`. The kernel makes what is left.

That a value depends on a difference alone is told by its drift: how much it rises where row and column both
rise by one. That of a row and of a column is 1, that of their difference 0; what is computed of values that
do not drift does not either. That it is one value in a block is told by its grain: how many neighbouring rows
and columns share it. That of `row // 64` is 64 rows; what is computed of several values has the greatest
common divisor of theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import jaxprs
from jax_attn_bwd._core.intervals import is_floored

PLACE = ("batch", "head", "row", "column")
OF_ONE_ELEMENT = frozenset(("broadcast_in_dim", "reshape", "squeeze"))  # which move nothing
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
SHORTEST_WORD = 32  # columns that share a value of 32 bits: it is handed as one bit an element, or less
_LANES = 128  # tiles are a multiple: blocks of columns are cut so that they divide it
_SMALLEST_BLOCK = 8  # elements: a bool of each is one bit an element
_OF_ONE_DRIFT = frozenset(("max", "min", "convert_element_type")) | OF_ONE_ELEMENT


@dataclass(frozen=True, eq=False)
class Value:
    """A value in a function of one element.

    Attributes:
      aval: its type.
      reads: what of an element's place it depends on, or "logits".
      drift: how much it rises where row and column both rise by one; None if that is not known.
      grain: how many rows and columns, counted from 0, share it; 0 if all do.
      of_arrays: whether it is made of arrays, and XLA makes it.
      equation, inputs, output: what computes it from what, and which of the results it is.
      constant: what it is, if it is that.
      argument: its number, if it is an array.
    """

    aval: Any
    reads: frozenset[str] = frozenset()
    drift: int | None = 0
    grain: tuple[int, int] = (0, 0)
    of_arrays: bool = False
    equation: Any = None
    inputs: tuple["Value", ...] = ()
    output: int = 0
    constant: Any = None
    argument: int | None = None

    @property
    def is_of_tile(self) -> bool:
        """Whether it has a value for each element, not each row or column alone."""
        return "logits" in self.reads or {"row", "column"} <= self.reads

    @property
    def is_of_distance(self) -> bool:
        """Whether it has a value for each element, which the distance between row and column tells."""
        return self.is_of_tile and "logits" not in self.reads and self.drift == 0

    @property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns that share it, if it has one value for each block; None if it has not."""
        rows, columns = self.grain[0], math.gcd(self.grain[1], _LANES)
        is_of_plane = self.is_of_tile and not self.is_of_distance
        return (rows, columns) if is_of_plane and rows * columns >= _SMALLEST_BLOCK else None


@dataclass(frozen=True)
class Cut:
    """A function of one element, cut in two.

    Attributes:
      result: the value that it returns.
      handed: the values that its kernel part begins with.
      made: the values that its kernel part makes.
    """

    result: Value
    handed: tuple[Value, ...]
    made: tuple[Value, ...]

    @property
    def of_distance(self) -> tuple[Value, ...]:
        """Those `handed` that have a value for each distance."""
        return tuple(x for x in self.handed if x.is_of_distance)

    @property
    def of_blocks(self) -> tuple[Value, ...]:
        """Those `handed` that have a value for each block of rows and columns."""
        return tuple(x for x in self.handed if x.block is not None)


def unsharded() -> Any:
    """A mesh of the device aimed at that has no axes: what stands in a kernel is not sharded."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@lru_cache(maxsize=256)
def cut(function: Any) -> Cut:
    """The parts of a `hoisted.OnValues`."""
    element = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    place = [element(jnp.int32) for _ in PLACE]
    lead = [element(jnp.float32), *place] if function.is_score else place
    names = ("logits", *PLACE) if function.is_score else PLACE
    arrays = [jax.ShapeDtypeStruct(*x) for x in function.types]
    with jax.enable_x64(False), unsharded():
        closed = jax.make_jaxpr(function.on_leaves)(*lead, *arrays)
    invars, drifts = closed.jaxpr.invars, {"row": 1, "column": 1, "logits": None}
    # a score has no values of blocks: their gradients would be sums over blocks
    grains = {} if function.is_score else {"row": (1, 0), "column": (0, 1)}
    inputs = [
        Value(v.aval, frozenset((n,)), drifts.get(n, 0), grains.get(n, (0, 0)))
        for n, v in zip(names, invars, strict=False)
    ]
    inputs += [Value(v.aval, of_arrays=True, argument=i) for i, v in enumerate(invars[len(lead) :])]
    with jax.enable_x64(False), unsharded():  # as it was traced: `is_floored` compares programs
        (result,) = jaxprs.evaluate(
            closed,
            inputs,
            _results,
            constant=lambda x, aval: Value(aval, of_arrays=True, constant=x),
            literal=lambda x, aval: Value(aval, constant=x),
            enters=_is_cut,
        )
    handed: dict[Value, None] = {}
    made: dict[Value, None] = {}
    _walk(result, handed, made)
    return Cut(result, tuple(handed), tuple(made))


def _is_cut(equation: Any, given: Sequence[Value]) -> bool:
    """Whether what an equation calls is cut in two; `//` and `%` of indices, and own derivatives, are not."""
    if equation.primitive.name.startswith("custom_"):
        return False
    return any(x.of_arrays for x in given) or not is_floored(equation)


def _results(equation: Any, given: Sequence[Value]) -> list[Value]:
    reads = frozenset().union(*(x.reads for x in given))
    found = []
    for output, v in enumerate(equation.outvars):
        drift, grain = _drift(equation, given), _grain(equation, given)
        value = Value(v.aval, reads, drift, grain, False, equation, tuple(given), output)
        if value.is_of_distance or value.block:  # elementwise of what a kernel has: it makes that itself
            of_arrays = any(x.of_arrays and (x.is_of_tile or x.aval.shape) for x in given)
        else:
            of_arrays = not value.is_of_tile and any(x.of_arrays for x in given)
        found.append(replace(value, of_arrays=of_arrays))
    return found


def _drift(equation: Any, given: Sequence[Value]) -> int | None:
    """How much the results rise; of floats, which are rounded, only 0 is known."""
    drifts, name = [x.drift for x in given if x.drift is not None], equation.primitive.name
    if len(drifts) < len(given):
        return None
    if not any(drifts):
        return 0
    if name in _COMPARISONS and len(set(drifts)) == 1:
        return 0
    if not all(_is_index(x.aval) for x in (*equation.invars, *equation.outvars)):
        return None
    if name in ("add", "sub"):
        return drifts[0] + (drifts[1] if name == "add" else -drifts[1])
    if name == "neg":
        return -drifts[0]
    return drifts[0] if name in _OF_ONE_DRIFT and len(set(drifts)) == 1 else None


def _grain(equation: Any, given: Sequence[Value]) -> tuple[int, int]:
    """How many rows and columns share the results: `size` of `row // size`, else greatest common divisors."""
    rows, columns = (math.gcd(*(x.grain[i] for x in given)) for i in (0, 1))
    if equation.params.get("name") == "floor_divide" and is_floored(equation):
        index, size = given
        if index.equation is None and index.reads in ({"row"}, {"column"}) and size.constant is not None:
            shared = max(int(size.constant), 1)
            return rows * shared, columns * shared
    return rows, columns


def _is_index(aval: Any) -> bool:
    """Whether adding to it cannot round."""
    return jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize >= 4


def _walk(value: Value, handed: dict[Value, None], made: dict[Value, None]) -> None:
    """Notes what the kernel part of `value` begins with, and what it makes."""
    if value.of_arrays:
        handed[value] = None
    elif value.equation is not None and value not in made:
        made[value] = None
        for x in value.inputs:
            _walk(x, handed, made)
