"""Backward of deformable attention on TPUs, level by level, by the hat matrix S of `tpu_hat.py`.

    dvalue = S dout^T                                                       (8) of `backward.py`
    G = value dout^T, every pixel with every query of a tile                (4)

Of G a sample needs the entries of four pixels. Its rows come by a selection for each row of pixels, for all
columns at once, then its columns. (5) to (7) and (9) are XLA's.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.sharding import match_type, unsharded
from jax_attn_bwd.ops.deformable import point_gradients, sampling
from jax_attn_bwd.ops.deformable.kernels import tpu_hat as hat
from jax_attn_bwd.ops.deformable.kernels.tpu_hat import LevelCut, LevelSamples, OnLevel
from jax_attn_bwd.ops.deformable.plan import Plan
from jax_attn_bwd.ops.deformable.spec import (
    MultiScaleDeformableAttentionGrads,
    Operands,
    Options,
    Residuals,
    Wanted,
)

_POINTS = {"sampling_locations", "attention_weights"}


def backward(plan: Plan, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """Returns the gradients in `residuals.wanted`."""
    return _backward(plan.options, pallas.is_interpreted(mosaic_tpu.NAME), residuals, dout)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout):
    """Runs the kernels where the operands lie, on all pixels of each head."""
    operands, wanted = residuals.operands, residuals.wanted
    run = partial(_gradients, options, interpret, wanted)

    def out_specs(*specs):
        found = Operands(*specs[:3])._asdict()
        return {name: found[name] for name in wanted.in_order}

    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, out_specs, given))
    grads = call(*operands._replace(value=unsharded(operands.value, 1)), dout)
    return residuals.gradients(grads)


def _gradients(options: Options, interpret: bool, asked: Wanted, *arrays: jax.Array) -> dict:
    """Returns the gradients on one device, by name."""
    wanted, operands, dout = asked.names, Operands(*arrays[:3]), arrays[3]
    value, (B, Q, M, _) = operands.value, operands.attention_weights.shape
    rows = dout.reshape(B, Q, M, -1).astype(jnp.float32).transpose(0, 2, 3, 1)  # [B, M, D, Q]

    # level by level: its pixels' gradient [B, H * W, M, D], its points' gradients [B, M, P, Q]
    dvalues, points, on_levels = [], [], hat.levels(options, operands)
    for (H, W), P in zip(options.spatial_shapes, options.num_points, strict=True):
        if P:
            on = next(on_levels)
            results = _of_level(options, interpret, wanted, on, value, rows)
            if wanted & _POINTS:
                at = sampling.pixels_around(options, on.level, on.x, on.y)
                outside = value.shape[1]
                d = [jnp.where(n < outside, x, 0) for n, x in zip(at.pixels, results.pop("d"), strict=False)]
                points.append(point_gradients.gradients(wanted, at, on.weight, d))  # (5) to (7)
            if "value" in wanted:
                dvalues.append(_of_pixels((H, W), on.cut, results["dvalue"], value.shape[3]))
        elif "value" in wanted:
            dvalues.append(jnp.zeros((B, H * W, M, value.shape[3]), jnp.float32))

    # joined along the pixels, and along the points
    grads = {}
    if "value" in wanted:
        grads["value"] = jnp.concatenate(pallas.vary_alike(dvalues), axis=1)
    if wanted & _POINTS:
        join = lambda *x: jnp.concatenate(x, axis=2).transpose(0, 3, 1, 2)  # [B, Q, M, K]
        grads |= point_gradients.by_name(options, operands, *jax.tree.map(join, *points))  # (9)
    return {name: match_type(grads[name], getattr(operands, name)) for name in asked.in_order}


def _of_pixels(size: tuple[int, int], cut: LevelCut, dvalue: jax.Array, D: int) -> jax.Array:
    """Returns `[B, M, strips, pixels, channels]` as `[B, H * W, M, D]`, without what fills up."""
    (H, W), (B, M) = size, dvalue.shape[:2]
    x = dvalue.reshape(B, M, cut.strips * cut.rows, cut.width, -1)[:, :, :H, :W, :D]
    return x.transpose(0, 2, 3, 1, 4).reshape(B, H * W, M, D)


def _of_level(
    options: Options, interpret: bool, wanted: frozenset[str], on: OnLevel, value: jax.Array, rows: jax.Array
) -> dict[str, Any]:
    """Returns a level's dvalue `[B, M, strips, pixels, channels]`, and d, the products at each corner.

    Both by name; d holds `[B, M, P, Q]` for each corner. `rows` are those of dout, `[B, M, D, Q]`.
    """
    # queries with a cotangent or a weight that is not finite are left out, and told apart in `unfit`
    parts, samples, plane = hat.parts_of(value.dtype), hat.samples(options, on), hat.planes(on, value)
    (B, M, P, Q), channels = samples.row.shape, plane.shape[3]
    finite = hat.whole_tiles(hat.is_finite(rows)).all(2, keepdims=True)
    fit = finite & hat.is_finite(samples.weight).all(2, keepdims=True)
    samples = samples._replace(weight=jnp.where(fit, samples.weight, 1))
    more = ((0, 0), (0, 0), (0, channels - rows.shape[2]), (0, 0))
    dout = jnp.where(finite, hat.whole_tiles(jnp.pad(rows, more)), 0)

    # what each of the two steps reads, writes and needs, by the names under which the kernel finds it
    of_heads: dict[str, Any] = {}
    out_shapes: dict[str, tuple[int, ...]] = {}
    scratch: dict[str, Any] = {}
    if "value" in wanted:
        out_shapes["dvalue"] = (B, M, on.cut.strips, on.cut.pixels, channels)
        hat_parts = hat.parts_of_hat(value.dtype)
        scratch |= {
            "matrix": pltpu.VMEM((hat_parts, on.cut.pixels, hat.TILE), jnp.bfloat16),
            "across": pltpu.VMEM((P, on.cut.width, hat.TILE), jnp.float32),
            "down": pltpu.VMEM((P, on.cut.rows, hat.TILE), jnp.float32),
            "sums": pltpu.VMEM((on.cut.pixels, parts * channels), jnp.float32),
        }
    if wanted & _POINTS:
        upright = [x.swapaxes(3, 4) for x in hat.split(plane, parts)]
        of_heads["value"] = jnp.concatenate(upright, axis=4)
        out_shapes["d"] = (B, M, 4 * P, Q)
        scratch |= {
            "stacked": pltpu.VMEM((parts, parts * channels, hat.TILE), jnp.bfloat16),
            "g": pltpu.VMEM((on.cut.pixels, hat.TILE), jnp.float32),
            "upper": pltpu.VMEM((P, on.cut.width, hat.TILE), jnp.float32),
            "lower": pltpu.VMEM((P, on.cut.width, hat.TILE), jnp.float32),
        }
    of_queries = {
        "dout": jnp.concatenate(hat.split(dout, parts), axis=2),
        "unfit": 1 - fit.astype(jnp.float32),
        **samples._asdict(),
    }

    # a step has all pixels of a head, and the samples of a tile of queries
    flags = hat.some_not_finite(jnp.where(fit, 0, jnp.inf))
    arrays = pallas.vary_alike((flags, *of_heads.values(), *of_queries.values()))
    outs = {name: pallas.out_type(shape, jnp.float32, arrays) for name, shape in out_shapes.items()}
    launched = mosaic_tpu.launch(
        partial(_kernel, on.cut, channels, ("flags", *of_heads, *of_queries, *outs, *scratch)),
        "deformable_backward",
        interpret=interpret,
        grid=(B, M, Q // hat.TILE),
        parallel=2,  # the gradient of the value is a sum over the tiles of queries
        in_specs=[
            mosaic_tpu.scalars(),
            *map(hat.all_of, of_heads.values()),
            *map(hat.tiles_of, of_queries.values()),
        ],
        out_specs=[hat.all_of(x) if name == "dvalue" else hat.tiles_of(x) for name, x in outs.items()],
        out_type=list(outs.values()),
        scratch=list(scratch.values()),
    )

    # products of queries left out are NaN
    found = dict(zip(outs, launched(*arrays), strict=True))
    if "d" in found:
        d = jnp.where(finite, found["d"], jnp.nan)[..., : rows.shape[3]]
        found["d"] = jnp.split(d, 4, axis=2)
    return found


def _kernel(cut: LevelCut, channels: int, names: tuple[str, ...], *all_refs: Any) -> None:
    """Takes the steps that are asked for on each strip that a tile of queries samples."""
    refs = dict(zip(names, all_refs, strict=True))
    of, steps = LevelSamples(*(refs[name] for name in LevelSamples._fields)), []
    if "dvalue" in refs:
        steps.append(_value_gradient(cut, channels, of, refs))
    if "d" in refs:
        steps.append(_products(cut, channels, of, refs))

    def each_strip(strip, _):
        for step in steps:
            step(strip)

    lax.fori_loop(*hat.touched(cut, of.row[...]), each_strip, None)
    if "d" in refs:
        _store_corners(cut, of, refs)


def _value_gradient(cut: LevelCut, channels: int, of: LevelSamples, refs: dict[str, Any]) -> Any:
    """Prepares (8), and returns its step: to add S dout^T to the gradient of a strip."""
    # the fractions of columns, the same for all strips: [P, width, TILE]
    across, matrix, sums, dout, dvalue = (refs[n] for n in ("across", "matrix", "sums", "dout", "dvalue"))
    is_unfit = refs["flags"][pl.program_id(0), pl.program_id(1)] != 0
    parts = sums.shape[1] // channels
    for p in range(of.row.shape[0]):
        across[p] = hat.fraction(of.column[p : p + 1], of.right[p : p + 1], cut.width)

    # the gradient is a sum over the tiles of queries: it begins with the first
    @pl.when(pl.program_id(2) == 0)
    def _():
        dvalue[...] = jnp.zeros_like(dvalue)

    def add(strip):
        hat.store_hat(cut, strip, of, across, refs["down"], matrix.shape[0], matrix)
        sums[...] = hat.product(matrix[0], dout[...], transposed=True)
        for i in range(1, matrix.shape[0]):  # of small parts of S, the large parts of dout
            some = max(1, parts - i) * channels
            sums[:, :some] += hat.product(matrix[i], dout[:some], transposed=True)
        # the parts of dout add up
        total = sums[:, :channels]
        for i in range(1, parts):
            total += sums[:, i * channels : (i + 1) * channels]
        dvalue[strip] += total

        # what a query that is not finite touches is NaN
        @pl.when(is_unfit)
        def _():
            reads = hat.ones(matrix[0].astype(jnp.float32) != 0)
            unfit = jnp.broadcast_to(refs["unfit"][...], (channels, hat.TILE)).astype(jnp.bfloat16)
            dvalue[strip] = jnp.where(hat.product(reads, unfit, transposed=True) > 0, jnp.nan, dvalue[strip])

    return add


def _products(cut: LevelCut, channels: int, of: LevelSamples, refs: dict[str, Any]) -> Any:
    """Prepares (4), and returns its step: to select the rows of G that samples lie in, of a strip."""
    # the parts of dout, as they meet those of the value: [parts, parts * channels, TILE]
    value, dout, stacked, g = (refs[n] for n in ("value", "dout", "stacked", "g"))
    parts = stacked.shape[0]
    for j in range(parts):  # with small parts of dout, the large parts of the value
        part = dout[j * channels : (j + 1) * channels]
        for i in range(parts):
            stacked[j, i * channels : (i + 1) * channels] = part if i + j < parts else jnp.zeros_like(part)
    for name in ("upper", "lower"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def select(strip):
        # G, every pixel of the strip with every query: [pixels, TILE]
        g[...] = hat.product(value[strip], stacked[0])
        for j in range(1, parts):
            g[...] += hat.product(value[strip], stacked[j])

        # of each sample, its upper and its lower row of pixels, with all columns: [width, TILE]
        above = (strip * cut.rows).astype(jnp.float32)
        for p in range(of.row.shape[0]):
            upper, lower, row = refs["upper"][p], refs["lower"][p], of.row[p : p + 1] - above
            for y in range(cut.rows):
                of_row = g[y * cut.width : (y + 1) * cut.width]
                upper = jnp.where(row == y, of_row, upper)
                lower = jnp.where(row == y - 1, of_row, lower)
            refs["upper"][p], refs["lower"][p] = upper, lower

    return select


def _store_corners(cut: LevelCut, of: LevelSamples, refs: dict[str, Any]) -> None:
    """Stores the four products of each sample, corner by corner."""
    P, d = of.row.shape[0], refs["d"]
    column = lax.broadcasted_iota(jnp.int32, (cut.width, hat.TILE), 0).astype(jnp.float32)
    for p in range(P):
        first = of.column[p : p + 1]
        for i, name in enumerate(("upper", "lower")):
            rows = refs[name][p]
            for j in range(2):
                one = jnp.where(column == first + j, rows, 0).sum(0, keepdims=True)
                n = (2 * i + j) * P + p
                d[n : n + 1] = one
