"""Dense attention: the public functions, their checks, and the rules."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax

from jax_attn_bwd._core import checks, head_scale, keywords, trees
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import Array, Implementation, Integers, Scale
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product import tangent as written_tangent
from jax_attn_bwd.ops.dot_product.arguments import prepare, require_floats
from jax_attn_bwd.ops.dot_product.blockwise import IMPLEMENTATIONS as IMPLEMENTATIONS
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import (
    DIFFERENTIABLE,
    DotProductAttentionGrads,
    DotProductAttentionKeywords,
    Operands,
    Residuals,
    Result,
    Wanted,
    as_cotangents,
)

_NAME = "dot_product_attention"


# fmt: off
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    return_residual: Literal[False] = False, forward_mode: bool = False,
    **options: Unpack[DotProductAttentionKeywords]
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    return_residual: Literal[True], forward_mode: bool = False, **options: Unpack[DotProductAttentionKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    return_residual: bool, forward_mode: bool = False, **options: Unpack[DotProductAttentionKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integers | None = None,
    key_value_seq_lengths: Integers | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Integers | None = None,
    key_value_segment_ids: Integers | None = None,
    query_positions: Integers | None = None,
    key_value_positions: Integers | None = None,
    logits_soft_cap: float | None = None,
    sink: Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    mod_args: tuple[Any, ...] = (),
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    dropout_offset: Sequence[Any] | None = None,
    precision: Any = None,
    deterministic_sums: bool | None = None,
    return_residual: bool = False,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends every query to the keys it sees, in memory linear in T and S.

        logits = score_mod(soft_cap(scale * q k^T) + bias)
        out    = dropout(softmax(logits, where visible)) v

    A query t sees a key s if every given condition holds: `mask` and `mask_mod` are True, `bias` is not -inf,
    t and s lie within the sequence lengths, their segment ids are equal, s is not after t (`is_causal`) and
    within the window. Tiles in which nothing is seen are skipped, in the forward and in the backward, but
    where a whole plane is faster.

    Over several devices batch and heads may be sharded, and nothing is exchanged but the gradients of what
    they share. Sequences may be sharded, too; the page "Sharding" tells what that costs on Explicit and on
    Auto meshes, and when to take `jax_attn_bwd.parallel`.

    Shapes: `...` any number of batch axes, T query length, S key length, N query heads, K key/value
    heads (N a multiple of K: query head n uses key head n // (N / K)), H head size, Hv value head size.

    Args:
      query: `[..., T, N, H]`, floating.
      key: `[..., S, K, H]`, dtype of `query`.
      value: `[..., S, K, Hv]`, dtype of `query`.
      bias: broadcasts to `[..., N, T, S]`, floating; added to the logits. -inf counts as masked.
      mask: broadcasts to `[..., N, T, S]`, bool; True attends.
      scale: a number that is known, of any kind (a float, NumPy's, an array `[]`); default `1 / sqrt(H)`. One
        that is traced, or differentiated, multiplies the query, in the dtype in which logits are computed.
      is_causal: a query sees keys up to its own position (top-left aligned, as in `jax.nn`).
      query_seq_lengths, key_value_seq_lengths: ints that broadcast to `[...]`, in [0, T] and [0, S];
        positions at or beyond the length see nothing, and are not seen. Always counted by index, not by
        position.
      local_window_size: w looks both ways, as in `jax.nn`: a query at p sees keys from p - w to p + w;
        (left, right): from p - left to p + right. Gemma's window of 1,024 tokens, which looks back only, is
        `(1023, 0)`, or `mods.sliding_window(1023)`.
      query_segment_ids, key_value_segment_ids: ints that broadcast to `[..., T]` and `[..., S]`; give both.
      query_positions, key_value_positions: ints that broadcast to `[..., T]` and `[..., S]`: what
        causality and windows compare, between `-2**30` and `2**30`; default the index (rings, packing,
        bottom-right alignment). These integers, lengths and segment ids are computed with as int32.
      logits_soft_cap: c > 0; the scaled logits become `c * tanh(logits / c)`.
      sink: `[N]`, floating: one more logit per row that takes probability and returns nothing.
      mask_mod: `(batch, head, row, column, *mod_args) -> bool`, True attends; `jax_attn_bwd.mods` has named
        ones. Elementwise jnp operations on int32 arrays that broadcast to a tile: batch counts over all batch
        axes, row-major, head over the query heads, row and column are positions where these are given, else
        indices. Its jaxpr is evaluated on intervals, so tiles are skipped without a T x S evaluation. What
        would differ from tile to tile (a maximum over columns, a count of them) is refused.
      score_mod: `(logits, batch, head, row, column, *mod_args) -> logits`, likewise, in the dtype in which
        logits are computed (float32, or float64). -inf hides, but no tile is skipped for it, and NaN in a
        value that it alone hides reaches the output: `mask_mod`, or a bias of -inf, holds it off.
        Both functions are static, told apart by `==`, which for a plain function is identity: one that is
        defined anew for each call is compiled anew. Define it once, and hand what changes over in
        `mod_args`. `explain` says which kernels can trace them.
      mod_args: a tuple of arrays, or pytrees of them, that both functions read by gathers (`slopes[head]`,
        `document[batch, row]`); floats arrive in the dtype of the logits. Each device holds them whole.
      dropout_rate: probability in [0, 1] of dropping an attention probability; 1 gives zeros.
      dropout_key: one JAX random key of any type; required if `dropout_rate > 0`. The mask is a function
        of (key, batch, head, row, column) alone, the same on every implementation and sharding.
      broadcast_dropout: one mask for all batch entries and heads.
      dropout_offset: (batch, head, row, column) of this block in a global array, ints or traced; row
        and column may be index arrays `[T]`, `[S]`. The batch counts over all batch axes, row-major, so
        a block of the leading one can be described. Known ones lie in [0, 2^31); traced ones count
        modulo 2^32.
      precision: how matrix products are taken; None follows `jax_default_matmul_precision`.
      deterministic_sums: True gives the same bits in every run everywhere; None (the default) wherever it
        costs nothing, which is all but "cudnn"; False lets a kernel add in any order where that is faster.
      return_residual: return `(out, lse)`.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: None picks the fastest that is proven on the device (`python -m jax_attn_bwd.check
        --enable`), on a GPU that has none "cudnn" where it takes the call, else "xla"; a name runs that one
        or raises with the reason. The page "What runs where" tells what each of them takes.
      deterministic: the former name of `deterministic_sums`, deprecated: in layers it is about dropout.

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`. Sums are accumulated in float32 (float64 for float64).
        A query that sees nothing gives 0.
      lse: `[..., T, N]`, with `return_residual`: natural log of the sum of exp(logits), the sink
        included; float32 (float64 for float64). A query that sees nothing: -inf, or `sink[n]`.

    Gradients:
      query, key, value, bias, sink, a traced `scale`, and the floats in mod_args (of what `score_mod` reads):
      exact, in the dtype and shape of the argument (a bias that broadcasts gets a gradient of its own shape,
      summed tile by tile, as do arrays in mod_args). The derivative of `score_mod` is JAX's. Only what is
      differentiated is computed. Both `out` and `lse` are differentiable, to second order and beyond: reverse
      over reverse, forward over reverse, `jax.hessian`; `jax.jvp` of the function itself by `forward_mode`.
      Saves its inputs, `lse` with its rounding, and `out`, on a CPU a narrow one in float32, too; they carry
      the checkpoint names "attention_out" and "attention_lse". NaN in keys and values that no query sees
      reaches no output and no gradient.

    Raises:
      ValueError: shapes disagree, an option is out of range, or a length or position is. A traced one is
        not checked: a length beyond the sequence then hides nothing, a negative one hides all. Or a function
        is not elementwise, or `mod_args` are not as many, or not as long, as named ones read.
      TypeError: an argument is of the wrong kind (float mask, mixed dtypes), or a function closes over traced
        arrays, has side effects, cannot be traced or returns another dtype. Without `forward_mode`, of
        `jax.jvp`: "can't apply forward-mode autodiff (jvp) to a custom_vjp function".
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax, numpy as np
      >>> from jax_attn_bwd import dot_product_attention
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> dq = jax.grad(lambda q: dot_product_attention(q, k, v, is_causal=True).sum())(q)
      >>> dq.shape
      (2, 16, 4, 8)

    References:
      Vaswani et al., Attention is all you need, 2017, arXiv:1706.03762, section 3.2.1.
      Dao, FlashAttention-2, 2023, arXiv:2307.08691.
    """
    options, operands = prepare(
        _NAME, query, key, value, bias, mask, scale=scale, is_causal=is_causal,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, query_positions=query_positions,
        key_value_positions=key_value_positions, logits_soft_cap=logits_soft_cap, sink=sink,
        mask_mod=mask_mod, score_mod=score_mod, mod_args=mod_args, dropout_rate=dropout_rate,
        dropout_key=dropout_key, broadcast_dropout=broadcast_dropout, dropout_offset=dropout_offset,
        precision=precision, deterministic_sums=deterministic_sums, deterministic=deterministic,
    )  # fmt: skip
    return_residual = checks.flag(_NAME, "return_residual", return_residual)
    run = _OPERATION.runner(_NAME, forward_mode)
    out, lse = run(blockwise.plan(_NAME, implementation, options, operands), operands)
    return (out, lse) if return_residual else out


@keywords.known
def dot_product_attention_bwd(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
    **options: Unpack[DotProductAttentionKeywords],
) -> DotProductAttentionGrads:
    """Computes the gradients of `dot_product_attention`, by its results and the same arguments.

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: `[..., T, N, Hv]`, cotangent of `out`, dtype of `query`.
      out, lse: what `dot_product_attention(..., return_residual=True)` returned for the same arguments, or
        for more keys, of which these are a block: the gradients of disjoint blocks add up to the whole.
        A row of tied logits of 1e6 and more is rounded away in `lse`; only the gradient of
        `dot_product_attention` itself keeps the remainder.
      dlse: `[..., T, N]`, cotangent of `lse`; None = 0.
      wrt: which of "query", "key", "value", "bias", "sink", "mod_args" to compute.

    Returns:
      DotProductAttentionGrads(query, key, value, bias, sink, mod_args), each with its argument's shape and
      dtype, mod_args with None in the place of what is not floating; None where not asked.

    Example:
      >>> import numpy as np
      >>> import jax_attn_bwd as jab
      >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 16, 4, 8))
      >>> out, lse = jab.dot_product_attention(q, k, v, return_residual=True)
      >>> grads = jab.dot_product_attention_bwd(dout, q, k, v, out=out, lse=lse, wrt=("key",))
      >>> grads.key.shape, grads.query is None
      ((2, 16, 4, 8), True)
    """
    # The arguments of the forward call.
    name = f"{_NAME}_bwd"
    given = checks.complete(name, dot_product_attention, DotProductAttentionKeywords, options)
    implementation = given.pop("implementation")
    checked, operands = prepare(name, query, key, value, bias, mask, **given)

    # Results and cotangents in the shapes and dtypes of the forward's, sharded as the queries are.
    expected = (*operands.query.shape[:-1], operands.value.shape[-1])
    axes = tuple(range(operands.query.ndim))

    def row(argument: str, given: Array) -> jax.Array:
        x, wide = checks.floating(name, argument, given), accumulator_dtype(operands.query.dtype)
        checks.shape(name, argument, x, "[..., T, N]", expected[:-1])
        if x.dtype != wide:
            raise TypeError(checks.message(name, argument, f"have dtype {wide}", f"dtype {x.dtype}"))
        return reshard_like(x, operands.query, axes[:-1])

    dout, out = checks.floating(name, "dout", dout), checks.floating(name, "out", out)
    for argument, x in (("dout", dout), ("out", out)):
        checks.shape(name, argument, x, "[..., T, N, Hv]", expected)
    dout, out = (reshard_like(x, operands.query, axes) for x in (dout, out))
    lse, dlse = row("lse", lse), None if dlse is None else row("dlse", dlse)
    checks.same_dtype(name, query=operands.query, dout=dout, out=out)

    # Which gradients, by which implementation.
    present = [n for n in DIFFERENTIABLE if getattr(operands, n) is not None]
    wanted = checks.wanted(name, wrt, DIFFERENTIABLE, present)
    if "mod_args" in wanted:
        require_floats(name, operands.mod_args)
    plan = blockwise.plan(name, implementation, checked, operands)
    grads = blockwise.backward(plan, operands, Result(out, lse, None), wanted, dout, dlse)
    if grads.query is not None:
        grads = grads._replace(query=head_scale.times(grads.query, given["scale"]))
    return grads._replace(mod_args=trees.in_dtypes_of(tuple(given["mod_args"]), grads.mod_args))


def _primal(plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    result = blockwise.implementation(plan).forward(plan, operands)
    return result.out, result.lse


def _forward(plan, operands, wanted):
    forward = blockwise.implementation(plan).forward
    result = forward(blockwise.differentiated(plan, wanted), operands)
    kept = blockwise.pack_residuals(plan, result, wanted)
    return (kept.out, kept.lse), (operands, kept)


def _backward(plan, saved, wanted, cotangents):
    operands, result = saved
    residuals = Residuals(operands, blockwise.unpack_residuals(result), Wanted(wanted, alone=True))
    grads = blockwise.implementation(plan).backward(plan, residuals, *cotangents)
    return as_cotangents(operands, grads._asdict())


def _tangent(plan, saved, tangents):
    operands, result = saved
    return written_tangent.tangent(plan, operands, blockwise.unpack_residuals(result), tangents)


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
