"""A part of a tile in the TPU kernels of dense attention: its logits, and what it sees."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout, masks, mosaic_tpu
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at
from jax_attn_bwd.ops.dot_product.kernels.logits import Logits, unmasked
from jax_attn_bwd.ops.dot_product.kernels.tpu_schedule import Step
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import TOKENS, PlaneSides, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions

_FAR = 2**30  # no position is as far as this from another


class Part(NamedTuple):
    """A part of a tile, in a kernel: of the step's tile the given queries and keys."""

    options: KernelOptions
    refs: Inputs
    sides: PlaneSides
    tiling: Tiling
    step: Step
    slices: tuple[slice, slice]  # (queries, keys) within the tile
    transposed: bool = False  # keys along axis 0
    row_offset: int = 0  # of the first tile of queries

    def axis(self, side: int) -> int:
        """The axis that runs over queries (side 0) or keys (side 1)."""
        return 1 - side if self.transposed else side

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the part as it is held."""
        sizes = tuple(s.stop - s.start for s in self.slices)
        return (sizes[1], sizes[0]) if self.transposed else (sizes[0], sizes[1])

    def start(self, side: int) -> Any:
        """The index of the first query or key."""
        if side:
            return self.step.column * self.tiling.block_k + self.slices[1].start
        return self.step.row * self.tiling.block_q + (self.slices[0].start + self.row_offset)

    def offset(self, side: int) -> jax.Array:
        """The distance of each element's query or key from the first one."""
        return lax.broadcasted_iota(jnp.int32, self.shape, self.axis(side))

    def vector(self, ref: Any, side: int) -> jax.Array:
        """The values of the part's queries or keys from a block `[1, n]`, to broadcast over the part."""
        row = ref[:, self.slices[side]]
        return row if self.axis(side) else mosaic_tpu.stand(row)

    def tokens(self, name: str) -> jax.Array:
        """A field of `Inputs` that has one value a position."""
        return self.vector(getattr(self.refs, name), TOKENS[name])

    def plane(self, ref: Any, side: int | None) -> jax.Array:
        """A mask or bias over the part, or a value that a function is handed, 32 bits."""
        if side == distances.SIDE:
            block = distances.block(ref, self.slices, self.tiling)
            return block if self.transposed else block.T
        if side == blocks.SIDE:
            block = ref.spread(self.slices)
            return block if self.transposed else block.T
        if side is not None:
            row = ref[:, self.slices[side]].astype(_wide(ref.dtype))
            return row if self.axis(side) else mosaic_tpu.stand(row)
        block = ref[self.slices[0], self.slices[1]].astype(_wide(ref.dtype))
        return block.T if self.transposed else block

    def logits(self, products: jax.Array, mixed: bool) -> Logits:
        """The logits of products q k^T, -inf where nothing is seen."""

        def plane():
            return self.plane(self.refs.bias, self.sides.bias)

        def scored(x):
            values = self.values("score_values")
            return functions.on_tile(mod_functions.scored, self.options, x, self.place(), values)

        found, terms = unmasked(self.options, self.refs, products, _tanh, plane, scored)
        visible = masks.conjunction(*terms, *(self._seen() if mixed else ()))
        return found if visible is None else found._replace(x=jnp.where(visible, found.x, -jnp.inf))

    def _seen(self) -> list[Any]:
        options, refs, terms = self.options, self.refs, []
        if options.is_causal or options.window is not None:
            terms.append(self._in_band())
        if refs.columns_end is not None:
            end = refs.columns_end[at(refs.columns_end, 0, self.step.b)]
            terms.append(self.offset(1) < end - self.start(1))
        if refs.row_segment is not None:
            terms.append(self.tokens("row_segment") == self.tokens("column_segment"))
        if refs.mask is not None:
            terms.append(self.plane(refs.mask, self.sides.mask) != 0)
        if options.mask_mod is not None:
            values = self.values("mask_values")
            terms.append(functions.on_tile(options.mask_mod, *self.place()[:4], *values))
        return terms

    def values(self, name: str) -> tuple[jax.Array, ...]:
        """What a function is handed, to broadcast over the part."""
        refs, sides = getattr(self.refs, name), getattr(self.sides, name)
        lead = lambda ref: (at(ref, 0, self.step.b), at(ref, 1, self.step.n))
        return tuple(
            jnp.full((1, 1), ref[lead(ref)]) if side is None else self.plane(ref, side)
            for ref, side in zip(refs, sides, strict=True)
        )

    def place(self) -> mod_functions.Tile:
        """Where the elements stand, as functions are handed it; padding stands where the last query does."""
        refs = self.refs
        batch, head = (
            jnp.full((1, 1), ref[i], jnp.int32)
            for ref, i in ((refs.batch_number, self.step.b), (refs.head_number, self.step.n))
        )
        row, column = (
            self._indices(side) if getattr(refs, name) is None else self.tokens(name)
            for side, name in enumerate(("row_position", "column_position"))
        )
        if refs.rows_end is not None and refs.row_position is None:
            end = refs.rows_end[at(refs.rows_end, 0, self.step.b)]
            row = jnp.minimum(row, jnp.maximum(end - 1, 0))
        return mod_functions.Tile(batch, head, row, column, None)

    def _indices(self, side: int) -> jax.Array:
        """The indices of the part's queries or keys, to broadcast over the part."""
        axis, shape = self.axis(side), [1, 1]
        shape[axis] = self.shape[axis]
        return lax.broadcasted_iota(jnp.int32, shape, axis) + self.start(side)

    def _in_band(self) -> Any:
        options, refs = self.options, self.refs
        if refs.row_position is not None or refs.column_position is not None:
            row, column = (
                self.offset(side) + self.start(side) if getattr(refs, name) is None else self.tokens(name)
                for side, name in enumerate(("row_position", "column_position"))
            )
            return masks.in_band(row, column, options.is_causal, options.window)
        # one comparison an element for each bound, of constants with a scalar
        distance, shift = self.offset(1) - self.offset(0), self.start(0) - self.start(1)
        left, right = options.window or (_FAR, _FAR)
        right = 0 if options.is_causal else right
        terms = [distance <= shift + right] if right < _FAR else []
        terms += [distance >= shift - left] if left < _FAR else []
        return masks.conjunction(*terms)

    def keep(self) -> jax.Array | None:
        """Which probabilities dropout lets pass; None without dropout."""
        keys = self.refs.dropout_keys
        if keys is None:
            return None
        lead = at(keys, 0, self.step.b), at(keys, 1, self.step.n)
        words = keys[(*lead, 0)], keys[(*lead, 1)]
        row, column = (
            jnp.broadcast_to(self.tokens(name), self.shape) for name in ("row_counter", "column_counter")
        )
        return dropout.keep(words, row, column, self.options.dropout_rate)


def _tanh(x: jax.Array, cap: float) -> jax.Array:
    return jnp.tanh(x * (1.0 / cap))


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def product(options: KernelOptions, a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """The matrix product of two blocks over `axes`, in float32."""
    wide = a.dtype == jnp.float32
    precision = options.precision if wide else lax.Precision.DEFAULT  # bfloat16 products are exact
    if wide and precision == lax.Precision.HIGH:
        precision = lax.Precision.HIGHEST  # the matrix unit has no three-pass mode in kernels
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
