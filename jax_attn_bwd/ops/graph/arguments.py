"""From the arguments of a call to checked `Options` and `Operands`."""

from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core import checks, dropout, head_scale, sharding, split
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.sharding import mesh_axes_of
from jax_attn_bwd.ops.graph import kinds
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2, Transformer
from jax_attn_bwd.ops.graph.placement import laid_like_nodes
from jax_attn_bwd.ops.graph.spec import ACTIVATIONS, Operands, Options
from jax_attn_bwd.ops.graph.structure import BipartiteCSC, check_of_one_graph


def prepare_additive(
    operator: str, kind: type[GAT] | type[GATv2], graph, src, dst, attention_weights, *, num_heads,
    edge, concat_heads, activation, alpha, dropout_rate, dropout_key, dropout_mask, dropout_offset,
    return_attention_weights,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `graph_attention` or `graph_attention_v2`."""
    # the graph and the nodes of both sides; destinations that are not given are the first sources
    graph = check_graph(operator, graph)
    src = _nodes(operator, "src", src, "num_src", graph.num_src)
    dst = rows_of_destinations(operator, "dst", "be given", graph, src) if dst is None else dst
    dst = _nodes(operator, "dst", dst, "num_dst", graph.num_dst, src.shape[-1])
    batch = _batch(operator, src=src, dst=dst)
    checks.same_dtype(operator, src=src, dst=dst)
    heads = _divisor(operator, "num_heads", num_heads, "the width of src", src.shape[-1])

    # data by edge, as wide as the nodes where they are added to them
    width, is_v2 = src.shape[-1], kind is GATv2
    if edge is not None:
        edge = _edge(operator, edge, graph, batch, width if is_v2 else None)
        if edge.shape[-1] % heads:
            expected = f"have a width that num_heads = {heads} divides"
            raise ValueError(checks.message(operator, "edge", expected, edge.shape))

    # the attention weights, whose size the widths of nodes and edges decide
    attention_weights = checks.floating(operator, "attention_weights", attention_weights)
    names, size = ("[dim]", width) if is_v2 else ("[2 * dim]", 2 * width)
    if edge is not None and not is_v2:
        names, size = "[2 * dim + dim_edge]", size + edge.shape[-1]
    ravel = "write attention_weights.ravel()" if attention_weights.size == size else ""
    checks.shape(operator, "attention_weights", attention_weights, names, (size,), ravel)

    # what changes the answer, and what dropout draws from
    options = Options(
        kind.name,
        heads,
        checks.flag(operator, "concat_heads", concat_heads),
        checks.choice(operator, "activation", activation, ACTIVATIONS),
        checks.python_float(operator, "alpha", alpha, dtype=accumulator_dtype(src.dtype)),
        dropout_rate=checks.rate(operator, "dropout_rate", dropout_rate),
        return_weights=checks.flag(operator, "return_attention_weights", return_attention_weights),
    )
    mask, words, offset = _dropout(operator, options, graph, batch, dropout_key, dropout_mask, dropout_offset)

    # where the arrays may lie, and where they then do
    _check_explicit_sharding(operator, "num_heads", heads, src=src, dst=dst)
    if "attention_weights" not in kind.placement and any(spec := sharding.explicit_spec(attention_weights)):
        remedy = "the vectors of several sides follow one another in it; reshard it"
        expected = "not be sharded"
        raise ValueError(checks.message(operator, "attention_weights", expected, spec, remedy))
    operands = Operands(graph, src, dst, None, attention_weights, edge, None, mask, words, offset)
    return options, _laid_out_and_numbered(options, operands)


def rows_of_destinations(
    operator: str, argument: str, needed: str, graph: BipartiteCSC, src: jax.Array, got: Any = None
) -> jax.Array:
    """Returns the first rows of `src`, if they are the destinations; `needed` is what an error asks for."""
    if graph.num_dst > graph.num_src:
        expected = f"{needed}, or num_dst = {graph.num_dst} be at most num_src = {graph.num_src}"
        raise ValueError(checks.message(operator, argument, expected, got))
    if not graph.aligned:
        expected = f"{needed} for graphs side by side with other numbers of sources"
        raise ValueError(
            checks.message(operator, argument, expected, got, "batch.dst.join makes that of dst")
        )
    if (rows := sharding.explicit_spec(src)[-2]) is None:
        return src[..., : graph.num_dst, :]
    dst = sharding.unsharded(src, -2)[..., : graph.num_dst, :]
    shared_evenly = graph.num_dst % sharding.axis_size(src, rows) == 0
    return sharding.reshard_like(dst, src, range(src.ndim)) if shared_evenly else dst


def prepare_transformer(
    operator: str, graph, query, key, value, *, num_heads, num_kv_heads, edge, score_bias, scale,
    concat_heads, dropout_rate, dropout_key, dropout_mask, dropout_offset, return_attention_weights,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `graph_transformer_attention`."""
    # the graph and the nodes of both sides; heads of the query may share those of key and value
    graph = check_graph(operator, graph)
    query = _nodes(operator, "query", query, "num_dst", graph.num_dst)
    heads = _divisor(operator, "num_heads", num_heads, "the width of query", query.shape[-1])
    shared = heads
    if num_kv_heads is not None:
        shared = _divisor(operator, "num_kv_heads", num_kv_heads, "num_heads", heads)
    width = query.shape[-1] // heads * shared
    key = _nodes(operator, "key", key, "num_src", graph.num_src)
    if key.shape[-1] != width:
        size = (*key.shape[:-1], width)
        expected = f"have shape [..., num_src, {'dim' if shared == heads else 'K * D'}] = {size}"
        remedy = "num_kv_heads is the number of its heads" if num_kv_heads is None else ""
        raise ValueError(checks.message(operator, "key", expected, key.shape, remedy))
    value = _nodes(operator, "value", value, "num_src", graph.num_src)
    batch = _batch(operator, query=query, key=key, value=value)
    checks.same_dtype(operator, query=query, key=key, value=value)
    if value.shape[-1] % shared:
        expected = f"have a width that its {shared} heads divide"
        raise ValueError(checks.message(operator, "value", expected, value.shape))

    # data by edge
    if edge is not None:
        edge = _edge(operator, edge, graph, batch, width)
        if value.shape[-1] != width:
            expected = f"have the width of key, {width}, where edge is given"
            remedy = "edge features are added to both"
            raise ValueError(checks.message(operator, "value", expected, value.shape, remedy))
    if score_bias is not None:
        score_bias = checks.floating(operator, "score_bias", score_bias)
        own = () if score_bias.ndim <= 2 else _own_batch(operator, "score_bias", score_bias, batch)
        size = (*own, graph.capacity, heads)
        checks.broadcasts(operator, "score_bias", score_bias, "[..., nnz, H]", size)
        score_bias = to_rank(score_bias, 2)

    # what changes the answer, and what dropout draws from
    options = Options(
        Transformer.name,
        heads,
        checks.flag(operator, "concat_heads", concat_heads),
        scale=head_scale.static(operator, scale, query.shape[-1] // heads, query.dtype),
        dropout_rate=checks.rate(operator, "dropout_rate", dropout_rate),
        return_weights=checks.flag(operator, "return_attention_weights", return_attention_weights),
        sharing=heads // shared,
    )
    mask, words, offset = _dropout(operator, options, graph, batch, dropout_key, dropout_mask, dropout_offset)

    # where the arrays may lie, and where they then do
    fewest = "num_heads" if shared == heads else "num_kv_heads"
    _check_explicit_sharding(operator, fewest, shared, query=query, key=key, value=value)
    query = head_scale.times(query, scale)
    operands = Operands(graph, key, query, value, None, edge, score_bias, mask, words, offset)
    return options, _laid_out_and_numbered(options, operands)


def check_graph(operator: str, graph: Any) -> BipartiteCSC:
    """Checks that `graph` is one `BipartiteCSC`, not a stack of them."""
    remedy = "build one with BipartiteCSC.from_edge_index, from_coo or from_csc"
    remedy = "write batch.graph" if isinstance(getattr(graph, "graph", None), BipartiteCSC) else remedy
    graph = checks.instance(operator, "graph", graph, BipartiteCSC, remedy)
    if (stack := np.shape(graph.offsets)[:-1]) != ():
        remedy = "map over it by jax.vmap of the call"
        raise ValueError(
            checks.message(operator, "graph", "be one graph", f"a stack of {stack} graphs", remedy)
        )
    check_of_one_graph(operator, graph)
    return graph


def check_cotangents(
    operator: str, options: Options, operands: Operands, dout, out, lse, dweights, dlse
) -> None:
    """Checks shapes and dtypes of what a `_bwd` gets beside the arguments of the forward; None passes."""
    # the shape and dtype of each, by the operands
    nodes, heads, E = operands.dst.shape[-2], options.num_heads, operands.graph.capacity
    message = operands.src if operands.value is None else operands.value
    width, batch = message.shape[-1] // options.num_kv_heads, operands.batch_axes
    per_head = (*batch, nodes, heads * width)
    shape = per_head if options.concat_heads else (*batch, nodes, width)
    dtype, wide = operands.src.dtype, accumulator_dtype(operands.src.dtype)
    expected = {
        "dout": (dout, "the shape of out", shape, dtype),
        "out": (out, "[..., num_dst, dim] (per head)", per_head, dtype),
        "lse": (lse, "[..., num_dst, H]", (*batch, nodes, heads), wide),
        "dweights": (dweights, "[..., nnz, H]", (*batch, E, heads), dtype),
        "dlse": (dlse, "[..., num_dst, H]", (*batch, nodes, heads), wide),
    }

    for argument, (x, names, size, kind) in expected.items():
        if x is None:
            continue
        x = checks.floating(operator, argument, x)
        checks.shape(operator, argument, x, names, size)
        if x.dtype != kind:
            got = f"dtype {x.dtype}"
            raise TypeError(checks.message(operator, argument, f"have dtype {kind}", got))


def _nodes(
    operator: str, argument: str, x: Any, name: str, nodes: int, width: int | None = None
) -> jax.Array:
    """Checks the features of all nodes of one side, `[..., nodes, dim]`."""
    x = checks.floating(operator, argument, x)
    checks.rank(operator, argument, x, f"[..., {name}, dim]", least=2)
    size = (*x.shape[:-2], nodes, x.shape[-1] if width is None else width)
    if x.shape != size:
        remedy = ""
        if x.shape[-3:-2] == (nodes,):  # [nodes, heads, size], or [nodes, batch, dim]
            remedy = (
                f"heads lie side by side, {argument}.reshape(*{argument}.shape[:-2], -1); a batch in front"
            )
        expected = f"have shape [..., {name}, dim] = {size}"
        raise ValueError(checks.message(operator, argument, expected, x.shape, remedy))
    return x


def _batch(operator: str, **nodes: jax.Array) -> tuple[int, ...]:
    """Returns the batch axes of a call, alike in all nodes that have any; nodes without them are shared."""
    batches = {argument: x.shape[:-2] for argument, x in nodes.items() if x.ndim > 2}
    (first, batch), *_ = batches.items() or [("", ())]
    for argument, own in batches.items():
        if own != batch:
            expected = f"have the batch axes of {first}, {batch}, or none"
            raise ValueError(checks.message(operator, argument, expected, own))
    return batch


def _own_batch(operator: str, argument: str, x: jax.Array, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the batch axes of data by edge, in front of two others: the same as the call's, or none."""
    if (own := x.shape[:-2]) not in ((), batch):
        expected = "have two axes, as the nodes have no batch axes"
        if batch:
            expected = f"have the batch axes of the nodes, {batch}, or none"
        raise ValueError(checks.message(operator, argument, expected, own if batch else x.shape))
    return own


def _divisor(operator: str, argument: str, n: Any, of: str, whole: int) -> int:
    """Checks a number of heads, which divides what is named `of`."""
    n = checks.integer(operator, argument, n)
    if n < 1 or whole % n:
        raise ValueError(checks.message(operator, argument, f"be positive and divide {of}, {whole}", n))
    return n


def _edge(
    operator: str, edge: Any, graph: BipartiteCSC, batch: tuple[int, ...], width: int | None
) -> jax.Array:
    """Checks edge features, `[..., nnz, dim_edge]`, or as wide as the nodes' where `width` is given."""
    edge = checks.floating(operator, "edge", edge)
    names = "[..., nnz, dim_edge]" if width is None else "[..., nnz, dim]"
    checks.rank(operator, "edge", edge, names, least=2)
    own = _own_batch(operator, "edge", edge, batch)
    size = (*own, graph.capacity, edge.shape[-1] if width is None else width)
    loops = graph.capacity - edge.shape[-2] == min(graph.num_src, graph.num_dst)
    remedy = "the graph has self-loops: add them by graph.with_self_loops(edge), which gives them features"
    checks.shape(operator, "edge", edge, names, size, remedy if loops else "")
    return edge


def _check_explicit_sharding(operator: str, name: str, heads: int, **nodes: jax.Array) -> None:
    """Checks that an Explicit mesh shards batches and heads, counted by `name`, alike; nodes as it likes."""
    first, like = max(nodes.items(), key=lambda item: item[1].ndim)
    for argument, x in nodes.items():
        spec, (*batch, _, heads_axis) = sharding.explicit_spec(x), sharding.explicit_spec(like)
        if (*spec[:-2], spec[-1]) != (*batch, heads_axis)[-x.ndim + 1 :]:
            expected = f"be sharded like {first}, {sharding.explicit_spec(like)}, but for its nodes"
            raise ValueError(checks.message(operator, argument, expected, spec, "reshard it"))
        if mesh_axes_of(spec[-2]) & mesh_axes_of(*batch, heads_axis):
            expected = f"have its nodes along another mesh axis than batch and heads of {first}"
            raise ValueError(checks.message(operator, argument, expected, spec, "reshard it"))
    axis = sharding.explicit_spec(like)[-1]
    if axis is not None and heads % (n := sharding.axis_size(like, axis)):
        expected = f"be a multiple of the size {n} of mesh axis {axis!r}"
        raise ValueError(checks.message(operator, name, expected, heads, "reshard it"))


def _laid_out_and_numbered(options: Options, operands: Operands) -> Operands:
    """Lays heads out like those of `src` on an Explicit mesh; numbers the dropout of a batch's entries."""
    axes = kinds.of(options).placement
    given = {name: getattr(operands, name) for name in axes}
    laid: dict[str, Any] = {
        name: laid_like_nodes(x, operands, axes[name]) for name, x in given.items() if x is not None
    }
    operands = operands._replace(**laid)

    # dropout, if it is drawn from a key, has a stream for each entry of the batch
    rank = len(operands.batch_axes)
    if operands.dropout_words is None or not rank:
        return operands
    offset = split.dropout_indices(operands.dropout_offset, operands.leader, rank)
    return operands._replace(dropout_offset=offset)


def _dropout(operator, options, graph, batch, key, mask, offset):
    """Checks dropout and returns (mask, words, offset): the caller's factors, or what a key needs."""
    if mask is not None:
        if options.dropout_rate or key is not None:
            expected = "not be given together with dropout_rate or dropout_key"
            remedy = "it holds the factors 0 and 1 / (1 - rate) already"
            raise ValueError(checks.message(operator, "dropout_mask", expected, "both", remedy))
        mask = checks.floating(operator, "dropout_mask", mask)
        own = () if mask.ndim <= 2 else _own_batch(operator, "dropout_mask", mask, batch)
        size = (*own, options.num_heads, graph.capacity)
        checks.shape(operator, "dropout_mask", mask, "[..., H, nnz]", size)
    rates = {"dropout_rate": options.dropout_rate}
    return mask, *dropout.words_and_offset(operator, rates, key, offset, graph.capacity, 1)
