"""A kind of graph attention, as the loops over the edges know it: its methods, and the tables they read.

Scores and pullbacks take the rows of both ends of each edge, `[(W,) R, ...]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.graph import placement
from jax_attn_bwd.ops.graph.loops import Chunk, take
from jax_attn_bwd.ops.graph.spec import Operands, Options


class Tables(NamedTuple):
    """The operands as the loops read them: rows by node or by edge."""

    src: jax.Array  # gat [num_src, H], gatv2 [num_src, H, D], transformer [num_src, K, D]
    dst: jax.Array  # gat [num_dst, H], else [num_dst, H, D]
    message: jax.Array | None  # gat [num_src, H, D], transformer [num_src, K, Dv]; gatv2 None, it is src
    edge: jax.Array | None  # gat [E, H], gatv2 [E, H, D], transformer [E, K, D]
    a: jax.Array | None  # [H, D], gatv2
    bias: jax.Array | None  # [E, H]
    mask: jax.Array | None  # [E, H], dropout factors
    keys: dropout.Words | None  # [H] each
    counters: jax.Array | None  # uint32 [E], what dropout counts edges by; or [], that of the first

    def unsharded(self, others: Any = None) -> tuple["Tables", Any]:
        """Puts the tables, and other arrays, with all nodes and edges on every device of an Explicit mesh."""
        by_row = {name: getattr(self, name) for name in ("src", "dst", "message", "edge", "bias", "mask")}
        found, others = placement.unsharded_rows((by_row, others))
        return self._replace(**found), others


class Rows(NamedTuple):
    """The rows that the score of each edge of a chunk reads."""

    src: Any
    dst: Any
    edge: jax.Array | None


class Edges(NamedTuple):
    """The edges of a chunk as the backward knows them, in the letters of its derivation."""

    ds: jax.Array  # [(W,) R, H]
    w: jax.Array  # [(W,) R, H]
    dout: jax.Array  # [(W,) R, H, Dv], of the destinations
    dx: Any  # [R, H, Dv], the sum over each group; None where no one needs it
    rows: Rows
    chunk: Chunk


class Sums(NamedTuple):
    """Cotangents of the `Tables` of these names, summed over the edges; None = not needed.

    In a source pass `src` and `message` are also the shares of one chunk; `Sums` of bools say what is needed.
    """

    a: Any = None  # [H, D], gatv2
    handed: Any = None  # [E, H], what the destination's share is made of: dz (7) for gat, else ds (6)
    dst: Any = None
    edge: Any = None  # None for gat: the cotangent of an edge is what it hands on
    message: Any = None  # through (3); None for gatv2, whose message is src
    src: Any = None  # through the score; for gatv2 through (3) too


@dataclass(frozen=True)
class Kind(ABC):
    """The score of an edge, its message, and how their cotangents go back."""

    options: Options

    name: ClassVar[str]
    message_is_src: ClassVar[bool] = False  # one table is both, and one sum takes both cotangents
    edge_in_message: ClassVar[bool] = False
    sums_whole_chunks: ClassVar[bool] = False  # a gradient sums over all that a chunk holds
    scores_of_numbers: ClassVar[bool] = False  # one of each node and edge: no features by edge
    reads_twice: ClassVar[bool] = False  # off CPUs: else XLA:GPU keeps slopes by edge and feature
    placement: ClassVar[Mapping[str, tuple]] = MappingProxyType(
        {"edge": (None, -1), "score_bias": (None, -1), "dropout_mask": (-1, None)}
    )  # the axes of `src` that these operands follow on an Explicit mesh

    @abstractmethod
    def score_tables(self, operands: Operands) -> tuple[Any, Any, Any, Any]:
        """Returns (src, dst, edge, a) of `Tables`."""

    @abstractmethod
    def score(self, t: Tables, rows: Rows) -> jax.Array:
        """Computes the scores of a chunk, `[(W,) R, H]`, without bias."""

    def score_tables_tangent(self, operands: Operands, tangents: Operands) -> tuple[Any, Any, Any, Any]:
        """Returns the tangents of `score_tables`, None for zero, where these are the operands themselves."""
        return self.score_tables(tangents)

    def tables(self, operands: Operands) -> Tables:
        """Returns the tables of a call: features by head, and what scores and dropout read."""
        H, E = self.options.num_heads, operands.graph.capacity
        dtype = accumulator_dtype(operands.src.dtype)
        src, dst, edge, a = self.score_tables(operands)

        message = None
        if not self.message_is_src:
            value = operands.src if operands.value is None else operands.value
            message = split_heads(value, self.options.num_kv_heads)

        # by edge and head, [E, H]
        bias, mask = operands.score_bias, operands.dropout_mask
        bias = None if bias is None else jnp.broadcast_to(bias.astype(dtype), (E, H))
        mask = None if mask is None else mask.astype(dtype).T
        a = None if a is None else a.astype(dtype)
        return Tables(src, dst, message, edge, a, bias, mask, *_keys_and_counters(operands, H))

    def tables_tangent(self, operands: Operands, tangents: Operands, t: Tables) -> Tables:
        """Returns the tangents of the tables `t`, None for zero; bias and dropout are those of `t`."""
        src, dst, edge, a = self.score_tables_tangent(operands, tangents)
        message = None
        if not self.message_is_src:
            value = tangents.src if operands.value is None else tangents.value
            message = heads_of(value, self.options.num_kv_heads)
        a = None if a is None or t.a is None else a.astype(t.a.dtype)
        return t._replace(src=src, dst=dst, message=message, edge=edge, a=a)

    def messages(self, t: Tables) -> Any:
        """Returns the table of the messages; where they are what the score reads, the loops hold it once."""
        return t.src if self.message_is_src else t.message

    def dropout_factors(self, t: Tables, chunk: Chunk) -> jax.Array | None:
        """Returns the dropout factors of a chunk, `[(W,) R, H]`; None = all 1."""
        if t.mask is not None:
            return take(t.mask, chunk.number)
        if t.keys is None or t.counters is None:
            return None
        number = chunk.number.astype(jnp.uint32)
        row = (take(t.counters, chunk.number) if t.counters.ndim else t.counters + number)[..., None]
        first, second = (to_rank(x, row.ndim) for x in t.keys)
        dtype = accumulator_dtype(self.messages(t).dtype)
        rate = self.options.dropout_rate
        return dropout.factors((first, second), row, jnp.zeros_like(row), rate, dtype)

    @abstractmethod
    def score_tangent(self, t: Tables, a: jax.Array | None, rows: Rows, moving: Rows) -> jax.Array | None:
        """Computes the scores' tangents; `a` and `moving` are those of `t.a` and `rows`; None is zero."""

    @abstractmethod
    def needs(self, t: Tables, wanted: frozenset[str]) -> Sums:
        """Tells which sums the gradients of the operands in `wanted` are made of."""

    @abstractmethod
    def shares(self, t: Tables, need: Sums, edges: Edges) -> Sums:
        """Computes what a chunk, by source, gives to the sums needed, but for `message` and `dst`."""

    @abstractmethod
    def to_dst(self, t: Tables, handed: jax.Array, rows: Rows) -> jax.Array:
        """Computes the cotangent of `rows.dst`, for one edge of each group."""

    def row_elements(self, operands: Operands) -> Any:
        """Counts the elements of the widest row of an edge, by which passes are cut into chunks."""
        return operands.src.shape[-1]

    def to_heads(self, x: jax.Array) -> jax.Array:
        """Returns rows of `src`, `message` or `edge` as each head of the destinations reads them."""
        return x

    def from_heads(self, x: jax.Array) -> jax.Array:
        """Sums cotangents over the heads that share a row: the transpose of `to_heads`."""
        return x

    @abstractmethod
    def gradients(self, operands: Operands, sums: Sums, wanted: frozenset[str]) -> dict[str, jax.Array]:
        """Returns the gradients of the operands in `wanted`, from the sums."""


def _keys_and_counters(operands, H):
    """Returns keys of dropout by head, and the counters of each edge, or of the first; None without a key."""
    if operands.dropout_words is None:
        return None, None
    batch, head, row = (jnp.uint32(0),) * 3
    if operands.dropout_offset is not None:
        batch, head, row, _ = operands.dropout_offset
    keys = dropout.head_keys(operands.dropout_words, batch, head + jnp.arange(H, dtype=jnp.uint32))
    return keys, row


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Splits `[n, H * D]` into `[n, H, D]`."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def heads_of(x: jax.Array | None, num_heads: int) -> Any:
    """Splits what is given; None stays None."""
    return None if x is None else split_heads(x, num_heads)


def merge_heads(x: jax.Array) -> jax.Array:
    """Merges `[n, H, D]` into `[n, H * D]`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes <x, y> per head, `[(W,) R, H]`; either may be `[R, H, D]`."""
    letters = {3: "rhd", 4: "wrhd"}
    out = "wrh" if 4 in (x.ndim, y.ndim) else "rh"
    return jnp.einsum(f"{letters[x.ndim]},{letters[y.ndim]}->{out}", x, y, precision=lax.Precision.HIGHEST)


# ---- the activations of gat and gatv2, and their slopes


def activate(options: Options, z: jax.Array) -> jax.Array:
    """Computes act(z)."""
    alpha = options.alpha
    match options.activation:
        case "relu":
            return jnp.where(z > 0, z, 0)
        case "sigmoid":
            return jax.nn.sigmoid(z)
        case "tanh":
            return jnp.tanh(z)
        case "elu":
            return jnp.where(z > 0, z, jnp.expm1(jnp.where(z > 0, 0, z)))
        case "scalar":
            return alpha * z
        case "leaky_relu":
            return jnp.where(z > 0, z, alpha * z)
    return z


def slope(options: Options, z: jax.Array) -> jax.Array:
    """Computes act'(z); at the kinks as in `jax.nn`."""
    one = jnp.ones((), z.dtype)
    match options.activation:
        case "relu":
            return jnp.where(z > 0, one, 0)
        case "sigmoid":
            y = jax.nn.sigmoid(z)
            return y * (1 - y)
        case "tanh":
            return 1 - jnp.tanh(z) ** 2
        case "elu":
            return jnp.where(z > 0, 1, jnp.exp(jnp.where(z > 0, 0, z)))
        case "scalar":
            return options.alpha * one
        case "leaky_relu":
            return jnp.where(z >= 0, one, options.alpha)
    return one
