"""`multi_head_attention`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.megengine.masks import mask_options
from jax_attn_bwd.compat.megengine.packing import IOWeightBias, Sizes, layer_sizes, unpack
from jax_attn_bwd.compat.multi_head import after_dropout, arrays, both, drops
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer

_NAME = "megengine.multi_head_attention"


def multi_head_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim: int,
    num_heads: int,
    attn_drop: float,
    out_drop: float,
    io_weight_bias: jax.Array | None,
    qproj_size: int | None = None,
    kproj_size: int | None = None,
    vproj_size: int | None = None,
    oproj_size: int | None = None,
    qbias: bool = False,
    kbias: bool = False,
    vbias: bool = False,
    obias: bool = False,
    bias_k: jax.Array | None = None,
    bias_v: jax.Array | None = None,
    add_zero_attn: bool = False,
    key_padding_mask: jax.Array | None = None,
    attn_mask: jax.Array | None = None,
    need_weights: bool = False,
    average_attn_weights: bool = False,
    is_causal: bool = False,
    maybe_cudnn_style_mask: bool = False,
    reslink: bool = False,
    training: bool = True,
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The multi-head attention layer of MegEngine, its weights in one array.

    Args:
      query: `(N, L, embed_dim)` or `(L, embed_dim)`, floating; the other arrays but
        masks have its dtype.
      key: `(N, S, k_size)` or `(S, k_size)`.
      value: `(N, S, v_size)` or `(S, v_size)`.
      embed_dim: width of query.
      num_heads: divides the projection sizes of query, key and value.
      attn_drop: probability in [0, 1] of dropping a weight, in training.
      out_drop: probability in [0, 1] of dropping an element of the output, in training.
      io_weight_bias: weights and biases; see `unpack_io_weight_bias`.
      qproj_size, kproj_size, vproj_size, oproj_size: widths after projection, over all heads; 0 = not
        projected, None = embed_dim.
      qbias, kbias, vbias, obias: whether `io_weight_bias` has that bias; needs the projection.
      bias_k, bias_v: `(1, 1, kproj_size or k_size)`, `(1, 1, vproj_size or v_size)`, both or neither.
      add_zero_attn: append a key and a value of zeros.
      key_padding_mask: `(N, S)`, unbatched `(S,)`; bool, True = ignored, or floating, added. In cudnn style
        `(2, N)` integers.
      attn_mask: `(L, S)` or `(N * num_heads, L, S)`; bool, True = not allowed, or floating, added. In cudnn
        style `(2, L)` integers.
      need_weights: whether to return the weights.
      average_attn_weights: whether they are averaged over heads.
      is_causal: causal where no mask is given; a hint beside `attn_mask`.
      maybe_cudnn_style_mask: both masks are in cudnn style.
      reslink: add `query` to the output, which must be as wide.
      training: whether dropout counts.
      dropout_key: a JAX random key.

    Returns:
      attn_output: `(N, L, oproj_size)`; without an output projection its last axis is vproj_size, or
        num_heads * v_size. Without N if unbatched.
      attn_output_weights: `(N * num_heads, L, S')`, or `(N, L, S')` averaged, unbatched `(num_heads, L, S')`
        or `(L, S')`; S' = S and the appended rows. None without `need_weights`.

    Gradients:
      Every array, masks that are floating included, of both results, to any order.

    Raises:
      ValueError: shapes disagree, arguments contradict one another.
      TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import megengine
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (1, 264))
      >>> out, weights = megengine.multi_head_attention(
      ...     x, x, x, 8, 4, 0.0, 0.0, w, obias=True, need_weights=True)
      >>> out.shape, weights.shape
      ((2, 5, 8), (8, 5, 5))
    """
    call = checked_call(
        _NAME, query, key, value, embed_dim, num_heads, attn_drop, out_drop, io_weight_bias,
        (qproj_size, kproj_size, vproj_size, oproj_size), (qbias, kbias, vbias, obias), bias_k, bias_v,
        add_zero_attn, key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal,
        maybe_cudnn_style_mask, reslink, training, dropout_key,
    )  # fmt: skip
    q, k, v = call.inputs
    # one array for two inputs is projected, and differentiated, as one
    given = q, None if key is query else k, None if value is key else v
    result: Any = _layer(call.params, *given, return_weights=need_weights, **call.options)
    out, weights = result if need_weights else (result, None)
    if weights is not None:
        weights = after_dropout(weights, call.options["dropout_rate"], dropout_key)
        N, H, L, S = weights.shape
        weights = weights.mean(1) if average_attn_weights else weights.reshape(N * H, L, S)
        weights = weights[0] if average_attn_weights and not call.batched else weights
    return out if call.batched else out[0], weights


class Call(NamedTuple):
    """A call of the source in the layer's terms."""

    params: MultiHeadAttentionParams
    inputs: tuple[jax.Array, jax.Array, jax.Array]  # (N, L or S, width), with an N of 1 if unbatched
    options: dict[str, Any]  # what the layer is called with
    sizes: Sizes
    batched: bool


def checked_call(
    operator: str, query, key, value, embed_dim, num_heads, attn_drop, out_drop, io_weight_bias, projected,
    biases, bias_k, bias_v, add_zero_attn, key_padding_mask, attn_mask, need_weights, average_attn_weights,
    is_causal, maybe_cudnn_style_mask, reslink, training, dropout_key,
) -> Call:  # fmt: skip
    """The call of these arguments, checked as `multi_head_attention` says."""
    flags = {
        "add_zero_attn": add_zero_attn,
        "need_weights": need_weights,
        "average_attn_weights": average_attn_weights,
        "reslink": reslink,
    }
    for argument, flag in flags.items():
        checks.flag(operator, argument, flag)
    given = arrays(
        operator,
        ("query", "key", "value"),
        query=query,
        key=key,
        value=value,
        io_weight_bias=io_weight_bias,
        bias_k=bias_k,
        bias_v=bias_v,
    )
    # Sizes follow from the inputs; `io_weight_bias` is cut into kernels and biases.
    batched = given["query"].ndim == 3
    _check_inputs(operator, given, embed_dim)
    widths = (given["key"].shape[-1], given["value"].shape[-1])
    sizes = layer_sizes(operator, embed_dim, num_heads, widths, projected)
    parts = unpack(operator, given["io_weight_bias"], sizes, biases)
    params = _params(operator, sizes, parts, given)
    scale = _scale(operator, sizes, reslink)
    rates = {"attn_drop": attn_drop, "out_drop": out_drop}
    attn_rate, out_rate = drops(operator, rates, training, dropout_key)
    # Masks are merged by the source's rules.
    q, k, v = (given[x] if batched else given[x][None] for x in ("query", "key", "value"))
    masks = mask_options(
        operator,
        batched,
        (*q.shape[:2], k.shape[1], sizes.num_heads),
        key_padding_mask,
        attn_mask,
        is_causal,
        maybe_cudnn_style_mask,
    )
    options: dict[str, Any] = dict(
        num_heads=sizes.num_heads, scale=scale, add_zero_attn=add_zero_attn, dropout_rate=attn_rate,
        out_dropout_rate=out_rate, dropout_key=dropout_key, add_residual=reslink, **masks,
    )  # fmt: skip
    return Call(params, (q, k, v), options, sizes, batched)


def _check_inputs(operator: str, given: dict[str, Any], embed_dim: Any) -> None:
    """Query, key and value are all batched or none, and agree on their sizes."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.ndim not in (2, 3):
        expected = "have shape (N, L, embed_dim) or, without a batch, (L, embed_dim)"
        raise ValueError(checks.message(operator, "query", expected, query.shape))
    batch = query.shape[:-2]
    letters = "({}, {}, {})" if batch else "({1}, {2})"
    expected = letters.format("N", "L", "embed_dim")
    checks.shape(operator, "query", query, expected, (*batch, query.shape[-2], embed_dim))
    for name, x, width in (("key", key, "k_size"), ("value", value, "v_size")):
        expected = letters.format("N", "S", width)
        if x.ndim != query.ndim:
            raise ValueError(checks.message(operator, name, f"have shape {expected}", x.shape))
        checks.shape(operator, name, x, expected, (*batch, key.shape[-2], x.shape[-1]))


def _params(
    operator: str, sizes: Sizes, parts: IOWeightBias, given: dict[str, Any]
) -> MultiHeadAttentionParams:
    """The layer's parameters; totals over heads become (heads, head size)."""
    E, k, v, H, q, kp, vp, o = sizes

    def split(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(*x.shape[:-1], H, x.shape[-1] // H)

    out = parts.out_weight
    out = None if out is None else out.reshape(H, (vp or H * v) // H, o)
    both(operator, bias_k=given["bias_k"], bias_v=given["bias_v"])
    found: dict[str, Any] = {"out_kernel": out, "out_bias": parts.out_bias}
    for name in ("query", "key", "value"):
        found[f"{name}_kernel"] = split(getattr(parts, f"{name}_weight"))
        found[f"{name}_bias"] = split(getattr(parts, f"{name}_bias"))
    for name, size, width in (("bias_k", kp, k), ("bias_v", vp, v)):
        row = given[name]
        if row is not None:
            letters = f"(1, 1, {name[-1]}proj_size or {name[-1]}_size)"
            checks.shape(operator, name, row, letters, (1, 1, size or width))
            K = H if kp or vp else 1
            row = row.reshape(K, size // H) if size else jnp.broadcast_to(row[0], (K, width))
        found[name] = row
    return MultiHeadAttentionParams(**found)


def _scale(operator: str, sizes: Sizes, reslink: bool) -> float:
    """What the logits are multiplied by."""
    E, _, v, H, q, _, vp, o = sizes
    if q and E < H:
        expected = f"be num_heads = {H} or more: logits are divided by sqrt(embed_dim // num_heads)"
        raise ValueError(checks.message(operator, "embed_dim", expected, E))
    width = o or vp or H * v
    if reslink and width != E:
        expected = f"be False for an output of width {width} and a query of width {E}"
        raise ValueError(checks.message(operator, "reslink", expected, True))
    return float((E // H if q else E) ** -0.5)
