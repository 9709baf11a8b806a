"""Hopper backward of dense attention by tiles of keys: dk, dv, and sums over queries for a bias or a score.

Products per tile, held transposed (equation numbers of `backward.py`):

    s^T = k q^T,   dp^T = v dout^T,   dv += p^T dout (5),   dk += dx^T q            (11)

So p^T and dx^T are left factors straight from registers. Two warpgroups hold block_k rows of k and v each,
a third one loads q, dout and their row values (TMA). The query heads of a group are summed in the
accumulators. The fused kernel also adds dx k to a float32 dq in global memory (TMA reduce-add), in whatever
order the blocks come by: five products a tile where the deterministic pair needs seven.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS
from jax_attn_bwd._core.sharding import varying
from jax_attn_bwd.ops.dot_product.kernels import hopper_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


class Shared(NamedTuple):
    """Shared memory and barriers of a block; wgs = computing warpgroups, stages = slots of a ring."""

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
    exchange: dict[str, Any] | None = None  # of the fused kernel, see `_add_dq`
    spare: Any = None  # of the interpreter, see `mosaic_gpu.product`: for p and dx of each warpgroup


def _scratch(tiling: Tiling, saved: Saved, sums: int, fused: bool, interpret: bool) -> dict[str, Any]:
    """Returns the types of `Shared`."""
    # tokens that a mask compares travel with q
    H, Hv, dtype = saved.refs.k.shape[-1], saved.refs.v.shape[-1], saved.refs.q.dtype
    bq, bk, stages, wgs = tiling.block_q, tiling.block_k, tiling.stages, tiles.COMPUTE_WARPGROUPS
    tokens = [name for name in ("row_position", "row_segment") if getattr(saved.refs, name) is not None]
    ring = partial(plgpu.Barrier, num_barriers=stages)
    swizzle = min(tiling.swizzle, H) if fused else tiling.swizzle  # of bytes: half of the columns
    tile = partial(mosaic_gpu.tile, swizzle=swizzle)
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
    # the fused kernel's own: dx of both warpgroups, in two buffers, and the part of dq that each adds up
    if fused:
        shared["exchange"] = dict(
            dx_tiles=tile((2, wgs, bk, bq), dtype),
            dq_tile=mosaic_gpu.tile((wgs, bq, H // wgs), jnp.float32),
            written=plgpu.Barrier(num_arrivals=wgs),
        )
    if interpret:
        shared["spare"] = tile((2, wgs, bk, bq), dtype)
    return shared


class KeyBlock(NamedTuple):
    """The call as the warpgroups of a block know it, and where the block is."""

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
    def refs(self) -> kernel_inputs.Inputs:
        """Returns the inputs that the forward reads, too."""
        return self.saved.refs

    def bounds(self) -> Any:
        """Loads which tiles of queries see the block.

        Each warpgroup asks for itself: what is known before they part costs registers.
        """
        return tiles.load_bounds(self.refs, self.b, self.j, self.refs.q.shape[1] // self.tiling.block_q)

    def steps(self, bounds: Any) -> Any:
        """Counts the (query head, tile of queries) that the block visits."""
        return bounds.count * self.groups

    def at(self, step: Any) -> tuple[Any, Any]:
        """Returns (query head, step of the bounds) of a step: all heads of a tile one after the other."""
        if self.groups == 1:
            return self.head, step
        g = jnp.int32(self.groups)
        return self.head * g + lax.rem(step, g), lax.div(step, g)


def _load(block: KeyBlock) -> None:
    """Runs the loading warpgroup: q, its row values and tokens, and dout of each step."""
    # where the queries of a step are: a query head, and block_q rows
    plgpu.set_max_registers(mosaic_gpu.LOAD_REGISTERS, action="decrease")
    bounds, refs, shared, bq = block.bounds(), block.refs, block.shared, block.tiling.block_q

    def turn(step: Any) -> tuple[Any, Any]:
        n, t = block.at(step)
        return n, pl.ds(bounds.tile(t) * bq, bq)

    # a ring for what s needs, and one for dout: their slots come free at different times
    def q_and_row_values(step):
        n, span = turn(step)
        tokens = [getattr(refs, name) for name in shared.token_tiles]
        return [
            refs.q.at[block.b, span, n],
            block.saved.rows.at[block.b, n, :, span],
            *(x.at[kernel_inputs.at(x, 0, block.b), span] for x in tokens),
        ]

    def dout(step):
        n, span = turn(step)
        return [block.saved.dout.at[block.b, span, n]]

    q_targets = [shared.q_tiles, shared.row_tiles, *shared.token_tiles.values()]
    rings = [
        (q_and_row_values, q_targets, shared.q_loaded, shared.q_free),
        (dout, [shared.dout_tiles], shared.dout_loaded, shared.dout_free),
    ]
    mosaic_gpu.stream(block.steps(bounds), block.tiling.stages, rings)


def default_tiling(options: KernelOptions, saved: Saved) -> Tiling:
    """Picks the tiles of all kernels by key: block_k keys a warpgroup, steps of block_q rows."""
    if saved.head > 128:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    # what a row of scores takes registers for, beside them
    planes = sum(x is not None for x in (saved.refs.bias, saved.refs.mask, saved.refs.row_segment)) > 1
    many = saved.has_blocks or sum(max(x.shape[-2:]) > 1 for x in saved.refs.mask_values) > 2
    heavy = options.dropout_rate or options.logits_soft_cap is not None or planes or many
    heavy = heavy or options.score_mod is not None
    if saved.head > 64 and heavy:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    # segments, and what functions are handed, take those that a second product in flight needs at H = 128
    overlap = saved.head <= 64 or (saved.refs.row_segment is None and not saved.refs.mask_values)
    return Tiling(block_q=64, block_k=64, stages=2, overlap=overlap)


def can_fuse(options: KernelOptions, saved: Saved) -> bool:
    """Tells whether the fused kernel can run: registers suffice, and JAX hands it the references it adds to.

    (JAX 0.10 does not; later ones not inside `jax.shard_map`, where references would vary over mesh axes.)
    """
    H, Hv = saved.refs.q.shape[-1], saved.refs.v.shape[-1]
    extras = (saved.refs.dropout_keys, saved.refs.bias, saved.refs.mask, saved.refs.row_position)
    plain = options.logits_soft_cap is options.mask_mod is options.score_mod is None
    plain = plain and extras == (None,) * 4
    fits = H == Hv <= (128 if saved.refs.row_segment is None else 64)
    takes_references = jax.__version_info__ >= (0, 11) and not varying(saved)
    return fits and plain and takes_references


def key_gradients(
    options: KernelOptions, interpret: bool, saved: Saved, wanted: frozenset[str]
) -> dict[str, Any]:
    """Computes the gradients of "key" and "value" in `wanted`: dk [B, S, K, H] and dv [B, S, K, Hv].

    All three with "query": the fused kernel. Sums over queries are float32 [B, heads, sums, S]: "columns",
    of each of the `value_sides` that are 1, beside dk of key heads, or by themselves of query heads; "bias",
    of dlogits, by themselves.
    """
    # tiles, and which tiles of queries see each tile of 2 x block_k keys
    fused = "query" in wanted
    tiling = default_tiling(options, saved)
    wgs, block_k = tiles.COMPUTE_WARPGROUPS, tiling.block_k
    saved = saved.with_bounds(options, tiling.block_q, wgs * block_k, by_key=True)
    (B, S, K, _), dtype = saved.refs.k.shape, saved.refs.q.dtype
    # results by name: of key heads, but for sums that stand alone
    heads = K if wanted & {"key", "value"} else saved.refs.q.shape[2]
    sums = gradients.value_sides(saved.refs).count(1) if "columns" in wanted else 1
    types = {"key": (saved.refs.k.shape, dtype), "value": (saved.refs.v.shape, dtype)}
    types |= dict.fromkeys(("bias", "columns"), ((B, heads, sums, S), jnp.float32))
    names = sorted(wanted - {"query"})
    out_types = [pallas.out_type(*types[name], saved) for name in names]
    # a block for each tile of keys, of each of these heads and batch entry
    run = mosaic_gpu.launch(
        partial(_kernel, options, tiling, names),
        f"attention_d{'_d'.join(sorted(wanted))}",
        interpret=interpret,
        out_type=() if fused else out_types,
        scratch=_scratch(tiling, saved, sums, fused, interpret),
        grid={"k_tile": S // (wgs * block_k), "head": heads, "batch": B},
        warpgroups=wgs + 1,
    )
    if not fused:
        return dict(zip(names, run(saved), strict=True))
    # what blocks add to starts at 0, so the kernel writes into references
    q, k, v = saved.refs[:3]
    zeros = [jnp.zeros_like(q, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)]
    dq, *others = pl.run_state(lambda grads: run(saved, *grads))(zeros)
    return dict(zip(names, others, strict=True)) | {"query": options.scale * dq}


def _kernel(
    options: KernelOptions, tiling: Tiling, names: list[str], saved: Saved, *results: Any, **scratch: Any
) -> None:
    """Runs one block: dk, dv, or sums over queries, of 2 x block_k keys of one head."""
    # where the block is: batch entry, head, and a tile of 2 x block_k keys
    b, head, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    j = lax.axis_index("k_tile")
    groups, key_head = saved.refs.q.shape[2] // saved.refs.k.shape[2], head
    if not {"key", "value"} & {*names}:
        key_head, groups = lax.div(head, jnp.int32(groups)), 1
    block = KeyBlock(options, tiling, names, saved, Shared(**scratch), b, head, key_head, j, groups)
    # the last warpgroup loads, the others compute, block_k keys each
    wgs = tiles.COMPUTE_WARPGROUPS
    pl.when(wg == wgs)(partial(_load, block))
    pl.when(wg < wgs)(partial(_compute, block, wg, results))


def _compute(block: KeyBlock, wg: Any, results: tuple[Any, ...]) -> None:
    """Runs a computing warpgroup: sums over all steps for its block_k keys, and writes them."""
    # k [block_k, H] and v [block_k, Hv] stay in shared memory
    plgpu.set_max_registers(mosaic_gpu.COMPUTE_REGISTERS, action="increase")
    refs, shared, names, bk = block.refs, block.shared, block.names, block.tiling.block_k
    bounds = block.bounds()
    column = (block.j * tiles.COMPUTE_WARPGROUPS + wg) * bk
    keys = (block.b, pl.ds(column, bk), block.key_head)
    plgpu.copy_gmem_to_smem(refs.k.at[keys], shared.k_tile.at[wg], shared.loaded.at[wg])
    plgpu.copy_gmem_to_smem(refs.v.at[keys], shared.v_tile.at[wg], shared.loaded.at[wg])
    plgpu.barrier_wait(shared.loaded.at[wg])
    # over all visited tiles and query heads: dk and dv in accumulators, sums over queries in registers
    dq_ref, *outputs = results if shared.exchange else (None, *results)
    run = partial(_step, block, wg, bounds, column, dq_ref)

    def accumulate(*given):
        by_name = dict(zip(accs, given, strict=True))
        start = [gradients.zeros((bk,), ROWS)] * (shared.sums.shape[1] if len(accs) < len(names) else 0)
        totals = lax.fori_loop(jnp.int32(0), block.steps(bounds), partial(run, by_name), start)
        return {name: acc[...] for name, acc in by_name.items()}, totals

    sizes = {"key": refs.k.shape[-1], "value": refs.v.shape[-1]}
    accs = {name: plgpu.ACC((bk, sizes[name]), jnp.float32) for name in names if name in sizes}
    made, totals = pl.run_scoped(accumulate, *accs.values()) if accs else accumulate()
    # to global memory by way of shared memory, in the places of k and v
    if shared.exchange:  # the other warpgroup may still read this one's keys, whose place dk takes
        mosaic_gpu.meet(shared.exchange["written"])
    for name, result in zip(names, outputs, strict=True):
        if name == "key":
            _write(shared.k_tile.at[wg], made[name] * block.options.scale, result.at[keys])
        elif name == "value":
            _write(shared.v_tile.at[wg], made[name], result.at[keys])
        else:
            for line, total in enumerate(totals):
                at = (block.b, block.head, line, pl.ds(column, bk))
                _write(shared.sums.at[wg, line], total, result.at[at])
    plgpu.wait_smem_to_gmem(0)


def _step(block: KeyBlock, wg, bounds: Any, column, dq_ref, accs: dict[str, Any], step, totals):
    """Adds a tile of queries to `accs`, and to the sums `totals`, which it returns."""
    # where the step is: a slot of the rings, a query head and block_q rows
    shared, names, (bq, bk) = block.shared, block.names, (block.tiling.block_q, block.tiling.block_k)
    slot = lax.rem(step, jnp.int32(block.tiling.stages))
    mine = wg + bounds.opaque_zero() if block.saved.head > 128 or shared.exchange else wg
    n, t = block.at(step)
    row = bounds.tile(t) * bq
    staged = {
        name: partial(mosaic_gpu.load, x.at[slot], layout=COLUMNS) for name, x in shared.token_tiles.items()
    }
    call = (block.options, block.refs)
    tile = Tile(*call, block.b, n, row, column, (bk, bq), transposed=True, staged=staged)
    # q with its row values and tokens, and dout, are there
    plgpu.barrier_wait(shared.q_loaded.at[slot])
    plgpu.barrier_wait(shared.dout_loaded.at[slot])

    # dv += p^T dout (5) as soon as p is known, of those that survive dropout
    def add_dv(p):
        z_p = gradients.survivors(block.options, p, p).astype(block.refs.q.dtype)
        spare = shared.spare and shared.spare.at[0, wg]
        mosaic_gpu.product(accs["value"], z_p, shared.dout_tiles.at[slot], spare)

    # dx^T (10), [block_k, block_q], and what it adds to the sums over queries
    acc = plgpu.ACC((bk, bq), jnp.float32)
    position = _LoopPosition(bounds, t, tile, mine, slot)
    dx, added = pl.run_scoped(partial(_dx, block, position, add_dv if "value" in names else None), acc, acc)
    totals = [total + x.sum(axis=1) for total, x in zip(totals, added, strict=True)]
    if not accs:
        plgpu.commit_smem()  # no product comes between reading the row values and their next load
    # dk += dx^T q (11); the fused kernel adds dx k to dq in the meantime
    if "key" in names:
        dx = dx.astype(block.refs.q.dtype)
        spare = shared.spare and shared.spare.at[1, wg]
        mosaic_gpu.product(accs["key"], dx, shared.q_tiles.at[slot], spare)
        if shared.exchange:
            there = dq_ref.at[block.b, :, n]
            _add_dq(dx, shared.k_tile, there, row, step, spare is not None, **shared.exchange)
        elif "value" in names:
            plgpu.wgmma_wait(1)  # all but the product just started: dout has been read
    # slots are free when products have read them: first that of dout, then that of q
    if names == ["value"]:
        plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.dout_free.at[slot])
    if "key" in names:
        plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.q_free.at[slot])
    return totals


class _LoopPosition(NamedTuple):
    """Where a computing warpgroup is in its loop."""

    bounds: Any
    t: Any  # their step
    tile: Tile
    mine: Any  # slot of its k and v in shared memory
    slot: Any  # slot of q and dout


def _dx(
    block: KeyBlock,
    position: _LoopPosition,
    add_dv: Callable[[jax.Array], None] | None,
    s_acc: Any,
    dp_acc: Any,
) -> tuple[jax.Array | None, list[jax.Array]]:
    """Returns (dx of a tile, for a bias without the slope of the soft cap; what it adds to the sums).

    Hands p to `add_dv`, if that is given, as soon as p is known; no dx if dv alone is asked for.
    """
    # s^T = k q^T, [block_k, block_q]; dp^T = v dout^T beside it where registers hold both
    shared, names, saved = block.shared, block.names, block.saved
    bounds, t, tile, mine, slot = position
    keys, values = shared.k_tile.at[mine], shared.v_tile.at[mine]
    queries, dout = shared.q_tiles.at[slot].T, shared.dout_tiles.at[slot].T
    plgpu.wgmma(s_acc, keys, queries)
    early = block.tiling.overlap and names != ["value"]  # dp is computed together with s
    if early:
        plgpu.wgmma(dp_acc, values, dout)
    # p (2), negative where dropout drops it; lse, delta and rounding are loaded where they are needed
    rows = [
        partial(mosaic_gpu.load, shared.row_tiles.at[slot, r], layout=COLUMNS)
        for r in range(saved.rows.shape[2])
    ]
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=int(early))
    side = 1 if "columns" in names else None
    how = {"of_bias": "bias" in names, "to_values": side is not None}
    found = gradients.weights(tile, s, bounds.mixed(t), rows, **how)
    p = gradients.signed(tile, found.p)
    if add_dv is not None:
        add_dv(p)
    if names == ["value"]:
        return None, []
    # p times the slope that dlogits have anyway; dp^T only now where registers do not hold both
    p = found._replace(p=p).with_slope()
    if not early:
        plgpu.wgmma(dp_acc, values, dout)
    in_flight = int(early and add_dv is not None)  # the product for dv started after that for dp
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=in_flight)
    # dlogits (8), and back through the score (8a) and the soft cap (10)
    dlogits = gradients.dlogits(tile, p, dp, rows)
    dx, dvalues = gradients.through_score(tile, found, dlogits, side)
    return dx, [dx] if "bias" in names else dvalues


def _write(there: Any, total: jax.Array, result: Any) -> None:
    """Starts the copy of a warpgroup's sum to its place in global memory, by way of shared memory."""
    there[...] = total.astype(there.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(there, result)


def _add_dq(dx, k_tile, dq_ref, row, step, interpret, *, dx_tiles, dq_tile, written):
    """Adds dx k of a tile of queries and all keys of the block to dq `[T, H]` in global memory.

    The warpgroups exchange their dx^T through shared memory, and each takes half of the columns of dq. There
    are two buffers, since a warpgroup may be one step ahead of the other's reads.
    """
    # both warpgroups' dx^T, [block_k, block_q] each, where both can read it
    wg, (wgs, bq, width) = lax.axis_index("wg"), dq_tile.shape
    dx_tiles = dx_tiles.at[lax.rem(step, jnp.int32(2))]
    dx_tiles[wg] = dx
    plgpu.commit_smem()
    mosaic_gpu.meet(written)
    # dx k over all 2 x block_k keys, [block_q, H / 2]
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
    # added to global memory by TMA, when the share of the step before has been read
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    dq_tile[wg] = dq
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(dq_tile.at[wg], dq_ref.at[here], reduction_op="add")
