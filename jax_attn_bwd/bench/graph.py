"""Graph attention: forward and backward, float32, the graph built beforehand.

A random graph of 40,000 nodes and 500,000 edges, 8 heads of 16; and, if the environment variable
JAX_ATTN_BWD_TOLOKERS names the file `tolokers.npz` of yandex-research/heterophilous-graphs, that graph with
each edge in both directions (11,758 nodes, 1,038,000 edges, the highest degree 2,138), 4 heads of 16.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import BipartiteCSC, graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.bench import peers
from jax_attn_bwd.bench.measure import Contender, Workload, compiled_contender, inputs, step, tag
from jax_attn_bwd.ops.graph import cases

OPERATORS: dict[str, tuple[str, Callable]] = {
    "graph_attention": ("gat", graph_attention),
    "graph_attention_v2": ("gatv2", graph_attention_v2),
    "graph_transformer_attention": ("transformer", graph_transformer_attention),
}


class Edges(NamedTuple):
    """A square graph, as two lists of nodes sorted by destination; heads of `width` columns."""

    src: np.ndarray
    dst: np.ndarray
    nodes: int
    heads: int
    width: int


def workloads(quick: bool, scaling: bool = False) -> Iterator[Workload]:
    """What is measured, built one at a time; `quick` keeps it small, `scaling` is one case at many sizes."""
    path = os.environ.get("JAX_ATTN_BWD_TOLOKERS")
    for operator in cases.OPERATORS:
        if operator.name in OPERATORS:
            for case in operator.tagged(tag(quick, scaling)):
                yield _workload(operator, case)
            if path and not (quick or scaling):
                yield _workload(operator, _tolokers(path, operator.name))


def _tolokers(path: str, operator: str) -> Case:
    with np.load(path) as file:
        pairs, nodes = file["edges"], len(file["node_features"])
    src, dst = np.concatenate([pairs, pairs[:, ::-1]]).T
    graph = partial(BipartiteCSC.from_coo, src, dst, nodes, nodes)
    make, name = cases.MAKERS[operator], f"tolokers, {len(src)} edges, 4 x 16"
    return make(name, graph=graph, H=4, D=16, dtype="float32")


def edges_of(graph: BipartiteCSC, columns: int, width: int) -> Edges:
    """The edges of a graph, sorted: the sums of its peers are as fast as they get."""
    dst = np.repeat(np.arange(graph.num_dst), np.diff(graph.offsets))
    src = np.asarray(graph.indices).astype(dst.dtype)
    return Edges(src, dst, graph.num_src, columns // width, width)


def _workload(operator: Operator, case: Case) -> Workload:
    arrays, dout = inputs(operator, case)
    args = (dout, *arrays.values())
    kind, function = OPERATORS[operator.name]
    name, edges = (
        f"{kind}, {case.name}",
        edges_of(case.options["graph"], dout.shape[1], case.options["head_size"]),
    )
    start = time.perf_counter()
    graph = BipartiteCSC.from_coo(edges.src, edges.dst, edges.nodes, edges.nodes)
    notes: dict[str, Any] = {"graph built in": f"{time.perf_counter() - start:.2f} s"}
    call = partial(function, graph, num_heads=edges.heads)
    plain = step(segments(edges, operator.name))
    makers = {"JAX segment ops": partial(compiled_contender, "JAX segment ops", plain, *args)}
    if kind == "gat" and peers.torch_device() and peers.installed("torch_geometric"):
        makers["PyTorch Geometric"] = partial(_geometric, edges, args)
    found, refused = peers.gather(name, makers)
    return Workload(name, [*peers.ours(call, step, *args, **notes), *found], refused=refused)


def segments(edges: Edges, operator: str) -> Callable[..., jax.Array]:
    """The operator as one writes it with `jax.ops`, for JAX to differentiate."""
    src, dst = jnp.asarray(edges.src, jnp.int32), jnp.asarray(edges.dst, jnp.int32)
    heads = lambda x: x.reshape(-1, edges.heads, edges.width)

    over = partial(jax.ops.segment_sum, segment_ids=dst, num_segments=edges.nodes, indices_are_sorted=True)

    def attend(scores, message):
        top = jax.ops.segment_max(scores, dst, edges.nodes, indices_are_sorted=True)
        p = jnp.exp(scores - top[dst])
        p = p / over(p)[dst]
        out = over(p[..., None] * message)
        return out.reshape(edges.nodes, edges.heads * edges.width)

    def gat(x, y, a):
        x, y, (a_src, a_dst) = heads(x), heads(y), jnp.split(a, 2)
        z = (x * heads(a_src)).sum(-1)[src] + (y * heads(a_dst)).sum(-1)[dst]
        return attend(jax.nn.leaky_relu(z, 0.2), x[src])

    def gatv2(x, y, a):
        x, y = heads(x), heads(y)
        return attend((jax.nn.leaky_relu(x[src] + y[dst], 0.2) * heads(a)).sum(-1), x[src])

    def transformer(q, k, v):
        scores = (heads(q)[dst] * heads(k)[src]).sum(-1) * edges.width**-0.5
        return attend(scores, heads(v)[src])

    return dict(zip(OPERATORS, (gat, gatv2, transformer), strict=True))[operator]


def _geometric(edges: Edges, args: tuple) -> Contender:
    """GATConv of PyTorch Geometric from where the projection is done: its edge update and propagation."""
    import torch
    import torch_geometric
    from torch_geometric.nn import GATConv

    H, D = edges.heads, edges.width
    layer = GATConv((H * D, H * D), D, heads=H, add_self_loops=False, bias=False)
    ct, *inputs = (peers.tensor(x) for x in args)
    inputs = [x.requires_grad_() for x in inputs]
    index = torch.tensor(np.stack([edges.src, edges.dst])).to(ct.device)

    def run() -> Any:
        x, y, a = inputs
        x, y, (a_src, a_dst) = x.view(-1, H, D), y.view(-1, H, D), a.view(2, H, D)
        alpha = ((x * a_src).sum(-1), (y * a_dst).sum(-1))
        size = (edges.nodes, edges.nodes)
        alpha = layer.edge_updater(index, alpha=alpha, edge_attr=None, size=size)
        out = layer.propagate(index, x=(x, y), alpha=alpha, size=size).reshape(edges.nodes, H * D)
        return (out, *torch.autograd.grad(out, inputs, ct))

    return peers.torch_contender(f"PyTorch Geometric {torch_geometric.__version__} GATConv", run)
