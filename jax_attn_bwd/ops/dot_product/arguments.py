"""Checks the arguments of a call and makes `Options`, `Operands` and a `Mask` of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, dropout, fusion, head_scale, masks, numerics, sharding, trees
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Sizes

_HEADS_LAST = "the layout is [..., T, N, H]; from [..., N, T, H] write x.swapaxes(-3, -2)"


def prepare(
    operator: str, query, key, value, bias, mask, *, scale, logits_soft_cap, sink, dropout_rate, dropout_key,
    broadcast_dropout, dropout_offset, precision, deterministic_sums, deterministic=None,
    is_causal=False, local_window_size=None, query_seq_lengths=None, key_value_seq_lengths=None,
    query_segment_ids=None, key_value_segment_ids=None, query_positions=None, key_value_positions=None,
    mask_mod=None, score_mod=None, mod_args=(), counted=None,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `dot_product_attention`, `counted` as in `mask_of`; raises as it says."""
    # The arrays, whose shapes tell all sizes.
    query, key, value = _query_key_value(operator, query, key, value)
    (*batch, T, N, H), (S, K) = query.shape, key.shape[-3:-1]
    sizes, like = Sizes(tuple(batch), T, S, K, N // K), Like(query, -3, -2)
    if bias is not None:
        bias = bias_plane(operator, bias, sizes, like)
    if sink is not None:
        sink = checks.floating(operator, "sink", sink)
        checks.shape(operator, "sink", sink, "[N]", (N,))
        sink = sharding.reshard_like(sink, query, (-2,))

    # Who sees whom, and what is static.
    seen, score_mod = mask_of(
        operator, like, sizes, mask=mask, counted=counted, is_causal=is_causal,
        local_window_size=local_window_size, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, query_positions=query_positions,
        key_value_positions=key_value_positions, mask_mod=mask_mod, score_mod=score_mod, mod_args=mod_args,
    )  # fmt: skip
    options = options_of(
        operator, head_scale.static(operator, scale, H, query.dtype), query.dtype, logits_soft_cap,
        dropout_rate, broadcast_dropout, precision, deterministic_sums, deterministic, score_mod,
    )  # fmt: skip
    rates = {"dropout_rate": options.dropout_rate}
    words, offset = dropout.words_and_offset(operator, rates, dropout_key, dropout_offset, T, S)
    query = head_scale.times(query, scale)
    return options, Operands(query, key, value, bias, sink, seen, words, offset)


def options_of(
    operator: str, scale: float, dtype: Any, logits_soft_cap, dropout_rate, broadcast_dropout, precision,
    deterministic_sums, deterministic, score_mod,
) -> Options:  # fmt: skip
    """Checks the options of a call of that dtype; `scale` and `score_mod` are checked already."""
    return Options(
        scale=scale,
        logits_soft_cap=_soft_cap(operator, logits_soft_cap, dtype),
        dropout_rate=checks.rate(operator, "dropout_rate", dropout_rate),
        broadcast_dropout=checks.flag(operator, "broadcast_dropout", broadcast_dropout),
        precision=checks.precision(operator, precision),
        deterministic_sums=checks.repeatable_sums(operator, deterministic_sums, deterministic),
        score_mod=score_mod,
    )


def _query_key_value(operator: str, query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    # Floats of one dtype, of three axes at least.
    query = checks.floating(operator, "query", query)
    key = checks.floating(operator, "key", key)
    value = checks.floating(operator, "value", value)
    checks.same_dtype(operator, query=query, key=key, value=value)
    for argument, x, names in (
        ("query", query, "[..., T, N, H]"),
        ("key", key, "[..., S, K, H]"),
        ("value", value, "[..., S, K, Hv]"),
    ):
        checks.rank(operator, argument, x, names, least=3)

    # Shapes that fit together; a warning where heads seem to stand before tokens.
    *batch, T, N, H = query.shape
    S, K, Hv = key.shape[-3], key.shape[-2], value.shape[-1]
    checks.shape(operator, "key", key, "[..., S, K, H]", (*batch, S, K, H))
    checks.shape(operator, "value", value, "[..., S, K, Hv]", (*batch, S, K, Hv))
    if K == 0 or N == 0 or N % K:
        remedy = f"key and value have K = {K}; {_HEADS_LAST}"
        expected = "be a positive multiple of the key heads K"
        raise ValueError(checks.message(operator, "query heads N", expected, N, remedy))
    if T == S and isinstance(T, int) and 1 < T <= N // 8 and N >= 64:
        checks.warn(f"{operator}: query {query.shape} has T = {T} tokens and N = {N} heads: {_HEADS_LAST}")

    # Shardings that fit together, without mesh axes of size 1.
    query, key, value = map(sharding.without_ones, (query, key, value))
    _check_explicit_sharding(operator, query, key, value)
    return query, key, value


def _check_explicit_sharding(operator: str, query, key, value) -> None:
    """Raises on an Explicit mesh unless batch and heads are sharded alike, sequences as they please."""
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
        raise ValueError(checks.message(operator, "logits_soft_cap", "be positive", cap, "None is no cap"))
    return None if numerics.soft_cap_is_identity(cap, wide) else cap


def require_floats(operator: str, mod_args: Any) -> None:
    """Raises where `wrt="mod_args"` asks for gradients and there are no floats."""
    if not jax.tree.leaves(trees.floats(mod_args)):
        dtypes = ", ".join(str(x.dtype) for x in jax.tree.leaves(mod_args)) or "nothing"
        expected, remedy = "hold floating-point arrays where wrt names it", "integers have no gradient"
        raise TypeError(checks.message(operator, "mod_args", expected, dtypes, remedy))


# a difference of two positions must fit int32
_POSITIONS = {"least": -(2**30), "greatest": 2**30}


class Like(NamedTuple):
    """An array with the queries of a call: on an Explicit mesh, what belongs to them is sharded as it is."""

    array: jax.Array  # its batch axes are those of the call
    queries: int  # its axis of queries
    heads: int | None  # its axis of heads; None = it has none


def mask_of(
    operator: str, like: Like, sizes: Sizes, *, mask=None, is_causal=False, local_window_size=None,
    query_seq_lengths=None, key_value_seq_lengths=None, query_segment_ids=None, key_value_segment_ids=None,
    query_positions=None, key_value_positions=None, mask_mod=None, score_mod=None, mod_args=(), counted=None,
) -> tuple[Mask, Any]:  # fmt: skip
    """Checks who sees whom, and returns (the mask, `score_mod`); raises as the public docstrings say.

    Args:
      like, sizes: what the call's arrays are.
      counted: how many queries and keys indices count; None = those of `sizes`, which may be a device's.
    """
    batch, T, S, K, _ = sizes
    N = sizes.N
    # The shapes that are meant where heads precede tokens, which queries and keys do not tell.
    swapped = {} if like.heads is None else {"[..., T]": (*batch, N), "[..., S]": (*batch, K)}
    if mask is not None:
        mask = plane(operator, "mask", checks.boolean_mask(operator, mask), sizes, like)

    def tokens(argument, x, names, tail, axes=(), **limits):
        """Checks what is told of tokens; `axes` of `like` are those along which its tail is sharded."""
        if x is None:
            return None
        rank = len(batch) + len(tail)
        x = drop_leading_ones(checks.integers(operator, argument, x, **limits), rank)
        checks.broadcasts(operator, argument, x, names, (*batch, *tail), swapped.get(names, ()))
        x = numerics.to_rank(numerics.saturated(x, **limits), rank)
        return sharding.reshard_like(x, like.array, (*range(len(batch)), *(axes or (None,) * len(tail))))

    # Segment ids, together; wide ones become int32 that are equal where they are.
    ids = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    both_or_neither(operator, ids)
    if not all(map(numerics.fits_int32, ids.values())):
        query_segment_ids, key_value_segment_ids = _narrow(operator, ids, like, sizes)

    # Functions, and what they read: indices where no positions are given, numbers of entries and heads.
    mask_mod, score_mod = mod_functions.by_value(mask_mod), mod_functions.by_value(score_mod)
    has_functions = mask_mod is not None or score_mod is not None
    is_empty = any(0 in getattr(x, "shape", ()) for x in jax.tree.leaves(mod_args))
    if has_functions and is_empty and 0 in [n for n in (T, S) if isinstance(n, int)]:
        mask_mod = score_mod = None  # of no element, and nothing can be read of arrays without entries
    rules = Mask(
        checks.flag(operator, "is_causal", is_causal), masks.window(operator, local_window_size), mask_mod
    )
    args = numbers = heads = None
    if has_functions:
        wide = numerics.accumulator_dtype(like.array.dtype)
        positions = (query_positions, key_value_positions)
        sides = zip(counted or (T, S), positions, strict=True)
        by_index = [n if x is None else None for n, x in sides]
        known = [n for n in by_index if isinstance(n, int)]
        read = mod_functions.ReadSizes(batch, N, max(known, default=0), *by_index)
        args = mod_functions.prepared(operator, mask_mod, score_mod, mod_args, read, K, wide)
        read_by = args, _numbers(batch), jnp.arange(N, dtype=jnp.int32)
        whole = lambda x: sharding.reshard_like(x, like.array, (None,) * x.ndim)
        args, numbers, heads = jax.tree.map(whole, read_by)
    elif jax.tree.leaves(mod_args):
        expected = "be given together with mask_mod or score_mod"
        raise ValueError(checks.message(operator, "mod_args", expected, "neither"))

    # What is told of tokens, sharded as the queries are where it is told of these.
    rows = (like.queries,)
    found = rules.replace(
        elements=mask,
        query_seq_lengths=tokens("query_seq_lengths", query_seq_lengths, "[...]", (), **_lengths(T)),
        key_value_seq_lengths=tokens(
            "key_value_seq_lengths", key_value_seq_lengths, "[...]", (), **_lengths(S)
        ),
        query_segment_ids=tokens("query_segment_ids", query_segment_ids, "[..., T]", (T,), rows),
        key_value_segment_ids=tokens("key_value_segment_ids", key_value_segment_ids, "[..., S]", (S,)),
        query_positions=tokens("query_positions", query_positions, "[..., T]", (T,), rows, **_POSITIONS),
        key_value_positions=tokens(
            "key_value_positions", key_value_positions, "[..., S]", (S,), **_POSITIONS
        ),
        batch_number=numbers,
        head_number=heads,
        mod_args=args,
    )
    return found, score_mod


def both_or_neither(operator: str, pair: dict[str, Any], remedy: str = "") -> None:
    """Checks that both of a pair of arguments are given, by name, or neither."""
    missing = {name for name, x in pair.items() if x is None}
    if len(missing) == 1:
        (one,), (other,) = missing, pair.keys() - missing
        raise ValueError(checks.message(operator, one, f"be given together with {other}", None, remedy))


def plane(operator: str, argument: str, x: jax.Array, sizes: Sizes, like: Like | None) -> jax.Array:
    """Checks a mask or bias that broadcasts to `[..., N, T, S]`, and shards it as `like` if that is given."""
    batch, T, S, K, _ = sizes
    N = sizes.N
    x = drop_leading_ones(x, len(batch) + 3)
    swapped = () if like is None or like.heads is None else (*batch, T, N, K)
    checks.broadcasts(operator, argument, x, "[..., N, T, S]", (*batch, N, T, S), swapped)
    if like is None:
        return x
    return sharding.reshard_like(x, like.array, (*range(len(batch)), like.heads, like.queries, None))


def bias_plane(operator: str, bias: Any, sizes: Sizes, like: Like | None) -> jax.Array:
    """Checks the bias, which a plane or a tile reads more than once."""
    bias = plane(operator, "bias", checks.floating(operator, "bias", bias), sizes, like)
    return fusion.kept_whole(bias, may_be_gathered=False)


def drop_leading_ones(x: jax.Array, rank: int) -> jax.Array:
    """Drops axes of size 1 beyond `rank`: `jax.nn` wants them with inputs that have no batch."""
    extra = x.ndim - rank
    return x.reshape(x.shape[extra:]) if extra > 0 and x.shape[:extra] == (1,) * extra else x


def _lengths(size: Any) -> dict[str, int]:
    """Returns the range of a length of that many tokens; what is symbolic is not known."""
    return {"least": 0} | ({"greatest": size} if isinstance(size, int) else {})


def _narrow(operator: str, ids: dict[str, Any], like: Like, sizes: Sizes) -> Any:
    """Turns wide traced segment ids into int32 `[..., T]` and `[..., S]` that are equal where they are."""
    batch, rows = sizes.batch, []
    sides = zip(ids.items(), ("[..., T]", "[..., S]"), (sizes.T, sizes.S), strict=True)
    for (argument, x), names, length in sides:
        x = drop_leading_ones(checks.integers(operator, argument, x), len(batch) + 1)
        checks.broadcasts(operator, argument, x, names, (*batch, length))
        x = jnp.broadcast_to(x, (*batch, x.shape[-1] if x.ndim else 1))
        rows.append(sharding.reshard_like(x, like.array, (*range(len(batch)), None)))
    return numerics.ranks(*rows)


def _numbers(batch: tuple[Any, ...]) -> jax.Array:
    """Returns the number of each batch entry, row-major, int32 `[...]`."""
    number = jnp.zeros((1,) * len(batch), jnp.int32)
    for axis, n in enumerate(batch):
        shape = tuple(n if i == axis else 1 for i in range(len(batch)))
        number = number * n + jnp.arange(n, dtype=jnp.int32).reshape(shape)
    return number
