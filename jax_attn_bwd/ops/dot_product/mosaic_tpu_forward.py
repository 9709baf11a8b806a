"""TPU forward of dense attention (Pallas Mosaic TPU).

A step holds a tile of queries of one head and a tile of keys, and runs over parts of it, so that the compiler
overlaps the matrix products of one part with the exponentials of another. The softmax is the online one of
`forward.py`, in base 2 with the scale in the exponent; where logits have a bias or a soft cap the maximum is
subtracted first, in natural units, so that huge tied logits stay exact. The row sums stay spread over the
128 lanes until a tile of queries is finished, and `lse` is stored as one number a query.

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
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import dropout, mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product import kernel_inputs
from jax_attn_bwd.ops.dot_product import mosaic_tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernel_inputs import LN_2, LOG2_E, Inputs, is_plain
from jax_attn_bwd.ops.dot_product.mosaic_tpu_tiles import Part, PlaneSides, Schedule, Step, Tiling
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result

supports = tiles.unsupported


def default_tiling(options: Options, operands: Operands) -> Tiling:
    """Tiles of the fewest bundles a score; see bench/results/tpu_static.md."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    limits = (1024, 2048) if tiles.is_light(options, operands) else (512, 1024)
    if options.window is not None:
        limits = (limits[0], 1024)
    block_q, block_k = tiles.even_block(T, limits[0]), tiles.even_block(S, limits[1])
    parts = tiles.even_part(block_q, 256), tiles.even_part(block_k, 1024)
    return Tiling(block_q, block_k, *parts, ahead=mosaic_tpu.has_wide_units())


def forward(options: Options, operands: Operands) -> Result:
    """The output and its row values."""
    tiling = default_tiling(options, operands)
    run = partial(_forward, options, tiling, pallas.is_interpreted(mosaic_tpu.NAME))
    keys = kernel_inputs.dropout_keys(options, operands)
    call = mosaic_tpu.in_turn(lambda *given: pallas.on_local_shards(run, _out_specs, given))
    return tie(call(operands, keys), operands)


def _out_specs(operands: Any, keys: Any) -> Any:
    """Of the result, from those of the operands."""
    spec = operands.query
    row: Any = PartitionSpec(*spec[:-1])
    return Result(spec, row, None if operands.bias is None else row)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(options, tiling, interpret, operands, keys):
    *batch, T, N, _ = operands.query.shape
    K, Hv = operands.value.shape[-2:]
    refs = kernel_inputs.inputs(options, operands, keys, tiling.padding)
    flags = kernel_inputs.tile_flags(options, refs, tiling.block_q, tiling.block_k)
    visits = tiles.schedule(*flags)
    sides = PlaneSides(tiles.plane_side(refs.bias), tiles.plane_side(refs.mask))
    steps, refs = pallas.vary_alike((jnp.asarray(visits.steps), tiles.kernel_inputs_of(refs)))
    names, values = tiles.flat(refs)
    B, groups = refs.q.shape[0], N // K

    def locate(b, k, g, p, steps):
        return Step.at(steps, groups, b, k, g, p)

    specs = tiles.input_specs(refs, sides, tiling, locate)
    of_rows = pl.BlockSpec(
        (None, None, 1, tiling.block_q),
        lambda *where: (lambda s: (s.b, s.n, ZERO, s.row))(locate(*where)),
    )
    of_out = pl.BlockSpec(
        (None, None, tiling.block_q, refs.v.shape[-1]),
        lambda *where: (lambda s: (s.b, s.n, s.row, ZERO))(locate(*where)),
    )
    out_type = [
        pallas.out_type((*refs.q.shape[:-1], refs.v.shape[-1]), refs.q.dtype, refs),
        *[pallas.out_type((B, N, 1, refs.q.shape[2]), jnp.float32, refs)]
        * (1 if refs.bias is None else 2),
    ]
    state = [(tiling.block_q, n) for n in (LANES, LANES, refs.v.shape[-1])]
    kernel = partial(_kernel, options, tiling, sides, visits, names, locate)
    out, *rows = mosaic_tpu.launch(
        kernel,
        visits.name("attention_forward", tiling),
        interpret=interpret,
        grid=(B, K, groups, visits.length),
        parallel=3,
        prefetched=1,
        in_specs=tiles.flat(specs)[1],
        out_specs=[of_out] + [of_rows] * (len(out_type) - 1),
        out_type=out_type,
        scratch=[pltpu.VMEM(shape, jnp.float32) for shape in state],
    )(steps, *values)
    out = jnp.swapaxes(out, 1, 2)[:, :T, :, :Hv].reshape(*batch, T, N, Hv)
    lse, *low = (jnp.swapaxes(x[:, :, 0, :T], 1, 2).reshape(*batch, T, N) for x in rows)
    return Result(out, lse, low[0] if low else None)


def _kernel(
    options: Options, tiling: Tiling, sides: PlaneSides, visits: Schedule, names, locate, steps, *refs
) -> None:  # fmt: skip
    inputs = tiles.gathered(names, refs[: len(names)])
    *outputs, m_ref, l_ref, acc_ref = refs[len(names) :]
    step = locate(*(pl.program_id(axis) for axis in range(4)), steps)

    @pl.when(step.first)
    def _begin():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def visit(mixed):
        parts = [Part(options, inputs, sides, tiling, step, slices) for slices in tiling.parts()]

        def begin(part):
            queries, keys = part.slices
            return tiles.product(options, inputs.q[queries, :], inputs.k[keys, :], (1, 1))

        products = begin(parts[0])
        for i, part in enumerate(parts):
            mine = products
            if tiling.ahead and i + 1 < len(parts):
                products = begin(parts[i + 1])
            _fold(part, mine, mixed, m_ref, l_ref, acc_ref)
            if not tiling.ahead and i + 1 < len(parts):
                products = begin(parts[i + 1])

    step.each_kind(visits, visit)

    @pl.when(step.last)
    def _end():
        _finish(options, inputs, step, tiling, outputs, m_ref, l_ref, acc_ref)


def _fold(part: Part, products, mixed: bool, m_ref, l_ref, acc_ref) -> None:
    """Folds a part of the tile into the state of its queries; m is in units of the exponent if plain."""
    options, refs = part.options, part.refs
    rows, keys = part.slices
    x, factor, _ = part.logits(products, mixed)
    plain = is_plain(options, refs)
    blocks = mosaic_tpu.lane_blocks(x)
    top = functools.reduce(jnp.maximum, blocks).max(axis=1, keepdims=True)
    m_old = m_ref[rows, :]
    m = jnp.maximum(m_old, top * factor if plain else top)
    shift = m
    if mixed or refs.bias is not None or refs.mask is not None:  # else every query has seen a key
        shift = jnp.where(m == -jnp.inf, 0.0, m)
    if plain:
        decay = jnp.exp2(m_old - shift)
        blocks = [jnp.exp2(block * factor - shift) for block in blocks]
    else:
        decay = jnp.exp2((m_old - shift) * LOG2_E)
        blocks = [jnp.exp2((block - shift) * LOG2_E) for block in blocks]
    m_ref[rows, :] = m
    l_ref[rows, :] = l_ref[rows, :] * decay + functools.reduce(jnp.add, blocks)
    p = jnp.concatenate(blocks, axis=1)
    kept = part.keep()
    if kept is not None:
        p = jnp.where(kept, p, 0.0)
    pv = tiles.product(options, p.astype(refs.v.dtype), refs.v[keys, :])
    acc_ref[rows, :] = acc_ref[rows, :] * _over(decay, pv.shape[1]) + pv


def _over(lanes: jax.Array, width: int) -> jax.Array:
    """`[n, 128]` with one value a row -> `[n, width]`."""
    whole, rest = divmod(width, LANES)
    blocks = [lanes] * whole + ([lanes[:, :rest]] if rest else [])
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _finish(options, refs: Inputs, step: Step, tiling: Tiling, outputs, m_ref, l_ref, acc_ref):
    """Writes out, lse, and what rounding took from lse."""
    out_ref, lse_ref, *low_ref = outputs
    unit = LN_2 if is_plain(options, refs) else 1.0  # of m
    m = m_ref[:, :1] * unit
    l = l_ref[...].sum(axis=1, keepdims=True)
    if refs.rows_end is not None:
        row = lax.broadcasted_iota(jnp.int32, l.shape, 0) + step.row * tiling.block_q
        end = refs.rows_end[kernel_inputs.at(refs.rows_end, 0, step.b)]
        l = jnp.where(row < end, l, 0.0)
    factor: Any = 1.0
    empty, floor = l == 0.0, -jnp.inf
    if refs.sink is not None:  # one more logit, which has no value
        floor = refs.sink[step.n]
        top = jnp.maximum(jnp.where(empty, floor, m), floor)
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        factor = jnp.exp(m - finite)
        l = jnp.where(empty, 0.0, l * factor) + jnp.exp(floor - finite)
        m = top
    total = jnp.where(empty, 1.0, l)
    if options.dropout_rate:
        factor = factor * dropout.survivor_factor(options.dropout_rate)
    out_ref[...] = jnp.where(empty, 0.0, acc_ref[...] * (factor / total)).astype(out_ref.dtype)
    log_l = jnp.log(total)
    lse = jnp.where(empty, floor, m + log_l)
    lse_ref[...] = mosaic_tpu.lie(lse)
    for ref in low_ref:
        ref[...] = mosaic_tpu.lie(jnp.where(empty, 0.0, (m - lse) + log_l))
