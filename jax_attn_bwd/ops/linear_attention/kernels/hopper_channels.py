"""Shared by the Hopper kernels of linear attention: decays of channels, and what is known before a state is.

The pairs of a chunk are parted by halvings, (2) of `decays.py`: a product each, of rows times the factors of
their channels, whose pairs that other halvings part are masked. Factors are exponentials of sums of the
logarithms g, each taken by itself, as a product with ones and zeros. So q^, k^ and k~ are rows times factors,
too, and the kernels that walk over the chunks read them as such.

Scaled rows and g are two numbers of bfloat16 each, whose range is that of float32: decays can be small.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, tile
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import (
    CHUNK,
    SIZE,
    InsideChunks,
    along_columns,
    along_rows,
    row_dot,
    store_two,
)
from jax_attn_bwd.ops.linear_attention.kernels.inputs import NUMBERS, Inputs
from jax_attn_bwd.ops.linear_attention.spec import Options

HALVINGS = CHUNK.bit_length() - 1
Taken = Callable[[jax.Array, jax.Array], jax.Array]  # tells of a token i if a sum takes the token t


def inside(options: Options, interpret: bool, given: Inputs, name: str) -> InsideChunks:
    """Computes what is known of all chunks before a state is, side by side."""
    if given.decays is None:
        return tiles.planes(options, interpret, given, name)
    (B, T, _, H), N, dtype = given.key.shape, given.value.shape[2], given.key.dtype
    halves, is_delta, out_type = H // SIZE, options.is_delta, partial(pallas.out_type, operands=given)
    plane, rows = out_type((B, N, T, CHUNK), dtype), out_type((B, T, N, H), dtype)
    whole = out_type((B, N, T // CHUNK, H), jnp.float32)
    of_keys = tile((halves, CHUNK, SIZE), dtype)
    scratch = dict(
        query=of_keys,
        key=of_keys,
        decays=[tile((halves, CHUNK, SIZE), jnp.bfloat16)] * 2,
        scaled=[tile((1, CHUNK, SIZE), jnp.bfloat16)] * 2,
        of_rows=plgpu.SMEM((NUMBERS, CHUNK), jnp.float32),
        of_columns=plgpu.SMEM((NUMBERS, CHUNK), jnp.float32),
        plane=[tile((CHUNK, CHUNK), dtype)] * 2,
        between=[tile((CHUNK, CHUNK), dtype)] * 2,
        end=plgpu.SMEM((H,), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=4 * halves + 2),
    )
    types = InsideChunks(plane, plane if is_delta else None, rows, rows, whole, rows if is_delta else None)
    return mosaic_gpu.launch(
        _inside_kernel,
        f"linear_attention_{name}_of_channels",
        interpret=interpret,
        out_type=types,
        scratch=scratch
        | tiles.spare_tile(interpret, CHUNK, jnp.bfloat16)
        | tiles.spare_tile(interpret, CHUNK, dtype, "spare_plane"),
        grid={"chunk": T // CHUNK, "head": N, "batch": B},
    )(given._replace(value=None, state=None))


def _inside_kernel(
    given: Inputs, *results,
    query, key, decays, scaled, of_rows, of_columns, plane, between, end, loaded, spare=None,
    spare_plane=None,
):  # fmt: skip
    """Computes the planes and the scaled rows of one chunk of one head."""
    b, n, t = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    here, found = tiles.tokens(t), InsideChunks(*results)
    head = lax.div(n, jnp.int32(given.numbers.shape[1] // given.key.shape[2]))
    for h, half in enumerate(halves_of(given.key)):
        plgpu.copy_gmem_to_smem(given.query.at[b, here, head, half], query.at[h], loaded)
        plgpu.copy_gmem_to_smem(given.key.at[b, here, head, half], key.at[h], loaded)
        for i, part in enumerate(decays):
            plgpu.copy_gmem_to_smem(given.decays.at[i, b, here, n, half], part.at[h], loaded)
    for of_tokens in (of_rows, of_columns):
        plgpu.copy_gmem_to_smem(given.numbers.at[b, n, :, here], of_tokens, loaded)
    plgpu.barrier_wait(loaded)

    rows = tiles.numbers(of_rows, ROWS)
    halves = range(key.shape[0])

    def at_zero(zero=None):
        h = [h if zero is None else h + zero for h in halves]
        queries = [Units(query.at[i], rows.query_factor) for i in h]
        keys = [Units(key.at[i], rows.key_factor) for i in h]
        return (
            [ChannelDecays([part.at[i] for part in decays], spare, (of_rows, of_columns)) for i in h],
            queries,
            keys,
        )

    def write(x, ref, there=plane[0]):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        there[...] = x.astype(there.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(there, ref)

    # P, M
    (channels, queries, keys), own = at_zero(), jnp.zeros_like(rows.beta)
    for x, y in zip(queries, keys, strict=True):
        own = own + row_dot(x.ref, y.rows())

    def products(of_keys):
        def halving(number, found):
            zero, size = unknown_zero(of_rows, number), lax.shift_left(jnp.int32(1), number)
            channels, queries, keys = at_zero(zero)
            in_loop = [part.at[zero] for part in scaled]
            products = _products(channels, keys if of_keys else queries, keys, in_loop, size)
            return jnp.where(is_parted(size, *channels[0].position()), products, found)

        return lax.fori_loop(jnp.int32(0), jnp.int32(HALVINGS), halving, tiles.zeros(CHUNK, CHUNK))

    reads, (row, column) = products(False), channels[0].position()
    reads = jnp.where(row == column, along_rows(own * rows.query_factor), reads)
    write(reads, found.reads.at[b, n, here])
    if found.solved is not None:
        a = products(True) * along_rows(rows.beta)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        write(tiles.solve(a, plane, between, spare_plane), found.solved.at[b, n, here])

    # q^, k^, k~, exp(c_C)
    for h, half in enumerate(halves_of(given.key)):
        from_start = channels[h].factor(up_to)
        write(queries[h].rows() * from_start, found.query.at[b, here, n, half])
        if found.key is not None:
            write(keys[h].rows() * from_start, found.key.at[b, here, n, half])
        write(keys[h].rows() * channels[h].factor(behind), found.end.at[b, here, n, half])
        high, low = (tiles.load(part) for part in channels[h].decays)
        end[half] = jnp.exp((high + low).sum(axis=0))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(end, found.whole.at[b, n, t])
    plgpu.wait_smem_to_gmem(0)


def _products(
    channels: Sequence["ChannelDecays"],
    x: Sequence["Units"],
    y: Sequence["Units"],
    scaled: Sequence[Any],
    size: Any,
) -> Any:
    """Returns the sums of x_i y_j times both factors in a halving over the channels, in registers."""
    found = None
    for of, x_part, y_part in zip(channels, x, y, strict=True):
        factor = of.factor(to_middle(size))
        store_two(scaled, y_part.rows() * factor)
        found = of.exact(x_part.rows() * factor, [part.T for part in scaled], found)
    return found


class Units:
    """Rows of 64 channels in shared memory, to be multiplied by a factor each: normalized, scaled."""

    def __init__(self, ref: Any, factor: jax.Array):
        self.ref, self.factor = ref, factor

    def rows(self) -> jax.Array:
        """Returns the rows with their factors, float32."""
        return tiles.load(self.ref) * along_rows(self.factor)


class ChannelDecays:
    """The decays of 64 channels in a chunk, of their logarithms in shared memory as two numbers."""

    def __init__(self, decays: Sequence[Any], spare: Any, numbers: tuple[Any, Any]):
        self.decays, self.spare, self.numbers = decays, spare, numbers

    def position(self) -> tuple[jax.Array, jax.Array]:
        """Returns the rows and the columns of a plane's elements, by way of memory, not to keep them."""
        of_rows, of_columns = self.numbers
        row = mosaic_gpu.load(of_rows.at[0], layout=ROWS, optimized=False).astype(jnp.int32)
        column = mosaic_gpu.load(of_columns.at[0], layout=COLUMNS, optimized=False).astype(jnp.int32)
        return along_rows(row), along_columns(column)

    def factor(self, taken: Taken) -> jax.Array:
        """Returns the exponentials of the sums of the logarithms that each token takes, [CHUNK, SIZE]."""
        return jnp.exp(self.sums(taken(*self.position()), self.decays))

    def sums(self, taken: jax.Array, parts: Sequence[Any], acc: jax.Array | None = None) -> jax.Array:
        """Returns acc and the sums of the rows of `parts` of shared memory that each row takes."""
        ones = jnp.where(taken, 1.0, 0.0).astype(jnp.bfloat16)
        return add_products([(ones, part) for part in parts], self.spare, acc)

    def exact(self, x: jax.Array, b: Sequence[Any], acc: jax.Array | None = None) -> jax.Array:
        """Returns acc and `x @ b` of two numbers each, but for the product of the second ones."""
        high, low = tiles.two_numbers(x, jnp.bfloat16)
        return add_products([(high, b[0]), (low, b[0]), (high, b[1])], self.spare, acc)


def add_products(pairs: Sequence[tuple[jax.Array, Any]], spare: Any, acc: jax.Array | None) -> jax.Array:
    """Returns acc and the sum of `a @ b`: a in registers, b a tile of shared memory."""

    def add(ref):
        for a, b in pairs:
            mosaic_gpu.product(ref, a, b, spare)

    def alone(ref):
        add(ref)
        return ref[...]

    if acc is not None and spare is None:
        return pl.run_state(add)(plgpu.ACC.init(acc))
    a, b = pairs[0]
    found = pl.run_scoped(alone, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
    return found if acc is None else acc + found


def unknown_zero(numbers: Any, number: Any) -> Any:
    """Returns 0 by way of shared memory, where c is the number of a token.

    What seems to depend on it is computed where it is used: else the compiler would compute it once for all
    uses, and of each place in memory keep two registers.
    """
    return numbers[0, number].astype(jnp.int32) - number


def halves_of(ref: Any) -> list[Any]:
    """Returns the channels of keys, `SIZE` at a time."""
    return [pl.ds(i, SIZE) for i in range(0, ref.shape[-1], SIZE)]


# ---- the tokens t that a sum of token i takes


def up_to(i: jax.Array, t: jax.Array) -> jax.Array:
    """Takes those from the start of the chunk."""
    return t <= i


def behind(i: jax.Array, t: jax.Array) -> jax.Array:
    """Takes those to the end of the chunk."""
    return t > i


def to_middle(size: Any) -> Taken:
    """Takes those up to the middle b of a stretch of `2 size`; tokens of its later half, from b on."""

    def taken(i, t):
        rest, b = jnp.full(i.shape, 2 * size - 1, jnp.int32), jnp.full(i.shape, size - 1, jnp.int32)
        b = (i | rest) - b
        return ((b <= t) & (t <= i)) | ((i < t) & (t < b))

    return taken


def is_parted(size: Any, i: jax.Array, j: jax.Array) -> jax.Array:
    """Tells if j lies in the earlier half and i in the later half of one stretch of `2 size`."""
    rest, bit = (jnp.full(i.shape, n, jnp.int32) for n in (2 * size - 1, size))
    return ((i & bit) != 0) & ((j & bit) == 0) & ((i | rest) == (j | rest))
