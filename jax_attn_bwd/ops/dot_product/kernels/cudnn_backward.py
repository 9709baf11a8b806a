"""cuDNN's backward of dense attention, under the contract of `blockwise.py`.

It takes the probabilities from the lse that it is handed, and delta from the output: these are of all keys
that a query attends to. What else delta holds, c = delta - rowsum(dout * out), the cotangent of lse and what
rounding took from the output, is of a second call. It differs in its values, which are 0, and in

    dout = (w_1, w_2, w_3, 0, ...),   out = (c_1, c_2, c_3, 0, ...),   c = sum_i w_i c_i        of each row

so that its dlogits are P (0 - c): gradients are linear in them, and the two add up. Three numbers of 8 or 11
bits hold a float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion, pallas
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import cudnn
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.cudnn import Arrays
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, KernelOptions, Operands, Residuals

NOTHING = 2.0**100  # the lse of rows that see nothing: their P is 0
# of the parts of c: float16 has few exponents
WEIGHTS = {"bfloat16": (1.0, 1.0, 1.0), "float16": (2.0**12, 1.0, 2.0**-12)}


def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    options = KernelOptions.of(plan.options, residuals.operands.mask)
    run = partial(_backward, options, pallas.is_interpreted(cudnn.NAME))
    return pallas.on_local_shards(run, kernel_inputs.out_specs(residuals), (residuals, dout, dlse))


@partial(jax.jit, static_argnums=(0, 1))
def _backward(
    options: KernelOptions, interpret: bool, residuals: Residuals, dout: Any, dlse: Any
) -> DotProductAttentionGrads:
    # delta, lse and dout of each query; inf where a query sees nothing here
    operands, wanted = residuals.operands, residuals.wanted.names
    values = kernel_inputs.row_values(options, residuals, dout, dlse)
    empty = kernel_inputs.empty_rows(options, operands, values.lse)
    out, lse = residuals.result.out, values.lse
    if empty is not None:  # here; elsewhere the row may see keys
        lse = jnp.where(empty, jnp.inf, lse)

    # the arrays that the forward read, and the stat that P is taken from, float32 [B, N, T]
    call = cudnn.call_of(options, operands, interpret)
    arrays, shift = cudnn.prepare(options, operands._replace(query=values.query))
    _, T, _, H = arrays.q.shape
    rows = lambda x: kernel_inputs.pad(kernel_inputs.merged(x, 2), {1: T})
    heads = lambda x: kernel_inputs.pad(kernel_inputs.merged(x, 3), {1: T, -1: H})
    stat = rows(lse)
    if shift is not None:
        stat = (stat - kernel_inputs.pad(shift, {1: T})) + rows(values.rounding)
    stat = jnp.swapaxes(jnp.where(stat == jnp.inf, NOTHING, stat), -1, -2)

    made: dict[str, Any] = {}

    def add(arrays, out, dout, names):
        given = pallas.vary_alike((arrays, stat, out, dout))
        found = zip(
            ("query", "key", "value", "bias"), cudnn.backward(call, *given, "bias" in wanted), strict=True
        )
        for name, x in found:
            if name in names and x is not None:
                made[name] = made.get(name, 0) + x.astype(lse.dtype)

    # the call whose delta is that of the output, and one for the rest c of delta
    has_rest = dlse is not None or residuals.result.wide_out is not None
    if dout is not None or not has_rest:
        add(arrays, heads(out), heads(values.dout), wanted)
    if has_rest and (names := wanted & {"query", "key", "bias"}):
        product = (values.dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
        add(*_rest_of_delta(arrays, rows(values.delta - product)), names)
    # in the shapes of the operands, 0 where nothing looks
    grads = _to_operands(operands, wanted, made, empty)
    if "sink" in wanted:
        grads["sink"] = values.dsink
    return kernel_inputs.matched(operands, grads)


def _rest_of_delta(arrays: Arrays, rest: jax.Array) -> tuple[Arrays, jax.Array, jax.Array]:
    """Returns (arrays, out, dout) of the second call, for c `[B, T, N]`."""
    # c in three numbers, each what rounding the ones before took: out = (c_1, c_2, c_3, 0, ...)
    q, weights = arrays.q, WEIGHTS[str(arrays.q.dtype)]
    out, dout = jnp.zeros_like(q, shape=(*rest.shape, q.shape[-1])), jnp.zeros_like(q)
    for i, weight in enumerate(weights):
        part = fusion.rounded(rest / weight, q.dtype)
        rest = rest - weight * part.astype(rest.dtype)
        out, dout = out.at[..., i].set(part), dout.at[..., i].set(weight)
    return arrays._replace(v=jnp.zeros_like(arrays.v)), out, dout


def _to_operands(
    operands: Operands, wanted: frozenset[str], made: dict[str, Any], empty: Any
) -> dict[str, Any]:
    """Cuts gradients to the shapes of the operands, and sets them to 0 where nothing looks."""
    # [..., T, N, H], [..., S, K, H], [..., S, K, Hv]: padding is cut off
    (*batch, T, N, H), (S, K, Hv) = operands.query.shape, operands.value.shape[-3:]
    _, seen = visibility.used_queries_and_keys(operands.mask, operands.bias, operands.sizes)
    grads: dict[str, Any] = {}
    for name, n, heads, h in (("query", T, N, H), ("key", S, K, H), ("value", S, K, Hv)):
        if name not in wanted:
            continue
        if name not in made:  # the output has no cotangent
            grads[name] = jnp.zeros((*batch, n, heads, h), operands.query.dtype)
            continue
        x = made[name][:, :n, :, :h].reshape(*batch, n, heads, h)
        # rows that see nothing, and keys that nobody sees
        if name == "query":
            grads[name] = x if empty is None else jnp.where(empty[..., None], 0, x)
        else:
            grads[name] = x if seen is None else jnp.where(jnp.swapaxes(seen, -1, -2)[..., None], x, 0)
    if "bias" in wanted:
        grads["bias"] = kernel_inputs.bias_gradient(made["bias"][..., :T, :S], operands)
    return grads
