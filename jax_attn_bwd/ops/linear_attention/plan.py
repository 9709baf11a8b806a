"""`Plan`: how a call is computed, decided once in the public function and used by every rule.

A group of m chunks is computed side by side but for its states, which follow one another; the groups follow
one another, too, and the state before each is saved. Small groups stay in a cache; a large one fills a chip.
A call that forms little is one group on a CPU: no loop parts its forward from its backward.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.numerics import accumulator_dtype, ceil_div
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options

CHUNK = 64  # tokens; with fewer, products are small, with more, those within a chunk are most of the work
_CPU_BYTES = 1 << 20  # of what a group forms in all heads, so that a cache holds it
_CPU_BYTES_OF_ALL = 1 << 24  # with less all chunks are one group: without a loop XLA forms much of it once
_CHUNK_OF_HALVINGS = 16  # where all halvings are taken at once, each a plane of the chunk
_FEW_STATES = 1 << 25  # bytes of one for each chunk
_FEWEST_SIDE_BY_SIDE = 4  # chunks; fewer gain less than it takes to lay them out
_WIDE_VALUES = 2  # channels of a value for each of its key, above which states cost more than planes
_CHIP_BYTES = 1 << 28


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      implementation: the name of the one that runs.
      chunk: C, a power of two.
      side_by_side: m, the chunks of a group.
      halvings_at_once: whether decays of channels take all halvings of a chunk at once, for a CPU.
      mild_at_once: whether mild ones take one product instead, which is seen at run time.
    """

    options: Options
    implementation: str
    chunk: int
    side_by_side: int
    halvings_at_once: bool = False
    mild_at_once: bool = False

    def groups_of(self, T: Any) -> Any:
        """Counts the groups of T tokens, which may be symbolic."""
        return ceil_div(T, self.chunk * self.side_by_side)


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call whose implementation is chosen."""
    T = operands.value.shape[-3]
    if not isinstance(T, int):
        return Plan(options, implementation, CHUNK, 1)
    at_once = T > 1 and _has_decays_of_channels_on_cpu(operands)
    # a restart is not mild, and several devices would hear of one another in each group
    is_mild_at_once = at_once and T > _CHUNK_OF_HALVINGS and operands.restarts is None
    is_mild_at_once = is_mild_at_once and targets.is_one_cpu()
    # one product costs little more in a long chunk; the inverse of a delta rule does
    is_short = at_once and (options.is_delta or not is_mild_at_once)
    longest = min(CHUNK, _chunk_of_halvings(operands)) if is_short else CHUNK
    chunk = min(longest, 1 << max(T - 1, 0).bit_length())
    chunks = max(ceil_div(T, chunk), 1)
    # groups of like size, lest much of the last one be filled up
    groups = ceil_div(chunks, min(_side_by_side(chunk, chunks, at_once, operands), chunks))
    return Plan(options, implementation, chunk, ceil_div(chunks, groups), at_once, is_mild_at_once)


def _has_decays_of_channels_on_cpu(operands: Operands) -> bool:
    """Tells whether channels have decays of their own, on a CPU."""
    g, H = operands.log_decay, operands.key.shape[-1]
    of_channels = g is not None and g.ndim == operands.value.ndim and isinstance(H, int) and H > 1
    return of_channels and targets.platform() == "cpu"


def _chunk_of_halvings(operands: Operands) -> int:
    """Returns the longest chunk where all halvings are taken at once."""
    H, Hv = operands.key.shape[-1], operands.value.shape[-1]
    is_wide = isinstance(Hv, int) and Hv > _WIDE_VALUES * H
    return 2 * _CHUNK_OF_HALVINGS if is_wide else _CHUNK_OF_HALVINGS


def _side_by_side(chunk: int, chunks: int, halvings_at_once: bool, operands: Operands) -> int:
    """Returns how many of the `chunks` a group may have."""
    (*batch, _, N, Hv), H = operands.value.shape, operands.key.shape[-1]
    itemsize = accumulator_dtype(operands.value.dtype).itemsize
    if not all(isinstance(n, int) for n in (*batch, N, Hv, H)):
        return 1
    # the states that are saved take no more than the inputs, where they are not few
    of_inputs = chunk * (2 * H // operands.groups + Hv) * operands.value.dtype.itemsize
    least = ceil_div(H * Hv * itemsize, max(of_inputs, 1))
    if halvings_at_once and chunks * math.prod(batch) * N * H * Hv * itemsize <= _FEW_STATES:
        least = 1
    # what a chunk forms: some rows of each head, some planes, some states
    formed = math.prod(batch) * N * (4 * chunk * (H + Hv) + 4 * chunk**2 + 2 * H * Hv) * itemsize
    if targets.platform() != "cpu":
        return max(least, _CHIP_BYTES // max(formed, 1))
    if chunks * formed <= _CPU_BYTES_OF_ALL:
        return chunks
    fitting = _CPU_BYTES // max(formed, 1)
    if halvings_at_once and fitting < _FEWEST_SIDE_BY_SIDE:
        fitting = 1
    return max(least, fitting)
