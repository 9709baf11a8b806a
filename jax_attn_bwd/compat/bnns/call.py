"""`apply_multihead_attention` and `apply_multihead_attention_backward`."""

from operator import attrgetter
from typing import Any, Literal, overload

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Save
from jax_attn_bwd.compat import destinations
from jax_attn_bwd.compat.bnns.layer import (
    INPUTS,
    BNNSLayerParametersMultiheadAttention,
    BNNSMHAProjectionParameters,
    BNNSMultiheadAttentionDeltas,
    Call,
    checked_call,
    deltas,
)
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer
from jax_attn_bwd.ops.multi_head import multi_head_attention_bwd as _layer_bwd
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionResidual, described

_SAVE: Save = "qkv"  # what the cache holds beside the heads' output: the projected heads


# fmt: off
@overload
def apply_multihead_attention(
    F: BNNSLayerParametersMultiheadAttention, batch_size: int | None, query: jax.Array, key: jax.Array,
    key_mask: jax.Array | None, value: jax.Array, add_to_attention: jax.Array | None = None,
    backprop_cache: Literal[False] = False) -> jax.Array: ...
@overload
def apply_multihead_attention(
    F: BNNSLayerParametersMultiheadAttention, batch_size: int | None, query: jax.Array, key: jax.Array,
    key_mask: jax.Array | None, value: jax.Array, add_to_attention: jax.Array | None = None, *,
    backprop_cache: Literal[True]) -> tuple[jax.Array, MultiHeadAttentionResidual]: ...
@overload
def apply_multihead_attention(
    F: BNNSLayerParametersMultiheadAttention, batch_size: int | None, query: jax.Array, key: jax.Array,
    key_mask: jax.Array | None, value: jax.Array, add_to_attention: jax.Array | None,
    backprop_cache: Literal[True]) -> tuple[jax.Array, MultiHeadAttentionResidual]: ...
@overload
def apply_multihead_attention(
    F: BNNSLayerParametersMultiheadAttention, batch_size: int | None, query: jax.Array, key: jax.Array,
    key_mask: jax.Array | None, value: jax.Array, add_to_attention: jax.Array | None = None,
    backprop_cache: bool = False) -> jax.Array | tuple[jax.Array, MultiHeadAttentionResidual]: ...
# fmt: on
def apply_multihead_attention(
    F: BNNSLayerParametersMultiheadAttention,
    batch_size: int | None,
    query: jax.Array,
    key: jax.Array,
    key_mask: jax.Array | None,
    value: jax.Array,
    add_to_attention: jax.Array | None = None,
    backprop_cache: bool = False,
) -> jax.Array | tuple[jax.Array, MultiHeadAttentionResidual]:
    """`concat(dropout(softmax(masked(q k^T / sqrt(d_key)))) v) W_O + p_O` of the projected inputs.

    Args:
      F: the layer.
      batch_size: number of input-output pairs, or None.
      query: `(batch_size, L, d_model)` or `(L, d_model)`, floating; other arrays but masks have
        its dtype.
      key: `(batch_size, S, d_model)` or `(S, d_model)`.
      key_mask: `(batch_size, S)` or `(S,)`, bool, True = ignored.
      value: `(batch_size, S, d_model)` or `(S, d_model)`.
      add_to_attention: `(L, S)`, `(num_heads, L, S)` or `(batch_size, num_heads, L, S)`; floating, added to
        the scaled logits, or bool, True = -inf.
      backprop_cache: whether to return what spares the backward the forward.

    Returns:
      output: `(batch_size, L, d_model)` or `(L, d_model)`; with `backprop_cache`, `(output, cache)`.

    Gradients:
      Every array in `F`, query, key, value, and a floating `add_to_attention`, to any order.

    Raises:
      ValueError: shapes disagree. TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import bnns
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (8, 4, 2))
      >>> one = bnns.BNNSMHAProjectionParameters(None, w)
      >>> layer = bnns.BNNSLayerParametersMultiheadAttention(
      ...     one, one, one, output=bnns.BNNSMHAProjectionParameters(None, w.reshape(8, 8)))
      >>> bnns.apply_multihead_attention(layer, 2, x, x, None, x).shape
      (2, 5, 8)
    """
    name = "bnns.apply_multihead_attention"
    cached = checks.flag(name, "backprop_cache", backprop_cache)
    call = checked_call(name, F, batch_size, query, key, key_mask, value, add_to_attention)
    save: Save = _SAVE if cached else "inputs"
    found: Any = _layer(call.params, *call.inputs, return_residual=cached, save=save, **call.options)
    return found


def apply_multihead_attention_backward(
    F: BNNSLayerParametersMultiheadAttention,
    batch_size: int | None,
    query: jax.Array,
    query_param_delta: BNNSMHAProjectionParameters | None,
    key: jax.Array,
    key_mask: jax.Array | None,
    key_param_delta: BNNSMHAProjectionParameters | None,
    value: jax.Array,
    value_param_delta: BNNSMHAProjectionParameters | None,
    add_to_attention: jax.Array | None,
    key_attn_bias_delta: bool | jax.Array | None,
    value_attn_bias_delta: bool | jax.Array | None,
    output: jax.Array | None,
    output_param_delta: BNNSMHAProjectionParameters,
    backprop_cache: Any = None,
    *,
    sum_aliased: bool = False,
) -> BNNSMultiheadAttentionDeltas:
    """The gradients of `apply_multihead_attention`.

    Args:
      query_param_delta, key_param_delta, value_param_delta: which deltas are asked for: True, or an array of
        the delta's shape and dtype (the source's destination; its contents are not read), or False or None
        for `target_desc` (the input), `weights` and `bias`; None = none of them.
      key_attn_bias_delta, value_attn_bias_delta: whether these are asked for, in the same way.
      output: what the forward returned, or None.
      output_param_delta: `target_desc` is the cotangent of `output`, its shape and dtype; `weights` and
        `bias` tell whether their deltas are asked for.
      backprop_cache: what the forward returned for the same arguments, or None.
      sum_aliased: deltas of query, key and value that have one destination are each their sum, as in the
        source. A destination is the array in `target_desc`; beside True it is that of the input itself.
      F, batch_size, query, key, key_mask, value, add_to_attention: as in the forward.

    Returns:
      BNNSMultiheadAttentionDeltas, each delta with its argument's shape and dtype; None where not asked for,
      or where the layer has no such array. Where one array is given as several inputs, its gradient is the
      sum of their deltas.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated.

    Raises:
      ValueError, TypeError: under the conditions of the forward.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import bnns
      >>> x = jax.random.normal(jax.random.key(0), (5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (8, 4, 2))
      >>> triple = bnns.BNNSMHAProjectionParameters
      >>> layer = bnns.BNNSLayerParametersMultiheadAttention(
      ...     triple(None, w), triple(None, w), triple(None, w), output=triple(None, w.reshape(8, 8)))
      >>> deltas = bnns.apply_multihead_attention_backward(
      ...     layer, None, x, triple(True, True), x, None, triple(True), x, None, None, None, None, None,
      ...     triple(x, weights=True), sum_aliased=True)
      >>> bool((deltas.query_param_delta.target_desc == deltas.key_param_delta.target_desc).all())
      True
      >>> deltas.query_param_delta.weights.shape, deltas.key_param_delta.weights
      ((8, 4, 2), None)
    """
    name = "bnns.apply_multihead_attention_backward"
    call = checked_call(name, F, batch_size, query, key, key_mask, value, add_to_attention)
    # What the caller gives to be written into asks for a gradient.
    triples = {
        "query": query_param_delta,
        "key": key_param_delta,
        "value": value_param_delta,
        "out": output_param_delta,
    }
    for part, triple in triples.items():
        if not isinstance(triple, BNNSMHAProjectionParameters) and (part == "out" or triple is not None):
            argument = f"{'output' if part == 'out' else part}_param_delta"
            expected = "be a BNNSMHAProjectionParameters"
            raise TypeError(checks.message(name, argument, expected, type(triple).__name__))
    # The output's cotangent comes in the delta of the output.
    dout = checks.floating(name, "output_param_delta.target_desc", output_param_delta.target_desc)
    out_kernel: Any = call.params.out_kernel
    expected_shape = (*call.inputs[0].shape[:-1], out_kernel.shape[-1])
    letters = "(batch_size, L, d_model)" if len(expected_shape) == 3 else "(L, d_model)"
    checks.shape(name, "output_param_delta.target_desc", dout, letters, expected_shape)
    checks.same_dtype(name, query=call.inputs[0], **{"output_param_delta.target_desc": dout})
    if output is not None:
        checks.shape(name, "output", checks.floating(name, "output", output), letters, expected_shape)
    if backprop_cache is not None:
        _check_cache(name, call, backprop_cache)
    asked = _asked(triples, key_attn_bias_delta, value_attn_bias_delta)
    wanted = {
        field for field, (argument, slot) in asked.items() if destinations.is_asked(name, argument, slot)
    }
    # Only what is asked for, and is there, is computed.
    present = {*INPUTS, *(n for n, x in call.params._asdict().items() if x is not None)}
    grads = _layer_bwd(
        dout,
        call.params,
        *call.inputs,
        residual=backprop_cache,
        save=_SAVE,
        wrt=sorted(wanted & present),
        **call.options,
    )
    if checks.flag(name, "sum_aliased", sum_aliased):
        given = {"query": query, "key": key, "value": value}
        slots = {n: asked[n][1] if n in asked else None for n in given}
        grads = _with_sums(grads, {n: slots[n] if checks.is_array(slots[n]) else given[n] for n in given})
    # Every delta must fit the array that asked for it.
    found = deltas(grads)
    for argument, slot in asked.values():
        delta = attrgetter(argument)(found)
        if delta is not None:
            destinations.check(name, argument, slot, delta, (delta.dtype,))
    return found


def _check_cache(operator: str, call: Call, cache: Any) -> None:
    """It is that of a forward of the same shapes."""
    expect = "be None or the cache that apply_multihead_attention(..., backprop_cache=True) returned"
    if not isinstance(cache, MultiHeadAttentionResidual):
        raise TypeError(checks.message(operator, "backprop_cache", expect, type(cache).__name__))
    forward = lambda: _layer(call.params, *call.inputs, return_residual=True, save=_SAVE, **call.options)
    own = described(jax.eval_shape(forward)[1])
    if (given := described(cache)) != own:
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves(own), strict=False)
        other = next((f"{x} where {y} is needed" for x, y in pairs if x != y), "more or fewer arrays")
        expect = f"{expect} for the same arguments"
        raise ValueError(checks.message(operator, "backprop_cache", expect, f"another's, with {other}"))


def _asked(triples: dict[str, Any], row_k: Any, row_v: Any) -> dict[str, tuple[str, Any]]:
    """By the layer's names: the source's name of each slot, and what is in it."""
    asked = {"bias_k": ("key_attn_bias_delta", row_k), "bias_v": ("value_attn_bias_delta", row_v)}
    for part, triple in triples.items():
        argument = f"{'output' if part == 'out' else part}_param_delta"
        if triple is not None:
            asked[f"{part}_kernel"] = f"{argument}.weights", triple.weights
            asked[f"{part}_bias"] = f"{argument}.bias", triple.bias
            if part != "out":
                asked[part] = f"{argument}.target_desc", triple.target_desc
    return asked


def _with_sums(grads: Any, goes_to: dict[str, Any]) -> Any:
    """Where several inputs have one destination, each delta that is asked for is the sum of those."""
    totals = {}
    for name, x in goes_to.items():
        same = [getattr(grads, n) for n, y in goes_to.items() if y is x]
        parts = [g for g in same if g is not None]
        totals[name] = None if getattr(grads, name) is None else sum(parts[1:], parts[0])
    return grads._replace(**totals)
