"""The tangent rule of the multi-head attention layer, as a plain function."""

from typing import Any, Unpack

import jax

from jax_attn_bwd._core import checks, secondary_calls
from jax_attn_bwd._core.types import Array
from jax_attn_bwd.ops.multi_head.api import multi_head_attention
from jax_attn_bwd.ops.multi_head.spec import PARAMS, MultiHeadAttentionKeywords, MultiHeadAttentionParams

_INPUTS = ("query", "key", "value", "bias")


def multi_head_attention_jvp(
    params: MultiHeadAttentionParams[Array],
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    dparams: MultiHeadAttentionParams[Array] | None = None,
    dquery: Array | None = None,
    dkey: Array | None = None,
    dvalue: Array | None = None,
    dbias: Array | None = None,
    **options: Unpack[MultiHeadAttentionKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`multi_head_attention` and its tangent, as a plain function.

    Args:
      dparams: a MultiHeadAttentionParams of tangents, each of the shape and dtype of its parameter; None, and
        a field that is None, = 0.
      dquery, dkey, dvalue, dbias: tangents, each of the shape and dtype of its argument; None = 0. Where key
        (or value) is None, the tangent of `query` (or `key`) moves it, too. Those of mod_args and of the
        weights are for `jax.jvp` of the call with `forward_mode=True`.
      params, query, key, value and options: as in the forward call, `MultiHeadAttentionKeywords`.

    Returns:
      (out, dout): `[..., T, Eo]`, dtype of `query`. One pass over the tiles, in memory that is linear in T
      and S. A query that sees nothing moves by the tangent of the output bias alone.

    Gradients:
      Differentiable in both modes, as the call with `forward_mode=True` is.

    Raises:
      As `multi_head_attention`, and NotImplementedError where this JAX has no `jax.experimental.hijax`.

    Example:
      >>> import jax
      >>> import jax_attn_bwd as jab
      >>> x, dx, w = jax.random.normal(jax.random.key(0), (3, 16, 16))
      >>> params = jab.MultiHeadAttentionParams(query_kernel=w.reshape(16, 4, 4))
      >>> params = params._replace(key_kernel=params.query_kernel, value_kernel=params.query_kernel)
      >>> out, dout = jab.multi_head_attention_jvp(params, x, dparams=params, dquery=dx, is_causal=True)
      >>> dout.shape
      (16, 16)
    """
    name = "multi_head_attention_jvp"
    given = secondary_calls.complete(name, multi_head_attention, MultiHeadAttentionKeywords, options)
    dparams = MultiHeadAttentionParams() if dparams is None else dparams
    for argument, x in (("params", params), ("dparams", dparams)):
        if not isinstance(x, MultiHeadAttentionParams):
            got = type(x).__name__
            raise TypeError(checks.message(name, argument, "be a MultiHeadAttentionParams", got))
    primals = dict(zip(_INPUTS, (query, key, value, given.pop("bias")), strict=True))
    primals |= {f"params.{field}": x for field, x in params._asdict().items()}
    along = dict(zip(_INPUTS, (dquery, dkey, dvalue, dbias), strict=True))
    along |= {f"params.{field}": x for field, x in dparams._asdict().items()}

    def call(**arrays: Any) -> jax.Array:
        params = MultiHeadAttentionParams(*(arrays.pop(f"params.{field}") for field in PARAMS))
        return multi_head_attention(params, **arrays, forward_mode=True, **given)

    return secondary_calls.outputs_and_tangents(name, call, primals, along)
