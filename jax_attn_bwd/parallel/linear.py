"""Linear attention with the sequence sharded over a mesh axis.

A device's tokens take the state before them, S, to the one behind, and read it, affinely:

    S' = F S + D,   out_t = o_t + S^T r_t                                               (1)

D and o are what the operator gives from the state 0. Without a delta rule F is diagonal, the product of the
decays, and r the query times those up to it. Under a delta rule F `[H, H]` and r `[T, N, H]` are what the
operator gives from the state I for values of 0: one call with H more columns of the value has all four. The
devices exchange (D, F) once; each then computes the states before all of them, in order, and reads its own.
The backward is that of the call and of (1), so the cotangents of (D, F) are exchanged once, too.
"""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, secondary_calls
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import vary_over, varying
from jax_attn_bwd._core.types import Array
from jax_attn_bwd.ops import linear_attention
from jax_attn_bwd.ops.linear_attention import arguments, layout
from jax_attn_bwd.ops.linear_attention.chunk import unit
from jax_attn_bwd.ops.linear_attention.spec import LinearAttentionKeywords
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
    `jax_attn_bwd.gated_delta_rule`, of a device's own tokens, but for those named here. A device computes
    with H more columns of the value, which `gated_linear_attention` does without.

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
      >>> import jax
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import gated_delta_rule
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> rule = partial(gated_delta_rule, axis_name="sequence", l2_norm_epsilon=1e-6)
      >>> rule = jax.shard_map(rule, mesh=mesh, in_specs=(tokens,) * 5, out_specs=tokens)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
      >>> jax.jit(rule)(q, k, v, -abs(q[..., 0]), abs(k[..., 0])).shape
      (2, 16, 4, 8)
    """
    return _run(linear_attention.gated_delta_rule, **locals())


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
def gated_linear_attention(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None = None,
    *,
    axis_name: str,
    return_final_state: bool = False,
    **options: Unpack[CutKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`gated_linear_attention` over a sharded sequence, at one exchange of each device's map of the state.

    Arguments, results, gradients and errors are those of `parallel.gated_delta_rule`, without `beta`.

    Example:
      >>> import jax
      >>> from functools import partial
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_attn_bwd.parallel import gated_linear_attention
      >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("sequence",)), P(None, "sequence")
      >>> attend = partial(gated_linear_attention, axis_name="sequence")
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
      >>> jax.jit(attend)(q, k, v).shape
      (2, 16, 4, 8)
    """
    return _run(linear_attention.gated_linear_attention, **locals())


def _run(
    like: Callable[..., Any], *, query, key, value, axis_name, return_final_state, options, **more
) -> Any:
    """Returns what the call `like` returns of the whole sequence: of this device's tokens."""
    # the arguments of this device
    name = like.__name__
    given = secondary_calls.complete(name, like, CutKeywords, options)
    n, device = axis_size(name, axis_name), lax.axis_index(axis_name)
    wants_final = checks.flag(name, "return_final_state", return_final_state)
    query, key, value = (
        checks.floating(name, n, x) for n, x in (("query", query), ("key", key), ("value", value))
    )
    if value.ndim < 3 or key.ndim < 3:
        return like(query, key, value, **more, **given)  # which says what they must be
    (*batch, T, N, Hv), H = value.shape, key.shape[-1]
    lengths, ids, state = (given[x] for x in ("seq_lengths", "segment_ids", "initial_state"))
    if lengths is not None:
        lengths = checks.integers(name, "seq_lengths", lengths, 0, n * T)
        given["seq_lengths"] = jnp.clip(lengths - device.astype(lengths.dtype) * T, 0, T)

    # D and o, F and r
    wide = accumulator_dtype(value.dtype)
    zeros = jnp.zeros((*batch, N, H, Hv), wide)
    given |= {"initial_state": None, "return_final_state": True}
    if "beta" in more:
        one = jnp.broadcast_to(jnp.eye(H, dtype=wide), (*batch, N, H, H))
        given["initial_state"] = jnp.concatenate([zeros, one], -1)
        wider = jnp.concatenate([value, jnp.zeros((*batch, T, N, H), value.dtype)], -1)
        out, block = like(query, key, wider, **more, **given)
        out, reads = out[..., :Hv], out[..., Hv:].astype(wide)
    else:
        out, block = like(query, key, value, **more, **given)
        kept, reads = _diagonal(name, query, key, value, **more, **given)
        block = jnp.concatenate([block, jnp.broadcast_to(kept[..., None], (*batch, N, H, 1))], -1)

    # the states before and behind all devices
    # gathered behind the others: under `jax.vmap` JAX 0.12 mistakes the batch axis of its cotangent else
    blocks = jnp.moveaxis(lax.all_gather(block, axis_name, axis=block.ndim), -1, 0)  # [n, ..., N, H, Hv + H]
    follows = _follows(name, lengths, ids, (*batch, T), axis_name)
    state = arguments.state(name, "initial_state", state, key, value)
    state = vary_over(zeros if state is None else state, varying((blocks, follows)))

    def behind(state, of_device):
        block, follows = of_device
        state = state if follows is None else jnp.where(follows[..., None, None, None], state, 0)
        kept = block[..., Hv:]
        moved = jnp.matmul(kept, state, precision=given["precision"]) if "beta" in more else kept * state
        return moved + block[..., :Hv], state

    final, states = lax.scan(behind, state, (blocks, follows))

    # (1), with this device's own
    own = lax.dynamic_index_in_dim(states, device, keepdims=False)
    read = jnp.einsum("...tnh,...nhv->...tnv", reads, own, precision=given["precision"])
    out = (out.astype(wide) + read).astype(value.dtype)
    if not wants_final:
        return out
    return out, lax.psum(jnp.where(device == n - 1, final, 0), axis_name)


def _diagonal(
    operator: str, query: Any, key: Any, value: Any, *, return_final_state, forward_mode, implementation,
    **given,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the diagonal of F, `[..., N, H]` or with axes of 1, and r, `[..., T, N, H]`."""
    options, operands = arguments.prepare(operator, query=query, key=key, value=value, **given)
    wide, seen = accumulator_dtype(value.dtype), layout.seen_tokens(operands)
    log_decay = layout.decay_of_tokens(operands).astype(wide)
    if operands.restarts is not None:
        log_decay = jnp.where(operands.restarts[..., None, None], -jnp.inf, log_decay)
    if seen is not None:
        log_decay, query = (jnp.where(seen, x, 0) for x in (log_decay, query))
    normed = options.scale * unit(options, query.astype(wide))[0]
    reads = jnp.repeat(normed, operands.groups, -2) * jnp.exp(jnp.cumsum(log_decay, -3))
    return jnp.exp(log_decay.sum(-3)), reads


def _follows(operator: str, lengths: Any, ids: Any, shape: tuple, axis_name: str) -> jax.Array | None:
    """Tells of each device if its first token goes on with a document, `[n, ...]`; None: all do."""
    if ids is None or shape[-1] == 0:
        return None
    ids = checks.integers(operator, "segment_ids", ids)
    checks.broadcasts(operator, "segment_ids", ids, "[..., T]", shape)
    ids = jnp.broadcast_to(ids, shape)
    first, last = (lax.all_gather(ids[..., i], axis_name) for i in (0, -1))
    number = lax.broadcasted_iota(jnp.int32, first.shape, 0)
    follows = (first == jnp.roll(last, 1, 0)) | (number == 0)
    return follows if lengths is None else follows | (number * shape[-1] >= lengths[None])
