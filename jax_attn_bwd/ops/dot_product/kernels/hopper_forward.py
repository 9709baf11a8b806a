"""Hopper forward of dense attention (Pallas Mosaic GPU).

A block computes 2 x block_q query rows of one head with three warpgroups. One loads keys and values into a
ring of shared-memory stages (TMA). The other two hold block_q rows each, and take turns: while one has the
tensor cores for its products (wgmma), the other computes exponentials. The softmax is that of
`online_softmax.py`, in base 2 with the scale in the exponent; where logits have a bias or a soft cap the
maximum is subtracted first, in natural units, so that huge tied logits stay exact. With `Plan.keeps_rounding`
p is two numbers, its rounding the second, and each is multiplied with v.

References:
  Shah et al., FlashAttention-3, 2024, arXiv:2407.08608, section 3.1 (ping-pong scheduling).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import dropout, mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import ROWS, WGMMA
from jax_attn_bwd._core.numerics import finite, rounding_between, to_rank
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tile, Tiling
from jax_attn_bwd.ops.dot_product.kernels.inputs import LN_2, LOG2_E, Inputs, is_plain
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Result

supports = tiles.unsupported


def default_tiling(options: KernelOptions, operands: Operands, keeps_rounding: bool = False) -> Tiling:
    """Fits tiles to shared memory, and to registers without spills; see `nvidia_static.md`."""
    H, Hv = (kernel_inputs.whole(x.shape[-1], tiles.HEAD) for x in (operands.query, operands.value))
    head = max(H, Hv)
    # an output that is not of the query's shape takes shared memory of its own; two numbers a p, registers
    if (Hv != H and H + Hv > 384) or (head > 128 and keeps_rounding and options.dropout_rate):
        return Tiling(block_q=64, block_k=32, stages=3)
    segments = operands.mask.query_segment_ids is not None
    crowded = options.logits_soft_cap is not None and (segments or jax.tree.leaves(operands.mod_args))
    crowded = head > 64 and (crowded or (segments and operands.mask.elements is not None))
    heavy = options.dropout_rate or operands.bias is not None or options.score_mod is not None
    if head > 128 or crowded or heavy or functions.args_for_bounds(options, operands):
        return Tiling(block_q=64, block_k=64, stages=2)
    return Tiling(block_q=64, block_k=128, stages=2 if head > 64 else 4)


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    options = KernelOptions.of(plan.options, operands.mask)
    tiling = default_tiling(options, operands, plan.keeps_rounding)
    operands = functions.with_numbers(operands)
    run = partial(_forward, options, tiling, pallas.is_interpreted(mosaic_gpu.NAME), plan.keeps_rounding)
    specs = partial(kernel_inputs.result_specs, options, plan.keeps_rounding)
    keys = kernel_inputs.dropout_keys(options, operands)
    return tie(pallas.on_local_shards(run, specs, (operands, keys)), operands)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _forward(options, tiling, interpret, keeps_rounding, operands, keys):
    # inputs `[B, T, N, H]` in whole tiles, and which tiles of keys each tile of 2 x block_q queries visits
    *batch, T, N, _ = operands.query.shape
    Hv = operands.value.shape[-1]
    rows = tiles.COMPUTE_WARPGROUPS * tiling.block_q
    refs = tiles.inputs(options, operands, keys)
    options = functions.on_values(options, operands)
    bounds = tiles.bounds(options, refs, rows, tiling.block_k)
    refs = pallas.vary_alike(refs._replace(bounds=bounds, mod_args=()))
    # a block for each tile of queries, of each head and batch entry
    out, lse, *rounding = mosaic_gpu.launch(
        partial(_kernel, options, tiling),
        "attention_forward_low" if keeps_rounding else "attention_forward",
        interpret=interpret,
        out_type=_out_types(options, keeps_rounding, refs),
        scratch=_scratch(options, tiling, refs, interpret),
        grid={"q_tile": refs.q.shape[1] // rows, "head": N, "batch": refs.q.shape[0]},
        warpgroups=tiles.COMPUTE_WARPGROUPS + 1,
    )(refs)

    # without padding, with the batch axes of the call: out `[..., T, N, Hv]`, lse `[..., T, N]`
    out, *out_rounding = (x[:, :T, :, :Hv].reshape(*batch, T, N, Hv) for x in (out, *rounding[1:]))
    lse, *rounding = (jnp.swapaxes(x[..., :T], -1, -2).reshape(*batch, T, N) for x in (lse, *rounding[:1]))
    # a query beyond its length sees nothing but the sink
    if (lengths := operands.mask.query_seq_lengths) is not None:
        lengths = lengths[..., None, None]
        beyond = to_rank(jnp.arange(T, dtype=jnp.int32)[:, None], lengths.ndim) >= lengths
        empty = -jnp.inf if operands.sink is None else operands.sink.astype(lse.dtype)
        out, *out_rounding = (jnp.where(beyond[..., None], 0, x) for x in (out, *out_rounding))
        lse = jnp.where(beyond, empty, lse)
    wide = [out.astype(lse.dtype) + x.astype(lse.dtype) for x in out_rounding]
    return Result(out, lse, *(rounding or [None]), *wide)


def _out_types(options: KernelOptions, keeps_rounding: bool, refs: Inputs) -> list[Any]:
    """Returns the types of out, lse and, where they are kept, of their roundings."""
    (B, T, N, _), Hv = refs.q.shape, refs.v.shape[-1]
    row = pallas.out_type((B, N, T), jnp.float32, refs)
    out = pallas.out_type((B, T, N, Hv), refs.q.dtype, refs)
    rounding = [row] if kernel_inputs.has_rounding(options, refs) else []
    return [out, row, *rounding, *([out] if keeps_rounding else [])]


def _scratch(options: KernelOptions, tiling: Tiling, refs: Inputs, interpret: bool) -> dict[str, Any]:
    """Returns the types of shared memory and barriers, by the names of arguments of `_kernel`."""
    dtype, H, Hv = refs.q.dtype, refs.q.shape[-1], refs.v.shape[-1]
    wgs, bq, bk = tiles.COMPUTE_WARPGROUPS, tiling.block_q, tiling.block_k
    # rings for k and v, q of each computing warpgroup, lse and its rounding of each row; a barrier at which
    # the two take turns
    tile = partial(mosaic_gpu.tile, swizzle=tiling.swizzle)
    scratch = tiles.key_rings(refs, tiling) | dict(
        q_tile=tile((wgs, bq, H), dtype),
        row_values=plgpu.SMEM((wgs, 2 if kernel_inputs.has_rounding(options, refs) else 1, bq), jnp.float32),
        q_loaded=plgpu.Barrier(num_barriers=wgs),
        turn=plgpu.Barrier(num_arrivals=wgs),
    )
    if Hv != H:  # else out takes the place of q
        scratch["out_tile"] = tile((wgs, bq, Hv), dtype)
    if interpret:
        scratch["spare"] = tile((wgs, bq, bk), dtype)
    return scratch


def _kernel(
    options: KernelOptions, tiling: Tiling,
    refs: Inputs, out_ref, lse_ref, *rounding_refs,
    q_tile, k_tiles, v_tiles, row_values, q_loaded, k_loaded, v_loaded, k_free, v_free, turn,
    out_tile=None, spare=None,
):  # fmt: skip
    """Runs one block: out and lse of 2 x block_q queries of one head."""
    # where the block is: batch entry, query head, and a tile of 2 x block_q queries
    b, n, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    i = lax.axis_index("q_tile")
    if options.is_causal:  # the longest first
        i = jnp.int32(refs.q.shape[1] // (tiles.COMPUTE_WARPGROUPS * tiling.block_q) - 1) - i
    groups, keeps_rounding = refs.q.shape[2] // refs.k.shape[2], len(rounding_refs) == 2
    wide = max(refs.q.shape[-1], refs.v.shape[-1]) > 128
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    # Which tiles of keys it visits. All warpgroups need it: it is read before they part where that is cheap;
    # a list has more to be read, and what is known before the warpgroups part costs registers.
    load_bounds = partial(tiles.load_bounds, refs, b, i, refs.k.shape[1] // bk)
    known = None if isinstance(refs.bounds, tiles.Listed) else load_bounds()

    # the last warpgroup loads k and v of each visited tile, as slots of the rings come free
    @pl.when(wg == tiles.COMPUTE_WARPGROUPS)
    def _load():
        plgpu.set_max_registers(mosaic_gpu.LOAD_REGISTERS, action="decrease")
        head, bounds = lax.div(n, jnp.int32(groups)), known or load_bounds()
        rings = (k_tiles, k_loaded, k_free), (v_tiles, v_loaded, v_free)
        tiles.stream_keys(refs, b, head, bounds, tiling, rings)

    # the others compute, block_q rows each
    @pl.when(wg < tiles.COMPUTE_WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(mosaic_gpu.COMPUTE_REGISTERS, action="increase")
        # q of these rows, [block_q, H], stays in shared memory
        row, bounds = (i * tiles.COMPUTE_WARPGROUPS + wg) * bq, known or load_bounds()
        plgpu.copy_gmem_to_smem(refs.q.at[b, pl.ds(row, bq), n], q_tile.at[wg], q_loaded.at[wg])
        plgpu.barrier_wait(q_loaded.at[wg])
        pl.when(wg == 1)(partial(mosaic_gpu.meet, turn))  # warpgroup 0 has the first turn

        def step(t, carry):
            """Folds the keys of one tile into acc, m, l: [block_q, Hv], [block_q] and [block_q]."""
            # s = q k^T, [block_q, block_k]: once it has begun the other warpgroup may begin its own products
            slot = lax.rem(t, jnp.int32(stages))
            mine = wg + bounds.opaque_zero() if wide else wg
            plgpu.barrier_wait(k_loaded.at[slot])

            def product(acc):
                plgpu.wgmma(acc, q_tile.at[mine], k_tiles.at[slot].T)
                mosaic_gpu.meet(turn)
                return acc[...]

            s = pl.run_scoped(product, plgpu.ACC((bq, bk), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            # p (2), and m and l of the rows, while the tensor cores are the other's
            tile = Tile(options, refs, b, n, row, bounds.tile(t) * bk, (bq, bk))
            decay, p, m, l = _softmax(tile, keeps_rounding, s, bounds.mixed(t), *carry[1:])
            acc = carry[0] * lax.broadcast_in_dim(decay, carry[0].shape, [0])
            acc, m, l, p = lax.optimization_barrier((acc, m, l, p))
            # the other's turn; acc += p v when one's own has come back
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_loaded.at[slot])
            plgpu.barrier_wait(turn)
            acc = mosaic_gpu.add_products(acc, p, v_tiles.at[slot], spare and spare.at[wg])
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, m, l

        # Over all visited tiles. Steps count from 0: a carry that starts with a value from memory would vary
        # over mesh axes.
        start = _initial(options, refs, bq, n)
        acc, m, l = lax.fori_loop(jnp.int32(0), bounds.count, step, start)
        pl.when(wg == 0)(partial(mosaic_gpu.meet, turn))  # and warpgroup 1 the last one

        # out = acc / l, 0 in rows that see nothing; l is of all keys, acc of those that dropout lets pass
        factor = dropout.survivor_factor(options.dropout_rate) if options.dropout_rate else 1.0
        scale = jnp.where(l == 0.0, 0.0, factor / l)
        target = (q_tile if out_tile is None else out_tile).at[wg]
        out = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
        narrow = out.astype(refs.q.dtype)
        out_rounding = rounding_between(out, narrow) if keeps_rounding else None
        target[...] = narrow
        # lse = m + log l, in natural units
        unit = LN_2 if is_plain(options, refs) else 1.0  # of m
        log_l = jnp.log2(l) * LN_2
        lse = m * unit + log_l
        row_values[wg, 0] = lse
        if rounding_refs:
            row_values[wg, 1] = jnp.where(l == 0.0, 0.0, (m - lse) + log_l)
        # both go to global memory by way of shared memory, out in the place of q where their sizes agree
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, out_ref.at[b, pl.ds(row, bq), n], commit_group=False)
        for c, ref in enumerate((lse_ref, *rounding_refs[:1])):
            plgpu.copy_smem_to_gmem(row_values.at[wg, c], ref.at[b, n, pl.ds(row, bq)], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)
        for ref in rounding_refs[1:]:  # that of out, in the place of out
            target[...] = out_rounding
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, ref.at[b, pl.ds(row, bq), n])
            plgpu.wait_smem_to_gmem(0)


def _initial(options, refs: Inputs, rows: int, n):
    """Returns acc, m, l of rows that have seen nothing but the sink."""

    def filled(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    acc = filled(0.0, (rows, refs.v.shape[-1]), WGMMA)
    if refs.sink is None:
        return acc, filled(-jnp.inf, (rows,), ROWS), filled(0.0, (rows,), ROWS)
    sink = refs.sink[n] * (LOG2_E if is_plain(options, refs) else 1.0)
    l = jnp.where(sink == -jnp.inf, 0.0, 1.0)
    return acc, filled(sink, (rows,), ROWS), filled(l, (rows,), ROWS)


def _softmax(tile: Tile, keeps_rounding: bool, s, mixed, m_old, l_old):
    """Returns (decay of what was accumulated, numbers that add up to p, m, l) after a tile of products s."""
    # the maxima m of the rows, of all tiles up to this one
    logits = tile.logits(s, mixed)
    m = jnp.maximum(m_old, logits.shift(logits.x.max(axis=1)))
    shift = finite(m)
    # p = exp(logits - m); what was added up before is relative to the old maximum, and decays
    p = logits.exp(tile.spread(shift, 0))
    decay = logits.decay(m_old, shift)
    l = l_old * decay + p.sum(axis=1)
    # dropout comes after l: the row sum is of all keys
    kept = tile.keep()
    if kept is not None:
        p = jnp.where(kept, p, 0.0)
    # as the product takes it: rounded, and with `keeps_rounding` what that took as well
    narrow = p.astype(tile.refs.q.dtype)
    return decay, [narrow, rounding_between(p, narrow)] if keeps_rounding else [narrow], m, l
