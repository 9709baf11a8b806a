"""Linear attention with the sequence sharded over a mesh axis.

A device's tokens take the state before them, S, to the one behind, and read it, affinely:

    S' = F S + D,   out_t = o_t + S^T r_t                                               (1)

D and o are what the operator gives from the state 0. Where nothing is corrected F is diagonal, the product of
the decays, and r the query times those up to it. Under a delta rule, or where keys erase, F `[H, H]` and
r `[T, N, H]` are what the operator gives from the state I for values of 0: one forward with H more columns of
the value has all four.
The devices exchange (D, F) once; each then computes the states before all of them, in order, and reads its
own. So it has the states before its groups of chunks, and from there on its backward is that of one device,
without more columns. The cotangent of the state behind it comes from those after it, by one exchange of
(G, F):

    dS = F^T dS' + G,   G = sum_t r_t dout_t^T                                          (2)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_attn_bwd._core import backend, checks, keywords, pallas
from jax_attn_bwd._core.numerics import accumulator_dtype, saturated
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import match_type, tie, vary_over, varying
from jax_attn_bwd._core.types import Array
from jax_attn_bwd.ops import linear_attention
from jax_attn_bwd.ops.linear_attention import arguments, layout
from jax_attn_bwd.ops.linear_attention.api import IMPLEMENTATIONS, OF_ERASING_KEYS
from jax_attn_bwd.ops.linear_attention.forward import split_heads
from jax_attn_bwd.ops.linear_attention.layout import unit
from jax_attn_bwd.ops.linear_attention.matrix import dot_of, transposed
from jax_attn_bwd.ops.linear_attention.plan import Plan, plan
from jax_attn_bwd.ops.linear_attention.spec import (
    ALL_DIFFERENTIABLE,
    LinearAttentionKeywords,
    Operands,
    Residuals,
    Wanted,
)
from jax_attn_bwd.ops.linear_attention.tangent import tangent
from jax_attn_bwd.parallel.arguments import axis_size


class CutKeywords(LinearAttentionKeywords, total=False):
    """Keywords of linear attention over a sharded sequence beside the axis."""

    forward_mode: bool


# fmt: off
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *, axis_name: str,
    return_final_state: Literal[False] = False, **options: Unpack[CutKeywords]
) -> jax.Array: ...
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *, axis_name: str,
    return_final_state: Literal[True], **options: Unpack[CutKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *, axis_name: str,
    return_final_state: bool, **options: Unpack[CutKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    beta: Array,
    *,
    axis_name: str,
    return_final_state: bool = False,
    **options: Unpack[CutKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` over a sharded sequence, at one exchange of each device's map of the state.

    Called inside `jax.shard_map(check_vma=True)` under `jax.jit`, by every device for its own tokens, those
    from i * T on of device i. Arguments, results, gradients and errors are those of
    `jax_attn_bwd.gated_delta_rule`, of a device's own tokens, but for those named here. The forward has H
    more columns of the value, which `gated_linear_attention` does without, and saves them, `[T, N, H]`.

    Args:
      axis_name: the mesh axis that holds the sequence.
      options: `CutKeywords`. `seq_lengths`, in [0, n * T] with n devices, and `initial_state` are those of
        the whole sequence, the same on all devices along `axis_name`; `segment_ids` those of its own tokens.

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`; with `return_final_state` also the state after the last token
      of the whole sequence, `[..., N, H, Hv]`, the same on all devices along `axis_name`.

    Raises:
      ValueError: `axis_name` is no axis of a `jax.shard_map` around the call, or that one has
        `check_vma=False`; and as `jax_attn_bwd.gated_delta_rule`.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import gated_delta_rule
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> rule = partial(gated_delta_rule, axis_name="sequence", l2_norm_epsilon=1e-6)
      >>> rule = jax.shard_map(rule, mesh=mesh, in_specs=(tokens,) * 5, out_specs=tokens)
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> jax.jit(rule)(q, k, v, -abs(q[..., 0]), abs(k[..., 0])).shape
      (2, 16, 4, 8)
    """
    tokens = query, key, value, log_decay, beta
    return _run(linear_attention.gated_delta_rule, tokens, axis_name, return_final_state, options)


# fmt: off
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *, axis_name: str,
    return_final_state: Literal[False] = False, **options: Unpack[CutKeywords]
) -> jax.Array: ...
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *, axis_name: str,
    return_final_state: Literal[True], **options: Unpack[CutKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *, axis_name: str,
    return_final_state: bool, **options: Unpack[CutKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *, axis_name: str,
    return_final_state: bool = False, **options: Unpack[CutKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """`gated_linear_attention` over a sharded sequence, at one exchange of each device's map of the state.

    Arguments, results, gradients and errors are those of `parallel.gated_delta_rule`, without `beta`.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import gated_linear_attention
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> attend = partial(gated_linear_attention, axis_name="sequence")
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> jax.jit(attend)(q, k, v).shape
      (2, 16, 4, 8)
    """
    tokens = query, key, value, log_decay, None
    return _run(linear_attention.gated_linear_attention, tokens, axis_name, return_final_state, options)


# fmt: off
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    axis_name: str, return_final_state: Literal[False] = False, **options: Unpack[CutKeywords]
) -> jax.Array: ...
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    axis_name: str, return_final_state: Literal[True], **options: Unpack[CutKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    axis_name: str, return_final_state: bool, **options: Unpack[CutKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    axis_name: str, return_final_state: bool = False, **options: Unpack[CutKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """`dplr_linear_attention` over a sharded sequence, at one exchange of each device's map of the state.

    Arguments, results, gradients and errors are those of `parallel.gated_delta_rule`, with `erase_key` and
    `erase_query` for `beta`.

    Example:
      >>> import jax, numpy as np
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import dplr_linear_attention
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> attend = partial(dplr_linear_attention, axis_name="sequence")
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 6, out_specs=tokens)
      >>> q, k, v, a = np.random.default_rng(0).standard_normal((4, 2, 16, 4, 8)) / 3
      >>> jax.jit(attend)(q, k, v, -abs(a), a, a).shape
      (2, 16, 4, 8)
    """
    tokens = query, key, value, log_decay, None
    like, erasing = linear_attention.dplr_linear_attention, (erase_key, erase_query)
    return _run(like, tokens, axis_name, return_final_state, options, erasing)


def _run(
    like: Callable[..., Any], tokens: tuple[Any, ...], axis_name, return_final_state, options: CutKeywords,
    erasing: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Returns what the call `like` returns of the whole sequence: of this device's tokens."""
    # the arguments of this device
    name = like.__name__
    given = checks.complete(name, like, CutKeywords, options)
    n, device = axis_size(name, axis_name), lax.axis_index(axis_name)
    wants_final = checks.flag(name, "return_final_state", return_final_state)
    implementation, forward_mode = given.pop("implementation"), given.pop("forward_mode")
    lengths, value = given["seq_lengths"], tokens[2]
    T = np.shape(value)[-3] if np.ndim(value) > 2 else 0
    if lengths is not None:
        lengths = saturated(checks.integers(name, "seq_lengths", lengths, 0, n * T))
        given["seq_lengths"] = jnp.clip(lengths - device * T, 0, T)
    is_delta = like is linear_attention.gated_delta_rule
    static, operands = arguments.prepare(name, *tokens, is_delta=is_delta, erasing=erasing, **given)

    # a document that ends with the device before: what is from there is nothing to the first token
    if operands.restarts is not None and T != 0:
        ids = vary_over(jnp.asarray(given["segment_ids"]), {axis_name})
        before = lax.ppermute(ids[..., -1], axis_name, [(i, i + 1) for i in range(n - 1)])
        begins = jnp.broadcast_to((ids[..., 0] != before) & (device > 0), operands.restarts.shape[:-1])
        restarts = jnp.concatenate([begins[..., None], operands.restarts[..., 1:]], -1)
        operands = operands._replace(restarts=restarts)

    # how it is computed
    taken = _with_columns(operands) if static.corrects else operands
    known = OF_ERASING_KEYS if erasing else IMPLEMENTATIONS
    chosen = backend.planned(name, known, implementation, static, taken, plan)
    cut = ShardedPlan(chosen, axis_name, n)
    out, final = _OPERATION.runner(name, forward_mode)(cut, operands)
    return (out, lax.psum(final, axis_name)) if wants_final else out


@dataclass(frozen=True)
class ShardedPlan:
    """Everything static of a call."""

    plan: Plan  # that of this device's tokens, as the forward takes them
    axis_name: str  # the mesh axis that holds the sequence
    devices: int  # how many it has


class Shard(NamedTuple):
    """What a device's tokens give from the state 0, and what they make of another, (1)."""

    out: jax.Array  # o, [..., T, N, Hv]
    moved: jax.Array  # D, [..., N, H, Hv]
    reads: jax.Array  # r, [..., T, N, H]
    kept: jax.Array  # F, [..., N, H, H], or its diagonal, [..., N, H, 1]


def _with_columns(operands: Operands) -> Operands:
    """Returns the operands with H more columns of the value, 0 each, that begin with the state I."""
    value, (H, Hv) = operands.value, (operands.key.shape[-1], operands.value.shape[-1])
    (*batch, _, N), wide = value.shape[:-1], accumulator_dtype(value.dtype)
    first = jnp.broadcast_to(jnp.eye(H, Hv + H, Hv, dtype=wide), (*batch, N, H, Hv + H))
    return operands._replace(value=_padded(value, H), initial_state=first)


def _padded(x: jax.Array, more: Any) -> jax.Array:
    """Returns `x` with more columns of zeros."""
    return jnp.concatenate([x, jnp.zeros((*x.shape[:-1], more), x.dtype)], -1)


def _of_columns(Hv: Any, out: jax.Array, state: jax.Array) -> Shard:
    """Parts what `_with_columns` gives."""
    return Shard(out[..., :Hv], state[..., :Hv], out[..., Hv:], state[..., Hv:])


def _block(cut: ShardedPlan, operands: Operands) -> tuple[Shard, tuple[jax.Array, jax.Array]]:
    """Returns what a device's tokens do, and D and F before each group of chunks, `[g, ..., K, G, H, X]`."""
    forward = backend.named(IMPLEMENTATIONS, cut.plan.implementation).forward
    *batch, T, N, Hv = operands.value.shape
    if cut.plan.options.corrects:
        result = forward(cut.plan, _with_columns(operands))
        before = result.states[..., :Hv], result.states[..., Hv:]
        return _of_columns(Hv, result.out, result.final_state), before
    result = forward(cut.plan, operands._replace(initial_state=None))

    # the decays up to each token: none goes across the first of a document
    wide, seen = accumulator_dtype(operands.value.dtype), layout.seen_tokens(operands)
    log_decay, query = layout.decay_of_tokens(operands).astype(wide), operands.query
    if operands.restarts is not None:
        log_decay = jnp.where(operands.restarts[..., None, None], -jnp.inf, log_decay)
    if seen is not None:
        log_decay, query = (jnp.where(seen, x, 0) for x in (log_decay, query))
    log_decay = jnp.broadcast_to(log_decay, (*batch, T, N, log_decay.shape[-1]))
    up_to = jnp.cumsum(log_decay, -3)

    # r and F, and F before each group
    normed = cut.plan.options.scale * unit(cut.plan.options, query.astype(wide))[0]
    reads = jnp.repeat(normed, operands.groups, -2) * jnp.exp(up_to)
    kept = jnp.exp(log_decay.sum(-3))[..., None]
    kept = jnp.broadcast_to(kept, (*kept.shape[:-2], query.shape[-1], 1))
    group = cut.plan.chunk * cut.plan.side_by_side
    ends = jnp.concatenate([jnp.zeros_like(up_to[..., :1, :, :]), up_to[..., group - 1 :: group, :, :]], -3)
    kept_before = jnp.exp(jnp.moveaxis(ends, -3, 0)[: result.states.shape[0], ..., None])
    block = Shard(result.out, result.final_state, reads.astype(result.out.dtype), kept)
    return block, (result.states, split_heads(kept_before, operands.groups))


def _applied(cut: ShardedPlan, kept: jax.Array, state: jax.Array) -> jax.Array:
    """Computes F S of a matrix F, or of a diagonal."""
    return kept * state if kept.shape[-1] == 1 else dot_of(cut.plan)("ij,jv", kept, state)


def _across(
    cut: ShardedPlan, kept: jax.Array, moved: jax.Array, state: jax.Array, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns S after all devices, and that which reaches this one, where each makes F S + D of it."""
    block = jnp.concatenate([moved, kept], -1)
    # gathered behind the others: under `jax.vmap` JAX 0.12 mistakes the batch axis of its cotangent else
    blocks = jnp.moveaxis(lax.all_gather(block, cut.axis_name, axis=block.ndim), -1, 0)

    def behind(state, block):
        moved, kept = jnp.split(block, [state.shape[-1]], -1)
        return _applied(cut, kept, state) + moved, state

    last, states = lax.scan(behind, vary_over(state, varying(blocks)), blocks, reverse=reverse)
    return last, lax.dynamic_index_in_dim(states, lax.axis_index(cut.axis_name), keepdims=False)


def _whole(cut: ShardedPlan, block: Shard, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out, on the last device the final state and 0 on the others, and the state before this one."""
    last, state = _across(cut, block.kept, block.moved, first)
    reads, precision = block.reads.astype(state.dtype), cut.plan.options.precision
    read = jnp.einsum("...tnh,...nhv->...tnv", reads, state, precision=precision)
    out = (block.out.astype(state.dtype) + read).astype(block.out.dtype)
    is_last = lax.axis_index(cut.axis_name) == cut.devices - 1
    return out, jnp.where(is_last, last, 0), state


def _primal(cut, operands):
    return _forward(cut, operands, frozenset())[0]


def _forward(cut, operands, wanted):
    block, (moved, kept) = _block(cut, operands)
    first = operands.initial_state
    first = jnp.zeros_like(block.moved) if first is None else vary_over(first, varying(block))
    out, final, state = _whole(cut, block, first)
    states = moved + _applied(cut, kept, split_heads(state, operands.groups)[None])
    # what the backward reads, by the names that the operator gives it
    out, final, states = tie((out, final, states), operands)
    out, final = (checkpoint_name(x, "attention_out") for x in (out, final))
    states, reads, kept = (checkpoint_name(x, "attention_states") for x in (states, block.reads, block.kept))
    return (out, final), (Residuals(operands, states), reads, kept)


def _backward(cut, saved, wanted, cotangents):
    residuals, reads, kept = saved
    operands, _ = residuals
    (*batch, _, N, Hv), H = operands.value.shape, reads.shape[-1]
    dout, dfinal = cotangents

    # (2); cotangents beyond the lengths are not read
    moved = jnp.zeros((*batch, N, H, Hv), kept.dtype)
    if dout is not None:
        seen = layout.seen_tokens(operands)
        read, precision = dout if seen is None else jnp.where(seen, dout, 0), cut.plan.options.precision
        read, reads = read.astype(kept.dtype), reads.astype(kept.dtype)
        moved = jnp.einsum("...tnh,...tnv->...nhv", reads, read, precision=precision)
    moved = vary_over(moved, varying(kept))
    kept = kept if kept.shape[-1] == 1 else transposed(kept)
    dfinal = jnp.zeros_like(moved) if dfinal is None else dfinal
    dfirst, dstate = _across(cut, kept, moved, dfinal, reverse=True)

    # from there on as one device
    backward = backend.named(IMPLEMENTATIONS, cut.plan.implementation).backward
    grads = backward(cut.plan, residuals, Wanted(wanted - {"initial_state"}), dout, dstate)
    if "initial_state" in wanted:
        dfirst = jnp.where(lax.axis_index(cut.axis_name) == 0, dfirst, 0)
        grads["initial_state"] = match_type(dfirst, operands.initial_state)
    return Operands(*(grads.get(name) for name in Operands._fields))


def _tangent(cut, saved, tangents):
    # those of o, D, r and F, by the columns whether or not there is a delta rule
    (operands, _), *_ = saved
    Hv, columns, more = operands.value.shape[-1], _with_columns(operands), operands.key.shape[-1]
    along = tangents._replace(initial_state=None)
    if along.value is not None:
        along = along._replace(value=_padded(along.value, more))
    forward = backend.named(IMPLEMENTATIONS, cut.plan.implementation).forward
    result = forward(cut.plan, columns)
    block = _of_columns(Hv, result.out, result.final_state)
    dblock = _of_columns(Hv, *tangent(cut.plan, columns, along))

    # and through the exchange
    first, dfirst = operands.initial_state, tangents.initial_state
    first = jnp.zeros_like(block.moved) if first is None else first
    dfirst = jnp.zeros_like(first) if dfirst is None else dfirst
    (block, first), (dblock, dfirst) = pallas.vary_alike(((block, first), (dblock, dfirst)))
    _, (dout, dfinal, _) = jax.jvp(partial(_whole, cut), (block, first), (dblock, dfirst))
    return dout, dfinal


_OPERATION = Operation(ALL_DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
