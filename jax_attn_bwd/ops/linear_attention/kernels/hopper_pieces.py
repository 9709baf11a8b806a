"""Pieces of the walks of the Hopper kernels of linear attention, side by side where few programs walk.

What a walk makes of the state before some chunks is affine, S1 = A S0 + B. For all pieces of a walk but its
last one, `ends` computes B, the state behind the piece from the state 0, and A: a number without a delta
rule, else what a walk over values of 0 makes of the state I, in a warpgroup of its own beside that of B. A
program of the walk then starts with the state before its piece, which `start` composes of those before it.
Backward the states are cotangents, the walk goes from the last chunk to the first, and A is its transpose.

No decay is divided by: like the walk, a piece multiplies by exponentials of sums that are at most 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COMPUTE_REGISTERS, LOAD_REGISTERS, ROWS, WGMMA, tile
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import CHUNK, SIZE, ChunkArrays
from jax_attn_bwd.ops.linear_attention.kernels.inputs import Inputs
from jax_attn_bwd.ops.linear_attention.plan import Plan

_STAGES = 2  # at least WIDEST[0] // SIZE: `start` loads A into the rings


@dataclass(frozen=True)
class CutWalk:
    """How a walk over `total` chunks is cut: `count` pieces of `length`, the last of them maybe shorter."""

    count: int
    length: int
    total: int

    def steps(self, piece: Any) -> tuple[Any, Any]:
        """Returns the first step of a piece, in the order of the walk, and how many it has."""
        first = piece * self.length
        return first, lax.min(jnp.int32(self.length), jnp.int32(self.total) - first)


def cut(plan: Plan, T: int) -> CutWalk:
    """Returns how a walk over T tokens is cut: states are saved before the same chunks as without pieces."""
    total = T // CHUNK
    length = plan.side_by_side * ceil_div(total // plan.side_by_side, plan.pieces)
    return CutWalk(ceil_div(total, length), length, total)


class PieceEnds(NamedTuple):
    """A and B of all pieces but the last one, in the order of the walk."""

    moved: Any  # B, float32 [pieces - 1, batch, N, H, Hv]
    kept: Any  # transposed A as two numbers, [2, pieces - 1, batch, N, H, H]; a number: float32 [..., CHUNK]


def ends(
    plan: Plan, interpret: bool, given: Inputs, inside: tiles.InsideChunks, step: Callable[..., jax.Array],
    is_reverse: bool,
) -> PieceEnds | None:  # fmt: skip
    """Computes the ends of pieces; None where there is one piece.

    `step(chunk, state, spare)` passes a chunk, whose `value` may be None for zeros. `is_reverse` tells that
    the last chunk comes first.
    """
    (B, T, _, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    pieces, is_delta = cut(plan, T), plan.options.is_delta
    if pieces.count == 1:
        return None
    out_type, before = partial(pallas.out_type, operands=given), pieces.count - 1
    kept = (2, before, B, N, H, H) if is_delta else (before, B, N, CHUNK)
    spare = tiles.spare_tile(interpret, H, dtype)
    unread = () if is_reverse and is_delta else ("key" if is_reverse else "query", "reads")
    scratch = tiles.rings(_STAGES, given, inside)
    rings = scratch["rings"]._replace(**dict.fromkeys(unread))
    scratch |= dict(
        rings=rings,
        loaded=plgpu.Barrier(num_arrivals=len(jax.tree.leaves(rings)), num_barriers=_STAGES),
        free=plgpu.Barrier(num_arrivals=2 if is_delta else 1, num_barriers=_STAGES),
        state_tile=tile((H, SIZE), jnp.float32),
        kept_tiles=[tile((SIZE, H), dtype)] * 2 if is_delta else [plgpu.SMEM((CHUNK,), jnp.float32)],
        spares=[*spare.values()] * 2,
    )
    found = mosaic_gpu.launch(
        partial(_ends_kernel, pieces, step, is_reverse, is_delta),
        f"linear_attention_{'reverse_' if is_reverse else ''}ends",
        interpret=interpret,
        out_type=[
            out_type((before, B, N, H, Hv), jnp.float32),
            out_type(kept, dtype if is_delta else jnp.float32),
        ],
        scratch=scratch,
        grid={"column": (max(H, Hv) if is_delta else Hv) // SIZE, "piece": before, "head": N, "batch": B},
        warpgroups=3 if is_delta else 2,
    )(given._replace(state=None), inside)
    return PieceEnds(*found)


def _ends_kernel(
    pieces: CutWalk, step: Callable[..., jax.Array], is_reverse: bool, is_delta: bool, given: Inputs,
    inside: tiles.InsideChunks, moved_ref, kept_ref, *, rings, loaded, free, state_tile, kept_tiles, spares,
):  # fmt: skip
    """Walks over a piece from the state 0, and under a delta rule from the state I: 64 columns of each."""
    b, n, piece, column, wg = (lax.axis_index(x) for x in ("batch", "head", "piece", "column", "wg"))
    H, of_values = given.key.shape[-1], given.value.shape[-1] // SIZE
    columns = pl.ds(lax.min(column, jnp.int32(of_values - 1)) * SIZE, SIZE)
    first, _ = pieces.steps(piece)

    @pl.when(wg == (2 if is_delta else 1))
    def _load():
        if is_delta:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        number = lambda t: pieces.total - 1 - first - t if is_reverse else first + t

        def sources(t):
            chunk = tiles.sources(given, inside, b, n, columns, number(t))
            return ChunkArrays(*(None if ring is None else x for x, ring in zip(chunk, rings, strict=True)))

        tiles.stream(jnp.int32(pieces.length), _STAGES, sources, rings, loaded, free)

    def walk(state, has_values, spare):
        """Returns the state behind the piece, and the sum of its decays."""

        def passed(t, carry):
            state, decays = carry
            slot = lax.rem(t, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            chunk = tiles.at_slot(rings, slot)
            decays = decays + chunk.number_rows[0, CHUNK - 1]
            state = step(chunk if has_values else chunk._replace(value=None), state, spare)
            plgpu.barrier_arrive(free.at[slot])
            return state, decays

        return lax.fori_loop(jnp.int32(0), jnp.int32(pieces.length), passed, (state, jnp.float32(0)))

    @pl.when(wg == 0)
    def _move():
        if is_delta:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        state, decays = walk(tiles.zeros(SIZE, H), True, spares[0] if spares else None)

        @pl.when(column < of_values)
        def _write():
            tiles.store_transposed(state_tile, state)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_tile, moved_ref.at[piece, b, n, :, columns])
            plgpu.wait_smem_to_gmem(0)

        if not is_delta:

            @pl.when(column == 0)
            def _write_decay():
                (line,) = kept_tiles
                line[...] = plgpu.layout_cast(jnp.full((CHUNK,), jnp.exp(decays)), ROWS)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(line, kept_ref.at[piece, b, n])
                plgpu.wait_smem_to_gmem(0)

    if is_delta:

        @pl.when(wg == 1)
        def _keep():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            row, of_row = (plgpu.broadcasted_iota(jnp.int32, (SIZE, H), i, layout=WGMMA) for i in (0, 1))
            start = jnp.where(row + column * SIZE == of_row, 1.0, 0.0)
            state, _ = walk(start, False, spares[1] if spares else None)

            @pl.when(column < H // SIZE)
            def _write():
                tiles.store_two(kept_tiles, state)
                for i, there in enumerate(kept_tiles):
                    source = kept_ref.at[i, piece, b, n, pl.ds(column * SIZE, SIZE)]
                    plgpu.copy_smem_to_gmem(there, source)
                plgpu.wait_smem_to_gmem(0)


def barriers(ends: PieceEnds | None) -> dict[str, Any]:
    """Returns the barriers that `start` takes: for what it loads, and for the loads of the walk behind it."""
    if ends is None:
        return {}
    arrivals = 1 + (2 * (ends.kept.shape[-1] // SIZE) if ends.kept.ndim == 6 else 1)
    return dict(started=[plgpu.Barrier(num_arrivals=arrivals), plgpu.Barrier()])


def start(
    ends: PieceEnds | None, state: jax.Array, piece: Any, here: Any, rings: ChunkArrays, state_tile: Any,
    started: Any, spare: Any,
) -> jax.Array:  # fmt: skip
    """Returns the transposed state before a piece, from that before the walk; `here`: (b, n, columns).

    A goes into the rings of the walk, which fills them afterwards.
    """
    if ends is None:
        return state
    (b, n, columns), (arrived, may_load) = here, started
    narrow_spare = None if spare is None else spare.at[:, pl.ds(0, SIZE)]

    def passed(i, state):
        plgpu.commit_smem()  # nobody reads what is loaded next
        plgpu.copy_gmem_to_smem(ends.moved.at[i, b, n, :, columns], state_tile, arrived)
        if ends.kept.ndim == 4:
            line = rings.number_rows.at[0, 0]
            plgpu.copy_gmem_to_smem(ends.kept.at[i, b, n], line, arrived)
            plgpu.barrier_wait(arrived)
            return state * line[0] + tiles.load_transposed(state_tile)
        parts = range(ends.kept.shape[-1] // SIZE)
        for number, ring in enumerate((rings.query, rings.key)):
            for j in parts:
                source = ends.kept.at[number, i, b, n, pl.ds(j * SIZE, SIZE)]
                plgpu.copy_gmem_to_smem(source, ring.at[j], arrived)
        plgpu.barrier_wait(arrived)
        halves = [lax.slice(state, (0, j * SIZE), (SIZE, (j + 1) * SIZE)) for j in parts]
        factors = [tiles.two_numbers(x, rings.key.dtype) for x in halves]

        def multiply(acc):
            for j, (narrow, rest) in enumerate(factors):
                mosaic_gpu.product(acc, narrow, rings.query.at[j], narrow_spare)
                mosaic_gpu.product(acc, rest, rings.query.at[j], narrow_spare)
                mosaic_gpu.product(acc, narrow, rings.key.at[j], narrow_spare)
            return acc[...]

        found = pl.run_scoped(multiply, plgpu.ACC(state.shape, jnp.float32))
        return found + tiles.load_transposed(state_tile)

    state = lax.fori_loop(jnp.int32(0), piece, passed, state)
    plgpu.commit_smem()
    plgpu.barrier_arrive(may_load)
    return state


def wait_for_start(started: Any) -> None:
    """Waits, in the warpgroup that loads, until the rings are free."""
    if started is not None:
        plgpu.barrier_wait(started[1])
