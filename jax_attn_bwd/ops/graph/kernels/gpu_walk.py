"""Walks over edges, as every kernel of graph attention does: a warpgroup takes segments of like length.

A program is one block of heads, `[H, D]` of up to 512 numbers, and R = 1024 / (H D) segments, which walk
over their edges in lockstep: a thread holds eight neighbouring numbers of one head of one of them, so that
a row is read by as many lanes as it fills, a sum over D is up to five shuffles, and a warp holds several
nodes where rows have fewer than 256 numbers. Of 512, two warps share a segment's heads. Each lane reads at
an index of its own. Four edges of each segment are taken at a time, all their loads first, so that as many
rows are under way: a program waits for the chip's memory, and for R segments no longer than for one.

Segments come by length, the longest first, so that those of one program end together. One
that ends sooner finds its last edge again, with a factor of 0; one without edges reads the rows of number 0
and keeps nothing of them. Nothing is read out of bounds.

Pallas has no loads and stores at an index of each lane. Where a thread's numbers go is said by arrays of
indices, laid out as the numbers are, so that layouts are the compiler's matter and what remains here is one
addition for each register. Interpreted, the same indices pick from the whole array: what lies outside it is
NaN, and is not written.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.pallas import out_type, vary_alike
from jax_attn_bwd.ops.graph.kernels.gpu_body import EDGES, NUMBERS, Body, Call, Inputs, Walked, heads_of_block

_HELD = 8  # neighbouring numbers of a row, by each of the 128 threads of a warpgroup
_GLOBAL = 1  # the address space
_WIDEST = 16  # bytes of a load


def together(H: int, D: int) -> int:
    """Returns R, the segments of one program."""
    return NUMBERS // (heads_of_block(H, D) * D)


def layout(R: int, height: int, D: int) -> Any:
    """Lays the rows of a block of R segments out in registers: segments along warps, then lanes, then heads.

    Where there are only two segments, heads stand along warps, too.
    """
    apart = min(R, 4)  # the warps that hold different segments
    warps = (-9,) if apart == 4 else (-9, -8)
    tiles = (R, height, D), (R // apart, height * apart // 4, D), (1, 1, _HELD)
    found = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiles), warps, (-6, -5, -4), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(found.tiling.tiles)),
        warp_dims=found.warp_dims,
        lane_dims=found.lane_dims,
        vector_dim=found.vector_dim,
    )


def walk(
    body: Body, inputs: Inputs, nodes: int, edges: int, heads: tuple[int, int], interpret: bool
) -> Walked:
    """Runs `body` over every segment; `heads` are H and D of the rows."""
    # what each program leaves: by node, by part of a node, by edge and by segment
    S, X, (H, D) = inputs.segments.node.shape[0], inputs.segments.owner.shape[0], heads
    segments = inputs.segments._replace(hubs=None, levels=[])  # read when the kernel is done
    segments = segments if X else segments._replace(owner=None)
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

    # a program for each turn of R segments, and for each block of heads
    blocks, programs = H // heads_of_block(H, D), ceil_div(S, together(H, D))
    inputs = inputs._replace(shared={name: x[None] for name, x in inputs.shared.items()})

    def kernel(refs, *out_refs):
        outputs = jax.tree.unflatten(structure, out_refs)
        _program(body, refs, outputs, Call(nodes, heads, interpret))

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
    """Carries out `body` for R segments and one block of heads."""
    nodes, (H, D), interpret = call
    height, R = heads_of_block(H, D), together(H, D)
    number, blocks = lax.axis_index("program"), jnp.int32(H // height)
    start, at = lax.div(number, blocks) * R, refs.segments
    lanes = _Lanes(H, D, lax.rem(number, blocks) * height, interpret)
    S = at.node.shape[0]

    def chosen(condition):
        return jnp.where(condition, jnp.int32(1), jnp.int32(0))

    # the segments of this program, [R], their nodes and edges; one that does not exist reads row 0
    segment = lanes.iota(1, 0) + start
    known = jnp.minimum(segment, S - 1)
    node, begin, length = (lanes.index(ref, known) for ref in (at.node, at.begin, at.length))
    exists = chosen(segment < S) * chosen(node < nodes)
    whole, spill = exists * chosen(node >= 0), -1 - node
    if at.owner is not None:  # a part of a node's edges
        owner = lanes.index(at.owner, jnp.where(exists > whole, spill, 0))
        node = jnp.where(exists > whole, owner, node)
    node, end = jnp.where(exists > 0, node, 0), begin + jnp.where(exists > 0, length, 0)
    some = chosen(end > begin)
    only_of = lambda index: jnp.where(some > 0, index, 0)
    own = {name: lanes.load(ref, node) for name, ref in refs.own.items()}
    own |= {name: lanes.load(ref, node * 0) for name, ref in refs.shared.items()}
    by_number = bool(refs.edge or outputs.edges)

    # four edges of each segment: their indices, then all loads, then the arithmetic, then what is written
    def step(k, carry):
        positions = [begin + (k * EDGES + u) for u in range(EDGES)]
        slots = [only_of(jnp.minimum(p, end - 1)) for p in positions]
        others = [only_of(lanes.index(refs.ends, slot)) for slot in slots]
        numbers = [only_of(lanes.index(refs.numbers, slot)) if by_number else None for slot in slots]
        read = [{n: lanes.load(ref, index) for n, ref in refs.other.items()} for index in others]
        for edge, index in zip(read, numbers, strict=True):
            edge |= {n: lanes.load(ref, index) for n, ref in refs.edge.items()}
        there = [chosen(p < end) for p in positions]
        carry, written = body.step(own, read, [lanes.spread(x.astype(jnp.float32), 2) for x in there], carry)
        for index, edge, where in zip(numbers, written, there, strict=True):
            for n, x in edge.items():
                lanes.store(outputs.edges[n], index, x, where)
        return carry

    # as many steps as the first segment takes, the longest; one of no edge keeps what it starts with
    begins = {**body.numbers, **body.rows}
    empty = {n: lanes.full(3 if body.is_row(n) else 2, value) for n, value in begins.items()}
    count = lax.div(at.length[start].astype(jnp.int32) + (EDGES - 1), jnp.int32(EDGES))
    carry = lax.fori_loop(jnp.int32(0), count, step, empty)
    carry = {n: jnp.where(lanes.spread(some, x.ndim) > 0, x, empty[n]) for n, x in carry.items()}
    # whole nodes get their results, parts of a node their carry; where `exists` is 0 nothing is written
    for name, ref in outputs.segments.items():
        lanes.store(ref, known, carry[name], exists)
    for name, ref in outputs.spills.items():
        lanes.store(ref, spill, carry[name], exists - whole)
    results = body.finish(carry)
    for name, ref in outputs.nodes.items():
        lanes.store(ref, node, results[name], whole)


class _Lanes:
    """Reads and writes of a program at an index of each segment, `[R]`: arrays `[R, height(, D)]`."""

    def __init__(self, H: int, D: int, first: jax.Array, interpret: bool):
        height, R = heads_of_block(H, D), together(H, D)
        row = layout(R, height, D)
        self.interpret, self.elements, self.first = interpret, D, first
        self.shapes = (R,), (R, height), (R, height, D)
        self.layouts = row.reduce((1, 2)), row.reduce(2), row

    def full(self, rank: int, value: float) -> jax.Array:
        """Returns an array of one number."""
        return plgpu.layout_cast(jnp.full(self.shapes[rank - 1], value, jnp.float32), self.layouts[rank - 1])

    def spread(self, x: jax.Array, rank: int) -> jax.Array:
        """Spreads a number of each segment over all of its heads, or over its row."""
        return lax.broadcast_in_dim(x, self.shapes[rank - 1], (0,)) if rank > 1 else x

    def iota(self, rank: int, axis: int) -> jax.Array:
        """Returns the index along `axis`."""
        shape, layout = self.shapes[rank - 1], self.layouts[rank - 1]
        return _iota(shape, axis, layout, self.interpret)

    def column(self, rank: int) -> jax.Array:
        """Returns where the block lies in the numbers of the heads, or in a row."""
        head = self.iota(rank, 1) + self.first
        return head if rank == 2 else head * self.elements + self.iota(3, 2)

    def load(self, ref: Any, index: jax.Array) -> jax.Array:
        """Reads the rows of `ref` at `index`, float32."""
        rank = ref.ndim
        row, column = self.spread(index, rank), self.column(rank)
        x = _gather(ref, row, column, self.layouts[rank - 1], self.interpret)
        return x.astype(jnp.float32)

    def index(self, ref: Any, index: jax.Array) -> jax.Array:
        """Reads the numbers of `ref`, `[n]`, at `index`, int32."""
        return _gather(ref, index, None, self.layouts[0], self.interpret).astype(jnp.int32)

    def store(self, ref: Any, index: jax.Array, x: jax.Array, where: jax.Array) -> None:
        """Writes `x` to the rows of `ref` at `index`, of the segments `where` holds not 0."""
        rank = ref.ndim
        row, where, column = self.spread(index, rank), self.spread(where, rank), self.column(rank)
        _scatter(ref, row, column, x, self.layouts[rank - 1], where, self.interpret)


def _iota(shape: tuple[int, ...], axis: int, layout: Any, interpret: bool) -> jax.Array:
    """Returns the index along `axis`, int32. That of Pallas leaves its layout to be guessed."""
    if interpret:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout))
    def count(_):
        i32 = ir.IntegerType.get_signless(32)
        return fragmented_array.FragmentedArray.broadcasted_iota(
            i32, shape, axis, layout.to_mgpu(), is_signed=True
        )

    return count()


def _gather(ref: Any, row: jax.Array, column: jax.Array | None, layout: Any, interpret: bool) -> jax.Array:
    """Reads the numbers of `ref` at `[row, column]`, as `layout` says.

    `column` counts along all axes but the first, and is consecutive in a thread's numbers; `row` is one for
    all of those. Without it `ref` has one axis.
    """
    # interpreted: from the whole array
    if interpret:
        fill = jnp.nan if jnp.issubdtype(ref.dtype, jnp.floating) else jnp.iinfo(ref.dtype).max
        at = ref[...].reshape(ref.shape[0], -1).at[row, 0 if column is None else column]
        return at.get(mode="fill", fill_value=fill, wrap_negative_indices=False)

    # compiled: one load for each register of the result
    kind = plgpu.ShapeDtypeStruct(row.shape, ref.dtype, layout=layout)
    index = (row,) if column is None else (row, column)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout for _ in index)), return_type=kind)
    def load(_, ref, row, column=None):
        loaded = np.empty(row.registers.shape, dtype=object)
        element = ir.MemRefType(ref.type).element_type
        for index, address in _addresses(ref, row, column):
            type_ = ir.VectorType.get((row.layout.vector_length,), element)
            loaded[index] = llvm.load(type_, address, alignment=_alignment(type_))
        signed = utils.is_signed(kind.dtype)
        return fragmented_array.FragmentedArray(_registers=loaded, _layout=row.layout, _is_signed=signed)

    return load(ref, *index)


def _scatter(
    ref: Any, row: jax.Array, column: jax.Array, x: jax.Array, layout: Any, where: jax.Array, interpret: bool
) -> None:
    """Writes `x` to `ref` at `[row, column]`, where `where` is not 0: int32, one for a thread's numbers."""
    if interpret:
        _one_by_one(ref, row, column, x, where)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout, layout))
    def store(_, ref, row, column, x, where):
        zero = arith.constant(ir.IntegerType.get_signless(32), 0)
        for index, address in _addresses(ref, row, column):
            wanted = arith.cmpi(arith.CmpIPredicate.ne, _first(where.registers[index]), zero)
            with utils.when(wanted):
                value = x.registers[index]
                llvm.store(value, address, alignment=_alignment(ir.VectorType(value.type)))

    store(ref, row, column, x.astype(ref.dtype), where)


def _addresses(ref, row, column):
    """Yields (index of a register, the address of its first number) of all registers."""
    i64, memory = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type)
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=_GLOBAL), utils.memref_ptr(ref))
    width = arith.constant(i64, int(np.prod(memory.shape[1:])))
    for index in np.ndindex(row.registers.shape):
        offset = arith.muli(arith.extsi(i64, _first(row.registers[index])), width)
        if column is not None:
            offset = arith.addi(offset, arith.extsi(i64, _first(column.registers[index])))
        yield index, utils.getelementptr(base, [offset], memory.element_type)


def _first(register):
    """Takes the first number of a register."""
    return vector.extract(register, [], [0])


def _alignment(type_):
    return min(utils.bitwidth(type_.element_type) // 8 * type_.shape[0], _WIDEST)


def _one_by_one(ref, row, column, x, where):
    """Writes row by row, as the interpreter can store, so that it sees what is written."""
    elements, first = int(np.prod(ref.shape[2:])), (0,) * (x.ndim - 1)

    def write(i, _):
        @pl.when(where[(i, *first)] != 0)
        def _there():
            heads = pl.ds(column[(i, *first)] // elements, x.shape[1])
            ref[row[(i, *first)], heads] = x[i].astype(ref.dtype)

    lax.fori_loop(0, x.shape[0], write, None)
