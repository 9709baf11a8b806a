"""Hopper forward of linear attention (Pallas Mosaic GPU).

Two kernels. One computes the planes P and M of all chunks, side by side
(`hopper_tiles.py`, `hopper_channels.py`). The other walks
over the chunks, a program for each batch entry, value head and 64 columns of values: a warpgroup loads what
is read of a chunk into a ring (TMA), another holds the transposed state [64, H] in registers and computes

    U^T = ((V^T - S0^T K^^T) b) M^T,   O^T = S0^T Q^^T + U^T P^T,   S1^T = exp(c_C) S0^T + U^T K~,

(5) and (6) of `forward.py`. So transposed, whatever a product gives is the first factor of the next one,
without a way through shared memory, and each number of a token belongs to a column.

Where few programs would walk, each walks over a piece of the sequence (`hopper_pieces.py`).

References:
  As in `forward.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, tile
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.linear_attention.kernels import hopper_channels as channels
from jax_attn_bwd.ops.linear_attention.kernels import hopper_pieces as pieces
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels import inputs
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import CHUNK, SIZE, along_columns, product
from jax_attn_bwd.ops.linear_attention.kernels.inputs import Inputs
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands, Result

supports = tiles.unsupported
_STAGES = 2


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output, the final state, and those that the backward starts from."""
    run = partial(_forward, plan, pallas.is_interpreted(mosaic_gpu.NAME))
    return tie(pallas.on_local_shards(run, inputs.result_specs, (operands,)), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(plan, interpret, operands):
    given = pallas.vary_alike(inputs.of_call(plan, operands, (SIZE, SIZE)))
    (B, T, _, H), (N, Hv) = given.key.shape, given.value.shape[-2:]
    inside = channels.inside(plan.options, interpret, given, "planes")
    ends, cut = pieces.ends(plan, interpret, given, inside, _step, False), pieces.cut(plan, T)
    out_type = partial(pallas.out_type, operands=given)
    state = tile((H, SIZE), jnp.float32)
    out, final, states = mosaic_gpu.launch(
        partial(_kernel, plan.side_by_side, cut),
        "linear_attention_walk",
        interpret=interpret,
        out_type=[
            out_type((B, T, N, Hv), given.value.dtype),
            out_type((B, N, H, Hv), jnp.float32),
            out_type((T // (plan.side_by_side * CHUNK), B, N, H, Hv), jnp.float32),
        ],
        scratch=tiles.rings(_STAGES, given, inside)
        | dict(out_tile=tile((CHUNK, SIZE), given.value.dtype), state_tile=state, first=plgpu.Barrier())
        | pieces.barriers(ends)
        | tiles.spare_tile(interpret, H, given.value.dtype),
        grid={"column": Hv // SIZE, "piece": cut.count, "head": N, "batch": B},
        warpgroups=2,
    )(given._replace(decays=None), inside, ends)
    return inputs.result(operands, out, final, states)


def _kernel(
    between: int, cut: pieces.CutWalk, given: Inputs, inside: tiles.InsideChunks, ends: Any, out_ref,
    final_ref, states_ref, *, rings, loaded, free, out_tile, state_tile, first, started=None, spare=None,
):  # fmt: skip
    """Walks over a piece of 64 columns of one value head; a state is saved before each `between` chunks."""
    b, n, piece, wg = (lax.axis_index(name) for name in ("batch", "head", "piece", "wg"))
    columns = pl.ds(lax.axis_index("column") * SIZE, SIZE)
    start_of_piece, count = cut.steps(piece)

    @pl.when(wg == 1)
    def _load():
        pieces.wait_for_start(started)
        sources = partial(tiles.sources, given, inside, b, n, columns)
        tiles.stream(count, _STAGES, lambda t: sources(start_of_piece + t), rings, loaded, free)

    @pl.when(wg == 0)
    def _compute():
        if given.state is None:
            start = tiles.zeros(SIZE, given.key.shape[-1])
        else:
            start = tiles.load_state(given.state.at[b, n, :, columns], state_tile, first)
        start = pieces.start(ends, start, piece, (b, n, columns), rings, state_tile, started, spare)

        def step(t, state):
            slot = lax.rem(t, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(lax.rem(t, jnp.int32(between)) == 0)
            def _save():
                tiles.store_transposed(state_tile, state)
                plgpu.commit_smem()
                group = lax.div(start_of_piece + t, jnp.int32(between))
                plgpu.copy_smem_to_gmem(state_tile, states_ref.at[group, b, n, :, columns])

            chunk = tiles.at_slot(rings, slot)
            u = corrected(chunk, state, spare)
            out = product(state, chunk.query.T, spare)
            out = chunk.from_start(chunk.numbers(COLUMNS)).times_factor(out)
            out = product(u, chunk.reads.T, spare, out)
            state = passed(chunk, state, u, spare)
            plgpu.barrier_arrive(free.at[slot])
            tiles.store_transposed(out_tile, out)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile, out_ref.at[b, tiles.tokens(start_of_piece + t), n, columns])
            return state

        state = lax.fori_loop(jnp.int32(0), count, step, start)

        @pl.when(piece == cut.count - 1)
        def _final():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tiles.store_transposed(state_tile, state)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_tile, final_ref.at[b, n, :, columns])

        plgpu.wait_smem_to_gmem(0)


def _step(chunk: tiles.ChunkArrays, state: jax.Array, spare: Any) -> jax.Array:
    """Returns the transposed state behind a chunk."""
    return passed(chunk, state, corrected(chunk, state, spare), spare)


def corrected(chunk: tiles.ChunkArrays, state: jax.Array, spare: Any) -> jax.Array:
    """Returns U^T `[SIZE, CHUNK]` of the transposed state before a chunk, by (5); no values are zeros."""
    value: Any = None if chunk.value is None else tiles.load_transposed(chunk.value)
    if chunk.solved is None:
        return value
    numbers = chunk.numbers(COLUMNS)
    # the factor is negated: the sign of a product is changed before that is waited for, which serializes all
    rest = chunk.at_start(numbers).of(state, spare) * along_columns(-numbers.beta)
    if value is not None:
        rest = rest + value * along_columns(numbers.beta)
    return product(rest, chunk.solved.T, spare)


def passed(chunk: tiles.ChunkArrays, state: jax.Array, u: jax.Array, spare: Any) -> jax.Array:
    """Returns the transposed state behind a chunk, by (6)."""
    numbers = chunk.numbers(COLUMNS)
    rows = chunk.at_end(numbers)
    return product(rows.times_factor(u), rows.rows, spare, chunk.decayed(numbers, state))
