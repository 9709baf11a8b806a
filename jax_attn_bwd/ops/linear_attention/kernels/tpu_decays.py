"""What the tokens of a chunk are to one another and to the states around it, within a TPU kernel.

The letters are those of `decays.py`. Where channels share their decay, products of raw queries and keys are
those of a key head, and a plane of decays is what its value heads differ by. Where each has its own, the
pairs of a chunk are parted by halvings, (2) of `decays.py`: a product each, of rows times their factors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd.ops.linear_attention.kernels import tpu_chunks as tpu
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import (
    CHUNK,
    TILE,
    Chunks,
    Halves,
    PerToken,
    Stages,
    number,
    product,
)
from jax_attn_bwd.ops.linear_attention.spec import Operands


@dataclass(frozen=True)
class KeyHead:
    """The queries and keys of one key head; what normalizing multiplies by stays a factor of its own."""

    query: jax.Array  # as it is given, 0 where it is not seen, [C, H]
    key: jax.Array
    query_norm: Any  # [C, 1], or 1; with the scale
    key_norm: Any
    key_norm_row: Any  # [1, C]
    reads: Any  # <q_i, k_j>, [C, C]; None with decays of channels, as the next
    overlaps: Any  # <k_i, k_j> for j < i, else 0; None without a delta rule

    @property
    def units(self) -> tuple[jax.Array, jax.Array]:
        """Normalized queries, scaled, and normalized keys, float32."""
        return self.query_norm * wide(self.query), self.key_norm * wide(self.key)

    @classmethod
    def of(cls, chunks: Chunks, column: PerToken, query: jax.Array, key: jax.Array) -> "KeyHead":
        """Computes what all value heads that read this one share; `column` is of one of them."""
        query, key = (tpu.seen(chunks, column, x) for x in (query, key))
        options = chunks.options
        of_query: Any = options.scale
        of_key: Any = 1.0
        row: Any = 1.0
        if options.l2_norm_epsilon is not None:
            of_key = _norm(key, options.l2_norm_epsilon)
            of_query = options.scale * _norm(query, options.l2_norm_epsilon)
            row = tpu.as_rows(of_key)[:1]
        reads = overlaps = None
        if not chunks.of_channels:
            reads = product(chunks, query, key, (1, 1)) * (of_query * row)
            if options.is_delta:
                overlaps = strictly_lower(product(chunks, key, key, (1, 1)) * (of_key * row))
        return cls(query, key, of_query, of_key, row, reads, overlaps)


def read_keys(
    chunks: Chunks, query: Any, key: Any, rows: Any
) -> tuple[list[tuple[PerToken, PerToken]], list[KeyHead]]:
    """Reads the numbers of each value head of a step, and its key heads, of refs."""
    numbers, keys = [tpu.numbers(rows[n]) for n in range(chunks.value_heads)], []
    for k in range(chunks.key_heads):
        of, (_, column) = slice(k * chunks.width, (k + 1) * chunks.width), numbers[k * chunks.groups]
        keys.append(KeyHead.of(chunks, column, query[:, of], key[:, of]))
    return numbers, keys


def read_value(
    chunks: Chunks, numbers: tuple[PerToken, PerToken], ref: Any, n: int
) -> tuple[slice, jax.Array]:
    """Returns where the channels of a value head lie, and what `ref` holds there, 0 where it is not seen."""
    of = slice(n * chunks.value_width, (n + 1) * chunks.value_width)
    return of, tpu.seen(chunks, numbers[1], ref[:, of])


def _norm(x: jax.Array, epsilon: float) -> jax.Array:
    x = wide(x)
    return lax.rsqrt((x * x).sum(1, keepdims=True) + epsilon)


def wide(x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype that sums have."""
    return x.astype(jnp.float32)


def strictly_lower(plane: jax.Array) -> jax.Array:
    """Returns the plane with zeros but for j < i."""
    return jnp.where(number(plane.shape, 0) > number(plane.shape, 1), plane, 0)


class ScaledRows(NamedTuple):
    """Rows times factors; one that all channels share is kept apart, and multiplies the rows of a product."""

    rows: jax.Array  # [C, H]
    factor: Any  # [C, 1], or None

    def times(self, chunks: Chunks, state: jax.Array) -> jax.Array:
        """Returns the product with `[H, Hv]`, `[C, Hv]`."""
        found = product(chunks, self.rows, state)
        return found if self.factor is None else self.factor * found

    def transposed_times(self, chunks: Chunks, x: jax.Array) -> jax.Array:
        """Returns the product of the transposed rows with `[C, Hv]`, `[H, Hv]`."""
        return product(chunks, self.rows, x if self.factor is None else self.factor * wide(x), (0, 0))


_HALVES = tuple(CHUNK >> n for n in range(1, CHUNK.bit_length()))  # tokens of the halves of each halving
HALVINGS = len(_HALVES)


def _spans() -> np.ndarray:
    """Tells of each exponent of a token which tokens' logarithms it adds up, `[9 C, C]`.

    They are those up to the token, those behind it, and those between it and the middle of its stretch, with
    which the later half begins, for each halving. So no exponent is a difference of running sums.
    """
    i, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    found = [t <= i, t > i]
    for size in _HALVES:
        middle = (i & -(2 * size)) + size
        found.append(((middle <= t) & (t <= i)) | ((i < t) & (t < middle)))
    return np.concatenate(found)


class DecaysOfChannels(NamedTuple):
    """Decays of channels, as a kernel reads them: arrays or specs of a call, refs, or those of one head."""

    logs: Any  # [B, T, N width]; in a kernel [C, N width]; of a head [C, H]
    spans: Any  # which logarithms each exponent adds up, bfloat16, [9 C, C]

    @classmethod
    def arrays(cls, chunks: Chunks, operands: Operands) -> "DecaysOfChannels | None":
        """Returns the arrays, None where channels share their decay."""
        logs = chunks.of_each_channel(operands)
        return None if logs is None else cls(logs, jnp.asarray(_spans(), jnp.bfloat16))

    @classmethod
    def specs(cls, chunks: Chunks, where: Callable[[Any], Any]) -> "DecaysOfChannels":
        """Returns their specs; `where` tells the chunk."""
        of_spans = pl.BlockSpec(((2 + HALVINGS) * CHUNK, CHUNK), lambda b, h, c: (ZERO, ZERO))
        return cls(chunks.of_tokens(chunks.value_heads * chunks.width, where), of_spans)

    def of_head(self, chunks: Chunks, n: int) -> "DecaysOfChannels":
        """Returns those of a value head of a step."""
        return self._replace(logs=self.logs[:, n * chunks.width : (n + 1) * chunks.width])


class Channels(NamedTuple):
    """Decays of channels: the factors of the tokens in each halving of a chunk, large halves first."""

    factors: tuple[tuple[int, jax.Array], ...]
    restarts: jax.Array  # bool, where a decay does not count, [C, H]
    spans: jax.Array  # of `DecaysOfChannels`

    def products(self, chunks: Chunks, rows: Sequence[jax.Array], y: jax.Array) -> Stages[list[jax.Array]]:
        """Returns of each x in `rows` the sums over channels of x_i y_j exp(c_i - c_j), j < i, else 0."""
        planes = [jnp.zeros((CHUNK, CHUNK), jnp.float32)] * len(rows)
        for size, factor in self.factors:
            scaled, halves = [x * factor for x in rows], Halves(size) if size >= TILE else None
            if halves is not None:
                scaled = [halves.later(x) for x in scaled]
            found = jnp.split(product(chunks, jnp.concatenate(scaled, 0), y * factor, (1, 1)), len(rows))
            if halves is not None:
                found = [halves.placed(x) for x in found]
            is_parted = _parted(size)
            planes = [plane + jnp.where(is_parted, x, 0) for plane, x in zip(planes, found, strict=True)]
            yield
        return planes

    def earlier(
        self, chunks: Chunks, plane: jax.Array, x: jax.Array, of: "MovedByDecays"
    ) -> Stages[jax.Array]:
        """Returns the sums of plane_ij exp(c_i - c_j) x_j over j < i, `[C, H]`, and adds them to `of`."""
        total = jnp.zeros(x.shape, jnp.float32)
        for n, (size, factor) in enumerate(self.factors):
            scaled = x * factor
            if size >= TILE:
                halves = Halves(size)
                found = halves.placed(product(chunks, halves.between(plane), scaled))
            else:
                found = product(chunks, jnp.where(_parted(size), plane, 0), scaled)
            total += of.add(n, found * factor)
            yield
        return total

    def later(self, chunks: Chunks, plane: jax.Array, x: jax.Array, of: "MovedByDecays") -> Stages[jax.Array]:
        """Returns the sums of plane_ij exp(c_i - c_j) x_i over i > j, `[C, H]`, and adds them to `of`."""
        total = jnp.zeros(x.shape, jnp.float32)
        for n, (size, factor) in enumerate(self.factors):
            scaled = x * factor
            if size >= TILE:
                halves = Halves(size)
                found = product(chunks, halves.between(plane), halves.later(scaled), (0, 0))
            else:
                found = product(chunks, jnp.where(_parted(size), plane, 0), scaled, (0, 0))
            total += of.add(n, found * factor)
            yield
        return total

    def of_decays(
        self, chunks: Chunks, column: PerToken, passed: jax.Array, moved: Sequence[jax.Array]
    ) -> jax.Array:
        """Returns (18), `[C, H]`, from what the whole decay and each exponent of the spans move."""
        dg = jnp.broadcast_to(passed, (passed.shape[0], LANES)).T[:1]
        dg += product(chunks, self.spans, jnp.concatenate(moved, 0), (0, 0), is_exact=True)
        return tpu.seen(chunks, column, jnp.where(self.restarts, 0, dg))


class MovedByDecays(NamedTuple):
    """Adds up what moves with the logarithms of decays, by halving: rows times the sums that they get."""

    rows: jax.Array  # [C, H]
    sums: list[Any]  # of each halving, [C, H]; empty where the gradient of the decays is not asked for

    def add(self, n: int, share: jax.Array) -> jax.Array:
        """Adds the sums of the n-th halving, and returns them."""
        if self.sums:
            self.sums[n] = self.sums[n] + self.rows * share
        return share


def _parted(size: int) -> jax.Array:
    """Tells of each pair of tokens if it is parted by the halving whose halves have `size` tokens."""
    row, column = (number((CHUNK, CHUNK), axis) >> (size.bit_length() - 1) for axis in (0, 1))
    return ((row & 1) == 1) & (column == row - 1)


@dataclass(frozen=True)
class ChunkOfHead:
    """What the tokens of one value head are to one another and to the states around the chunk.

    Attributes:
      column: what is a number a token.
      from_start, to_end: exp(c) and exp(c_C - c), `[C, 1 or H]`.
      whole: exp(c_C), `[1 or H, 1]`.
      reader, at_start, at_end: q^ and k^ and k~ of `forward.py`.
      reads: <q_i, k_j>_G for j <= i, scaled; overlaps: <k_i, k_j>_G for j < i, else 0, `[C, C]`.
      plane: exp(c_i - c_j) for j <= i, else 0; None with decays of channels.
      channels: None where channels share their decay.
    """

    column: PerToken
    from_start: jax.Array
    to_end: jax.Array
    whole: jax.Array
    reader: ScaledRows
    at_start: ScaledRows
    at_end: ScaledRows
    reads: jax.Array
    overlaps: Any
    plane: Any
    channels: Channels | None


def inside(
    chunks: Chunks, keys: KeyHead, numbers: tuple[PerToken, PerToken], decays: DecaysOfChannels | None
) -> Stages[ChunkOfHead]:
    """Returns the inside of a chunk of one value head."""
    if decays is not None:
        return (yield from _of_channels(chunks, keys, numbers[1], decays))
    row, column = numbers
    i, j = (number((CHUNK, CHUNK), axis) for axis in (0, 1))
    # the sums over j < t <= i
    logs = product(chunks, jnp.where(j <= i, row.log_decay, 0), (i > j).astype(jnp.bfloat16), is_exact=True)
    plane = jnp.where(j <= i, jnp.exp(logs), 0)
    yield
    return ChunkOfHead(
        column,
        column.from_start,
        column.to_end,
        column.whole[:1],
        ScaledRows(keys.query, keys.query_norm * column.from_start),
        ScaledRows(keys.key, keys.key_norm * column.from_start),
        ScaledRows(keys.key, keys.key_norm * column.to_end),
        keys.reads * plane,
        None if keys.overlaps is None else keys.overlaps * plane,
        plane,
        None,
    )


def _of_channels(
    chunks: Chunks, keys: KeyHead, column: PerToken, decays: DecaysOfChannels
) -> Stages[ChunkOfHead]:
    """Returns the inside of a chunk whose channels have decays of their own."""
    # the factors are exponentials of sums of logarithms, by one product
    g = tpu.seen(chunks, column, decays.logs)
    restarts = (jnp.exp(wide(g)) == 0) | (column.log_decay < 0)
    spans = decays.spans[...]
    exponents = product(chunks, spans, jnp.where(restarts, tpu.NEVER, g), is_exact=True)
    yield
    from_start, to_end, *factors = jnp.split(jnp.exp(exponents), 2 + HALVINGS)
    whole = jnp.broadcast_to(from_start[CHUNK - 1 :], from_start.shape).T[:, :1]
    channels = Channels(tuple(zip(_HALVES, factors, strict=True)), restarts, spans)
    yield
    query, key = keys.units
    own = (query * key).sum(1, keepdims=True)
    rows = [query, key] if chunks.options.is_delta else [query]
    found = yield from channels.products(chunks, rows, key)
    reads, overlaps = found[0], found[1] if chunks.options.is_delta else None
    is_own = number(reads.shape, 0) == number(reads.shape, 1)
    return ChunkOfHead(
        column,
        from_start,
        to_end,
        whole,
        ScaledRows(query * from_start, None),
        ScaledRows(key * from_start, None),
        ScaledRows(key * to_end, None),
        jnp.where(is_own, own, reads),
        overlaps,
        None,
        channels,
    )


def corrections(
    chunks: Chunks, within: ChunkOfHead, value: jax.Array, before: jax.Array
) -> Stages[tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns M = (I + A)^-1 `[C, C]`, V - K^ S0 and U `[C, Hv]`, by (5)."""
    beta = within.column.beta
    rest = wide(value) - within.at_start.times(chunks, before)
    solved = yield from tpu.inverse(chunks, beta * within.overlaps)
    return solved, rest, product(chunks, solved, beta * rest)
