"""Calls of the source's families, and its formulas in NumPy float64, for the tests beside this file."""

from functools import partial

import jax
import numpy as np
from compat.programs import QUICK

from jax_attn_bwd.compat import cugraph

N_SRC, N_DST, NNZ, H, D = 7, 6, 15, 2, 3
DIM, DIM_EDGE = H * D, 4


ACTIVATIONS = {
    "ELU": lambda z, alpha: np.where(z > 0, z, np.exp(np.minimum(z, 0)) - 1),
    "LeakyReLU": lambda z, alpha: np.where(z > 0, z, alpha * z),
    "Linear": lambda z, alpha: z,
    "ReLU": lambda z, alpha: np.maximum(z, 0),
    "Scalar": lambda z, alpha: alpha * z,
    "Sigmoid": lambda z, alpha: 1 / (1 + np.exp(-z)),
    "Tanh": lambda z, alpha: np.tanh(z),
}


SLOPES = {
    "ELU": lambda z, alpha: np.where(z > 0, 1, np.exp(np.minimum(z, 0))),
    "LeakyReLU": lambda z, alpha: np.where(z > 0, 1, alpha),
    "Linear": lambda z, alpha: np.ones_like(z),
    "ReLU": lambda z, alpha: np.where(z > 0, 1.0, 0.0),
    "Scalar": lambda z, alpha: np.full_like(z, alpha),
    "Sigmoid": lambda z, alpha: np.exp(-z) / (1 + np.exp(-z)) ** 2,
    "Tanh": lambda z, alpha: 1 - np.tanh(z) ** 2,
}

FAMILIES = ("mha_gat_n2n", "mha_gat_n2n_efeat", "mha_gat_v2_n2n", "mha_gat_v2_n2n_efeat")


def structure(edges, map_csc_to_coo=True):
    """The graph as the source is given it: sorted by destination, with the map to the caller's order."""
    src, dst = edges
    order = np.argsort(dst, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=N_DST))])
    return cugraph.make_bipartite_csc(offsets, src[order], N_SRC, order if map_csc_to_coo else None)


def arrays(rng, family):
    """{argument: array} of a forward call."""
    efeat, v2 = "efeat" in family, "v2" in family
    width = DIM if v2 else DIM_EDGE
    found = {"src_node_embedding": (N_SRC, DIM), "dst_node_embedding": (N_DST, DIM)}
    found |= {"edge_embedding": (NNZ, width)} if efeat else {}
    found["attention_weights"] = (DIM if v2 else 2 * DIM + efeat * width,)
    return {name: rng.standard_normal(shape) for name, shape in found.items()}


def heads(x):
    return x.reshape(len(x), H, -1)


def source(family, edges, params, g, *, attention_weights, edge_embedding=None, **embeddings):
    """(output, softmax_scores, gradients) edge by edge, the gradients by their formulas."""
    (src, dst), a = edges, attention_weights
    act, slope = (lambda z, f=table[params.activation]: f(z, params.alpha) for table in (ACTIVATIONS, SLOPES))
    hs = heads(embeddings["src_node_embedding"])[src]
    hd = heads(embeddings["dst_node_embedding"])[dst]
    he = np.zeros((NNZ, H, 1)) if edge_embedding is None else heads(edge_embedding)
    if "v2" in family:
        a = a.reshape(H, D)
        z = hs + hd + he
        s = (a * act(z)).sum(-1)
    else:
        a_src, a_dst, a_edge = (x.reshape(H, -1) for x in np.split(a, (DIM, 2 * DIM)))
        z = (hs * a_src).sum(-1) + (hd * a_dst).sum(-1) + (he * a_edge).sum(-1) * (a_edge.size > 0)
        s = act(z)
    into = dst[None] == np.arange(N_DST)[:, None]  # [N_DST, NNZ]
    top = np.array([s[row].max(0) if row.any() else np.zeros(H) for row in into])
    e = np.exp(s - top[dst])
    p = e / (into @ e)[dst]
    per_head = np.einsum("ie,eh,ehd->ihd", into.astype(float), p, hs)
    out = per_head.reshape(N_DST, DIM) if params.concat_heads else per_head.mean(1)

    g = heads(g) if params.concat_heads else np.repeat(g[:, None] / H, H, 1)
    ds = p * ((g[dst] * hs).sum(-1) - (g * per_head).sum(-1)[dst])
    if "v2" in family:
        dz = ds[..., None] * a * slope(z)
        dhs, dhd, dhe, da = dz, dz, dz, (ds[..., None] * act(z)).sum(0).ravel()
    else:
        dz = (ds * slope(z))[..., None]
        dhs, dhd, dhe = dz * a_src, dz * a_dst, dz * a_edge
        da = np.concatenate([(dz * x).sum(0).ravel() for x in (hs, hd, he)])[: a.size]
    grads = {"src_node_embedding": np.zeros((N_SRC, DIM)), "dst_node_embedding": np.zeros((N_DST, DIM))}
    np.add.at(grads["src_node_embedding"], src, (dhs + p[..., None] * g[dst]).reshape(NNZ, DIM))
    np.add.at(grads["dst_node_embedding"], dst, dhd.reshape(NNZ, DIM))
    grads |= {"attention_weights": da, "edge_embedding": dhe.reshape(NNZ, -1)}
    return out, np.stack([s.T, p.T]), grads


def call(family, graph, params, g, operands):
    """(output, softmax_scores, gradients) by the package, both directions in one program."""
    forward, backward = (getattr(cugraph, f"{family}_{way}") for way in ("fwd", "bwd"))

    @partial(jax.jit, compiler_options=QUICK)
    def run(g, *arrays):
        out, planes = forward(*arrays, graph, params, return_softmax_scores=True)
        return out, planes, backward(g, *arrays, planes, graph, params)

    return run(g, *operands.values())


def cotangent(rng, params):
    return rng.standard_normal((N_DST, DIM if params.concat_heads else D))
