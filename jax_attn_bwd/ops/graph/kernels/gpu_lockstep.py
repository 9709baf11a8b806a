"""Narrow rows: a warpgroup takes several segments of like length, which walk over their edges in lockstep.

A program is one block of heads, `[H, D]` of 8 to 64 numbers, and R = 1024 / (H D) segments: a thread holds
eight neighbouring numbers of one head of one of them, so that a sum over D is up to three shuffles and a
row is read by as many lanes as it fills. Each lane reads at an index of its own (`gpu_lanes`).

Segments take turns by length, the longest first (`turns`), so that those of one program end together. One
that ends sooner finds its last edge again, with a factor of 0; one without edges reads the rows of number 0
and keeps nothing of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd.ops.graph.kernels import gpu_lanes
from jax_attn_bwd.ops.graph.kernels.gpu_plan import (
    EDGES,
    THREADS,
    Inputs,
    Plan,
    Walked,
    heads_of_block,
    registers,
)
from jax_attn_bwd.ops.graph.kernels.gpu_segments import Segments

_HELD = 8  # neighbouring numbers of a row, by a thread


class Turns(NamedTuple):
    """The segments in the order in which programs take them."""

    order: jax.Array  # int32 [programs * R], of segments; past the end: none
    longest: jax.Array  # int32 [programs], the edges of the longest segment of each


def turns(at: Segments, nodes: int, heads: tuple[int, int]) -> Turns:
    """The longest first; what is no segment comes last."""
    S, R = at.node.shape[0], _together(*heads)
    shorter = jnp.where(at.node < nodes, at.begin - at.end, 1)
    position = lax.broadcasted_iota(jnp.int32, (S,), 0)
    shorter, order = lax.sort((shorter, position), num_keys=1)
    extra = (0, -S % R)
    shorter, order = jnp.pad(shorter, extra, constant_values=1), jnp.pad(order, extra, constant_values=S)
    return Turns(order, jnp.maximum(-shorter[::R], 0))


def _together(H: int, D: int) -> int:
    """R."""
    return THREADS * _HELD // (heads_of_block(H, D) * D)


class _Lanes:
    """What a program reads and writes at an index of each segment, `[R]`: arrays `[R, height(, D)]`."""

    def __init__(self, H: int, D: int, first: jax.Array, interpret: bool):
        height, R = heads_of_block(H, D), _together(H, D)
        row = registers(((R, height, D), (R // 4, height, D), (1, 1, _HELD)), (-9,), (-6, -5, -4))
        self.interpret, self.elements, self.first = interpret, D, first
        self.shapes = (R,), (R, height), (R, height, D)
        self.layouts = row.reduce((1, 2)), row.reduce(2), row

    def full(self, rank: int, value: float) -> jax.Array:
        """An array of one number."""
        return plgpu.layout_cast(jnp.full(self.shapes[rank - 1], value, jnp.float32), self.layouts[rank - 1])

    def spread(self, x: jax.Array, rank: int) -> jax.Array:
        """A number of each segment for all of its heads, or of its row."""
        return lax.broadcast_in_dim(x, self.shapes[rank - 1], (0,)) if rank > 1 else x

    def iota(self, rank: int, axis: int) -> jax.Array:
        shape, layout = self.shapes[rank - 1], self.layouts[rank - 1]
        return gpu_lanes.iota(shape, axis, layout, self.interpret)

    def column(self, rank: int) -> jax.Array:
        """Where the block lies in the numbers of the heads, or in a row."""
        head = self.iota(rank, 1) + self.first
        return head if rank == 2 else head * self.elements + self.iota(3, 2)

    def load(self, ref: Any, index: jax.Array) -> jax.Array:
        """The rows of `ref` at `index`, float32."""
        rank = ref.ndim
        row, column = self.spread(index, rank), self.column(rank)
        x = gpu_lanes.gather(ref, row, column, self.layouts[rank - 1], self.interpret)
        return x.astype(jnp.float32)

    def index(self, ref: Any, index: jax.Array) -> jax.Array:
        """The numbers of `ref`, `[n]`, at `index`."""
        return gpu_lanes.gather(ref, index, None, self.layouts[0], self.interpret)

    def store(self, ref: Any, index: jax.Array, x: jax.Array, where: jax.Array) -> None:
        """Writes `x` to the rows of `ref` at `index`, of the segments `where` holds not 0."""
        rank = ref.ndim
        row, where, column = self.spread(index, rank), self.spread(where, rank), self.column(rank)
        gpu_lanes.scatter(ref, row, column, x, self.layouts[rank - 1], where, self.interpret)


def program(
    plan: Plan,
    refs: Inputs,
    by_turns: Turns,
    outputs: Walked,
    nodes: int,
    heads: tuple[int, int],
    interpret: bool,
) -> None:
    """One program of the kernel of `plan`."""
    H, D = heads
    height, R = heads_of_block(H, D), _together(H, D)
    number, blocks = lax.axis_index("program"), jnp.int32(H // height)
    turn, at = lax.div(number, blocks), refs.segments
    lanes = _Lanes(H, D, lax.rem(number, blocks) * height, interpret)
    S = at.node.shape[0]

    def chosen(condition):
        return jnp.where(condition, jnp.int32(1), jnp.int32(0))

    order = by_turns.order.at[pl.ds(turn * R, R)]
    segment = mosaic_gpu.load(order, layout=lanes.layouts[0], optimized=False)
    known = jnp.minimum(segment, S - 1)
    node, begin, end, place = (lanes.index(ref, known) for ref in (at.node, at.begin, at.end, at.place))
    exists = chosen(segment < S) * chosen(node < nodes)
    node, end = jnp.where(exists > 0, node, 0), jnp.where(exists > 0, end, begin)
    some = chosen(end > begin)
    only_of = lambda index: jnp.where(some > 0, index, 0)
    own = {name: lanes.load(ref, node) for name, ref in refs.own.items()}
    own |= {name: lanes.load(ref, node * 0) for name, ref in refs.shared.items()}
    by_number = bool(refs.edge or outputs.edges)

    def step(k, carry):
        positions = [begin + (k * EDGES + u) for u in range(EDGES)]
        slots = [only_of(jnp.minimum(p, end - 1)) for p in positions]
        others = [only_of(lanes.index(at.other, slot)) for slot in slots]
        numbers = [only_of(lanes.index(at.number, slot)) if by_number else None for slot in slots]
        read = [{n: lanes.load(ref, index) for n, ref in refs.other.items()} for index in others]
        for edge, index in zip(read, numbers, strict=True):
            edge |= {n: lanes.load(ref, index) for n, ref in refs.edge.items()}
        there = [chosen(p < end) for p in positions]
        carry, written = plan.step(own, read, [lanes.spread(x.astype(jnp.float32), 2) for x in there], carry)
        for index, edge, where in zip(numbers, written, there, strict=True):
            for n, x in edge.items():
                lanes.store(outputs.edges[n], index, x, where)
        return carry

    begins = {**plan.numbers, **plan.rows}
    start = {n: lanes.full(3 if plan.is_row(n) else 2, value) for n, value in begins.items()}
    count = lax.div(by_turns.longest[turn] + (EDGES - 1), jnp.int32(EDGES))
    carry = lax.fori_loop(jnp.int32(0), count, step, start)
    carry = {n: jnp.where(lanes.spread(some, x.ndim) > 0, x, start[n]) for n, x in carry.items()}
    for name, ref in outputs.segments.items():
        lanes.store(ref, known, carry[name], exists)
    whole = exists * chosen(place < 0)
    results = plan.finish(carry)
    for name, ref in outputs.nodes.items():
        lanes.store(ref, node, results[name], whole)
    for name, ref in outputs.places.items():
        lanes.store(ref, place, carry[name], exists - whole)
