"""`Plan`: how a call is computed, decided once in the public function and used by all rules.

Part of it is the `Schedule` of the portable path: the plane at once, planes in turn, tiles or strips, and how
many batch entries are taken at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import split, targets
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.products import NARROW_PRODUCTS
from jax_attn_bwd._core.sharding import auto_devices, axis_size, explicit_spec
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.mask import AXES
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Sizes

WAYS = (
    Way(
        "whole plane",
        "portable/plane.py",
        "up to 2 M logits of a slice of the batch and 1 M of a head; GPU: up to 2 GiB, nothing to skip",
        "as fast as tiles, compiled sooner, fused with what stands around",
    ),
    Way(
        "planes in turn",
        "portable/planes.py",
        "GPU: full attention, padding, a bias, beyond 2 GiB of one plane of all",
        "bfloat16: 0.99 to 1.03 of the plain formula's bytes, 0.19 to 0.25 of its memory, for an H100",
    ),
    Way("tiles", "portable/tiles.py", "all else; on GPUs functions, dropout and symbolic sizes alone"),
    Way(
        "strips",
        "portable/strips.py",
        "GPU: causality and windows, and where batch and heads cannot be cut to planes",
        "0.81 of the plain formula's bytes (tiles: 1.22), causal 0.62 (0.74), compiled for an H200",
        "33319bc",
    ),
    Way(
        "strips of a few widths",
        "portable/strips.py",
        "GPU: what segments and positions leave of the plane",
        "four documents 0.25 of the plain formula's bytes (tiles: 0.49), compiled for an H200",
        "d89cd43",
    ),
    Way("Hopper's kernels", "kernels/hopper_*.py", "H100, H200: bfloat16 and float16"),
    Way("cuDNN", "kernels/cudnn*.py", "NVIDIA GPUs, by name or where bits may vary"),
    Way("TPU kernels", "kernels/tpu_*.py", "TPU v5e and later, where proven"),
)

FEW_KEYS = Rule(
    "few_keys",
    "CPU, up to 4 keys for each channel of a head: a whole plane up to 8 M logits of a slice",
    "A row of logits is not much longer than its query: by tiles B1 T777 S512 N8 H128 takes 1.19 of it.",
)
BATCH_SLICES = Rule(
    "batch_slices",
    "one CPU: so many batch entries at a time that their logits take 4 MiB, where all take more than 8",
    "No plane of a whole batch: without it steps hold 1.1 to 2.2 times as much, in 0.73 to 1.06 of the time.",
    "memory",
)
SMALL_TILES = Rule(
    "small_tiles",
    "CPU, 64 heads or more in a slice: tiles of 128 x 128",
    "A tile of all heads is small: without it steps of 64 to 128 heads hold 1.3 to 2.6 times as much.",
    "memory",
)
NARROW_TILES = Rule(
    "narrow_tiles",
    "a window, or a `mask_mod` known at trace time, that hides much of a wide tile: tiles as wide as high",
    "A narrow band crosses fewer elements of narrow tiles: steps take 1.1 to 1.3 times as long without it.",
)
KEYS_IN_REACH = Rule(
    "keys_in_reach",
    "one CPU, a whole plane: keys behind the last that a band lets some query see are left out",
    "Causal 32 x 64 takes 0.56 of its step, 100 x 200 0.6 (ed57823).",
)
VECTOR_LAST = Rule(
    "vector_last",
    "CPU, one query for each key head: products read keys and values in one order, which no barrier precedes",
    "32 x 1 x 16 behind a GELU takes 0.7 of its step (3e2ca05).",
)
KEPT_ROUNDING = Rule(
    "kept_rounding",
    "CPU, narrow dtypes: what rounding takes from `out`, and from narrow p, is kept",
    "Values of mean 3: the gradient of queries is off by 0.26% of its largest entry, without it by 1.8%.",
    "accuracy",
)
WHOLE_ROWS = Rule(
    "whole_rows",
    "GPU, a plane: what becomes of a row of logits is one array in each direction",
    "XLA:GPU makes one kernel of it: without it padding (B32 T512 N12 H64) has 22 launches, not 17, and 1.2 "
    "to 1.4 times the bytes.",
)
PLANES = Rule(
    "planes",
    "GPU, full attention, padding or a bias, neither functions nor dropout: planes, 2 GiB of them at a time",
    "In the place of strips, and of their planes of a few heads beside a bias, which took 1.3 to 2.3 times "
    "the plain formula's time (an H100, 391a32d): products that end in exponentials are slow. The backward "
    "forms its logits again: else each layer of a model keeps a plane (272 MiB, B8 T1024 N16 H64, not 24).",
)
FUSED_DP = Rule(
    "fused_dp",
    "GPU, `planes` of batch and heads of one device: float32, float64, and bfloat16 without a sink",
    "In the place of dp as an array of float32. Compiled for an H100, float32 (B32 T512 N12 H64) moves 1.02 "
    "of the bytes of `jax.nn`, not 1.13, and bfloat16 (B4 T4096 N16 H128) 0.99, not 1.08. With keys and "
    "values of mean 3 in bfloat16 the error of dq is 0.8 of that of `jax.nn`, not 2.1.",
)
STRIPS = Rule(
    "strips",
    "GPU, larger than a plane, no `planes`, neither functions nor dropout nor a bias",
    "see the table of ways",
    "memory",
)
FOLDED_PARTS = Rule(
    "folded_parts",
    "causal queries cut over devices, larger than a plane: a part is an early and a late stretch",
    "All parts have the same work, of which the last of four has 1.75 times the mean else; they exchange "
    "half of all rows.",
)
RULES = (
    FEW_KEYS,
    BATCH_SLICES,
    SMALL_TILES,
    NARROW_TILES,
    KEYS_IN_REACH,
    VECTOR_LAST,
    KEPT_ROUNDING,
    WHOLE_ROWS,
    PLANES,
    FUSED_DP,
    STRIPS,
    FOLDED_PARTS,
)

TILE_LOGITS = 1 << 20  # of a slice: 4 MiB
MATERIALIZED_LOGITS = 1 << 21  # of one batch slice: 8 MiB
KEYS_PER_CHANNEL = 4  # of a head, that are few
MOST_OF_FEW_KEYS = 1 << 23  # logits of one batch slice, where a row has so few
MATERIALIZED_PLANE = 1 << 20  # logits of one head: from there on tiles are faster, causal or not
LEAST_STRIP, MOST_STRIPS, MOST_PIECES = 256, 16, 32  # pieces: of strips, with the slices of their heads
STRIP_LOGITS = 1 << 21  # of a batch entry and head: an eighth of a plane of 4,096 x 4,096
SLICE_LOGITS = 1 << 27  # of all heads of a strip: 512 MiB in float32
PLANE_BYTES = 1 << 31  # of planes that are computed at once on a GPU
TURN_LOGITS = 1 << 23  # least of one block of all heads that are computed at once: 32 MiB
NARROW_HEAD = 64  # the least whose products are narrow: rounding shorter ones takes as long as it saves
GPU_TILE = 1024  # rows and columns of a tile, on a TPU's portable path too
LEAST_TILE = 64  # rows and columns: smaller tiles take longer to walk over than to compute


@dataclass(frozen=True)
class Materialized:
    """The plane is one tile: no walk, see `portable/plane.py`."""

    batch_slices: int = 1  # of the first batch axis, one after the other
    keys: int | None = None  # the first ones, all that some query sees; None = not counted
    whole_rows: bool = False  # what becomes of a row is one kernel, of XLA:GPU
    formed_again: bool = False  # the backward has logits of its own: XLA keeps no plane of the forward
    fused_dp: bool = False  # of whole rows: the product (6) ends in (8), or in dp less most of delta

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        return "whole plane" if self.keys is None else f"whole plane of the first {self.keys} keys"


@dataclass(frozen=True)
class _BlockedPlane:
    """A plane that is cut into blocks of rows and columns."""

    block_q: int
    block_k: int

    @property
    def blocks(self) -> tuple[int, int]:
        return self.block_q, self.block_k


@dataclass(frozen=True)
class Tiles(_BlockedPlane):
    """Tiles one after the other, which add to sums, see `portable/tiles.py`."""

    product_dtype: str  # of the factors of matrix products
    batch_slices: int = 1
    parts: int = 1  # of the queries, this being one of them: they walk in step, see `_core.split`

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        return f"tiles of {self.block_q} x {self.block_k}"


@dataclass(frozen=True)
class Planes:
    """Whole planes of some batch entries and heads, one slice after the other, see `portable/planes.py`."""

    batch_slices: int  # of the first batch axis
    head_slices: int  # of the key heads
    whole_rows: bool = True  # as those of `Materialized`
    fused_dp: bool = False

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        return f"planes in turn, {self.batch_slices * self.head_slices} slices"


@dataclass(frozen=True)
class Strips(_BlockedPlane):
    """Blocks of rows or keys against all that they meet, see `portable/strips.py`."""

    head_slices: int = 0  # of batch and heads of a device, one axis of strips; 0 = axes of their own
    runtime_extent: bool = False  # which of a few widths a strip has is told at run time

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        name = "strips of a few widths" if self.runtime_extent else "strips"
        return f"{name}, {self.block_q} rows, {self.block_k} keys"


# How the portable path cuts the plane: this changes speed and rounding, never the meaning.
Schedule = Materialized | Tiles | Planes | Strips


def default_schedule(operands: Operands, sizes: Sizes, parts: int = 1) -> Materialized | Tiles:
    """Picks measured tiles for the target platform (see tests/bench/results), or the whole plane.

    Args:
      operands: of the call.
      sizes: of the call, or of one of `parts` of its queries that walk in step.
    """
    mask, on_cpu = operands.mask, targets.platform() == "cpu"
    batch, T, S, _, _ = sizes

    # Tiles that caches hold; on one CPU so many batch entries at a time that a tile of all fits, too.
    block_q, block_k = (256, 512) if on_cpu else (GPU_TILE, GPU_TILE)  # not measured but on a CPU
    slices = 1
    is_sharded = not on_cpu or _may_be_sharded(operands.query)
    if on_cpu:
        heads = math.prod(batch) * sizes.N
        if not is_sharded:
            plane = _even_block(T, block_q) * _even_block(S, block_k)
            slices = _batch_slices(batch, sizes.N * plane)
        if SMALL_TILES.holds(isinstance(heads, int) and heads >= 64 * slices):
            block_q, block_k = 128, 128

    # Narrow tiles where much of wide ones is hidden.
    narrow = on_cpu and mask.window is None and _visits_less(operands, sizes, block_q, block_q, than=block_k)
    if mask.window is not None:
        left, right = mask.window
        narrow = left + (0 if mask.is_causal else right) < block_k
    if NARROW_TILES.holds(narrow):
        block_k = block_q

    # One tile of it all where the plane is small, or on a CPU its keys are few: there tiles save nothing.
    all_sizes, channels = (parts, *batch, sizes.N, T, S), (operands.key.shape[-1], operands.value.shape[-1])
    known = all(isinstance(n, int) for n in (*all_sizes, *channels))
    most, planes = MATERIALIZED_LOGITS, slices
    few = known and on_cpu and KEYS_PER_CHANNEL * max(channels) >= S
    if FEW_KEYS.holds(few and math.prod(all_sizes) > MATERIALIZED_LOGITS):
        most = MOST_OF_FEW_KEYS
        planes = 1 if is_sharded else _batch_slices(batch, sizes.N * T * S)
    if known and T * S < MATERIALIZED_PLANE and 0 < math.prod(all_sizes) <= most * planes:
        keys = None if is_sharded else _keys_in_reach(operands)
        keys = keys if KEYS_IN_REACH.holds(keys is not None) else None
        # Slices are there for the logits: not where keys or values have as many numbers.
        planes = planes if max(channels) < sizes.G * T else 1
        return Materialized(_worth_slices(planes, math.prod(all_sizes)), keys)

    blocks = _even_block(T, block_q), _even_block(S, block_k)
    if on_cpu:
        blocks = tile_sizes(mask.mask_mod, *blocks)
    slices = _worth_slices(slices, math.prod((*batch, sizes.N, *blocks))) if known else slices
    return Tiles(*blocks, str(product_dtype(operands)), slices, parts)


def on_gpu(schedule: Materialized | Tiles, options: Options, operands: Operands) -> Schedule:
    """Replaces tiles on a GPU by planes where nothing is skipped, and by strips where these know the call.

    Strips have sizes of their own, or, where these would be too many, one of a few widths: XLA compiles a
    product of each size, and tries variants of it.
    """
    if targets.platform() != "gpu":
        return schedule
    if isinstance(schedule, Materialized):
        return replace(schedule, whole_rows=WHOLE_ROWS.holds())

    # Planes and strips know neither functions nor dropout, strips no bias.
    mask, (batch, T, S, _, groups) = operands.mask, operands.sizes
    functions = mask.has("query_origin", "mod_args", "mask_mod") or options.score_mod is not None
    others = options.dropout_rate > 0
    known = all(isinstance(n, int) and n > 0 for n in (*batch, T, S))
    if functions or others or not known:
        return schedule
    if (planes := _planes(operands)) is not None and PLANES.holds():
        return replace(planes, fused_dp=planes.whole_rows and FUSED_DP.holds(_may_fuse_dp(planes, operands)))
    if not STRIPS.holds(operands.bias is None):
        return schedule

    # Where arrays may empty whole tiles, strips whose extent is told at run time.
    has_plane = mask.has("elements") and not mask.hides_keys_alone
    of_tiles = schedule if has_plane else _with_widths(operands) or schedule
    if mask.has(*AXES) and max(T, S) > GPU_TILE:  # tiles may be empty
        return of_tiles

    # Blocks of rows and of keys, and slices of a device's heads, so that a strip has about STRIP_LOGITS
    # logits of a head and no more than SLICE_LOGITS of all; where a band ends strips, shorter ones.
    heads = math.prod(_own(operands))
    is_divided, is_banded = heads == 0, mask.is_banded and not mask.has_positions
    slices, blocks, logits = 1, [], groups * T * S
    if not (is_banded or is_divided):
        slices = slices_of(heads, max(count(T * S, STRIP_LOGITS), count(heads * logits, SLICE_LOGITS)))
    for length, other in ((T, S), (S, T)):
        seen = other  # by a strip
        if mask.window is not None and is_banded:
            seen = min(seen, sum(mask.window) + 2 * LEAST_STRIP)
        block = STRIP_LOGITS * slices // seen // LEAST_TILE * LEAST_TILE
        most = max(length // 8, LEAST_STRIP) if is_banded else length
        blocks.append(_even_block(length, max(min(block, most), LEAST_STRIP)))
        logits = min(logits, groups * blocks[-1] * seen)

    # Each strip of each slice is a product of its own size to compile: not too many of them.
    strips = max(count(T, blocks[0]), count(S, blocks[1]))
    if is_banded and not is_divided:
        slices = slices_of(heads, min(count(heads * logits, SLICE_LOGITS), max(MOST_PIECES // strips, 1)))
    if strips > MOST_STRIPS or strips * slices > MOST_PIECES:
        return of_tiles
    return Strips(blocks[0], blocks[1], 0 if is_divided else slices)


def _with_widths(operands: Operands) -> Strips | None:
    """Picks strips of a few widths; None where the widest has no room."""
    _, T, S, _, groups = operands.sizes
    (entries, heads), longest = _own(operands), max(T, S)
    if heads == 0:  # how batch and heads lie is not told: tiles of one entry and head decide
        turns, block = 0, min(2 * STRIP_LOGITS // longest // LEAST_TILE * LEAST_TILE, GPU_TILE)
        has_room = block >= LEAST_STRIP
    else:  # as few entries in turn as fill the device with one block of rows
        tile = lambda block: heads * groups * min(block, T) * min(block, S)  # logits, of a batch entry
        least = TURN_LOGITS // tile(GPU_TILE)
        turns = _turns(entries, least) if _tells_entries_apart(operands.mask) else 1
        small, own = GPU_TILE // 2, entries // turns
        block = small if own * tile(small) >= TURN_LOGITS else GPU_TILE
        has_room = own * tile(block) * count(longest, block) <= MOST_STRIPS * SLICE_LOGITS
    return Strips(_even_block(T, block), _even_block(S, block), turns, True) if has_room else None


def _planes(operands: Operands) -> Materialized | Planes | None:
    """Picks whole planes, of all heads or of as many as have room; None where tiles or strips skip some."""
    # What bands leave of a plane is less than all but where they are wide or it is short, or beside a bias.
    mask, (batch, T, S, K, G), bias = operands.mask, operands.sizes, operands.bias
    skips = mask.window is not None or (mask.is_causal and bias is None)
    if skips and max(T, S) > LEAST_STRIP:
        return None
    # Arrays leave less than all, too, but where they are padding.
    of_tokens = mask.has("query_segment_ids", "query_positions", "key_value_positions")
    if max(T, S) > GPU_TILE and (of_tokens or (mask.has("elements") and not mask.hides_keys_alone)):
        return None

    # All at once, by what the plain formula holds: logits in float32, and those and probabilities in the
    # dtype of the operands. Only the batch and heads of a device may be cut.
    entries, heads = _own(operands)
    is_divided, wide = heads == 0, not _is_narrow(operands)
    logits = (math.prod(batch) * K if is_divided else entries * heads) * G * T * S
    if logits * (12 if wide else 10) <= PLANE_BYTES:
        return Materialized(whole_rows=WHOLE_ROWS.holds(), formed_again=True)
    if is_divided:
        return None

    # A quarter of that, operands and results in other layouts included. What entries share is cut by heads.
    least = max(5 if wide else 4, count(logits * (12 if wide else 8), PLANE_BYTES))
    axis = explicit_spec(operands.key)[0] if batch else None
    first = (batch[0] if axis is None else batch[0] // axis_size(operands.key, axis)) if batch else 1
    pairs = [(b, k) for b in _divisors(first) for k in _divisors(heads) if b * k >= least]
    is_shared = bias is not None and math.prod(bias.shape[:-3]) == 1
    fewest = lambda n: (math.prod(n), min(n), n[0] if is_shared else n[1])
    return Planes(*min(pairs, key=fewest), WHOLE_ROWS.holds()) if pairs else None


def _may_fuse_dp(planes: Materialized | Planes, operands: Operands) -> bool:
    """Tells whether one device has batch and heads, as it has of slices, and the rest of dp may be rounded.

    float16 lacks the range of dp. Where a sink takes part of a row, p sums to less than 1.
    """
    has_range = jnp.finfo(operands.query.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    is_whole = operands.sink is None or not _is_narrow(operands)
    is_cut = auto_devices(operands.query) > 1 or any(explicit_spec(operands.query))
    return has_range and is_whole and (isinstance(planes, Planes) or not is_cut)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _tells_entries_apart(mask: Any) -> bool:
    """Tells whether an array of the mask has axes of the batch."""
    arrays = ((getattr(mask, name), len(axes)) for name, axes in AXES.items())
    return any(math.prod(x.shape[: x.ndim - n]) > 1 for x, n in arrays if x is not None)


def _turns(entries: int, least: int) -> int:
    """Counts the turns that batch entries are cut into, so that each has `least` of them."""
    return max(n for n in range(1, entries + 1) if entries % n == 0 and (entries // n >= least or n == 1))


def slices_of(heads: int, wanted: int) -> int:
    """Counts the slices of equal size that `heads` are cut into: as many as `wanted`, or the next fewer."""
    return max(n for n in range(1, max(min(wanted, heads, MOST_STRIPS), 1) + 1) if heads % n == 0)


def tile_sizes(mask_mod: Any, block_q: int, block_k: int) -> tuple[int, int]:
    """Returns these sizes of a tile, or those of the blocks that `mask_mod` is made of, each seen or not."""
    tile = getattr(mask_mod, "tile", None)
    if tile is None:
        return block_q, block_k
    least_q, least_k = (-(-LEAST_TILE // size) * size for size in tile)  # whole blocks, where these are small
    return min(least_q, block_q), min(least_k, block_k)


def _visits_less(operands: Operands, sizes: Sizes, block_q: int, block_k: int, than: int) -> bool:
    """Tells whether a `mask_mod`, as far as trace time knows it, leaves far fewer elements in these tiles."""
    mask, T, S = operands.mask, sizes.T, sizes.S
    if mask.mask_mod is None or block_k >= than or not isinstance(T, int) or not isinstance(S, int):
        return False
    rank, groups = operands.query.ndim - 3, sizes.G
    places = jax.eval_shape(lambda mask: mod_functions.places(mask, rank, groups), mask)  # no equation for it
    known = partial(mod_functions.known_tiles, mask.mask_mod, places, (T, S), by_index=not mask.has_positions)
    narrow, wide = (size * known(blocks=(block_q, size)).some.sum() for size in (block_k, than))
    return bool(narrow < 0.75 * wide)


def product_dtype(operands: Operands) -> Any:
    """Returns the dtype of factors: on a CPU narrow ones are widened, unless it has products of them.

    One row has products of a vector, which are wide.
    """
    dtype, heads = operands.query.dtype, (operands.query.shape[-1], operands.value.shape[-1])
    if not _is_narrow(operands) or targets.platform() != "cpu":
        return dtype
    is_long = not has_one_row(operands.sizes) and all(isinstance(n, int) and n >= NARROW_HEAD for n in heads)
    is_narrow = NARROW_PRODUCTS.holds(is_long and targets.multiplies(dtype))
    return dtype if is_narrow else accumulator_dtype(dtype)


def has_one_row(sizes: Sizes) -> bool:
    """Tells whether a key head has one query, so that its products are of a vector."""
    return bool(sizes.T * sizes.G == 1)


def _keys_in_reach(operands: Operands) -> int | None:
    """Counts the keys up to the last that a band over indices lets some query see; None = all."""
    mask, (_, T, S, _, _) = operands.mask, operands.sizes
    is_moved = mask.has_positions or mask.has("query_origin") or operands.dropout_offset is not None
    if not mask.is_banded or is_moved:
        return None
    behind = 0 if mask.is_causal else mask.window[1] if mask.window is not None else S
    return T + behind if T + behind < S else None


def _may_be_sharded(query: jax.Array) -> bool:
    """Tells whether the batch axes may be: on a mesh of type Auto, a trace does not tell."""
    return not targets.is_one_cpu() or any(explicit_spec(query)[:-3])


def _own(operands: Operands) -> tuple[int, int]:
    """Counts the batch entries and key heads of one device; (0, 0) where types do not tell, or cut H."""
    query, key = operands.query, operands.key
    *axes, _, axis_of_heads, _ = explicit_spec(key)
    if auto_devices(query) > 1 or explicit_spec(query)[-1] is not None:
        return 0, 0
    share = lambda n, axis: n if axis is None else n // axis_size(key, axis)
    entries = (share(n, axis) for n, axis in zip(key.shape[:-3], axes, strict=True))
    return math.prod(entries), share(key.shape[-2], axis_of_heads)


def _batch_slices(batch: Sequence[Any], logits: Any) -> int:
    """Counts the slices of the first batch axis, so that a slice's tile has about TILE_LOGITS logits.

    Args:
      batch: the batch axes.
      logits: how many one tile of one batch entry has.
    """
    if not batch or not all(isinstance(n, int) for n in (*batch, logits)) or 0 in (*batch, logits):
        return 1
    whole = math.prod(batch) * logits
    small = [n for n in range(1, math.isqrt(batch[0]) + 1) if batch[0] % n == 0]
    divisors = small + [batch[0] // n for n in reversed(small)]
    return min(divisors, key=lambda n: abs(math.log2(whole / (n * TILE_LOGITS))))


def _worth_slices(slices: int, logits: int) -> int:
    """Returns `slices`, or 1 where all have few `logits`: there, a loop over slices takes what it saves."""
    return slices if BATCH_SLICES.holds(slices > 1 and logits > 2 * TILE_LOGITS) else 1


def _even_block(length: Any, limit: int) -> int:
    """Returns a multiple of 8 up to `limit` whose blocks cover `length` with no padding, or else little."""
    if not isinstance(length, int):  # symbolic
        return limit
    if length <= 1:
        return 1
    for block in range(limit, limit // 2, -8):
        if length % block == 0:
            return block
    blocks = -(-length // limit)
    return -(-length // (8 * blocks)) * 8


def count(length: Any, block: int) -> Any:
    """Counts the blocks that cover `length` (an int or a symbolic dimension)."""
    return -(-length // block)


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      implementation: the name of the one that runs.
      schedule: of the portable path, which also gives the derivatives of kernels' results.
      pieces: into which the portable path cuts the queries for devices; None = it does not.
      vector_last: whether products of one row read keys and values in one order, in a whole plane.
      keeps_wide: whether a narrow `out` is kept wide, too, whatever is differentiated.
      rounding_matters: whether some gradients would miss the rounding of `out` and of p.
      keeps_rounding: whether a kernel's forward keeps both.
    """

    options: Options
    implementation: str
    schedule: Schedule
    pieces: Pieces | None = None
    vector_last: bool = False
    keeps_wide: bool = False
    rounding_matters: bool = False
    keeps_rounding: bool = False

    @property
    def has_wide_out(self) -> bool:
        """Tells whether the portable path returns `out` twice: rounded, and as it is summed over."""
        return self.keeps_wide or self.rounding_matters

    @property
    def batch_slices(self) -> int:
        """The slices of the batch that are taken one after the other."""
        return 1 if isinstance(self.schedule, Planes | Strips) else self.schedule.batch_slices

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        found, slices = [self.schedule.way], self.batch_slices
        if slices > 1:
            found.append(f"{slices} slices of the batch")
        if self.pieces is not None:
            found.append(f"{self.pieces.count} parts of the queries")
        return ", ".join(found)

    def tiles(self, operands: Operands) -> Tiles:
        """Returns the tiles by which a call, or a part of it, is walked whatever the schedule."""
        schedule, dtype = self.schedule, str(product_dtype(operands))
        if isinstance(schedule, Tiles):
            return schedule
        if isinstance(schedule, Strips):
            return Tiles(*schedule.blocks, dtype)
        if isinstance(schedule, Planes):
            T, S = operands.sizes.T, operands.sizes.S
            return Tiles(_even_block(T, GPU_TILE), _even_block(S, GPU_TILE), dtype)
        return Tiles(operands.sizes.T, operands.sizes.S, dtype, parts=_in_step(self.pieces))


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Plans a call whose implementation is chosen; arrays may be their shapes."""
    query, sizes = operands.query, operands.sizes
    schedule, pieces = default_schedule(operands, sizes), None
    is_small = isinstance(schedule, Materialized)
    if explicit_spec(query)[-3] is not None or (auto_devices(query) > 1 and not is_small):
        pieces = split.pieces_for_rows(query, query.ndim - 3, math.prod(sizes.batch))
    if pieces is None:
        chosen = on_gpu(schedule, options, operands)
    else:
        of_part = default_schedule(operands, _of_part(operands, pieces), _in_step(pieces))
        chosen, pieces = _folded(operands, of_part, pieces)
    # An error of delta is one of the whole row of (8): where values have a mean, what rounding takes from
    # `out` is alike for all keys, and dq and dk feel it. On a CPU it is kept, and there are no strips; what
    # it costs elsewhere is not measured.
    is_kept = implementation == "xla" and _is_narrow(operands) and targets.platform() == "cpu"
    keeps_wide = KEPT_ROUNDING.holds(is_kept)
    # So is what rounding takes from p, where it is a factor in a narrow dtype.
    is_rounded = keeps_wide and product_dtype(operands) == operands.query.dtype
    rounding = is_rounded or rounding_matters(options, operands)
    one_row = isinstance(chosen, Materialized) and has_one_row(sizes) and targets.platform() == "cpu"
    return Plan(options, implementation, chosen, pieces, VECTOR_LAST.holds(one_row), keeps_wide, rounding)


def _in_step(pieces: Pieces | None) -> int:
    """Counts the parts that walk in step; on Explicit axes a device has one of its own."""
    return 1 if pieces is None or pieces.mesh_axes else pieces.count


def _is_narrow(operands: Operands) -> bool:
    dtype = operands.query.dtype
    return accumulator_dtype(dtype) != dtype


def rounding_matters(options: Options, operands: Operands) -> bool:
    """Tells whether there are gradients that must not miss the rounding of `out` and of p.

    Those of bias and of what a score reads sum (8) over the row, and with an error of delta would be wrong by
    several times what the plain formula is. So they would be by what rounding takes from p, where it is a
    factor in a narrow dtype: the backward's p are not rounded alike.
    """
    return _is_narrow(operands) and (operands.bias is not None or options.score_mod is not None)


def _folded(
    operands: Operands, schedule: Materialized | Tiles, pieces: Pieces
) -> tuple[Materialized | Tiles, Pieces]:
    """Makes parts of an early and a late stretch of the queries, where causality alone tells what they see.

    All have the same work then. They exchange half of all rows, which is less than the keys that they gather,
    unless a plane has rows, too.
    """
    mask, rows = operands.mask, operands.query.shape[-3] // pieces.count
    others = mask.window is not None or mask.mask_mod is not None or mask.has_positions
    if others or not mask.is_causal or {"bias", "elements"} & operands.arrays_with("t").keys():
        return schedule, pieces
    if isinstance(schedule, Materialized) or not isinstance(rows, int) or rows == 0:
        return schedule, pieces

    # No tile may lie across the border of two stretches: half the block where that divides them.
    least = min(schedule.block_q, LEAST_TILE if targets.platform() == "cpu" else GPU_TILE // 2)
    blocks = (block for block in (schedule.block_q, schedule.block_q // 2) if block >= least)
    block_q = next((block for block in blocks if rows % (2 * block) == 0), None)
    if block_q is None or not FOLDED_PARTS.holds():
        return schedule, pieces
    return replace(schedule, block_q=block_q), replace(pieces, folded=True)


def _of_part(operands: Operands, pieces: Pieces) -> Sizes:
    """Returns the sizes of a part of the queries: on Explicit axes those of a device's shard."""
    sizes = operands.sizes
    sizes = sizes._replace(T=sizes.T // pieces.count)
    if not pieces.mesh_axes:
        return sizes
    *batch_axes, _, heads, _ = explicit_spec(operands.query)
    share = lambda n, axis: n if axis is None else n // axis_size(operands.query, axis)
    return sizes._replace(batch=tuple(map(share, sizes.batch, batch_axes)), K=share(sizes.K, heads))
