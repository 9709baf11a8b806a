"""`multi_head_attention_backward`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import reduce_to
from jax_attn_bwd._core.serialization import exportable_tuple
from jax_attn_bwd.compat.megengine.call import Call, checked_call
from jax_attn_bwd.compat.megengine.packing import pack_io_weight_bias
from jax_attn_bwd.compat.multi_head import after_dropout
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention_bwd as _layer_bwd

_NAME = "megengine.multi_head_attention_backward"
_MASKS = ("key_padding_mask", "attn_mask")


@exportable_tuple
class MultiHeadAttnGrads(NamedTuple):
    """Gradients, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    io_weight_bias: jax.Array | None = None
    bias_k: jax.Array | None = None
    bias_v: jax.Array | None = None
    key_padding_mask: jax.Array | None = None
    attn_mask: jax.Array | None = None


def multi_head_attention_backward(
    grad_output: jax.Array | None,
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
    grad_weights: jax.Array | None = None,
    wrt: Sequence[str] | None = None,
    dropout_key: jax.Array | None = None,
) -> MultiHeadAttnGrads:
    """The gradients of `multi_head_attention`, those that are asked for.

    Args:
      grad_output: cotangent of `attn_output`, its shape and dtype; None = 0.
      grad_weights: cotangent of `attn_output_weights`; None = 0. The source has none.
      wrt: which of "query", "key", "value", "io_weight_bias", "bias_k", "bias_v" and the floating ones of
        "key_padding_mask" and "attn_mask" to compute; None = all that are given but the masks.
      query, key, value and the others: as in the forward call; `need_weights` only tells whether
        `grad_weights` may be given.

    Returns:
      MultiHeadAttnGrads, each with its argument's shape and dtype; None where not asked for. Where one
      array is given as several inputs, its gradient is the sum of theirs.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      ValueError, TypeError: under the conditions of the forward. ValueError: `wrt` names what has no
        gradient; `grad_weights` without `need_weights`.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import megengine
      >>> x, dy = jax.random.normal(jax.random.key(0), (2, 2, 5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (1, 264))
      >>> grads = megengine.multi_head_attention_backward(
      ...     dy, x, x, x, 8, 4, 0.0, 0.0, w, obias=True, wrt=("query", "io_weight_bias"))
      >>> grads.query.shape, grads.io_weight_bias.shape, grads.key
      ((2, 5, 8), (1, 264), None)
    """
    call = checked_call(
        _NAME, query, key, value, embed_dim, num_heads, attn_drop, out_drop, io_weight_bias,
        (qproj_size, kproj_size, vproj_size, oproj_size), (qbias, kbias, vbias, obias), bias_k, bias_v,
        add_zero_attn, key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal,
        maybe_cudnn_style_mask, reslink, training, dropout_key,
    )  # fmt: skip
    given: dict[str, Any] = {
        "query": query, "key": key, "value": value, "io_weight_bias": io_weight_bias, "bias_k": bias_k,
        "bias_v": bias_v, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask,
    }  # fmt: skip
    present = [n for n, x in given.items() if x is not None and _is_float(x)]
    wrt = [n for n in present if n not in _MASKS] if wrt is None else wrt
    wanted = checks.wanted(_NAME, wrt, tuple(given), present)
    if grad_weights is not None and not need_weights:
        expected = "be None without need_weights=True: there are no weights"
        got = f"shape {jnp.shape(grad_weights)}"
        raise ValueError(checks.message(_NAME, "grad_weights", expected, got))
    # `io_weight_bias` asks for every kernel and bias, a mask that is added for the bias of the logits.
    kernels = [n for n, x in call.params._asdict().items() if x is not None and n not in ("bias_k", "bias_v")]
    asked = [n for n in wanted if n != "io_weight_bias" and n not in _MASKS]
    asked += kernels if "io_weight_bias" in wanted else []
    asked += ["bias"] if set(wanted) & set(_MASKS) else []
    grads: Any = _layer_bwd(
        grad_output if grad_output is None or call.batched else jnp.asarray(grad_output)[None],
        call.params,
        *call.inputs,
        dweights=_of_weights(call, grad_weights, average_attn_weights),
        wrt=asked,
        **call.options,
    )
    # Gradients are packed as the source packs the parameters, and reduced to the shapes of its masks.
    found: dict[str, Any] = {n: getattr(grads, n) for n in ("query", "key", "value")}
    found |= {n: getattr(grads.params, n) for n in ("bias_k", "bias_v")}
    if "io_weight_bias" in wanted:
        found["io_weight_bias"] = _packed(grads.params) if kernels else jnp.zeros(0)
    for name in set(wanted) & set(_MASKS):
        found[name] = reduce_to(grads.bias, _plane(call, name, given[name]))
    shaped = {
        n: x.reshape(jnp.shape(given[n])).astype(given[n].dtype) for n, x in found.items() if n in wanted
    }
    return MultiHeadAttnGrads(**shaped)


def _is_float(x: Any) -> bool:
    return checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _of_weights(call: Call, grad: Any, average: bool) -> jax.Array | None:
    """The cotangent of the layer's weights, by head and before dropout."""
    if grad is None:
        return None
    (N, L, _), S, H = call.inputs[0].shape, call.inputs[1].shape[1], call.sizes.num_heads
    S += (call.params.bias_k is not None) + call.options["add_zero_attn"]
    grad = checks.floating(_NAME, "grad_weights", grad)
    batch = (N,) if call.batched else ()
    expected = (*batch, L, S) if average else (N * H, L, S)
    checks.shape(_NAME, "grad_weights", grad, "of the weights", expected)
    if average:
        grad = jnp.broadcast_to((grad / H).reshape(N, 1, L, S), (N, H, L, S))
    return after_dropout(grad.reshape(N, H, L, S), call.options["dropout_rate"], call.options["dropout_key"])


def _packed(params: MultiHeadAttentionParams) -> jax.Array:
    """The gradient of `io_weight_bias`: heads and head sizes on one axis again."""
    parts: dict[str, Any] = {}
    for name in ("query", "key", "value"):
        kernel, bias = getattr(params, f"{name}_kernel"), getattr(params, f"{name}_bias")
        parts[f"{name}_weight"] = None if kernel is None else kernel.reshape(kernel.shape[0], -1)
        parts[f"{name}_bias"] = None if bias is None else bias.ravel()
    out = params.out_kernel
    parts["out_weight"] = None if out is None else out.reshape(-1, out.shape[-1])
    return pack_io_weight_bias(**parts, out_bias=params.out_bias)


def _plane(call: Call, name: str, mask: Any) -> tuple[int, ...]:
    """The shape in which `mask` is added to the logits."""
    (N, L, _), S, H = call.inputs[0].shape, call.inputs[1].shape[1], call.sizes.num_heads
    if name == "key_padding_mask":
        return (N, 1, 1, S)
    return (N, H, L, S) if mask.ndim == 3 else (1, 1, L, S)
