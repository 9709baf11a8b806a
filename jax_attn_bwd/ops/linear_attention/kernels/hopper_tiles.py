"""Shared by the Hopper kernels of linear attention: products, numbers of tokens, and the planes of chunks.

Letters and equations are those of `forward.py`, with E_ij = exp(c_i - c_j). The l2 norm and the scale are
factors f of queries and h of keys: q^_i = exp(c_i) f_i q_i, k^_i = exp(c_i) h_i k_i, and so k~.

What a warpgroup holds in registers is the first factor of a product as two numbers, its rounding the second
(`product`): what is summed over many chunks is not rounded to 16 bits on the way. What stands in shared
memory, the other factor, are the tokens as given, or a plane of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, WGMMA, tile
from jax_attn_bwd._core.numerics import rounding_between
from jax_attn_bwd.ops.linear_attention.kernels import inputs
from jax_attn_bwd.ops.linear_attention.kernels.inputs import NUMBERS, Inputs
from jax_attn_bwd.ops.linear_attention.plan import CHUNKS_OF_KERNELS
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options

CHUNK = CHUNKS_OF_KERNELS[mosaic_gpu.NAME]
SIZE = 64  # of what keys and values are padded to a multiple of, and of the columns of values of a program
WIDEST = (128, 128)  # channels of keys and values
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


def unsupported(options: Options, operands: Operands) -> str | None:
    """Returns why these kernels cannot run a call; None if they can."""
    return mosaic_gpu.too_old() or inputs.unsupported(options, operands, WIDEST)


class Numbers(NamedTuple):
    """The numbers of the tokens of a chunk, [CHUNK] each, along the rows or the columns of a tile."""

    c: jax.Array
    beta: jax.Array
    query_factor: jax.Array
    key_factor: jax.Array
    last: jax.Array  # c_C, a scalar

    @property
    def from_start(self) -> jax.Array:
        """What multiplies a query in q^."""
        return jnp.exp(self.c) * self.query_factor

    @property
    def at_start(self) -> jax.Array:
        """What multiplies a key in k^."""
        return jnp.exp(self.c) * self.key_factor

    @property
    def at_end(self) -> jax.Array:
        """What multiplies a key in k~."""
        return jnp.exp(self.last - self.c) * self.key_factor

    @property
    def whole(self) -> jax.Array:
        """What multiplies the state, exp(c_C)."""
        return jnp.exp(self.last)


def numbers(ref: Any, layout: Any) -> Numbers:
    """Loads the numbers of a chunk, [NUMBERS, CHUNK] in shared memory."""
    c, beta, *factors = (mosaic_gpu.load(ref.at[i], layout=layout, optimized=False) for i in range(NUMBERS))
    query_factor, key_factor = factors
    return Numbers(c, beta, query_factor, key_factor, ref[0, CHUNK - 1])


def along_rows(x: jax.Array, width: int = CHUNK) -> jax.Array:
    """Spreads a number a row over a tile [CHUNK, width]."""
    return lax.broadcast_in_dim(x, (CHUNK, width), [0])


def along_columns(x: jax.Array) -> jax.Array:
    """Spreads a number a column over a tile [CHUNK, CHUNK]."""
    return lax.broadcast_in_dim(x, (CHUNK, CHUNK), [1])


def zeros(rows: int, columns: int) -> jax.Array:
    """Returns zeros in registers."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def two_numbers(x: jax.Array, dtype: Any) -> list[jax.Array]:
    """Returns `x`, float32, as two numbers of 16 bits that add up to it."""
    narrow = x.astype(dtype)
    return [narrow, rounding_between(x, narrow)]


def product(x: jax.Array, b: Any, spare: Any, acc: jax.Array | None = None) -> jax.Array:
    """Returns `x @ b + acc`: x float32 in registers, as two numbers of the dtype of b, in shared memory."""
    factors = two_numbers(x, b.dtype)
    spare = None if spare is None else spare.at[:, pl.ds(0, x.shape[1])]
    if acc is not None:
        return mosaic_gpu.add_products(acc, factors, b, spare)

    def run(ref):
        for a in factors:
            mosaic_gpu.product(ref, a, b, spare)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC((x.shape[0], b.shape[1]), jnp.float32))


def shared_product(a: Any, b: Any) -> jax.Array:
    """Returns `a @ b`, float32 in registers, of tiles of shared memory."""

    def run(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def spare_tile(interpret: bool, width: int, dtype: Any, name: str = "spare") -> dict[str, Any]:
    """Returns the shared tile that the interpreter needs for factors in registers, if it is one."""
    return {name: tile((CHUNK, width), dtype)} if interpret else {}


def load(ref: Any) -> jax.Array:
    """Loads a tile of shared memory, float32."""
    return mosaic_gpu.load(ref, layout=WGMMA).astype(jnp.float32)


def load_transposed(ref: Any) -> jax.Array:
    """Loads the transpose of a tile of shared memory, float32."""
    return plgpu.layout_cast(mosaic_gpu.load(ref.T, layout=TRANSPOSED), WGMMA).astype(jnp.float32)


def store_transposed(ref: Any, x: jax.Array) -> None:
    """Stores the transpose of `x` in shared memory."""
    ref.T[...] = plgpu.layout_cast(x.astype(ref.dtype), TRANSPOSED)


def load_state(source: Any, there: Any, loaded: Any) -> jax.Array:
    """Loads the transpose of a state from global memory, by way of shared memory."""
    plgpu.copy_gmem_to_smem(source, there, loaded)
    plgpu.barrier_wait(loaded)
    return load_transposed(there)


# ---- the planes of all chunks, side by side


class InsideChunks(NamedTuple):
    """What is known of all chunks before a state is, in global memory, in the dtype of the keys."""

    reads: Any  # P, [B, N, T, CHUNK]
    solved: Any = None  # M, [B, N, T, CHUNK], of a delta rule
    # with decays of channels alone; else rows are read as they are given
    query: Any = None  # q^, [B, T, N, H]
    end: Any = None  # k~, [B, T, N, H]
    whole: Any = None  # exp(c_C), float32 [B, N, chunks, H]
    key: Any = None  # k^, [B, T, N, H], of a delta rule


def planes(options: Options, interpret: bool, given: Inputs, name: str) -> InsideChunks:
    """Computes P, and for a delta rule M, of all chunks whose channels share their decays."""
    (B, T, _, H), N, dtype = given.key.shape, given.value.shape[2], given.key.dtype
    count = 2 if options.is_delta else 1
    scratch = dict(
        query=tile((CHUNK, H), dtype),
        key=tile((CHUNK, H), dtype),
        of_rows=plgpu.SMEM((NUMBERS, CHUNK), jnp.float32),
        of_columns=plgpu.SMEM((NUMBERS, CHUNK), jnp.float32),
        plane=[tile((CHUNK, CHUNK), dtype)] * 2,
        between=[tile((CHUNK, CHUNK), dtype)] * 2,
        loaded=plgpu.Barrier(num_arrivals=4),
    )
    found = mosaic_gpu.launch(
        partial(_planes_kernel, options.is_delta),
        f"linear_attention_{name}",
        interpret=interpret,
        out_type=[pallas.out_type((B, N, T, CHUNK), dtype, given)] * count,
        scratch=scratch | spare_tile(interpret, CHUNK, dtype),
        grid={"chunk": T // CHUNK, "head": N, "batch": B},
    )(given._replace(value=None, state=None))
    return InsideChunks(*found)


def _planes_kernel(
    is_delta: bool, given: Inputs, *results,
    query, key, of_rows, of_columns, plane, between, loaded, spare=None,
):  # fmt: skip
    """Computes P and M of one chunk of one head."""
    b, n, t = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    N, here = given.numbers.shape[1], tokens(t)
    head = lax.div(n, jnp.int32(N // given.key.shape[2]))
    plgpu.copy_gmem_to_smem(given.query.at[b, here, head], query, loaded)
    plgpu.copy_gmem_to_smem(given.key.at[b, here, head], key, loaded)
    for of_tokens in (of_rows, of_columns):  # a number that is loaded twice from one place has one layout
        plgpu.copy_gmem_to_smem(given.numbers.at[b, n, :, here], of_tokens, loaded)
    plgpu.barrier_wait(loaded)

    row, column = position()
    rows, columns = numbers(of_rows, ROWS), numbers(of_columns, COLUMNS)
    decay = jnp.exp(along_rows(rows.c) - along_columns(columns.c)) * along_columns(columns.key_factor)
    reads = shared_product(query, key.T) * along_rows(rows.query_factor) * decay
    plane[0][...] = jnp.where(column <= row, reads, 0.0).astype(plane[0].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(plane[0], results[0].at[b, n, here])
    plgpu.wait_smem_to_gmem(0)
    if is_delta:
        a = shared_product(key, key.T) * along_rows(rows.key_factor * rows.beta) * decay
        solved = solve(jnp.where(column < row, a, 0.0), plane, between, spare)
        plane[0][...] = solved.astype(plane[0].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(plane[0], results[1].at[b, n, here])
        plgpu.wait_smem_to_gmem(0)


def position() -> tuple[jax.Array, jax.Array]:
    """Returns the rows and the columns of a plane's elements."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=WGMMA) for axis in (0, 1))
    return row, column


def solve(a: jax.Array, found_tile: Any, between_tile: Any, spare: Any) -> jax.Array:
    """Returns M = (I + A)^-1 of A in registers, strictly lower, by (3) of `matrix.py`, all blocks at once.

    A product has both factors as two numbers each, but for the product of the second ones.
    """
    row, column = position()
    found, half = jnp.where(row == column, 1.0, 0.0), 1
    while half < CHUNK:
        # the later of two neighbouring blocks reads the earlier one
        of, bit = (jnp.full((CHUNK, CHUNK), n, jnp.int32) for n in (2 * half - 1, half))
        is_between = ((row | of) == (column | of)) & ((row & bit) != 0) & ((column & bit) == 0)
        between = jnp.where(is_between, a, 0.0)
        if half > 1:
            store_two(found_tile, found)
            between = exact_product(between, found_tile, spare)
            store_two(between_tile, between)
            between = exact_product(found, between_tile, spare)
        found = found - between
        half *= 2
    return found


def store_two(refs: Sequence[Any], x: jax.Array) -> None:
    """Stores `x`, float32, as two numbers of 16 bits that add up to it."""
    for ref, part in zip(refs, two_numbers(x, refs[0].dtype), strict=True):
        ref[...] = part
    plgpu.commit_smem()


def exact_product(x: jax.Array, b: Sequence[Any], spare: Any) -> jax.Array:
    """Returns `x @ b` of two numbers each, but for the product of the second ones."""
    found = product(x, b[0], spare)
    return mosaic_gpu.add_products(found, [x.astype(b[1].dtype)], b[1], spare)


# ---- copies of what a program walks over


class FactoredRows(NamedTuple):
    """Rows of tokens in shared memory; what channels share of their factors is kept apart."""

    rows: Any  # [CHUNK, H]
    factor: Callable[[], jax.Array] | None = None  # [CHUNK], along columns

    def times_factor(self, x: jax.Array) -> jax.Array:
        """Returns `x`, of which each column is of a row, times the factors."""
        return x if self.factor is None else x * along_columns(self.factor())

    def of(self, state: jax.Array, spare: Any) -> jax.Array:
        """Returns the transposed products with a transposed state, [SIZE, CHUNK]."""
        return self.times_factor(product(state, self.rows.T, spare))


class ChunkArrays(NamedTuple):
    """What is read of a chunk, in shared memory: tokens, their numbers, and planes."""

    query: Any  # [CHUNK, H]; q^ with decays of channels
    key: Any  # [CHUNK, H]; k^ with decays of channels, None if no rule corrects by it
    value: Any  # [CHUNK, SIZE], or another array of this size
    number_rows: Any  # [NUMBERS, CHUNK]
    reads: Any  # P
    solved: Any = None  # M, of a delta rule
    end: Any = None  # k~, [CHUNK, H], with decays of channels, as the next
    whole: Any = None  # exp(c_C), [H]

    def numbers(self, layout: Any) -> Numbers:
        """Loads the numbers of its tokens."""
        return numbers(self.number_rows, layout)

    def from_start(self, numbers: Numbers) -> FactoredRows:
        """Returns q^."""
        return FactoredRows(self.query, None if self.end is not None else lambda: numbers.from_start)

    def at_start(self, numbers: Numbers) -> FactoredRows:
        """Returns k^."""
        return FactoredRows(self.key, None if self.end is not None else lambda: numbers.at_start)

    def at_end(self, numbers: Numbers) -> FactoredRows:
        """Returns k~."""
        return FactoredRows(self.key, lambda: numbers.at_end) if self.end is None else FactoredRows(self.end)

    def decayed(self, numbers: Numbers, state: jax.Array) -> jax.Array:
        """Returns a transposed state after the decays of the chunk."""
        if self.whole is None:
            return state * numbers.whole
        whole = mosaic_gpu.load(self.whole, layout=COLUMNS, optimized=False)
        return state * lax.broadcast_in_dim(whole, state.shape, [1])


def tokens(t: Any) -> Any:
    """Returns the tokens of a chunk."""
    return pl.ds(t * CHUNK, CHUNK)


def rings(stages: int, given: Inputs, inside: InsideChunks) -> dict[str, Any]:
    """Returns the types of rings of `stages` chunks, and of their barriers."""
    H, dtype = given.key.shape[-1], given.key.dtype
    keys, plane = tile((stages, CHUNK, H), dtype), tile((stages, CHUNK, CHUNK), dtype)
    of_numbers = plgpu.SMEM((stages, NUMBERS, CHUNK), jnp.float32)
    of_channels = inside.end is not None
    found = ChunkArrays(
        keys,
        keys if inside.key is not None or not of_channels else None,
        tile((stages, CHUNK, SIZE), dtype),
        of_numbers,
        plane,
        None if inside.solved is None else plane,
        keys if of_channels else None,
        plgpu.SMEM((stages, H), jnp.float32) if of_channels else None,
    )
    return dict(
        rings=found,
        loaded=plgpu.Barrier(num_arrivals=len(_present(found)), num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )


def sources(given: Inputs, inside: InsideChunks, b: Any, n: Any, columns: Any, t: Any) -> ChunkArrays:
    """Returns where a chunk stands in global memory."""
    head = lax.div(n, jnp.int32(given.value.shape[2] // given.key.shape[2]))
    rows = tokens(t)
    of_head = lambda x: None if x is None else x.at[b, rows, n]
    of_plane = lambda x: None if x is None else x.at[b, n, rows]
    of_channels = inside.end is not None
    return ChunkArrays(
        of_head(inside.query) if of_channels else given.query.at[b, rows, head],
        of_head(inside.key) if of_channels else given.key.at[b, rows, head],
        given.value.at[b, rows, n, columns],
        given.numbers.at[b, n, :, rows],
        of_plane(inside.reads),
        of_plane(inside.solved),
        of_head(inside.end),
        inside.whole.at[b, n, t] if of_channels else None,
    )


def _present(chunk: ChunkArrays) -> list[Any]:
    return [x for x in chunk if x is not None]


def stream(count: Any, stages: int, of_chunk: Any, rings: ChunkArrays, loaded: Any, free: Any) -> None:
    """Loads the chunks `of_chunk(step)` into the rings."""
    mosaic_gpu.stream(count, stages, [(lambda t: _present(of_chunk(t)), _present(rings), loaded, free)])


def at_slot(rings: ChunkArrays, slot: Any) -> ChunkArrays:
    """Returns the chunk at a place of the rings."""
    return ChunkArrays(*(None if ring is None else ring.at[slot] for ring in rings))


class ChunkCotangents(NamedTuple):
    """What the gradients of a chunk are made of beside the tokens, in their dtype."""

    dout: Any  # [B, T, N, Hv]
    corrections: Any  # dR, [B, T, N, Hv]; None without a delta rule
    u: Any  # [B, T, N, Hv]
    states: Any  # transposed S0, [B, N, chunks, Hv, H]
    dstates: Any  # transposed dS1, [B, N, chunks, Hv, H]


def row_dot(ref: Any, x: jax.Array) -> jax.Array:
    """Returns the products of rows of shared memory and of registers."""
    return (load(ref) * x).sum(axis=1)
