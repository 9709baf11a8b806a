"""TPU forward of dense attention (Pallas Mosaic TPU).

A step holds a tile of queries of one head and a tile of keys, and runs over parts of it in stages, so that
the compiler overlaps the matrix products of some parts with the exponentials of others. Scores are held
transposed, keys by queries, and so are the sums of weighted values: what belongs to a query is one number in
a lane, which broadcasts for free, and a wide matrix unit adds up over 256 keys at once. The softmax is the
online one of `forward.py`, in base 2 with the scale in the exponent; where logits have a bias or a soft cap
the maximum is subtracted first, in natural units, so that huge tied logits stay exact. With
`Plan.keeps_rounding` p is two numbers, its rounding the second, and each is multiplied with v.

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1.
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import dropout, mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import ZERO
from jax_attn_bwd._core.numerics import finite, rounding_between
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.inputs import LN_2, Inputs, is_plain
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import (
    PlaneSides,
    Schedule,
    Step,
    TilePart,
    Tiling,
    product,
    schedule,
)
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Result

supports = tiles.unsupported


def default_tiling(options: KernelOptions, operands: Operands) -> Tiling:
    """Picks tiles of the fewest bundles a score; see tests/bench/results/tpu_static.md."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    light = tiles.is_light(options, operands)
    limits = (1024, tiles.longest_side(options, operands)) if light else (512, 1024)
    block_q, block_k = tiles.even_block(T, limits[0]), tiles.even_block(S, limits[1])
    part_q = tiles.even_part(block_q, 256 if mosaic_tpu.has_wide_units() else 128)
    return Tiling(block_q, block_k, part_q, tiles.even_part(block_k, 256), apart=3)


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    options = KernelOptions.of(plan.options, operands.mask)
    tiling, operands = default_tiling(options, operands), functions.with_numbers(operands)
    run = partial(_forward, options, tiling, pallas.is_interpreted(mosaic_tpu.NAME), plan.keeps_rounding)
    keys = kernel_inputs.dropout_keys(options, operands)
    specs = partial(kernel_inputs.result_specs, options, plan.keeps_rounding)
    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, specs, given))
    return tie(call(operands, keys), operands)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _forward(options, tiling, interpret, keeps_rounding, operands, keys):
    # inputs in whole tiles, and the schedule: which tiles each tile of queries visits
    *batch, T, N, _ = operands.query.shape
    K, Hv = operands.value.shape[-2:]
    refs = kernel_inputs.inputs(options, operands, keys, tiling.padding)
    options, sides = functions.on_values(options, operands), PlaneSides.of(refs)
    visits = schedule(tile_flags(options, refs, tiling.block_q, tiling.block_k))
    # as the kernel reads them: q [B, N, T, H], k [B, K, S, H], v [B, K, Hv, S]
    refs = tiles.lay_inputs(options, refs, tiling)
    steps, refs = pallas.vary_alike((jnp.asarray(visits.steps), refs))
    refs = refs._replace(v=jnp.swapaxes(refs.v, 2, 3))  # as the product with the weights takes it
    values, tree = jax.tree.flatten(refs)
    (B, _, width, _), groups = refs.v.shape, N // K

    def locate(b, k, g, p, steps):
        return Step.at(steps, groups, b, k, g, p)

    # the blocks of a step, which the schedule names
    spec = tiles.block_specs(locate)
    of_value = spec((None, None, width, tiling.block_k), lambda s: (s.b, s.k, ZERO, s.column))
    specs = tiles.input_specs(refs, sides, tiling, locate)._replace(v=of_value)
    of_rows = spec((None, None, 1, tiling.block_q), lambda s: (s.b, s.n, ZERO, s.row))
    of_out = spec((None, None, tiling.block_q, width), lambda s: (s.b, s.n, s.row, ZERO))
    # out, lse, and where they are kept their roundings
    heads = pallas.out_type((*refs.q.shape[:-1], width), refs.q.dtype, refs), of_out
    rows = pallas.out_type((B, N, 1, refs.q.shape[2]), jnp.float32, refs), of_rows
    results = [heads, rows, *([rows] if kernel_inputs.has_rounding(options, refs) else [])]
    results += [heads] if keeps_rounding else []
    # a grid over batch entries, key heads, their query heads, and steps; m, l and acc stay from step to step
    state = [(n, tiling.block_q) for n in (1, 1, width)]
    kernel = partial(_kernel, options, tiling, sides, visits, tree, locate)
    found = mosaic_tpu.launch(
        kernel,
        visits.name("attention_forward_low" if keeps_rounding else "attention_forward", tiling),
        interpret=interpret,
        grid=(B, K, groups, visits.length),
        parallel=3,
        prefetched=1,
        in_specs=jax.tree.leaves(specs),
        out_specs=[spec for _, spec in results],
        out_type=[out_type for out_type, _ in results],
        scratch=[*(pltpu.VMEM(shape, jnp.float32) for shape in state), *tiles.bands(refs, sides, tiling)],
    )(steps, *values)

    # without padding, with the batch axes of the call: out [..., T, N, Hv], lse [..., T, N]
    def public(x, of):
        if of is heads:
            return jnp.swapaxes(x, 1, 2)[:, :T, :, :Hv].reshape(*batch, T, N, Hv)
        return jnp.swapaxes(x[:, :, 0, :T], 1, 2).reshape(*batch, T, N)

    out, lse, *rounding = map(public, found, results)
    wide = [out.astype(lse.dtype) + x.astype(lse.dtype) for x in rounding[1:]]
    return Result(out, lse, *(rounding[:1] or [None]), *wide)


def _kernel(
    options: KernelOptions, tiling: Tiling, sides: PlaneSides, visits: Schedule, tree, locate, steps, *refs
) -> None:
    """Runs one step: a tile of queries of a head by a tile of keys."""
    inputs, (*outputs, m_ref, l_ref, acc_ref), bands = tiles.split_refs(tree, sides, refs)
    step = locate(*(pl.program_id(axis) for axis in range(4)), steps)

    # a tile of queries begins: m, l [1, block_q] and acc [Hv, block_q]
    @pl.when(step.first)
    def _begin():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    # each part of the tile in three stages: its products, its weights, and their sum of values
    def visit(mixed):
        given = tiles.spread_bands(inputs, sides, bands, mixed)
        parts = [
            TilePart(options, given, sides, tiling, step, slices, transposed=True)
            for slices in tiling.parts()
        ]
        keeps_rounding = len(outputs) == len(Result._fields)
        stages = _products, partial(_weights, mixed, keeps_rounding, m_ref, l_ref), partial(_add, acc_ref)
        tiles.in_stages(parts, stages, tiling.apart)

    step.each_kind(visits, visit)

    # a tile of queries ends
    @pl.when(step.last)
    def _end():
        _finish(options, inputs, step, tiling, outputs, m_ref, l_ref, acc_ref)


def _products(part: TilePart, _: Any) -> jax.Array:
    """Multiplies k q^T of a part, `[keys, queries]`."""
    queries, keys = part.slices
    return product(part.options, part.refs.k[keys, :], part.refs.q[queries, :], (1, 1))


def _weights(mixed: bool, keeps_rounding: bool, m_ref, l_ref, part: TilePart, products: jax.Array) -> tuple:
    """Returns (numbers that add up to the weights of the part's values, what earlier sums are multiplied by).

    Folds the part into the maxima and sums of its queries; m is in units of the exponent if plain.
    """
    # logits [keys, queries], and the maxima of the queries up to here [1, queries]
    refs, (queries, _) = part.refs, part.slices
    logits = part.logits(products, mixed)
    top = logits.x.max(axis=0, keepdims=True)
    m_old = m_ref[:, queries]
    m = jnp.maximum(m_old, logits.shift(top))
    # -inf for queries that have seen no key: in tiles that are compared, or where a bias or a score hides
    hides = kernel_inputs.has_rounding(part.options, refs)
    shift = finite(m) if mixed or hides else m
    # p = exp(logits - m); what was added up before is relative to the old maximum, and decays
    decay = logits.decay(m_old, shift)
    p = logits.exp(shift)
    m_ref[:, queries] = m
    l_ref[:, queries] = l_ref[:, queries] * decay + p.sum(axis=0, keepdims=True)
    # dropout comes after l: the row sum is of all keys
    kept = part.keep()
    if kept is not None:
        p = jnp.where(kept, p, 0.0)
    # as the product takes it: rounded, and with `keeps_rounding` what that took as well
    narrow = p.astype(refs.v.dtype)
    return [narrow, rounding_between(p, narrow)] if keeps_rounding else [narrow], decay


def _add(acc_ref, part: TilePart, given: tuple) -> None:
    """Adds a part's weighted values to the sums of its queries."""
    p, decay = given
    queries, keys = part.slices
    v = part.refs.v[:, keys]
    weighted = functools.reduce(jnp.add, [product(part.options, v, x) for x in p])
    acc_ref[:, queries] = acc_ref[:, queries] * decay + weighted


def _finish(options, refs: Inputs, step: Step, tiling: Tiling, outputs, m_ref, l_ref, acc_ref):
    """Writes out, lse, and where they are kept the roundings of lse and of out."""
    # m in natural units and l of each query, [1, block_q]; queries beyond the end see nothing
    out_ref, lse_ref, *rounding_refs = outputs
    unit = LN_2 if is_plain(options, refs) else 1.0  # of m
    m, l = m_ref[...] * unit, l_ref[...]
    if refs.rows_end is not None:
        row = lax.broadcasted_iota(jnp.int32, l.shape, 1) + step.row * tiling.block_q
        end = refs.rows_end[kernel_inputs.at(refs.rows_end, 0, step.b)]
        l = jnp.where(row < end, l, 0.0)
    # the sink is one more logit, which has no value: m may rise to it
    factor: Any = 1.0
    empty, floor = l == 0.0, -jnp.inf
    if refs.sink is not None:
        floor = refs.sink[step.n]
        top = jnp.maximum(jnp.where(empty, floor, m), floor)
        shift = finite(top)
        factor = jnp.exp(m - shift)
        l = jnp.where(empty, 0.0, l * factor) + jnp.exp(floor - shift)
        m = top
    # out = acc / l, with the factor of those that dropout lets pass; written queries by channels
    total = jnp.where(empty, 1.0, l)
    if options.dropout_rate:
        factor = factor * dropout.survivor_factor(options.dropout_rate)
    out = jnp.where(empty, 0.0, acc_ref[...] * (factor / total))
    narrow = out.astype(out_ref.dtype)
    out_ref[...] = narrow.T
    for ref in rounding_refs[1:]:
        ref[...] = rounding_between(out, narrow).T
    # lse = m + log l; of rows that see nothing -inf, or the sink
    log_l = jnp.log(total)
    lse = jnp.where(empty, floor, m + log_l)
    lse_ref[...] = lse
    for ref in rounding_refs[:1]:
        ref[...] = jnp.where(empty, 0.0, (m - lse) + log_l)
