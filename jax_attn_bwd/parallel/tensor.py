"""The multi-head attention layer with its heads over one mesh axis, and its sequence over another."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, pallas
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams, multi_head_attention
from jax_attn_bwd.parallel.arguments import axis_size
from jax_attn_bwd.parallel.sequence import ring_attention

_NAME = "tensor_parallel_multi_head_attention"
_KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")


def tensor_parallel_multi_head_attention(
    params: MultiHeadAttentionParams,
    query: jax.Array,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    *,
    axis_name: str,
    reduce: str = "psum_scatter",
    sequence_axis_name: str | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    add_zero_attn: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    deterministic: bool = True,
    save: str = "inputs",
    implementation: str | None = None,
) -> jax.Array:
    """`multi_head_attention` with its heads over a mesh axis: each device attends with its own.

        out = sum over devices of attention(x W_q, x W_k, x W_v) W_o  + b_o

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
      dropout_key: the same on all devices: the mask is that of one device.
      dropout_offset: (batch, head, row, column) of all heads of this attention in a larger array.
      scale, is_causal, local_window_size, logits_soft_cap, add_zero_attn, dropout_rate, broadcast_dropout,
        precision, deterministic, save, implementation: as in `multi_head_attention`; with
        `sequence_axis_name` all four kernels are needed, and appended rows and `save` are not to be had.

    Returns:
      `[..., t, Eo]`, dtype of `query`.

    Gradients:
      Every field of `params`, query, key, value and bias, to second order, as in `multi_head_attention`.
      Forward and backward of self-attention take two all-gathers and two reduce-scatters, or with "psum" two
      all-reduces, beside the ring's exchange.

    Raises:
      ValueError: an axis is not bound here; tokens vary over `axis_name` though `reduce="psum"`, or do not
        though it scatters; the kernels do not; no output kernel; appended rows or `save` with
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
    n = axis_size(_NAME, axis_name)
    checks.choice(_NAME, "reduce", reduce, ("psum_scatter", "psum"))
    if not isinstance(params, MultiHeadAttentionParams):
        raise TypeError(
            checks.message(_NAME, "params", "be a MultiHeadAttentionParams", type(params).__name__)
        )
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    _check_sharding(params, inputs, axis_name, n, reduce)
    if reduce == "psum_scatter":
        inputs = {name: _gathered(x, axis_name) for name, x in inputs.items()}
    batch, head, row, column = (0, 0, 0, 0) if dropout_offset is None else dropout_offset
    attention: dict[str, Any] = dict(
        bias=bias, mask=mask, scale=scale, is_causal=is_causal, local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions, key_value_positions=key_value_positions,
        logits_soft_cap=logits_soft_cap, dropout_rate=dropout_rate, dropout_key=dropout_key,
        dropout_offset=(batch, head + lax.axis_index(axis_name) * params.out_kernel.shape[0], row, column),
        broadcast_dropout=broadcast_dropout, precision=precision, deterministic=deterministic,
        implementation=implementation,
    )  # fmt: skip
    own = params._replace(out_bias=None)
    if sequence_axis_name is None:
        attention |= dict(add_zero_attn=add_zero_attn, save=save)
        out = multi_head_attention(own, **inputs, **attention)
    else:
        _check_ring(params, add_zero_attn, save)
        out = _over_ring(own, inputs, sequence_axis_name, attention)
    if reduce == "psum_scatter":
        out = lax.psum_scatter(out, axis_name, scatter_dimension=out.ndim - 2, tiled=True)
    else:
        out = lax.psum(out, axis_name)
    return out if params.out_bias is None else out + to_rank(params.out_bias, out.ndim)


def _check_sharding(params: Any, inputs: dict[str, Any], axis_name: str, n: int, reduce: str) -> None:
    """Heads vary over the axis; tokens do where they are to be gathered."""
    if params.out_kernel is None:
        expected = "be given: it is what sums over the heads of all devices"
        raise ValueError(checks.message(_NAME, "params.out_kernel", expected, None))
    if n == 1:
        return
    varies = lambda x: axis_name in pallas.varying_axes(jnp.asarray(x))
    for name in _KERNELS:
        x = getattr(params, name)
        if x is not None and not varies(x):
            expected = f"hold this device's heads, sharded over {axis_name!r}"
            raise ValueError(checks.message(_NAME, f"params.{name}", expected, "the same on all its devices"))
    for name, x in inputs.items():
        if x is not None and varies(x) != (reduce == "psum_scatter"):
            expected, got = f"be sharded over {axis_name!r}", "the same on all its devices"
            if reduce == "psum":
                expected, got = f"be the same on all devices along {axis_name!r}", "tokens sharded over it"
            other = "psum" if reduce == "psum_scatter" else "psum_scatter"
            raise ValueError(checks.message(_NAME, name, expected, got, f"or choose reduce={other!r}"))


def _check_ring(params: MultiHeadAttentionParams, add_zero_attn: bool, save: str) -> None:
    for name in _KERNELS:
        if getattr(params, name) is None:
            raise ValueError(
                checks.message(_NAME, f"params.{name}", "be given with sequence_axis_name", None)
            )
    default: dict[str, tuple[Any, Any]] = {"params.bias_k": (params.bias_k, None)}
    default |= {"params.bias_v": (params.bias_v, None)}
    default |= {"add_zero_attn": (add_zero_attn, False), "save": (save, "inputs")}
    for argument, (x, expected) in default.items():
        if x is not expected and x != expected:
            got = x if isinstance(x, bool | str) else "an array"
            raise ValueError(
                checks.message(
                    _NAME, argument, f"be {expected!r} with sequence_axis_name", got, "leave it out"
                )
            )


def _gathered(x: jax.Array | None, axis_name: str) -> jax.Array | None:
    return None if x is None else lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)


def _over_ring(params: Any, inputs: dict[str, Any], axis_name: str, attention: dict[str, Any]) -> jax.Array:
    """The layer around `ring_attention`, without the output's bias."""
    query, key, value = inputs.values()
    key = query if key is None else key
    inputs = {"query": query, "key": key, "value": key if value is None else value}
    product = dict(precision=attention["precision"], preferred_element_type=accumulator_dtype(query.dtype))
    heads = []
    for name, x in inputs.items():
        kernel, bias = getattr(params, f"{name}_kernel"), getattr(params, f"{name}_bias")
        y = jnp.einsum("...te,enh->...tnh", x, kernel, **product)
        y = y if bias is None else y + to_rank(bias.astype(y.dtype), y.ndim)
        heads.append(y.astype(x.dtype))
    out = ring_attention(*heads, axis_name=axis_name, sink=params.sink, **attention)
    return jnp.einsum("...tnh,nho->...to", out, params.out_kernel, **product).astype(query.dtype)
