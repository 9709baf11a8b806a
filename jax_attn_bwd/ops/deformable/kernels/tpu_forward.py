"""Forward of deformable attention on TPUs: value^T S, level by level, S the hat matrix of `tpu_hat.py`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import ZERO
from jax_attn_bwd._core.sharding import tie, unsharded
from jax_attn_bwd.ops.deformable.kernels import tpu_hat as hat
from jax_attn_bwd.ops.deformable.kernels.tpu_hat import LevelCut, LevelSamples, OnLevel
from jax_attn_bwd.ops.deformable.kernels.tpu_hat import supports as supports
from jax_attn_bwd.ops.deformable.plan import Plan
from jax_attn_bwd.ops.deformable.spec import Operands, Options


def forward(plan: Plan, operands: Operands) -> jax.Array:
    """Returns `out [B, Q, M * D]`, in the dtype of the value."""
    return _forward(plan.options, pallas.is_interpreted(mosaic_tpu.NAME), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options, interpret, operands):
    """Runs the kernel where the operands lie, on all pixels of each head."""
    run = partial(_sampled, options, interpret)
    out_spec = lambda value, locations, weights: PartitionSpec(*weights[:3])
    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, out_spec, given))
    return tie(call(*operands._replace(value=unsharded(operands.value, 1))), operands)


def _sampled(options: Options, interpret: bool, *operands: jax.Array) -> jax.Array:
    """Returns the sum of all levels, `[B, Q, M * D]`, on one device."""
    given = Operands(*operands)
    (B, Q, M, _), D = given.attention_weights.shape, given.value.shape[3]
    found = [_of_level(options, interpret, on, given.value) for on in hat.levels(options, given)]
    out = sum(found[1:], found[0])[:, :, :D, :Q].transpose(0, 3, 1, 2)
    return out.reshape(B, Q, M * D).astype(given.value.dtype)


def _of_level(options: Options, interpret: bool, on: OnLevel, value: jax.Array) -> jax.Array:
    """Returns `[B, M, channels, Q]`, float32, channels and queries made up to whole tiles."""
    # the pixels of a head in strips, each number as parts of bfloat16 one after the other
    parts, hat_parts = hat.parts_of(value.dtype), hat.parts_of_hat(value.dtype)
    cut, samples, plane = on.cut, hat.samples(options, on), hat.planes(on, value)
    stacked = jnp.concatenate(hat.split(plane, parts), axis=3)
    arrays = pallas.vary_alike((hat.some_not_finite(plane), stacked, *samples))

    # a step has all pixels of a head, and the samples of a tile of queries
    (B, M, P, Q), channels = samples.row.shape, plane.shape[3]
    (out,) = mosaic_tpu.launch(
        partial(_kernel, cut, channels),
        "deformable_forward",
        interpret=interpret,
        grid=(B, M, Q // hat.TILE),
        parallel=3,
        in_specs=[mosaic_tpu.scalars(), hat.all_of(stacked), *map(hat.tiles_of, samples)],
        out_specs=[pl.BlockSpec((None, None, channels, hat.TILE), lambda b, m, q: (b, m, ZERO, q))],
        out_type=[pallas.out_type((B, M, channels, Q), jnp.float32, arrays)],
        scratch=[
            pltpu.VMEM((P, cut.width, hat.TILE), jnp.float32),
            pltpu.VMEM((P, cut.rows, hat.TILE), jnp.float32),
            pltpu.VMEM((hat_parts, cut.pixels, hat.TILE), jnp.bfloat16),
            pltpu.VMEM((parts * channels, hat.TILE), jnp.float32),
            pltpu.VMEM((channels, hat.TILE), jnp.float32),
        ],
    )(*arrays)
    return out


def _kernel(cut: LevelCut, channels: int, flags: Any, value: Any, *refs: Any) -> None:
    """Sums value^T S over the strips, `[channels, TILE]`."""
    # the fractions of columns, the same for all strips: [P, width, TILE]
    of, (out, across, down, matrix, sums, bad) = LevelSamples(*refs[:5]), refs[5:]
    is_bad = flags[pl.program_id(0), pl.program_id(1)] != 0
    parts = sums.shape[0] // channels
    for p in range(of.row.shape[0]):
        across[p] = hat.fraction(of.column[p : p + 1], of.right[p : p + 1], cut.width)
    sums[...], bad[...] = jnp.zeros_like(sums), jnp.zeros_like(bad)

    # a strip after the other; S, in its parts, is `[hat_parts, pixels, TILE]`
    def add_strip(strip, _):
        hat.store_hat(cut, strip, of, across, down, matrix.shape[0], matrix)

        def add(pixels):
            for i in range(matrix.shape[0]):  # of small parts of S, the large parts of the value
                some = max(1, parts - i) * channels
                sums[:some] += hat.product(pixels[:some], matrix[i])

        # where some pixel is not finite, it counts as 0, and what reads it is told apart
        @pl.when(jnp.logical_not(is_bad))
        def _():
            add(value[strip])

        @pl.when(is_bad)
        def _():
            pixels = value[strip].astype(jnp.float32)
            finite = hat.is_finite(pixels)
            add(jnp.where(finite, pixels, 0).astype(jnp.bfloat16))
            unfit, reads = ~finite[:channels], matrix[0].astype(jnp.float32) != 0
            bad[...] += hat.product(hat.ones(unfit), hat.ones(reads))

    lax.fori_loop(*hat.touched(cut, of.row[...]), add_strip, None)

    # the parts of the value add up
    total = sums[:channels]
    for i in range(1, parts):
        total += sums[i * channels : (i + 1) * channels]
    out[...] = jnp.where(bad[...] > 0, jnp.nan, total)
