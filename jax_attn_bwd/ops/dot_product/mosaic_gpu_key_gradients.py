"""Hopper backward of dense attention by tiles of keys: dk, dv, and the gradient of a bias that has no rows.

Products per tile, held transposed (equation numbers of `backward.py`):

    s^T = k q^T,   dp^T = v dout^T,   dv += p^T dout (5),   dk += dx^T q            (11)

So p^T and dx^T are left factors straight from registers. Two warpgroups hold block_k rows of k and v each,
a third one loads q, dout and their row values (TMA). The query heads of a group are summed in the
accumulators. The fused kernel also adds dx k to a float32 dq in global memory (TMA reduce-add), in whatever
order the blocks come by: five products a tile where the deterministic pair needs seven.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS
from jax_attn_bwd.ops.dot_product import mosaic_gpu_gradients as gradients
from jax_attn_bwd.ops.dot_product import mosaic_gpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.mosaic_gpu_gradients import Saved
from jax_attn_bwd.ops.dot_product.mosaic_gpu_tiles import Bounds, Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import Options


def default_tiling(options: Options, saved: Saved) -> Tiling:
    """Of the dk, dv kernel and the fused one: block_k keys a warpgroup, steps of block_q rows."""
    if saved.head > 128:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    # what a row of scores takes registers for, beside them
    planes = saved.refs.bias is not None and saved.refs.mask is not None
    heavy = options.dropout_rate or options.logits_soft_cap is not None or planes
    if saved.head > 64 and heavy:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    # segments take those that a second product in flight needs at H = 128
    overlap = saved.head <= 64 or saved.refs.row_segment is None
    return Tiling(block_q=64, block_k=64, stages=2, overlap=overlap)


def can_fuse(options: Options, saved: Saved) -> bool:
    """Whether the fused kernel can run: its registers suffice, and JAX hands it the references it adds to.

    (JAX 0.10 does not; later ones not inside `jax.shard_map`, where references would vary over mesh axes.)
    """
    H, Hv = saved.refs.q.shape[-1], saved.refs.v.shape[-1]
    extras = (saved.refs.dropout_keys, saved.refs.bias, saved.refs.mask, saved.refs.row_position)
    plain = options.logits_soft_cap is None and extras == (None,) * 4
    fits = H == Hv <= (128 if saved.refs.row_segment is None else 64)
    takes_references = jax.__version_info__ >= (0, 11) and not pallas.varying_axes(saved)
    return fits and plain and takes_references


def keys(options: Options, interpret: bool, saved: Saved, wanted: frozenset[str]) -> dict[str, Any]:
    """Of "key" and "value", those in `wanted`: [B, S, K, H] and [B, S, K, Hv].

    All three with "query": the fused kernel. "bias" alone: column sums of dlogits, float32 [B, N, S].
    """
    fused = "query" in wanted
    tiling = default_tiling(options, saved)
    tokens = {
        name: x
        for name in ("row_position", "row_segment")
        if (x := getattr(saved.refs, name)) is not None
    }
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, bq, wgs * bk, by_key=True)
    (B, S, K, H), Hv, dtype = saved.refs.k.shape, saved.refs.v.shape[-1], saved.refs.q.dtype
    heads = saved.refs.q.shape[2] if "bias" in wanted else K
    types = {
        "key": ((B, S, K, H), dtype),
        "value": ((B, S, K, Hv), dtype),
        "bias": ((B, heads, S), jnp.float32),
    }
    ring = partial(plgpu.Barrier, num_barriers=stages)
    swizzle = min(tiling.swizzle, H) if fused else tiling.swizzle  # of bytes: half of the columns
    tile = partial(mosaic_gpu.tile, swizzle=swizzle)
    scratch = dict(
        k_tile=tile((wgs, bk, H), dtype),
        v_tile=tile((wgs, bk, Hv), dtype),
        q_tiles=tile((stages, bq, H), dtype),
        dout_tiles=tile((stages, bq, Hv), dtype),
        row_tiles=plgpu.SMEM((stages, saved.rows.shape[2], bq), jnp.float32),
        token_tiles={name: plgpu.SMEM((stages, bq), jnp.int32) for name in tokens},
        sums=plgpu.SMEM((wgs, bk), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
        q_loaded=ring(num_arrivals=2 + len(tokens)), dout_loaded=ring(),
        q_free=ring(num_arrivals=wgs), dout_free=ring(num_arrivals=wgs),
    )  # fmt: skip
    if fused:
        scratch["exchange"] = dict(
            dx_tiles=tile((2, wgs, bk, bq), dtype),
            dq_tile=mosaic_gpu.tile((wgs, bq, H // wgs), jnp.float32),
            written=plgpu.Barrier(num_arrivals=wgs),
        )
    if interpret:
        scratch["spare"] = tile((2, wgs, bk, bq), dtype)
    names = sorted(wanted - {"query"})
    out_types = [pallas.out_type(*types[name], saved) for name in names]
    run = mosaic_gpu.launch(
        partial(_keys_kernel, options, tiling, names),
        f"attention_d{'_d'.join(sorted(wanted))}",
        interpret=interpret,
        out_type=() if fused else out_types,
        scratch=scratch,
        grid={"k_tile": S // (wgs * bk), "head": heads, "batch": B},
        warpgroups=wgs + 1,
    )
    if not fused:
        return dict(zip(names, run(saved), strict=True))
    # what blocks add to starts at 0, so the kernel writes into references
    q, k, v = saved.refs[:3]
    zeros = [jnp.zeros_like(q, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)]
    dq, *others = pl.run_state(lambda grads: run(saved, *grads))(zeros)
    return dict(zip(names, others, strict=True)) | {"query": options.scale * dq}


def _keys_kernel(
    options: Options, tiling: Tiling, names: list[str], saved: Saved, *results,
    k_tile, v_tile, q_tiles, dout_tiles, row_tiles, token_tiles, sums,
    loaded, q_loaded, dout_loaded, q_free, dout_free, exchange=None, spare=None,
):  # fmt: skip
    dq_ref, *outputs = results if exchange else (None, *results)
    b, head, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    refs, wgs = saved.refs, tiles.COMPUTE_WARPGROUPS
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    j = lax.axis_index("k_tile")
    ratio = refs.q.shape[2] // refs.k.shape[2]
    groups = 1 if "bias" in names else ratio  # query heads summed here
    kv = lax.div(head, jnp.int32(ratio)) if "bias" in names else head

    def load_bounds():  # by each warpgroup for itself: what is known before they part costs registers
        return Bounds.load(refs, b, j, refs.q.shape[1] // bq)

    def where(bounds, step):
        """(query head, tile of queries) of a step."""
        if groups == 1:
            return head, bounds.first + step
        g = jnp.int32(groups)
        return head * g + lax.rem(step, g), bounds.first + lax.div(step, g)

    @pl.when(wg == wgs)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        bounds = load_bounds()

        def block(ref):
            def source(step):
                n, i = where(bounds, step)
                return ref.at[b, pl.ds(i * bq, bq), n]

            return source

        def q_and_rows(step):
            n, i = where(bounds, step)
            span = pl.ds(i * bq, bq)
            tokens = [getattr(refs, name) for name in token_tiles]
            return [
                block(refs.q)(step),
                saved.rows.at[b, n, :, span],
                *(x.at[tiles.at(x, 0, b), span] for x in tokens),
            ]

        mosaic_gpu.stream((bounds.end - bounds.first) * groups, stages, [
            (q_and_rows, [q_tiles, row_tiles, *token_tiles.values()], q_loaded, q_free),
            (lambda step: [block(saved.dout)(step)], [dout_tiles], dout_loaded, dout_free),
        ])  # fmt: skip

    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        bounds = load_bounds()
        column = (j * wgs + wg) * bk
        here = (b, pl.ds(column, bk), kv)
        plgpu.copy_gmem_to_smem(refs.k.at[here], k_tile.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(refs.v.at[here], v_tile.at[wg], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def step(t, total, accs):
            slot = lax.rem(t, jnp.int32(stages))
            mine = wg + bounds.opaque_zero() if saved.head > 128 or exchange else wg
            n, i = where(bounds, t)
            staged = {
                name: partial(mosaic_gpu.load, x.at[slot], layout=COLUMNS)
                for name, x in token_tiles.items()
            }
            tile = Tile(b, n, i * bq, column, (bk, bq), transposed=True, staged=staged)
            plgpu.barrier_wait(q_loaded.at[slot])
            plgpu.barrier_wait(dout_loaded.at[slot])

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, k_tile.at[mine], q_tiles.at[slot].T)
                early = tiling.overlap and names != ["value"]
                if early:
                    plgpu.wgmma(dp_acc, v_tile.at[mine], dout_tiles.at[slot].T)
                rows = [
                    partial(mosaic_gpu.load, row_tiles.at[slot, r], layout=COLUMNS)
                    for r in range(saved.rows.shape[2])
                ]
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=int(early))
                p, slope = gradients.probabilities(options, refs, s, tile, bounds.mixed(i), rows)
                p = gradients.signed(options, refs, p, tile)
                if "value" in names:  # (5)
                    z_p = gradients.survivors(options, p, p).astype(refs.q.dtype)
                    a = spare and spare.at[0, wg]
                    mosaic_gpu.product(accs["value"], z_p, dout_tiles.at[slot], a)
                if names == ["value"]:
                    return None
                if slope is not None and "bias" not in names:
                    p = p * slope
                if not early:
                    plgpu.wgmma(dp_acc, v_tile.at[mine], dout_tiles.at[slot].T)
                in_flight = int(early and "value" in names)
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=in_flight)
                return gradients.dlogits(options, p, dp, tile, rows)

            acc = plgpu.ACC((bk, bq), jnp.float32)
            dlogits = pl.run_scoped(products, acc, acc)
            if "bias" in names:
                total = total + dlogits.sum(axis=1)
            if "key" in names:  # (11)
                dx = dlogits.astype(refs.q.dtype)
                mosaic_gpu.product(accs["key"], dx, q_tiles.at[slot], spare and spare.at[1, wg])
                if exchange:
                    _add_dq(
                        dx, k_tile, dq_ref.at[b, :, n], i * bq, t, spare is not None, **exchange
                    )
                elif "value" in names:
                    plgpu.wgmma_wait(1)
            if names == ["value"]:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(dout_free.at[slot])
            if "key" in names:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(q_free.at[slot])
            return total

        def accumulate(*accs):
            accs = dict(zip(names, accs, strict=False))
            start = gradients.zeros((bk,), ROWS) if "bias" in names else ()
            count = (bounds.end - bounds.first) * groups
            total = lax.fori_loop(jnp.int32(0), count, lambda t, total: step(t, total, accs), start)
            return [total] if "bias" in names else [accs[name][...] for name in names]

        sizes = {"key": refs.k.shape[-1], "value": refs.v.shape[-1]}
        accs = [plgpu.ACC((bk, sizes[n]), jnp.float32) for n in names if n != "bias"]
        totals = pl.run_scoped(accumulate, *accs) if accs else accumulate()
        if exchange:  # the other warpgroup may still read this one's keys, whose place dk takes
            mosaic_gpu.meet(exchange["written"])
        for name, total, result in zip(names, totals, outputs, strict=True):
            target = {"key": k_tile, "value": v_tile, "bias": sums}[name].at[wg]
            total = total * options.scale if name == "key" else total
            target[...] = total.astype(target.dtype)
            plgpu.commit_smem()
            place = (b, head, pl.ds(column, bk)) if name == "bias" else here
            plgpu.copy_smem_to_gmem(target, result.at[place])
        plgpu.wait_smem_to_gmem(0)


def _add_dq(dx, k_tile, dq_ref, row, step, interpret, *, dx_tiles, dq_tile, written):
    """Adds dx k of a tile of queries and all keys of the block to dq `[T, H]` in global memory.

    The warpgroups exchange their dx^T through shared memory, and each takes half of the columns of dq. There
    are two buffers, since a warpgroup may be one step ahead of the other's reads.
    """
    wg, (wgs, bq, width) = lax.axis_index("wg"), dq_tile.shape
    dx_tiles = dx_tiles.at[lax.rem(step, jnp.int32(2))]
    dx_tiles[wg] = dx
    plgpu.commit_smem()
    mosaic_gpu.meet(written)
    columns = pl.ds(pl.multiple_of(wg * width, width), width)

    def product(acc):
        for other in range(wgs):
            plgpu.wgmma(acc, dx_tiles.at[other].T, k_tile.at[other, :, columns])
        return acc[...]

    dq = pl.run_scoped(product, plgpu.ACC((bq, width), jnp.float32))
    here = (pl.ds(row, bq), columns)
    if interpret:  # the interpreter has no reduce-add, and mixes up stores that meet in one array

        def add():
            dq_ref[here] = dq_ref[here] + dq

        for turn in range(wgs):
            pl.when(wg == turn)(add)
            mosaic_gpu.meet(written)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    dq_tile[wg] = dq
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(dq_tile.at[wg], dq_ref.at[here], reduction_op="add")
