"""Draws calls over the edges of random graphs, beside sums over sorted edges."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn_bwd
from bench import plain
from bench.race.call import Budget, Call, Lot, activation, parameter, random_key
from jax_attn_bwd import BipartiteCSC

ATTENTION = {
    "GAT": "graph_attention",
    "GATv2": "graph_attention_v2",
    "transformer": "graph_transformer_attention",
}
REDUCTIONS = ("edge_softmax", "edge_sum", "edge_mean", "edge_max")
ORDER = ("query", "key", "value", "src", "dst", "attention_weights", "edge")  # of the arguments of formulas


def graph(lot: Lot, budget: Budget) -> Call:
    """Draws a call of a graph operator."""
    kind = lot.one_of((*ATTENTION, *ATTENTION, lot.one_of(REDUCTIONS)))
    heads, width = lot.one_of((1, 1, 2, 4, 8, 8, 16)), lot.one_of((8, 8, 16, 32, 64))
    count, degree, law = lot.size(200, 1_000_000), lot.size(2, 100), lot.one_of(("uniform", "power law"))
    with_edge, mean, dropped = lot.chance(0.2), lot.chance(0.15), lot.chance(0.15)
    while count > 1 and count * heads * width > budget.elements / 4:  # its arrays by edge are many
        count //= 2
    nodes, dim = max(count // degree, 1), heads * width
    # what it reads, and gives
    options: dict[str, Any]
    if kind in REDUCTIONS:
        columns = heads if kind == "edge_softmax" else dim
        operator, options, inputs = kind, {}, {"edge": activation(count, columns)}
        out = (count if kind == "edge_softmax" else nodes, columns)
        said = f" {columns} columns"
    else:
        operator, options = ATTENTION[kind], {"num_heads": heads, "concat_heads": not mean}
        ends = ("query", "key", "value") if kind == "transformer" else ("src", "dst")
        inputs = {name: activation(nodes, dim) for name in ends}
        if kind != "transformer":
            weights = (2 + with_edge) * dim if kind == "GAT" else dim
            inputs["attention_weights"] = parameter(weights, spread=width**-0.5)
        if with_edge:
            inputs["edge"] = activation(count, dim)
        if dropped:
            options["dropout_rate"], inputs["dropout_key"] = plain.RATE, random_key()
        out = (nodes, width if mean else dim)
        said = f" {heads}x{width}" + ", edge features" * with_edge + ", mean of heads" * mean
        said += ", dropout" * dropped

    def draw(rng):
        """Draws edges sorted by destination; the hubs of a power law are any nodes."""
        power = 3 if law == "power law" else 1
        src, dst = (
            rng.permutation(nodes).astype(np.int32)[(nodes * rng.random(count) ** power).astype(np.int32)]
            for _ in range(2)
        )
        dst = np.sort(dst)
        return BipartiteCSC.from_coo(src, dst, nodes, nodes), jax.device_put((src, dst))

    def ours(graph, a):
        function = getattr(jax_attn_bwd, operator)
        return function(graph, a["edge"]) if kind in REDUCTIONS else function(graph, **a, **options)

    def formula(drop, ends, a):
        """Sums in float32, whatever the dtype: sums of many bfloat16 terms stand still."""
        dtype, wide = a[next(iter(inputs))].dtype, [a[x].astype(jnp.float32) for x in ORDER if x in a]
        dropout = [partial(drop, a["dropout_key"])] if "dropout_key" in a else []
        found = plain.segment_ops(plain.Edges(*ends, nodes, heads, width), operator, *dropout)(*wide)
        if mean and kind in ATTENTION:
            found = found.reshape(nodes, heads, width).mean(1)
        return found.astype(dtype)

    def our_dropout(words, p):
        return plain.our_dropout(words, p.T[..., None])[..., 0].T

    name = f"{kind} {nodes:,} nodes, {count:,} edges, {law},{said}"
    checked = partial(formula, our_dropout) if "dropout_key" in inputs else None
    return Call(name, inputs, out, ours, partial(formula, plain.dropout), checked, draw)
