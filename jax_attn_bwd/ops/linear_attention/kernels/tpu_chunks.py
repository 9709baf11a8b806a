"""Shared by the Mosaic TPU kernels of linear attention: calls they refuse, their layout, a chunk's inside.

A step of the grid has one chunk of 128 tokens of a few heads, and chunks follow one another, with the states
in vector memory. Arrays of tokens are read where they lie, `[B, T, N H]`: a block has as many heads as fill
whole registers. What is a number a token stands in eight rows a chunk of each head (`PerToken`), made by XLA.

The logarithm of the decay between two tokens is the sum over those between, by a product with zeros and ones:
a difference of running sums would lose its digits behind strong decays.

A step has independent heads, and products of one wait for one another. So each head is a generator that
yields where it waits, and `in_lockstep` writes the heads' stages side by side.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core import mosaic_tpu
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd._core.numerics import ceil_div, round_up
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.plan import has_decays_of_channels
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options

CHUNK = 128  # tokens: the side of the matrix unit
_SIZE = 256  # the largest key and value size
_STATES = 2**19  # numbers in the states of a step: 8 heads of 256 x 256
_SIDE_BY_SIDE = 4  # value heads of a step, where they need not be more; half as many with decays of channels
NEVER = -(2.0**17)  # the logarithm of what underflows, with any that it is added to
TILE = 8  # rows of a register: blocks of the inverse that are found by substitution

R = TypeVar("R")
Stages = Generator[None, None, R]  # the work on one head, parted where it waits


def unsupported(options: Options, operands: Operands) -> str | None:
    """Tells why the kernels cannot run this call; None if they can."""
    query, value = operands.query, operands.value
    if not all(isinstance(n, int) for x in (query, value) for n in x.shape):
        return "its shapes must be known, not symbolic"
    for name in ("value", "log_decay", "beta", "erase_key", "erase_query"):
        if (x := getattr(operands, name)) is not None and x.dtype.name not in mosaic_tpu.DTYPES:
            return f"{name} must be one of {mosaic_tpu.DTYPES}, got {x.dtype}"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    if query.size == 0 or value.size == 0:
        return f"query and value must not be empty, got shapes {query.shape} and {value.shape}"
    if (size := max(query.shape[-1], value.shape[-1])) > _SIZE:
        return f"keys and values may have at most {_SIZE} channels, got {size}"
    chunks = Chunks.of(options, operands)
    if chunks.value_heads * chunks.width * chunks.value_width > _STATES:
        return f"the states of {chunks.value_heads} value heads that read the same keys do not fit in memory"
    return None


def _key_heads(K: int) -> int:
    """Returns the fewest key heads of a step: those of an odd number of heads have whole registers."""
    return 1 if K % 2 else 2


@dataclass(frozen=True)
class Chunks:
    """The part of a call that is known at trace time, on one device.

    Attributes:
      batch: the leading axes; sizes: T, K, N, H, Hv as they are given.
      width, value_width: H and Hv with zeros up to whole halves of a register.
      key_heads: of a step.
      is_masked: some tokens of a chunk may not be seen.
      is_narrow: products take bfloat16.
      of_channels: each channel of the keys has a decay of its own.
    """

    options: Options
    batch: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]
    width: int
    value_width: int
    key_heads: int
    is_masked: bool
    is_narrow: bool
    of_channels: bool

    @classmethod
    def of(cls, options: Options, operands: Operands) -> "Chunks":
        """Returns what is known of a call."""
        (*batch, T, K, H), (N, Hv) = operands.query.shape, operands.value.shape[-2:]
        unit = LANES if K % 2 else LANES // 2
        width, value_width = round_up(H, unit), round_up(Hv, unit)
        key_heads = _key_heads(K)
        has_channels = has_decays_of_channels(operands)
        most = _SIDE_BY_SIDE // 2 if has_channels else _SIDE_BY_SIDE
        while 2 * key_heads * (N // K) <= most and K % (2 * key_heads) == 0:
            key_heads *= 2
        is_masked = operands.seq_lengths is not None or T % CHUNK != 0
        is_narrow = operands.value.dtype == jnp.bfloat16
        sizes, padded = (T, K, N, H, Hv), (width, value_width)
        return cls(options, tuple(batch), sizes, *padded, key_heads, is_masked, is_narrow, has_channels)

    @property
    def groups(self) -> int:
        """Value heads of each key head."""
        return self.sizes[2] // self.sizes[1]

    @property
    def value_heads(self) -> int:
        """Value heads of a step."""
        return self.key_heads * self.groups

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch entries, parts of the heads, and chunks."""
        T, K, *_ = self.sizes
        return math.prod(self.batch), K // self.key_heads, ceil_div(T, CHUNK)

    def lay(self, x: jax.Array) -> jax.Array:
        """Turns queries or keys `[..., T, K, H]` into `[B, T, K width]`."""
        return self._lay(x, self.width)

    def of_each_channel(self, operands: Operands) -> jax.Array | None:
        """Returns decays of channels `[B, T, N width]`, None where channels share theirs."""
        g = operands.log_decay
        return self._lay(g, self.width) if self.of_channels and g is not None else None

    def of_what_erases(self, operands: Operands) -> list[jax.Array]:
        """Returns erase keys and queries `[B, T, N width]`, or nothing; value heads may share them."""
        N, given = self.sizes[2], (operands.erase_key, operands.erase_query)
        return [self._lay(jnp.repeat(x, N // x.shape[-2], -2), self.width) for x in given if x is not None]

    def summed_over_groups(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Returns the sums of `x` `[..., T, N, H]` over the value heads that share a head of `like`."""
        *lead, N, H = x.shape
        heads = like.shape[-2]
        return x if heads == N else x.reshape(*lead, heads, N // heads, H).sum(-2)

    def lay_values(self, x: jax.Array) -> jax.Array:
        """Turns values or their cotangents `[..., T, N, Hv]` into `[B, T, N value_width]`."""
        return self._lay(x, self.value_width)

    def _lay(self, x: jax.Array, width: int) -> jax.Array:
        *_, T, N, H = x.shape
        more = (CHUNK - T if T < CHUNK else 0, 0, width - H)
        if any(more):
            x = jnp.pad(x, [*[(0, 0)] * len(self.batch), *((0, n) for n in more)])
        return x.reshape(math.prod(self.batch), x.shape[-3], N * width)

    def unlay(self, x: jax.Array, heads: int, size: int) -> jax.Array:
        """Turns `[B, T, N H]` into `[..., T, N, H]`, of `heads` of `size`."""
        T = self.sizes[0]
        return x.reshape(*self.batch, x.shape[1], heads, -1)[..., :T, :, :size]

    def unlay_rows(self, x: jax.Array) -> jax.Array:
        """Turns numbers of tokens `[B, N, chunks, C]` into `[..., T, N]`."""
        B, N, count, C = x.shape
        x = x.transpose(0, 2, 3, 1).reshape(*self.batch, count * C, N)
        return x[..., : self.sizes[0], :]

    def lay_state(self, x: jax.Array) -> jax.Array:
        """Turns a state `[..., N, H, Hv]` into `[B, N, width, value_width]`."""
        return self.lay_states(x[None])[0]

    def lay_states(self, x: jax.Array) -> jax.Array:
        """Turns states `[g, ..., N, H, Hv]` into `[g, B, N, width, value_width]`."""
        count, *_, N, H, Hv = x.shape
        more = self.width - H, self.value_width - Hv
        if any(more):
            x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *((0, n) for n in more)])
        return x.reshape(count, math.prod(self.batch), N, self.width, self.value_width)

    def unlay_state(self, x: jax.Array) -> jax.Array:
        """Turns `[..., B, N, width, value_width]` into `[..., *batch, N, H, Hv]`."""
        *lead, _, N, _, _ = x.shape
        H, Hv = self.sizes[3:]
        return x.reshape(*lead, *self.batch, N, self.width, self.value_width)[..., :H, :Hv]

    def of_tokens(self, width: int, where: Callable[[Any], Any]) -> Any:
        """Returns the spec of tokens, of which a step reads `width` channels; `where` tells the chunk."""
        return pl.BlockSpec((None, CHUNK, width), lambda b, h, c: (b, where(c), h))

    def of_rows(self, where: Callable[[Any], Any]) -> Any:
        """Returns the spec of `PerToken`."""
        return pl.BlockSpec(
            (None, self.value_heads, None, TILE, CHUNK), lambda b, h, c: (b, h, where(c), ZERO, ZERO)
        )

    def of_state(self) -> Any:
        """Returns the spec of a state, which is of all chunks."""
        shape = (None, self.value_heads, self.width, self.value_width)
        return pl.BlockSpec(shape, lambda b, h, c: (b, h, ZERO, ZERO))

    def of_states(self, where: Callable[[Any], Any]) -> Any:
        """Returns the spec of states that are kept, `[g, B, N, width, value_width]`."""
        shape = (None, None, self.value_heads, self.width, self.value_width)
        return pl.BlockSpec(shape, lambda b, h, c: (where(c), b, h, ZERO, ZERO))


class PerToken(NamedTuple):
    """What is a number a token, `[1, C]` or `[C, 1]`; in one array, with rows of 0, `[B, N, chunks, 8, C]`.

    With decays of channels `log_decay` tells of restarts of documents alone.
    """

    log_decay: jax.Array  # `NEVER` at a restart
    from_start: jax.Array  # the product of the decays up to the token, 0 behind the first restart
    to_end: jax.Array  # of those behind it, 0 before the last restart
    whole: jax.Array  # of all of them, the same for all tokens
    beta: jax.Array
    seen: jax.Array  # 1, or 0 beyond the lengths


class TokenNumbers(NamedTuple):
    """What XLA makes of the tokens of a call."""

    rows: jax.Array  # `PerToken`
    restarts: jax.Array  # bool, where a decay does not count, `[B, N or 1, chunks, C]`
    seen: jax.Array  # bool, `[B, 1, chunks, C]`


def decays(chunks: Chunks, operands: Operands) -> TokenNumbers:
    """Returns the numbers of tokens, with zeros where none is seen."""
    (B, _, count), (T, _, N, *_), seen = chunks.grid, chunks.sizes, layout.seen_tokens(operands)

    # `[..., T, N or 1, 1]` to `[B, N or 1, chunks, C]`
    def lay(x):
        x = (x if seen is None else jnp.where(seen, x, jnp.zeros((), x.dtype)))[..., 0]
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, count * CHUNK - T), (0, 0)])
        x = jnp.broadcast_to(x, (*chunks.batch, *x.shape[-2:])).reshape(B, count, CHUNK, x.shape[-1])
        return x.transpose(0, 3, 1, 2)

    g = layout.decay_of_tokens(operands)
    g = lay((jnp.zeros_like(g[..., :1]) if chunks.of_channels else g).astype(jnp.float32))
    restarts = jnp.exp(g) == 0
    if operands.restarts is not None:
        restarts = restarts | lay(operands.restarts[..., None, None])
    beta: Any = 1.0 if operands.beta is None else lay(operands.beta[..., None].astype(jnp.float32))
    is_seen = lay(jnp.ones((*(1,) * len(chunks.batch), T, 1, 1), bool))

    # sums from the start and from the end
    g = jnp.where(restarts, NEVER, g)
    behind = lax.cumsum(g, 3, reverse=True)[..., 1:]
    from_start, to_end = jnp.exp(lax.cumsum(g, 3)), jnp.exp(jnp.pad(behind, [(0, 0)] * 3 + [(0, 1)]))
    rows = PerToken(g, from_start, to_end, from_start[..., -1:], beta, is_seen)
    alike = [jnp.broadcast_to(x, (B, N, count, CHUNK)).astype(jnp.float32) for x in rows]
    alike += [jnp.zeros_like(alike[0])] * (TILE - len(rows))
    return TokenNumbers(jnp.stack(alike, 3), restarts, is_seen)


# ---- within a kernel


def in_lockstep(heads: Sequence[Stages[R]]) -> list[R]:
    """Returns what the generators return, each taken to its next stage in turn."""
    found: dict[int, Any] = {}
    while len(found) < len(heads):
        for number, head in enumerate(heads):
            if number in found:
                continue
            try:
                next(head)
            except StopIteration as ended:
                found[number] = ended.value
    return [found[number] for number in range(len(heads))]


def product(
    chunks: Chunks, x: jax.Array, y: jax.Array, axes: tuple[int, int] = (1, 0), is_exact: bool = False
) -> jax.Array:
    """Multiplies two matrices over `axes`, in float32.

    In a narrow call a factor in float32 is taken as two numbers of bfloat16 that add up to it, but for 2^-17
    of it. In a wide one `is_exact` asks for all of float32, where else the precision of the call holds: by
    three such numbers, if the other factor is in bfloat16.
    """
    dims = (((axes[0],), (axes[1],)), ((), ()))
    if not chunks.is_narrow and not (is_exact and jnp.bfloat16 in (x.dtype, y.dtype)):
        precision = chunks.options.precision
        if is_exact or precision == lax.Precision.HIGH:  # the matrix unit has no three-pass mode in kernels
            precision = lax.Precision.HIGHEST
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    def parts(z):
        found, rest = [z.astype(jnp.bfloat16)], z
        while rest.dtype != jnp.bfloat16 and len(found) < (2 if chunks.is_narrow else 3):
            rest = rest - found[-1].astype(jnp.float32)
            found.append(rest.astype(jnp.bfloat16))
        return found

    (x, *x_rest), (y, *y_rest) = parts(x), parts(y)
    pairs = [(x, y), *((x, rest) for rest in y_rest), *((rest, y) for rest in x_rest)]
    if mosaic_tpu.has_wide_units() and x.shape[axes[0]] % LANES == 0:  # which add up in passing
        x_all, y_all = zip(*pairs, strict=True)
        pairs = [(jnp.concatenate(x_all, axes[0]), jnp.concatenate(y_all, axes[1]))]
    found = [
        lax.dot_general(a, b, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
        for a, b in pairs
    ]
    return sum(found[1:], found[0])


def number(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the number of each row (0) or column (1) of a matrix."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def as_rows(*columns: jax.Array) -> jax.Array:
    """Turns up to 8 columns `[C, 1]` into the rows of a tile, `[8, C]`."""
    lane = number((CHUNK, CHUNK), 1)
    found = jnp.broadcast_to(columns[-1], (CHUNK, CHUNK))
    for i, column in list(enumerate(columns))[-2::-1]:
        found = jnp.where(lane == i, column, found)
    return found.T[:TILE]


def seen(chunks: Chunks, column: PerToken, x: jax.Array) -> jax.Array:
    """Returns rows `[C, X]` with zeros where tokens are not seen."""
    return jnp.where(column.seen != 0, x, jnp.zeros_like(x)) if chunks.is_masked else x


def numbers(tile: jax.Array) -> tuple[PerToken, PerToken]:
    """Returns what XLA made of the tokens of a value head, `[8, C]`, as rows and as columns."""
    upright = jnp.concatenate([tile] * (CHUNK // TILE), 0).T
    of = range(len(PerToken._fields))
    return PerToken(*(tile[i : i + 1] for i in of)), PerToken(*(upright[:, i : i + 1] for i in of))


class Halves(NamedTuple):
    """The later halves of stretches of `2 size` tokens, 8 or more, beside one another."""

    size: int

    def later(self, x: jax.Array) -> jax.Array:
        """Returns the rows of the later halves, `[C / 2, X]`."""
        n = self.size
        return jnp.concatenate([x[i + n : i + 2 * n] for i in range(0, CHUNK, 2 * n)], 0)

    def placed(self, x: jax.Array, earlier: jax.Array | None = None) -> jax.Array:
        """Returns `[C, X]`: `x` `[C / 2, X]` in the later halves, and 0 or rows of `earlier` elsewhere."""
        n, rows = self.size, []
        zeros = jnp.zeros((n, x.shape[1]), x.dtype)
        for i in range(0, CHUNK // 2, n):
            rows += [zeros if earlier is None else earlier[2 * i : 2 * i + n], x[i : i + n]]
        return jnp.concatenate(rows, 0)

    def between(self, plane: jax.Array) -> jax.Array:
        """Returns the rows of the later halves `[C / 2, C]`, 0 but in the columns of the earlier ones."""
        row, column, level = number(plane.shape, 0), number(plane.shape, 1), self.size.bit_length() - 1
        is_between = (self.later(column) >> level) == (self.later(row) >> level) - 1
        return jnp.where(is_between, self.later(plane), 0)


def inverse(chunks: Chunks, a: jax.Array) -> Stages[jax.Array]:
    """Returns (I + A)^-1 of A, strictly lower, `[C, C]`: (3) of `matrix.py`.

    Blocks of 8, the rows of a register, by substitution, all side by side; then blocks of twice the size, of
    which half the rows change.
    """
    C = a.shape[0]
    row, column = number(a.shape, 0), number(a.shape, 1)
    # Of each row the numbers of its block. The matrix unit puts each in all lanes, where the transposing unit
    # would be the busier one; with decays of channels it is not, and a number stands in one lane.
    own = jnp.where((row >> 3) == (column >> 3), a, 0)
    lanes = 1 if chunks.of_channels else C
    fold = (row & 7) == column
    if lanes == C:
        fold = jnp.concatenate([(row & 7) == j for j in range(TILE - 1)], 1)
    own = product(chunks, own, fold.astype(jnp.bfloat16), is_exact=True).reshape(C // TILE, TILE, -1)
    found = jnp.where(row == column, jnp.float32(1), jnp.float32(0)).reshape(C // TILE, TILE, C)
    yield
    for j in range(TILE - 1):
        found = found - own[:, :, j * lanes : (j + 1) * lanes] * found[:, j : j + 1, :]
    found, size = found.reshape(C, C), TILE
    yield
    while size < C:
        halves = Halves(size)
        step, old = product(chunks, halves.between(a), found, is_exact=True), halves.later(found)
        yield
        new = old - product(chunks, old, halves.placed(step), is_exact=True)
        found, size = halves.placed(new, found), 2 * size
        yield
    return found
