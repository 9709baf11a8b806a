"""`multi_head_attention_forward`."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.multi_head import after_dropout, arrays, drops, merged
from jax_attn_bwd.compat.torch.arguments import NAME, all_masks, all_params, all_sizes, all_static
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.visibility import live_and_seen
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer
from jax_attn_bwd.ops.multi_head.projections import matmul


def multi_head_attention_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: jax.Array | None,
    in_proj_bias: jax.Array | None,
    bias_k: jax.Array | None,
    bias_v: jax.Array | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: jax.Array,
    out_proj_bias: jax.Array | None,
    training: bool = True,
    key_padding_mask: jax.Array | None = None,
    need_weights: bool = True,
    attn_mask: jax.Array | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: jax.Array | None = None,
    k_proj_weight: jax.Array | None = None,
    v_proj_weight: jax.Array | None = None,
    static_k: jax.Array | None = None,
    static_v: jax.Array | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The multi-head attention layer of `torch.nn.MultiheadAttention`.

    Args:
      query: `(L, N, E)` or `(L, E)`, floating; every other array has its dtype, masks excepted.
      key: `(S, N, kdim)` or `(S, kdim)`; kdim = E without `use_separate_proj_weight`.
      value: `(S, N, vdim)` or `(S, vdim)`; vdim = E without `use_separate_proj_weight`.
      embed_dim_to_check: E.
      num_heads: H; divides E.
      in_proj_weight: `(3E, E)`, the rows of query, key and value.
      in_proj_bias: `(3E,)` or None.
      bias_k, bias_v: `(1, 1, E)`, both or neither.
      add_zero_attn: append a key and a value of zeros.
      dropout_p: probability in [0, 1] of dropping a weight, in training.
      out_proj_weight: `(Eo, E)`; Eo is E in the source's layer.
      out_proj_bias: `(Eo,)` or None.
      training: whether `dropout_p` counts.
      key_padding_mask: `(N, S)`, unbatched `(S,)`; bool, True = ignored, or floating, added.
      need_weights: whether to return the weights.
      attn_mask: `(L, S)` or `(N * num_heads, L, S)`; bool, True = not allowed, or floating, added.
      use_separate_proj_weight: whether the three weights below are used, instead of `in_proj_weight`.
      q_proj_weight, k_proj_weight, v_proj_weight: `(E, E)`, `(E, kdim)`, `(E, vdim)`.
      static_k, static_v: `(N * num_heads, S, E / num_heads)`.
      average_attn_weights: whether the weights are averaged over heads.
      is_causal: a hint that `attn_mask` is causal.
      dropout_key: a JAX random key.

    Returns:
      attn_output: `(L, N, Eo)` or `(L, Eo)`.
      attn_output_weights: `(N, L, S')` averaged or `(N, H, L, S')`, without N if unbatched, S' = S and the
        appended rows; None without `need_weights`.

    Gradients:
      Every array, masks that are floating included, of both results, to any order.

    Raises:
      ValueError: shapes disagree, arguments contradict one another.
      TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.compat import torch
      >>> x, w = jax.random.normal(jax.random.key(0), (5, 2, 8)), jnp.ones((24, 8))
      >>> out, weights = torch.multi_head_attention_forward(
      ...     x, x, x, 8, 4, w, None, None, None, False, 0.0, jnp.eye(8), None)
      >>> out.shape, weights.shape
      ((5, 2, 8), (2, 5, 5))
    """
    # Flags, arrays and masks are checked and named as the layer names them.
    flags = {
        "add_zero_attn": add_zero_attn,
        "need_weights": need_weights,
        "is_causal": is_causal,
        "average_attn_weights": average_attn_weights,
        "use_separate_proj_weight": use_separate_proj_weight,
    }
    for argument, flag in flags.items():
        checks.flag(NAME, argument, flag)
    weights_in: dict[str, Any] = {"in_proj_weight": in_proj_weight}
    if use_separate_proj_weight:
        weights_in = {
            "q_proj_weight": q_proj_weight,
            "k_proj_weight": k_proj_weight,
            "v_proj_weight": v_proj_weight,
        }
    given = arrays(
        NAME,
        ("query", "key", "value", *weights_in, "out_proj_weight"),
        query=query,
        key=key,
        value=value,
        **weights_in,
        in_proj_bias=in_proj_bias,
        out_proj_weight=out_proj_weight,
        out_proj_bias=out_proj_bias,
        bias_k=bias_k,
        bias_v=bias_v,
        static_k=static_k,
        static_v=static_v,
    )
    sizes = all_sizes(given, embed_dim_to_check, num_heads)
    params, static = all_params(sizes, given), all_static(sizes, given)
    padding, allowed = all_masks(sizes, key_padding_mask, attn_mask)
    if is_causal and attn_mask is None:
        expected, remedy = "be given with is_causal=True", "is_causal is a hint that it is causal"
        raise ValueError(checks.message(NAME, "attn_mask", expected, None, remedy))
    # A causal mask that nothing else needs is told as causality, which skips tiles.
    causal = is_causal and padding is None and not need_weights
    (rate,) = drops(NAME, {"dropout_p": dropout_p}, training, dropout_key)
    options = {
        **merged(padding, None if causal else allowed),
        "is_causal": causal,
        "dropout_rate": rate,
        "dropout_key": dropout_key,
        "return_weights": need_weights,
        "add_zero_attn": add_zero_attn,
    }
    # The source puts the sequence first, the layer the batch.
    q, k, v = (
        jnp.swapaxes(given[name], 0, 1) if sizes.batched else given[name][None]
        for name in ("query", "key", "value")
    )
    appended = add_zero_attn or bias_k is not None
    if static != (None, None) or (causal and appended):
        out, weights = _over_heads(params, (q, k, v), static, options)
    else:  # one array for two inputs is projected, and differentiated, as one
        k, v = None if key is query else k, None if value is key else v
        result = _layer(params, q, k, v, **options)
        out, weights = result if need_weights else (result, None)
    # The source returns weights after dropout, for each head or averaged.
    if weights is not None:
        weights = after_dropout(weights, rate, dropout_key)
        weights = weights.reshape(sizes.N, sizes.H, *weights.shape[-2:])
        weights = weights.mean(1) if average_attn_weights else weights
    if sizes.batched:
        return jnp.swapaxes(out, 0, 1), weights
    return out[0], None if weights is None else weights[0]


def _over_heads(params, inputs, static, options) -> tuple[jax.Array, jax.Array | None]:
    """The layer with heads as batch entries: for keys of no projection, and rows that causality may hide."""
    inputs = _without_poison(inputs, static, options)
    pieces = zip(inputs, params[0:6:2], params[1:6:2], (None, *static), strict=True)
    q, k, v = (_project(x, *piece) if given is None else given for x, *piece, given in pieces)
    if options["is_causal"]:
        rows = [(params.bias_k, params.bias_v)] if params.bias_k is not None else []
        rows += [(jnp.zeros(k.shape[1::2], k.dtype),) * 2] if options["add_zero_attn"] else []
        for row_k, row_v in rows:
            k, v = (
                jnp.concatenate([x, jnp.broadcast_to(row[:, None], (*x.shape[:2], 1, x.shape[3]))], 2)
                for x, row in ((k, row_k), (v, row_v))
            )
        options = {**options, "add_zero_attn": False}
    planes = {name: None if options[name] is None else options[name][:, :, None] for name in ("mask", "bias")}
    result = _layer(MultiHeadAttentionParams(), q, k, v, num_heads=1, **{**options, **planes})
    out, weights = result if options["return_weights"] else (result, None)
    out = matmul("nhtd,hdo->nto", out, params.out_kernel)
    if params.out_bias is not None:
        out = out + params.out_bias.astype(out.dtype)[None, None]
    return out.astype(q.dtype), weights


def _without_poison(inputs, static, options) -> list[jax.Array]:
    """The inputs, 0 where a query sees nothing or nothing sees a key: NaN there must not reach a kernel."""
    T, S = inputs[0].shape[1], (inputs[1].shape[1] if static[0] is None else static[0].shape[2])
    mask = Mask(options["is_causal"], elements=options["mask"])
    live, seen = live_and_seen(mask, options["bias"], T, S, 1, 1)
    live = None if live is None or options["add_zero_attn"] else live.any((1, 2))
    seen = None if seen is None else seen.any(1)
    rows = (live, seen, seen)
    return [
        x if row is None or given is not None else jnp.where(row[..., None], x, 0)
        for x, row, given in zip(inputs, rows, (None, *static), strict=True)
    ]


def _project(x: jax.Array, kernel: jax.Array, offset: jax.Array | None) -> jax.Array:
    """`(N, T, E)` -> `(N, H, T, D)`."""
    y = matmul("nte,ehd->nhtd", x, kernel)
    y = y if offset is None else y + offset.astype(y.dtype)[None, :, None]
    return y.astype(x.dtype)
