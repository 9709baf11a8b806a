"""THE DEFINITION of the graph operators: whole edge arrays, plain jnp, any dtype. Every test measures by it.

probs[i, e] = softmax over the edges e into node i of score[e]
out[i]      = sum_e factor[e] probs[i, e] message[e]
"""

import jax
import jax.numpy as jnp
from jax import lax

_ACTIVATIONS = {
    "linear": lambda z, alpha: z,
    "relu": lambda z, alpha: jax.nn.relu(z),
    "sigmoid": lambda z, alpha: jax.nn.sigmoid(z),
    "tanh": lambda z, alpha: jnp.tanh(z),
    "elu": lambda z, alpha: jax.nn.elu(z),
    "scalar": lambda z, alpha: alpha * z,
    "leaky_relu": lambda z, alpha: jax.nn.leaky_relu(z, alpha),
}


def ends(graph):
    """(source, destination) of each edge in the caller's order; both are past their ends in the padding."""
    position = jnp.arange(graph.indices.shape[0], dtype=graph.offsets.dtype)
    dst = jnp.searchsorted(graph.offsets, position, side="right") - 1
    dst = jnp.where(position < graph.offsets[-1], dst, graph.num_dst)
    order = jnp.argsort(graph.map_csc_to_coo)
    return graph.indices[order], dst[order]


def edge_softmax(graph, scores):
    """Weights `[E, H]` of `jax_attn_bwd.edge_softmax`, and lse `[num_dst, H]`."""
    _, dst = ends(graph)
    incoming = (dst == jnp.arange(graph.num_dst)[:, None])[..., None]  # [num_dst, E, 1]
    terms = jnp.where(incoming, scores, -jnp.inf)
    top = lax.stop_gradient(terms.max(1, keepdims=True, initial=-jnp.inf))  # nothing depends on it
    top = jnp.where(top == -jnp.inf, 0, top)
    total = jnp.exp(terms - top).sum(1, keepdims=True)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))
    probs = jnp.exp(terms - top) / jnp.where(total == 0, 1, total)
    return probs.sum(0), lse[:, 0]


def edge_reduction(how, graph, edge):
    """`jax_attn_bwd.edge_sum`, `.edge_mean` or `.edge_max`, `[num_dst, ...]`."""
    incoming = ends(graph)[1] == jnp.arange(graph.num_dst)[:, None]
    incoming = jnp.expand_dims(incoming, tuple(range(2, edge.ndim + 1)))  # [num_dst, E, ...]
    count = incoming.sum(1)
    if how == "edge_max":
        return jnp.where(count > 0, jnp.where(incoming, edge, -jnp.inf).max(1, initial=-jnp.inf), 0)
    total = jnp.where(incoming, edge, 0).sum(1)
    return total / jnp.maximum(count, 1) if how == "edge_mean" else total


def _attend(graph, scores, message, factor=None, concat_heads=True):
    """(out, weights, lse); `factor` is the dropout mask `[E, H]`."""
    weights, lse = edge_softmax(graph, scores)
    weights = weights if factor is None else jnp.where(factor == 0, 0, weights * factor)
    incoming = ends(graph)[1] == jnp.arange(graph.num_dst)[:, None]
    out = jnp.einsum("ie,eh,ehd->ihd", incoming.astype(message.dtype), weights, message)
    n, H, D = out.shape
    return out.reshape(n, H * D) if concat_heads else out.mean(1), weights, lse


def _heads(x, num_heads):
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def _at(x, index):
    """The rows of `x` at `index`, 0 past its end."""
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))])[index]


def graph_attention(
    graph, src, dst, attention_weights, *, num_heads, edge=None, activation="leaky_relu", alpha=0.2, **rest
):
    """(out, weights, lse) of `jax_attn_bwd.graph_attention`; `rest` is what `_attend` takes."""
    source, destination = ends(graph)
    a_src, a_dst, a_edge = jnp.split(attention_weights, (src.shape[1], 2 * src.shape[1]))
    score = lambda x, a: _heads(x * a, num_heads).sum(-1)
    z = _at(score(src, a_src), source) + _at(score(dst, a_dst), destination)
    z = z if edge is None else z + score(edge, a_edge)
    message = _at(_heads(src, num_heads), source)
    return _attend(graph, _ACTIVATIONS[activation](z, alpha), message, **rest)


def graph_attention_v2(
    graph, src, dst, attention_weights, *, num_heads, edge=None, activation="leaky_relu", alpha=0.2, **rest
):
    """(out, weights, lse) of `jax_attn_bwd.graph_attention_v2`."""
    source, destination = ends(graph)
    z = _at(src, source) + _at(dst, destination)
    z = z if edge is None else z + edge
    scores = _heads(attention_weights * _ACTIVATIONS[activation](z, alpha), num_heads).sum(-1)
    return _attend(graph, scores, _at(_heads(src, num_heads), source), **rest)


def graph_transformer_attention(
    graph, query, key, value, *, num_heads, num_kv_heads=None, edge=None, score_bias=None, scale=None, **rest
):
    """(out, weights, lse) of `jax_attn_bwd.graph_transformer_attention`."""
    source, destination = ends(graph)
    k, v = _at(key, source), _at(value, source)
    k, v = (k, v) if edge is None else (k + edge, v + edge)
    shared = num_kv_heads or num_heads
    k, v = (jnp.repeat(_heads(x, shared), num_heads // shared, axis=1) for x in (k, v))
    scale = (query.shape[1] // num_heads) ** -0.5 if scale is None else scale
    scores = scale * (_heads(_at(query, destination), num_heads) * k).sum(-1)
    scores = scores if score_bias is None else scores + score_bias
    return _attend(graph, scores, v, **rest)
