"""The source's structures, and the layer's parameters and options from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.multi_head import arrays, both, integer, mask, merged
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionGrads, MultiHeadAttentionParams


class BNNSMHAProjectionParameters(NamedTuple):
    """A projection; or its deltas; or in a backward, for each member, whether its delta is asked for."""

    target_desc: Any = (
        None  # in a layer the input's (length, width) or None; in a delta the delta of the input
    )
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
INPUTS = ("query", "key", "value")
_PROJECTIONS = (*INPUTS, "output")


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
    """What the backward returns, each with its argument's shape and dtype; None = not asked for."""

    query_param_delta: BNNSMHAProjectionParameters
    key_param_delta: BNNSMHAProjectionParameters
    value_param_delta: BNNSMHAProjectionParameters
    key_attn_bias_delta: jax.Array | None
    value_attn_bias_delta: jax.Array | None
    output_param_delta: BNNSMHAProjectionParameters  # target_desc None


class Call(NamedTuple):
    """A checked call."""

    params: MultiHeadAttentionParams
    inputs: tuple[jax.Array, jax.Array, jax.Array]
    options: dict[str, Any]


def checked_call(
    operator: str,
    F: Any,
    batch_size: Any,
    query: Any,
    key: Any,
    key_mask: Any,
    value: Any,
    add_to_attention: Any,
) -> Call:
    """The arguments that forward and backward share, checked."""
    if not isinstance(F, BNNSLayerParametersMultiheadAttention):
        expected = "be a BNNSLayerParametersMultiheadAttention"
        raise TypeError(checks.message(operator, "F", expected, type(F).__name__))
    # Query, key and value have one rank and batch, and the lengths that their descriptions tell.
    given = _arrays(operator, F, query, key, value)
    x = {name: given[name] for name in INPUTS}
    rank = x["query"].ndim
    if rank not in (2, 3):
        expected = "have shape (batch_size, L, d_model) or (L, d_model)"
        raise ValueError(checks.message(operator, "query", expected, x["query"].shape))
    for name in INPUTS[1:]:
        if x[name].ndim != rank:
            expected = f"have the rank {rank} of query"
            raise ValueError(checks.message(operator, name, expected, x[name].shape))
    batch = x["query"].shape[:-2]
    if batch_size is not None and (integer(operator, "batch_size", batch_size),) != batch:
        expected = f"be {batch[0]}, that of query" if batch else "be None without a batch"
        raise ValueError(checks.message(operator, "batch_size", expected, batch_size))
    L, S = x["query"].shape[-2], x["key"].shape[-2]
    for name, length in zip(INPUTS, (L, S, S), strict=True):
        letters = ("(batch_size, {}, d_model)" if batch else "({}, d_model)").format(
            "L" if name == "query" else "S"
        )
        width = x[name].shape[-1]
        checks.shape(operator, name, x[name], letters, (*batch, length, width))
        _check_target(operator, name, getattr(F, name), (length, width))
    # The four projections, and the options of the layer.
    params = _params(operator, given)
    _check_target(operator, "output", F.output, (L, given["F.output.weights"].shape[-1]))
    H = given["F.query.weights"].shape[-1]
    options = _masks(operator, batch, (H, L, S), key_mask, add_to_attention)
    options["add_zero_attn"] = checks.flag(operator, "F.add_zero_attn", F.add_zero_attn)
    rate = checks.python_float(operator, "F.dropout", F.dropout)
    if integer(operator, "F.seed", F.seed) > np.iinfo(np.uint32).max:
        raise ValueError(checks.message(operator, "F.seed", "fit 32 bits", F.seed))
    if 0 < rate < 1:
        options |= {"dropout_rate": rate, "dropout_key": jax.random.key(np.uint32(F.seed))}
    return Call(params, tuple(x.values()), options)


def _arrays(operator: str, F: Any, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Every floating array of the call, by its name in the source."""
    given = {"query": query, "key": key, "value": value}
    for name in _PROJECTIONS:
        triple = getattr(F, name)
        if not isinstance(triple, BNNSMHAProjectionParameters):
            expected = "be a BNNSMHAProjectionParameters"
            raise TypeError(checks.message(operator, f"F.{name}", expected, type(triple).__name__))
        given |= {f"F.{name}.weights": triple.weights, f"F.{name}.bias": triple.bias}
    given |= {"F.key_attn_bias": F.key_attn_bias, "F.value_attn_bias": F.value_attn_bias}
    needed = (*INPUTS, *(f"F.{name}.weights" for name in _PROJECTIONS))
    return arrays(operator, needed, **given)


def _target_shape(triple: BNNSMHAProjectionParameters) -> Any:
    """(length, width) where `target_desc` is that, or has that shape; else what it is."""
    target = getattr(triple.target_desc, "shape", triple.target_desc)
    return tuple(target) if isinstance(target, list | tuple) else target


def _check_target(operator: str, name: str, triple: Any, expected: tuple[int, int]) -> None:
    if triple.target_desc is not None:
        shape = _target_shape(triple)
        if shape != expected:
            wanted = f"be None or of shape {expected}"
            raise ValueError(checks.message(operator, f"F.{name}.target_desc", wanted, shape))


def _params(operator: str, given: dict[str, Any]) -> MultiHeadAttentionParams:
    """The layer's parameters, heads before head sizes."""

    def rank(name: str, letters: str, n: int) -> tuple[int, ...]:
        if given[name].ndim != n:
            raise ValueError(checks.message(operator, name, f"have shape {letters}", given[name].shape))
        return given[name].shape

    def checked(name: str, letters: str, *expected: int) -> Any:
        if given[name] is not None:
            checks.shape(operator, name, given[name], letters, expected)
        return given[name]

    _, d_key, H = rank("F.query.weights", "(d_model, d_key, num_heads)", 3)
    _, d_value, _ = rank("F.value.weights", "(d_model, d_value, num_heads)", 3)
    *_, d_out = rank("F.output.weights", "(num_heads * d_value, d_model)", 2)
    found: dict[str, Any] = {}
    for name, head, size in (("query", "key", d_key), ("key", "key", d_key), ("value", "value", d_value)):
        width, letters = given[name].shape[-1], f"(d_model, d_{head}, num_heads)"
        kernel = checked(f"F.{name}.weights", letters, width, size, H)
        bias = checked(f"F.{name}.bias", f"(d_{head}, num_heads)", size, H)
        found[f"{name}_kernel"] = kernel.transpose(0, 2, 1)
        found[f"{name}_bias"] = None if bias is None else bias.T
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
    """The layer's `mask` and `bias`, of rank 3 or 4."""
    (H, L, S), ones = sizes, (1,) * len(batch)
    ignored = added = None
    if key_mask is not None:
        if not checks.is_array(key_mask) or key_mask.dtype != np.bool_:
            got = f"dtype {key_mask.dtype}" if checks.is_array(key_mask) else type(key_mask).__name__
            raise TypeError(checks.message(operator, "key_mask", "be boolean (True = ignored)", got))
        ignored, batched = jnp.asarray(key_mask), key_mask.ndim == 1 + len(batch)
        letters = "(batch_size, S)" if batch and batched else "(S,)"
        checks.shape(operator, "key_mask", ignored, letters, (*(batch if batched else ()), S))
        ignored = ignored.reshape(*(batch if batched else ones), 1, 1, S)
    if add_to_attention is not None:
        added = mask(operator, "add_to_attention", add_to_attention)
        forms = {2: ("(L, S)", (L, S)), 3: ("(num_heads, L, S)", (H, L, S))}
        if batch:
            forms[4] = "(batch_size, num_heads, L, S)", (*batch, H, L, S)
        if added.ndim not in forms:
            names = " or ".join(letters for letters, _ in forms.values())
            raise ValueError(checks.message(operator, "add_to_attention", f"have shape {names}", added.shape))
        checks.shape(operator, "add_to_attention", added, *forms[added.ndim])
        rank = 3 + len(batch)
        added = added.reshape((1,) * (rank - added.ndim) + added.shape)
    return merged(ignored, added)


def deltas(grads: MultiHeadAttentionGrads) -> BNNSMultiheadAttentionDeltas:
    """The layer's gradients in the source's shapes."""
    p = grads.params
    found: dict[str, Any] = {}
    for name in INPUTS:
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
