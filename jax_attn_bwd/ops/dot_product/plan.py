"""`Plan`: how a call is computed, decided once in the public function and used by both rules."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jax_attn_bwd._core import split, targets
from jax_attn_bwd._core.sharding import auto_devices, axis_size, explicit_spec
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import GPU_TILE, LEAST_TILE, Sizes, Tiling


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      implementation: the name of the one that runs.
      tiling: the tiles of the portable path, which also gives the derivatives of kernels' results.
      pieces: into which the portable path cuts the queries for devices; None = it does not.
      keeps_low: whether a kernel's forward keeps what rounding takes from `out`, and from p.
    """

    options: Options
    implementation: str
    tiling: Tiling
    pieces: Pieces | None = None
    keeps_low: bool = False


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """The plan of a call whose implementation is chosen; arrays may be their shapes."""
    query = operands.query
    batch, T, S, K, G = operands.sizes
    tiling = Tiling.default_for(operands, Sizes(batch, T, S, K * G, G))
    if explicit_spec(query)[-3] is None and (auto_devices(query) == 1 or tiling.is_materialized):
        return Plan(options, implementation, tiling.on_gpu(options, operands))
    pieces = split.of_rows(query, query.ndim - 3, math.prod(batch))
    if pieces is None:
        return Plan(options, implementation, tiling.on_gpu(options, operands))
    tiling = Tiling.default_for(operands, _of_part(operands, pieces))
    return Plan(options, implementation, *_folded(operands, tiling, pieces))


def _folded(operands: Operands, tiling: Tiling, pieces: Pieces) -> tuple[Tiling, Pieces]:
    """Parts of an early and a late stretch of the queries each, where causality alone tells what they see.

    All have the same work then. They exchange half of all rows, which is less than the keys that they gather,
    unless a plane has rows, too.
    """
    mask, rows = operands.mask, operands.query.shape[-3] // pieces.count
    others = mask.window is not None or mask.mask_mod is not None or mask.has_positions
    if others or not mask.is_causal or {"bias", "elements"} & operands.along("t").keys():
        return tiling, pieces
    if tiling.is_materialized or not isinstance(rows, int) or rows == 0:
        return tiling, pieces
    least = min(tiling.block_q, LEAST_TILE if targets.platform() == "cpu" else GPU_TILE // 2)
    blocks = (block for block in (tiling.block_q, tiling.block_q // 2) if block >= least)
    block_q = next((block for block in blocks if rows % (2 * block) == 0), None)
    if block_q is None:
        return tiling, pieces
    return replace(tiling, block_q=block_q), replace(pieces, folded=True)


def _of_part(operands: Operands, pieces: Pieces) -> Sizes:
    """The sizes of a part of the queries: on Explicit axes those of a device's shard."""
    batch, T, S, K, G = operands.sizes
    if not pieces.mesh_axes:
        return Sizes(batch, T // pieces.count, S, K * G, G, pieces.count)
    *batch_axes, _, heads, _ = explicit_spec(operands.query)
    share = lambda n, axis: n if axis is None else n // axis_size(operands.query, axis)
    shares: tuple[Any, ...] = tuple(map(share, batch, batch_axes))
    return Sizes(shares, T // pieces.count, S, share(K * G, heads), G)
