"""PyTorch's `torch.nn.functional.multi_head_attention_forward`, in JAX terms; torch itself is not imported.

Kept from the source:
  * names, order and defaults of the arguments; sequence first, `(L, N, E)`, or without a batch, `(L, E)`;
    weights are `(out, in)`: `y = x W^T + b`; the heads divide `E` for queries, keys and values alike;
  * a boolean mask is True where attention is *not* allowed, a floating one is added to the logits; both
    kinds may meet, and add up;
  * `bias_k`/`bias_v`, then a row of zeros (`add_zero_attn`), follow the projected keys; masks do not reach
    them;
  * `is_causal` is a hint that `attn_mask` is causal, and an error without one. Where
    `key_padding_mask is None` and not `need_weights`, the values of `attn_mask` are dropped and query t sees
    columns 0 to t alone, of all: the appended rows, which come last, are then hidden from most queries.
    Elsewhere the hint is ignored;
  * `static_k`, `static_v` `(N * num_heads, S, E / num_heads)` replace the projected keys or values; what they
    replace has gradient 0; they refuse `bias_k`/`bias_v`;
  * the weights are returned after dropout, as they multiply the values, and averaged over heads by default;
  * `in_proj_weight` counts only without `use_separate_proj_weight`, the three weights only with it.

Changed:
  * a query that may attend to nothing gets 0 from the attention, weights 0 and gradient 0, where the source
    gives NaN (with `need_weights`; without, it gives 0 as well);
  * `need_weights` changes no number of the output;
  * dropout draws from `dropout_key`, and must have one if `training` and `dropout_p > 0`;
  * masks of different kinds raise no warning; floating masks have a gradient of any dtype;
  * one dtype for inputs and weights; errors are `ValueError` and `TypeError`.

References:
  PyTorch 2.13, torch.nn.functional.multi_head_attention_forward, torch.nn.MultiheadAttention.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.products import accumulated
from jax_attn_bwd.compat.calls import after_dropout, arrays, both, drops, heads, mask_planes, merged, shaped
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Sizes
from jax_attn_bwd.ops.dot_product.visibility import used_queries_and_keys
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer

__all__ = ["multi_head_attention_forward"]

_NAME = "torch.multi_head_attention_forward"
_FLAGS = ("add_zero_attn", "need_weights", "is_causal", "average_attn_weights", "use_separate_proj_weight")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_ARRAYS = ("in_proj_bias", "out_proj_weight", "out_proj_bias", "bias_k", "bias_v", "static_k", "static_v")


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
    # Flags and arrays are checked under the source's names.
    arguments = locals()
    for name in _FLAGS:
        checks.flag(_NAME, name, arguments[name])
    weights_in = _SEPARATE if use_separate_proj_weight else ("in_proj_weight",)
    needed = ("query", "key", "value", *weights_in, "out_proj_weight")
    given = arrays(
        _NAME, needed, **{n: arguments[n] for n in ("query", "key", "value", *weights_in, *_ARRAYS)}
    )
    # Sizes follow from the inputs; parameters, keys that are given and masks are those of the layer.
    sizes = _sizes(given, embed_dim_to_check, num_heads)
    params, static = _params(sizes, given), _static(sizes, given)
    shape = (sizes.N, sizes.L, sizes.S, sizes.H)
    padding, allowed = mask_planes(_NAME, sizes.batched, shape, key_padding_mask, attn_mask)
    if is_causal and attn_mask is None:
        expected, remedy = "be given with is_causal=True", "is_causal is a hint that it is causal"
        raise ValueError(checks.message(_NAME, "attn_mask", expected, None, remedy))
    # A causal mask that nothing else needs is told as causality, which skips tiles.
    causal = is_causal and padding is None and not need_weights
    (rate,) = drops(_NAME, {"dropout_p": dropout_p}, training, dropout_key)
    options: dict[str, Any] = {**merged(padding, None if causal else allowed), "is_causal": causal}
    options |= dict(dropout_rate=rate, dropout_key=dropout_key)
    options |= dict(return_weights=need_weights, add_zero_attn=add_zero_attn)
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


class _TorchSizes(NamedTuple):
    """Tells whether there is a batch N; L queries of width E, S keys, H heads."""

    batched: bool
    N: int
    L: int
    S: int
    E: int
    H: int


def _sizes(given: dict[str, Any], embed_dim: Any, num_heads: Any) -> _TorchSizes:
    """Returns every size, on which the inputs must agree."""
    # Queries, keys and values have one rank, batch and width.
    H, E = heads(_NAME, num_heads, embed_dim_to_check=embed_dim), int(embed_dim)
    query, key, static_k = given["query"], given["key"], given["static_k"]
    rank, batch = query.ndim, query.shape[1:-1]
    checks.rank(_NAME, "query", query, "(L, N, E) or, without a batch, (L, E)", 2, 3)
    rows, columns = ("(L, N, E)", "(S, N, {})") if rank == 3 else ("(L, E)", "(S, {})")
    checks.shape(_NAME, "query", query, rows, (query.shape[0], *batch, E))
    for name, width in (("key", "kdim"), ("value", "vdim")):
        x = given[name]
        letter = "E" if "in_proj_weight" in given else width
        checks.rank(_NAME, name, x, columns.format(letter), rank)
        last = E if letter == "E" else x.shape[-1]
        checks.shape(_NAME, name, x, columns.format(letter), (key.shape[0], *batch, last))
    # The number of keys is that of those that are given.
    if static_k is not None:
        checks.rank(_NAME, "static_k", static_k, "(N * num_heads, S, E / num_heads)", 3)
    S = key.shape[0] if static_k is None else static_k.shape[1]
    return _TorchSizes(rank == 3, batch[0] if batch else 1, query.shape[0], S, E, H)


def _params(sizes: _TorchSizes, given: dict[str, Any]) -> MultiHeadAttentionParams:
    """Returns the layer's parameters from the source's, whose weights are (out, in)."""
    E, H = sizes.E, sizes.H
    D, checked = E // H, partial(shaped, _NAME, given)
    # Kernels and biases of query, key and value, packed or apart.
    if "in_proj_weight" in given:
        kernels = jnp.split(checked("in_proj_weight", "(3E, E)", 3 * E, E), 3)
    else:
        kernels = [
            checked(f"{source[0]}_proj_weight", f"(E, {width})", E, given[source].shape[-1])
            for source, width in (("query", "E"), ("key", "kdim"), ("value", "vdim"))
        ]
    b = checked("in_proj_bias", "(3E,)", 3 * E)
    offsets = [None] * 3 if b is None else [x.reshape(H, D) for x in jnp.split(b, 3)]
    # The appended row, and the output projection.
    rows = [checked(name, "(1, 1, E)", 1, 1, E) for name in ("bias_k", "bias_v")]
    both(_NAME, bias_k=rows[0], bias_v=rows[1])
    rows = [None if x is None else x.reshape(H, D) for x in rows]
    w_o = given["out_proj_weight"]
    Eo = w_o.shape[0] if w_o.ndim else E
    w_o, b_o = checked("out_proj_weight", "(Eo, E)", Eo, E), checked("out_proj_bias", "(Eo,)", Eo)
    # Heads get an axis of their own: (E, H, D) and (H, D).
    found: dict[str, Any] = {"out_kernel": w_o.T.reshape(H, D, Eo), "out_bias": b_o}
    found |= {"bias_k": rows[0], "bias_v": rows[1]}
    for name, w, offset in zip(("query", "key", "value"), kernels, offsets, strict=True):
        found |= {f"{name}_kernel": w.T.reshape(w.shape[1], H, D), f"{name}_bias": offset}
    return MultiHeadAttentionParams(**found)


def _static(sizes: _TorchSizes, given: dict[str, Any]) -> tuple[jax.Array | None, ...]:
    """Returns the keys and values `(N, H, S, D)` that stand in for projected ones; None = projected."""
    # Given keys and values take no appended rows, and fit those that are projected.
    N, S, H, D = sizes.N, sizes.S, sizes.H, sizes.E // sizes.H
    found = []
    for name in ("static_k", "static_v"):
        if given[name] is not None and given["bias_k"] is not None:
            expected = "be None together with bias_k and bias_v"
            raise ValueError(checks.message(_NAME, name, expected, f"shape {given[name].shape}"))
        x = shaped(_NAME, given, name, "(N * num_heads, S, E / num_heads)", N * H, S, D)
        found.append(None if x is None else x.reshape(N, H, S, D))
    if found[1] is None and given["value"].shape[0] != S:
        expected = f"have the length S = {S} of static_k"
        raise ValueError(checks.message(_NAME, "value", expected, given["value"].shape[0]))
    return tuple(found)


def _over_heads(params, inputs, static, options) -> tuple[jax.Array, jax.Array | None]:
    """Calls the layer with heads as entries: for keys of no projection, and rows that causality may hide."""
    inputs = _without_poison(inputs, static, options)
    # Queries, keys and values (N, H, T or S, D), those that are given as they are.
    pieces = zip(inputs, params[0:6:2], params[1:6:2], (None, *static), strict=True)
    q, k, v = (_project(x, *piece) if given is None else given for x, *piece, given in pieces)
    # Rows that causality may hide are keys like the others.
    if options["is_causal"]:
        rows = [(params.bias_k, params.bias_v)] if params.bias_k is not None else []
        rows += [(jnp.zeros(k.shape[1::2], k.dtype),) * 2] if options["add_zero_attn"] else []
        for row_k, row_v in rows:
            k, v = (
                jnp.concatenate([x, jnp.broadcast_to(row[:, None], (*x.shape[:2], 1, x.shape[3]))], 2)
                for x, row in ((k, row_k), (v, row_v))
            )
        options = {**options, "add_zero_attn": False}
    # One head of N * H sequences; the heads' outputs are projected together.
    planes = {name: None if options[name] is None else options[name][:, :, None] for name in ("mask", "bias")}
    result = _layer(MultiHeadAttentionParams(), q, k, v, num_heads=1, **{**options, **planes})
    out, weights = result if options["return_weights"] else (result, None)
    out = accumulated("nhtd,hdo->nto", out, params.out_kernel)
    if params.out_bias is not None:
        out = out + params.out_bias.astype(out.dtype)[None, None]
    return out.astype(q.dtype), weights


def _without_poison(inputs, static, options) -> list[jax.Array]:
    """Returns the inputs, 0 where a query sees nothing or nothing sees a key: NaN must not reach a kernel."""
    T, S = inputs[0].shape[1], (inputs[1].shape[1] if static[0] is None else static[0].shape[2])
    mask = Mask(options["is_causal"], elements=options["mask"])
    sizes = Sizes((inputs[0].shape[0],), T, S, 1, 1)  # of one head: they are apart
    live, seen = used_queries_and_keys(mask, options["bias"], sizes)
    live = None if live is None or options["add_zero_attn"] else live.any((1, 2))
    seen = None if seen is None else seen.any(1)
    rows = (live, seen, seen)
    return [
        x if row is None or given is not None else jnp.where(row[..., None], x, 0)
        for x, row, given in zip(inputs, rows, (None, *static), strict=True)
    ]


def _project(x: jax.Array, kernel: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Projects `(N, T, E)` to `(N, H, T, D)`."""
    y = accumulated("nte,ehd->nhtd", x, kernel)
    y = y if offset is None else y + offset.astype(y.dtype)[None, :, None]
    return y.astype(x.dtype)
