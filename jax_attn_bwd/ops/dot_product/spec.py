"""Shapes, options and residuals of dense attention.

Shape letters: B any number of leading batch axes (written `...`), T query length, S key length,
N query heads, K key/value heads, G = N / K query heads per key head, H query/key head size,
Hv value head size. Public layout `[..., T, N, H]`; working layout `[..., K, G, T, H]`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax

from jax_attn_bwd._core import dropout, masks
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd._core.types import Array, DropoutKeywords, Implementation, Integers, Scale
from jax_attn_bwd.ops.dot_product import mask as mask_fields
from jax_attn_bwd.ops.dot_product.mask import Mask

DIFFERENTIABLE = ("query", "key", "value", "bias", "sink", "mod_args")


@dataclass(frozen=True)
class Options:
    """Options that change the answer and are known at trace time, but for those of the mask."""

    scale: float
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    precision: Any = None
    deterministic_sums: bool | None = None
    score_mod: Callable[..., Any] | None = None


@dataclass(frozen=True)
class KernelOptions(Options):
    """`Options` with the static conditions of a mask: all that a kernel is compiled for."""

    is_causal: bool = False
    window: masks.Window | None = None
    mask_mod: Callable[..., Any] | None = None

    @classmethod
    def of(cls, options: Options, mask: Mask) -> "KernelOptions":
        """Joins the options of a call and the rules of its mask."""
        known = {field.name: getattr(options, field.name) for field in dataclasses.fields(Options)}
        known["deterministic_sums"] = options.deterministic_sums is not False  # it costs next to nothing
        return cls(**known, **{name: getattr(mask, name) for name in mask_fields.RULES})


# The axes behind those of the batch: n heads, t queries, s keys, h head size. Size 1 broadcasts.
AXES = {"query": "tnh", "key": "snh", "value": "snh", "bias": "nts", "sink": "n"} | mask_fields.AXES


class Sizes(NamedTuple):
    """The sizes of a call, or of one part of its queries."""

    batch: tuple[Any, ...]
    T: Any  # queries
    S: Any  # keys
    K: Any  # key heads
    G: Any  # query heads of each key head

    @property
    def N(self) -> Any:
        """The number of query heads."""
        return self.K * self.G


class Operands(NamedTuple):
    """Every array of a call; None = not given."""

    query: jax.Array  # [..., T, N, H]
    key: jax.Array  # [..., S, K, H]
    value: jax.Array  # [..., S, K, Hv]
    bias: jax.Array | None = None  # broadcasts to [..., N, T, S]
    sink: jax.Array | None = None  # [N]
    mask: Mask = Mask()
    dropout_words: jax.Array | None = None  # uint32 [2]
    dropout_offset: dropout.Offset | None = None

    @property
    def mod_args(self) -> tuple[Any, ...] | None:
        """The arrays that `mask_mod` and `score_mod` read; the floats among them have gradients."""
        return self.mask.mod_args

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call."""
        (*batch, T, N, _), (S, K, _) = self.query.shape, self.key.shape[-3:]
        return Sizes(tuple(batch), T, S, K, N // K)

    def array(self, name: str) -> Any:
        """Returns the array of that name in `AXES`; None = not given."""
        return getattr(self if name in self._fields else self.mask, name)

    def arrays_with(self, axis: str) -> dict[str, int]:
        """Finds the arrays with that axis of `AXES`, not of size 1, by name: which of their axes it is."""
        found = {}
        for name, letters in AXES.items():
            x = self.array(name)
            if x is not None and axis in letters:
                index = x.ndim - len(letters) + letters.index(axis)
                if index >= 0 and x.shape[index] != 1:
                    found[name] = index
        return found

    def arrays_with_batch(self) -> frozenset[str]:
        """Names the arrays with the first batch axis; all entries share the others."""
        batch = self.query.ndim - 3
        given = {name: self.array(name) for name in AXES} if batch else {}
        full = {name: x for name, x in given.items() if x is not None and x.ndim == batch + len(AXES[name])}
        return frozenset(name for name, x in full.items() if x.shape[0] != 1)

    def with_arrays(self, arrays: dict[str, Any]) -> "Operands":
        """Returns the operands with other arrays in the place of those of these names in `AXES`."""
        own = {name: x for name, x in arrays.items() if name in self._fields}
        rest = {name: x for name, x in arrays.items() if name not in own}
        return self._replace(**own, mask=self.mask.replace(**rest))

    def axes(self, by_name: dict[str, int]) -> "Operands":
        """Puts axes of arrays by name in the places of the operands, None elsewhere, for `_core.split`."""
        nothing: Any = dict.fromkeys(self._fields) | {"mask": self.mask.rules}
        return Operands(**nothing).with_arrays(by_name)


def as_cotangents(operands: Any, gradients: dict[str, Any]) -> Any:
    """Puts gradients by name, `mod_args` among them, in the places of operands that hold a `mask`."""
    own = dict.fromkeys(operands._fields) | {name: x for name, x in gradients.items() if name != "mod_args"}
    own["mask"] = operands.mask.rules.replace(mod_args=gradients.get("mod_args"))
    return type(operands)(**own)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """The differentiable operands whose gradients are asked for, and of what.

    Attributes:
      names: which operands.
      alone: these keys (and the sink) are all that the queries attend to, so row values may be formed again.
    """

    names: frozenset[str]
    alone: bool = False


class Result(NamedTuple):
    """The output of a forward, with its row values."""

    out: jax.Array  # [..., T, N, Hv]
    lse: jax.Array  # [..., T, N], natural log of the row sums, float32 or wider
    lse_rounding: jax.Array | None  # [..., T, N], its rounding; None = 0
    wide_out: jax.Array | None = None  # [..., T, N, Hv], out before it is rounded, where that is kept

    @property
    def is_wide(self) -> bool:
        """Tells whether `widest_out` is as it was summed, not rounded."""
        return self.wide_out is not None or self.out.dtype == self.lse.dtype

    def widest_out(self) -> jax.Array:
        """Returns `out` in the dtype of lse, not rounded where that is kept, for sums over the row."""
        return (self.out if self.wide_out is None else self.wide_out).astype(self.lse.dtype)


class Residuals(NamedTuple):
    """Inputs and row values, which the forward leaves for the backward."""

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


class AttentionKeywords(DropoutKeywords, total=False):
    """Keywords of dense attention and of the layer around it that do not change what they return."""

    scale: Scale | None
    is_causal: bool
    query_seq_lengths: Integers | None
    key_value_seq_lengths: Integers | None
    local_window_size: int | tuple[int, int] | None
    query_segment_ids: Integers | None
    key_value_segment_ids: Integers | None
    query_positions: Integers | None
    key_value_positions: Integers | None
    logits_soft_cap: float | None
    broadcast_dropout: bool
    precision: Any
    deterministic_sums: bool | None
    implementation: Implementation | None
    deterministic: bool | None


class ModKeywords(TypedDict, total=False):
    """Keywords of masks and scores as functions."""

    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None
    mod_args: tuple[Any, ...]


class DotProductAttentionKeywords(AttentionKeywords, ModKeywords, total=False):
    """Keywords of `dot_product_attention` beside the one that changes what it returns."""

    sink: Array | None
