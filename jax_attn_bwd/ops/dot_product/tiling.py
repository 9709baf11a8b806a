"""How the work of a call is cut: which tiles, of how many batch entries at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import explicit_spec
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

TILE_LOGITS = 1 << 20  # 4 MiB: 1.1 to 1.5 times as fast on two cores as the whole batch at once
MATERIALIZED_LOGITS = 1 << 21  # 8 MiB of one batch slice: up to there as fast as tiles, and compiled faster
MATERIALIZED_PLANE = 1 << 20  # logits of one head: from there on tiles are faster, causal or not
LEAST_TILE = 64  # rows and columns: smaller tiles take longer to walk over than to compute


@dataclass(frozen=True)
class Tiling:
    """How the plane is cut and its products taken: changes speed and rounding, never the meaning."""

    block_q: int
    block_k: int
    product_dtype: str  # of the factors of matrix products
    batch_slices: int = 1  # of the first batch axis, one after the other
    is_materialized: bool = False  # the plane is one tile: no walk, see `materialized.py`
    parts: int = 1  # of the queries, this being one of them: they walk in step, see `_core.parts`

    @classmethod
    def default_for(cls, options: Options, operands: Operands, parts: int = 1) -> "Tiling":
        """Measured tiles for the target platform; see bench/results. The operands are of one of `parts`."""
        (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
        dtype, on_cpu = operands.query.dtype, targets.platform() == "cpu"
        block_q, block_k = (256, 512) if on_cpu else (1024, 1024)  # not measured but on a CPU
        slices = 1
        if on_cpu:
            heads = math.prod(batch) * N
            if not _may_be_sharded(operands.query):
                plane = _even_block(T, block_q) * _even_block(S, block_k)
                slices = _batch_slices(batch, N * plane)
            if isinstance(heads, int) and heads >= 64 * slices:
                block_q, block_k = 128, 128
        if options.window is not None:
            left, right = options.window
            if left + (0 if options.is_causal else right) < block_k:
                block_k = block_q  # a narrow band crosses fewer elements of narrow tiles
        elif on_cpu and _visits_less(options, operands, block_q, block_q, than=block_k):
            block_k = block_q
        sizes = (parts, *batch, N, T, S)
        known = all(isinstance(n, int) for n in sizes)
        if known and T * S < MATERIALIZED_PLANE and 0 < math.prod(sizes) <= MATERIALIZED_LOGITS * slices:
            return cls(T, S, str(product_dtype(dtype)), slices, is_materialized=True, parts=parts)
        blocks = _even_block(T, block_q), _even_block(S, block_k)
        if on_cpu:
            blocks = of_blocks(options.mask_mod, *blocks)
        return cls(*blocks, str(product_dtype(dtype)), slices, parts=parts)


def of_blocks(mask_mod: Any, block_q: int, block_k: int) -> tuple[int, int]:
    """Tiles of these sizes, or of the blocks that a `mask_mod` is made of, so that each is seen or not."""
    tile = getattr(mask_mod, "tile", None)
    if tile is None:
        return block_q, block_k
    least = [-(-LEAST_TILE // size) * size for size in tile]  # of whole blocks, where these are small
    return tuple(min(n, limit) for n, limit in zip(least, (block_q, block_k), strict=True))


def _visits_less(options: Options, operands: Operands, block_q: int, block_k: int, than: int) -> bool:
    """Whether a `mask_mod`, as far as it is known at trace time, leaves far fewer elements in these tiles."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    if options.mask_mod is None or block_k >= than or not isinstance(T, int) or not isinstance(S, int):
        return False
    groups = operands.query.shape[-2] // operands.key.shape[-2]
    places = mod_functions.places(operands, operands.query.ndim - 3, groups)
    assert places is not None  # prepared with the function
    by_index = operands.query_positions is None and operands.key_value_positions is None
    narrow, wide = (
        size
        * mod_functions.known_tiles(options.mask_mod, places, (T, S), (block_q, size), by_index).some.sum()
        for size in (block_k, than)
    )
    return bool(narrow < 0.75 * wide)


def product_dtype(dtype: Any) -> Any:
    """Of the factors of products. XLA:CPU computes those of bfloat16 in float32 anyway, and refuses some."""
    return accumulator_dtype(dtype) if targets.platform() == "cpu" else dtype


def _may_be_sharded(query: jax.Array) -> bool:
    """Whether the batch axes may be: on a mesh of type Auto, a trace does not tell."""
    try:
        devices = jax.device_count("cpu")
    except RuntimeError:  # an abstract mesh names devices that are not here
        return True
    return devices > 1 or any(explicit_spec(query)[:-3])


def _batch_slices(batch: Sequence[Any], logits: Any) -> int:
    """Into how many slices the first batch axis is cut, so that a slice's tile has about TILE_LOGITS logits.

    Args:
      batch: the batch axes.
      logits: of one tile of one batch entry.
    """
    if not batch or not all(isinstance(n, int) for n in (*batch, logits)) or 0 in (*batch, logits):
        return 1
    whole = math.prod(batch) * logits
    small = [n for n in range(1, math.isqrt(batch[0]) + 1) if batch[0] % n == 0]
    divisors = small + [batch[0] // n for n in reversed(small)]
    return min(divisors, key=lambda n: abs(math.log2(whole / (n * TILE_LOGITS))))


def _even_block(length: Any, limit: int) -> int:
    """A multiple of 8 up to `limit` whose blocks cover `length` with no padding, or else with little."""
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
    """Number of blocks that cover `length` (an int or a symbolic dimension)."""
    return -(-length // block)
