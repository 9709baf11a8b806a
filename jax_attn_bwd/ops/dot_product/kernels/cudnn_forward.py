"""cuDNN's forward of dense attention, under the contract of `blockwise.py`.

cuDNN gives `out` and `stat`, the natural log of the row sums, in float32. A row whose bias was shifted by c
has lse = c + stat. With a sink (base r = max(c, sink)) the row sum has one more term:

    log l = log(exp(c - r + stat) + exp(sink - r)),   lse = r + log l,   out exp(c - r + stat - log l)
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.numerics import fast_two_sum, to_rank
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product.kernels import cudnn
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Result

supports = cudnn.unsupported


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    options = KernelOptions.of(plan.options, operands.mask)
    run = partial(_forward, options, pallas.is_interpreted(cudnn.NAME))
    specs = partial(kernel_inputs.result_specs, options, False)
    return tie(pallas.on_local_shards(run, specs, (operands,)), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options: KernelOptions, interpret: bool, operands: Operands) -> Result:
    # out [..., T, N, Hv], stat and the shift of the bias [..., T, N]
    *batch, T, N, _ = operands.query.shape
    arrays, shift = pallas.vary_alike(cudnn.prepare(options, operands))
    out, stat = cudnn.forward(cudnn.call_of(options, operands, interpret), arrays)
    out = out[:, :T, :, : operands.value.shape[-1]].reshape(*batch, T, N, -1)
    stat = jnp.swapaxes(stat, -1, -2)[:, :T]
    shift = None if shift is None else jnp.broadcast_to(shift, stat.shape).reshape(*batch, T, N)
    stat = stat.reshape(*batch, T, N)
    # cuDNN promises nothing of rows that see nothing
    if (empty := kernel_inputs.empty_rows(options, operands, stat)) is not None:
        out, stat = jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, stat)
    if shift is None and operands.sink is None:
        return Result(out, stat, None)
    # lse = base + log l, the base being the shift, or the sink where that is greater
    base = jnp.zeros_like(stat) if shift is None else shift
    log_l = stat
    if operands.sink is not None:
        sink = to_rank(operands.sink.astype(stat.dtype), stat.ndim)
        base, shift = jnp.maximum(base, sink), base
        stat = (shift - base) + stat
        log_l = jnp.logaddexp(stat, sink - base)
        factor = jnp.where(stat == -jnp.inf, 0, jnp.exp(stat - log_l))
        out = (out.astype(stat.dtype) * factor[..., None]).astype(out.dtype)
    lse, rounding = fast_two_sum(base, log_l)
    rounding = jnp.where(lse == -jnp.inf, 0, rounding)
    return Result(out, lse, rounding if kernel_inputs.has_rounding(options, operands) else None)
