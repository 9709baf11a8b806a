"""TPU backward of dense attention (Pallas Mosaic TPU); equation numbers are those of `backward.py`.

XLA computes delta (7) and the gradient of the sink (9); the rest are two kernels. Everything is added in one
order and gives the same bits every time.

`gradients`: dq, dk and dv in five products a tile; row and column sums of dlogits, which are the gradients
of a bias that broadcasts, and sums of what `score_mod` adds for rows, columns and distances. Scores are held
transposed, keys by queries: then lse and delta, one number a query along the lanes, broadcast for free, and
dv and dk are plain products. A tile of keys keeps its dk and dv while the kernel visits the tiles of queries
that see it, for each query head of the group in turn. dq of all queries of the group stays in vector memory
from the first step of a key head to its last; where that is too much, the queries are cut into chunks, a
call for each, whose dk and dv are added.

`bias_gradient`: of a bias with both a query and a key axis. A step holds one tile of the gradient, for one of
the batch entries and heads that the bias broadcasts over: these are the last axis of the grid, so that a tile
is summed in vector memory and written once.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import dropout, mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import (
    PlaneSides,
    Schedule,
    Step,
    TilePart,
    Tiling,
    every_tile,
    product,
    schedule,
)
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, KernelOptions, Operands, Residuals

RESIDENT = 24 * 2**20  # bytes of vector memory for dq: an accumulator and two copies on their way out


def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    options = KernelOptions.of(plan.options, residuals.operands.mask)
    run = partial(_backward, options, pallas.is_interpreted(mosaic_tpu.NAME))
    keys = kernel_inputs.dropout_keys(options, residuals.operands)
    residuals = residuals._replace(operands=functions.with_numbers(residuals.operands))
    out_specs = kernel_inputs.out_specs(residuals)
    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, out_specs, given))
    return call(residuals, dout, dlse, keys)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout, dlse, keys):
    # lse, delta, q and dout of each query, and the gradient of the sink
    operands, wanted = residuals.operands, residuals.wanted.names
    values = kernel_inputs.row_values(options, residuals, dout, dlse)
    operands = operands._replace(query=values.query)
    # a bias that lacks an axis is summed beside dq, dk and dv, a full one by itself
    side = None
    if operands.bias is not None:
        side = tiles.plane_side(jax.ShapeDtypeStruct((1, 1, *operands.bias.shape)[-2:], jnp.float32))
    made = wanted & {"query", "key", "value", "mod_args"}
    if "bias" in wanted and side is not None:
        made |= {"bias"}
    grads = {}
    if made:
        grads = gradients(options, interpret, operands, keys, values, made)
    if "bias" in wanted and side is None:
        grads["bias"] = bias_gradient(options, interpret, operands, keys, values)
    if "bias" in wanted:
        grads["bias"] = kernel_inputs.bias_gradient(grads["bias"], operands)
    if "sink" in wanted:
        grads["sink"] = values.dsink
    return kernel_inputs.matched(residuals.operands, grads)


class Saved(NamedTuple):
    """The arrays that the backward kernels read, in kernel layout."""

    refs: Inputs
    dout: Any  # [B, N, T, Hv]
    rows: Any  # float32 [B, N, 2|3, T]: lse in units of the exponent, delta, rounding where it is kept


def _prepare(options: KernelOptions, operands: Operands, keys: Any, values: Any, tiling: Tiling):
    """Prepares (the options of kernels, `Saved`, its `Flags`, `PlaneSides`); `values`: of `row_values`."""
    # inputs in whole tiles, and what is known of each tile
    refs = kernel_inputs.inputs(options, operands, keys, tiling.padding)
    options = functions.on_values(options, operands)
    flags = tile_flags(options, refs, tiling.block_q, tiling.block_k)
    sides = PlaneSides.of(refs)
    # as kernels read them: heads before the sequence, one value a token along lanes
    rows, dout = kernel_inputs.saved_rows(options, refs, values, tiling.padding)
    dout = jnp.swapaxes(dout, 1, 2)
    refs = tiles.lay_inputs(options, refs, tiling)
    return options, Saved(refs, dout, jnp.stack(rows, -2)), flags, sides


def _cut(saved: Saved, sides: PlaneSides, where: slice, tiling: Tiling) -> Saved:
    """Cuts out the queries that lie in the tiles `where`."""
    # of each field what belongs to these queries; keys are those of all
    rows = slice(where.start * tiling.block_q, where.stop * tiling.block_q)
    refs, fields = saved.refs, {"q": saved.refs.q[:, :, rows]}
    for name, of_key in tiles.TOKENS.items():
        if not of_key and (x := getattr(refs, name)) is not None:
            fields[name] = x[..., rows]
    for name, side in (("bias", sides.bias), ("mask", sides.mask)):
        if (x := getattr(refs, name)) is not None and side != 1:
            fields[name] = x[:, :, rows] if side is None else x[..., rows]
    for name in tiles.VALUES:
        pairs = zip(getattr(refs, name), getattr(sides, name), strict=True)
        fields[name] = tuple(_cut_value(x, side, where, tiling, refs.q.shape[2]) for x, side in pairs)
    return Saved(refs._replace(**fields), saved.dout[:, :, rows], saved.rows[..., rows])


def _cut_value(x: Any, side: int | None, where: slice, tiling: Tiling, T: int) -> Any:
    """Cuts out what belongs to these queries from a value of T queries, or of all keys."""
    if side == distances.SIDE:
        return distances.cut(x, where, tiling, T)
    if side == blocks.SIDE:
        return x.cut(slice(where.start * tiling.block_q, where.stop * tiling.block_q))
    return x[..., where.start * tiling.block_q : where.stop * tiling.block_q] if side == 0 else x


def _probabilities_and_dlogits(part: TilePart, rows, products, dp, mixed: bool, to_values: bool = False):
    """Computes (p with dropout applied (5), dlogits (8a), dx (10), dvalues) of a part.

    Without `dp` p alone. `rows` is the block `[2|3, n]` of `Saved.rows`; dvalues has, with `to_values`, what
    each element adds to the gradients of the floats that the score is handed (8a), else nothing.
    """
    # p = exp(logits - lse) (2), with the rounding of lse
    options = part.options
    lse, delta, *rounding = (part.vector(rows[i : i + 1, :], 0) for i in range(rows.shape[0]))
    logits = part.logits(products, mixed)
    p = logits.exp(lse, (lambda: rounding[0]) if rounding else None)
    if logits.before is not None:  # a score may be NaN in rows of padding
        p = jnp.where(lse == jnp.inf, 0.0, p)
    # what dropout lets pass is all that values are multiplied by (5), and all that dp counts (6)
    kept, z_p = part.keep(), p
    if kept is not None:
        survivors = dropout.survivor_factor(options.dropout_rate)
        z_p = jnp.where(kept, p * survivors, 0.0)
    if dp is None:
        return z_p, None, None, []
    if kept is not None:
        dp = jnp.where(kept, dp * survivors, 0.0)
    # dlogits (8), back through the score (8a) and the soft cap (10)
    dlogits, dvalues = p * (dp - delta), []
    if logits.before is not None:
        values = part.values("score_values")
        if to_values:  # one for each element
            values = tuple(jnp.broadcast_to(x, part.shape) for x in values)
        given = (options, logits.before, part.place(), values, dlogits, to_values)
        # what is hidden may have no derivative
        dlogits, dvalues = jax.tree.map(
            lambda x: jnp.where(p == 0.0, 0.0, x), functions.on_tile(mod_functions.pulled_back, *given)
        )
    dx = dlogits if logits.tanh is None else dlogits * logits.slope
    return z_p, dlogits, dx, jax.tree.leaves(dvalues)


def default_tiling(options: KernelOptions, operands: Operands) -> Tiling:
    """Picks tiles of the fewest bundles a score; see tests/bench/results/tpu_static.md."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    light, wide = tiles.is_light(options, operands), mosaic_tpu.has_wide_units()
    limit = tiles.longest_side(options, operands) if light else 512
    block_q, block_k = tiles.even_block(T, limit), tiles.even_block(S, limit)
    # more values an element leave fewer registers
    part_q, part_k = ((256, 256) if wide else (1024, 512)) if light else (128, 128)
    parts = tiles.even_part(block_q, part_q), tiles.even_part(block_k, part_k)
    return Tiling(block_q, block_k, *parts, apart=int(light and wide))


def gradients(
    options: KernelOptions, interpret: bool, operands: Operands, keys: Any, values: Any, wanted: frozenset
) -> dict[str, jax.Array]:
    """Computes those in `wanted`: of "query", "key", "value", "mod_args", and a "bias" that lacks an axis."""
    # inputs as kernels read them, and what is known of each tile
    (*batch, T, N, H), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    Hv, tiling, given = operands.value.shape[-1], default_tiling(options, operands), options
    options, saved, flags, sides = _prepare(options, operands, keys, values, tiling)
    # which sums there are beside dq, dk and dv, by name, and the side that each has a value of
    lines, of_args = {} if sides.bias is None else {"bias": sides.bias}, "mod_args" in wanted
    if of_args:
        pairs = zip(saved.refs.score_values, sides.score_values, strict=True)
        floats = [side for x, side in pairs if x.dtype == jnp.float32]
        of_values = {f"score_{i}": side or 0 for i, side in enumerate(floats)}
        lines, wanted = lines | of_values, wanted - {"mod_args"} | of_values.keys()
    by_query = {"query", *(name for name, side in lines.items() if side == 0)}
    # chunks of as many tiles of queries as vector memory holds dq of
    saved = pallas.vary_alike(saved)
    n_q = saved.dout.shape[2] // tiling.block_q
    size = N // K * tiling.block_q * saved.refs.q.shape[-1] * (4 + 2 * operands.query.dtype.itemsize)
    chunk = n_q if not wanted & {"query"} else max(1, min(n_q, RESIDENT // size))
    # a kernel for each, with a schedule of its own
    chunks = []
    for first in range(0, n_q, chunk) if wanted else ():
        where = slice(first, first + chunk)
        visits = schedule(jax.tree.map(lambda x, where=where: x[:, where], flags), by_key=True)
        call = _Call(options, tiling, sides, lines, visits, wanted, first, n_q)
        chunks.append(_chunk(call, interpret, _cut(saved, sides, where, tiling)))
    # chunks side by side where something is by query, added up where it is by key or distance
    made: dict[str, Any] = {}
    for name in sorted(wanted):
        part = [chunk[name] for chunk in chunks]
        made[name] = jnp.concatenate(part, 2) if name in by_query else functools.reduce(jnp.add, part)
    # without padding: dq, dk, dv [..., T|S, N|K, H], sums [B, N, T|1, S|1] or of distances as they are
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv)}
    for name in sorted(wanted - lines.keys()):
        n, heads, h = shapes[name]
        made[name] = jnp.swapaxes(made[name], 1, 2)[:, :n, :, :h].reshape(*batch, n, heads, h)
    for name in sorted(wanted & lines.keys()):
        if lines[name] != distances.SIDE:
            made[name] = made[name][..., None] if name in by_query else made[name][..., None, :]
    if "bias" in made:
        made["bias"] = made["bias"][:, :, :T, :S]
    # from what the score was handed to the arrays that it was read of
    dvalues = [made.pop(name) for name in lines if name != "bias"]
    if of_args:
        made["mod_args"] = kernel_inputs.mod_args_gradient(given, operands, tiling.padding, dvalues)
    return made


@dataclass(frozen=True)
class _Call:
    """The part of a call that is known at trace time."""

    options: KernelOptions
    tiling: Tiling
    sides: PlaneSides
    lines: dict[str, int]  # by name: sums of dlogits, or of dvalues, for a query, key or distance (the side)
    visits: Schedule
    wanted: frozenset
    first: int  # tile of queries of the chunk
    tiles: int  # of queries, of all chunks: dk and dv of several are added

    @property
    def of_distances(self) -> list[str]:
        """Returns the lines that have a sum for each distance."""
        sides = self.lines.items()
        return [name for name, side in sides if side == distances.SIDE and name in self.wanted]


def _chunk(call: _Call, interpret: bool, saved: Saved) -> dict[str, jax.Array]:
    """Computes the gradients of one chunk of queries, in kernel layout."""
    # sizes of the chunk; dk and dv of one of several are float32, since they are added up
    tiling, visits, wanted = call.tiling, call.visits, call.wanted
    refs = saved.refs
    (B, N, T, H), (K, S), Hv = refs.q.shape, refs.k.shape[1:3], refs.v.shape[-1]
    groups, bq, bk = N // K, tiling.block_q, tiling.block_k
    n_q = T // bq
    key_type = jnp.float32 if n_q < call.tiles else refs.k.dtype
    steps = pallas.vary_alike((jnp.asarray(visits.steps), saved))[0]

    def locate(b, k, p, g, steps):
        return Step.at(steps, groups, b, k, g, p)

    spec = tiles.block_specs(locate)

    # results, name: (shape, dtype, spec, accumulator); dq is there whole, for all heads of the group, dk and
    # dv of the tile of keys that is visited
    def whole(dtype, *shape):
        index = lambda s: (s.b, s.k, ZERO, ZERO, ZERO)
        held = pltpu.VMEM((groups, *shape), jnp.float32)
        return (B, N, *shape), dtype, spec((None, groups, *shape), index), held

    def of_keys(h):
        of_tile = spec((None, None, bk, h), lambda s: (s.b, s.k, s.column, ZERO))
        return (B, K, S, h), key_type, of_tile, pltpu.VMEM((bk, h), jnp.float32)

    made = {"query": whole(refs.q.dtype, n_q, bq, H), "key": of_keys(H), "value": of_keys(Hv)}
    # sums by side: of a query whole, of a key for a tile of keys (128 lanes are added up at its end), of a
    # distance whole, as windows
    of_line = {
        0: whole(jnp.float32, n_q, 1, bq),
        1: (
            (B, N, 1, S),
            jnp.float32,
            spec((None, groups, 1, bk), lambda s: (s.b, s.k, ZERO, s.column)),
            pltpu.VMEM((groups, bk, LANES), jnp.float32),
        ),
    }
    if distances.SIDE in call.lines.values():
        shape = (distances.count(tiling, T, S), 1, distances.width(tiling))
        of_line[distances.SIDE] = whole(jnp.float32, *shape)
    made |= {name: of_line[side] for name, side in call.lines.items()}
    # a grid over batch entries, key heads, steps of the schedule, and query heads of the group
    order = [name for name in made if name in wanted]
    values, tree = jax.tree.flatten(refs)
    specs = tiles.input_specs(refs, call.sides, tiling, locate)
    of_dout = spec((None, None, bq, Hv), lambda s: (s.b, s.n, s.row, ZERO))
    of_rows = spec((None, None, saved.rows.shape[2], bq), lambda s: (s.b, s.n, ZERO, s.row))
    results = mosaic_tpu.launch(
        partial(_kernel, call, tree, order, locate, S),
        visits.name("attention_" + "_".join(f"d{name}" for name in sorted(wanted)), tiling),
        interpret=interpret,
        grid=(B, K, visits.length, groups),
        parallel=2,
        prefetched=1,
        in_specs=[*jax.tree.leaves(specs), of_dout, of_rows],
        out_specs=[made[name][2] for name in order],
        out_type=[pallas.out_type(made[name][0], made[name][1], saved) for name in order],
        scratch=[
            *(made[name][3] for name in order),
            *(distances.band(tiling, jnp.float32) for _ in call.of_distances),
            *tiles.bands(refs, call.sides, tiling),
        ],
    )(steps, *values, saved.dout, saved.rows)
    # dq [B, N, T, H], sums [B, N, T|S], of distances [B, N, T + S] of the whole call
    found = dict(zip(order, results, strict=True))
    if "query" in found:
        found["query"] = found["query"].reshape(B, N, T, H)
    for name in found.keys() & call.lines.keys():
        if call.lines[name] == distances.SIDE:
            found[name] = distances.vector(found[name], tiling, call.first, call.tiles * bq + S)
        else:
            found[name] = found[name].reshape(B, N, -1)
    return found


def _kernel(call: _Call, tree, order, locate, keys, steps, *refs) -> None:
    """Runs one step: a tile of keys by a tile of queries of one head of the group."""
    # after the inputs: dout and row values, results, their accumulators, bands for the sums of distances
    tiling, sides = call.tiling, call.sides
    inputs, (dout_ref, rows_ref, *rest), bands = tiles.split_refs(tree, sides, refs)
    count = len(order)
    outputs = dict(zip(order, rest[:count], strict=True))
    sums = dict(zip(order, rest[count : 2 * count], strict=True))
    of_tile = dict(zip(call.of_distances, rest[2 * count :], strict=True))  # their sums over this tile
    # where the step is: the p-th of the schedule, query head g; the first and the last one of a key head
    p, g = pl.program_id(2), pl.program_id(3)
    step = locate(pl.program_id(0), pl.program_id(1), p, g, steps)
    is_start, is_end = ((p == 0) & (g == 0), (p == pl.num_programs(2) - 1) & (g == pl.num_programs(3) - 1))
    # what is summed over the queries that see a tile of keys, and what over all steps of a key head
    by_key = [name for name in order if name in ("key", "value") or call.lines.get(name) == 1]
    whole = [name for name in order if name not in by_key]

    def clear(names):
        for name in names:
            sums[name][...] = jnp.zeros(sums[name].shape, jnp.float32)

    def each_block(run):
        """Calls `run(name, head of the group, block)` for the whole: in loops, or the program would grow."""
        for heads, n in dict.fromkeys(sums[name].shape[:2] for name in whole):
            names = [name for name in whole if sums[name].shape[:2] == (heads, n)]

            def of_all(t, _, n=n, names=names):
                for name in names:
                    run(name, lax.div(t, jnp.int32(n)), lax.rem(t, jnp.int32(n)))

            lax.fori_loop(jnp.int32(0), jnp.int32(heads * n), of_all, None)

    def clear_block(name, head, block):
        sums[name][head, block] = jnp.zeros(sums[name].shape[2:], jnp.float32)

    # a key head begins; a tile of keys begins
    if whole:
        pl.when(is_start)(partial(each_block, clear_block))
    if by_key:
        pl.when(step.first & (g == 0))(partial(clear, by_key))

    # each part of the tile in three stages: its products, its elements, and what they add to every sum
    def visit(mixed):
        given = tiles.spread_bands(inputs, sides, bands, mixed)
        for ref in of_tile.values():
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        parts = [
            TilePart(call.options, given, sides, tiling, step, slices, True, call.first * tiling.block_q)
            for slices in tiling.parts()
        ]
        stages = (
            partial(_products, dout_ref, sums.keys() != {"value"}),
            partial(_elements, rows_ref, mixed, [name for name in order if name in call.lines]),
            partial(_add, dout_ref, sums | of_tile, call.lines, step.row, g),
        )
        tiles.in_stages(parts, stages, tiling.apart)
        # the band of the tile, folded, goes to its window
        for name, ref in of_tile.items():
            sums[name][g, distances.window(step, tiling, keys)] += distances.fold(ref)

    step.each_kind(call.visits, visit)
    scale = call.options.scale

    def write_block(name, head, block):
        total = sums[name][head, block]
        total = scale * total if name == "query" else total
        outputs[name][head, block] = total.astype(outputs[name].dtype)

    # a key head ends: dq, and sums by query and distance
    if whole:
        pl.when(is_end)(partial(each_block, write_block))

    # a tile of keys ends: dk, dv, and sums by key
    @pl.when(step.last & (g == pl.num_programs(3) - 1))
    def _write_by_key():
        for name in by_key:
            out, total = outputs[name], sums[name]
            if name in call.lines:
                for head in range(total.shape[0]):
                    out[head] = mosaic_tpu.lie(total[head].sum(axis=1, keepdims=True))
            else:
                total = scale * total[...] if name == "key" else total[...]
                out[...] = total.astype(out.dtype)


def _products(dout_ref, with_dp: bool, part: TilePart, _: Any) -> tuple:
    """Computes (k q^T, v dout^T or None) of a part, `[keys, queries]`."""
    options, refs = part.options, part.refs
    queries, keys = part.slices
    products = product(options, refs.k[keys, :], refs.q[queries, :], (1, 1))
    if not with_dp:
        return products, None
    return products, product(options, refs.v[keys, :], dout_ref[queries, :], (1, 1))


def _elements(rows_ref, mixed: bool, lines: list[str], part: TilePart, given: tuple) -> tuple:
    """Returns (p, what is summed in `lines`, dx): what is multiplied is in the type of the operands."""
    products, dp = given
    of_scores = [name for name in lines if name != "bias"]
    p, dlogits, dx, dvalues = _probabilities_and_dlogits(
        part, rows_ref, products, dp, mixed, to_values=bool(of_scores)
    )
    dtype = part.refs.q.dtype
    summed = dict(zip(of_scores, dvalues, strict=True)) | ({"bias": dlogits} if "bias" in lines else {})
    return p.astype(dtype), summed, None if dx is None else dx.astype(dtype)


def _add(dout_ref, sums, lines, row, g, part: TilePart, given: tuple) -> None:
    """Adds the share of a part of the tile to every sum."""
    # the blocks of the part: q, dout [queries, H|Hv], k [keys, H]; p and dx are [keys, queries]
    options, refs = part.options, part.refs
    queries, keys = part.slices
    q, k, dout = refs.q[queries, :], refs.k[keys, :], dout_ref[queries, :]
    p, summed, dx = given
    # dv += p^T dout (5)
    if "value" in sums:
        sums["value"][keys, :] += product(options, p, dout)
    # sums along the band's diagonals, over keys, or over queries up to 128 lanes
    for name, x in summed.items():
        if lines[name] == distances.SIDE:
            distances.add(sums[name], x, part.slices, part.tiling)
        elif lines[name] == 0:
            sums[name][g, row, :, queries] += x.sum(axis=0, keepdims=True)
        else:
            sums[name][g, keys, :] += functools.reduce(jnp.add, mosaic_tpu.lane_blocks(x))
    # dk += dx^T q and dq += dx k (11)
    if "key" in sums:
        sums["key"][keys, :] += product(options, dx, q)
    if "query" in sums:
        sums["query"][g, row, queries, :] += product(options, dx, k, (0, 0))


def bias_tiling(operands: Operands) -> Tiling:
    """Picks smaller tiles than elsewhere: that of the gradient is float32."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    block_q, block_k = tiles.even_block(T, 512), tiles.even_block(S, 1024)
    return Tiling(block_q, block_k, tiles.even_part(block_q, 128), tiles.even_part(block_k, 512))


def bias_gradient(
    options: KernelOptions, interpret: bool, operands: Operands, keys: Any, values: Any
) -> jax.Array:
    """Sums dlogits to the full bias, float32 `[B|1, N|1, T, S]`: never more than that is stored."""
    # inputs as kernels read them; every tile has a step, also where nothing is seen: its gradient is 0
    tiling = bias_tiling(operands)
    options, saved, flags, sides = _prepare(options, operands, keys, values, tiling)
    visits = every_tile(flags)
    steps, saved = pallas.vary_alike((jnp.asarray(visits.steps), saved))
    refs = saved.refs
    (B, N, T, _), (K, S) = refs.q.shape, refs.k.shape[1:3]
    # the grid: entries of the bias [B|1, N|1], tiles, and the pairs (batch entry, head) that read the entry
    lead = refs.bias.shape[:2]
    over_batch, over_heads = (n if m == 1 else 1 for n, m in zip((B, N), lead, strict=True))

    def locate(b, n, p, r, steps):
        b, n = b + r // over_heads, n + r % over_heads  # of a sum over either, the other index is 0
        return Step.at(steps, 1, b, n, ZERO, p)._replace(k=n // (N // K))

    spec = tiles.block_specs(locate)
    # a result of float32 tiles, each in vector memory until all its pairs have come by
    bq, bk = tiling.block_q, tiling.block_k
    fields, tree = jax.tree.flatten(refs)
    (dbias,) = mosaic_tpu.launch(
        partial(_bias_kernel, options, tiling, sides, visits, tree, locate),
        visits.name("attention_dbias", tiling),
        interpret=interpret,
        grid=(*lead, visits.length, over_batch * over_heads),
        parallel=2,
        prefetched=1,
        in_specs=[
            *jax.tree.leaves(tiles.input_specs(refs, sides, tiling, locate)),
            spec((None, None, bq, saved.dout.shape[-1]), lambda s: (s.b, s.n, s.row, ZERO)),
            spec((None, None, saved.rows.shape[2], bq), lambda s: (s.b, s.n, ZERO, s.row)),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, bq, bk),
                lambda b, n, p, r, steps: (lambda s: (b, n, s.row, s.column))(locate(b, n, p, r, steps)),
            )
        ],
        out_type=[pallas.out_type((*lead, T, S), jnp.float32, saved)],
        scratch=tiles.bands(refs, sides, tiling),
    )(steps, *fields, saved.dout, saved.rows)
    return dbias[:, :, : operands.query.shape[-3], : operands.key.shape[-3]]


def _bias_kernel(
    options: KernelOptions, tiling: Tiling, sides: PlaneSides, visits: Schedule, tree, locate, steps, *refs
) -> None:
    """Runs one step: a tile of the bias, for one of the pairs that read it."""
    inputs, (dout_ref, rows_ref, dbias_ref), bands = tiles.split_refs(tree, sides, refs)
    step = locate(*(pl.program_id(axis) for axis in range(4)), steps)

    # the first pair
    @pl.when(pl.program_id(3) == 0)
    def _clear():
        dbias_ref[...] = jnp.zeros(dbias_ref.shape, jnp.float32)

    # dlogits (8) of each part, [queries, keys]
    def visit(mixed):
        given = tiles.spread_bands(inputs, sides, bands, mixed)
        for queries, keys in tiling.parts():
            part = TilePart(options, given, sides, tiling, step, (queries, keys))
            q, k, v = inputs.q[queries, :], inputs.k[keys, :], inputs.v[keys, :]
            products = product(options, q, k, (1, 1))
            dp = product(options, dout_ref[queries, :], v, (1, 1))
            _, dlogits, *_ = _probabilities_and_dlogits(part, rows_ref, products, dp, mixed)
            dbias_ref[queries, keys] += dlogits

    step.each_kind(visits, visit)
