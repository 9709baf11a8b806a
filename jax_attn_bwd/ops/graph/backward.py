"""Backward of the graph attentions: derivation, then the portable code.

The forward, for edge e from j to i, with Z the dropout factors and the scores s of `scores.py`:

    p_e   = exp(s_e - lse_i),   lse_i = log sum_e exp(s_e)   over the edges into i       (1)
    w_e   = Z_e p_e                                                                      (2)
    out_i = sum_e w_e x_e,   x_e the message: h_src, or v (+ edge)                       (3)

Given cotangents dout of (3), dw of the returned weights (2), dlse of (1):

    dx_e    = w_e dout_i                                              from (3)           (4)
    c_e     = <dout_i, x_e> + dw_e                                    from (3), (2)
    ds_e    = p_e (Z_e c_e - sum_f w_f c_f) + p_e dlse_i              from (2), (1)

The sum over f, the other edges into i, needs no pass of its own, since sum_f w_f x_f = out_i:

    delta_i = <dout_i, out_i> + sum_f w_f dw_f - dlse_i                                  (5)
    ds_e    = p_e (Z_e c_e - delta_i),   dbias = ds                                      (6)

What follows is by kind, with u = h_src + h_dst (+ edge) and z the argument of gat's activation:

    gat          dz_e = ds_e act'(z_e):   each of the three scalar shares gets dz_e      (7)
                 dh_src = sum dx + a_src sum dz,   da_src = sum_j h_j sum dz,   and so on (8)
    gatv2        du_e = ds_e a act'(u_e):   h_src, h_dst, edge get du_e                  (9)
                 da   = sum_e ds_e act(u_e)                                             (10)
    transformer  dq = scale sum ds (k + edge),   dk = scale sum ds q,   dv = sum dx
                 dedge = scale ds q + dx                                                (11)

Everything that the edges out of a source need is the source's own rows and those of the destinations,
so one pass over the edges sorted by source gives (1) to (6) and the gradients of sources and edges. It
hands one number per edge and head (dz for gat, else ds) to the destinations: for gat their gradient is
a sum of such numbers, and no second pass reads features; the others read the sources' rows once more.

References:
  Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903: the forward of gat.
  Brody et al., How attentive are graph attention networks?, 2022, arXiv:2105.14491: of gatv2.
  Shi et al., Masked label prediction, 2021, arXiv:2009.03509: of transformer.
  Dao et al., FlashAttention, 2022, arXiv:2205.14135: (5) for dense attention.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import reduce_to
from jax_attn_bwd._core.sharding import full_like_operands, match_type, reshard_like
from jax_attn_bwd.ops.graph import groups, scores
from jax_attn_bwd.ops.graph.forward import finite, has_edges, shown, visible, with_bias
from jax_attn_bwd.ops.graph.groups import Chunk, take
from jax_attn_bwd.ops.graph.scores import Rows, Tables
from jax_attn_bwd.ops.graph.spec import Cotangents, Options, Residuals


class Saved(NamedTuple):
    """Rows of the destinations that the pass over the sources reads, and dw by edge."""

    dout: jax.Array  # [num_dst, H, D]
    delta: jax.Array  # [num_dst, H]
    lse: jax.Array  # [num_dst, H], finite
    low: jax.Array  # [num_dst, H]
    dweights: jax.Array | None  # [E, H]


def backward(
    options: Options, residuals: Residuals, cotangents: Cotangents
) -> dict[str, jax.Array]:
    """Gradients of the operands in `residuals.wanted`, by name."""
    return _backward(options, residuals, cotangents)


@partial(jax.jit, static_argnums=0)
def _backward(options, residuals, cotangents):
    operands, wanted = residuals.operands, residuals.wanted.names
    t = scores.tables(options, operands)
    sums = _zeros(options, t, residuals, cotangents)
    if has_edges(operands.graph):
        saved = _saved(options, residuals, cotangents)
        sums = _source_pass(options, t, saved, operands.graph, sums)
        if "dst" in sums:
            sums["dst"] = _destination_pass(options, t, operands.graph, sums)
    grads = _gradients(options, operands, sums, wanted)
    return {name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}


def _saved(options: Options, residuals: Residuals, cotangents: Cotangents) -> Saved:
    """The destinations' rows, with delta (5)."""
    operands, (out, _, weights, lse, low) = residuals.operands, residuals.result
    dtype, H = lse.dtype, options.num_heads
    heads = lambda x: x.reshape(x.shape[0], H, x.shape[1] // H)  # noqa: E731
    out, dout = heads(out), cotangents.out
    if dout is None:
        dout = jnp.zeros_like(out)
    elif options.concat_heads:
        dout = heads(dout)
    else:
        dout = jnp.broadcast_to((dout.astype(dtype) / H)[:, None], out.shape)
        dout = reshard_like(dout, out, (0, 1, 2))
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(-1)
    if cotangents.weights is not None:
        delta = delta + _sum_by_destination(operands.graph, weights, cotangents.weights, delta)
    if cotangents.lse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0, cotangents.lse)
    low = jnp.zeros_like(lse) if low is None else low
    dweights = None if cotangents.weights is None else cotangents.weights.astype(dtype)
    return Saved(dout, delta, finite(lse), low, dweights)


def _sum_by_destination(graph, x, y, like):
    """Sum of x y over the edges into each destination, `[num_dst, H]`."""

    def body(sums, chunk):
        x_e, y_e = (take(a, chunk.edge).astype(sums.dtype) for a in (x, y))
        terms = x_e * jnp.where(x_e == 0, 0, y_e)  # the edge may be hidden, and y there anything
        return groups.add(sums, chunk.node, terms.sum(0))

    zeros = full_like_operands(like, like.shape, 0, like.dtype, (x, y, graph))
    return groups.scan(body, zeros, graph.by_destination, graph.capacity, x.shape[1])


def _zeros(options, t: Tables, residuals, cotangents) -> dict[str, jax.Array]:
    """What is summed over the edges for the gradients that are wanted, all 0.

    "message" and "src" are the two ways to a source, through (3) and through the score; for gatv2 "src"
    takes both. "ds" is not a sum: it holds ds of every edge (dz for gat).
    """
    wanted, operands = residuals.wanted.names, residuals.operands
    (_, H, D), E, dtype = t.message.shape, operands.graph.capacity, residuals.result.lse.dtype
    gat, weights = options.kind == "gat", "attention_weights" in wanted
    like: dict[str, tuple[jax.Array, tuple[int, ...]]] = {}
    if ("value" if options.kind == "transformer" else "src") in wanted and options.kind != "gatv2":
        like["message"] = (t.message, t.message.shape)
    if "src" in wanted or (gat and weights):
        like["src"] = (t.src, t.src.shape)
    if "dst" in wanted or (gat and weights):
        like["dst"] = (t.dst, t.dst.shape)
    if "edge" in wanted and not gat:
        assert t.edge is not None
        like["edge"] = (t.edge, t.edge.shape)
    if weights and not gat:
        assert t.a is not None
        like["a"] = (t.a, (H, D))
    by_edge = gat and (weights or "edge" in wanted)
    if "dst" in like or "score_bias" in wanted or by_edge:
        like["ds"] = (residuals.result.lse, (E, H))
    operands = (operands, residuals.result, cotangents)
    return {n: full_like_operands(x, shape, 0, dtype, operands) for n, (x, shape) in like.items()}


def _source_pass(options, t, saved, graph, sums):
    """Adds the share of every edge to all sums but "dst"; the groups are of sources."""
    names = frozenset(sums) - {"dst"}
    if not names:
        return sums
    share = jax.checkpoint(partial(_share, options, t, saved, names), prevent_cse=False)

    def body(sums, chunk):
        new = dict(sums)
        for name, x in share(chunk).items():
            if name == "a":
                new[name] = sums[name] + x
            elif name in ("edge", "ds"):
                new[name] = groups.put(sums[name], chunk.edge, x)
            else:
                new[name] = groups.add(sums[name], chunk.node, x)
        return new

    return groups.scan(
        body, sums, graph.by_source, graph.capacity, t.message.shape[1] * t.message.shape[2]
    )


def _share(options: Options, t: Tables, saved: Saved, names: frozenset[str], chunk: Chunk):
    """What the edges of a chunk give to each of the sums named."""
    dtype, seen = saved.delta.dtype, visible(t, chunk)
    own = take(t.src, chunk.node).astype(dtype)
    rows = _rows(t, own, None, chunk, seen)
    s = with_bias(scores.score(options, rows, t), t, chunk, seen)
    p = jnp.exp((s - take(saved.lse, chunk.other)) - take(saved.low, chunk.other))  # (1)
    z = scores.factors(options, t, chunk)
    w = p if z is None else p * z  # (2)
    slots = [_slot(chunk, seen, k) for k in range(p.shape[0])]

    def douts(at, seen):
        return shown(take(saved.dout, at.other).astype(dtype), seen)

    found = {}
    if "message" in names or options.kind == "gatv2":
        found["message"] = sum(w[k][..., None] * douts(*at) for k, at in enumerate(slots))  # (4)
    if names == {"message"}:
        return found

    message, dout = take(t.message, chunk.node).astype(dtype), douts(chunk, seen)
    edge_message = options.kind == "transformer" and rows.edge is not None
    c = scores.products(dout, scores.total(message, rows.edge) if edge_message else message)
    if saved.dweights is not None:
        c = c + take(saved.dweights, chunk.edge)
    c, delta = c if z is None else z * c, take(saved.delta, chunk.other)
    if seen is not None:
        c, delta = jnp.where(seen, c, 0), jnp.where(seen, delta, 0)
    ds = p * (c - delta)  # (6)

    pull = partial(scores.score_pullback, options, t)
    if options.kind == "gat":
        ds = pull(ds, rows)  # (7)
        found["src"] = ds.sum(0)
    elif "src" in names:
        terms = (pull(ds[k], _rows(t, own, None, *at)) for k, at in enumerate(slots))
        found["src"] = sum(terms, found.pop("message") if options.kind == "gatv2" else 0)
    if "a" in names:
        u = scores.activate(options, scores.total(*rows))
        da = jnp.einsum("wrh,wrhd->rhd", ds, u, precision=lax.Precision.HIGHEST)  # (10)
        found["a"] = da.sum(0)
    if "edge" in names:
        dx = w[..., None] * dout if edge_message else 0
        found["edge"] = pull(ds, rows) + dx  # (9), (11)
    found["ds"] = ds
    return {name: x for name, x in found.items() if name in names}


def _slot(chunk: Chunk, seen: jax.Array | None, k: int) -> tuple[Chunk, jax.Array | None]:
    """The chunk with the k-th edge of each group alone, and what of it is seen."""
    at = chunk._replace(other=chunk.other[k], edge=chunk.edge[k], exists=chunk.exists[k])
    return at, None if seen is None else seen[k]


def _rows(t: Tables, src: Any, dst: Any, chunk: Chunk, seen: Any) -> Rows:
    """What the scores of a chunk are made of, where one end's own rows are given."""

    def other(table):
        return shown(take(table, chunk.other).astype(own.dtype), seen)

    own = dst if src is None else src
    edge = None if t.edge is None else shown(take(t.edge, chunk.edge).astype(own.dtype), seen)
    return Rows(other(t.src) if src is None else src, other(t.dst) if dst is None else dst, edge)


def _destination_pass(options, t, graph, sums):
    """The sum for each destination, of the ds (dz for gat) that the other pass left."""
    by_edge, dtype = sums["ds"], sums["ds"].dtype

    def share(chunk):
        if options.kind == "gat":
            return take(by_edge, chunk.edge).sum(0)
        own, seen, result = take(t.dst, chunk.node).astype(dtype), visible(t, chunk), 0
        for k in range(chunk.edge.shape[0]):
            at, seen_k = _slot(chunk, seen, k)
            rows, ds = _rows(t, None, own, at, seen_k), take(by_edge, at.edge)
            result = result + scores.score_pullback(options, t, ds, rows, to_dst=True)  # (9), (11)
        return result

    def body(dst, chunk):
        return groups.add(dst, chunk.node, jax.checkpoint(share, prevent_cse=False)(chunk))

    elements = t.message.shape[1] * (1 if options.kind == "gat" else t.message.shape[2])
    return groups.scan(body, sums["dst"], graph.by_destination, graph.capacity, elements)


def _gradients(options, operands, sums, wanted) -> dict[str, jax.Array]:
    """The gradients of the operands, from the sums."""
    merged = lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2])  # noqa: E731
    grads = {}
    if "score_bias" in wanted:
        grads["score_bias"] = reduce_to(sums["ds"], operands.score_bias.shape)
    if options.kind != "gat":
        for name, total in (("src", "src"), ("value", "message"), ("dst", "dst"), ("edge", "edge")):
            if name in wanted:
                grads[name] = merged(sums[total])
        if "attention_weights" in wanted:
            grads["attention_weights"] = sums["a"].reshape(-1)
        return grads

    weights = scores.split_weights(options, operands)  # (8)
    shares = {"src": sums.get("src"), "dst": sums.get("dst"), "edge": sums.get("ds")}
    for (name, dz), a in zip(shares.items(), weights, strict=True):
        if name in wanted:
            spread = dz[..., None] * a.astype(dz.dtype)[None]
            grads[name] = merged(sums["message"] + spread if name == "src" else spread)
    if "attention_weights" in wanted:
        features = scores.gat_features(options, operands)
        parts = [
            (dz[..., None] * x.astype(dz.dtype)).sum(0)
            for dz, x in zip(shares.values(), features, strict=True)
            if x is not None
        ]
        parts = [jnp.stack(parts[:2]), *parts[2:]]  # both halves of the nodes in one collective
        whole = (reshard_like(x, x, (None,) * x.ndim) for x in parts)
        flat = [x.reshape(-1) for x in whole]
        grads["attention_weights"] = jnp.concatenate(flat)
    return grads
