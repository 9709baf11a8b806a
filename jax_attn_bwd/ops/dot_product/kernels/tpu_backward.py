"""TPU backward of dense attention (Pallas Mosaic TPU); the equations are those of `backward.py`.

XLA computes delta (7) and the gradient of the sink (9); the rest are kernels:

    tpu_gradients.py        dq, dk and dv in one kernel of five products a tile; row and column sums of
                                   dlogits, which are the gradients of a bias that broadcasts, and sums of
                                   what `score_mod` adds for rows, columns and distances
    tpu_bias_gradient.py    the gradient of a full bias, summed over the batch and heads it broadcasts

Everything is added in one order and gives the same bits every time.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import float_leaves, mosaic_tpu, pallas
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import rows as kernel_rows
from jax_attn_bwd.ops.dot_product.kernels import tpu_bias_gradient as full_bias
from jax_attn_bwd.ops.dot_product.kernels import tpu_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, KernelOptions, Operands, Residuals


def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    options = KernelOptions.of(plan.options, residuals.operands.mask)
    run = partial(_backward, options, pallas.is_interpreted(mosaic_tpu.NAME))
    keys = kernel_inputs.dropout_keys(options, residuals.operands)
    residuals = residuals._replace(operands=functions.numbered(residuals.operands))
    out_specs = kernel_rows.out_specs(residuals)
    call = mosaic_tpu.in_turn(lambda *given: pallas.on_local_shards(run, out_specs, given))
    return call(residuals, dout, dlse, keys)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout, dlse, keys):
    operands, wanted = residuals.operands, residuals.wanted.names
    values = kernel_rows.row_values(options, residuals, dout, dlse)
    operands = operands._replace(query=values.query)
    side = None if operands.bias is None else _bias_side(operands)
    made = wanted & {"query", "key", "value", "mod_args"}
    if "bias" in wanted and side is not None:
        made |= {"bias"}
    grads = {}
    if made:
        grads = gradients.gradients(options, interpret, operands, keys, values, made)
    if "bias" in wanted and side is None:
        grads["bias"] = full_bias.gradient(options, interpret, operands, keys, values)
    if "bias" in wanted:
        grads["bias"] = kernel_inputs.bias_gradient(grads["bias"], operands)
    if "sink" in wanted:
        grads["sink"] = values.dsink
    like = lambda name: float_leaves.floats(getattr(residuals.operands, name))
    return DotProductAttentionGrads(
        **{name: jax.tree.map(match_type, grad, like(name)) for name, grad in grads.items()}
    )


def _bias_side(operands: Operands) -> int | None:
    shape = (1, 1, *operands.bias.shape)[-2:]  # type: ignore[union-attr]
    return tiles.plane_side(jax.ShapeDtypeStruct(shape, jnp.float32))
