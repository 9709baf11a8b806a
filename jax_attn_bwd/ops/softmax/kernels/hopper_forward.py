"""Mosaic GPU kernel of the softmax's forward: one read of x, one write of y.

Online, at each place of a piece: the maximum m of what came by there and l = sum exp(z - m). At the end of
the row both are combined over all places:

    top = max m,   total = sum l exp(m - top),   y = exp(z - top) / total

A row that fits one tile keeps its exponentials in registers; they only change factor, from m to top.
"""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import masks, mosaic_gpu, pallas
from jax_attn_bwd._core.numerics import finite
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.softmax.kernels import hopper_rows as rows
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.spec import Operands, Options, Result

_ELEMENTS = {True: 8192, False: 4096}  # of a tile; more if its exponentials stay in registers
_DTYPES = ("float32", "bfloat16", "float16")


def supports(options: Options, operands: Operands) -> str | None:
    """Why the kernel cannot run this call; None if it can."""
    return kernel_rules.unsupported(options, operands, _DTYPES)


def forward(options: Options, operands: Operands) -> Result:
    """The softmax; see `supports`."""
    return _forward(options, pallas.is_interpreted(mosaic_gpu.NAME), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options, interpret, operands):
    x, _, mask, bias, _ = operands
    planes = {n: plane for n, plane in (("mask", mask), ("bias", bias)) if plane is not None}

    def kernel(x, planes):
        return _softmax(options, interpret, x, planes)

    y = pallas.on_local_shards(kernel, lambda x, planes: x, (x, planes))
    return tie(Result(y, None, None), operands)


def _softmax(options: Options, interpret: bool, x: jax.Array, planes: dict) -> jax.Array:
    row_axes, width = x.shape[:-1], x.shape[-1]
    banded = options.is_causal or options.window is not None
    full = [tuple(n > 1 for n in plane.shape[:-1]) for plane in planes.values()]
    if banded:
        full.append((*(False,) * (len(row_axes) - 1), True))
    groups = rows.collapse(row_axes, full)
    arrays = [x]
    for name, plane in planes.items():
        plane = plane.astype(jnp.int8) if name == "mask" else plane
        arrays.append(jnp.broadcast_to(plane, (*plane.shape[:-1], width)))
    padded = rows.padded_width(width, x.dtype, math.prod(row_axes))
    tiling = rows.Tiling.default_for(
        math.prod(row_axes[a] for a in groups[-1]),
        padded,
        x.dtype,
        sum(a.dtype.itemsize for a in arrays),
        _ELEMENTS[padded <= rows.NARROW],
    )
    where = {name: 1 + i for i, name in enumerate(planes)}
    position = banded and row_axes[-1] > 1  # whether the last row axis is that of the band
    body = partial(_kernel, options, width, where, position)
    views = [rows.view(a, groups) for a in arrays]
    y = rows.run(body, "softmax_forward", views, tiling=tiling, interpret=interpret)
    return y.reshape(*row_axes, padded)[..., :width]


def _kernel(options: Options, width: int, where: dict[str, int], has_rows: bool, block: rows.Block) -> None:
    """`where` numbers the planes; `has_rows`: the last row axis is x's axis -2, which has rows."""
    tiling = block.tiling
    factor, slope, weight = kernel_rules.exponent(options, "bias" in where)

    def logits(k, i, last):
        z = block.piece(0, k, i).astype(jnp.float32)
        z = z if factor == 1 else z * factor
        terms = []
        if "bias" in where:
            bias = block.piece(where["bias"], k, i).astype(jnp.float32)
            z, terms = z + (bias if weight == 1 else bias * weight), [bias != -jnp.inf]
        if "mask" in where:
            terms.append(block.piece(where["mask"], k, i) != jnp.int8(0))
        banded, overruns = options.is_causal or options.window, block.overruns(i, last, width)
        if banded or overruns:
            row, column = block.position(k, i)
            row = row if has_rows else jnp.int32(0)
            terms.append(masks.in_band(row, column, options.is_causal, options.window))
            terms.append(column < width if overruns else None)
        visible = masks.conjunction(*terms)
        return z if visible is None else jnp.where(visible, z, -jnp.inf)

    def exponential(z, top):
        return jnp.exp2((z - top) * np.float32(slope))

    def add(k, last, carry):
        before, total, _ = carry
        z = [logits(k, i, last) for i in range(tiling.pieces)]
        m = functools.reduce(jnp.maximum, z, before)
        top = finite(m)
        e = [exponential(piece, top) for piece in z]
        total = functools.reduce(jnp.add, e, total * exponential(before, top))
        return m, total, e if tiling.tiles == 1 else None

    m, total, e = block.forwards(add, (block.full(-jnp.inf), block.full(0.0), None))
    top = finite(block.row_value("max", m))
    correction = exponential(m, top)
    total = block.row_value("sum", total * correction)
    inverse = jnp.where(total == 0, 0.0, 1 / total)
    if tiling.tiles == 1:
        correction = correction * inverse
        block.backwards(lambda k, last: (piece * correction for piece in e))
    else:
        block.backwards(
            lambda k, last: (exponential(logits(k, i, last), top) * inverse for i in range(tiling.pieces))
        )
