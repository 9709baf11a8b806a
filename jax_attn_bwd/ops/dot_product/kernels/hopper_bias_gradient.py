"""Hopper backward of dense attention: the gradient of a full bias, summed over what the bias broadcasts.

Products per tile (equation numbers of `backward.py`):

    s = q k^T,   dp = dout v^T

Two warpgroups hold block_q rows of a tile of the bias each, a third one loads what each (batch, head) pair
that reads it has there (TMA).
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import hopper, mosaic_gpu, pallas
from jax_attn_bwd._core.hopper import WGMMA
from jax_attn_bwd.ops.dot_product.kernels import hopper_bounds
from jax_attn_bwd.ops.dot_product.kernels import hopper_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.kernels.hopper_query_gradients import default_tiling
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


def gradient(options: KernelOptions, interpret: bool, saved: Saved) -> jax.Array:
    """Dlogits summed over the batch entries and heads that the bias broadcasts over, float32.

    `[B|1, N|1, T, S]`, as the bias. A block owns one tile and visits its (batch, head) pairs in turn.
    """
    tiling = default_tiling(options, saved)
    if saved.head > 128:
        tiling = dataclasses.replace(tiling, stages=1)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, wgs * bq, bk, each=True)
    (_, T, _, H), (_, S, _, Hv) = saved.refs.q.shape, saved.refs.v.shape
    B, N, _, _ = saved.refs.bias.shape
    dtype, ring = saved.refs.q.dtype, partial(plgpu.Barrier, num_barriers=stages)
    tile = partial(hopper.tile, swizzle=tiling.swizzle)
    scratch = dict(
        q_tiles=tile((stages, wgs * bq, H), dtype),
        dout_tiles=tile((stages, wgs * bq, Hv), dtype),
        k_tiles=tile((stages, bk, H), dtype),
        v_tiles=tile((stages, bk, Hv), dtype),
        total_tile=hopper.tile((wgs, bq, bk), jnp.float32),
        loaded=ring(num_arrivals=4),
        free=ring(num_arrivals=wgs),
    )
    return mosaic_gpu.launch(
        partial(_kernel, options, tiling),
        "attention_dbias",
        interpret=interpret,
        out_type=pallas.out_type((B, N, T, S), jnp.float32, saved),
        scratch=scratch,
        grid={"k_tile": S // bk, "q_tile": T // (wgs * bq), "entry": B * N},
        warpgroups=wgs + 1,
    )(saved)


def _kernel(
    options: KernelOptions,
    tiling: Tiling,
    saved: Saved,
    result,
    q_tiles,
    dout_tiles,
    k_tiles,
    v_tiles,
    total_tile,
    loaded,
    free,
):
    j, i, entry, wg = (lax.axis_index(name) for name in ("k_tile", "q_tile", "entry", "wg"))
    refs, wgs = saved.refs, tiles.COMPUTE_WARPGROUPS
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    (B, _, N, _), (own_B, own_N, _, _) = refs.q.shape, refs.bias.shape
    own = lax.div(entry, jnp.int32(own_N)), lax.rem(entry, jnp.int32(own_N))
    repeats = B // own_B, N // own_N

    def pair(step):
        """(batch entry, query head) of a step."""
        turn = lax.div(step, jnp.int32(repeats[1])), lax.rem(step, jnp.int32(repeats[1]))
        return [t if r > 1 else o for o, t, r in zip(own, turn, repeats, strict=True)]

    count = jnp.int32(repeats[0] * repeats[1])
    if refs.bounds is not None and hopper_bounds.are_of_all(refs):
        bounds = hopper_bounds.load(refs, jnp.int32(0), i, refs.k.shape[1] // bk)
        count = jnp.where(bounds.visits(j), count, 0)

    @pl.when(wg == wgs)
    def _load():
        plgpu.set_max_registers(hopper.LOAD_REGISTERS, action="decrease")

        def sources(step):
            b, n = pair(step)
            kv = lax.div(n, jnp.int32(N // refs.k.shape[2]))
            rows, columns = pl.ds(i * (wgs * bq), wgs * bq), pl.ds(j * bk, bk)
            return [
                refs.q.at[b, rows, n],
                saved.dout.at[b, rows, n],
                refs.k.at[b, columns, kv],
                refs.v.at[b, columns, kv],
            ]

        hopper.stream(count, stages, [(sources, [q_tiles, dout_tiles, k_tiles, v_tiles], loaded, free)])

    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(hopper.COMPUTE_REGISTERS, action="increase")
        row = (i * wgs + wg) * bq

        def step(t, total):
            slot = lax.rem(t, jnp.int32(stages))
            b, n = pair(t)
            tile = Tile(b, n, row, j * bk, (bq, bk))
            rows = saved.row_loaders(tile)
            plgpu.barrier_wait(loaded.at[slot])
            mine = pl.ds(wg * bq, bq)

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, q_tiles.at[slot, mine], k_tiles.at[slot].T)
                plgpu.wgmma(dp_acc, dout_tiles.at[slot, mine], v_tiles.at[slot].T)
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=0), dp_acc[...]

            acc = plgpu.ACC((bq, bk), jnp.float32)
            s, dp = pl.run_scoped(products, acc, acc)
            plgpu.barrier_arrive(free.at[slot])
            mixed = hopper_bounds.load(refs, b, i, refs.k.shape[1] // bk).compares(j)
            found = gradients.weights(options, refs, s, tile, mixed, rows, of_bias=True)
            p = gradients.signed(options, refs, found.with_slope(), tile)
            dlogits = gradients.dlogits(options, p, dp, tile, rows)
            return total + gradients.through_score(options, refs, found, tile, dlogits)[0]

        total = lax.fori_loop(jnp.int32(0), count, step, gradients.zeros((bq, bk), WGMMA))
        total_tile[wg] = total
        plgpu.commit_smem()
        place = (*own, pl.ds(row, bq), pl.ds(j * bk, bk))
        plgpu.copy_smem_to_gmem(total_tile.at[wg], result.at[place])
        plgpu.wait_smem_to_gmem(0)
