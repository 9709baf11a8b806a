"""Calls of the three attentions on small graphs, for the tests beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough

import jax_attn_bwd as jab
from jax_attn_bwd.ops.graph import reference

FUNCTIONS = {
    "gat": (jab.graph_attention, reference.graph_attention),
    "gatv2": (jab.graph_attention_v2, reference.graph_attention_v2),
    "transformer": (jab.graph_transformer_attention, reference.graph_transformer_attention),
}


def each_kind(*kept):
    """All but `kept` are left to the thorough tier."""
    marks = {kind: [] if kind in kept else [thorough] for kind in FUNCTIONS}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=m) for kind, m in marks.items()])


every_kind = each_kind(*FUNCTIONS)
H, D = 2, 3
QUICK = {"xla_backend_optimization_level": 0}  # for what runs once: compiling it takes longer


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def random_edges(num_src=7, num_dst=5, nnz=23, seed=0):
    """The last two nodes of each side have no edge."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_src - 2, nnz), rng.integers(0, num_dst - 2, nnz)


def inputs(kind, num_src, num_dst, edge=None, dtype=np.float64, width=H * D):
    """Positional and edge arguments of a call, by name."""
    x, y = normal(num_src, width, dtype=dtype), normal(num_dst, width, seed=1, dtype=dtype)
    if kind == "transformer":
        found = {"query": y, "key": x, "value": normal(num_src, width, seed=2, dtype=dtype)}
    else:
        size = width if kind == "gatv2" else 2 * width + (width if edge else 0)
        found = {"src": x, "dst": y, "attention_weights": normal(size, seed=3, dtype=dtype)}
    return found | ({"edge": normal(edge, width, seed=4, dtype=dtype)} if edge else {})


def program(function, **options):
    """`(graph, arrays, cotangents or None) -> outputs and gradients by name`, quickly compiled."""

    def run(graph, arrays, cts):
        given = {} if graph is None else {"graph": graph}
        out, pullback = jax.vjp(lambda a: function(**given, **a, num_heads=H, **options), arrays)
        leaves = out if isinstance(out, tuple) else (out,)
        if cts is None:
            cts = [normal(*x.shape, seed=9, dtype=x.dtype) for x in leaves]
        cts = [jnp.where(jnp.isfinite(x), ct, 0) for x, ct in zip(leaves, cts, strict=True)]
        (grads,) = pullback(tuple(cts) if isinstance(out, tuple) else cts[0])
        return {f"output {i}": x for i, x in enumerate(leaves)} | grads

    return jax.jit(run, compiler_options=QUICK)


def values_and_gradients(function, arrays, cts=None, graph=None, **options):
    """Outputs and gradients by name, under random cotangents."""
    return program(function, **options)(graph, arrays, cts)
