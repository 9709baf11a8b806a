"""The multi-head attention layer with its heads over one mesh axis, and its sequence over another."""

from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, dropout, keywords
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.sharding import varying
from jax_attn_bwd._core.types import Array, Reduce
from jax_attn_bwd.ops.dot_product.spec import Result
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams, appended, multi_head_attention
from jax_attn_bwd.ops.multi_head.arguments import prepare
from jax_attn_bwd.ops.multi_head.projections import attention_operands, output, output_factors, project
from jax_attn_bwd.ops.multi_head.spec import LayerKeywords, Operands
from jax_attn_bwd.parallel.arguments import axis_size, beginning_at, places, token_index
from jax_attn_bwd.parallel.sequence import ring_attention

_NAME = "tensor_parallel_multi_head_attention"
_KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")
_FUNCTIONS = ("mask_mod", "score_mod", "mod_args")
# around a ring: what the layer does itself, and what the ring is told of the whole sequence
_OF_THE_LAYER = ("add_zero_attn", "average_weights", "rotary", "save")
_OF_THE_RING = (
    *("bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "mask_mod", "score_mod"),
    *("dropout_key", "dropout_offset", "deterministic"),
)


# fmt: off
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, axis_name: str, reduce: Reduce = "psum_scatter",
    sequence_axis_name: str | None = None, return_weights: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[LayerKeywords]) -> jax.Array: ...
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, axis_name: str, reduce: Reduce = "psum_scatter",
    sequence_axis_name: str | None = None, return_weights: Literal[True],
    forward_mode: bool = False, **options: Unpack[LayerKeywords]) -> tuple[jax.Array, jax.Array]: ...
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, axis_name: str, reduce: Reduce = "psum_scatter",
    sequence_axis_name: str | None = None, return_weights: bool,
    forward_mode: bool = False, **options: Unpack[LayerKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array],
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    axis_name: str,
    reduce: Reduce = "psum_scatter",
    sequence_axis_name: str | None = None,
    return_weights: bool = False,
    forward_mode: bool = False,
    **options: Unpack[LayerKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`multi_head_attention` with its heads over a mesh axis: each device attends with its own.

        out = out_dropout(sum over devices of attention(x W_q, x W_k, x W_v) W_o  + b_o) (+ query)

    Called inside `jax.shard_map(check_vma=True)`. With `reduce="psum_scatter"` tokens are sharded over
    `axis_name` outside of the layer: they are gathered before it and scattered behind it, where the devices'
    outputs are summed (sequence parallelism of Megatron: what stands between two layers is computed once).
    With `"psum"` all devices along `axis_name` hold all tokens, before and after.

    With `sequence_axis_name` the tokens, gathered over `axis_name`, are those of one part of a sequence that
    is sharded over that second axis, and attention is `ring_attention` over it. Let the sequence be sharded
    over both, `PartitionSpec((sequence_axis_name, axis_name))`.

    Shapes, per device, n devices along `axis_name`: `...` batch axes, T queries and S keys that attention
    sees here (`t = T / n` and `s = S / n` of them outside with "psum_scatter", else t = T, s = S), N, K this
    device's heads.

    Args:
      params: MultiHeadAttentionParams, each with this device's heads: query_kernel `[Eq, N, H]`, query_bias
        `[N, H]`, key_kernel `[Ek, K, H]`, out_kernel `[N, Hv, Eo]`, and so on. `out_bias [Eo]`, which is
        added once, is the same on all devices.
      query: `[..., t, Eq]`, floating.
      key: `[..., s, Ek]`; None = `query`.
      value: `[..., s, Ev]`; None = `key`.
      axis_name: the mesh axis that holds the heads.
      reduce: "psum_scatter" or "psum".
      sequence_axis_name: a second mesh axis that holds the sequence, or None.
      bias, mask, lengths, segment ids, positions: of the T queries and S keys and of this device's heads, as
        in `multi_head_attention`, with `sequence_axis_name` as in `ring_attention`.
      rotary: `Rotary`, or None: turns the projected queries and keys by their positions, or else by their
        indices in the whole sequence.
      mask_mod, score_mod, mod_args: as in `multi_head_attention`; heads count over all devices, rows and
        columns in the whole sequence, and mod_args are the same on all devices: those of all heads and of
        whole sequences.
      dropout_key: the same on all devices: the mask is that of one device.
      dropout_offset: (batch, head, row, column) of all heads of this attention in a larger array.
      scale, is_causal, local_window_size, logits_soft_cap, add_zero_attn, dropout_rate, out_dropout_rate,
        broadcast_dropout, add_residual, return_weights, average_weights, precision, deterministic_sums, save,
        implementation: as in `multi_head_attention`; with `sequence_axis_name` all four kernels are needed,
        and weights and `save` are not to be had.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule:
        tangents are exchanged as what they are tangents of.
      deterministic: the former name of `deterministic_sums`, deprecated: in layers it is about dropout.

    Returns:
      out: `[..., t, Eo]`, dtype of `query`; with `return_weights` also weights `[..., N, T, S']` of this
      device's heads, or with `average_weights` `[..., T, S']` of all.

    Gradients:
      Every field of `params`, query, key, value, bias and the floats in mod_args, to second order, as in
      `multi_head_attention`.
      Forward and backward of self-attention take two all-gathers and two reduce-scatters, or with "psum" two
      all-reduces, beside the ring's exchange.

    Raises:
      ValueError: an axis is not bound here; tokens vary over `axis_name` though `reduce="psum"`, or do not
        though it scatters; the kernels do not; no output kernel; weights or `save` with
        `sequence_axis_name`; and as `multi_head_attention` and `ring_attention`.
      TypeError, NotImplementedError: as `multi_head_attention`.

    Example:
      >>> import jax
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd import MultiHeadAttentionParams
      >>> from jax_attn_bwd.parallel import tensor_parallel_multi_head_attention
      >>> x, w_q, w_k, w_v, w_o = jax.random.normal(jax.random.key(0), (5, 16, 16))
      >>> q, k, v, o = (w.reshape(16, 4, 4) for w in (w_q, w_k, w_v, w_o.T))
      >>> params = MultiHeadAttentionParams(q, None, k, None, v, None, o.transpose(1, 2, 0))
      >>> heads = P(None, "heads")
      >>> specs = MultiHeadAttentionParams(heads, None, heads, None, heads, None, P("heads"))
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("heads",))
      >>> layer = partial(tensor_parallel_multi_head_attention, axis_name="heads", is_causal=True)
      >>> layer = jax.shard_map(layer, mesh=mesh, in_specs=(specs, P("heads")), out_specs=P("heads"))
      >>> jax.jit(layer)(params, x).shape
      (16, 16)

    References:
      Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, section 3.
      Korthikanti et al., Reducing activation recomputation, 2022, arXiv:2205.05198, section 4.2.2.
    """
    given = checks.complete(_NAME, multi_head_attention, LayerKeywords, options)
    # Tokens in parts are gathered: [..., t, E] -> [..., T, E], T = n * t.
    n = axis_size(_NAME, axis_name)
    checks.choice(_NAME, "reduce", reduce, get_args(Reduce))
    checks.instance(_NAME, "params", params, MultiHeadAttentionParams)
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    _check_sharding(params, inputs, axis_name, n, reduce)
    if reduce == "psum_scatter":
        gathered = lambda x: lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)
        inputs = {name: None if x is None else gathered(x) for name, x in inputs.items()}
    # What follows the sum over the devices' heads is done once, after it.
    own = params._replace(out_bias=None)
    rate = checks.rate(_NAME, "out_dropout_rate", given.pop("out_dropout_rate"))
    add_residual = checks.flag(_NAME, "add_residual", given.pop("add_residual"))
    # Dropout and functions count heads from the first of all devices.
    out_kernel: Any = params.out_kernel
    first_head = lax.axis_index(axis_name) * out_kernel.shape[0]
    offset = (0, 0, 0, 0) if given["dropout_offset"] is None else given["dropout_offset"]
    batch, head, row, column = offset
    given["dropout_offset"] = batch, head + first_head, row, column
    given |= beginning_at(0, first_head, *(given[name] for name in _FUNCTIONS))
    # The layer of this device's heads: out [..., T, Eo] is its share of the sum.
    out: Any
    if sequence_axis_name is None:
        out = multi_head_attention(
            own, **inputs, return_weights=return_weights, forward_mode=forward_mode, **given
        )
    else:
        _check_ring(params, return_weights, given)
        out = _around_ring(own, inputs, sequence_axis_name, given, forward_mode)
    out, weights = out if return_weights else (out, None)
    # The shares are summed; each device keeps all rows, or its own t.
    T = out.shape[-2]
    if reduce == "psum_scatter":
        out = lax.psum_scatter(out, axis_name, scatter_dimension=out.ndim - 2, tiled=True)
    else:
        out = lax.psum(out, axis_name)
    if params.out_bias is not None:  # added in a wide dtype, in which its gradient is summed then
        added = to_rank(jnp.asarray(params.out_bias), out.ndim)
        wide, dtype = accumulator_dtype(out.dtype), jnp.result_type(out, added)
        out = (out.astype(wide) + added.astype(wide)).astype(dtype)
    # Dropout of the output, and the residual, on the rows that are here.
    rates = {"out_dropout_rate": rate}
    words, at = dropout.words_and_offset(_NAME, rates, given["dropout_key"], (*offset[:3], 0), T, 0)
    if at is not None:
        rows = _rows(at.row, T, given["query_positions"], sequence_axis_name)
        if reduce == "psum_scatter":
            rows = lax.dynamic_slice_in_dim(rows, lax.axis_index(axis_name) * (T // n), T // n)
        out = out * output_factors(rate, words, at._replace(row=rows), out)
    if add_residual:
        checks.shape(_NAME, "the output, with add_residual,", out, "of query", query.shape)
        out = out + query
    if weights is None:
        return out
    return out, lax.pmean(weights, axis_name) if given["average_weights"] else weights


def _around_ring(
    params: Any, inputs: dict[str, Any], axis_name: str, given: dict[str, Any], forward_mode: bool
) -> jax.Array:
    """Runs the layer `multi_head_attention` with `ring_attention` in the place of its attention."""
    # The ring checks what belongs to the whole sequence, and draws the dropout of its probabilities.
    layer = given | dict.fromkeys(_OF_THE_RING) | {"mod_args": (), "dropout_rate": 0.0}
    del layer["implementation"]
    options, operands = prepare(
        _NAME, params, **inputs, **layer, num_heads=None, out_dropout_rate=0.0, add_residual=False,
        return_weights=False, return_residual=False,
    )  # fmt: skip
    if options.rotary is not None:
        operands = _with_positions(operands, lax.axis_index(axis_name))
    heads = project(options, operands)
    attention = {name: x for name, x in given.items() if name not in _OF_THE_LAYER}
    attention |= {"sink": params.sink, "axis_name": axis_name, "return_residual": True}
    attention |= {"forward_mode": forward_mode, "scale": options.attention.scale}
    out, lse = ring_attention(*heads, **attention)
    result = Result(out, lse, None)
    # Rows that every query sees join what the ring leaves, on each device for its own queries.
    inner = attention_operands(operands, heads)
    rows = appended.rows(options, operands, inner)
    if rows is not None:
        result = appended.attend(options, inner, rows, result)
    return output(options, operands, result.out)


def _with_positions(operands: Operands, device: jax.Array) -> Operands:
    """Gives `operands` the position of every token: the given ones, or the indices in the whole sequence."""
    mask = operands.mask
    sides = {"query_positions": operands.query, "key_value_positions": operands.inputs[1]}
    index = {n: token_index(getattr(mask, n), x.shape[-2], 0, device) for n, x in sides.items()}
    return operands._replace(mask=mask.replace(**index))


def _check_ring(params: Any, return_weights: bool, given: dict[str, Any]) -> None:
    """Raises where an option, or a parameter that is missing, does not go with a ring."""
    for name in _KERNELS:
        if getattr(params, name) is None:
            expected = "be given with sequence_axis_name"
            raise ValueError(checks.message(_NAME, f"params.{name}", expected, None))
    settings = {"return_weights": return_weights, **{n: given[n] for n in ("average_weights", "save")}}
    if params.bias_k is not None:
        settings["dropout_rate with params.bias_k"] = given["dropout_rate"]
    for argument, x in settings.items():
        if x != (only := "inputs" if argument == "save" else False):
            expected = f"be {only!r} with sequence_axis_name"
            raise ValueError(checks.message(_NAME, argument, expected, x, "leave it out"))


def _check_sharding(params: Any, inputs: dict[str, Any], axis_name: str, n: int, reduce: str) -> None:
    """Raises unless heads vary over the axis, and tokens do where they are to be gathered."""
    # what is sharded over several devices must say so
    if params.out_kernel is None:
        expected = "be given: it is what sums over the heads of all devices"
        raise ValueError(checks.message(_NAME, "params.out_kernel", expected, None))
    if n == 1:
        return
    # heads differ from device to device
    varies = lambda x: axis_name in varying(jnp.asarray(x))
    for name in _KERNELS:
        x = getattr(params, name)
        if x is not None and not varies(x):
            expected = f"hold this device's heads, sharded over {axis_name!r}"
            raise ValueError(checks.message(_NAME, f"params.{name}", expected, "the same on all its devices"))
    # tokens differ where they are gathered and scattered, else they are the same
    for name, x in inputs.items():
        if x is not None and varies(x) != (reduce == "psum_scatter"):
            expected, got = f"be sharded over {axis_name!r}", "the same on all its devices"
            if reduce == "psum":
                expected, got = f"be the same on all devices along {axis_name!r}", "tokens sharded over it"
            other = "psum" if reduce == "psum_scatter" else "psum_scatter"
            raise ValueError(checks.message(_NAME, name, expected, got, f"or choose reduce={other!r}"))


def _rows(start: jax.Array, T: int, positions: Any, sequence_axis_name: str | None) -> jax.Array:
    """Returns the rows of the T gathered tokens in masks of dropout, uint32 `[T]`."""
    device = jnp.int32(0) if sequence_axis_name is None else lax.axis_index(sequence_axis_name)
    positions = None if positions is None or sequence_axis_name is None else jnp.asarray(positions)
    return places(_NAME, start, token_index(positions, T, 0, device))
