"""What the kernels of graph attention are given, and which calls they refuse."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.sharding import explicit_spec
from jax_attn_bwd.ops.graph import kinds
from jax_attn_bwd.ops.graph.kernels.gpu_plan import WIDTHS, Inputs
from jax_attn_bwd.ops.graph.kernels.gpu_segments import Segments
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.loops import Chunk, has_edges
from jax_attn_bwd.ops.graph.placement import pieces_of_edges
from jax_attn_bwd.ops.graph.spec import Operands, Options

DTYPES = ("float32", "bfloat16", "float16")


def unsupported(options: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call on any device; None if they can."""
    if not mosaic_gpu.can_interpret():  # nor has it the layouts
        return f"its kernels need JAX 0.12 or later, not {jax.__version__}"
    graph, src, edge = operands.graph, operands.src, operands.edge
    if not all(isinstance(n, int) for x in (src, operands.dst, graph.indices) for n in x.shape):
        return "its shapes must be known, not symbolic"
    for name, x in (("src", src), ("edge", edge)):
        if x is not None and x.dtype not in DTYPES:
            return f"features must be of one of {DTYPES}, got {name} of {x.dtype}"
    if not has_edges(graph):
        return "the graph has no room for edges"
    if any(explicit_spec(nodes := operands.leader)[: nodes.ndim - 2]):
        return "batch axes must not lie on several devices of an Explicit mesh; call it inside jax.shard_map"
    if pieces_of_edges(operands) is not None:
        return "nodes must not lie on several devices of an Explicit mesh; the portable path cuts the edges"
    if options.sharing > 1:
        return f"every head must have a key of its own, got {options.sharing} heads that share one"
    if operands.value is not None and operands.value.shape[-1] != src.shape[-1]:
        return f"values must be as wide as keys, got {operands.value.shape[-1]} and {src.shape[-1]}"
    D = src.shape[-1] // options.num_heads
    if D not in WIDTHS:
        return f"the width of a head must be one of {WIDTHS}, got {D}"
    return None


def inputs(at: Segments, own: dict, other: dict, edge: dict, t: Tables) -> Inputs:
    """The tables of a kernel, beside what all of them read of an edge; what is None is left out."""
    edge = {"edge": t.edge, "bias": t.bias, **edge}
    groups = (own, other, edge, {"a": t.a})
    return Inputs(at, *({name: x for name, x in group.items() if x is not None} for group in groups))


def without_keys(t: Tables) -> Tables:
    """`t` without what dropout is drawn from: the kernels are given the factors."""
    return t._replace(mask=None, keys=None, counters=None)


def factors_by_edge(options: Options, t: Tables, capacity: int) -> jax.Array | None:
    """Dropout factors `[E, H]`, by number of the edge; None = all 1."""
    number: Any = jnp.arange(capacity, dtype=jnp.int32)
    return kinds.of(options).dropout_factors(t, Chunk(number, number, number, None))
