"""Puts barriers where XLA would compute an array anew, and asks a GPU for one kernel where it makes two.

XLA:CPU computes what makes an array anew for each loop that reads the array. A rule reads its operands in the
forward and again in the backward, and a walk over edges reads a node's rows once for each edge: a sine in
front of them was computed as often. A barrier ends that.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.choices import Rule
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import explicit_spec

COMPUTED_ONCE = Rule(
    "computed_once",
    "CPU, one device where it may be gathered: rows read by index, biases and lengths stand behind a barrier",
    "What makes a row is not computed for each that reads it: a sine in front of GAT costs 1.45 of the step, "
    "of GATv2 1.27, a layer norm in front of deformable attention 1.22; without a producer nothing changes.",
)
BARRIER_AS_A_CALL = Rule(
    "barrier_as_a_call",
    "CPU: a barrier is a call that is not inlined",
    "`lax.optimization_barrier` is dropped before fusion.",
    until="0.12",
)
ROUNDED_BEHIND_A_BARRIER = Rule(
    "rounded_behind_a_barrier",
    "GPU, what rounding takes is asked for",
    "XLA:GPU reads a number that is narrowed and widened again as it was: what rounding took would be 0.",
    "accuracy",
)
READ_IN_ONE_KERNEL = Rule(
    "read_in_one_kernel",
    "GPU, rows of up to 16,384 whose sum meets them again",
    "XLA:GPU makes one kernel of the softmax's backward instead of two that both read all.",
)
RULES = (COMPUTED_ONCE, BARRIER_AS_A_CALL, ROUNDED_BEHIND_A_BARRIER, READ_IN_ONE_KERNEL)
_ROW_OF_ONE_KERNEL = 16384  # XLA:GPU reduces longer rows in two kernels


@jax.custom_jvp
def barrier(operands: Any) -> Any:
    """Returns `operands`, all of them computed before what reads any of the results.

    JAX before 0.12 drops `lax.optimization_barrier` before it fuses for a CPU: a call that is not inlined
    takes its place there. Tangents go past it. JAX 0.12 cannot transpose a barrier where some of its tangents
    are known to be zero, as under `jax.checkpoint`.
    """
    if not BARRIER_AS_A_CALL.holds(jax.__version_info__ < (0, 12) and targets.platform() == "cpu"):
        return lax.optimization_barrier(operands)
    with set_xla_metadata(inlineable="false"):
        return _as_they_are(operands)


@jax.jit
def _as_they_are(operands: Any) -> Any:
    return operands


@barrier.defjvp
def _barrier_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return barrier(*primals), tangents[0]


def computed_once(operands: Any, names: Sequence[str]) -> Any:
    """Puts those of `names` in `operands`, a NamedTuple, behind barriers, for what a rule computes of them.

    A rule saves the operands themselves: the outputs of barriers would be copies.
    """
    once = lambda x: kept_whole(x, may_be_gathered=True)
    return operands._replace(**{name: jax.tree.map(once, getattr(operands, name)) for name in names})


def kept_whole(x: jax.Array, may_be_gathered: bool) -> jax.Array:
    """Puts `x` behind a barrier on a CPU, so that what makes it is not computed anew for each reader.

    Known arrays, as in an eager call, are there already. Where there are several devices, what they may
    gather has none, since it would be gathered anew behind each. For a GPU a barrier would part what makes
    `x` from what brings it to a kernel: one more pass over it.
    """
    if not isinstance(x, jax.core.Tracer):
        return x
    on_cpu = targets.is_one_cpu() if may_be_gathered else targets.platform() == "cpu"
    return barrier(x) if COMPUTED_ONCE.holds(on_cpu) else x


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds `x` to a narrower `dtype`, for a caller that takes what rounding took.

    XLA:GPU reads a number that is narrowed and widened again as it was, so that `x` less its rounded self
    would be 0 there.
    """
    narrow = x.astype(dtype)
    return barrier(narrow) if ROUNDED_BEHIND_A_BARRIER.holds(targets.platform() == "gpu") else narrow


def read_in_one_kernel(x: jax.Array, axis: int) -> jax.Array:
    """Returns `x`, a forward's result, as a backward reads it that sums over `axis` and then reads it again.

    On a GPU that backward would be two kernels, both of which read all: y (dy - sum(y dy)) sums an operand,
    y dy, that nothing meets after the sum. XLA:GPU makes one kernel of a reduction and its surroundings if
    the very operand is met again. So each number is taken as the lesser of itself and its row's greatest:
    the same number, of a reduction that has such an operand. It stands behind a barrier, which is read as it
    was rounded: else XLA would keep the wide numbers, too. Rows too long for that are left to XLA: behind a
    barrier, what sums them could not be one kernel with what makes them.
    """
    if not READ_IN_ONE_KERNEL.holds(targets.platform() == "gpu"):
        return x
    length, is_sharded = x.shape[axis], explicit_spec(x)[axis] is not None
    is_long = isinstance(length, int) and length > _ROW_OF_ONE_KERNEL
    if axis == -1 and not is_sharded and isinstance(length, int) and length > 0 and not is_long:
        return met_again(lax.optimization_barrier(x))
    return x if is_long or accumulator_dtype(x.dtype) == x.dtype else lax.optimization_barrier(x)


@jax.custom_jvp
def met_again(x: jax.Array) -> jax.Array:
    """Returns `x`, as the lesser of each number and of its row's greatest: see `read_in_one_kernel`."""
    return jnp.minimum(x, x.max(-1, keepdims=True))


@met_again.defjvp
def _met_again_jvp(primals, tangents):
    return met_again(*primals), tangents[0]
