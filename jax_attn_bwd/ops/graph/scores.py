"""What the three graph attentions differ in: the score of an edge, and its derivative.

    gat            s = act(<h_src, a_src> + <h_dst, a_dst> (+ <e, a_edge>))
    gatv2          s = <a, act(h_src + h_dst (+ e))>
    transformer    s = scale <q, k (+ e)> (+ bias)

An edge has two ends. In a loop over the groups of one end, that end's rows are `[R, ...]` (its own), the
other's `[W, R, ...]`; the functions here take either.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.graph.groups import Chunk, take
from jax_attn_bwd.ops.graph.spec import Operands, Options


class Tables(NamedTuple):
    """The operands as the loops read them, by node or edge."""

    src: jax.Array  # gat [num_src, H], else [num_src, H, D]
    dst: jax.Array  # gat [num_dst, H], else [num_dst, H, D]
    message: jax.Array  # [num_src, H, D]
    edge: jax.Array | None  # gat [E, H], else [E, H, D]
    a: jax.Array | None  # [H, D], gatv2
    bias: jax.Array | None  # [E, H]
    mask: jax.Array | None  # [E, H], dropout factors
    keys: dropout.Words | None  # [H] each
    rows: jax.Array | None  # uint32 [E], what dropout counts edges by


def tables(options: Options, operands: Operands) -> Tables:
    """Splits heads, and for gat takes the nodes' and the edges' shares of the scores."""
    H, dtype = options.num_heads, accumulator_dtype(operands.src.dtype)
    src, dst = split_heads(operands.src, H), split_heads(operands.dst, H)
    message = src if operands.value is None else split_heads(operands.value, H)
    edge = None if operands.edge is None else split_heads(operands.edge, H)
    a = None
    if options.kind == "gat":
        pairs = zip(gat_features(options, operands), split_weights(options, operands), strict=True)
        src, dst, edge = (x if x is None else share(x, a) for x, a in pairs)  # type: ignore[assignment]
    elif options.kind == "gatv2":
        assert operands.attention_weights is not None
        a = operands.attention_weights.astype(dtype).reshape(H, -1)
    E, bias = operands.graph.capacity, operands.score_bias
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(dtype), (E, H))
    mask = None if operands.dropout_mask is None else operands.dropout_mask.astype(dtype).T
    return Tables(src, dst, message, edge, a, bias, mask, *_counters(operands, H, E))


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """`[n, H * D]` -> `[n, H, D]`."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def gat_features(options: Options, operands: Operands) -> list[jax.Array | None]:
    """Heads of src, dst and edge, 0 where no edge refers to them: what lies there is not to be read."""
    graph, H = operands.graph, options.num_heads
    has_edge = jnp.zeros(graph.num_src, bool).at[graph.by_source.node].set(True, mode="drop")
    degree = graph.offsets[1:] - graph.offsets[:-1]
    exists = jnp.arange(graph.capacity, dtype=jnp.int32) < graph.offsets[-1]
    used = ((operands.src, has_edge), (operands.dst, degree > 0), (operands.edge, exists))
    return [
        None if x is None else jnp.where(mask[:, None, None], split_heads(x, H), 0)
        for x, mask in used
    ]


def split_weights(options: Options, operands: Operands) -> list[jax.Array]:
    """`attention_weights` of gat, `[source | destination | edge]`, as `[H, D]` each."""
    assert operands.attention_weights is not None
    (_, dim), H = operands.src.shape, options.num_heads
    nodes, edge = jnp.split(operands.attention_weights, (2 * dim,))
    nodes = nodes.reshape(2, H, dim // H)  # the two together: their heads may be sharded
    return [nodes[0], nodes[1], edge.reshape(H, edge.size // H)]


def share(x: jax.Array, a: jax.Array) -> jax.Array:
    """<x, a> per head: `[n, H, D]`, `[H, D]` -> `[n, H]`, accumulated."""
    dtype = accumulator_dtype(x.dtype)
    return (x.astype(dtype) * a.astype(dtype)[None]).sum(-1)


def _counters(operands, H, E):
    """(keys, rows) of dropout by key."""
    if operands.dropout_words is None:
        return None, None
    batch, head, row = (jnp.uint32(0),) * 3
    if operands.dropout_offset is not None:
        batch, head, row, _ = operands.dropout_offset
    keys = dropout.head_keys(operands.dropout_words, batch, head + jnp.arange(H, dtype=jnp.uint32))
    rows = jnp.arange(E, dtype=jnp.uint32)
    return keys, row if row.ndim else row + rows


def activate(options: Options, z: jax.Array) -> jax.Array:
    """act(z)."""
    alpha = options.alpha
    match options.activation:
        case "relu":
            return jnp.where(z > 0, z, 0)
        case "sigmoid":
            return jax.nn.sigmoid(z)
        case "tanh":
            return jnp.tanh(z)
        case "elu":
            return jnp.where(z > 0, z, jnp.expm1(jnp.where(z > 0, 0, z)))
        case "scalar":
            return alpha * z
        case "leaky_relu":
            return jnp.where(z > 0, z, alpha * z)
    return z


def slope(options: Options, z: jax.Array) -> jax.Array:
    """act'(z); at the kinks as in `jax.nn`."""
    one = jnp.ones((), z.dtype)
    match options.activation:
        case "relu":
            return jnp.where(z > 0, one, 0)
        case "sigmoid":
            y = jax.nn.sigmoid(z)
            return y * (1 - y)
        case "tanh":
            return 1 - jnp.tanh(z) ** 2
        case "elu":
            return jnp.where(z > 0, 1, jnp.exp(jnp.where(z > 0, 0, z)))
        case "scalar":
            return options.alpha * one
        case "leaky_relu":
            return jnp.where(z >= 0, one, options.alpha)
    return one


def total(*terms: jax.Array | None) -> jax.Array:
    """Sum of the terms that are there, by edge if any is: `[R, ...]` counts for each of W edges."""
    present = [x for x in terms if x is not None]
    rank = max(x.ndim for x in present)
    result, *others = (x if x.ndim == rank else x[None] for x in present)
    for x in others:
        result = result + x
    return result


def products(x: jax.Array, y: jax.Array) -> jax.Array:
    """<x, y> per head, `[W, R, H]`; either may be `[R, H, D]`."""
    letters = {3: "rhd", 4: "wrhd"}
    return jnp.einsum(
        f"{letters[x.ndim]},{letters[y.ndim]}->wrh", x, y, precision=lax.Precision.HIGHEST
    )


class Rows(NamedTuple):
    """What the score of each edge of a chunk, or of one edge of each group, is made of."""

    src: jax.Array
    dst: jax.Array
    edge: jax.Array | None


def score(options: Options, rows: Rows, t: Tables) -> jax.Array:
    """The scores of a chunk, `[W, R, H]`, without bias."""
    if options.kind == "gat":
        return activate(options, total(*rows))
    if options.kind == "gatv2":
        assert t.a is not None
        u = activate(options, total(*rows))
        return products(u, jnp.broadcast_to(t.a, u.shape[1:]))  # XLA:CPU is slow without the R of a
    return options.scale * products(total(rows.src, rows.edge), rows.dst)


def score_pullback(
    options: Options, t: Tables, ds: jax.Array, rows: Rows, to_dst: bool = False
) -> jax.Array:
    """The cotangent of `rows.src` and `rows.edge` (they are alike), or of `rows.dst`, by edge."""
    if options.kind == "gat":
        return ds * slope(options, total(*rows))
    if options.kind == "gatv2":
        assert t.a is not None
        a = t.a.reshape((1,) * (ds.ndim - 1) + t.a.shape)
        return ds[..., None] * a * slope(options, total(*rows))
    other = total(rows.src, rows.edge) if to_dst else rows.dst
    return options.scale * ds[..., None] * other


def factors(options: Options, t: Tables, chunk: Chunk) -> jax.Array | None:
    """Dropout factors of a chunk, `[W, R, H]`; None = all 1."""
    if t.mask is not None:
        return take(t.mask, chunk.edge)
    if t.keys is None or t.rows is None:
        return None
    row = take(t.rows, chunk.edge)[..., None]
    first, second = (x[None, None] for x in t.keys)
    keep = dropout.keep((first, second), row, jnp.zeros_like(row), options.dropout_rate)
    dtype = accumulator_dtype(t.message.dtype)
    return jnp.where(keep, jnp.asarray(dropout.survivor_factor(options.dropout_rate), dtype), 0)
