"""What is measured of graph attention: forward and backward, float32, the graph built beforehand.

A random graph of 40,000 nodes and 500,000 edges, 8 heads of 16; and, if the environment variable
JAX_ATTN_BWD_TOLOKERS names the file `tolokers.npz` of yandex-research/heterophilous-graphs, that graph with
each edge in both directions (11,758 nodes, 1,038,000 edges, the highest degree 2,138), 4 heads of 16.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import (
    BipartiteCSC,
    graph_attention,
    graph_attention_v2,
    graph_transformer_attention,
)
from jax_attn_bwd.bench.measure import Case, Contender, compiled_contender

_TOLOKERS = "JAX_ATTN_BWD_TOLOKERS"


@dataclass(frozen=True)
class Edges:
    """A square graph, as two lists of nodes."""

    name: str
    src: np.ndarray
    dst: np.ndarray
    nodes: int
    heads: int
    width: int


def cases(quick: bool) -> Iterator[Case]:
    """The cases, built one at a time; `quick` keeps them small."""
    graphs = [_random(400, 3000) if quick else _random(40_000, 500_000)]
    if not quick and os.environ.get(_TOLOKERS):
        graphs.append(_tolokers(os.environ[_TOLOKERS]))
    for edges in graphs:
        for kind in _OPERATORS:
            yield _case(edges, kind)


def _random(nodes: int, edges: int) -> Edges:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, nodes, edges), rng.integers(0, nodes, edges)
    return Edges(f"random {nodes} nodes, {edges} edges", src, dst, nodes, 8, 16)


def _tolokers(path: str) -> Edges:
    with np.load(path) as file:
        pairs, nodes = file["edges"], len(file["node_features"])
    src, dst = np.concatenate([pairs, pairs[:, ::-1]]).T
    return Edges(f"tolokers, {len(src)} edges", src, dst, nodes, 4, 16)


_OPERATORS: dict[str, Callable] = {
    "gat": graph_attention,
    "gatv2": graph_attention_v2,
    "transformer": graph_transformer_attention,
}


def _arrays(edges: Edges, kind: str) -> list[jax.Array]:
    """The cotangent, then the arguments."""
    rng, dim = np.random.default_rng(1), edges.heads * edges.width
    last = {"gat": (2 * dim,), "gatv2": (dim,), "transformer": (edges.nodes, dim)}[kind]
    shapes = [*[(edges.nodes, dim)] * 3, last]
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    return arrays if kind == "transformer" else [*arrays[:3], arrays[3] / 4]


def _step(function: Callable, ct: jax.Array, *args: jax.Array) -> tuple:
    out, pullback = jax.vjp(function, *args)
    return (out, *pullback(ct))


def _case(edges: Edges, kind: str) -> Case:
    arrays = _arrays(edges, kind)
    start = time.perf_counter()
    graph = BipartiteCSC.from_coo(edges.src, edges.dst, edges.nodes, edges.nodes)
    notes: dict[str, Any] = {"graph built in": f"{time.perf_counter() - start:.2f} s"}
    ours = partial(_OPERATORS[kind], graph, num_heads=edges.heads)
    contenders = [
        compiled_contender("jax_attn_bwd", partial(_step, ours), *arrays, **notes),
        compiled_contender("JAX segment ops", partial(_step, _segments(edges, kind)), *arrays),
    ]
    installed = all(importlib.util.find_spec(name) for name in ("torch", "torch_geometric"))
    if kind == "gat" and installed:
        contenders.append(_geometric(edges, arrays))
    return Case(f"{kind}, {edges.name}, {edges.heads} x {edges.width}", contenders)


def _segments(edges: Edges, kind: str) -> Callable[..., jax.Array]:
    """The operator as one writes it with `jax.ops`, for JAX to differentiate."""
    src, dst = jnp.asarray(edges.src, jnp.int32), jnp.asarray(edges.dst, jnp.int32)
    heads = lambda x: x.reshape(-1, edges.heads, edges.width)  # noqa: E731

    def attend(scores, message):
        top = jax.ops.segment_max(scores, dst, edges.nodes)
        p = jnp.exp(scores - top[dst])
        p = p / jax.ops.segment_sum(p, dst, edges.nodes)[dst]
        out = jax.ops.segment_sum(p[..., None] * message, dst, edges.nodes)
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

    return {"gat": gat, "gatv2": gatv2, "transformer": transformer}[kind]


def _geometric(edges: Edges, arrays: list[jax.Array]) -> Contender:
    """GATConv of PyTorch Geometric from where the projection is done: its edge update and propagation."""
    import torch
    import torch_geometric
    from torch_geometric.nn import GATConv

    H, D = edges.heads, edges.width
    layer = GATConv((H * D, H * D), D, heads=H, add_self_loops=False, bias=False)
    index = torch.tensor(np.stack([edges.src, edges.dst]))
    ct, *inputs = (torch.tensor(np.asarray(x)) for x in arrays)
    inputs = [x.requires_grad_() for x in inputs]

    def run() -> Any:
        x, y, a = inputs
        x, y, (a_src, a_dst) = x.view(-1, H, D), y.view(-1, H, D), a.view(2, H, D)
        alpha = ((x * a_src).sum(-1), (y * a_dst).sum(-1))
        size = (edges.nodes, edges.nodes)
        alpha = layer.edge_updater(index, alpha=alpha, edge_attr=None, size=size)
        out = layer.propagate(index, x=(x, y), alpha=alpha, size=size).reshape(edges.nodes, H * D)
        return (out, *torch.autograd.grad(out, inputs, ct))

    def results():
        return [x.detach().numpy() for x in run()]

    return Contender(f"PyTorch Geometric {torch_geometric.__version__} GATConv", run, results)
