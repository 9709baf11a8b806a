"""Dense attention with the sequence sharded over a mesh axis: the public functions, and their rule.

Ring and all-gather attention compute blocks on each device and have the derivatives of their exchange; with
`forward_mode=True` the same forward and backward, and a tangent rule beside them. `ulysses.py` has its own.
"""

from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, keywords, pallas
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import match_types, tie
from jax_attn_bwd._core.types import Array, SequenceLayout, typed_like
from jax_attn_bwd.ops.dot_product import blockwise, dot_product_attention
from jax_attn_bwd.ops.dot_product.spec import (
    DIFFERENTIABLE,
    DotProductAttentionKeywords,
    Operands,
    Residuals,
    Result,
    Wanted,
    as_cotangents,
)
from jax_attn_bwd.parallel import all_gather, ring, ulysses
from jax_attn_bwd.parallel.arguments import Exchange, prepare


class SequenceKeywords(DotProductAttentionKeywords, total=False):
    """Keywords of the exchanges beside the axis and the one that changes what they return."""

    layout: SequenceLayout
    forward_mode: bool


# fmt: off
@overload
def ring_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    axis_name: str, return_residual: Literal[False] = False, **options: Unpack[SequenceKeywords]
) -> jax.Array: ...
@overload
def ring_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    axis_name: str, return_residual: Literal[True], **options: Unpack[SequenceKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ring_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    axis_name: str, return_residual: bool, **options: Unpack[SequenceKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    axis_name: str,
    return_residual: bool = False,
    **options: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`dot_product_attention` over a sharded sequence: keys and values travel around a ring of devices.

    Called inside `jax.shard_map(check_vma=True)` under `jax.jit`, by every device for its own queries and
    keys. What is said here of a sequence is said of that of all devices along `axis_name`; the formula and
    what is not named here are those of `dot_product_attention`.

    Each step computes one block while the next keys are on their way; in the backward, the gradients of keys
    and values travel with them. Memory per device is that of its own tokens. Blocks that no query sees by
    positions, segments or lengths are skipped, and with a window over the contiguous layout their keys do not
    travel. Grouped keys travel as they are.

    Layout: device i holds the tokens from i * T on, or with `layout="zigzag"` those that `zigzag(x, n)` gives
    it, which balances causal work; lay out the arrays of tokens and name the layout here by the same word.
    Any other one is told by `query_positions` and `key_value_positions`, laid out like the tokens: there the
    position of a token **is** its index in the sequence, for causality, windows, lengths and dropout alike.

    Shapes, per device: `...` batch axes, T queries, S keys, n devices, N query heads, K key heads.

    Args:
      query: `[..., T, N, H]`, floating.
      key: `[..., S, K, H]`, dtype of `query`.
      value: `[..., S, K, Hv]`, dtype of `query`.
      bias: `[..., N|1, T|1, n * S]`: the rows of this device's queries, and all columns, those of device 0
        first; or `[..., N|1, 1, S]`, a bias of this device's own keys, which travels with them. All n * T
        rows will do, too; of them its own are taken.
      mask: bool, as `bias`; True attends.
      axis_name: the mesh axis that holds the sequence.
      layout: "contiguous", "zigzag" or "striped", the order in which the devices hold tokens.
      is_causal, local_window_size: by the index in the whole sequence.
      query_seq_lengths, key_value_seq_lengths: ints that broadcast to `[...]`, in [0, n * T] and [0, n * S]:
        of the whole sequence. A token whose index is at or beyond the length sees nothing, or is not seen.
      query_segment_ids, key_value_segment_ids: ids of this device's tokens, broadcast to `[..., T]` and
        `[..., S]`; beside lengths, neither the least nor the greatest int32.
      query_positions, key_value_positions: for this device's tokens, broadcast to `[..., T]` and `[..., S]`;
        give both, and no `layout`.
      sink: `[N]`, the same on all devices along `axis_name`.
      mask_mod, score_mod, mod_args: as in `dot_product_attention`; rows and columns count in the whole
        sequence, and mod_args are the same on all devices along `axis_name`: those of whole sequences.
      dropout_key: the same on all devices. The mask is that of one device, in every layout.
      dropout_offset: (batch, head, row, column) of the sequence in a larger array: row and column are added
        to the index of each token, or are index arrays `[T]`, `[S]` of this device's tokens.
      scale, logits_soft_cap, dropout_rate, broadcast_dropout, precision, deterministic_sums, deterministic,
        return_residual: as in `dot_product_attention`.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule:
        the tangents of keys and values are exchanged as keys and values are, in a second round.
      implementation: what computes each block, as in `dot_product_attention`.

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`; with `return_residual` also lse `[..., T, N]`. Both vary over
      `axis_name`.

    Gradients:
      query, key, value, bias, sink, mod_args, through `out` and `lse`, to second order and beyond, as in
      `dot_product_attention`; those of arguments that devices share are summed over them. Sums over blocks
      are accumulated, and travel, in float32 or wider. Saves what `dot_product_attention` does.

    Raises:
      ValueError: `axis_name` is no axis of a `jax.shard_map` around the call, or that one has
        `check_vma=False`; a mask or bias is cut so that it would have to be gathered; positions for one side
        alone, or not those of this device's tokens; and as `dot_product_attention`.
      TypeError, NotImplementedError: as `dot_product_attention`.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import ring_attention
      >>> mesh = jax.make_mesh((1,), ("sequence",))  # as many devices as there are
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> tokens = P(None, "sequence")
      >>> attend = partial(ring_attention, axis_name="sequence", is_causal=True)
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
      >>> with jax.set_mesh(mesh):
      ...     q, k, v = (jax.sharding.reshard(x, tokens) for x in (q, k, v))
      ...     jax.jit(jax.grad(lambda q: attend(q, k, v).sum()))(q).shape
      (2, 16, 4, 8)

    References:
      Liu et al., Ring attention with blockwise transformers, 2023, arXiv:2310.01889.
    """
    arrays = query, key, value, bias, mask
    return _run("ring_attention", arrays, axis_name, return_residual, options)


@typed_like(ring_attention)
@keywords.known
def all_gather_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    axis_name: str, return_residual: bool = False, **options: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention like `ring_attention`, but every device gathers all keys and values, once in each direction.

    One large collective takes the place of n small ones, and one block the place of n: it suits short
    sequences and few key heads. Keys and values take the memory of the whole sequence. Their gradients are
    summed and scattered; for the backward they are gathered again.

    Arguments (`SequenceKeywords`), results, gradients and errors are those of `ring_attention`.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import all_gather_attention
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> attend = partial(all_gather_attention, axis_name="sequence", local_window_size=(4, 0))
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
      >>> jax.jit(attend)(q, k, v).shape
      (2, 16, 4, 8)
    """
    arrays = query, key, value, bias, mask
    return _run("all_gather_attention", arrays, axis_name, return_residual, options)


@typed_like(ring_attention)
@keywords.known
def ulysses_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    axis_name: str, return_residual: bool = False, **options: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention like `ring_attention`, but tokens are exchanged for heads: each device has 1 / n of them.

    Two all-to-alls take the place of a ring, and each device sees whole sequences, so that causal work is
    balanced in every layout. It is the cheapest exchange where n divides the heads: n must divide the key
    heads K, and N with them.

    Arguments (`SequenceKeywords`), results, gradients and errors are those of `ring_attention`,
    but

    * bias, mask: `[..., N, T, n * S]` is exchanged likewise. One that all heads share must hold all n * T
      rows, or 1 row: from the rows of this device's queries alone, the others would have to be gathered.
    * A ValueError is raised also where n does not divide the key heads.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import ulysses_attention
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> attend = partial(ulysses_attention, axis_name="sequence", is_causal=True)
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> jax.jit(attend)(q, k, v).shape
      (2, 16, 4, 8)

    References:
      Jacobs et al., DeepSpeed Ulysses, 2023, arXiv:2309.14509.
    """
    name, arrays = "ulysses_attention", (query, key, value, bias, mask)
    given = _completed(name, options)
    return ulysses.attend(name, *arrays, axis_name=axis_name, return_residual=return_residual, **given)


def _completed(operator: str, options: SequenceKeywords) -> dict[str, Any]:
    """Returns all options of a call, which have the defaults of `dot_product_attention`."""
    given = checks.complete(operator, dot_product_attention, SequenceKeywords, options)
    return {"layout": "contiguous"} | given


# ---- the rule

_EXCHANGES: dict[str, Any] = {"ring_attention": ring, "all_gather_attention": all_gather}


def _run(
    operator: str, arrays: tuple[Any, ...], axis_name: str, return_residual: bool, options: SequenceKeywords
) -> Any:
    """Checks the arguments of a call and returns out, and lse if it is asked for."""
    given = _completed(operator, options)
    forward_mode, implementation = given.pop("forward_mode"), given.pop("implementation")
    exchange, static, operands = prepare(operator, *arrays, axis_name=axis_name, **given)
    return_residual = checks.flag(operator, "return_residual", return_residual)
    example = jax.eval_shape(partial(_EXCHANGES[operator].example, exchange), _alike(exchange, operands))
    plan = blockwise.plan(operator, implementation, static, example)
    run = _OPERATION.runner(operator, forward_mode)
    out, lse = run((operator, exchange, plan), operands)
    return (out, lse) if return_residual else out


def _alike(exchange: Exchange, operands: Operands) -> Operands:
    """Makes `operands` vary over the axis of the sequence and every other that one of them varies over.

    Then no rule of a block has anything to sum over devices: that waits until the exchange is over.
    """
    return pallas.vary_alike((operands, lax.axis_index(exchange.axis_name)))[0]


def _primal(static: tuple[str, Exchange, blockwise.Plan], operands: Operands) -> tuple[jax.Array, jax.Array]:
    result = _exchanged(static, operands)
    return result.out, result.lse


def _exchanged(static, operands) -> Result:
    operator, exchange, plan = static
    alike = _alike(exchange, operands)
    return tie(_EXCHANGES[operator].forward(exchange, plan, alike), alike)


def _forward(static, operands, wanted):
    *exchange, plan = static
    result = _exchanged((*exchange, blockwise.differentiated(plan, wanted)), operands)
    kept = blockwise.pack_residuals(plan, result, wanted)
    return (kept.out, kept.lse), (operands, kept)


def _backward(static, saved, wanted, cotangents):
    operator, exchange, plan = static
    (operands, result), (dout, dlse) = saved, cotangents
    # what no one sees has no gradient, whatever its cotangent is
    result = blockwise.unpack_residuals(result)
    alike, names = _alike(exchange, operands), wanted - {"sink"}
    if dout is None:
        dout = jnp.zeros_like(result.out)
    else:
        dout = jnp.where(blockwise.sees_nothing(alike, result)[..., None], 0, dout)
    if dlse is not None:
        dlse = jnp.where(result.lse == -jnp.inf, 0, dlse)  # nothing seen: it may be anything
    # gradients of the exchange; the sink's is that of whole rows
    run, grads = _EXCHANGES[operator].backward, {}
    if names:
        grads = run(exchange, plan, Residuals(alike, result, Wanted(names)), dout, dlse)
    if "sink" in wanted:
        delta = blockwise.delta(plan.options, alike, result, dout, dlse)
        grads["sink"] = blockwise.gradient_of_sink(alike.sink, result, delta)  # (7) of `ring.py`
    return as_cotangents(operands, match_types(grads, operands))


def _tangent(static, saved, tangents):
    operator, exchange, plan = static
    operands, result = saved
    result = blockwise.unpack_residuals(result)
    alike, tangents = pallas.vary_alike((_alike(exchange, operands), tangents))
    total, mu = _EXCHANGES[operator].tangent(exchange, plan, alike, result, tangents)
    dout = blockwise.through_softmax(result, total, mu)  # (9) of `ring.py`
    return dout.astype(result.out.dtype), mu


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
