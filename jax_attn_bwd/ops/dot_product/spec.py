"""Shapes, options and residuals of dense attention.

Shape letters: B any number of leading batch axes (written `...`), T query length, S key length,
N query heads, K key/value heads, G = N / K query heads per key head, H query/key head size,
Hv value head size. Public layout `[..., T, N, H]`; working layout `[..., K, G, T, H]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax

from jax_attn_bwd._core import dropout, masks
from jax_attn_bwd._core.serialization import exportable_tuple
from jax_attn_bwd._core.types import Array, Implementation, Integers

DIFFERENTIABLE = ("query", "key", "value", "bias", "sink", "mod_args")


@dataclass(frozen=True)
class Options:
    """What changes the answer and is known at trace time."""

    scale: float
    is_causal: bool = False
    window: masks.Window | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    precision: Any = None
    deterministic_sums: bool = True
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None


class Operands(NamedTuple):
    """Every array of a call; None = not given."""

    query: jax.Array  # [..., T, N, H]
    key: jax.Array  # [..., S, K, H]
    value: jax.Array  # [..., S, K, Hv]
    bias: jax.Array | None = None  # broadcasts to [..., N, T, S]
    mask: jax.Array | None = None  # bool, broadcasts to [..., N, T, S]
    sink: jax.Array | None = None  # [N]
    query_seq_lengths: jax.Array | None = None  # int32, broadcasts to [...]
    key_value_seq_lengths: jax.Array | None = None
    query_segment_ids: jax.Array | None = None  # int32, broadcasts to [..., T]
    key_value_segment_ids: jax.Array | None = None  # int32, broadcasts to [..., S]
    query_positions: jax.Array | None = None
    key_value_positions: jax.Array | None = None
    dropout_words: jax.Array | None = None  # uint32 [2]
    dropout_offset: dropout.Offset | None = None
    mod_args: tuple[Any, ...] | None = None  # what `mask_mod` and `score_mod` read; None without them
    mod_batch: jax.Array | None = None  # int32 [...], the number of each batch entry
    mod_heads: jax.Array | None = None  # int32 [N], that of each query head
    query_origin: jax.Array | None = None  # int32 []: index of the first query of a part; None = 0


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """The differentiable operands whose gradients are asked for, and of what.

    Attributes:
      names: of the operands.
      alone: the row values are those of these keys (and the sink) alone: they may be formed again.
    """

    names: frozenset[str]
    alone: bool = False


class Result(NamedTuple):
    """What a forward computes."""

    out: jax.Array  # [..., T, N, Hv]
    lse: jax.Array  # [..., T, N], natural log of the row sums, float32 or wider
    lse_low: jax.Array | None  # [..., T, N], what rounding took from lse; None = 0
    out_low: jax.Array | None = None  # [..., T, N, Hv], what rounding took from a narrow out; None = 0

    def wide_out(self) -> jax.Array:
        """`out` before rounding, in the dtype of lse."""
        out = self.out.astype(self.lse.dtype)
        return out if self.out_low is None else out + self.out_low.astype(out.dtype)


class Residuals(NamedTuple):
    """What the forward leaves for the backward: its inputs, and row values."""

    operands: Operands
    result: Result
    wanted: Wanted


@exportable_tuple
class DotProductAttentionGrads(NamedTuple):
    """Gradients of `dot_product_attention`, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    bias: jax.Array | None = None
    sink: jax.Array | None = None
    mod_args: tuple[Any, ...] | None = None  # None also in the place of what is not floating


class AttentionKeywords(TypedDict, total=False):
    """Keywords of dense attention and of the layer around it that do not change what they return."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Integers | None
    key_value_seq_lengths: Integers | None
    local_window_size: int | tuple[int, int] | None
    query_segment_ids: Integers | None
    key_value_segment_ids: Integers | None
    query_positions: Integers | None
    key_value_positions: Integers | None
    logits_soft_cap: float | None
    dropout_rate: float
    dropout_key: jax.Array | None
    broadcast_dropout: bool
    dropout_offset: Sequence[Any] | None
    precision: Any
    deterministic_sums: bool
    implementation: Implementation | None
    deterministic: bool | None


class ModKeywords(TypedDict, total=False):
    """Those of masks and scores as functions."""

    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None
    mod_args: tuple[Any, ...]


class DotProductAttentionKeywords(AttentionKeywords, ModKeywords, total=False):
    """Keywords of `dot_product_attention` beside the one that changes what it returns."""

    sink: Array | None
