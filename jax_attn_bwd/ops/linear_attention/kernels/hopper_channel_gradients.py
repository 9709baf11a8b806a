"""Hopper gradients of linear attention where each channel has a decay of its own, all chunks side by side.

A warpgroup for each 64 channels of the keys. With the factors F of a halving (`hopper_channels.py`), and of
the planes of (9) what that halving parts, b dA_ji where j is the later token,

    what queries get:  F (dP (F k)),      what keys get:  F (dA + (b dA)^T) (F k) + F dP^T (F q)

of rows of later and of earlier tokens. The rows through the states have the factors exp(c) and exp(c_C - c).
Of each such share, times the rows that get it, the decays get the sums over the tokens whose factor takes
them: the transpose of the product that gives the factor, (18).
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
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, tile
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels.hopper_channels import (
    HALVINGS,
    ChannelDecays,
    Taken,
    Units,
    behind,
    halves_of,
    is_parted,
    to_middle,
    unknown_zero,
    up_to,
)
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import (
    CHUNK,
    SIZE,
    ChunkCotangents,
    along_columns,
    along_rows,
    row_dot,
    shared_product,
    store_two,
    two_numbers,
)
from jax_attn_bwd.ops.linear_attention.kernels.inputs import NUMBERS, Inputs
from jax_attn_bwd.ops.linear_attention.spec import Options


class _Memory(NamedTuple):
    """What a chunk's gradients are made of, in shared memory; keys and states by 64 channels of the keys."""

    query: Any  # [halves, CHUNK, SIZE]
    key: Any
    decays: Sequence[Any]  # two numbers, [halves, CHUNK, SIZE]
    given: ChunkCotangents
    of_rows: Any  # the numbers of the tokens, [NUMBERS, CHUNK], and once more
    of_columns: Any
    whole: Any  # exp(c_C), [halves, SIZE]
    scaled: Sequence[Any]  # two numbers, [halves, CHUNK, SIZE]
    dots: Any  # <x_i, dx_i> of keys and of queries, [2, halves, CHUNK]
    dbeta: Any  # [halves, CHUNK]


class Gradients(NamedTuple):
    """What the kernel gives; what is summed behind it is two numbers, of the keys' dtype or bfloat16."""

    query: Sequence[Any]  # [B, T, N, H]
    key: Sequence[Any]
    log_decay: Sequence[Any]  # [B, T, N, H]
    beta: Any  # without <dR, v>, [B, N, halves, T]; None without a delta rule


def gradients(
    options: Options, interpret: bool, given: Inputs, whole: jax.Array, cotangents: ChunkCotangents
) -> Gradients:
    """Computes dq, dk, dg and the share of db that is not <dR, v>."""
    (B, T, K, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    halves, out_type = H // SIZE, partial(pallas.out_type, operands=given)
    of_values, of_keys = tile((1, CHUNK, Hv), dtype), tile((halves, CHUNK, SIZE), dtype)
    exact, states = tile((halves, CHUNK, SIZE), jnp.bfloat16), tile((halves, Hv, SIZE), dtype)
    of_tokens = plgpu.SMEM((NUMBERS, CHUNK), jnp.float32)
    of_delta = of_values if options.is_delta else None
    memory = _Memory(
        query=of_keys,
        key=of_keys,
        decays=[exact] * 2,
        given=ChunkCotangents(of_values, of_delta, of_values, states, states),
        of_rows=of_tokens,
        of_columns=of_tokens,
        whole=plgpu.SMEM((halves, SIZE), jnp.float32),
        scaled=[exact] * 2,
        dots=plgpu.SMEM((2, halves, CHUNK), jnp.float32),
        dbeta=plgpu.SMEM((halves, CHUNK), jnp.float32),
    )
    scratch = dict(
        at=memory,
        loaded=plgpu.Barrier(num_arrivals=7 * halves + 4 + options.is_delta),
        met=plgpu.Barrier(num_arrivals=halves),
    )
    if interpret:
        scratch["spare"] = tile((halves, CHUNK, CHUNK), jnp.bfloat16)
    parts = 1 if K == N else 2
    gradient, decays = out_type((B, T, N, H), dtype), out_type((B, T, N, H), jnp.bfloat16)
    dbeta = out_type((B, N, halves, T), jnp.float32) if options.is_delta else None
    return mosaic_gpu.launch(
        partial(_kernel, options),
        "linear_attention_gradients_of_channels",
        interpret=interpret,
        out_type=Gradients([gradient] * parts, [gradient] * parts, [decays] * 2, dbeta),
        scratch=scratch,
        grid={"chunk": T // CHUNK, "head": N, "batch": B},
        warpgroups=halves,
    )(given._replace(value=None), whole, cotangents)


def _kernel(
    options: Options, given: Inputs, whole: Any, cotangents: ChunkCotangents, *results,
    at, loaded, met, spare=None,
):  # fmt: skip
    """Computes the gradients of one chunk of one value head."""
    b, n, t = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    halves, here = halves_of(given.key), tiles.tokens(t)
    # where an accumulator starts from registers, JAX cannot take an index that it knows
    wg = lax.axis_index("wg") if len(halves) > 1 else t - t
    head = lax.div(n, jnp.int32(given.numbers.shape[1] // given.key.shape[2]))

    @pl.when(wg == 0)
    def _load():
        copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, loaded)
        for h, half in enumerate(halves):
            copy(given.query.at[b, here, head, half], at.query.at[h])
            copy(given.key.at[b, here, head, half], at.key.at[h])
            for i, part in enumerate(at.decays):
                copy(given.decays.at[i, b, here, n, half], part.at[h])
            copy(cotangents.states.at[b, n, t, :, half], at.given.states.at[h])
            copy(cotangents.dstates.at[b, n, t, :, half], at.given.dstates.at[h])
            copy(whole.at[b, n, t, half], at.whole.at[h])
        for source, target in zip(cotangents[:3], at.given[:3], strict=True):
            if source is not None:
                copy(source.at[b, here, n], target.at[0])
        for target in (at.of_rows, at.of_columns):
            copy(given.numbers.at[b, n, :, here], target)

    plgpu.barrier_wait(loaded)
    mine = pl.ds(wg * SIZE, SIZE)
    half = _Half(options, at, wg, len(halves), met, spare)
    half.write(Gradients(*results), b, here, n, mine)


class _Half:
    """The gradients of 64 channels of a chunk; `dg` and `dbeta` are what has been found of them."""

    def __init__(
        self, options: Options, at: _Memory, wg: Any, halves: int, met: Any, spare: Any, zero: Any = None
    ):
        self.options, self.at, self.wg = options, at, wg
        self.halves, self.met, self.spare = halves, met, spare
        rows, here = tiles.numbers(at.of_rows, ROWS), wg if zero is None else wg + zero
        self.beta = rows.beta
        self.query = Units(at.query.at[here], rows.query_factor)
        self.key = Units(at.key.at[here], rows.key_factor)
        self.channels = ChannelDecays(
            [part.at[here] for part in at.decays],
            None if spare is None else spare.at[here],
            (at.of_rows, at.of_columns),
        )
        self.scaled = [part.at[here] for part in at.scaled]
        self.state, self.dstate = at.given.states.at[here], at.given.dstates.at[here]
        shared: list[Any] = [None if x is None else x.at[0 if zero is None else zero] for x in at.given[:3]]
        self.dout, self.corrections, self.u = shared

    def anew(self, number: Any = 0) -> "_Half":
        """Returns the same, of which the compiler keeps nothing that it has computed for another one."""
        zero = unknown_zero(self.at.of_rows, number)
        return _Half(self.options, self.at, self.wg, self.halves, self.met, self.spare, zero)

    def write(self, found: Gradients, b: Any, here: Any, n: Any, mine: Any) -> None:
        """Writes the gradients."""
        place, scale = (b, here, n, mine), self.options.scale
        dg = self.anew().passed()
        dk, dg, dbeta = self.anew().of_keys(dg)
        if dbeta is not None:
            line = self.at.dbeta.at[self.wg]
            line[...] = dbeta
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(line, found.beta.at[b, n, self.wg, here])
        self.anew().finish(0, "key", dk, 1.0, self.dstate, [x.at[place] for x in found.key])
        dq, dg = self.anew().of_queries(dg)
        self.anew().finish(1, "query", dq, scale, self.state, [x.at[place] for x in found.query])
        store_two(self.scaled, dg)
        for part, ref in zip(self.scaled, found.log_decay, strict=True):
            plgpu.copy_smem_to_gmem(part, ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    def passed(self) -> jax.Array:
        """Returns exp(c_C) sum_v S0 dS1 for all tokens, [CHUNK, SIZE]."""
        found: Any = None
        row, _ = self.channels.position()
        for i in range(0, self.state.shape[0], CHUNK):
            block = pl.ds(i, CHUNK)
            store_two(self.scaled, tiles.load(self.state.at[block]) * tiles.load(self.dstate.at[block]))
            found = self.channels.sums(row >= 0, self.scaled, found)
        whole = mosaic_gpu.load(self.at.whole.at[self.wg], layout=COLUMNS, optimized=False)
        return found * along_columns(whole)

    def moved(self, taken: Taken, x: Units, share: jax.Array, dg: jax.Array) -> jax.Array:
        """Adds to dg what `x` times its share moves with the decays that factors take."""
        row, column = self.channels.position()
        store_two(self.scaled, x.rows() * share)
        return self.channels.sums(taken(column, row), self.scaled, dg)

    def own(self) -> jax.Array:
        """Returns <dO_i, U_i>, the cotangent of what a token reads of its own."""
        dout, u = self.dout, self.u
        found: Any = 0.0
        for half in halves_of(dout):
            found = found + row_dot(dout.at[:, half], tiles.load(u.at[:, half]))
        return along_rows(found)

    def of_queries(self, dg: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns dq of scaled queries, and dg."""
        dq = shared_product(self.dout, self.state) * self.channels.factor(up_to)
        dg = self.moved(up_to, self.query, dq, dg)
        here = self.anew()
        dq = dq + here.own() * here.key.rows()
        dq, dg = self.over_halvings("key", "query", _Half.reads, dq, dg)
        return dq, dg

    def of_keys(self, dg: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Returns dk of normalized keys, dg, and its share of db."""
        dk = shared_product(self.u, self.dstate) * self.channels.factor(behind)
        dg = self.moved(behind, self.key, dk, dg)
        here = self.anew()
        dk = dk + here.own() * here.query.rows()
        dk, dg = self.over_halvings("query", "key", _Half.read, dk, dg)
        if not self.options.is_delta:
            return dk, dg, None
        here = self.anew()
        # minus what keys get: its factors are negated, as in `corrected` of `hopper_forward.py`
        share = shared_product(here.corrections, here.state) * here.channels.factor(up_to)
        dbeta = row_dot(here.key.ref, share) * -here.key.factor
        share = share * along_rows(-here.beta)
        dg, dk = here.moved(up_to, here.key, share, dg), dk + share
        return self.over_halvings("key", "key", _Half.overlaps, dk, dg, dbeta)

    def over_halvings(
        self, of: str, to: str, plane: Callable[["_Half", Any], jax.Array], found: Any, dg: Any, *dbeta: Any
    ) -> Any:
        """Adds to `found` what rows `to` get of rows `of` by a plane, and so to dg, and to db of overlaps."""

        def halving(number, carry):
            (found, dg, *dbeta), size = carry, lax.shift_left(jnp.int32(1), number)
            here = self.anew(number)
            rows = getattr(here, of).rows()
            store_two(here.scaled, rows * here.channels.factor(to_middle(size)))
            share = here.channels.exact(plane(here, size), here.scaled)
            # factors anew, not to keep them in registers
            here = self.anew(number)
            share = share * here.channels.factor(to_middle(size))
            if dbeta:
                token = mosaic_gpu.load(self.at.of_rows.at[0], layout=ROWS, optimized=False)
                is_later = (token.astype(jnp.int32) & plgpu.layout_cast(jnp.full(CHUNK, size), ROWS)) != 0
                dot = row_dot(here.key.ref, share) * -here.key.factor
                dbeta = [dbeta[0] + jnp.where(is_later, dot, 0.0)]
                share = share * along_rows(jnp.where(is_later, -here.beta, -1.0))
            return found + share, here.moved(to_middle(size), getattr(here, to), share, dg), *dbeta

        return lax.fori_loop(jnp.int32(0), jnp.int32(HALVINGS), halving, (found, dg, *dbeta))

    def reads(self, size: Any) -> jax.Array:
        """Returns dP of a halving."""
        row, column = self.channels.position()
        return jnp.where(is_parted(size, row, column), shared_product(self.dout, self.u.T), 0.0)

    def read(self, size: Any) -> jax.Array:
        """Returns dP of a halving, transposed."""
        row, column = self.channels.position()
        return jnp.where(is_parted(size, column, row), shared_product(self.u, self.dout.T), 0.0)

    def overlaps(self, size: Any) -> jax.Array:
        """Returns - dA of the later rows of a halving, and - b dA transposed of the earlier ones."""
        corrections, u, (row, column) = self.corrections, self.u, self.channels.position()
        beta = tiles.numbers(self.at.of_columns, COLUMNS).beta
        later = jnp.where(is_parted(size, row, column), shared_product(corrections, u.T), 0.0)
        earlier = shared_product(u, corrections.T) * along_columns(beta)
        return jnp.where(is_parted(size, column, row), earlier, later)

    def finish(
        self, number: int, of: str, y: jax.Array, scale: float, there: Any, refs: Sequence[Any]
    ) -> None:
        """Writes the gradients of rows `of` from `y`, what they get times their factor, by way of `there`.

        With the l2 norm, by its derivative: r (y - r^2 x <x, y>), r = factor / scale, `scale` without a norm.
        """
        x, has_norm = getattr(self, of), self.options.l2_norm_epsilon is not None
        if has_norm and abs(scale) >= jnp.finfo(jnp.float32).tiny:  # else the factor is 0
            dots = self.at.dots.at[number]
            dot = row_dot(x.ref, y)
            if self.halves > 1:
                mine = dots.at[self.wg]
                mine[...] = dot
                mosaic_gpu.meet(self.met)
                of_half = lambda h: mosaic_gpu.load(dots.at[h], layout=ROWS, optimized=False)
                dot = sum(map(of_half, range(1, self.halves)), of_half(0))
            r = x.factor * (1 / scale)
            y = y - tiles.load(x.ref) * along_rows(dot * r * r)
        there = there.at[pl.ds(0, CHUNK)]
        parts = two_numbers(y * along_rows(x.factor), there.dtype)
        for i, ref in enumerate(refs):
            if i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            there[...] = parts[i]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(there, ref)
