"""Backward of deformable attention on NVIDIA GPUs (Pallas Mosaic GPU); the equations are `backward.py`'s.

XLA finds where the samples lie, sorts them, and has (5) to (7) and (9). Kernels read the rows of channels:

    gpu_value_gradient.py   dvalue (8): sums over the samples of a cell
    gpu_products.py         the four products of a sample (4)

They take plain loads at scalar indices, no TMA, no wgmma: they run on Ampere as on Blackwell. There are no
atomics: the same bits in every run, `deterministic` or not. Sums are float32 whatever the value's dtype.

The forward has no kernel. One with plain loads is not expected to be faster than XLA's gathers, which read
whole rows of channels as well; the portable forward runs on every device.
"""

from functools import partial

import jax

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.deformable import products, sampling
from jax_attn_bwd.ops.deformable.kernels import gpu_products, gpu_rows, gpu_value_gradient
from jax_attn_bwd.ops.deformable.spec import (
    Level,
    MultiScaleDeformableAttentionGrads,
    Operands,
    Options,
    Residuals,
)

_DTYPES = ("float32", "bfloat16", "float16")
_INDICES = 1 << 30  # of int32, with room for the indices beyond the last


def supports(options: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    (_, S, M, D), (B, Q, _, K) = operands.value.shape, operands.attention_weights.shape
    if too_old := mosaic_gpu.too_old():
        return too_old
    if not all(isinstance(n, int) for n in (B, S, M, D, Q, K)):
        return "its shapes must be known, not symbolic"
    for name, x in operands._asdict().items():
        if x.dtype not in _DTYPES:
            return f"{name} must be one of {_DTYPES}, got {x.dtype}"
        if x.size == 0:
            return f"{name} must not be empty, got shape {x.shape}"
    if D > gpu_rows.MOST_CHANNELS:
        return f"a head may have at most {gpu_rows.MOST_CHANNELS} channels, got {D}"
    cells = sum((height + 1) * (width + 1) for height, width in options.spatial_shapes)
    if (largest := max(B * Q * M * K * 4, B * max(cells, Q) * M * 4 * gpu_rows.padded(D))) >= _INDICES:
        return f"its arrays may have fewer than 2**30 elements, the largest would have {largest}"
    return None


def backward(options: Options, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """The gradients in `residuals.wanted`."""
    run = partial(_local_gradients, options, pallas.is_interpreted(mosaic_gpu.NAME))
    return pallas.on_local_shards(run, _out_specs, (residuals, dout))


def _out_specs(residuals: Residuals, _) -> MultiScaleDeformableAttentionGrads:
    specs = residuals.operands._asdict()
    return MultiScaleDeformableAttentionGrads(**{name: specs[name] for name in residuals.wanted.names})


@partial(jax.jit, static_argnums=(0, 1))
def _local_gradients(options, interpret, residuals, dout):
    operands, wanted = residuals.operands, residuals.wanted.names
    (B, Q, M, _), D = operands.attention_weights.shape, operands.value.shape[3]
    rows = gpu_rows.pad(dout.reshape(B * Q * M, D))
    level = Level(*(n.reshape(1, 1, 1, -1) for n in options.levels()))
    x, y, weight = sampling.points(options, operands)
    at, place = sampling.locate(options, level, x, y), sampling.place(options, level, x, y)
    grads = {}
    if "value" in wanted:
        grads["value"] = gpu_value_gradient.value_gradient(options, interpret, at, weight, rows, D)
    if wanted & {"sampling_locations", "attention_weights"}:
        d = gpu_products.products(options, interpret, level, at, place, operands.value, rows)
        points = products.gradients(wanted, place, weight, d)
        grads |= products.by_name(options, operands, *points)
    return MultiScaleDeformableAttentionGrads(
        **{name: match_type(grads[name], getattr(operands, name)) for name in wanted}
    )
