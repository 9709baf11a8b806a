"""Shapes, options and residuals of linear attention.

Shape letters: any number of leading batch axes (written `...`), T tokens, K key heads, N value heads,
G = N / K value heads of each key head, H key size, Hv value size; X is H where a decay is a number a channel
of the keys, and 1 where it is a number a head. The tokens are taken in g groups of m chunks of C.
Public layout `[..., T, N, H]`; in groups `[g, ..., m C, N, H]`; a group in chunks `[m, ..., K, G, C, H]`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax

from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd._core.types import Array, Implementation, Integers

DIFFERENTIABLE = ("query", "key", "value", "log_decay", "beta", "initial_state")
WITHOUT_BETA = ("query", "key", "value", "log_decay", "initial_state")
OF_ERASING = ("query", "key", "value", "log_decay", "erase_key", "erase_query", "initial_state")
ALL_DIFFERENTIABLE = (*DIFFERENTIABLE, "erase_key", "erase_query")


@dataclass(frozen=True)
class Options:
    """Options that change the answer and are known at trace time."""

    is_delta: bool  # u = beta (v - S'^T k), else u = v
    scale: float
    l2_norm_epsilon: float | None = None  # None: query and key are taken as they are
    precision: Any = None
    is_erasing: bool = False  # erase_key (erase_query^T S') is taken away first; not with `is_delta`

    @property
    def corrects(self) -> bool:
        """Whether what is written depends on the state."""
        return self.is_delta or self.is_erasing


class Operands(NamedTuple):
    """Every array of a call; None = not given."""

    query: jax.Array  # [..., T, K, H]
    key: jax.Array  # [..., T, K, H]
    value: jax.Array  # [..., T, N, Hv]
    log_decay: jax.Array | None = None  # [..., T, N, H], [..., T, N] or [N]
    beta: jax.Array | None = None  # [..., T, N], of the delta rule
    initial_state: jax.Array | None = None  # [..., N, H, Hv], float32 or wider
    seq_lengths: jax.Array | None = None  # int32, broadcasts to [...]
    restarts: jax.Array | None = None  # bool, broadcasts to [..., T]: a document begins at this token
    erase_key: jax.Array | None = None  # [..., T, K or N, H]
    erase_query: jax.Array | None = None  # [..., T, K or N, H]

    @property
    def groups(self) -> Any:
        """The number G of value heads of each key head."""
        return self.value.shape[-2] // self.key.shape[-2]


class Result(NamedTuple):
    """Everything that a forward computes; XLA drops what nobody reads."""

    out: jax.Array  # [..., T, N, Hv], dtype of the value
    final_state: jax.Array  # [..., N, H, Hv]
    states: jax.Array  # [g, ..., K, G, H, Hv], before each group


@jax.tree_util.register_static
class Wanted(frozenset[str]):
    """The operands whose gradients are asked for; kernels take it among their arrays."""


class Residuals(NamedTuple):
    """What the forward leaves for the backward: its inputs, and the state before each group of chunks."""

    operands: Operands
    states: jax.Array  # [g, ..., K, G, H, Hv], float32 or wider


@exportable_tuple
class GatedDeltaRuleGrads(NamedTuple):
    """Gradients of `gated_delta_rule`, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    log_decay: jax.Array | None = None
    beta: jax.Array | None = None
    initial_state: jax.Array | None = None


@exportable_tuple
class GatedLinearAttentionGrads(NamedTuple):
    """Gradients of `gated_linear_attention`, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    log_decay: jax.Array | None = None
    initial_state: jax.Array | None = None


@exportable_tuple
class DplrLinearAttentionGrads(NamedTuple):
    """Gradients of `dplr_linear_attention`, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    log_decay: jax.Array | None = None
    erase_key: jax.Array | None = None
    erase_query: jax.Array | None = None
    initial_state: jax.Array | None = None


class LinearAttentionKeywords(TypedDict, total=False):
    """Keywords of the operators beside those that change what they return."""

    initial_state: Array | None
    scale: float | None
    l2_norm_epsilon: float | None
    seq_lengths: Integers | None
    segment_ids: Integers | None
    precision: Any
    implementation: Implementation | None
