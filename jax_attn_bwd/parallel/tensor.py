"""The multi-head attention layer with its heads over one mesh axis, and its sequence over another."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, dropout, pallas
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Array, Implementation, Integers, Reduce, Save
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams, dropping, multi_head_attention
from jax_attn_bwd.ops.multi_head.spec import LayerKeywords
from jax_attn_bwd.parallel import tensor_ring
from jax_attn_bwd.parallel.arguments import axis_size, places, token_index
from jax_attn_bwd.parallel.functions import beginning_at
from jax_attn_bwd.parallel.tensor_ring import KERNELS, NAME


class TensorParallelKeywords(LayerKeywords, total=False):
    """Keywords of `tensor_parallel_multi_head_attention` beside the one that changes what it returns."""

    axis_name: Required[str]
    reduce: Reduce
    sequence_axis_name: str | None


# fmt: off
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *,
    return_weights: Literal[False] = False, **options: Unpack[TensorParallelKeywords]) -> jax.Array: ...
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: Literal[True], **options: Unpack[TensorParallelKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: bool, **options: Unpack[TensorParallelKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams[Array],
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    axis_name: str,
    reduce: Reduce = "psum_scatter",
    sequence_axis_name: str | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: Integers | None = None,
    key_value_seq_lengths: Integers | None = None,
    query_segment_ids: Integers | None = None,
    key_value_segment_ids: Integers | None = None,
    query_positions: Integers | None = None,
    key_value_positions: Integers | None = None,
    logits_soft_cap: float | None = None,
    rotary: Rotary | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    mod_args: tuple[Any, ...] = (),
    add_zero_attn: bool = False,
    dropout_rate: float = 0.0,
    out_dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    broadcast_dropout: bool = False,
    add_residual: bool = False,
    return_weights: bool = False,
    average_weights: bool = False,
    precision: Any = None,
    deterministic_sums: bool = True,
    save: Save = "inputs",
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
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
    n = axis_size(NAME, axis_name)
    checks.choice(NAME, "reduce", reduce, get_args(Reduce))
    if not isinstance(params, MultiHeadAttentionParams):
        raise TypeError(
            checks.message(NAME, "params", "be a MultiHeadAttentionParams", type(params).__name__)
        )
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    _check_sharding(params, inputs, axis_name, n, reduce)
    out_kernel: Any = params.out_kernel
    if reduce == "psum_scatter":
        inputs = {name: _gathered(x, axis_name) for name, x in inputs.items()}
    first_head = lax.axis_index(axis_name) * out_kernel.shape[0]
    offset = batch, head, row, column = (0, 0, 0, 0) if dropout_offset is None else dropout_offset
    attention: dict[str, Any] = dict(
        bias=bias, mask=mask, scale=scale, is_causal=is_causal, local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions, key_value_positions=key_value_positions,
        logits_soft_cap=logits_soft_cap, dropout_rate=dropout_rate, dropout_key=dropout_key,
        dropout_offset=(batch, head + first_head, row, column),
        broadcast_dropout=broadcast_dropout, precision=precision, deterministic_sums=deterministic_sums,
        deterministic=deterministic, implementation=implementation,
    )  # fmt: skip
    functions = mask_mod, score_mod, mod_args
    attention |= beginning_at(0, first_head, *functions) or {"mod_args": mod_args}
    own, weights = params._replace(out_bias=None), None
    flags = {"return_weights": return_weights, "average_weights": average_weights}
    if sequence_axis_name is None:
        attention |= dict(add_zero_attn=add_zero_attn, save=save, rotary=rotary, **flags)
        out = multi_head_attention(own, **inputs, **attention)
        out, weights = out if return_weights else (out, None)
    else:
        tensor_ring.check(params, dropout_rate, flags | {"save": save})
        add_zero_attn = checks.flag(NAME, "add_zero_attn", add_zero_attn)
        out = tensor_ring.attend(own, inputs, sequence_axis_name, attention, add_zero_attn, rotary)
    T = out.shape[-2]
    if reduce == "psum_scatter":
        out = lax.psum_scatter(out, axis_name, scatter_dimension=out.ndim - 2, tiled=True)
    else:
        out = lax.psum(out, axis_name)
    out = out if params.out_bias is None else out + to_rank(params.out_bias, out.ndim)
    rate = checks.rate(NAME, "out_dropout_rate", out_dropout_rate)
    words, at = dropout.drawn(NAME, {"out_dropout_rate": rate}, dropout_key, (*offset[:3], 0), T, 0)
    if at is not None:
        row = _rows(at.row, T, query_positions, sequence_axis_name)
        if reduce == "psum_scatter":
            row = lax.dynamic_slice_in_dim(row, lax.axis_index(axis_name) * (T // n), T // n)
        out = out * dropping.of_output(rate, words, at._replace(row=row), out)
    if checks.flag(NAME, "add_residual", add_residual):
        checks.shape(NAME, "the output, with add_residual,", out, "of query", query.shape)
        out = out + query
    if weights is None:
        return out
    return out, lax.pmean(weights, axis_name) if average_weights else weights


def _check_sharding(params: Any, inputs: dict[str, Any], axis_name: str, n: int, reduce: str) -> None:
    """Heads vary over the axis; tokens do where they are to be gathered."""
    if params.out_kernel is None:
        expected = "be given: it is what sums over the heads of all devices"
        raise ValueError(checks.message(NAME, "params.out_kernel", expected, None))
    if n == 1:
        return
    varies = lambda x: axis_name in pallas.varying_axes(jnp.asarray(x))
    for name in KERNELS:
        x = getattr(params, name)
        if x is not None and not varies(x):
            expected = f"hold this device's heads, sharded over {axis_name!r}"
            raise ValueError(checks.message(NAME, f"params.{name}", expected, "the same on all its devices"))
    for name, x in inputs.items():
        if x is not None and varies(x) != (reduce == "psum_scatter"):
            expected, got = f"be sharded over {axis_name!r}", "the same on all its devices"
            if reduce == "psum":
                expected, got = f"be the same on all devices along {axis_name!r}", "tokens sharded over it"
            other = "psum" if reduce == "psum_scatter" else "psum_scatter"
            raise ValueError(checks.message(NAME, name, expected, got, f"or choose reduce={other!r}"))


def _rows(start: jax.Array, T: int, positions: Any, sequence_axis_name: str | None) -> jax.Array:
    """The rows of the T gathered tokens in masks of dropout, uint32 `[T]`."""
    device = jnp.int32(0) if sequence_axis_name is None else lax.axis_index(sequence_axis_name)
    positions = None if positions is None or sequence_axis_name is None else jnp.asarray(positions)
    return places(NAME, start, token_index(positions, T, 0, device))


def _gathered(x: jax.Array | None, axis_name: str) -> jax.Array | None:
    return None if x is None else lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)
