"""Hopper backward of dense attention (Pallas Mosaic GPU): the equations are those of `backward.py`.

Products per tile, with dx = dlogits (8) after the soft cap (10):

    dq kernel        s = q k^T,   dp = dout v^T,    dq += dx k                      (11)
    dk, dv kernel    s^T = k q^T, dp^T = v dout^T,  dv += p^T dout (5), dk += dx^T q (11)

The second holds tiles transposed, so that p^T and dx^T are the left factors of its products straight from
registers. It sums the query heads of a group in its accumulators. So the pair needs seven products and no
workspace beyond lse and delta, adds in one order, and gives the same bits every time. With
`deterministic=False` one fused kernel needs five products: it also adds dx k into a float32 dq in global
memory (TMA reduce-add), in whatever order the blocks come by.

A bias that broadcasts over queries gets its gradient as row sums of dx^T in the dk, dv kernel, one that
broadcasts over keys as row sums in the dq kernel, one with both axes from a kernel of its own that loops
over the batch entries and heads it broadcasts over: never more than the gradient itself is stored.

References:
  Shah et al., FlashAttention-3, 2024, arXiv:2407.08608.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import dropout, mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, WGMMA
from jax_attn_bwd._core.numerics import reduce_to, to_rank
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.dot_product import mosaic_gpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.mosaic_gpu_tiles import LOG2_E, Bounds, Inputs, Tile, Tiling
from jax_attn_bwd.ops.dot_product.spec import (
    DotProductAttentionGrads,
    Operands,
    Options,
    Residuals,
)


class Saved(NamedTuple):
    """What every backward kernel reads; padded rows have lse = inf, which makes their p 0."""

    refs: Inputs
    dout: Any  # [B, T, N, Hv]
    rows: Any  # float32 [B, N, 2|3, T]: lse in units of the exponent, delta, low with a bias

    def bounded(self, options: Options, rows: int, columns: int, by_key: bool = False) -> "Saved":
        """With the bounds of a kernel's tiles."""
        found = tiles.bounds(options, self.refs, rows, columns, by_key)
        return pallas.vary_alike(self._replace(refs=self.refs._replace(bounds=found)))

    def row_loaders(self, tile: Tile) -> list[Any]:
        """Functions that load lse, delta, low of a tile's queries."""
        rows = self.rows.at[tile.b, tile.n]
        return [partial(tile.vector, rows.at[i], 0) for i in range(self.rows.shape[2])]

    @property
    def head(self) -> int:
        """The larger head size."""
        return max(self.refs.q.shape[-1], self.refs.v.shape[-1])


def query_tiling(options: Options, saved: Saved) -> Tiling:
    """Of the dq kernel and that of a full bias: block_q rows a warpgroup, steps of block_k keys."""
    if saved.head > 128:
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    if options.dropout_rate and saved.head > 64:
        return Tiling(block_q=64, block_k=32, stages=2, overlap=False)
    wide = saved.head <= 64 and not options.dropout_rate and saved.refs.bias is None
    return Tiling(block_q=64, block_k=128 if wide else 64, stages=2)


def key_tiling(options: Options, saved: Saved) -> Tiling:
    """Of the dk, dv kernel and the fused one: block_k keys a warpgroup, steps of block_q rows."""
    if saved.head > 128:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    if saved.head > 64 and options.dropout_rate:
        return Tiling(block_q=32, block_k=64, stages=2, overlap=False)
    # segments take registers that a second product in flight needs at H = 128
    overlap = saved.head <= 64 or saved.refs.row_segment is None
    return Tiling(block_q=64, block_k=64, stages=2, overlap=overlap)


def _can_fuse(options: Options, saved: Saved) -> bool:
    """Whether registers hold what the fused kernel needs."""
    H, Hv = saved.refs.q.shape[-1], saved.refs.v.shape[-1]
    extras = (saved.refs.dropout_keys, saved.refs.bias, saved.refs.mask, saved.refs.row_position)
    return H == Hv <= 128 and options.logits_soft_cap is None and extras == (None,) * 4


def backward(
    options: Options, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    run = partial(_backward, options, pallas.is_interpreted(mosaic_gpu.NAME))
    return pallas.on_local_shards(run, _out_specs, (residuals, dout, dlse))


def _out_specs(residuals: Residuals, *_: Any) -> DotProductAttentionGrads:
    specs = residuals.operands._asdict()
    return DotProductAttentionGrads(**{name: specs[name] for name in residuals.wanted.names})


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout, dlse):
    operands, wanted = residuals.operands, residuals.wanted.names
    (*batch, T, N, H), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    Hv = operands.value.shape[-1]
    saved, dsink = _prepare(options, residuals, dout, dlse)
    made = {}
    qkv = wanted & {"query", "key", "value"}
    if not options.deterministic and len(qkv) == 3 and _can_fuse(options, saved):
        made = keys(options, interpret, saved, qkv)
    else:
        if "query" in qkv:
            made["query"] = queries(options, interpret, saved)["query"]
        rest = qkv - {"query"}
        # the accumulators of dk and dv fit the registers together up to H = 128
        for names in [rest] if saved.head <= 128 else [frozenset({name}) for name in rest]:
            made |= keys(options, interpret, saved, names) if names else {}

    grads = {}
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv)}
    for name, x in made.items():
        n, heads, h = shapes[name]
        grads[name] = x[:, :n, :, :h].reshape(*batch, n, heads, h)
    if "bias" in wanted:
        grads["bias"] = _bias_gradient(options, interpret, saved, operands)
    if "sink" in wanted:
        grads["sink"] = dsink
    return DotProductAttentionGrads(
        **{name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}
    )


def _prepare(options, residuals, dout, dlse) -> tuple[Saved, jax.Array | None]:
    """The inputs of the kernels, and the gradient of the sink."""
    operands, (out, lse, low) = residuals.operands, residuals.result
    batch, dtype = operands.query.shape[:-3], lse.dtype
    dout = jnp.zeros_like(out) if dout is None else dout
    floor = jnp.full((1,) * lse.ndim, -jnp.inf, dtype)
    if operands.sink is not None:
        floor = to_rank(operands.sink.astype(dtype), lse.ndim)
    # A row that attends to nothing has lse = sink and out = 0; q and dout may hold anything there.
    empty = (lse == floor) & (out == 0).all(-1)
    dout = jnp.where(empty[..., None], 0, dout)
    operands = operands._replace(query=jnp.where(empty[..., None], 0, operands.query))
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(-1)  # (7)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0, dlse)
    low = jnp.zeros_like(lse) if low is None else low
    dsink = None
    if "sink" in residuals.wanted.names:
        p_sink = jnp.exp((floor - jnp.where(lse == -jnp.inf, jnp.inf, lse)) - low)
        dsink = reduce_to(-p_sink * delta, operands.sink.shape)  # (9)

    def merged(x):
        return x.reshape(math.prod(batch), *x.shape[len(batch) :])

    def row(x, fill=0.0):
        return tiles.pad(
            jnp.swapaxes(merged(x), -1, -2), {-1: tiles.LENGTH}, constant_values=fill
        )

    refs = tiles.inputs(options, operands)
    plain = tiles.is_plain(options, refs)
    lse = jnp.where(empty, jnp.inf, lse * LOG2_E if plain else lse)
    rows = [row(lse, jnp.inf), row(delta)] + ([] if refs.bias is None else [row(low)])
    return Saved(refs, tiles.pad_heads(merged(dout)), jnp.stack(rows, -2)), dsink


def _bias_gradient(options, interpret, saved: Saved, operands: Operands) -> jax.Array:
    """float32, of the shape of the bias: never more than that is stored."""
    (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
    shape = (1,) * (len(batch) + 3 - operands.bias.ndim) + operands.bias.shape
    if shape[-2] != 1 and shape[-1] != 1:
        dbias = plane_bias(options, interpret, saved)[..., :T, :S]
        heads = dbias.shape[1]
    elif shape[-1] != 1:
        dbias = keys(options, interpret, saved, frozenset({"bias"}))["bias"][..., None, :S]
        heads = N
    else:
        dbias = queries(options, interpret, saved, bias=True)["bias"][..., :T, None]
        heads = N
    lead = batch if dbias.shape[0] != 1 or math.prod(batch) == 1 else (1,) * len(batch)
    return reduce_to(dbias.reshape(*lead, heads, *dbias.shape[-2:]), operands.bias.shape)


# --- what the kernels share ---------------------------------------------------------------------------


def _probabilities(options, refs: Inputs, products, tile: Tile, mixed, rows):
    """(p (2), slope of the soft cap (10)) from products q k^T; `rows` load lse, delta and low."""
    x, factor, tanh = tiles.logits(options, refs, products, tile, mixed)
    lse = tile.spread(rows[0](), 0)
    if tiles.is_plain(options, refs):
        return jnp.exp2(x * factor - lse), None
    x = x - lse if len(rows) < 3 else (x - lse) - tile.spread(rows[2](), 0)
    return jnp.exp2(x * LOG2_E), None if tanh is None else 1.0 - tanh * tanh


def _signed(options, refs: Inputs, p, tile: Tile):
    """P, negative where dropout drops it: that takes no registers for a mask."""
    kept = tiles.keep(options, refs, tile)
    return p if kept is None else jnp.where(kept, p, -p)


def _survivors(options, p, x):
    """`x` where signed p survives dropout, times the factor of survivors."""
    if not options.dropout_rate:
        return x
    return jnp.where(p > 0.0, x * dropout.survivor_factor(options.dropout_rate), 0.0)


def _dlogits(options, p, dp, tile: Tile, rows):
    """(8), from signed p; times the slope of the soft cap if that is in p already."""
    dp = _survivors(options, p, dp) - tile.spread(rows[1](), 0)
    return (jnp.abs(p) if options.dropout_rate else p) * dp


def _zeros(shape, layout):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


# --- dq, and the gradient of a bias that broadcasts over keys -------------------------------------------


def queries(options: Options, interpret: bool, saved: Saved, bias: bool = False) -> dict[str, Any]:
    """{"query": dq [B, T, N, H]}, or with `bias` {"bias": row sums of dlogits, float32 [B, N, T]}."""
    tiling = query_tiling(options, saved)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, wgs * bq, bk)
    (B, T, N, H), Hv, dtype = saved.refs.q.shape, saved.refs.v.shape[-1], saved.refs.q.dtype
    ring = partial(plgpu.Barrier, num_barriers=stages)
    tile = partial(mosaic_gpu.tile, swizzle=tiling.swizzle)
    scratch = dict(
        q_tile=tile((wgs, bq, H), dtype),
        dout_tile=tile((wgs, bq, Hv), dtype),
        k_tiles=tile((stages, bk, H), dtype),
        v_tiles=tile((stages, bk, Hv), dtype),
        sums=plgpu.SMEM((wgs, bq), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
        k_loaded=ring(), v_loaded=ring(),
        k_free=ring(num_arrivals=wgs), v_free=ring(num_arrivals=wgs),
    )  # fmt: skip
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
        plgpu.set_max_registers(24, action="decrease")
        bounds = load_bounds()
        head = lax.div(n, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))

        def block(ref):
            return lambda step: [ref.at[b, pl.ds((bounds.first + step) * bk, bk), head]]

        mosaic_gpu.stream(bounds.end - bounds.first, stages, [
            (block(refs.k), [k_tiles], k_loaded, k_free),
            (block(refs.v), [v_tiles], v_loaded, v_free),
        ])  # fmt: skip

    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        bounds = load_bounds()
        count = bounds.end - bounds.first
        row = (i * wgs + wg) * bq
        here = (b, pl.ds(row, bq), n)
        plgpu.copy_gmem_to_smem(refs.q.at[here], q_tile.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(saved.dout.at[here], dout_tile.at[wg], loaded.at[wg])
        place = Tile(b, n, row, jnp.int32(0), (bq, bk))
        rows = [lambda x=load(): x for load in saved.row_loaders(place)]
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
                p, slope = _probabilities(options, refs, s, tile, mixed, rows)
                if slope is not None and not bias:
                    p = p * slope
                p = _signed(options, refs, p, tile)
                if not tiling.overlap:
                    plgpu.wgmma(dp_acc, dout_tile.at[mine], v_tiles.at[slot].T)
                return p, dp_acc[...]

            acc = plgpu.ACC((bq, bk), jnp.float32)
            p, dp = pl.run_scoped(products, acc, acc)
            plgpu.barrier_arrive(v_free.at[slot])
            dlogits = _dlogits(options, p, dp, tile, rows)
            if bias:
                plgpu.barrier_arrive(k_free.at[slot])
                return total + dlogits.sum(axis=1)
            dx = dlogits.astype(refs.q.dtype)
            mosaic_gpu.product(dq_acc, dx, k_tiles.at[slot], spare and spare.at[wg])  # (11)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_free.at[slot])
            return total

        start = _zeros((bq,), ROWS) if bias else ()
        if bias:
            total = lax.fori_loop(
                jnp.int32(0), count, lambda t, total: step(t, total, None), start
            )
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


# --- dk and dv, and the gradient of a bias that broadcasts over queries ---------------------------------


def keys(
    options: Options, interpret: bool, saved: Saved, wanted: frozenset[str]
) -> dict[str, Any]:
    """Of "key" and "value", those in `wanted`: [B, S, K, H] and [B, S, K, Hv].

    All three with "query": the fused kernel. "bias" alone: column sums of dlogits, float32 [B, N, S].
    """
    fused = "query" in wanted
    tiling = key_tiling(options, saved)
    if fused and saved.head <= 64:
        tiling = dataclasses.replace(tiling, block_q=128, overlap=False)
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
    tile = partial(mosaic_gpu.tile, swizzle=tiling.swizzle)
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
            dq_tile=mosaic_gpu.tile((wgs, 64, 64), jnp.float32),
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
    zeros = [jnp.zeros_like(saved.refs.q, jnp.float32), *map(jnp.zeros_like, out_types)]
    dq, *made = pl.run_state(lambda grads: run(saved, *grads))(zeros)  # what is added to starts at 0
    return dict(zip(names, made, strict=True)) | {"query": options.scale * dq}


def _keys_kernel(
    options: Options, tiling: Tiling, names: list[str], saved: Saved, *results,
    k_tile, v_tile, q_tiles, dout_tiles, row_tiles, token_tiles, sums,
    loaded, q_loaded, dout_loaded, q_free, dout_free, exchange=None, spare=None,
):  # fmt: skip
    dq_ref, *results = results if exchange else (None, *results)
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
                name: partial(plgpu.load, x.at[slot], layout=COLUMNS)
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
                    partial(plgpu.load, row_tiles.at[slot, r], layout=COLUMNS)
                    for r in range(saved.rows.shape[2])
                ]
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=int(early))
                p, slope = _probabilities(options, refs, s, tile, bounds.mixed(i), rows)
                p = _signed(options, refs, p, tile)
                if "value" in names:  # (5)
                    z_p = _survivors(options, p, p).astype(refs.q.dtype)
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
                return _dlogits(options, p, dp, tile, rows)

            acc = plgpu.ACC((bk, bq), jnp.float32)
            dlogits = pl.run_scoped(products, acc, acc)
            if "bias" in names:
                total = total + dlogits.sum(axis=1)
            if "key" in names:  # (11)
                dx = dlogits.astype(refs.q.dtype)
                mosaic_gpu.product(accs["key"], dx, q_tiles.at[slot], spare and spare.at[1, wg])
                if exchange:
                    _add_dq(dx, k_tile, dq_ref.at[b, :, n], i * bq, t, spare is not None, **exchange)
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
            start = _zeros((bk,), ROWS) if "bias" in names else ()
            count = (bounds.end - bounds.first) * groups
            total = lax.fori_loop(
                jnp.int32(0), count, lambda t, total: step(t, total, accs), start
            )
            return [total] if "bias" in names else [accs[name][...] for name in names]

        sizes = {"key": refs.k.shape[-1], "value": refs.v.shape[-1]}
        accs = [plgpu.ACC((bk, sizes[n]), jnp.float32) for n in names if n != "bias"]
        totals = pl.run_scoped(accumulate, *accs) if accs else accumulate()
        for name, total, result in zip(names, totals, results, strict=True):
            target = {"key": k_tile, "value": v_tile, "bias": sums}[name].at[wg]
            total = total * options.scale if name == "key" else total
            target[...] = total.astype(target.dtype)
            plgpu.commit_smem()
            place = (b, head, pl.ds(column, bk)) if name == "bias" else here
            plgpu.copy_smem_to_gmem(target, result.at[place])
        plgpu.wait_smem_to_gmem(0)


def _add_dq(dx, k_tile, dq_ref, row, step, interpret, *, dx_tiles, dq_tile, written):
    """Adds dx k of a tile of queries and all keys of the block to dq `[T, H]` in global memory.

    The warpgroups exchange their dx^T through shared memory; each then takes half of the rows of dq, or of
    its columns: 64 x 64. Two buffers, since a warpgroup may be one step ahead of the other's reads.
    """
    wg, (wgs, bk, H), (*_, bq) = lax.axis_index("wg"), k_tile.shape, dx_tiles.shape
    dx_tiles = dx_tiles.at[lax.rem(step, jnp.int32(2))]
    dx_tiles[wg] = dx
    plgpu.commit_smem()
    mosaic_gpu.meet(written)
    half = pl.ds(pl.multiple_of(wg * 64, 64), 64)
    rows, columns = (half, slice(None)) if bq == 128 else (slice(None), half)

    def product(acc):
        for other in range(wgs):
            plgpu.wgmma(acc, dx_tiles.at[other, :, rows].T, k_tile.at[other, :, columns])
        return acc[...]

    dq = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
    here = (pl.ds(row + wg * 64, 64), slice(None)) if bq == 128 else (pl.ds(row, 64), half)
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


# --- the gradient of a bias with both axes ---------------------------------------------------------------


def plane_bias(options: Options, interpret: bool, saved: Saved) -> jax.Array:
    """Dlogits summed over the batch entries and heads that the bias broadcasts over, float32.

    `[B|1, N|1, T, S]`, as the bias. A block owns one tile and visits its (batch, head) pairs in turn.
    """
    tiling = query_tiling(options, saved)
    if saved.head > 128:
        tiling = dataclasses.replace(tiling, stages=1)
    bq, bk, stages = tiling.block_q, tiling.block_k, tiling.stages
    wgs = tiles.COMPUTE_WARPGROUPS
    saved = saved.bounded(options, wgs * bq, bk)
    (_, T, _, H), (_, S, _, Hv) = saved.refs.q.shape, saved.refs.v.shape
    B, N, _, _ = saved.refs.bias.shape
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
    return mosaic_gpu.launch(
        partial(_plane_bias_kernel, options, tiling),
        "attention_dbias",
        interpret=interpret,
        out_type=pallas.out_type((B, N, T, S), jnp.float32, saved),
        scratch=scratch,
        grid={"k_tile": S // bk, "q_tile": T // (wgs * bq), "entry": B * N},
        warpgroups=wgs + 1,
    )(saved)


def _plane_bias_kernel(
    options: Options, tiling: Tiling, saved: Saved, result,
    q_tiles, dout_tiles, k_tiles, v_tiles, total_tile, loaded, free,
):  # fmt: skip
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
        plgpu.set_max_registers(24, action="decrease")

        def sources(step):
            b, n = pair(step)
            kv = lax.div(n, jnp.int32(N // refs.k.shape[2]))
            rows, columns = pl.ds(i * (wgs * bq), wgs * bq), pl.ds(j * bk, bk)
            return [
                refs.q.at[b, rows, n], saved.dout.at[b, rows, n],
                refs.k.at[b, columns, kv], refs.v.at[b, columns, kv],
            ]  # fmt: skip

        mosaic_gpu.stream(
            count, stages, [(sources, [q_tiles, dout_tiles, k_tiles, v_tiles], loaded, free)]
        )

    @pl.when(wg < wgs)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
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
            p, _ = _probabilities(options, refs, s, tile, mixed, rows)
            return total + _dlogits(options, _signed(options, refs, p, tile), dp, tile, rows)

        total = lax.fori_loop(jnp.int32(0), count, step, _zeros((bq, bk), WGMMA))
        total_tile[wg] = total
        plgpu.commit_smem()
        place = (*own, pl.ds(row, bq), pl.ds(j * bk, bk))
        plgpu.copy_smem_to_gmem(total_tile.at[wg], result.at[place])
        plgpu.wait_smem_to_gmem(0)
