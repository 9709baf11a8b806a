"""What XLA fuses.

XLA:CPU computes what makes an array anew for each loop that reads the array. A rule reads its operands in the
forward and again in the backward, and a walk over edges reads a node's rows once for each edge: a sine in
front of them was computed as often. A barrier ends that.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import explicit_spec

_ROW_OF_ONE_KERNEL = 16384  # XLA:GPU reduces longer rows in two kernels


@jax.custom_jvp
def barrier(operands: Any) -> Any:
    """`operands`: all of them are computed before what reads any of the results.

    Tangents go past it. JAX 0.12 cannot transpose `lax.optimization_barrier` where some of its tangents are
    known to be zero, as under `jax.checkpoint`.
    """
    return lax.optimization_barrier(operands)


@barrier.defjvp
def _barrier_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return barrier(*primals), tangents[0]


def computed_once(operands: Any, names: Sequence[str]) -> Any:
    """`operands`, a NamedTuple, with those of `names` behind barriers, for what a rule computes of them.

    A rule saves the operands themselves: the outputs of barriers would be copies. Known arrays, as in an
    eager call, are there already. An array that is given twice gets one barrier. Where there are several
    devices there is none, since keys that are sharded would be gathered anew behind each.
    """
    if not targets.is_one_cpu():
        return operands
    barriers: dict[int, Any] = {}

    def kept(x):
        if not isinstance(x, jax.core.Tracer):
            return x
        if id(x) not in barriers:
            barriers[id(x)] = lax.optimization_barrier(x)
        return barriers[id(x)]

    return operands._replace(**{name: jax.tree.map(kept, getattr(operands, name)) for name in names})


def read_in_one_kernel(x: jax.Array, axis: int) -> jax.Array:
    """`x`, a forward's result, for a backward that sums over `axis` what it makes of `x`, and reads it again.

    On a GPU it is read as it was rounded: XLA would keep the wide numbers, too. And XLA:GPU makes one kernel
    of what surrounds a reduction whose own operand meets it again, as each number and its row's greatest do
    here. Of sum(y dy) and y (dy - sum) alone it makes two, and both read all.
    """
    if targets.platform() != "gpu":
        return x
    length, is_sharded = x.shape[axis], explicit_spec(x)[axis] is not None
    if axis == -1 and not is_sharded and isinstance(length, int) and 0 < length <= _ROW_OF_ONE_KERNEL:
        return _met_again(lax.optimization_barrier(x))
    return x if accumulator_dtype(x.dtype) == x.dtype else lax.optimization_barrier(x)


@jax.custom_jvp
def _met_again(x: jax.Array) -> jax.Array:
    """`x`, as the lesser of each number and of its row's greatest."""
    return jnp.minimum(x, x.max(-1, keepdims=True))


@_met_again.defjvp
def _met_again_jvp(primals, tangents):
    return _met_again(*primals), tangents[0]
