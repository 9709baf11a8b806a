"""What XLA:CPU fuses: it computes what makes an array anew for each loop that reads the array.

A rule reads its operands in the forward and again in the backward, and a walk over edges reads a node's rows
once for each edge: a sine in front of them was computed as often. A barrier ends that.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_attn_bwd._core import targets


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
