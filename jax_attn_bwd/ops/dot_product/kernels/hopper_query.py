"""Hopper backward of dense attention by tiles of queries: dq, sums over keys, the gradient of a full bias.

Products per tile (equation numbers of `backward.py`):

    s = q k^T,   dp = dout v^T,   dq += dx k                                        (11)

Two warpgroups hold block_q rows of q and dout each, a third one loads keys and values (TMA). Sums over keys
are the gradients of a bias that has no key axis, or of what a score reads by row.

The kernel of a full bias has no product (11). Its blocks own a tile of the bias each, and visit what each
(batch, head) pair that reads it has there.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import ROWS, WGMMA
from jax_attn_bwd.ops.dot_product.kernels import hopper_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


def default_tiling(options: KernelOptions, saved: Saved, of_values: bool = False) -> Tiling:
    """Picks the tiles of the dq kernel, and of a full bias: block_q rows a warpgroup, steps of block_k keys.

    `of_values`: with the sums for what a score reads, whose terms take registers of their own.
    """
    if saved.head > 128:
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    compares = saved.refs.mask is not None and saved.refs.row_segment is not None
    crowded: Any = compares or saved.refs.mask_values or options.score_mod
    crowded = options.logits_soft_cap is not None and crowded
    if saved.head > 64 and (options.dropout_rate or crowded or of_values):
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    busy = options.dropout_rate or options.logits_soft_cap is not None or saved.refs.bias is not None
    busy = busy or options.score_mod is not None or saved.has_blocks
    wide = saved.head <= 64 and not busy
    return Tiling(block_q=64, block_k=128 if wide else 64, stages=2)


def query_gradients(
    options: KernelOptions, interpret: bool, saved: Saved, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Computes those in `wanted` in one pass: dq and sums over keys, float32.

    "query"     dq [B, T, N, H]
    "rows"      [B, N, sums, T], for each of the `value_sides` that are 0 what its elements add up to
    "bias"      [B, N, 1, T], row sums of dlogits; not beside the others
    """
    # tiles, and which tiles of keys each tile of 2 x block_q queries visits
    tiling = default_tiling(options, saved, "rows" in wanted)
    wgs, bq, bk = tiles.COMPUTE_WARPGROUPS, tiling.block_q, tiling.block_k
    saved = saved.with_bounds(options, wgs * bq, bk)
    (B, T, N, H), Hv, dtype = saved.refs.q.shape, saved.refs.v.shape[-1], saved.refs.q.dtype
    sums = gradients.value_sides(saved.refs).count(0) if "rows" in wanted else 1
    # shared memory: rings for k and v, q and dout of each computing warpgroup, what is summed
    tile = partial(mosaic_gpu.tile, swizzle=tiling.swizzle)
    scratch = tiles.key_rings(saved.refs, tiling) | dict(
        q_tile=tile((wgs, bq, H), dtype),
        dout_tile=tile((wgs, bq, Hv), dtype),
        sums=plgpu.SMEM((wgs, sums, bq), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
    )
    if interpret:
        scratch["spare"] = tile((wgs, bq, bk), dtype)
    # a block for each tile of queries, of each head and batch entry; results by name
    types: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(wanted, ((B, N, sums, T), jnp.float32)) | {
        "query": ((B, T, N, H), dtype)
    }
    names = sorted(wanted)
    results = mosaic_gpu.launch(
        partial(_kernel, options, tiling, names),
        "_".join(["attention", *({"query": "dq", "bias": "dbias_rows", "rows": "drows"}[n] for n in names)]),
        interpret=interpret,
        out_type=[pallas.out_type(*types[name], saved) for name in names],
        scratch=scratch,
        grid={"q_tile": T // (wgs * bq), "head": N, "batch": B},
        warpgroups=wgs + 1,
    )(saved)
    return dict(zip(names, results, strict=True))


def _kernel(
    options: KernelOptions, tiling: Tiling, names: list[str], saved: Saved, *results,
    q_tile, dout_tile, k_tiles, v_tiles, sums, loaded, k_loaded, v_loaded, k_free, v_free, spare=None,
):  # fmt: skip
    """Runs one block: dq, or sums over keys, of 2 x block_q queries of one head."""
    # where the block is: batch entry, query head, and a tile of 2 x block_q queries
    b, n, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    refs, wgs = saved.refs, tiles.COMPUTE_WARPGROUPS
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    i = lax.axis_index("q_tile")
    if options.is_causal:  # the longest first
        i = jnp.int32(refs.q.shape[1] // (wgs * bq) - 1) - i

    def load_bounds():  # by each warpgroup for itself: what is known before they part costs registers
        return tiles.load_bounds(refs, b, i, refs.k.shape[1] // bk)

    # the last warpgroup loads k and v of each visited tile, as slots of the rings come free
    @pl.when(wg == wgs)
    def _load():
        plgpu.set_max_registers(mosaic_gpu.LOAD_REGISTERS, action="decrease")
        bounds = load_bounds()
        head = lax.div(n, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))
        rings = (k_tiles, k_loaded, k_free), (v_tiles, v_loaded, v_free)
        tiles.stream_keys(refs, b, head, bounds, tiling, rings)

    # the others compute, block_q rows each
    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(mosaic_gpu.COMPUTE_REGISTERS, action="increase")
        bounds = load_bounds()
        # q [block_q, H] and dout [block_q, Hv] stay in shared memory, lse, delta and rounding in registers
        row = (i * wgs + wg) * bq
        here = (b, pl.ds(row, bq), n)
        plgpu.copy_gmem_to_smem(refs.q.at[here], q_tile.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(saved.dout.at[here], dout_tile.at[wg], loaded.at[wg])
        first = Tile(options, refs, b, n, row, jnp.int32(0), (bq, bk))
        rows = [gradients.loader_of(load()) for load in saved.row_loaders(first)]
        plgpu.barrier_wait(loaded.at[wg])
        side = 0 if "rows" in names else None
        how = {"of_bias": "bias" in names, "to_values": side is not None}

        def step(dq_acc, t, totals):
            """Adds the keys of one tile to dq and to the sums over keys, which it returns."""
            # k and v of the tile are there
            slot = lax.rem(t, jnp.int32(stages))
            mine = wg + bounds.opaque_zero() if saved.head > 128 else wg
            tile = first._replace(column=bounds.tile(t) * bk)
            plgpu.barrier_wait(k_loaded.at[slot])
            plgpu.barrier_wait(v_loaded.at[slot])

            def products(s_acc, dp_acc):
                # s = q k^T, [block_q, block_k]; dp = dout v^T beside it where registers hold both
                plgpu.wgmma(s_acc, q_tile.at[mine], k_tiles.at[slot].T)
                if tiling.overlap:
                    plgpu.wgmma(dp_acc, dout_tile.at[mine], v_tiles.at[slot].T)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=int(tiling.overlap))
                # p (2), negative where dropout drops it, times the slope that may be in it
                found = gradients.weights(tile, s, bounds.mixed(t), rows, **how)
                p = gradients.signed(tile, found.with_slope())
                # where they do not, dp only now
                if not tiling.overlap:
                    plgpu.wgmma(dp_acc, dout_tile.at[mine], v_tiles.at[slot].T)
                return found.after_p(), p, dp_acc[...]

            acc = plgpu.ACC((bq, bk), jnp.float32)
            found, p, dp = pl.run_scoped(products, acc, acc)
            plgpu.barrier_arrive(v_free.at[slot])
            # dlogits (8) and dx (10), and the sums over keys of what was asked for
            dlogits = gradients.dlogits(tile, p, dp, rows)
            dx, dvalues = gradients.through_score(tile, found, dlogits, side)
            added = [dx] if "bias" in names else dvalues
            totals = [total + x.sum(axis=1) for total, x in zip(totals, added, strict=True)]
            # dq += dx k (11); the place of k is free when that has read it
            if "query" in names:
                dx = dx.astype(refs.q.dtype)
                mosaic_gpu.product(dq_acc, dx, k_tiles.at[slot], spare and spare.at[wg])
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[slot])
            return totals

        # over all visited tiles, with dq [block_q, H] in an accumulator
        def accumulate(*dq_acc):
            start = [gradients.zeros((bq,), ROWS)] * (sums.shape[1] if names != ["query"] else 0)
            run = partial(step, *(dq_acc or [None]))
            totals = lax.fori_loop(jnp.int32(0), bounds.count, run, start)
            return totals, [acc[...] for acc in dq_acc]

        accs = [plgpu.ACC((bq, refs.q.shape[-1]), jnp.float32)] if "query" in names else []
        totals, dq = pl.run_scoped(accumulate, *accs) if accs else accumulate()
        # both go to global memory by way of shared memory, dq in the place of q
        for x in dq:
            q_tile[wg] = (x * options.scale).astype(refs.q.dtype)
        for line, total in enumerate(totals):
            sums[wg, line] = total
        plgpu.commit_smem()
        for name, result in zip(names, results, strict=True):
            if name == "query":
                plgpu.copy_smem_to_gmem(q_tile.at[wg], result.at[here])
                continue
            for line in range(len(totals)):
                plgpu.copy_smem_to_gmem(sums.at[wg, line], result.at[b, n, line, pl.ds(row, bq)])
        plgpu.wait_smem_to_gmem(0)


def bias_gradient(options: KernelOptions, interpret: bool, saved: Saved) -> jax.Array:
    """Sums dlogits over the batch entries and heads that the bias broadcasts over, float32.

    `[B|1, N|1, T, S]`, as the bias. A block owns one tile and visits its (batch, head) pairs in turn.
    """
    # tiles, and whether each is seen by each batch entry
    tiling = default_tiling(options, saved)
    if saved.head > 128:
        tiling = dataclasses.replace(tiling, stages=1)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.with_bounds(options, wgs * bq, bk, each=True)
    (_, T, _, H), (_, S, _, Hv) = saved.refs.q.shape, saved.refs.v.shape
    B, N, _, _ = saved.refs.bias.shape
    # shared memory: `stages` slots for q, dout, k and v of a pair, filled and freed together; the total
    dtype, ring = saved.refs.q.dtype, partial(plgpu.Barrier, num_barriers=stages)
    tile = partial(mosaic_gpu.tile, swizzle=tiling.swizzle)
    scratch = dict(
        q_tiles=tile((stages, wgs * bq, H), dtype),
        dout_tiles=tile((stages, wgs * bq, Hv), dtype),
        k_tiles=tile((stages, bk, H), dtype),
        v_tiles=tile((stages, bk, Hv), dtype),
        total_tile=mosaic_gpu.tile((wgs, bq, bk), jnp.float32),
        loaded=ring(num_arrivals=4),
        free=ring(num_arrivals=wgs),
    )
    # a block for each tile of the bias
    return mosaic_gpu.launch(
        partial(_bias_kernel, options, tiling),
        "attention_dbias",
        interpret=interpret,
        out_type=pallas.out_type((B, N, T, S), jnp.float32, saved),
        scratch=scratch,
        grid={"k_tile": S // bk, "q_tile": T // (wgs * bq), "entry": B * N},
        warpgroups=wgs + 1,
    )(saved)


def _bias_kernel(
    options: KernelOptions, tiling: Tiling, saved: Saved, result,
    q_tiles, dout_tiles, k_tiles, v_tiles, total_tile, loaded, free,
):  # fmt: skip
    """Runs one block: one tile of the gradient of the bias."""
    # where the block is: a tile of 2 x block_q queries and block_k keys, of one entry of the bias
    j, i, entry, wg = (lax.axis_index(name) for name in ("k_tile", "q_tile", "entry", "wg"))
    refs, wgs = saved.refs, tiles.COMPUTE_WARPGROUPS
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    (B, _, N, _), (own_B, own_N, _, _) = refs.q.shape, refs.bias.shape
    # which pairs read it: over an axis that the bias has its own one, else all
    own = lax.div(entry, jnp.int32(own_N)), lax.rem(entry, jnp.int32(own_N))
    repeats = B // own_B, N // own_N

    def pair(step):
        """Returns (batch entry, query head) of a step."""
        turn = lax.div(step, jnp.int32(repeats[1])), lax.rem(step, jnp.int32(repeats[1]))
        return [t if r > 1 else o for o, t, r in zip(own, turn, repeats, strict=True)]

    # none, where the entries visit the same tiles and see nothing of this one
    count = jnp.int32(repeats[0] * repeats[1])
    if refs.bounds is not None and all(x.shape[0] == 1 for x in jax.tree.leaves(refs.bounds)):
        bounds = tiles.load_bounds(refs, jnp.int32(0), i, refs.k.shape[1] // bk)
        count = jnp.where(bounds.visits(j), count, 0)

    # the last warpgroup loads what each pair has there
    @pl.when(wg == wgs)
    def _load():
        plgpu.set_max_registers(mosaic_gpu.LOAD_REGISTERS, action="decrease")

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

        mosaic_gpu.stream(count, stages, [(sources, [q_tiles, dout_tiles, k_tiles, v_tiles], loaded, free)])

    # the others compute, block_q rows of the tile each
    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(mosaic_gpu.COMPUTE_REGISTERS, action="increase")
        row = (i * wgs + wg) * bq

        def step(t, total):
            """Adds the dlogits of one pair to the total."""
            # its row values are loaded while its tiles are still on their way
            slot = lax.rem(t, jnp.int32(stages))
            b, n = pair(t)
            tile = Tile(options, refs, b, n, row, j * bk, (bq, bk))
            rows = saved.row_loaders(tile)
            plgpu.barrier_wait(loaded.at[slot])
            mine = pl.ds(wg * bq, bq)

            # s = q k^T and dp = dout v^T, [block_q, block_k]
            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, q_tiles.at[slot, mine], k_tiles.at[slot].T)
                plgpu.wgmma(dp_acc, dout_tiles.at[slot, mine], v_tiles.at[slot].T)
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=0), dp_acc[...]

            acc = plgpu.ACC((bq, bk), jnp.float32)
            s, dp = pl.run_scoped(products, acc, acc)
            plgpu.barrier_arrive(free.at[slot])
            # dlogits (8), back through the score if there is one (8a), not through the soft cap
            mixed = tiles.load_bounds(refs, b, i, refs.k.shape[1] // bk).compares(j)
            found = gradients.weights(tile, s, mixed, rows, of_bias=True)
            p = gradients.signed(tile, found.with_slope())
            dlogits = gradients.dlogits(tile, p, dp, rows)
            return total + gradients.through_score(tile, found, dlogits)[0]

        # over all pairs, [block_q, block_k] in registers; written by way of shared memory
        total = lax.fori_loop(jnp.int32(0), count, step, gradients.zeros((bq, bk), WGMMA))
        total_tile[wg] = total
        plgpu.commit_smem()
        at = (*own, pl.ds(row, bq), pl.ds(j * bk, bk))
        plgpu.copy_smem_to_gmem(total_tile.at[wg], result.at[at])
        plgpu.wait_smem_to_gmem(0)
