"""TPU kernel for the gradient of a bias with both a query and a key axis; equations as in `backward.py`.

A step holds one tile of the gradient, for one of the batch entries and heads that the bias broadcasts over:
these are the last axis of the grid, so that a tile is summed in vector memory and written once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import ZERO
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.tpu_part import Part, product
from jax_attn_bwd.ops.dot_product.kernels.tpu_saved import arithmetic, saved_of
from jax_attn_bwd.ops.dot_product.kernels.tpu_schedule import Schedule, Step, every_tile
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import PlaneSides, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands


def default_tiling(operands: Operands) -> Tiling:
    """The tile of the gradient is float32: smaller than elsewhere."""
    T, S = operands.query.shape[-3], operands.key.shape[-3]
    block_q, block_k = tiles.even_block(T, 512), tiles.even_block(S, 1024)
    return Tiling(block_q, block_k, tiles.even_part(block_q, 128), tiles.even_part(block_k, 512))


def gradient(
    options: KernelOptions, interpret: bool, operands: Operands, keys: Any, values: Any
) -> jax.Array:
    """float32 `[B|1, N|1, T, S]`: never more than the gradient itself is stored."""
    tiling = default_tiling(operands)
    options, saved, flags, sides = saved_of(options, operands, keys, values, tiling)
    visits = every_tile(flags)
    steps, saved = pallas.vary_alike((jnp.asarray(visits.steps), saved))
    refs = saved.refs
    (B, N, T, _), (K, S) = refs.q.shape, refs.k.shape[1:3]
    lead = refs.bias.shape[:2]
    over_batch, over_heads = (n if m == 1 else 1 for n, m in zip((B, N), lead, strict=True))

    def locate(b, n, p, r, steps):
        b, n = b + r // over_heads, n + r % over_heads  # of a sum over either, the other index is 0
        return Step.at(steps, 1, b, n, ZERO, p)._replace(k=n // (N // K))

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *where: index(locate(*where)))

    bq, bk = tiling.block_q, tiling.block_k
    fields, tree = jax.tree.flatten(refs)
    (dbias,) = mosaic_tpu.launch(
        partial(_kernel, options, tiling, sides, visits, tree, locate),
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


def _kernel(
    options: KernelOptions, tiling: Tiling, sides: PlaneSides, visits: Schedule, tree, locate, steps, *refs
) -> None:
    inputs, (dout_ref, rows_ref, dbias_ref), bands = tiles.gathered(tree, sides, refs)
    step = locate(*(pl.program_id(axis) for axis in range(4)), steps)

    @pl.when(pl.program_id(3) == 0)
    def _clear():
        dbias_ref[...] = jnp.zeros(dbias_ref.shape, jnp.float32)

    def visit(mixed):
        given = tiles.spread(inputs, sides, bands, mixed)
        for queries, keys in tiling.parts():
            part = Part(options, given, sides, tiling, step, (queries, keys))
            q, k, v = inputs.q[queries, :], inputs.k[keys, :], inputs.v[keys, :]
            products = product(options, q, k, (1, 1))
            dp = product(options, dout_ref[queries, :], v, (1, 1))
            _, dlogits, *_ = arithmetic(part, rows_ref, products, dp, mixed)
            dbias_ref[queries, keys] += dlogits

    step.each_kind(visits, visit)
