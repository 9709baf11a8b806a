"""Apple BNNS's multi-head attention layer, `BNNSApplyMultiheadAttention` and its `...Backward`, in JAX terms.

`BNNSFilterCreateLayerMultiheadAttention` makes an object of the layer's parameters `F`, which the calls take;
here they take `F` itself.

Kept from the source:
  * names and order of the arguments; a layer is three input projections and one output projection, each a
    triple `(target_desc, weights, bias)`; weights are `d_model x d_key x num_heads`, the output's are
    `(num_heads * d_value) x d_model`, biases `d_key x num_heads` and `d_model`;
  * `F` is the layer; logits are divided by sqrt(d_key), there is no other scale;
  * `key_mask` is True where a key is ignored; `add_to_attention` is added to the scaled logits, or boolean,
    True = -inf: `L x S` for all, `H x L x S` per head, or `B x H x L x S`;
  * `key_attn_bias`, `value_attn_bias` `d_key x num_heads`, `d_value x num_heads`: one more key and value of
    each head, then with `add_zero_attn` a row of zeros; no mask reaches them;
  * dropout acts on the softmax, in the forward as in the backward, from `seed`; outside (0, 1) is none;
  * in the backward each `..._delta` is a triple too: deltas of the input, the weights and the bias. None
    instead of a triple, or None or False in it, is a delta that is not asked for: it is not computed, and
    None comes back. `output_param_delta.target_desc` is the cotangent of the output;
  * with `sum_aliased`, deltas of query, key and value that go to one destination are each the sum of those
    that are asked for. One destination means one Python object: under `jax.jit`, pass it once;
  * `backprop_cache` is optional; without one the backward runs the forward again.

Changed:
  * results are returned: the forward returns the output, and the cache if `backprop_cache` is True; in the
    backward, True in a triple asks for that delta, and so does an array of its shape, which is not written;
  * without `sum_aliased`, the default, each delta is its own, be the inputs one array or not, so that their
    sum is the gradient of that array;
  * `add_to_attention` may have any of its shapes in the backward too (the source documents 2-D), and has no
    delta, as in the source; `jax.vjp` of the forward gives one;
  * widths of query, key, value and output may differ; `batch_size` is checked, None will do; without it
    input may be unbatched; `output` in the backward is checked, not read; None will do;
  * the `target_desc` of a layer, a shape that follows from the input, is checked, None will do;
  * a query that may see nothing gets 0 from the attention, and gradient 0; the source does not say.

Left out, for it has no meaning in JAX:
  * every `..._stride`: an array knows its layout;
  * `backprop_cache_size`, `workspace`, `workspace_size`: XLA allocates;
  * the filter parameters and the status code: errors are raised.

References:
  Apple Accelerate, BNNS, BNNSApplyMultiheadAttention, BNNSApplyMultiheadAttentionBackward.
"""

from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, numerics
from jax_attn_bwd._core.types import Save
from jax_attn_bwd.compat.calls import arrays, both, check_slot, is_asked, mask, merged, shaped
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionGrads, MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer
from jax_attn_bwd.ops.multi_head import multi_head_attention_bwd as _layer_bwd
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionResidual, described

__all__ = [
    "BNNSLayerParametersMultiheadAttention",
    "BNNSMHAProjectionParameters",
    "BNNSMultiheadAttentionDeltas",
    "apply_multihead_attention",
    "apply_multihead_attention_backward",
]

_SAVE: Save = "qkv"  # what the cache holds beside the heads' output: the projected heads


class BNNSMHAProjectionParameters(NamedTuple):
    """A projection; or its deltas; or in a backward, for each member, whether its delta is asked for."""

    target_desc: Any = None  # in a layer the input's (length, width) or None; in a delta that of the input
    weights: Any = None  # d_model x d_key x num_heads; of the output (num_heads * d_value) x d_model
    bias: Any = None  # d_key x num_heads, or None; of the output d_model


class BNNSLayerParametersMultiheadAttention(NamedTuple):
    """A layer. As a pytree its leaves are arrays alone; all else, `target_desc` too, is static."""

    query: BNNSMHAProjectionParameters
    key: BNNSMHAProjectionParameters
    value: BNNSMHAProjectionParameters
    add_zero_attn: bool = False
    key_attn_bias: Any = None  # d_key x num_heads
    value_attn_bias: Any = None  # d_value x num_heads
    output: BNNSMHAProjectionParameters = BNNSMHAProjectionParameters()
    dropout: float = 0.0
    seed: int = 0


_STATIC = ("add_zero_attn", "dropout", "seed")
_DYNAMIC = tuple(n for n in BNNSLayerParametersMultiheadAttention._fields if n not in _STATIC)
_INPUTS = ("query", "key", "value")
_PROJECTIONS = (*_INPUTS, "output")


def _flatten(F: BNNSLayerParametersMultiheadAttention) -> tuple[list, tuple]:
    given = {n: getattr(F, n) for n in _DYNAMIC}
    targets: list[Any] = [None] * len(_PROJECTIONS)
    for i, name in enumerate(_PROJECTIONS):
        triple = given[name]
        if isinstance(triple, BNNSMHAProjectionParameters) and triple.target_desc is not None:
            targets[i] = _target_shape(triple)
            given[name] = triple._replace(target_desc=None)
    static = (*(getattr(F, n) for n in _STATIC), tuple(targets))
    return [(jax.tree_util.GetAttrKey(n), x) for n, x in given.items()], static


def _unflatten(static: tuple, dynamic: Any) -> BNNSLayerParametersMultiheadAttention:
    *flags, targets = static
    given = dict(zip(_DYNAMIC, dynamic, strict=True))
    for name, target in zip(_PROJECTIONS, targets, strict=True):
        if target is not None:
            given[name] = given[name]._replace(target_desc=target)
    return BNNSLayerParametersMultiheadAttention(**given, **dict(zip(_STATIC, flags, strict=True)))


jax.tree_util.register_pytree_with_keys(BNNSLayerParametersMultiheadAttention, _flatten, _unflatten)


class BNNSMultiheadAttentionDeltas(NamedTuple):
    """Holds what the backward returns, each with its argument's shape and dtype; None = not asked for."""

    query_param_delta: BNNSMHAProjectionParameters
    key_param_delta: BNNSMHAProjectionParameters
    value_param_delta: BNNSMHAProjectionParameters
    key_attn_bias_delta: jax.Array | None
    value_attn_bias_delta: jax.Array | None
    output_param_delta: BNNSMHAProjectionParameters  # target_desc None


class _Call(NamedTuple):
    """Holds a checked call in the terms of the layer."""

    params: MultiHeadAttentionParams
    inputs: tuple[jax.Array, jax.Array, jax.Array]
    options: dict[str, Any]


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
    call = _checked_call(name, F, batch_size, query, key, key_mask, value, add_to_attention)
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
    call = _checked_call(name, F, batch_size, query, key, key_mask, value, add_to_attention)
    # What the caller gives to be written into asks for a gradient.
    triples = {
        "query": query_param_delta,
        "key": key_param_delta,
        "value": value_param_delta,
        "out": output_param_delta,
    }
    asked = _asked(name, triples, key_attn_bias_delta, value_attn_bias_delta)
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
    wanted = {field for field, (argument, slot) in asked.items() if is_asked(name, argument, slot)}
    # Only what is asked for, and is there, is computed.
    present = {*_INPUTS, *(n for n, x in call.params._asdict().items() if x is not None)}
    wrt = sorted(wanted & present)
    grads = _layer_bwd(
        dout, call.params, *call.inputs, residual=backprop_cache, save=_SAVE, wrt=wrt, **call.options
    )
    if checks.flag(name, "sum_aliased", sum_aliased):
        given = {"query": query, "key": key, "value": value}
        slots = {n: asked[n][1] if n in asked else None for n in given}
        grads = _with_sums(grads, {n: slots[n] if checks.is_array(slots[n]) else given[n] for n in given})
    # Every delta must fit the array that asked for it.
    found = _deltas(grads)
    for argument, slot in asked.values():
        delta = attrgetter(argument)(found)
        if delta is not None:
            check_slot(name, argument, slot, delta, (delta.dtype,))
    return found


def _check_cache(operator: str, call: _Call, cache: Any) -> None:
    """Raises for a cache of other shapes than a forward of this call returns."""
    expect = "be None or the cache that apply_multihead_attention(..., backprop_cache=True) returned"
    cache = checks.instance(operator, "backprop_cache", cache, MultiHeadAttentionResidual, expected=expect)
    forward = lambda: _layer(call.params, *call.inputs, return_residual=True, save=_SAVE, **call.options)
    own = described(jax.eval_shape(forward)[1])
    if (given := described(cache)) != own:
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves(own), strict=False)
        other = next((f"{x} where {y} is needed" for x, y in pairs if x != y), "more or fewer arrays")
        expect = f"{expect} for the same arguments"
        raise ValueError(checks.message(operator, "backprop_cache", expect, f"another's, with {other}"))


def _asked(operator: str, triples: dict[str, Any], row_k: Any, row_v: Any) -> dict[str, tuple[str, Any]]:
    """Returns by the layer's names the source's name of each slot, and what is in it."""
    asked = {"bias_k": ("key_attn_bias_delta", row_k), "bias_v": ("value_attn_bias_delta", row_v)}
    for part, triple in triples.items():
        argument = f"{'output' if part == 'out' else part}_param_delta"
        if triple is not None or part == "out":
            checks.instance(operator, argument, triple, BNNSMHAProjectionParameters)
            asked[f"{part}_kernel"] = f"{argument}.weights", triple.weights
            asked[f"{part}_bias"] = f"{argument}.bias", triple.bias
            if part != "out":
                asked[part] = f"{argument}.target_desc", triple.target_desc
    return asked


def _with_sums(grads: Any, goes_to: dict[str, Any]) -> Any:
    """Sums the deltas of inputs that have one destination, where they are asked for."""
    totals = {}
    for name, x in goes_to.items():
        same = (getattr(grads, n) for n, y in goes_to.items() if y is x)
        totals[name] = None if getattr(grads, name) is None else numerics.total(*same)
    return grads._replace(**totals)


def _checked_call(operator: str, F, batch_size, query, key, key_mask, value, add_to_attention) -> _Call:
    """Checks the arguments that forward and backward share."""
    F = checks.instance(operator, "F", F, BNNSLayerParametersMultiheadAttention)
    # Query, key and value have one rank and batch, and the lengths that their descriptions tell.
    given = _arrays(operator, F, query, key, value)
    x = {name: given[name] for name in _INPUTS}
    rank = x["query"].ndim
    checks.rank(operator, "query", x["query"], "(batch_size, L, d_model) or (L, d_model)", 2, 3)
    for name in _INPUTS[1:]:
        if x[name].ndim != rank:
            expected = f"have the rank {rank} of query"
            raise ValueError(checks.message(operator, name, expected, x[name].shape))
    batch = x["query"].shape[:-2]
    if batch_size is not None and (checks.integer(operator, "batch_size", batch_size, least=0),) != batch:
        expected = f"be {batch[0]}, that of query" if batch else "be None without a batch"
        raise ValueError(checks.message(operator, "batch_size", expected, batch_size))
    L, S = x["query"].shape[-2], x["key"].shape[-2]
    for name, length in zip(_INPUTS, (L, S, S), strict=True):
        letter, width = "L" if name == "query" else "S", x[name].shape[-1]
        letters = f"(batch_size, {letter}, d_model)" if batch else f"({letter}, d_model)"
        checks.shape(operator, name, x[name], letters, (*batch, length, width))
        _check_target(operator, name, getattr(F, name), (length, width))
    # The four projections, and the options of the layer.
    params = _params(operator, given)
    _check_target(operator, "output", F.output, (L, given["F.output.weights"].shape[-1]))
    H = given["F.query.weights"].shape[-1]
    options = _masks(operator, batch, (H, L, S), key_mask, add_to_attention)
    options["add_zero_attn"] = checks.flag(operator, "F.add_zero_attn", F.add_zero_attn)
    rate = checks.python_float(operator, "F.dropout", F.dropout)
    if checks.integer(operator, "F.seed", F.seed, least=0) > np.iinfo(np.uint32).max:
        raise ValueError(checks.message(operator, "F.seed", "fit 32 bits", F.seed))
    if 0 < rate < 1:
        options |= {"dropout_rate": rate, "dropout_key": jax.random.key(np.uint32(F.seed))}
    return _Call(params, tuple(x.values()), options)


def _arrays(operator: str, F: Any, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Returns every floating array of the call, by its name in the source."""
    given = {"query": query, "key": key, "value": value}
    for name in _PROJECTIONS:
        triple = checks.instance(operator, f"F.{name}", getattr(F, name), BNNSMHAProjectionParameters)
        given |= {f"F.{name}.weights": triple.weights, f"F.{name}.bias": triple.bias}
    given |= {"F.key_attn_bias": F.key_attn_bias, "F.value_attn_bias": F.value_attn_bias}
    needed = (*_INPUTS, *(f"F.{name}.weights" for name in _PROJECTIONS))
    return arrays(operator, needed, **given)


def _target_shape(triple: BNNSMHAProjectionParameters) -> Any:
    """Returns (length, width) where `target_desc` is that, or has that shape; else what it is."""
    target = getattr(triple.target_desc, "shape", triple.target_desc)
    return tuple(target) if isinstance(target, list | tuple) else target


def _check_target(operator: str, name: str, triple: Any, expected: tuple[int, int]) -> None:
    if triple.target_desc is not None:
        shape = _target_shape(triple)
        if shape != expected:
            wanted = f"be None or of shape {expected}"
            raise ValueError(checks.message(operator, f"F.{name}.target_desc", wanted, shape))


def _params(operator: str, given: dict[str, Any]) -> MultiHeadAttentionParams:
    """Returns the layer's parameters, heads before head sizes."""

    def rank(name: str, letters: str, n: int) -> tuple[int, ...]:
        checks.rank(operator, name, given[name], letters, n)
        return given[name].shape

    # Weights tell the sizes that all else must have.
    checked = partial(shaped, operator, given)
    _, d_key, H = rank("F.query.weights", "(d_model, d_key, num_heads)", 3)
    _, d_value, _ = rank("F.value.weights", "(d_model, d_value, num_heads)", 3)
    *_, d_out = rank("F.output.weights", "(num_heads * d_value, d_model)", 2)
    # (d_model, d_key, num_heads) of the source is (d_model, num_heads, d_key) in the layer.
    found: dict[str, Any] = {}
    for name, head, size in (("query", "key", d_key), ("key", "key", d_key), ("value", "value", d_value)):
        width, letters = given[name].shape[-1], f"(d_model, d_{head}, num_heads)"
        kernel = checked(f"F.{name}.weights", letters, width, size, H)
        bias = checked(f"F.{name}.bias", f"(d_{head}, num_heads)", size, H)
        found[f"{name}_kernel"] = kernel.transpose(0, 2, 1)
        found[f"{name}_bias"] = None if bias is None else bias.T
    # The output projection, and the appended row.
    letters = "(num_heads * d_value, d_model)"
    kernel = checked("F.output.weights", letters, H * d_value, d_out)
    bias = checked("F.output.bias", "(d_model,)", d_out)
    row_k = checked("F.key_attn_bias", "(d_key, num_heads)", d_key, H)
    row_v = checked("F.value_attn_bias", "(d_value, num_heads)", d_value, H)
    both(operator, **{"F.key_attn_bias": row_k, "F.value_attn_bias": row_v})
    found |= {"out_kernel": kernel.reshape(H, d_value, d_out), "out_bias": bias}
    for name, row in (("bias_k", row_k), ("bias_v", row_v)):
        found[name] = None if row is None else row.T
    return MultiHeadAttentionParams(**found)


def _masks(
    operator: str, batch: tuple[int, ...], sizes: tuple[int, int, int], key_mask: Any, add_to_attention: Any
) -> dict[str, Any]:
    """Returns the layer's `mask` and `bias`, of rank 3 or 4."""
    (H, L, S), ones = sizes, (1,) * len(batch)
    ignored = added = None
    # Keys that are ignored: (batch or 1, 1, 1, S).
    if key_mask is not None:
        if not checks.is_array(key_mask) or key_mask.dtype != np.bool_:
            got = f"dtype {key_mask.dtype}" if checks.is_array(key_mask) else type(key_mask).__name__
            raise TypeError(checks.message(operator, "key_mask", "be boolean (True = ignored)", got))
        ignored, batched = jnp.asarray(key_mask), key_mask.ndim == 1 + len(batch)
        letters = "(batch_size, S)" if batch and batched else "(S,)"
        checks.shape(operator, "key_mask", ignored, letters, (*(batch if batched else ()), S))
        ignored = ignored.reshape(*(batch if batched else ones), 1, 1, S)
    # What is added to the logits, or hides: (batch or 1, H or 1, L, S).
    if add_to_attention is not None:
        added = mask(operator, "add_to_attention", add_to_attention)
        forms = {2: ("(L, S)", (L, S)), 3: ("(num_heads, L, S)", (H, L, S))}
        if batch:
            forms[4] = "(batch_size, num_heads, L, S)", (*batch, H, L, S)
        names = " or ".join(letters for letters, _ in forms.values())
        checks.rank(operator, "add_to_attention", added, names, *forms)
        checks.shape(operator, "add_to_attention", added, *forms[added.ndim])
        rank = 3 + len(batch)
        added = added.reshape((1,) * (rank - added.ndim) + added.shape)
    return merged(ignored, added)


def _deltas(grads: MultiHeadAttentionGrads) -> BNNSMultiheadAttentionDeltas:
    """Returns the layer's gradients in the source's shapes."""
    p = grads.params
    found: dict[str, Any] = {}
    for name in _INPUTS:
        kernel, bias = getattr(p, f"{name}_kernel"), getattr(p, f"{name}_bias")
        kernel = None if kernel is None else kernel.transpose(0, 2, 1)
        bias = None if bias is None else bias.T
        triple = BNNSMHAProjectionParameters(getattr(grads, name), kernel, bias)
        found[f"{name}_param_delta"] = triple
    w = p.out_kernel
    w = None if w is None else w.reshape(w.shape[0] * w.shape[1], w.shape[2])
    found["output_param_delta"] = BNNSMHAProjectionParameters(None, w, p.out_bias)
    for name, row in (("key", p.bias_k), ("value", p.bias_v)):
        found[f"{name}_attn_bias_delta"] = None if row is None else row.T
    return BNNSMultiheadAttentionDeltas(**found)
