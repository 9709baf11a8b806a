"""From the arguments of a call to checked `Options` and `Operands`."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, dropout, float_leaves, masks, numerics, sharding
from jax_attn_bwd.ops.dot_product import mod_arguments
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

# a difference of two positions must fit int32
_POSITIONS = {"least": -(2**30), "greatest": 2**30}


def _lengths(size: Any) -> dict[str, int]:
    """The range of a length of that many tokens; what is symbolic is not known."""
    return {"least": 0} | ({"greatest": size} if isinstance(size, int) else {})


def prepare(
    operator: str, query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths,
    key_value_seq_lengths, local_window_size, query_segment_ids, key_value_segment_ids,
    query_positions, key_value_positions, logits_soft_cap, sink, dropout_rate, dropout_key,
    broadcast_dropout, dropout_offset, precision, deterministic_sums, deterministic=None,
    mask_mod=None, score_mod=None, mod_args=(), sequence_parts=1,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `dot_product_attention`; raises as its docstring says.

    `sequence_parts`: how many parts as long as these the sequence has, through which rows and columns count.
    """
    query, key, value = _query_key_value(operator, query, key, value)
    (*batch, T, N, H), S = query.shape, key.shape[-3]
    batch = tuple(batch)

    def plane(argument, x):
        x = _drop_leading_ones(x, len(batch) + 3)
        checks.broadcasts(operator, argument, x, "[..., N, T, S]", (*batch, N, T, S))
        return sharding.reshard_like(x, query, (*range(len(batch)), -2, -3, None))

    if bias is not None:
        bias = plane("bias", checks.floating(operator, "bias", bias))
    if mask is not None:
        mask = plane("mask", checks.boolean_mask(operator, mask))
    if sink is not None:
        sink = checks.floating(operator, "sink", sink)
        checks.shape(operator, "sink", sink, "[N]", (N,))
        sink = sharding.reshard_like(sink, query, (-2,))

    def tokens(argument, x, names, tail, axes=(), **limits):
        """`axes`: of the query, along which the tail is sharded as it is."""
        if x is None:
            return None
        rank = len(batch) + len(tail)
        x = _drop_leading_ones(checks.integers(operator, argument, x, **limits), rank)
        checks.broadcasts(operator, argument, x, names, (*batch, *tail))
        x = numerics.to_rank(numerics.saturated(x, **limits), rank)
        return sharding.reshard_like(x, query, (*range(len(batch)), *(axes or (None,) * len(tail))))

    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, missing = missing, given
        expected = f"be given together with {given}"
        raise ValueError(checks.message(operator, missing, expected, None))
    ids = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    if not all(map(numerics.fits_int32, ids.values())):
        query_segment_ids, key_value_segment_ids = _narrow(operator, ids, query, (T, S))

    has_functions = mask_mod is not None or score_mod is not None
    if has_functions and 0 in [n for n in (T, S) if isinstance(n, int)] and _is_empty(mod_args):
        mask_mod = score_mod = None  # of no element, and nothing can be read of arrays without entries
    options = Options(
        scale=checks.head_scale(
            operator, scale, H, query.dtype, "multiply query by a learned or traced temperature"
        ),
        is_causal=checks.flag(operator, "is_causal", is_causal),
        window=masks.window(operator, local_window_size),
        logits_soft_cap=_soft_cap(operator, logits_soft_cap, query.dtype),
        dropout_rate=checks.rate(operator, "dropout_rate", dropout_rate),
        broadcast_dropout=checks.flag(operator, "broadcast_dropout", broadcast_dropout),
        precision=checks.precision(operator, precision),
        deterministic_sums=checks.repeatable_sums(operator, deterministic_sums, deterministic),
        mask_mod=mask_mod,
        score_mod=score_mod,
    )
    mods: tuple[Any, Any, Any] = (None, None, None)
    if has_functions:
        wide = numerics.accumulator_dtype(query.dtype)
        sides = (T, query_positions), (S, key_value_positions)
        by_index = [n for n, x in sides if x is None and isinstance(n, int)]
        counted = [None if x is not None else sequence_parts * n for n, x in sides]
        sizes = mod_arguments.Sizes(batch, N, sequence_parts * max(by_index, default=0), *counted)
        args = mod_arguments.prepared(operator, mask_mod, score_mod, mod_args, sizes, key.shape[-2], wide)
        mods = args, _count(batch), jnp.arange(N, dtype=jnp.int32)
        mods = jax.tree.map(lambda x: sharding.reshard_like(x, query, (None,) * x.ndim), mods)
    elif jax.tree.leaves(mod_args):
        expected = "be given together with mask_mod or score_mod"
        raise ValueError(checks.message(operator, "mod_args", expected, "neither"))
    rates = {"dropout_rate": options.dropout_rate}
    words, offset = dropout.drawn(operator, rates, dropout_key, dropout_offset, T, S)
    return options, Operands(
        query,
        key,
        value,
        bias,
        mask,
        sink,
        tokens("query_seq_lengths", query_seq_lengths, "[...]", (), **_lengths(T)),
        tokens("key_value_seq_lengths", key_value_seq_lengths, "[...]", (), **_lengths(S)),
        tokens("query_segment_ids", query_segment_ids, "[..., T]", (T,), (-3,)),
        tokens("key_value_segment_ids", key_value_segment_ids, "[..., S]", (S,)),
        tokens("query_positions", query_positions, "[..., T]", (T,), (-3,), **_POSITIONS),
        tokens("key_value_positions", key_value_positions, "[..., S]", (S,), **_POSITIONS),
        words,
        offset,
        *mods,
    )


def _narrow(operator: str, ids: dict[str, Any], query: jax.Array, lengths: tuple[Any, Any]) -> Any:
    """Wide traced segment ids as int32 `[..., T]` and `[..., S]` that are equal where they are."""
    batch, rows = query.shape[:-3], []
    for (argument, x), names, length in zip(ids.items(), ("[..., T]", "[..., S]"), lengths, strict=True):
        x = _drop_leading_ones(checks.integers(operator, argument, x), len(batch) + 1)
        checks.broadcasts(operator, argument, x, names, (*batch, length))
        x = jnp.broadcast_to(x, (*batch, x.shape[-1] if x.ndim else 1))
        rows.append(sharding.reshard_like(x, query, (*range(len(batch)), None)))
    return numerics.ranks(*rows)


def _is_empty(mod_args: Any) -> bool:
    return any(0 in getattr(x, "shape", ()) for x in jax.tree.leaves(mod_args))


def _count(batch: tuple[Any, ...]) -> jax.Array:
    """The number of each batch entry, row-major, int32 `[...]`."""
    number = jnp.zeros((1,) * len(batch), jnp.int32)
    for axis, n in enumerate(batch):
        shape = tuple(n if i == axis else 1 for i in range(len(batch)))
        number = number * n + jnp.arange(n, dtype=jnp.int32).reshape(shape)
    return number


def _drop_leading_ones(x: jax.Array, rank: int) -> jax.Array:
    """`x` without axes of size 1 beyond `rank`: `jax.nn` wants them with inputs that have no batch."""
    extra = x.ndim - rank
    return x.reshape(x.shape[extra:]) if extra > 0 and x.shape[:extra] == (1,) * extra else x


def _query_key_value(operator: str, query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    query = checks.floating(operator, "query", query)
    key = checks.floating(operator, "key", key)
    value = checks.floating(operator, "value", value)
    checks.same_dtype(operator, query=query, key=key, value=value)
    for argument, x, names in (
        ("query", query, "[..., T, N, H]"),
        ("key", key, "[..., S, K, H]"),
        ("value", value, "[..., S, K, Hv]"),
    ):
        if x.ndim < 3:
            raise ValueError(checks.message(operator, argument, f"have shape {names}", x.shape))
    *batch, T, N, H = query.shape
    S, K, Hv = key.shape[-3], key.shape[-2], value.shape[-1]
    checks.shape(operator, "key", key, "[..., S, K, H]", (*batch, S, K, H))
    checks.shape(operator, "value", value, "[..., S, K, Hv]", (*batch, S, K, Hv))
    if K == 0 or N == 0 or N % K:
        remedy = f"key and value have K = {K}; the layout is [..., T, N, H]"
        expected = "be a positive multiple of the key heads K"
        raise ValueError(checks.message(operator, "query heads N", expected, N, remedy))
    query, key, value = map(sharding.without_ones, (query, key, value))
    _check_explicit_sharding(operator, query, key, value)
    return query, key, value


def _check_explicit_sharding(operator: str, query, key, value) -> None:
    """On an Explicit mesh: batch and heads may be sharded, alike in all three, sequences as they please."""
    heads = sharding.explicit_spec(query)[-2]
    if heads is not None and key.shape[-2] % (n := sharding.axis_size(query, heads)):
        expected = f"be a multiple of the size {n} of mesh axis {heads!r}"
        remedy = "shard the batch instead, or repeat key and value heads"
        raise ValueError(checks.message(operator, "key heads K", expected, key.shape[-2], remedy))
    specs = {}
    for argument, x in (("query", query), ("key", key), ("value", value)):
        specs[argument] = spec = sharding.explicit_spec(x)
        if spec[-1] is not None:
            expected = "not be sharded along its head size"
            raise ValueError(checks.message(operator, argument, expected, spec, "reshard it"))
        if (spec[:-3], spec[-2]) != (specs["query"][:-3], specs["query"][-2]):
            expected = f"be sharded like query, {specs['query']}, in batch and heads"
            raise ValueError(checks.message(operator, argument, expected, spec, "reshard it"))


def _soft_cap(operator: str, cap: Any, dtype: Any) -> float | None:
    if cap is None:
        return None
    wide = numerics.accumulator_dtype(dtype)
    cap = checks.python_float(operator, "logits_soft_cap", cap, dtype=wide)
    if cap <= 0:
        raise ValueError(checks.message(operator, "logits_soft_cap", "be positive", cap))
    return None if numerics.soft_cap_is_identity(cap, wide) else cap


def require_floats(operator: str, mod_args: Any) -> None:
    """`wrt="mod_args"` asks for gradients of floats."""
    if not jax.tree.leaves(float_leaves.floats(mod_args)):
        dtypes = ", ".join(str(x.dtype) for x in jax.tree.leaves(mod_args)) or "nothing"
        expected, remedy = "hold floating-point arrays where wrt names it", "integers have no gradient"
        raise TypeError(checks.message(operator, "mod_args", expected, dtypes, remedy))
