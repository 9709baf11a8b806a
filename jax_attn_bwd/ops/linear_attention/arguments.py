"""Checks the arguments of a call and makes `Options` and `Operands` of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, head_scale, numerics, sharding
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options

_HEADS_LAST = "the layout is [..., T, N, H]; from [..., N, T, H] write x.swapaxes(-3, -2), from [..., N, T] "
_HEADS_LAST += "x.swapaxes(-2, -1)"


def prepare(
    operator: str, query, key, value, log_decay, beta, *, is_delta: bool, initial_state, scale,
    l2_norm_epsilon, seq_lengths, segment_ids, precision, erasing=(),
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of a call; raises as the public docstrings say.

    `beta` is read where `is_delta`, and None else; `erasing` is (erase_key, erase_query), or nothing.
    """
    # the tokens: queries, keys and values, what their heads have, and how they lie on an Explicit mesh
    query, key, value = _query_key_value(operator, query, key, value)
    (*batch, T, N, _), H = value.shape, key.shape[-1]
    heads = (*batch, T, N)
    if log_decay is not None:
        log_decay = _log_decay(operator, log_decay, heads, H)
    if is_delta:
        beta = checks.floating(operator, "beta", beta)
        checks.shape(operator, "beta", beta, "[..., T, N]", heads, _swapped(beta.shape, heads))
    given = {"query": query, "key": key, "log_decay": log_decay, "beta": beta}
    given |= _erasing(operator, erasing, query, value)
    query, key, log_decay, beta, *erasing = (_alike(operator, n, x, value) for n, x in given.items())

    initial_state = state(operator, "initial_state", initial_state, key, value)

    # where sequences and documents end
    def of_entries(argument, x, tail, names, **limits):
        x = checks.integers(operator, argument, x, **limits)
        checks.broadcasts(operator, argument, x, names, (*batch, *tail))
        x = numerics.to_rank(x, len(batch) + len(tail))
        return sharding.reshard_like(x, value, (*range(len(batch)), *(None,) * len(tail)))

    restarts = None
    if seq_lengths is not None:
        limits = {"least": 0} | ({"greatest": T} if isinstance(T, int) else {})
        seq_lengths = numerics.saturated(of_entries("seq_lengths", seq_lengths, (), "[...]", **limits))
    if segment_ids is not None:
        ids = of_entries("segment_ids", segment_ids, (T,), "[..., T]")
        ids = jnp.broadcast_to(ids, (*ids.shape[:-1], T))
        before = jnp.concatenate([ids[..., :1], ids[..., :-1]], -1) if T != 0 else ids
        restarts = ids != before

    # the options
    if l2_norm_epsilon is not None:
        l2_norm_epsilon = checks.python_float(operator, "l2_norm_epsilon", l2_norm_epsilon)
        if l2_norm_epsilon <= 0:
            expected = "be positive, or None"
            raise ValueError(checks.message(operator, "l2_norm_epsilon", expected, l2_norm_epsilon))
    remedy = "pass scale=1.0, and multiply out by a learned or traced one"  # query may be normalized
    scale = head_scale.number(operator, scale, H, value.dtype, remedy)
    precision = checks.precision(operator, precision)
    options = Options(is_delta, scale, l2_norm_epsilon, precision, is_erasing=bool(erasing))
    return options, Operands(
        query, key, value, log_decay, beta, initial_state, seq_lengths, restarts, *erasing
    )


def state(operator: str, argument: str, x: Any, key: jax.Array, value: jax.Array) -> jax.Array | None:
    """Checks a state, or its cotangent, `[..., N, H, Hv]` in the dtype of sums; None passes."""
    if x is None:
        return None
    x, wide = checks.floating(operator, argument, x), numerics.accumulator_dtype(value.dtype)
    *batch, _, N, Hv = value.shape
    checks.shape(operator, argument, x, "[..., N, H, Hv]", (*batch, N, key.shape[-1], Hv))
    if x.dtype != wide:
        remedy, got = f"write {argument}.astype({str(wide)!r})", f"dtype {x.dtype}"
        raise TypeError(checks.message(operator, argument, f"have dtype {wide}", got, remedy))
    return sharding.reshard_like(x, value, (*range(len(batch)), value.ndim - 2, None, None))


def _query_key_value(operator: str, query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    # floats of one dtype, of three axes at least
    query, key, value = (
        checks.floating(operator, n, x) for n, x in (("query", query), ("key", key), ("value", value))
    )
    checks.same_dtype(operator, query=query, key=key, value=value)
    for argument, x, names in (("query", query, "[..., T, K, H]"), ("value", value, "[..., T, N, Hv]")):
        checks.rank(operator, argument, x, names, least=3)

    # shapes that fit together; a warning where heads seem to stand before tokens
    *batch, T, K, H = query.shape
    N, Hv = value.shape[-2:]
    checks.shape(operator, "key", key, "[..., T, K, H]", (*batch, T, K, H))
    checks.shape(operator, "value", value, "[..., T, N, Hv]", (*batch, T, N, Hv))
    if K == 0 or N == 0 or N % K:
        expected = "be a positive multiple of the key heads K"
        remedy = f"query and key have K = {K}; the layout is [..., T, N, H]"
        raise ValueError(checks.message(operator, "value heads N", expected, N, remedy))
    if isinstance(T, int) and 1 < T <= N // 8 and N >= 64:
        checks.warn(f"{operator}: value {value.shape} has T = {T} tokens and N = {N} heads: {_HEADS_LAST}")

    # the sequence, and what is within a head, lie whole on each device
    value = sharding.without_ones(value)
    for argument, x in (("query", query), ("key", key), ("value", value)):
        spec = sharding.explicit_spec(sharding.without_ones(x))
        if spec[-3] is not None:
            short = operator.removesuffix("_bwd")
            remedy = f"jax_attn_bwd.parallel.{short} inside jax.shard_map takes a sequence that is cut"
            raise ValueError(checks.message(operator, argument, "not be sharded along T", spec, remedy))
        if spec[-1] is not None:
            expected = "not be sharded along its head size"
            raise ValueError(checks.message(operator, argument, expected, spec, "reshard it"))
    names = sharding.explicit_spec(value)[-2]
    if names is not None and K % (n := sharding.axis_size(value, names)):
        expected = f"be a multiple of the size {n} of mesh axis {names!r}"
        remedy = "shard the batch instead, or repeat key heads"
        raise ValueError(checks.message(operator, "key heads K", expected, K, remedy))
    return query, key, value


def _erasing(operator: str, given: Sequence[Any], query: jax.Array, value: jax.Array) -> dict[str, jax.Array]:
    """Checks what erases, of as many heads as the keys or as the values."""
    found = {
        n: checks.floating(operator, n, x) for n, x in zip(("erase_key", "erase_query"), given, strict=False)
    }
    checks.same_dtype(operator, query=query, **found)
    of_keys, of_values = query.shape, (*value.shape[:-1], query.shape[-1])
    for name, x in found.items():
        if x.shape not in (of_keys, of_values):
            expected = f"have shape [..., T, K, H] = {of_keys} or [..., T, N, H] = {of_values}"
            raise ValueError(checks.message(operator, name, expected, x.shape, ""))
    return found


def _alike(operator: str, argument: str, x: jax.Array | None, value: jax.Array) -> jax.Array | None:
    """Returns what is told of tokens, sharded as the value is; the key heads are cut as the value heads."""
    if x is None:
        return None
    if x.ndim == 1:
        return sharding.reshard_like(x, value, (value.ndim - 2,))
    axes = tuple(range(x.ndim)) if x.ndim == value.ndim else tuple(range(value.ndim - 1))
    return sharding.reshard_like(x, value, axes)


def _log_decay(operator: str, log_decay: Any, heads: tuple, H: Any) -> jax.Array:
    """Checks the logarithms of the decays, of shape `[..., T, N]`, `[..., T, N, H]` or `[N]`."""
    x = checks.floating(operator, "log_decay", log_decay)
    shapes = (heads, (*heads, H), heads[-1:])
    if x.shape not in shapes:
        expected = f"have shape [..., T, N] = {heads}, [..., T, N, H] = {shapes[1]} or [N] = {shapes[2]}"
        remedy = _swapped(x.shape, heads)
        raise ValueError(checks.message(operator, "log_decay", expected, x.shape, remedy))
    values = checks.known(log_decay) if x.size else None
    if values is not None:
        least, greatest = float(np.min(values)), float(np.max(values))
        if least >= 0 and 0 < greatest <= 1:
            got = f"log_decay has values from {least:.3g} to {greatest:.3g}, by which the state grows"
            checks.warn(f"{operator}: {got}; if they are decays, not their logarithms, write jnp.log(decay)")
    return x


def _swapped(shape: tuple, heads: tuple) -> str:
    """Tells how tokens and heads change places, if `shape` has them the other way round."""
    *batch, T, N = heads
    return _HEADS_LAST if shape[: len(heads)] == (*batch, N, T) != heads else ""
