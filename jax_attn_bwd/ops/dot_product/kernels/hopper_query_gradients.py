"""Hopper backward of dense attention by tiles of queries: dq, and gradients of a bias that has query rows.

Products per tile (equation numbers of `backward.py`):

    s = q k^T,   dp = dout v^T,   dq += dx k                                        (11)

Two warpgroups hold block_q rows of q and dout each, a third one loads keys and values (TMA).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import hopper, mosaic_gpu, pallas
from jax_attn_bwd._core.hopper import ROWS, WGMMA
from jax_attn_bwd.ops.dot_product.kernels import hopper_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Bounds, Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import Options


def default_tiling(options: Options, saved: Saved) -> Tiling:
    """Of the dq kernel and that of a full bias: block_q rows a warpgroup, steps of block_k keys."""
    if saved.head > 128:
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    crowded = options.logits_soft_cap is not None and (saved.refs.mask_values or options.score_mod)
    if saved.head > 64 and (options.dropout_rate or crowded):
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    busy = options.dropout_rate or options.logits_soft_cap is not None or saved.refs.bias is not None
    busy = busy or options.score_mod is not None
    wide = saved.head <= 64 and not busy
    return Tiling(block_q=64, block_k=128 if wide else 64, stages=2)


def query_gradients(options: Options, interpret: bool, saved: Saved, bias: bool = False) -> dict[str, Any]:
    """{"query": dq [B, T, N, H]}, or with `bias` {"bias": row sums of dlogits, float32 [B, N, T]}."""
    tiling = default_tiling(options, saved)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, wgs * bq, bk)
    (B, T, N, H), Hv, dtype = saved.refs.q.shape, saved.refs.v.shape[-1], saved.refs.q.dtype
    ring = partial(plgpu.Barrier, num_barriers=stages)
    tile = partial(hopper.tile, swizzle=tiling.swizzle)
    scratch = dict(
        q_tile=tile((wgs, bq, H), dtype),
        dout_tile=tile((wgs, bq, Hv), dtype),
        k_tiles=tile((stages, bk, H), dtype),
        v_tiles=tile((stages, bk, Hv), dtype),
        sums=plgpu.SMEM((wgs, bq), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
        k_loaded=ring(),
        v_loaded=ring(),
        k_free=ring(num_arrivals=wgs),
        v_free=ring(num_arrivals=wgs),
    )
    if interpret:
        scratch["spare"] = tile((wgs, bq, bk), dtype)
    made = (
        pallas.out_type((B, N, T), jnp.float32, saved)
        if bias
        else pallas.out_type((B, T, N, H), dtype, saved)
    )
    result = mosaic_gpu.launch(
        partial(_queries_kernel, options, tiling, bias),
        "attention_dbias_rows" if bias else "attention_dq",
        interpret=interpret,
        out_type=made,
        scratch=scratch,
        grid={"q_tile": T // (wgs * bq), "head": N, "batch": B},
        warpgroups=wgs + 1,
    )(saved)
    return {"bias" if bias else "query": result}


def _queries_kernel(
    options: Options, tiling: Tiling, bias: bool, saved: Saved, result,
    q_tile, dout_tile, k_tiles, v_tiles, sums, loaded, k_loaded, v_loaded, k_free, v_free, spare=None,
):  # fmt: skip
    b, n, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    refs, wgs = saved.refs, tiles.COMPUTE_WARPGROUPS
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    i = lax.axis_index("q_tile")
    if options.is_causal:  # the longest first
        i = jnp.int32(refs.q.shape[1] // (wgs * bq) - 1) - i

    def load_bounds():  # by each warpgroup for itself: what is known before they part costs registers
        return Bounds.load(refs, b, i, refs.k.shape[1] // bk)

    @pl.when(wg == wgs)
    def _load():
        plgpu.set_max_registers(hopper.LOAD_REGISTERS, action="decrease")
        bounds = load_bounds()
        head = lax.div(n, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))

        def block(ref):
            return lambda step: [ref.at[b, pl.ds((bounds.first + step) * bk, bk), head]]

        hopper.stream(
            bounds.end - bounds.first,
            stages,
            [(block(refs.k), [k_tiles], k_loaded, k_free), (block(refs.v), [v_tiles], v_loaded, v_free)],
        )

    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(hopper.COMPUTE_REGISTERS, action="increase")
        bounds = load_bounds()
        count = bounds.end - bounds.first
        row = (i * wgs + wg) * bq
        here = (b, pl.ds(row, bq), n)
        plgpu.copy_gmem_to_smem(refs.q.at[here], q_tile.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(saved.dout.at[here], dout_tile.at[wg], loaded.at[wg])
        place = Tile(b, n, row, jnp.int32(0), (bq, bk))
        rows = [gradients.at_hand(load()) for load in saved.row_loaders(place)]
        plgpu.barrier_wait(loaded.at[wg])

        def step(t, total, dq_acc):
            slot = lax.rem(t, jnp.int32(stages))
            mine = wg + bounds.opaque_zero() if saved.head > 128 else wg
            tile = place._replace(column=(bounds.first + t) * bk)
            plgpu.barrier_wait(k_loaded.at[slot])
            plgpu.barrier_wait(v_loaded.at[slot])

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, q_tile.at[mine], k_tiles.at[slot].T)
                if tiling.overlap:
                    plgpu.wgmma(dp_acc, dout_tile.at[mine], v_tiles.at[slot].T)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=int(tiling.overlap))
                mixed = bounds.mixed(bounds.first + t)
                p, slope = gradients.probabilities(options, refs, s, tile, mixed, rows, of_bias=bias)
                if slope is not None:
                    p = p * slope
                p = gradients.signed(options, refs, p, tile)
                if not tiling.overlap:
                    plgpu.wgmma(dp_acc, dout_tile.at[mine], v_tiles.at[slot].T)
                return p, dp_acc[...]

            acc = plgpu.ACC((bq, bk), jnp.float32)
            p, dp = pl.run_scoped(products, acc, acc)
            plgpu.barrier_arrive(v_free.at[slot])
            dlogits = gradients.dlogits(options, p, dp, tile, rows)
            if bias:
                plgpu.barrier_arrive(k_free.at[slot])
                return total + dlogits.sum(axis=1)
            dx = dlogits.astype(refs.q.dtype)
            hopper.product(dq_acc, dx, k_tiles.at[slot], spare and spare.at[wg])  # (11)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[slot])
            return total

        start = gradients.zeros((bq,), ROWS) if bias else ()
        if bias:
            total = lax.fori_loop(jnp.int32(0), count, lambda t, total: step(t, total, None), start)
            sums[wg] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums.at[wg], result.at[b, n, pl.ds(row, bq)])
        else:

            def accumulate(dq_acc):
                lax.fori_loop(jnp.int32(0), count, lambda t, _: step(t, (), dq_acc), ())
                return dq_acc[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((bq, refs.q.shape[-1]), jnp.float32))
            q_tile[wg] = (dq * options.scale).astype(refs.q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile.at[wg], result.at[here])
        plgpu.wait_smem_to_gmem(0)


def full_bias_gradient(options: Options, interpret: bool, saved: Saved) -> jax.Array:
    """Dlogits summed over the batch entries and heads that the bias broadcasts over, float32.

    `[B|1, N|1, T, S]`, as the bias. A block owns one tile and visits its (batch, head) pairs in turn.
    """
    tiling = default_tiling(options, saved)
    if saved.head > 128:
        tiling = dataclasses.replace(tiling, stages=1)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, wgs * bq, bk)
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
        partial(_full_bias_kernel, options, tiling),
        "attention_dbias",
        interpret=interpret,
        out_type=pallas.out_type((B, N, T, S), jnp.float32, saved),
        scratch=scratch,
        grid={"k_tile": S // bk, "q_tile": T // (wgs * bq), "entry": B * N},
        warpgroups=wgs + 1,
    )(saved)


def _full_bias_kernel(
    options: Options,
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
    if refs.bounds is not None and refs.bounds.shape[0] == 1:  # the same tiles for all
        bounds = Bounds.load(refs, jnp.int32(0), i, refs.k.shape[1] // bk)
        count = jnp.where((j >= bounds.first) & (j < bounds.end), count, 0)

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
            mixed = Bounds.load(refs, b, i, refs.k.shape[1] // bk).mixed(j)
            p, slope = gradients.probabilities(options, refs, s, tile, mixed, rows, of_bias=True)
            p = p if slope is None else p * slope
            p = gradients.signed(options, refs, p, tile)
            return total + gradients.dlogits(options, p, dp, tile, rows)

        total = lax.fori_loop(jnp.int32(0), count, step, gradients.zeros((bq, bk), WGMMA))
        total_tile[wg] = total
        plgpu.commit_smem()
        place = (*own, pl.ds(row, bq), pl.ds(j * bk, bk))
        plgpu.copy_smem_to_gmem(total_tile.at[wg], result.at[place])
        plgpu.wait_smem_to_gmem(0)
