"""Portable forward of the scaled masked softmax.

    y = exp(z - top) / sum exp(z - top),   z = scale * x + bias,   top = max of z over what is visible

Without a bias the scale is applied after the maximum of x is subtracted (the minimum, for a
negative scale): exp(scale * (x - max x)) is exact where scale * x alone has already been rounded.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import backend, masks
from jax_attn_bwd._core.blocks import map_rows
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.sharding import explicit_spec, tie
from jax_attn_bwd.ops.softmax.spec import Operands, Options, Result


def row_block(options: Options, x: jax.Array) -> int | None:
    """Rows of a block whose intermediates fit the cache; None: the whole array at once.

    On a CPU each intermediate as large as x costs as much as writing the result (fresh pages), so it is
    worth a loop over axis -2, the query axis. Other platforms fuse the passes. An array of rank 2 stays
    whole: its axis -2 may well be a sharded batch.
    """
    if backend.target_platform() != "cpu" or options.axis != -1 or x.ndim < 3:
        return None
    if not all(isinstance(n, int) for n in x.shape):  # symbolic
        return None
    if explicit_spec(x)[-2] is not None:  # a loop over a sharded axis would gather it
        return None
    if x.dtype.itemsize < 4 and jax.__version_info__ < (0, 11):
        return None  # that XLA:CPU widens whole arrays of narrow floats that a loop carries
    rows, elements = x.shape[-2], 1 << 20  # 4 MiB of float32, measured: flat from 2 to 4 MiB
    return max(1, elements * rows // max(x.size, 1))


def forward(options: Options, operands: Operands) -> Result:
    """The softmax and the row values that its backward may need."""
    return _forward(options, row_block(options, operands.x), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options, block, operands):
    x, *others = operands
    index = jnp.arange(x.shape[-2], dtype=jnp.int32) if x.ndim > 1 else None
    if block is None or operands.sink is not None or options.fully_masked != "zero":
        result = _rows(options, index, x, *others)
        result = result._replace(y=result.y.astype(x.dtype))
    else:
        y = map_rows(lambda index, *rows: _rows(options, index, *rows).y, operands, x, block)
        result = Result(y, None, None)
    return tie(result, operands)


def _rows(options, index, x, scale, mask, bias, sink) -> Result:
    """The result for some rows; `index` holds their positions along axis -2."""
    axis, dtype = options.axis, accumulator_dtype(x.dtype)
    x = x.astype(dtype)
    visible = masks.conjunction(mask, None if bias is None else bias != -jnp.inf)
    if options.is_causal or options.window is not None:
        row, column = index[:, None], jnp.arange(x.shape[-1], dtype=jnp.int32)[None]
        band = masks.in_band(row, column, options.is_causal, options.window)
        visible = masks.conjunction(visible, to_rank(band, x.ndim))
    if scale is not None and visible is not None:
        x = jnp.where(
            visible, x, 0
        )  # NaN where nothing is seen must not reach the gradient of scale

    scale = jnp.asarray(options.scale, dtype) if scale is None else scale.astype(dtype)
    shared_scale = scale.ndim == 0 or scale.shape[axis] == 1
    if bias is None and shared_scale:
        sign = jnp.where(scale < 0, -1, 1).astype(dtype)
        top, live = _top(sign * x, visible, axis)
        half = x / 2 - sign * top / 2  # the difference could overflow
        if options.scale is not None and abs(options.scale) > 1:
            z = scale * half
            z = z + z  # as 2 * scale could
        else:
            z = 2 * scale * half
        top = scale * sign * top
    else:
        z = scale * x
        # The select keeps the product from being contracted with the difference to top, its rounded twin.
        z = jnp.where(jnp.isnan(x), jnp.nan, z) if bias is None else z + bias.astype(dtype)
        top, live = _top(z, visible, axis)
        z = z - top
    if sink is not None:  # as seen from the maximum of z, which it may exceed
        huge = jnp.finfo(dtype).max
        sink = jnp.where(sink == -jnp.inf, -jnp.inf, jnp.minimum(sink.astype(dtype) - top, huge))
        above = lax.stop_gradient(jnp.maximum(sink, 0))
        z, sink = z - above, sink - above
    e = jnp.exp(z if visible is None else jnp.where(visible, z, -jnp.inf))
    total = e.sum(axis, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink)
    empty = total == 0
    inverse = jnp.where(empty, 0, 1 / jnp.where(empty, 1, total))
    y = e * inverse
    if options.fully_masked != "zero":
        width = x.shape[axis]
        filler = 1 / max(width, 1) if options.fully_masked == "uniform" else jnp.nan
        y = jnp.where(live, y, filler)
    sink_prob = None if sink is None else jnp.where(live, jnp.exp(sink) * inverse, 0)
    return Result(y, sink_prob, None if options.fully_masked == "zero" else live)


def _top(z, visible, axis):
    """(maximum of what is visible, 0 for rows that see nothing; whether the row sees anything)."""
    top = lax.stop_gradient(z if visible is None else jnp.where(visible, z, -jnp.inf))
    top = top.max(axis, keepdims=True, initial=-jnp.inf)
    live = top != -jnp.inf
    return jnp.where(live, top, 0), live
