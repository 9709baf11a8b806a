"""`Plan`: how a call is computed, decided once in the public function and used by every rule.

A group of m chunks is computed side by side but for its states, which follow one another; the groups follow
one another, too, and the state before each is saved. Small groups stay in a cache; a large one fills a chip.
A call that forms little is one group on a CPU: no loop parts its forward from its backward.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd._core.numerics import accumulator_dtype, ceil_div
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options

WAYS = (
    Way("one token", "forward.py", "T = 1, as in decoding: the forward", "XLA updates the state in place"),
    Way("plane", "decays.py", "a decay of all channels, or none"),
    Way("halvings", "decays.py", "a decay of each channel; on a CPU with the rules off"),
    Way(
        "all halvings at once",
        "decays.py",
        "a decay of each channel: CPU, chunks of 16, of 32 with wide values",
        "0.4 to 0.7 of a step, half the time to compile",
        "27a1952",
    ),
)
Name = Literal["one token", "plane", "halvings", "all halvings at once"]

HALVINGS_AT_ONCE = Rule(
    "linear_halvings_at_once",
    "CPU, decays of channels",
    "Many small products are slow: steps take 0.4 to 0.7 of their time with few large ones.",
)
CACHED_GROUPS = Rule(
    "linear_cached_groups",
    "CPU",
    "A cache holds what a group forms, 1 MiB, or it is the whole call, 16 MiB; chips take 256 MiB.",
)
MERGED_STACKS = Rule(
    "linear_merged_stacks",
    "one CPU",
    "A stack of matrices has one axis: XLA:CPU of JAX 0.12 ends the process at products of eight axes.",
    "crash",
)
ONE_PRODUCT = Rule(
    "linear_one_product",
    "GPU, a delta rule or erase keys",
    "A step of 4,096 tokens launches 378 kernels, not 835: what needs no state is multiplied out before.",
)
PIECES = Rule(
    "linear_pieces",
    "Hopper kernels, decays of heads, 12 chunks or more, at most 44 programs of 64 columns of values",
    "Pieces of the sequence are walked side by side where one program walked over all chunks: by reckoning "
    "64 chunks take 0.4 of the time with 8 pieces, at one more launch each way.",
)
RULES = (HALVINGS_AT_ONCE, ONE_PRODUCT, PIECES, CACHED_GROUPS, MERGED_STACKS)

CHUNKS_OF_KERNELS = {"mosaic_gpu": 64, "mosaic_tpu": 128}  # tokens
CHUNK = 64  # tokens; with fewer, products are small, with more, those within a chunk are most of the work
CHUNKS_OF_A_TRIP = 8  # where a walk takes one product a chunk: a trip of a loop has launches of its own
_CPU_BYTES = 1 << 20  # of what a group forms in all heads, so that a cache holds it
_CPU_BYTES_OF_ALL = 1 << 24  # with less all chunks are one group: without a loop XLA forms much of it once
_CHUNK_OF_HALVINGS = 16  # where all halvings are taken at once, each a plane of the chunk
_FEW_STATES = 1 << 25  # bytes of one for each chunk
_FEWEST_SIDE_BY_SIDE = 4  # chunks; fewer gain less than it takes to lay them out
_WIDE_VALUES = 2  # channels of a value for each of its key, above which states cost more than planes
_CHIP_BYTES = 1 << 28
_PROCESSORS = 132  # of a Hopper
_COLUMNS = 64  # of values, of one program of its walks
_PIECES = (3, 8)  # fewest, as each is walked twice, and most, as the states between follow one another
_CHUNKS_OF_A_PIECE = 4  # at least


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      implementation: the name of the one that runs.
      pairs: how tokens of a chunk see one another under their decays, a name of `WAYS`.
      chunk: C, a power of two.
      side_by_side: m, the chunks of a group.
      merged_stacks: whether products take stacks of matrices as one axis.
      walk: how a state passes a chunk: by all that the chunk does with it, or by one product, multiplied out.
      pieces: the most parts of the sequence that are walked side by side.
    """

    options: Options
    implementation: str
    pairs: Name
    chunk: int
    side_by_side: int
    merged_stacks: bool
    walk: Literal["chunk by chunk", "one product"] = "chunk by chunk"
    pieces: int = 1

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        if self.pairs == "one token":
            return self.pairs
        walked = ", one product a chunk" if self.walk == "one product" else ""
        walked += f", {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{self.pairs}; chunks of {self.chunk} tokens, {self.side_by_side} side by side{walked}"

    def groups_of(self, T: Any) -> Any:
        """Counts the groups of T tokens, which may be symbolic."""
        return ceil_div(T, self.chunk * self.side_by_side)


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call whose implementation is chosen."""
    T, merged = operands.value.shape[-3], MERGED_STACKS.holds(targets.is_one_cpu())
    of_channels, on_cpu = has_decays_of_channels(operands), targets.platform() == "cpu"
    if (of_kernel := CHUNKS_OF_KERNELS.get(implementation)) is not None:
        # the portable path, which differentiates a kernel, must save the states that it does
        pairs: Name = "halvings" if of_channels else "plane"
        between, pieces = _fewest_between(of_kernel, operands), 1
        if implementation == "mosaic_gpu" and not of_channels:
            most = _pieces(of_kernel, operands)
            pieces = most if PIECES.holds(most >= _PIECES[0]) else 1
        return Plan(options, implementation, pairs, of_kernel, between, merged, pieces=pieces)
    if not isinstance(T, int):
        return Plan(options, implementation, "halvings" if of_channels else "plane", CHUNK, 1, merged)
    if T == 1:
        return Plan(options, implementation, "one token", 1, 1, merged)
    pairs = "halvings" if of_channels else "plane"
    if HALVINGS_AT_ONCE.holds(of_channels and on_cpu and T > 1):
        pairs = "all halvings at once"
    halves_at_once = pairs == "all halvings at once"
    longest = min(CHUNK, _chunk_of_halvings(operands)) if halves_at_once else CHUNK
    chunk = min(longest, 1 << max(T - 1, 0).bit_length())
    chunks = max(ceil_div(T, chunk), 1)
    # groups of like size, lest much of the last one be filled up
    is_cached = CACHED_GROUPS.holds(on_cpu)
    groups = ceil_div(chunks, min(_side_by_side(chunk, chunks, halves_at_once, is_cached, operands), chunks))
    corrects = options.corrects and targets.platform() == "gpu"
    walk: Literal["chunk by chunk", "one product"] = (
        "one product" if ONE_PRODUCT.holds(corrects) else "chunk by chunk"
    )
    return Plan(options, implementation, pairs, chunk, ceil_div(chunks, groups), merged, walk)


def has_decays_of_channels(operands: Operands) -> bool:
    """Tells whether channels have decays of their own."""
    g, H = operands.log_decay, operands.key.shape[-1]
    return g is not None and g.ndim == operands.value.ndim and isinstance(H, int) and H > 1


def _chunk_of_halvings(operands: Operands) -> int:
    """Returns the longest chunk where all halvings are taken at once."""
    H, Hv = operands.key.shape[-1], operands.value.shape[-1]
    is_wide = isinstance(Hv, int) and Hv > _WIDE_VALUES * H
    return 2 * _CHUNK_OF_HALVINGS if is_wide else _CHUNK_OF_HALVINGS


def _fewest_between(chunk: int, operands: Operands) -> int:
    """Returns how many chunks lie between states that are saved: these take no more than the inputs."""
    H, Hv, dtype = operands.key.shape[-1], operands.value.shape[-1], operands.value.dtype
    of_inputs = chunk * (2 * H // operands.groups + Hv) * dtype.itemsize
    return max(ceil_div(H * Hv * accumulator_dtype(dtype).itemsize, max(of_inputs, 1)), 1)


def _pieces(chunk: int, operands: Operands) -> int:
    """Returns how many pieces of the sequence fill the processors with programs that walk."""
    *batch, T, N, Hv = operands.value.shape
    programs = math.prod(batch) * N * ceil_div(Hv, _COLUMNS)
    return min(_PIECES[1], _PROCESSORS // max(programs, 1), T // (chunk * _CHUNKS_OF_A_PIECE))


def _side_by_side(
    chunk: int, chunks: int, halvings_at_once: bool, is_cached: bool, operands: Operands
) -> int:
    """Returns how many of the `chunks` a group may have."""
    (*batch, _, N, Hv), H = operands.value.shape, operands.key.shape[-1]
    itemsize = accumulator_dtype(operands.value.dtype).itemsize
    if not all(isinstance(n, int) for n in (*batch, N, Hv, H)):
        return 1
    least = _fewest_between(chunk, operands)
    if halvings_at_once and chunks * math.prod(batch) * N * H * Hv * itemsize <= _FEW_STATES:
        least = 1
    # what a chunk forms: some rows of each head, some planes, some states
    formed = math.prod(batch) * N * (4 * chunk * (H + Hv) + 4 * chunk**2 + 2 * H * Hv) * itemsize
    if not is_cached:
        return max(least, _CHIP_BYTES // max(formed, 1))
    if chunks * formed <= _CPU_BYTES_OF_ALL:
        return chunks
    fitting = _CPU_BYTES // max(formed, 1)
    if halvings_at_once and fitting < _FEWEST_SIDE_BY_SIDE:
        fitting = 1
    return max(least, fitting)
