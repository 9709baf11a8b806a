"""Checks the arguments of a call and makes `Options` and `Operands` of them."""

from typing import Any

import jax

from jax_attn_bwd._core import checks, dropout, float_leaves, notices, numerics, sharding
from jax_attn_bwd.ops.dot_product import mask_arguments
from jax_attn_bwd.ops.dot_product.mask_arguments import Like
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import Sizes


def prepare(
    operator: str, query, key, value, bias, mask, *, scale, logits_soft_cap, sink, dropout_rate, dropout_key,
    broadcast_dropout, dropout_offset, precision, deterministic_sums, deterministic=None, score_mod=None,
    **conditions,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `dot_product_attention`; raises as its docstring says.

    `conditions` are those of `mask_arguments.mask_of`.
    """
    query, key, value = _query_key_value(operator, query, key, value)
    (*batch, T, N, H), (S, K) = query.shape, key.shape[-3:-1]
    sizes, like = Sizes(tuple(batch), T, S, N, N // K), Like(query, -3, -2)
    if bias is not None:
        bias = mask_arguments.bias_plane(operator, bias, sizes, like)
    if sink is not None:
        sink = checks.floating(operator, "sink", sink)
        checks.shape(operator, "sink", sink, "[N]", (N,))
        sink = sharding.reshard_like(sink, query, (-2,))
    seen, score_mod = mask_arguments.mask_of(
        operator, like, sizes, mask=mask, score_mod=score_mod, **conditions
    )
    remedy = "multiply query by a learned or traced temperature"
    options = options_of(
        operator, checks.head_scale(operator, scale, H, query.dtype, remedy), query.dtype, logits_soft_cap,
        dropout_rate, broadcast_dropout, precision, deterministic_sums, deterministic, score_mod,
    )  # fmt: skip
    rates = {"dropout_rate": options.dropout_rate}
    words, offset = dropout.drawn(operator, rates, dropout_key, dropout_offset, T, S)
    return options, Operands(query, key, value, bias, sink, seen, words, offset)


def options_of(
    operator: str, scale: float, dtype: Any, logits_soft_cap, dropout_rate, broadcast_dropout, precision,
    deterministic_sums, deterministic, score_mod,
) -> Options:  # fmt: skip
    """The checked options of a call of that dtype; `scale` and `score_mod` are checked already."""
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
    if T == S and isinstance(T, int) and 1 < T <= N // 8 and N >= 64:
        notices.warn(
            f"{operator}: query {query.shape} has T = {T} tokens and N = {N} heads: the layout is"
            " [..., T, N, H]; from [..., N, T, H] write x.swapaxes(-3, -2)"
        )
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
