"""Walks over edges, as every kernel of graph attention does; here a warpgroup holds one row.

A program is one segment and one block of heads, `[H, D]` of at most 512 numbers: a thread holds up to four
neighbouring ones of a head, eight of the widest. Rows of nodes and edges are read at scalar indices, straight
into registers: four edges at a time, all their loads first, so that as many rows are under way. Heads stand
along warps and lanes, so that a sum over D is a few shuffles; blocks of one or two heads are held by all four
or by two warps alike. Rows of fewer than 128 numbers: `gpu_lockstep`.

A kernel itself is a `Body`: functions of arrays in registers, `[H]` and `[H, D]`, float32. Behind the last
edge the loop finds that edge again, with a factor of 0: nothing is read out of bounds, and what is written
for an edge is written twice alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.pallas import out_type, vary_alike
from jax_attn_bwd.ops.graph.kernels import gpu_lockstep
from jax_attn_bwd.ops.graph.kernels.gpu_body import (
    EDGES,
    Body,
    Call,
    Inputs,
    Walked,
    heads_of_block,
    is_narrow,
    registers,
)


def layout(H: int, D: int) -> Any:
    """Lays a block out in registers: heads along warps, then lanes; D along the lanes that are left.

    Blocks of fewer than four heads are held several times.
    """
    warps, lanes = min(H, 4), 32 // max(H // 4, 1)
    repeated = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    return registers(
        ((H, D), (max(H // 4, 1), D), (D // lanes,)),
        (*((-5,) if warps > 1 else ()), *repeated),
        (-3, -2) if H > 4 else (-2,),
    )


def walk(
    body: Body, inputs: Inputs, nodes: int, edges: int, heads: tuple[int, int], interpret: bool
) -> Walked:
    """Runs `body` over every segment; `heads` are H and D of the rows."""
    # what each program leaves: by node, by part of a node, by edge and by segment
    S, X, (H, D) = inputs.segments.node.shape[0], inputs.segments.owner.shape[0], heads
    segments = inputs.segments._replace(owner=None, hubs=None, tables=())  # read when the kernel is done
    inputs = vary_alike(inputs._replace(segments=segments))
    carried = {name: (jnp.float32, body.is_row(name)) for name in (*body.numbers, *body.rows)}
    summed = {name: kind for name, kind in carried.items() if name not in body.by_segment}

    def types(count, kinds):
        shape = lambda is_row: (count, H, D) if is_row else (count, H)
        return {n: out_type(shape(is_row), dtype, inputs) for n, (dtype, is_row) in kinds.items()}

    outputs = Walked(
        types(nodes, summed if body.out is None else body.out),
        types(X, summed if X else {}),
        types(edges, body.written),
        types(S, {name: carried[name] for name in body.by_segment}),
    )
    leaves, structure = jax.tree.flatten(outputs)

    # a program for each segment, or for each turn of several, and for each block of heads
    narrow = is_narrow(H, D)
    blocks, program = H // heads_of_block(H, D), gpu_lockstep.program if narrow else _program
    programs = S
    if narrow:
        inputs = inputs._replace(shared={name: x[None] for name, x in inputs.shared.items()})
        programs = ceil_div(S, gpu_lockstep.together(H, D))

    def kernel(refs, *out_refs):
        outputs = jax.tree.unflatten(structure, out_refs)
        program(body, refs, outputs, Call(nodes, heads, interpret))

    run = mosaic_gpu.launch(
        kernel,
        body.name,
        interpret=interpret,
        out_type=leaves,
        scratch=(),
        grid={"program": programs * blocks},
    )
    return jax.tree.unflatten(structure, run(inputs))


def _program(body: Body, refs: Inputs, outputs: Walked, call: Call) -> None:
    # the segment and the heads of this program
    nodes, (H, D), _ = call
    height = heads_of_block(H, D)
    program, blocks = lax.axis_index("program"), jnp.int32(H // height)
    segment, block = lax.div(program, blocks), pl.ds(lax.rem(program, blocks) * height, height)
    row = layout(height, D)
    number, at = row.reduce(1), refs.segments
    node = at.node[segment]

    def load(ref, *index):
        part = ref.at[(*index, block)]
        x = mosaic_gpu.load(part, layout=row if ref.ndim == len(index) + 2 else number, optimized=False)
        return x.astype(jnp.float32)

    def store(ref, index, x):
        plgpu.store(ref.at[index, block], x.astype(ref.dtype), optimized=False)

    def full(name, value):
        shape, kind = ((height, D), row) if body.is_row(name) else ((height,), number)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), kind)

    @pl.when(node < nodes)
    def _walk():
        # the node's own rows stay in registers
        own = {name: load(ref, node) for name, ref in refs.own.items()}
        own |= {name: load(ref) for name, ref in refs.shared.items()}
        begin, end = at.begin[segment], at.end[segment]
        by_number = bool(refs.edge or outputs.edges)

        # four edges: their indices, then all loads, then the arithmetic, then what is written
        def step(k, carry):
            positions = [begin + k * EDGES + u for u in range(EDGES)]
            slots = [jnp.minimum(p, end - 1) for p in positions]
            numbers = [refs.numbers[slot] if by_number else None for slot in slots]
            read = [{n: load(ref, refs.ends[slot]) for n, ref in refs.other.items()} for slot in slots]
            for edge, index in zip(read, numbers, strict=True):
                edge |= {n: load(ref, index) for n, ref in refs.edge.items()}
            factors = [jnp.where(p < end, np.float32(1.0), np.float32(0.0)) for p in positions]
            carry, written = body.step(own, read, factors, carry)
            for index, edge in zip(numbers, written, strict=True):
                for n, x in edge.items():
                    store(outputs.edges[n], index, x)
            return carry

        # all edges of the segment; a whole node gets its results, a part of one its carry
        start = {name: full(name, value) for name, value in {**body.numbers, **body.rows}.items()}
        count = lax.div(end - begin + (EDGES - 1), jnp.int32(EDGES))
        carry = lax.fori_loop(jnp.int32(0), count, step, start)
        for name, ref in outputs.segments.items():
            store(ref, segment, carry[name])

        def whole():
            results = body.finish(carry)
            for name, ref in outputs.nodes.items():
                store(ref, node, results[name])

        if at.spill is None:
            whole()
            return
        spill = at.spill[segment]
        pl.when(spill < 0)(whole)

        @pl.when(spill >= 0)
        def _part():
            for name, ref in outputs.spills.items():
                store(ref, spill, carry[name])
