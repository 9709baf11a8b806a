"""Forward of linear attention on TPUs: chunk after chunk, with the states in vector memory.

Equations (4) to (6) of `forward.py`, by the chunks of `tpu_chunks.py`. The state before each group of
chunks is saved.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.linear_attention.kernels import tpu_chunks as tpu
from jax_attn_bwd.ops.linear_attention.kernels import tpu_decays as chunk
from jax_attn_bwd.ops.linear_attention.kernels import tpu_erasing
from jax_attn_bwd.ops.linear_attention.kernels.inputs import result_specs
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import Chunks, Stages, product
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import unsupported as supports
from jax_attn_bwd.ops.linear_attention.kernels.tpu_decays import ChunkOfHead, DecaysOfChannels
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options, Result

__all__ = ["forward", "of_shard", "supports"]


def forward(plan: Plan, operands: Operands) -> Result:
    """Returns the output, the state after the last token, and those before each group of chunks."""
    return _forward(plan.options, plan.side_by_side, pallas.is_interpreted(mosaic_tpu.NAME), operands)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(options, between, interpret, operands):
    """Runs the kernel where the operands lie."""
    run = partial(of_shard, options, between, interpret)
    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, result_specs, given))
    return tie(call(operands), operands)


def of_shard(options: Options, between: int, interpret: bool, operands: Operands) -> Result:
    """Returns the results on one device, and the state before every `between` chunks."""
    chunks = Chunks.of(options, operands)
    _, K, N, H, Hv = chunks.sizes
    (B, parts, count), width, value_width = chunks.grid, chunks.width, chunks.value_width
    arrays = [chunks.lay(operands.query), chunks.lay(operands.key), chunks.lay_values(operands.value)]
    arrays.append(tpu.decays(chunks, operands).rows)
    arrays += (of_channels := DecaysOfChannels.arrays(chunks, operands) or ())
    arrays += (erasing := chunks.of_what_erases(operands))
    initial = operands.initial_state
    if initial is not None:
        arrays.append(chunks.lay_state(initial))
    arrays = pallas.vary_alike(arrays)

    same = lambda c: c
    of_keys = chunks.of_tokens(chunks.key_heads * width, same)
    of_values = chunks.of_tokens(chunks.value_heads * value_width, same)
    of_state, state = chunks.of_state(), (N, width, value_width)
    out, final, states = mosaic_tpu.launch(
        partial(_kernel, chunks, between, initial is not None),
        "linear_attention_forward",
        interpret=interpret,
        grid=(B, parts, count),
        parallel=2,
        in_specs=[
            of_keys, of_keys, of_values, chunks.of_rows(same),
            *(DecaysOfChannels.specs(chunks, same) if of_channels else ()),
            *[chunks.of_tokens(chunks.value_heads * width, same)] * len(erasing),
            *[of_state] * (initial is not None),
        ],
        out_specs=[of_values, of_state, chunks.of_states(lambda c: lax.div(c, np.int32(between)))],
        out_type=[
            pallas.out_type(arrays[2].shape, operands.value.dtype, arrays),
            pallas.out_type((B, *state), jnp.float32, arrays),
            pallas.out_type((ceil_div(count, between), B, *state), jnp.float32, arrays),
        ],
        scratch=[pltpu.VMEM((chunks.value_heads, width, value_width), jnp.float32)],
    )(*arrays)  # fmt: skip
    states = chunks.unlay_state(states)
    states = states.reshape(*states.shape[:-3], K, chunks.groups, H, Hv)
    return Result(chunks.unlay(out, N, Hv), chunks.unlay_state(final), states)


def _kernel(
    chunks: Chunks, between: int, has_initial: bool, query: Any, key: Any, value: Any, rows: Any, *refs: Any
) -> None:
    """Passes one chunk of each head of a step."""
    *inputs, out, final, states, state = refs
    decays = DecaysOfChannels(inputs.pop(0), inputs.pop(0)) if chunks.of_channels else None
    erasing = (inputs.pop(0), inputs.pop(0)) if chunks.options.is_erasing else None

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = inputs[0][...] if has_initial else jnp.zeros_like(state)

    @pl.when(lax.rem(pl.program_id(2), np.int32(between)) == 0)
    def _():
        states[...] = state[...]

    numbers, keys = chunk.read_keys(chunks, query, key, rows)

    def pass_head(n: int) -> Stages[None]:
        of, v = chunk.read_value(chunks, numbers[n], value, n)
        own, of_head = keys[n // chunks.groups], None if decays is None else decays.of_head(chunks, n)
        within = yield from chunk.inside(chunks, own, numbers[n], of_head)
        if erasing is None:
            found, state[n] = yield from _of_head(chunks, within, v, state[n])
        else:
            given = tpu_erasing.read(chunks, within.column, erasing, n)
            erased = yield from tpu_erasing.inside(chunks, own, within, given)
            found, state[n] = yield from tpu_erasing.forward(chunks, within, erased, v, state[n])
        out[:, of] = found.astype(out.dtype)

    tpu.in_lockstep([pass_head(n) for n in range(chunks.value_heads)])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        final[...] = state[...]


def _of_head(
    chunks: Chunks, within: ChunkOfHead, value: jax.Array, before: jax.Array
) -> Stages[tuple[jax.Array, jax.Array]]:
    """Returns the output `[C, Hv]`, and the state behind the chunk from that before it, `[H, Hv]`."""
    u = value
    if chunks.options.is_delta:
        *_, u = yield from chunk.corrections(chunks, within, value, before)
    yield
    out = within.reader.times(chunks, before) + product(chunks, within.reads, u)
    yield
    return out, within.whole * before + within.at_end.transposed_times(chunks, u)
