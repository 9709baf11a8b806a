"""What strips of run-time extent are cut from, `strip_widths.py`.

Arrays stay in the caller's layout: what cuts a strip out of them brings its heads to the front, too, and
zeroes what no one sees, in the one pass that it takes anyway. `lead` are the axes of batch and heads of keys,
or one of both where they are those of one device.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.slicing import Parts, take_part
from jax_attn_bwd.ops.dot_product import fully_masked, layout, masking
from jax_attn_bwd.ops.dot_product.masking import TileMask, Tokens
from jax_attn_bwd.ops.dot_product.spec import Operands
from jax_attn_bwd.ops.dot_product.tiling import Tiling


class Along(NamedTuple):
    """A part of a sequence."""

    first: jax.Array
    size: int


class Plane(NamedTuple):
    """The plane of a call, padded to whole blocks; of the batch, arrays have the axes, or one."""

    tiling: Tiling
    batch: tuple[int, ...]
    heads: tuple[int, int]  # of keys; of queries for each of these
    mask: TileMask
    live: jax.Array | None  # [..., T], which queries see something; None = all
    seen: jax.Array | None  # [..., S], which keys are seen

    @classmethod
    def of(cls, tiling: Tiling, operands: Operands) -> "Plane":
        """That of a call without functions, whose mask array, if there is one, hides keys alone."""
        batch, T, S, K, G = operands.sizes
        blocks = tiling.block_q, tiling.block_k
        given = masking.tile_mask(operands.mask.with_segments_of_keys(), None, T, S, len(batch), G, *blocks)
        plane = cls(tiling, batch, (K, G), given, None, None)

        def tokens(x, block):
            length = x.valid_length
            if x.length % block:  # what lies beyond is padding
                length = jnp.minimum(jnp.int32(x.length), x.length if length is None else length)
            position, segment = (None if y is None else plane.laid(y, 1) for y in (x.position, x.segment))
            return Tokens(x.length, position, segment, None if length is None else plane.laid(length, 0))

        rows, columns = tokens(given.rows, blocks[0]), tokens(given.columns, blocks[1])
        live, seen = (  # the same for all heads
            None
            if x is None
            else plane.laid(layout.pad(x.reshape(*x.shape[: len(batch)], -1), {-1: block}), 1)
            for x, block in zip(fully_masked.live_and_seen_of(operands), blocks, strict=True)
        )
        return plane._replace(mask=TileMask(given.rules, rows, columns, None, None), live=live, seen=seen)

    @property
    def merges(self) -> bool:
        """Whether the axes of batch and heads are one."""
        return self.tiling.head_slices > 0

    def laid(self, x: jax.Array, own: int) -> jax.Array:
        """`x`, which has `own` axes behind those of the batch, with these in one if they are to be."""
        x = to_rank(x, len(self.batch) + own)
        if not self.merges:
            return x
        lead, sizes = x.shape[: len(self.batch)], x.shape[len(self.batch) :]
        return (x if math.prod(lead) == 1 else jnp.broadcast_to(x, (*self.batch, *sizes))).reshape(-1, *sizes)

    def given(self, x: jax.Array, axis: int) -> jax.Array:
        """`x [..., n, heads, h]` of queries (`axis` 0) or of keys (1), padded: what is cut.

        With heads and what each has in one axis, if no device has a share of them: else XLA brings heads to
        the front of the whole array, one more pass over it.
        """
        x = self.laid(layout.pad(x, {-3: (self.tiling.block_q, self.tiling.block_k)[axis]}), 3)
        return x.reshape(*x.shape[:-2], -1) if self.merges else x

    def returned(self, x: jax.Array, length: int, groups: int) -> jax.Array:
        """`[*batch, length, heads, h]` of an array in the layout of `given`."""
        heads = self.heads[0] * groups
        h = x.shape[-1] // heads if self.merges else x.shape[-1]
        return x.reshape(*self.batch, -1, heads, h)[..., :length, :, :]

    def parts(self, x: jax.Array, turn: jax.Array, along: Along, axis: int | None = None) -> Parts:
        """Where in `x`, laid like `given`, the batch entries lie whose turn it is, `along` their axis."""
        turns = self.tiling.head_slices
        entries = {0: (turn * (x.shape[0] // turns), x.shape[0] // turns)} if turns > 1 else {}
        axis = (-2 if self.merges else -3) if axis is None else axis
        return {**entries, x.ndim + axis: along}

    def rows(self, x: jax.Array, turn: jax.Array, along: Along) -> jax.Array:
        """`[*lead, G * n, h]` of `x` of queries, 0 where these see nothing."""
        return self._cut(x, turn, along, self.live, self.heads[1])

    def columns(self, x: jax.Array, turn: jax.Array, along: Along) -> jax.Array:
        """`[*lead, n, h]` of `x` of keys, 0 where these are not seen."""
        return self._cut(x, turn, along, self.seen, 1)

    def _cut(self, x: jax.Array, turn: jax.Array, along: Along, used: Any, groups: int) -> jax.Array:
        x = take_part(x, self.parts(x, turn, along))
        if self.merges:
            heads = self.heads[0] * groups
            x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        if used is not None:
            used = take_part(used, self.parts(used, turn, along, -1))
            x = jnp.where(used[..., None, None], x, 0)
        x = layout.split_heads(x, groups)
        *batch, K, _, n, h = x.shape
        lead = (math.prod(batch) * K,) if self.merges else (*batch, K)
        return x.reshape(*lead, groups * n, h)

    def of_rows(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """`x [N]`, a number of each query head, for rows like `[*lead, G * n, h]`: `[*lead, G * n, 1]`."""
        K, G = self.heads
        x = jnp.repeat(x.reshape(K, G), like.shape[-2] // G, 1)[..., None]
        entries = (like.shape[0] // K,) if self.merges else like.shape[:-3]
        return jnp.broadcast_to(x, (*entries, *x.shape)).reshape(*like.shape[:-1], 1)

    def as_given(self, x: jax.Array, groups: int) -> jax.Array:
        """`x [*lead, groups * n, h]` in the layout of `given`."""
        *lead, n, h = x.shape
        lead = [lead[0] // self.heads[0], self.heads[0]] if self.merges else lead
        x = layout.merge_heads(x.reshape(*lead, groups, n // groups, h))
        return x.reshape(*x.shape[:-2], x.shape[-2] * h) if self.merges else x

    def where_seen(self, turn: jax.Array, rows: Along, columns: Along) -> jax.Array | None:
        """Which elements are, `[*lead, G * rows, columns]`, with axes of size 1 in front; None = all."""

        def window(tokens, along):
            take = lambda x: None if x is None else take_part(x, self.parts(x, turn, along, -1))
            length = tokens.valid_length
            length = None if length is None else take(length[..., None])[..., 0]
            return Tokens(along.size, take(tokens.position), take(tokens.segment), length, along.first[None])

        sides, rank = (window(self.mask.rows, rows), window(self.mask.columns, columns)), len(self.batch)
        given = TileMask(self.mask.rules, *sides, None, None)
        seen = masking.of_whole(given, 1 if self.merges else rank)
        if seen is None:
            return None
        seen = jnp.broadcast_to(seen[..., 0, :, :], (*seen.shape[:-3], rows.size, columns.size))
        seen = jnp.tile(seen, (1,) * (seen.ndim - 2) + (self.heads[1], 1))  # [..., 1, G * rows, columns]
        if self.merges:
            seen = seen[:, 0] if len(seen) == 1 else jnp.repeat(seen[:, 0], self.heads[0], 0)
        return fusion.barrier(seen)
