"""Shapes, options and residuals of the multi-head attention layer.

Shape letters: `...` any number of batch axes, T query length, S key length, N query heads, K key/value
heads, G = N / K, H query/key head size, Hv value head size, Eq, Ek, Ev, Eo widths of query, key, value
and output, R appended key/value rows (0 to 2), S' = S + R.
"""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import jax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd._core.types import Array, Save
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.dot_product.mask import Mask

SAVE = get_args(Save)
Wanted = dot_product.Wanted


T = TypeVar("T", covariant=True)


@exportable_tuple
class MultiHeadAttentionParams(NamedTuple, Generic[T]):
    """The parameters of `multi_head_attention`; None = that piece is absent.

    `MultiHeadAttentionParams[jax.Array]` to a type checker; one of `PartitionSpec`s is as well typed.
    """

    query_kernel: T | None = None  # [Eq, N, H]
    query_bias: T | None = None  # [N, H]
    key_kernel: T | None = None  # [Ek, K, H]
    key_bias: T | None = None  # [K, H]
    value_kernel: T | None = None  # [Ev, K, Hv]
    value_bias: T | None = None  # [K, Hv]
    out_kernel: T | None = None  # [N, Hv, Eo]
    out_bias: T | None = None  # [Eo]
    bias_k: T | None = None  # [K, H], one more key, after the projected ones
    bias_v: T | None = None  # [K, Hv], its value
    sink: T | None = None  # [N], one more logit, without a value


PARAMS = MultiHeadAttentionParams._fields
INPUTS = ("query", "key", "value")
ARRAYS = (*INPUTS, "bias", "mod_args")
DIFFERENTIABLE = (*PARAMS, *ARRAYS)


@dataclass(frozen=True)
class Options:
    """Everything that changes the answer and is known at trace time, and what is saved."""

    attention: dot_product.Options
    num_heads: int
    add_zero_attn: bool = False
    out_dropout_rate: float = 0.0
    add_residual: bool = False
    return_weights: bool = False
    average_weights: bool = False
    save: Save = "inputs"
    return_residual: bool = False
    rotary: Rotary | None = None

    @property
    def precision(self) -> Any:
        """The precision of all matrix products."""
        return self.attention.precision

    def appended_rows(self, operands: "Operands") -> int:
        """Returns R, the number of keys that are appended to the projected ones."""
        return (operands.bias_k is not None) + self.add_zero_attn


class Operands(NamedTuple):
    """Every array of a call; None = not given."""

    query: Any  # [..., T, Eq]
    key: Any = None  # [..., S, Ek]; None = query
    value: Any = None  # [..., S, Ev]; None = key
    bias: Any = None  # broadcasts to [..., N, T, S]
    query_kernel: Any = None
    query_bias: Any = None
    key_kernel: Any = None
    key_bias: Any = None
    value_kernel: Any = None
    value_bias: Any = None
    out_kernel: Any = None
    out_bias: Any = None
    bias_k: Any = None
    bias_v: Any = None
    sink: Any = None
    mask: Mask = Mask()  # dense attention's, of the S keys; appended rows are no part of them
    dropout_words: jax.Array | None = None  # uint32 [2]
    dropout_offset: dropout.Offset | None = None  # column is [] or [S']

    @property
    def mod_args(self) -> tuple[Any, ...] | None:
        """The arrays that `mask_mod` and `score_mod` read; the floats among them have gradients."""
        return self.mask.mod_args

    @property
    def sources(self) -> tuple[str, str, str]:
        """The names of the arrays that queries, keys and values are projected from."""
        key = "query" if self.key is None else "key"
        return "query", key, key if self.value is None else "value"

    @property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays that queries, keys and values are projected from."""
        query, key, value = (getattr(self, name) for name in self.sources)
        return query, key, value

    def positions(self, name: str) -> Any:
        """Returns the positions of the tokens of "query" or "key"; None = their indices."""
        return self.mask.query_positions if name == "query" else self.mask.key_value_positions


class Heads(NamedTuple):
    """The projected inputs, queries and keys turned by `rotary`."""

    query: jax.Array  # [..., T, N, H]
    key: jax.Array  # [..., S, K, H]
    value: jax.Array  # [..., S, K, Hv]


@exportable_tuple
class MultiHeadAttentionResidual(NamedTuple):
    """The arrays that a forward leaves for the backward, beside its inputs."""

    out: jax.Array  # [..., T, N, Hv], before the output projection
    lse: jax.Array  # [..., T, N], over keys, appended rows and sink
    lse_rounding: jax.Array | None  # [..., T, N], its rounding; None = 0
    heads: Heads | None  # save = "qkv" and "probs"
    probs: jax.Array | None  # [..., K, G, T, S], save = "probs"
    wide_out: jax.Array | None = None  # [..., T, N, Hv], out before it is rounded, where that is kept

    def attention(self) -> dot_product.Result:
        """Returns what dense attention left."""
        return dot_product.Result(self.out, self.lse, self.lse_rounding, self.wide_out)


def described(residual: Any) -> Any:
    """Returns the structure of a residual, with shapes and dtypes for arrays; of another thing its type."""
    if not isinstance(residual, MultiHeadAttentionResidual):
        return type(residual).__name__
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), residual)


class Result(NamedTuple):
    """Everything that a forward computes."""

    out: jax.Array  # [..., T, Eo]
    weights: jax.Array | None  # [..., N, T, S'] or [..., T, S']
    residual: MultiHeadAttentionResidual


class Residuals(NamedTuple):
    """Everything that the backward reads."""

    operands: Operands
    residual: MultiHeadAttentionResidual
    wanted: Wanted


@exportable_tuple
class MultiHeadAttentionGrads(NamedTuple):
    """Gradients of `multi_head_attention`, each with its argument's shape and dtype; None = not asked."""

    params: MultiHeadAttentionParams[jax.Array]
    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    bias: jax.Array | None = None
    mod_args: tuple[Any, ...] | None = None  # None also in the place of what is not floating


class LayerKeywords(dot_product.AttentionKeywords, dot_product.ModKeywords, total=False):
    """Keywords of the layer, on one device or with its heads over several."""

    bias: Array | None
    mask: Array | None
    add_zero_attn: bool
    out_dropout_rate: float
    add_residual: bool
    average_weights: bool
    rotary: Rotary | None
    save: Save


class MultiHeadAttentionKeywords(LayerKeywords, total=False):
    """Keywords of `multi_head_attention` beside those that change what it returns."""

    num_heads: int | None
