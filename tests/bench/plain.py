"""Plain formulas, as one writes them with `jax.numpy` for JAX to differentiate."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core.cases import keep_mask
from jax_attn_bwd.mods import alibi_slopes
from jax_attn_bwd.ops.deformable.reference import multi_scale_deformable_attention

RATE = 0.1  # of dropout


def softmax(
    x: jax.Array, where: jax.Array | None = None, sink: jax.Array | None = None, axis: int = -1
) -> jax.Array:
    """Computes a softmax over `axis`; `sink` broadcasts to `x` and is one more logit of each row."""
    if sink is None:
        return jax.nn.softmax(x, axis, where=where)
    x = x if where is None else jnp.where(where, x, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(x.max(axis, keepdims=True), sink))
    p = jnp.exp(x - top)
    return p / (p.sum(axis, keepdims=True) + jnp.exp(sink - top))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    soft_cap: float | None = None,
    sink: jax.Array | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    **seen: Any,
) -> jax.Array:
    """Attends by `jax.nn`, or by its formula where that has no such option; `seen` are options of `jax.nn`.

    `dropout` makes of the probabilities `[B, N, T, S]` what is left of them.
    """
    if soft_cap is None and sink is None and dropout is None:
        return jax.nn.dot_product_attention(query, key, value, bias, mask, **seen)
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    # logits in float32, by groups of heads that read the same keys
    query = query.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(B, N, T, S) * H**-0.5
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    # probabilities of what is seen, and the means of the values
    sink = None if sink is None else sink.astype(jnp.float32)[:, None, None]
    p = softmax(logits, visible(T, S, mask, **seen), sink)
    p = p if dropout is None else dropout(p)
    p = p.astype(value.dtype).reshape(B, K, N // K, T, S)
    return jnp.einsum("bkgts,bskh->btkgh", p, value).reshape(B, T, N, -1)


def visible(
    T: int,
    S: int,
    mask: jax.Array | None,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    key_value_seq_lengths: jax.Array | None = None,
) -> jax.Array | None:
    """Makes one mask that broadcasts to `[..., T, S]` of all that hides; lengths are of `[B, N, T, S]`."""
    row, column = _places(T, S)
    found = [] if mask is None else [mask]
    if is_causal:
        found.append(column <= row)
    if local_window_size is not None:
        left, right = local_window_size
        found.append((column >= row - left) & (column <= row + right))
    if key_value_seq_lengths is not None:
        found.append((column < key_value_seq_lengths[:, None])[:, None, None])
    return reduce(jnp.logical_and, found) if found else None


def _places(T: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows `[T, 1]` and of columns `[S]`."""
    return jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)


def dropout(words: jax.Array, p: jax.Array) -> jax.Array:
    """Drops some of `p` by random numbers of JAX, whose key is two `words`."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return _dropped(jax.random.bernoulli(key, 1 - RATE, p.shape), p)


def our_dropout(words: jax.Array, p: jax.Array) -> jax.Array:
    """Drops those of `p [..., N, T, S]` that ours drops by the same key."""
    *batch, N, T, S = p.shape
    return _dropped(keep_mask(words, RATE, (*batch,), (N, T, S)), p)


def _dropped(keep: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.where(keep, p / (1 - RATE), 0)


def segments(ids: jax.Array) -> jax.Array:
    """Makes the mask of tokens `[B, T]` that see their own segment."""
    return (ids[:, :, None] == ids[:, None])[:, None]


def prefix(T: int, S: int, length: int) -> jax.Array:
    """Makes a causal mask, of which all see a prefix."""
    row, column = _places(T, S)
    return ((column <= row) | (column < length))[None, None]


def relative_bias(T: int, S: int, table: jax.Array) -> jax.Array:
    """Makes a bias of the entries of `table [N, 2 * farthest + 1]` at distances between columns and rows.

    Float32, as its gradient sums many terms.
    """
    (row, column), farthest = _places(T, S), table.shape[1] // 2
    return table.astype(jnp.float32)[:, jnp.clip(column - row, -farthest, farthest) + farthest][None]


def alibi(T: int, S: int, N: int) -> jax.Array:
    """Makes the bias of ALiBi."""
    row, column = _places(T, S)
    return -alibi_slopes(N)[:, None, None] * abs(column - row).astype(jnp.float32)[None, None]


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns the two halves of each head of `x [B, T, N, H]` by its position."""
    T, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(T)[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))  # [T, 1, half]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# ---- linear and deformable attention


def chunk_form(epsilon, query, key, value, log_decay, beta=None, C=64):
    """Computes the rule in chunks as programs have it, for JAX to differentiate: triangular solves, scan.

    Decays of channels are put on both factors of a product: over a chunk they must not underflow.
    """
    (B, T, N, H), t = query.shape, lambda x: jnp.swapaxes(x, -1, -2)
    unit = lambda x: x * lax.rsqrt((x * x).sum(-1, keepdims=True) + epsilon) if epsilon else x

    def chunks(x):
        padded = jnp.pad(x, [(0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded, 2, 1).reshape(B, N, -(-T // C), C, -1)

    query, key, value = chunks(unit(query) * H**-0.5), chunks(unit(key)), chunks(value)
    c = jnp.cumsum(chunks(log_decay), -2)
    whole, lower = jnp.exp(c[..., -1:, :]), jnp.tril(jnp.ones((1,) * 3 + (C, C), bool))
    if c.shape[-1] == 1:
        between = jnp.where(lower, jnp.exp(jnp.where(lower, c - t(c), 0)), 0)
        within = lambda x: x @ t(key) * between
    else:
        grown = t(key * jnp.exp(-c))
        within = lambda x: jnp.where(lower, (x * jnp.exp(c)) @ grown, 0)
    reads, at_end = within(query), key * jnp.exp(c[..., -1:, :] - c)
    u, w = value, jnp.zeros_like(key)
    if beta is not None:
        scaled = chunks(beta) * key
        one = jnp.broadcast_to(jnp.eye(C, dtype=key.dtype), reads.shape)
        overlaps = jnp.tril(within(scaled), -1) + one
        solve = lambda x: jax.scipy.linalg.solve_triangular(overlaps, x, lower=True, unit_diagonal=True)
        u, w = solve(chunks(beta) * value), solve(scaled * jnp.exp(c))

    def step(S, given):
        query, u, w, reads, at_end, whole = given
        new = u - w @ S if beta is not None else u
        return S * t(whole) + t(at_end) @ new, query @ S + reads @ new

    given = query * jnp.exp(c), u, w, reads, at_end, whole
    zeros = jnp.zeros((B, N, H, value.shape[-1]), value.dtype)
    _, out = lax.scan(step, zeros, tuple(jnp.moveaxis(x, 2, 0) for x in given))
    return jnp.moveaxis(jnp.moveaxis(out, 0, 2).reshape(B, N, -(-T // C) * C, -1), 1, 2)[:, :T]


def solves_end() -> bool:
    """Tells whether the gradient of many triangular solves ends: before JAX 0.11 a CPU may wait for ever."""
    return jax.default_backend() != "cpu" or jax.__version_info__ >= (0, 11)


def gather_form(levels, value, locations, weights):
    """Computes the definition as one would write it: gathers of whole arrays, for JAX to differentiate."""
    with jax.numpy_rank_promotion("allow"):
        return multi_scale_deformable_attention(value, locations, weights, spatial_shapes=levels)


# ---- graphs, their edges sorted by destination


class Edges(NamedTuple):
    """A square graph, as two lists of nodes sorted by destination; heads of `width` columns."""

    src: np.ndarray
    dst: np.ndarray
    nodes: int
    heads: int
    width: int


def edges_of(graph: BipartiteCSC, columns: int, width: int) -> Edges:
    """Returns the edges of a graph, sorted: the sums of its peers are as fast as they get."""
    dst = np.repeat(np.arange(graph.num_dst), np.diff(graph.offsets))
    src = np.asarray(graph.indices).astype(dst.dtype)
    return Edges(src, dst, graph.num_src, columns // width, width)


def segment_ops(
    edges: Edges, operator: str, dropout: Callable[[jax.Array], jax.Array] = lambda p: p
) -> Callable[..., jax.Array]:
    """Returns the operator as one writes it with `jax.ops`, for JAX to differentiate.

    `dropout` makes of the weights of attention `[nnz, heads]` what is left of them.
    """
    src, dst = jnp.asarray(edges.src, jnp.int32), jnp.asarray(edges.dst, jnp.int32)
    heads = lambda x: x.reshape(-1, edges.heads, edges.width)
    over = partial(jax.ops.segment_sum, segment_ids=dst, num_segments=edges.nodes, indices_are_sorted=True)

    # a softmax over the edges of each destination, then the sum of its messages
    def softmax(scores):
        top = jax.ops.segment_max(scores, dst, edges.nodes, indices_are_sorted=True)
        p = jnp.exp(scores - top[dst])
        return p / over(p)[dst]

    def attend(scores, message):
        out = over(dropout(softmax(scores))[..., None] * message)
        return out.reshape(edges.nodes, edges.heads * edges.width)

    def gat(x, y, a, edge=None):
        x, y, (a_src, a_dst, *a_edge) = heads(x), heads(y), jnp.split(a, 2 if edge is None else 3)
        z = (x * heads(a_src)).sum(-1)[src] + (y * heads(a_dst)).sum(-1)[dst]
        z = z if edge is None else z + (heads(edge) * heads(a_edge[0])).sum(-1)
        return attend(jax.nn.leaky_relu(z, 0.2), x[src])

    def gatv2(x, y, a, edge=None):
        x, y = heads(x), heads(y)
        z = x[src] + y[dst] if edge is None else x[src] + y[dst] + heads(edge)
        return attend((jax.nn.leaky_relu(z, 0.2) * heads(a)).sum(-1), x[src])

    def transformer(q, k, v, edge=None):
        k, v = (heads(x)[src] if edge is None else heads(x)[src] + heads(edge) for x in (k, v))
        return attend((heads(q)[dst] * k).sum(-1) * edges.width**-0.5, v)

    def highest(x):
        found = jax.ops.segment_max(x, dst, edges.nodes, indices_are_sorted=True)
        return jnp.where(jnp.isfinite(found), found, 0)

    def mean(x):
        return over(x) / jnp.maximum(over(jnp.ones((len(dst), 1), x.dtype)), 1)

    known: dict[str, Callable[..., jax.Array]] = {"edge_softmax": softmax, "graph_attention": gat}
    known |= {"graph_attention_v2": gatv2, "graph_transformer_attention": transformer}
    known |= {"edge_sum": over, "edge_mean": mean, "edge_max": highest}
    return known[operator]
