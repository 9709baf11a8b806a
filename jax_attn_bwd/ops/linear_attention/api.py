"""Linear attention: the public functions of its operators, their checks, and the rules they share."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_attn_bwd._core import backend, checks, keywords
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import Array, Implementation, Integers
from jax_attn_bwd.ops.linear_attention import backward as portable_backward
from jax_attn_bwd.ops.linear_attention import forward as portable_forward
from jax_attn_bwd.ops.linear_attention import tangent as written_tangent
from jax_attn_bwd.ops.linear_attention.arguments import prepare, state
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.plan import plan as planned
from jax_attn_bwd.ops.linear_attention.spec import (
    ALL_DIFFERENTIABLE,
    DIFFERENTIABLE,
    OF_ERASING,
    WITHOUT_BETA,
    DplrLinearAttentionGrads,
    GatedDeltaRuleGrads,
    GatedLinearAttentionGrads,
    LinearAttentionKeywords,
    Operands,
    Residuals,
    Wanted,
)

_DELTA, _LINEAR, _ERASING = "gated_delta_rule", "gated_linear_attention", "dplr_linear_attention"


# fmt: off
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *,
    return_final_state: Literal[False] = False, forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> jax.Array: ...
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *,
    return_final_state: Literal[True], forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array | None, beta: Array, *,
    return_final_state: bool, forward_mode: bool = False, **options: Unpack[LinearAttentionKeywords]
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
    initial_state: Array | None = None,
    scale: float | None = None,
    l2_norm_epsilon: float | None = None,
    seq_lengths: Integers | None = None,
    segment_ids: Integers | None = None,
    return_final_state: bool = False,
    precision: Any = None,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Corrects a matrix of memory by the delta rule and reads it, token by token, in memory linear in T.

        S'_t = exp(log_decay_t) S_{t-1},   u_t = beta_t (v_t - S'_t^T k_t)
        S_t  = S'_t + k_t u_t^T,           out_t = scale S_t^T q_t

    The layer of Gated DeltaNet (Qwen3-Next, Qwen3.5) and, with a decay of each channel, of Kimi Delta
    Attention. It is computed in chunks of up to 64 tokens, whose products follow one another only where a
    state stands between them.

    Over several devices batch and heads may be sharded, and nothing is exchanged. A sequence that is cut is
    refused on an Explicit mesh; on Auto axes it is gathered.

    Shapes: `...` any number of batch axes, T tokens, K key heads, N value heads (a multiple of K: value head
    n reads key head n // (N / K)), H key size, Hv value size.

    Args:
      query: `[..., T, K, H]`, floating.
      key: `[..., T, K, H]`, dtype of `query`.
      value: `[..., T, N, Hv]`, dtype of `query`.
      log_decay: the logarithm of what the state is multiplied by before each token: `[..., T, N]` a number a
        head, `[..., T, N, H]` one a channel of the keys, `[N]` a constant of each head; None multiplies by 1.
        Floating, float32 beside narrow queries, too. -inf, and what underflows, makes the state 0. Above 0
        the state grows, which is taken as it is; where all that is known lies in [0, 1], as decays do and
        their logarithms do not, a warning says so.
      beta: `[..., T, N]`, floating, float32 beside narrow queries, too: the step of each correction, in
        [0, 1], or up to 2 for keys of length 1.
      initial_state: `[..., N, H, Hv]`, float32 (float64 for float64); None is 0.
      scale: a number that is known; default `1 / sqrt(H)`. With 1.0, multiply out by a learned or traced one.
      l2_norm_epsilon: query and key are first multiplied by `rsqrt(sum x^2 + l2_norm_epsilon)`; 1e-6 in
        Qwen3-Next. None takes them as they are: then beta |k|^2 above 2 diverges, as the definition does.
      seq_lengths: ints that broadcast to `[...]`, in [0, T]: tokens at or beyond neither write nor are read,
        and out is 0 there; the final state is that after the last token.
      segment_ids: ints that broadcast to `[..., T]`: where the id differs from that of the token before, a
        document begins, and its state is 0, as if it were alone. `initial_state` belongs to the first
        document, the final state to the last.
      return_final_state: return `(out, final_state)`.
      precision: how matrix products are taken; None follows `jax_default_matmul_precision`.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: "xla", portable code; "mosaic_tpu", kernels for TPUs, of bfloat16 and float32, of keys
        and values of up to 256 channels; "mosaic_gpu", kernels for Hopper GPUs, of bfloat16 and float16, of
        up to 128 channels. No chip has run these kernels: None picks them only where
        `python -m jax_attn_bwd.check --enable` has proven them, else "xla".

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`. States and sums are float32 (float64 for float64).
      final_state: with `return_final_state`, `[..., N, H, Hv]`, float32 (float64 for float64).

    Gradients:
      query, key, value, log_decay (of its own shape), beta, initial_state: exact, in the dtype and shape of
      the argument, through `out` and `final_state`, to second order and beyond. That of a decay that is 0 is
      0. Only what is differentiated is computed. Saves its inputs, and states of chunks: no more than the
      inputs hold. They carry the checkpoint names "attention_out" and "attention_states". NaN beyond the
      lengths reaches no output and no gradient.

    Raises:
      ValueError: shapes disagree, or an option is out of range; a sequence is cut over an Explicit mesh.
      TypeError: an argument is of the wrong kind (mixed dtypes, a narrow state).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import gated_delta_rule
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> log_decay, beta = jnp.full((2, 16, 4), -0.1), jnp.full((2, 16, 4), 0.5)
      >>> out, state = gated_delta_rule(
      ...     q, k, v, log_decay, beta, l2_norm_epsilon=1e-6, return_final_state=True)
      >>> out.shape, state.shape
      ((2, 16, 4, 8), (2, 4, 8, 8))

    References:
      Yang et al., Gated delta networks, arXiv:2412.06464, 2024. Yang et al., Parallelizing linear
      transformers with the delta rule over sequence length, arXiv:2406.06484, 2024. Kimi Team, Kimi Linear,
      arXiv:2510.26692, 2025.
    """
    return_final_state = checks.flag(_DELTA, "return_final_state", return_final_state)
    options, operands = prepare(
        _DELTA, query, key, value, log_decay, beta, is_delta=True, initial_state=initial_state, scale=scale,
        l2_norm_epsilon=l2_norm_epsilon, seq_lengths=seq_lengths, segment_ids=segment_ids,
        precision=precision,
    )  # fmt: skip
    plan = backend.planned(_DELTA, IMPLEMENTATIONS, implementation, options, operands, planned)
    outputs = _OPERATION.runner(_DELTA, forward_mode)(plan, operands)
    return outputs if return_final_state else outputs[0]


# fmt: off
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *,
    return_final_state: Literal[False] = False, forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> jax.Array: ...
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *,
    return_final_state: Literal[True], forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None = None, *,
    return_final_state: bool, forward_mode: bool = False, **options: Unpack[LinearAttentionKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def gated_linear_attention(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None = None,
    *,
    initial_state: Array | None = None,
    scale: float | None = None,
    l2_norm_epsilon: float | None = None,
    seq_lengths: Integers | None = None,
    segment_ids: Integers | None = None,
    return_final_state: bool = False,
    precision: Any = None,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Adds to a matrix of memory and reads it, token by token, in memory linear in T.

        S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,   out_t = scale S_t^T q_t

    The layer of linear attention, RetNet and lightning attention (a constant decay), of Mamba-2 (a number a
    head) and of gated linear attention (a number a channel). Arguments, results, gradients and errors are
    those of `gated_delta_rule`, without `beta`.

    Shapes: as in `gated_delta_rule`.

    Args:
      query, key, value, log_decay: as in `gated_delta_rule`; `log_decay` may be left out.
      initial_state, scale, l2_norm_epsilon, seq_lengths, segment_ids, return_final_state, precision,
        forward_mode, implementation: as in `gated_delta_rule`.

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`; with `return_final_state` also final_state `[..., N, H, Hv]`.

    Gradients:
      query, key, value, log_decay, initial_state: as in `gated_delta_rule`.

    Raises:
      As `gated_delta_rule`.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import gated_linear_attention
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> out = gated_linear_attention(q, k, v, jnp.log(1 - 2.0 ** -jnp.arange(5.0, 9.0)))
      >>> out.shape
      (2, 16, 4, 8)

    References:
      Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, 2020. Yang et al., Gated linear attention
      transformers with hardware-efficient training, arXiv:2312.06635, 2023. Dao and Gu, Transformers are
      SSMs, arXiv:2405.21060, 2024.
    """
    return_final_state = checks.flag(_LINEAR, "return_final_state", return_final_state)
    options, operands = prepare(
        _LINEAR, query, key, value, log_decay, None, is_delta=False, initial_state=initial_state, scale=scale,
        l2_norm_epsilon=l2_norm_epsilon, seq_lengths=seq_lengths, segment_ids=segment_ids,
        precision=precision,
    )  # fmt: skip
    plan = backend.planned(_LINEAR, IMPLEMENTATIONS, implementation, options, operands, planned)
    outputs = _OPERATION.runner(_LINEAR, forward_mode)(plan, operands)
    return outputs if return_final_state else outputs[0]


# fmt: off
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    return_final_state: Literal[False] = False, forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> jax.Array: ...
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    return_final_state: Literal[True], forward_mode: bool = False,
    **options: Unpack[LinearAttentionKeywords]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dplr_linear_attention(
    query: Array, key: Array, value: Array, log_decay: Array | None, erase_key: Array, erase_query: Array, *,
    return_final_state: bool, forward_mode: bool = False, **options: Unpack[LinearAttentionKeywords]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@keywords.known
def dplr_linear_attention(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    erase_key: Array,
    erase_query: Array,
    *,
    initial_state: Array | None = None,
    scale: float | None = None,
    l2_norm_epsilon: float | None = None,
    seq_lengths: Integers | None = None,
    segment_ids: Integers | None = None,
    return_final_state: bool = False,
    precision: Any = None,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Erases from a matrix of memory, writes to it and reads it, each by keys of its own, token by token.

        S'_t = exp(log_decay_t) S_{t-1},
        S_t  = S'_t - erase_key_t (erase_query_t^T S'_t) + k_t v_t^T,   out_t = scale S_t^T q_t

    The state is multiplied by a diagonal matrix plus one of rank 1 (DPLR): RWKV-7, Gated DeltaNet 2, a step
    of a product of Householder matrices. `gated_delta_rule` is this with `erase_key = beta k`,
    `erase_query = k` and the value `beta v`, in fewer products. Other arguments, results and errors are those
    of `gated_delta_rule`, without `beta`.

    Shapes: as in `gated_delta_rule`.

    Args:
      query, key, value, log_decay: as in `gated_delta_rule`.
      erase_key, erase_query: `[..., T, K, H]` or `[..., T, N, H]`, dtype of `query`: where something is taken
        away, and where it is read for that, behind the decay. With `erase_query^T erase_key` outside [0, 2]
        the state may diverge, as by the definition.
      initial_state, scale, seq_lengths, segment_ids, return_final_state, precision, forward_mode: as in
        `gated_delta_rule`.
      l2_norm_epsilon: as in `gated_delta_rule`, of `query` and `key`; what erases is taken as it is.
      implementation: None or "xla"; it has no kernels.

    Returns:
      out: `[..., T, N, Hv]`, dtype of `query`; with `return_final_state` also final_state `[..., N, H, Hv]`.

    Gradients:
      query, key, value, log_decay, erase_key, erase_query, initial_state: as in `gated_delta_rule`.

    Raises:
      As `gated_delta_rule`.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import dplr_linear_attention
      >>> q, k, v, a = np.random.default_rng(0).standard_normal((4, 2, 16, 4, 8)) / 3
      >>> dplr_linear_attention(q, k, v, -abs(a), a, a).shape
      (2, 16, 4, 8)

    References:
      Peng et al., RWKV-7 "Goose" with expressive dynamic state evolution, arXiv:2503.14456, 2025.
    """
    return_final_state = checks.flag(_ERASING, "return_final_state", return_final_state)
    options, operands = prepare(
        _ERASING, query, key, value, log_decay, None, erasing=(erase_key, erase_query), is_delta=False,
        initial_state=initial_state, scale=scale, l2_norm_epsilon=l2_norm_epsilon, seq_lengths=seq_lengths,
        segment_ids=segment_ids, precision=precision,
    )  # fmt: skip
    plan = backend.planned(_ERASING, OF_ERASING_KEYS, implementation, options, operands, planned)
    outputs = _OPERATION.runner(_ERASING, forward_mode)(plan, operands)
    return outputs if return_final_state else outputs[0]


@keywords.known
def gated_delta_rule_bwd(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    beta: Array,
    *,
    dfinal_state: Array | None = None,
    wrt: Sequence[str] = DIFFERENTIABLE[:-1],
    **options: Unpack[LinearAttentionKeywords],
) -> GatedDeltaRuleGrads:
    """Computes the gradients of `gated_delta_rule`, by the same arguments; the states are computed again.

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: `[..., T, N, Hv]`, cotangent of `out`, dtype of `query`.
      dfinal_state: `[..., N, H, Hv]`, cotangent of the final state, float32 (float64 for float64); None = 0.
      wrt: which of "query", "key", "value", "log_decay", "beta", "initial_state" to compute; unless it is
        told, all that are given but the last.

    Returns:
      GatedDeltaRuleGrads(query, key, value, log_decay, beta, initial_state), each with its argument's shape
      and dtype; None where not asked.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> import jax_attn_bwd as jab
      >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 16, 4, 8)) / 4
      >>> beta = jnp.full((2, 16, 4), 0.5)
      >>> grads = jab.gated_delta_rule_bwd(dout, q, k, v, None, beta, wrt=("beta",))
      >>> grads.beta.shape, grads.query is None
      ((2, 16, 4), True)
    """
    tokens = query, key, value, log_decay, beta
    found = _gradients(gated_delta_rule, DIFFERENTIABLE, tokens, dout, dfinal_state, wrt, options)
    return GatedDeltaRuleGrads(**found)


@keywords.known
def gated_linear_attention_bwd(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None = None,
    *,
    dfinal_state: Array | None = None,
    wrt: Sequence[str] = WITHOUT_BETA[:-1],
    **options: Unpack[LinearAttentionKeywords],
) -> GatedLinearAttentionGrads:
    """Computes the gradients of `gated_linear_attention`, by the same arguments.

    Arguments and results are those of `gated_delta_rule_bwd`, without `beta`.

    Example:
      >>> import numpy as np
      >>> import jax_attn_bwd as jab
      >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 16, 4, 8))
      >>> grads = jab.gated_linear_attention_bwd(dout, q, k, v)
      >>> grads.key.shape, grads.log_decay is None
      ((2, 16, 4, 8), True)
    """
    tokens = query, key, value, log_decay, None
    found = _gradients(gated_linear_attention, WITHOUT_BETA, tokens, dout, dfinal_state, wrt, options)
    return GatedLinearAttentionGrads(**found)


@keywords.known
def dplr_linear_attention_bwd(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    erase_key: Array,
    erase_query: Array,
    *,
    dfinal_state: Array | None = None,
    wrt: Sequence[str] = OF_ERASING[:-1],
    **options: Unpack[LinearAttentionKeywords],
) -> DplrLinearAttentionGrads:
    """Computes the gradients of `dplr_linear_attention`, by the same arguments.

    Arguments and results are those of `gated_delta_rule_bwd`, with "erase_key" and "erase_query" for "beta".

    Example:
      >>> import numpy as np
      >>> import jax_attn_bwd as jab
      >>> q, k, v, a, dout = np.random.default_rng(0).standard_normal((5, 2, 16, 4, 8)) / 3
      >>> grads = jab.dplr_linear_attention_bwd(dout, q, k, v, None, a, a)
      >>> grads.erase_key.shape, grads.log_decay is None
      ((2, 16, 4, 8), True)
    """
    tokens = query, key, value, log_decay, None
    erasing = erase_key, erase_query
    found = _gradients(dplr_linear_attention, OF_ERASING, tokens, dout, dfinal_state, wrt, options, erasing)
    return DplrLinearAttentionGrads(**found)


PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
_TPU = backend.kernel("mosaic_tpu", __package__, PORTABLE, ("tpu",), has_run=False)
_HOPPER = backend.kernel("mosaic_gpu", __package__, PORTABLE, ("hopper",), has_run=False)
IMPLEMENTATIONS = (_TPU, _HOPPER, PORTABLE)
OF_ERASING_KEYS = (_TPU, PORTABLE)  # of `dplr_linear_attention`


def _gradients(
    like: Callable[..., Any], fields: tuple[str, ...], tokens: tuple[Any, ...], dout, dfinal_state, wrt,
    options: LinearAttentionKeywords, erasing: tuple[Any, ...] = (),
) -> dict[str, jax.Array]:  # fmt: skip
    """Returns the gradients of a call that are asked for, by name."""
    # the call, checked as the forward is
    name = f"{like.__name__}_bwd"
    given = checks.complete(name, like, LinearAttentionKeywords, options)
    implementation = given.pop("implementation")
    static, operands = prepare(name, *tokens, is_delta="beta" in fields, erasing=erasing, **given)
    present = [n for n in fields if getattr(operands, n) is not None]
    wrt = [n for n in wrt if n in present] if wrt == fields[:-1] else wrt
    wanted = checks.wanted(name, wrt, fields, present)

    # cotangents, sharded as what they are of
    value = operands.value
    dout = checks.floating(name, "dout", dout)
    checks.shape(name, "dout", dout, "[..., T, N, Hv]", value.shape)
    checks.same_dtype(name, value=value, dout=dout)
    dout = reshard_like(dout, value, tuple(range(value.ndim)))
    dfinal_state = state(name, "dfinal_state", dfinal_state, operands.key, value)

    # the states before each group, and the gradients from them
    known = OF_ERASING_KEYS if erasing else IMPLEMENTATIONS
    plan = backend.planned(name, known, implementation, static, operands, planned)
    chosen = backend.named(IMPLEMENTATIONS, plan.implementation)
    saved = Residuals(operands, chosen.forward(plan, operands).states)
    return chosen.backward(plan, saved, Wanted(wanted), dout, dfinal_state)


def _primal(plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    result = backend.named(IMPLEMENTATIONS, plan.implementation).forward(plan, operands)
    return result.out, result.final_state


def _forward(plan, operands, wanted):
    forward = backend.named(IMPLEMENTATIONS, plan.implementation).forward
    result = forward(plan, operands)
    out, final = (checkpoint_name(x, "attention_out") for x in (result.out, result.final_state))
    return (out, final), Residuals(operands, checkpoint_name(result.states, "attention_states"))


def _backward(plan, saved, wanted, cotangents):
    backward = backend.named(IMPLEMENTATIONS, plan.implementation).backward
    grads = backward(plan, saved, Wanted(wanted), *cotangents)
    return Operands(*(grads.get(name) for name in Operands._fields))


def _tangent(plan, saved, tangents):
    return written_tangent.tangent(plan, saved.operands, tangents)


_OPERATION = Operation(ALL_DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
