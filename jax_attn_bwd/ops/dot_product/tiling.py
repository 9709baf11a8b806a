"""How the work of a call is cut: which tiles, of how many batch entries at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_attn_bwd._core import backend
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import explicit_spec
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

TILE_LOGITS = 1 << 20  # 4 MiB: 1.1 to 1.5 times as fast on two cores as the whole batch at once


@dataclass(frozen=True)
class Tiling:
    """How the plane is cut and its products taken: changes speed and rounding, never the meaning."""

    block_q: int
    block_k: int
    product_dtype: str  # of the factors of matrix products
    parts: int = 1  # of the first batch axis, one after the other

    @classmethod
    def default_for(cls, options: Options, operands: Operands) -> "Tiling":
        """Measured tiles for the target platform; see bench/results."""
        (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
        dtype, on_cpu = operands.query.dtype, backend.target_platform() == "cpu"
        block_q, block_k = (256, 512) if on_cpu else (1024, 1024)  # not measured but on a CPU
        parts = 1
        if on_cpu:
            heads = math.prod(batch) * N
            if not _may_be_sharded(operands.query):
                plane = _even_block(T, block_q) * _even_block(S, block_k)
                parts = _parts(batch, N * plane)
            if isinstance(heads, int) and heads >= 64 * parts:
                block_q, block_k = 128, 128
        if options.window is not None:
            left, right = options.window
            if left + (0 if options.is_causal else right) < block_k:
                block_k = block_q  # a narrow band crosses fewer elements of narrow tiles
        # XLA:CPU computes bfloat16 products in float32 anyway, and refuses some of them.
        product_dtype = accumulator_dtype(dtype) if on_cpu else dtype
        blocks = _even_block(T, block_q), _even_block(S, block_k)
        return cls(*blocks, str(product_dtype), parts)


def _may_be_sharded(query: jax.Array) -> bool:
    """Whether the batch axes may be: on a mesh of type Auto, a trace does not tell."""
    try:
        devices = jax.device_count("cpu")
    except RuntimeError:  # an abstract mesh names devices that are not here
        return True
    return devices > 1 or any(explicit_spec(query)[:-3])


def _parts(batch: Sequence[Any], logits: Any) -> int:
    """Into how many parts the first batch axis is cut, so that a part's tile has about TILE_LOGITS logits.

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
