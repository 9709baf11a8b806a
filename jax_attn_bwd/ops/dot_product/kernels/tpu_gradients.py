"""One TPU kernel for the gradients of dense attention; equation numbers are those of `backward.py`.

Scores are held transposed, keys by queries: then lse and delta, one number a query along the lanes, broadcast
for free, and dv and dk are plain products. A tile of keys keeps its dk and dv while the kernel visits the
tiles of queries that see it, for each query head of the group in turn. dq of all queries of the group stays
in vector memory from the first step of a key head to its last; where that is too much, the queries are cut
into chunks, a call for each, whose dk and dv are added.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.tpu_part import Part, product
from jax_attn_bwd.ops.dot_product.kernels.tpu_saved import Saved, arithmetic, cut, saved_of
from jax_attn_bwd.ops.dot_product.kernels.tpu_schedule import Schedule, Step, schedule
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import PlaneSides, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands

RESIDENT = 24 * 2**20  # bytes of vector memory for dq: an accumulator and two copies on their way out


def default_tiling(options: KernelOptions, operands: Operands) -> Tiling:
    """Tiles of the fewest bundles a score; see bench/results/tpu_static.md."""
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
    """The gradients of "query", "key", "value" in public layout, "mod_args", a "bias" that lacks an axis."""
    (*batch, T, N, H), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    Hv, tiling, given = operands.value.shape[-1], default_tiling(options, operands), options
    options, saved, flags, sides = saved_of(options, operands, keys, values, tiling)
    lines, of_args = {} if sides.bias is None else {"bias": sides.bias}, "mod_args" in wanted
    if of_args:
        pairs = zip(saved.refs.score_values, sides.score_values, strict=True)
        floats = [side for x, side in pairs if x.dtype == jnp.float32]
        of_values = {f"score_{i}": side or 0 for i, side in enumerate(floats)}
        lines, wanted = lines | of_values, wanted - {"mod_args"} | of_values.keys()
    by_query = {"query", *(name for name, side in lines.items() if side == 0)}
    saved = pallas.vary_alike(saved)
    n_q = saved.dout.shape[2] // tiling.block_q
    size = N // K * tiling.block_q * saved.refs.q.shape[-1] * (4 + 2 * operands.query.dtype.itemsize)
    chunk = n_q if not wanted & {"query"} else max(1, min(n_q, RESIDENT // size))
    pieces = []
    for first in range(0, n_q, chunk) if wanted else ():
        where = slice(first, first + chunk)
        visits = schedule(jax.tree.map(lambda x, where=where: x[:, where], flags), by_key=True)
        call = _Call(options, tiling, sides, lines, visits, wanted, first, n_q)
        pieces.append(_chunk(call, interpret, cut(saved, sides, where, tiling)))
    made: dict[str, Any] = {}
    for name in sorted(wanted):
        part = [piece[name] for piece in pieces]
        made[name] = jnp.concatenate(part, 2) if name in by_query else functools.reduce(jnp.add, part)
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv)}
    for name in sorted(wanted - lines.keys()):
        n, heads, h = shapes[name]
        made[name] = jnp.swapaxes(made[name], 1, 2)[:, :n, :, :h].reshape(*batch, n, heads, h)
    for name in sorted(wanted & lines.keys()):
        if lines[name] != distances.SIDE:
            made[name] = made[name][..., None] if name in by_query else made[name][..., None, :]
    if "bias" in made:
        made["bias"] = made["bias"][:, :, :T, :S]
    dvalues = [made.pop(name) for name in lines if name != "bias"]
    if of_args:
        made["mod_args"] = kernel_inputs.mod_args_gradient(given, operands, tiling.padding, dvalues)
    return made


@dataclass(frozen=True)
class _Call:
    """What is known of a call at trace time."""

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
        """The lines that have a sum for each distance."""
        sides = self.lines.items()
        return [name for name, side in sides if side == distances.SIDE and name in self.wanted]


def _chunk(call: _Call, interpret: bool, saved: Saved) -> dict[str, jax.Array]:
    """The gradients of one chunk of queries, in kernel layout."""
    tiling, visits, wanted = call.tiling, call.visits, call.wanted
    refs = saved.refs
    (B, N, T, H), (K, S), Hv = refs.q.shape, refs.k.shape[1:3], refs.v.shape[-1]
    groups, bq, bk = N // K, tiling.block_q, tiling.block_k
    n_q = T // bq
    key_type = jnp.float32 if n_q < call.tiles else refs.k.dtype
    steps = pallas.vary_alike((jnp.asarray(visits.steps), saved))[0]

    def locate(b, k, p, g, steps):
        return Step.at(steps, groups, b, k, g, p)

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *where: index(locate(*where)))

    made = {  # name: (shape, dtype, spec, accumulators)
        "query": (
            (B, N, n_q, bq, H),
            refs.q.dtype,
            spec((None, groups, n_q, bq, H), lambda s: (s.b, s.k, ZERO, ZERO, ZERO)),
            pltpu.VMEM((groups, n_q, bq, H), jnp.float32),
        ),
        "key": (
            (B, K, S, H),
            key_type,
            spec((None, None, bk, H), lambda s: (s.b, s.k, s.column, ZERO)),
            pltpu.VMEM((bk, H), jnp.float32),
        ),
        "value": (
            (B, K, S, Hv),
            key_type,
            spec((None, None, bk, Hv), lambda s: (s.b, s.k, s.column, ZERO)),
            pltpu.VMEM((bk, Hv), jnp.float32),
        ),
    }
    of_line = {
        0: (
            (B, N, n_q, 1, bq),
            jnp.float32,
            spec((None, groups, n_q, 1, bq), lambda s: (s.b, s.k, ZERO, ZERO, ZERO)),
            pltpu.VMEM((groups, n_q, 1, bq), jnp.float32),
        ),
        1: (
            (B, N, 1, S),
            jnp.float32,
            spec((None, groups, 1, bk), lambda s: (s.b, s.k, ZERO, s.column)),
            pltpu.VMEM((groups, bk, LANES), jnp.float32),
        ),
    }
    if distances.SIDE in call.lines.values():
        shape = (distances.count(tiling, T, S), 1, distances.width(tiling))
        of_line[distances.SIDE] = (
            (B, N, *shape),
            jnp.float32,
            spec((None, groups, *shape), lambda s: (s.b, s.k, ZERO, ZERO, ZERO)),
            pltpu.VMEM((groups, *shape), jnp.float32),
        )
    made |= {name: of_line[side] for name, side in call.lines.items()}
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
    tiling, sides = call.tiling, call.sides
    inputs, (dout_ref, rows_ref, *rest), bands = tiles.gathered(tree, sides, refs)
    count = len(order)
    outputs = dict(zip(order, rest[:count], strict=True))
    sums = dict(zip(order, rest[count : 2 * count], strict=True))
    of_tile = dict(zip(call.of_distances, rest[2 * count :], strict=True))  # their sums over this tile
    p, g = pl.program_id(2), pl.program_id(3)
    step = locate(pl.program_id(0), pl.program_id(1), p, g, steps)
    is_start, is_end = ((p == 0) & (g == 0), (p == pl.num_programs(2) - 1) & (g == pl.num_programs(3) - 1))
    by_key = [name for name in order if name in ("key", "value") or call.lines.get(name) == 1]
    whole = [name for name in order if name not in by_key]

    def clear(names):
        for name in names:
            sums[name][...] = jnp.zeros(sums[name].shape, jnp.float32)

    def each_block(run):
        """`run(name, head of the group, block)` of what is there whole: loops, or the program would grow."""
        for heads, n in dict.fromkeys(sums[name].shape[:2] for name in whole):
            names = [name for name in whole if sums[name].shape[:2] == (heads, n)]

            def of_all(t, _, n=n, names=names):
                for name in names:
                    run(name, lax.div(t, jnp.int32(n)), lax.rem(t, jnp.int32(n)))

            lax.fori_loop(jnp.int32(0), jnp.int32(heads * n), of_all, None)

    def clear_block(name, head, block):
        sums[name][head, block] = jnp.zeros(sums[name].shape[2:], jnp.float32)

    if whole:
        pl.when(is_start)(partial(each_block, clear_block))
    if by_key:
        pl.when(step.first & (g == 0))(partial(clear, by_key))

    def visit(mixed):
        given = tiles.spread(inputs, sides, bands, mixed)
        for ref in of_tile.values():
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        parts = [
            Part(call.options, given, sides, tiling, step, slices, True, call.first * tiling.block_q)
            for slices in tiling.parts()
        ]
        stages = (
            partial(_products, dout_ref, sums.keys() != {"value"}),
            partial(_elements, rows_ref, mixed, [name for name in order if name in call.lines]),
            partial(_add, dout_ref, sums | of_tile, call.lines, step.row, g),
        )
        tiles.in_stages(parts, stages, tiling.apart)
        for name, ref in of_tile.items():
            sums[name][g, distances.window(step, tiling, keys)] += distances.fold(ref)

    step.each_kind(call.visits, visit)
    scale = call.options.scale

    def write_block(name, head, block):
        total = sums[name][head, block]
        total = scale * total if name == "query" else total
        outputs[name][head, block] = total.astype(outputs[name].dtype)

    if whole:
        pl.when(is_end)(partial(each_block, write_block))

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


def _products(dout_ref, with_dp: bool, part: Part, _: Any) -> tuple:
    """(k q^T, v dout^T or None) of a part, `[keys, queries]`."""
    options, refs = part.options, part.refs
    queries, keys = part.slices
    products = product(options, refs.k[keys, :], refs.q[queries, :], (1, 1))
    if not with_dp:
        return products, None
    return products, product(options, refs.v[keys, :], dout_ref[queries, :], (1, 1))


def _elements(rows_ref, mixed: bool, lines: list[str], part: Part, given: tuple) -> tuple:
    """(p, what is summed in `lines`, dx): what is multiplied is in the type of the operands."""
    products, dp = given
    of_scores = [name for name in lines if name != "bias"]
    p, dlogits, dx, dvalues = arithmetic(part, rows_ref, products, dp, mixed, to_values=bool(of_scores))
    dtype = part.refs.q.dtype
    summed = dict(zip(of_scores, dvalues, strict=True)) | ({"bias": dlogits} if "bias" in lines else {})
    return p.astype(dtype), summed, None if dx is None else dx.astype(dtype)


def _add(dout_ref, sums, lines, row, g, part: Part, given: tuple) -> None:
    """Adds the share of a part of the tile to every sum."""
    options, refs = part.options, part.refs
    queries, keys = part.slices
    q, k, dout = refs.q[queries, :], refs.k[keys, :], dout_ref[queries, :]
    p, summed, dx = given
    if "value" in sums:
        sums["value"][keys, :] += product(options, p, dout)  # (5)
    for name, x in summed.items():
        if lines[name] == distances.SIDE:
            distances.add(sums[name], x, part.slices, part.tiling)
        elif lines[name] == 0:
            sums[name][g, row, :, queries] += x.sum(axis=0, keepdims=True)
        else:
            sums[name][g, keys, :] += functools.reduce(jnp.add, mosaic_tpu.lane_blocks(x))
    if "key" in sums:
        sums["key"][keys, :] += product(options, dx, q)  # (11)
    if "query" in sums:
        sums["query"][g, row, queries, :] += product(options, dx, k, (0, 0))  # (11)
