"""What the warpgroups of a block share in the Hopper backward by tiles of keys, and the one that loads it.

Names and equation numbers are those of `hopper_key_gradients.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import hopper
from jax_attn_bwd.ops.dot_product.kernels import hopper_bounds
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


class Shared(NamedTuple):
    """Shared memory and barriers of a block; wgs = computing warpgroups, stages = places of a ring."""

    k_tile: Any  # [wgs, block_k, H], in the end dk
    v_tile: Any  # [wgs, block_k, Hv], in the end dv
    q_tiles: Any  # [stages, block_q, H]
    dout_tiles: Any  # [stages, block_q, Hv]
    row_tiles: Any  # float32 [stages, 2|3, block_q], of `Saved.rows`
    token_tiles: dict[str, Any]  # int32 [stages, block_q], by the field of `Inputs` that has a value a query
    sums: Any  # float32 [wgs, sums, block_k], over queries
    loaded: Any  # barriers: k and v of a warpgroup
    q_loaded: Any  # q with row values and tokens of a stage
    dout_loaded: Any
    q_free: Any
    dout_free: Any
    exchange: dict[str, Any] | None = None  # of the fused kernel, see `hopper_key_gradients.py`
    spare: Any = None  # of the interpreter, see `hopper.product`: for p and dx of each warpgroup


def scratch(tiling: Tiling, saved: Saved, sums: int, fused: bool, interpret: bool) -> dict[str, Any]:
    """The types of `Shared`."""
    H, Hv, dtype = saved.refs.k.shape[-1], saved.refs.v.shape[-1], saved.refs.q.dtype
    bq, bk, stages, wgs = tiling.block_q, tiling.block_k, tiling.stages, tiles.COMPUTE_WARPGROUPS
    tokens = [name for name in ("row_position", "row_segment") if getattr(saved.refs, name) is not None]
    ring = partial(plgpu.Barrier, num_barriers=stages)
    swizzle = min(tiling.swizzle, H) if fused else tiling.swizzle  # of bytes: half of the columns
    tile = partial(hopper.tile, swizzle=swizzle)
    shared: dict[str, Any] = dict(
        k_tile=tile((wgs, bk, H), dtype),
        v_tile=tile((wgs, bk, Hv), dtype),
        q_tiles=tile((stages, bq, H), dtype),
        dout_tiles=tile((stages, bq, Hv), dtype),
        row_tiles=plgpu.SMEM((stages, saved.rows.shape[2], bq), jnp.float32),
        token_tiles={name: plgpu.SMEM((stages, bq), jnp.int32) for name in tokens},
        sums=plgpu.SMEM((wgs, sums, bk), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
        q_loaded=ring(num_arrivals=2 + len(tokens)),
        dout_loaded=ring(),
        q_free=ring(num_arrivals=wgs),
        dout_free=ring(num_arrivals=wgs),
    )
    if fused:
        shared["exchange"] = dict(
            dx_tiles=tile((2, wgs, bk, bq), dtype),
            dq_tile=hopper.tile((wgs, bq, H // wgs), jnp.float32),
            written=plgpu.Barrier(num_arrivals=wgs),
        )
    if interpret:
        shared["spare"] = tile((2, wgs, bk, bq), dtype)
    return shared


class Block(NamedTuple):
    """What the warpgroups of a block know: the call, and where the block is."""

    options: KernelOptions
    tiling: Tiling
    names: list[str]  # what is summed, in the order of the results
    saved: Saved
    shared: Shared
    b: Any
    head: Any  # a key head; of a bias a query head
    key_head: Any
    j: Any  # tile of keys
    groups: int  # query heads that are summed

    @property
    def refs(self) -> tiles.Inputs:
        return self.saved.refs

    def bounds(self) -> Any:
        """The tiles of queries that see the block.

        Each warpgroup asks for itself: what is known before they part costs registers.
        """
        return hopper_bounds.load(self.refs, self.b, self.j, self.refs.q.shape[1] // self.tiling.block_q)

    def steps(self, bounds: Any) -> Any:
        """How many (query head, tile of queries) the block visits."""
        return bounds.count * self.groups

    def at(self, step: Any) -> tuple[Any, Any]:
        """(query head, step of the bounds) of a step."""
        if self.groups == 1:
            return self.head, step
        g = jnp.int32(self.groups)
        return self.head * g + lax.rem(step, g), lax.div(step, g)


def load(block: Block) -> None:
    """The loading warpgroup: q, its row values and tokens, and dout of each step."""
    plgpu.set_max_registers(hopper.LOAD_REGISTERS, action="decrease")
    bounds, refs, shared, bq = block.bounds(), block.refs, block.shared, block.tiling.block_q

    def place(step: Any) -> tuple[Any, Any]:
        n, t = block.at(step)
        return n, pl.ds(bounds.tile(t) * bq, bq)

    def q_and_row_values(step):
        n, span = place(step)
        tokens = [getattr(refs, name) for name in shared.token_tiles]
        return [
            refs.q.at[block.b, span, n],
            block.saved.rows.at[block.b, n, :, span],
            *(x.at[tiles.at(x, 0, block.b), span] for x in tokens),
        ]

    def dout(step):
        n, span = place(step)
        return [block.saved.dout.at[block.b, span, n]]

    q_targets = [shared.q_tiles, shared.row_tiles, *shared.token_tiles.values()]
    rings = [
        (q_and_row_values, q_targets, shared.q_loaded, shared.q_free),
        (dout, [shared.dout_tiles], shared.dout_loaded, shared.dout_free),
    ]
    hopper.stream(block.steps(bounds), block.tiling.stages, rings)
