"""The multi-head attention layer around a ring: its heads on one mesh axis, its sequence on another."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.rotary import Rotary, checked, rotate
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.parallel.arguments import token_index
from jax_attn_bwd.parallel.sequence import ring_attention

NAME = "tensor_parallel_multi_head_attention"
KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")


def check(params: MultiHeadAttentionParams, dropout_rate: float, options: dict[str, Any]) -> None:
    """Raises where an option, or a parameter that is missing, does not go with a ring."""
    for name in KERNELS:
        if getattr(params, name) is None:
            raise ValueError(checks.message(NAME, f"params.{name}", "be given with sequence_axis_name", None))
    options |= {} if params.bias_k is None else {"dropout_rate with params.bias_k": dropout_rate}
    for argument, x in options.items():
        if x != (expected := "inputs" if argument == "save" else False):
            expected = f"be {expected!r} with sequence_axis_name"
            raise ValueError(checks.message(NAME, argument, expected, x, "leave it out"))


def attend(
    params: Any,
    inputs: dict[str, Any],
    axis_name: str,
    attention: dict[str, Any],
    add_zero_attn: bool,
    rotary: Rotary | None,
) -> jax.Array:
    """The layer around `ring_attention`, without the output's bias."""
    query, key, value = inputs.values()
    key = query if key is None else key
    inputs = {"query": query, "key": key, "value": key if value is None else value}
    product = dict(precision=attention["precision"], preferred_element_type=accumulator_dtype(query.dtype))
    rotary, heads = checked(NAME, rotary, params.query_kernel.shape[-1]), []
    for name, x in inputs.items():
        kernel, bias = getattr(params, f"{name}_kernel"), getattr(params, f"{name}_bias")
        y = jnp.einsum("...te,enh->...tnh", x, kernel, **product)
        y = y if bias is None else y + to_rank(bias.astype(y.dtype), y.ndim)
        if rotary is not None and name != "value":
            argument = "query_positions" if name == "query" else "key_value_positions"
            y = rotate(rotary, y, _positions(argument, attention[argument], y, axis_name))
        heads.append(y.astype(x.dtype))
    sink = params.sink
    if add_zero_attn:  # a key of 0 whose value is 0 takes what a sink of 0 takes
        zero = jnp.zeros(heads[0].shape[-2], query.dtype)
        sink = zero if sink is None else jnp.logaddexp(sink, zero)
    out, lse = ring_attention(*heads, axis_name=axis_name, sink=sink, return_residual=True, **attention)
    out = out if params.bias_k is None else _with_row(params, heads[0], out, lse, attention)
    return jnp.einsum("...tnh,nho->...to", out, params.out_kernel, **product).astype(query.dtype)


def _positions(argument: str, given: Any, y: jax.Array, axis_name: str) -> jax.Array:
    """Of this device's tokens, `[..., T]`: those told, or the indices in the whole sequence."""
    if given is not None:
        given = checks.integers(NAME, argument, given)
        checks.broadcasts(NAME, argument, given, "[..., T]", y.shape[:-2])
    return token_index(given, y.shape[-3], 0, lax.axis_index(axis_name))


def _with_row(params: Any, q: jax.Array, out: jax.Array, lse: jax.Array, attention: Any) -> jax.Array:
    """`out` of attention over all keys, with the one more that `bias_k` and `bias_v` add for every query.

    x = soft_cap(scale <q, bias_k>),   lse' = log(exp(lse) + exp(x))
    out' = exp(lse - lse') out + exp(x - lse') bias_v
    """
    (N, H), cap = q.shape[-2:], attention["logits_soft_cap"]
    k, v = (jnp.repeat(x.astype(lse.dtype), N // x.shape[0], axis=0) for x in (params.bias_k, params.bias_v))
    x = jnp.einsum("...tnh,nh->...tn", q.astype(lse.dtype), k, precision=attention["precision"])
    x = x * checks.head_scale(NAME, attention["scale"], H, q.dtype, "")
    x = x if cap is None else cap * jnp.tanh(x / cap)
    total = jnp.logaddexp(lse, x)
    out = jnp.exp(lse - total)[..., None] * out + jnp.exp(x - total)[..., None] * to_rank(v, out.ndim)
    return out.astype(q.dtype)
