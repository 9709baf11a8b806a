"""The multi-head attention layer: the public functions, their checks, and the rules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack, overload

import jax

from jax_attn_bwd._core import checks, keywords, trees
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Array, Implementation, Integers, Pair, Save, Scale
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product.arguments import require_floats
from jax_attn_bwd.ops.dot_product.spec import as_cotangents
from jax_attn_bwd.ops.multi_head import backward as layer_backward
from jax_attn_bwd.ops.multi_head import forward as layer_forward
from jax_attn_bwd.ops.multi_head import tangent as layer_tangent
from jax_attn_bwd.ops.multi_head.arguments import prepare, times_scale
from jax_attn_bwd.ops.multi_head.plan import Plan
from jax_attn_bwd.ops.multi_head.plan import plan as planned
from jax_attn_bwd.ops.multi_head.spec import (
    ARRAYS,
    DIFFERENTIABLE,
    PARAMS,
    MultiHeadAttentionGrads,
    MultiHeadAttentionKeywords,
    MultiHeadAttentionParams,
    MultiHeadAttentionResidual,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
    described,
)

_NAME = "multi_head_attention"
_Residual: TypeAlias = tuple[jax.Array, MultiHeadAttentionResidual]
_Both: TypeAlias = tuple[jax.Array, jax.Array, MultiHeadAttentionResidual]
_Any: TypeAlias = jax.Array | Pair | _Residual | _Both


# fmt: off
@overload
def multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *,
    return_weights: Literal[False] = False, return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[MultiHeadAttentionKeywords]) -> jax.Array: ...
@overload
def multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: Literal[True], return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[MultiHeadAttentionKeywords]) -> Pair: ...
@overload
def multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: Literal[False] = False, return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[MultiHeadAttentionKeywords]) -> _Residual: ...
@overload
def multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: Literal[True], return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[MultiHeadAttentionKeywords]) -> _Both: ...
@overload
def multi_head_attention(
    params: MultiHeadAttentionParams[Array], query: Array, key: Array | None = None,
    value: Array | None = None, *, return_weights: bool = False, return_residual: bool = False,
    forward_mode: bool = False, **options: Unpack[MultiHeadAttentionKeywords]) -> _Any: ...
# fmt: on
@keywords.known
def multi_head_attention(
    params: MultiHeadAttentionParams[Array],
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    num_heads: int | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: Scale | None = None,
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
    deterministic_sums: bool | None = None,
    save: Save = "inputs",
    return_residual: bool = False,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> jax.Array | tuple[Any, ...]:
    """The whole layer under one rule: projections, attention, output projection, both dropouts.

        q = R(query W_q + b_q),   k = [R(key W_k + b_k); bias_k; 0],   v = [value W_v + b_v; bias_v; 0]
        weights = softmax(score_mod(soft_cap(scale * q k^T) + bias), where visible)
        out     = out_dropout(dropout(weights) v W_o + b_o) (+ query)

    A query t sees a key s under the conditions of `dot_product_attention`: mask and bias, lengths, segments,
    causality, window and `mask_mod`. The appended rows, `bias_k`/`bias_v` and then zeros (`add_zero_attn`),
    are seen by every query, whatever is hidden; the soft cap holds for them, too, but neither bias nor
    `score_mod`. A kernel that is None hands the input itself to every head.

    Shapes: `...` any number of batch axes, T query length, S key length, N query heads, K key/value heads
    (N a multiple of K), H head size, Hv value head size, Eq Ek Ev Eo widths, R appended rows, S' = S + R.

    Args:
      params: MultiHeadAttentionParams, each field an array or None; dtype of `query` (`sink`: any floating):
        query_kernel `[Eq, N, H]`, query_bias `[N, H]`, key_kernel `[Ek, K, H]`, key_bias `[K, H]`,
        value_kernel `[Ev, K, Hv]`, value_bias `[K, Hv]`, out_kernel `[N, Hv, Eo]` (None: heads side by side,
        Eo = N * Hv), out_bias `[Eo]`, bias_k `[K, H]` with bias_v `[K, Hv]`, sink `[N]` (one more logit that
        takes probability and returns nothing).
      query: `[..., T, Eq]`, floating.
      key: `[..., S, Ek]`, dtype of `query`; None = `query`.
      value: `[..., S, Ev]`, dtype of `query`; None = `key`.
      num_heads: N; needed where neither `query_kernel` nor `out_kernel` tells it.
      bias: broadcasts to `[..., N, T, S]`, floating; added to the logits. -inf counts as masked.
      mask: broadcasts to `[..., N, T, S]`, bool; True attends.
      scale: a number, default `1 / sqrt(H)`; a traced one multiplies `query_kernel` and `query_bias`, and
        without these is an error: see `dot_product_attention`.
      is_causal: a query sees keys up to its own position.
      local_window_size: int or (left, right): a query at p sees keys from p - left to p + right.
      query_seq_lengths, key_value_seq_lengths: ints that broadcast to `[...]`, in [0, T] and [0, S]: what
        lies at or beyond them sees none of the S keys, and is not seen.
      query_segment_ids, key_value_segment_ids: ints that broadcast to `[..., T]` and `[..., S]`; a query sees
        the keys of its own segment. Give both, in self-attention the same twice.
      query_positions, key_value_positions: ints that broadcast to `[..., T]` and `[..., S]`: what causality
        and windows compare, and `rotary` turns by, between `-2**30` and `2**30`; default the index.
      logits_soft_cap: c > 0; the scaled logits become `c * tanh(logits / c)`.
      rotary: R above: turns the projected queries and keys by their positions (`Rotary`); the appended rows
        have none. In decoding the positions of a row's queries tell where each is: `[..., T]`, any offsets.
      mask_mod, score_mod, mod_args: masks and scores as functions, and what they read, as in
        `dot_product_attention`.
      add_zero_attn: append a key and a value of zeros.
      dropout_rate: probability in [0, 1] of dropping an attention probability.
      out_dropout_rate: probability of dropping an element of the output, after its bias, before `query`
        is added.
      dropout_key: one JAX random key of any type; required if a rate is > 0. Both masks are functions of
        (key, batch, head, row, column) alone, the same under every sharding and whatever is saved.
      dropout_offset: (batch, head, row, column) of this block in a global array, ints or traced; row and
        column may be index arrays `[T]`, `[S']`. Known ones lie in [0, 2^31); traced ones count modulo 2^32.
      broadcast_dropout: one mask of the probabilities for all batch entries and heads.
      add_residual: add `query` to the output; Eo = Eq.
      return_weights: return `(out, weights)`.
      average_weights: with `return_weights`, their mean over the heads.
      precision: how matrix products are taken; None follows `jax_default_matmul_precision`.
      deterministic_sums: that of the attention inside, as in `dot_product_attention`.
      save: what is kept for the backward beside the inputs, the heads' output `[..., T, N, Hv]` and its
        `lse`: "inputs" nothing (the projections are computed again), "qkv" the projected heads, "probs"
        those and the T x S probabilities. The gradients are the same.
      return_residual: append what `multi_head_attention_bwd` can be handed to spare the forward; no
        gradient flows through it.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule;
        without `return_residual`.
      implementation: that of the attention inside, as in `dot_product_attention`.
      deterministic: the former name of `deterministic_sums`, deprecated: in layers it is about dropout.

    Returns:
      out: `[..., T, Eo]`, dtype of `query`. A query that sees nothing gives the output bias.
      weights: `[..., N, T, S']`, or `[..., T, S']` averaged, before dropout; a row that sees nothing is 0.
        The sink is no column.

    Gradients:
      Every field of `params`, query, key, value, bias and the floats in mod_args: exact, in the dtype and
      shape of the argument. Only what is differentiated is computed. `out` and `weights` are differentiable,
      to second order and beyond: reverse over reverse, forward over reverse, `jax.hessian`; `jax.jvp` of the
      function itself by `forward_mode`. Nothing of size T x S is kept, except for `return_weights` and
      `save="probs"`. The heads' output and its lse carry the checkpoint names "attention_out" and
      "attention_lse".
      NaN in rows of query, key and value that see nothing, or that nothing sees, reaches no gradient and no
      other row's output.

    Raises:
      ValueError: shapes disagree, a bias stands without its kernel, or an option is out of range, or a length
        or position is. A traced one is not checked.
      TypeError: an argument is of the wrong kind (float mask, mixed dtypes).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax
      >>> from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention
      >>> x, w_q, w_k, w_v = jax.random.normal(jax.random.key(0), (4, 16, 16))
      >>> params = MultiHeadAttentionParams(
      ...     query_kernel=w_q.reshape(16, 4, 4), key_kernel=w_k.reshape(16, 4, 4),
      ...     value_kernel=w_v.reshape(16, 4, 4))
      >>> grads = jax.grad(lambda p: multi_head_attention(p, x, is_causal=True).sum())(params)
      >>> grads.key_kernel.shape, grads.out_kernel is None
      ((16, 4, 4), True)

    References:
      Vaswani et al., Attention is all you need, 2017, arXiv:1706.03762, section 3.2.2.
    """
    options, operands = prepare(
        _NAME, params, query, key, value, num_heads=num_heads, bias=bias, mask=mask, scale=scale,
        is_causal=is_causal, local_window_size=local_window_size, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, query_positions=query_positions,
        key_value_positions=key_value_positions, logits_soft_cap=logits_soft_cap, rotary=rotary,
        mask_mod=mask_mod, score_mod=score_mod, mod_args=mod_args, add_zero_attn=add_zero_attn,
        dropout_rate=dropout_rate, out_dropout_rate=out_dropout_rate, dropout_key=dropout_key,
        dropout_offset=dropout_offset, broadcast_dropout=broadcast_dropout, add_residual=add_residual,
        return_weights=return_weights, average_weights=average_weights, precision=precision,
        deterministic_sums=deterministic_sums, save=save, return_residual=return_residual,
        deterministic=deterministic,
    )  # fmt: skip

    # under its rules; what was not asked for is None
    run = _OPERATION.runner(_NAME, forward_mode)
    if forward_mode and options.return_residual:
        expected = "be left out with forward_mode=True: a residual has no tangent"
        raise ValueError(checks.message(_NAME, "return_residual", expected, return_residual))
    plan = planned(_NAME, implementation, options, operands)
    given = tuple(x for x in run(plan, operands) if x is not None)
    return given if len(given) > 1 else given[0]


@keywords.known
def multi_head_attention_bwd(
    dout: Array | None,
    params: MultiHeadAttentionParams[Array],
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    dweights: Array | None = None,
    residual: MultiHeadAttentionResidual | None = None,
    wrt: Sequence[str] | None = None,
    **options: Unpack[MultiHeadAttentionKeywords],
) -> MultiHeadAttentionGrads:
    """Computes the gradients of `multi_head_attention`, by the same arguments.

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: `[..., T, Eo]`, cotangent of `out`, dtype of `query`; None = 0.
      dweights: cotangent of the weights, shape and dtype of what `return_weights` (with or without
        `average_weights`) returns; None = 0.
      residual: what `multi_head_attention(..., return_residual=True)` appended for the same arguments;
        None runs the forward again.
      wrt: fields of `MultiHeadAttentionParams`, or "params" for all that are given, and of "query", "key",
        "value", "bias", "mod_args"; default: all that are given but `bias` and `mod_args`.

    Returns:
      MultiHeadAttentionGrads(params, query, key, value, bias, mod_args), each with its argument's shape and
      dtype; None where not asked. Where key (or value) is None, its share is in `query` (or `key`).

    Example:
      >>> import jax
      >>> import jax_attn_bwd as jab
      >>> x, dout, w = jax.random.normal(jax.random.key(0), (3, 16, 16))
      >>> params = jab.MultiHeadAttentionParams(query_kernel=w[:, None])
      >>> grads = jab.multi_head_attention_bwd(dout, params, x, wrt=("query", "query_kernel"))
      >>> grads.query.shape, grads.params.query_kernel.shape, grads.params.out_kernel
      ((16, 16), (16, 1, 16), None)
    """
    name = f"{_NAME}_bwd"
    given = checks.complete(name, multi_head_attention, MultiHeadAttentionKeywords, options)
    implementation = given.pop("implementation")
    given["return_weights"] = dweights is not None or given["average_weights"]
    checked, operands = prepare(name, params, query, key, value, return_residual=True, **given)
    plan = planned(name, implementation, checked, operands)

    # the forward; where its residual is given, only the shapes of its results
    forward = partial(layer_forward.forward, plan)
    result: Any = forward(operands) if residual is None else jax.eval_shape(forward, operands)
    for argument, x, like, letters in (
        ("dout", dout, result.out, "[..., T, Eo]"),
        ("dweights", dweights, result.weights, "of the weights"),
    ):
        if x is not None:
            x = checks.floating(name, argument, x)
            checks.shape(name, argument, x, letters, like.shape)
            checks.same_dtype(name, query=operands.query, **{argument: x})
    if residual is None:
        residual = result.residual
    elif (got := described(residual)) != described(result.residual):
        expect = f"be what the forward of the same arguments and save={checked.save!r} returned"
        raise ValueError(checks.message(name, "residual", expect, got))

    # the gradients, in the form of the arguments
    wanted = _wanted(name, operands, wrt)
    if "mod_args" in wanted:
        require_floats(name, operands.mod_args)
    residuals = Residuals(operands, residual, Wanted(frozenset(wanted)))
    grads = times_scale(layer_backward.backward(plan, residuals, dout, dweights), given["scale"])
    of_params = MultiHeadAttentionParams(*(grads.get(n) for n in PARAMS))
    found: dict[str, Any] = {n: grads.get(n) for n in ARRAYS}
    found["mod_args"] = trees.in_dtypes_of(tuple(given["mod_args"]), found["mod_args"])
    return MultiHeadAttentionGrads(of_params, **found)


def _wanted(operator: str, operands: Operands, wrt: Any) -> set[str]:
    """Returns the operands whose gradients `wrt` names; "params" stands for all parameters that are given."""
    present = [name for name in DIFFERENTIABLE if getattr(operands, name) is not None]
    if wrt is None:
        return set(present) - {"bias", "mod_args"}
    names = set(checks.wanted(operator, wrt, ("params", *DIFFERENTIABLE), ["params", *present]))
    return names - {"params"} | (set(PARAMS) & set(present) if "params" in names else set())


# those of dense attention, with the layer around them
IMPLEMENTATIONS = tuple(
    replace(attention, forward=layer_forward.forward, backward=layer_backward.backward)
    for attention in blockwise.IMPLEMENTATIONS
)


def _primal(plan: Plan, operands: Operands) -> tuple[Any, Any, Any]:
    return _outputs(plan.options, layer_forward.forward(plan, operands))


def _outputs(options: Options, result: Result) -> tuple[Any, Any, Any]:
    out, weights, residual = result
    return out, weights, residual if options.return_residual else None


def _forward(plan, operands, wanted):
    # a kernel keeps what rounding takes, where these gradients need it
    attention = blockwise.differentiated(plan.attention, wanted)
    result = layer_forward.forward(replace(plan, attention=attention), operands)
    kept = blockwise.pack_residuals(attention, result.residual.attention(), wanted)
    saved = operands, result.residual._replace(**kept._asdict())
    return _outputs(plan.options, result), saved


def _backward(plan, saved, wanted, cotangents):
    dout, dweights, of_residual = cotangents
    if jax.tree.leaves(of_residual):
        raise NotImplementedError(
            "multi_head_attention: the residual of return_residual has no gradient; "
            "differentiate out and weights"
        )
    operands, residual = saved
    residuals = Residuals(operands, _restored(residual), Wanted(wanted))
    return as_cotangents(operands, layer_backward.backward(plan, residuals, dout, dweights))


def _tangent(plan, saved, tangents):
    operands, residual = saved
    return layer_tangent.tangent(plan, operands, _restored(residual), tangents)


def _restored(residual):
    return residual._replace(**blockwise.unpack_residuals(residual.attention())._asdict())


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
