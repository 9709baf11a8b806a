"""Graph transformer, by Shi et al.: scaled dot products; an edge's features join its key and its value.

    s_e = scale <q, k + edge> (+ bias),   x_e = v + edge

H / K heads of q that follow one another share a head of k, v and edge.

With ds and dx of the derivation in `backward.py`:

    dq = scale sum ds (k + edge),   dk = scale sum ds q,   dv = sum dx
    dedge = scale ds q + dx,   dbias = ds                                               (11)

where dk, dv and dedge are also summed over the heads that share them.

In the tables k is src and q is dst.

References:
  Shi et al., Masked label prediction, 2021, arXiv:2009.03509: the forward.
"""

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import reduce_to, total
from jax_attn_bwd.ops.graph.kinds.kind import Edges, Kind, Sums, heads_of, merge_heads, products
from jax_attn_bwd.ops.graph.loops import sum_of_group


class Transformer(Kind):
    """`graph_transformer_attention`."""

    name = "transformer"
    edge_in_message = True

    def score_tables(self, operands):
        """Returns k, q and the edges' features."""
        K, H = self.options.num_kv_heads, self.options.num_heads
        return heads_of(operands.src, K), heads_of(operands.dst, H), heads_of(operands.edge, K), None

    def row_elements(self, operands):
        """Counts the elements of the wider of key and value."""
        return self.options.sharing * jax.core.max_dim(operands.src.shape[-1], operands.value.shape[-1])

    def to_heads(self, x):
        """Repeats `[..., K, D]` to `[..., H, D]`."""
        if self.options.sharing == 1:
            return x
        shape = (*x.shape[:-1], self.options.sharing, x.shape[-1])
        return jnp.broadcast_to(x[..., None, :], shape).reshape(*x.shape[:-2], -1, x.shape[-1])

    def from_heads(self, x):
        """Sums `[..., H, D]` to `[..., K, D]`."""
        shape = (*x.shape[:-2], self.options.num_kv_heads, self.options.sharing, x.shape[-1])
        return x if self.options.sharing == 1 else x.reshape(shape).sum(-2)

    def score(self, t, rows):
        """Computes the scaled products."""
        return self.options.scale * products(total(rows.src, rows.edge), rows.dst)

    def score_tangent(self, t, a, rows, moving):
        """Computes (<dq, k + edge> + <q, dk + dedge>) scale."""
        terms = []
        if moving.dst is not None:
            terms.append(products(total(rows.src, rows.edge), moving.dst))
        if moving.src is not None or moving.edge is not None:
            terms.append(products(total(moving.src, moving.edge), rows.dst))
        return self.options.scale * total(*terms) if terms else None

    def needs(self, t, wanted: frozenset[str]) -> Sums:
        """Asks for a sum for each operand; the bias has ds for its gradient."""
        bias, value = "score_bias" in wanted, "value" in wanted
        return Sums(handed=bias, message=value, **{name: name in wanted for name in ("dst", "edge", "src")})

    def shares(self, t, need: Sums, edges: Edges) -> Sums:
        """Sums dk by source, and returns dedge (11)."""
        src = edge = None
        if need.src:
            src = self.from_heads(sum_of_group(self._to_key(edges.ds, edges.rows), edges.chunk))
        if need.edge:
            edge = self._to_key(edges.ds, edges.rows) + edges.w[..., None] * edges.dout
            edge = self.from_heads(edge)
        return Sums(handed=edges.ds, edge=edge, src=src)

    def to_dst(self, t, handed, rows):
        """Computes the share of dq (11)."""
        return self.options.scale * handed[..., None] * total(rows.src, rows.edge)

    def _to_key(self, ds, rows):
        """Computes the share of dk, and of dedge through the score (11)."""
        return self.options.scale * ds[..., None] * rows.dst

    def gradients(self, operands, sums, wanted):
        """Returns the sums, which are the gradients where the bias did not broadcast."""
        grads = {}
        if "score_bias" in wanted:
            grads["score_bias"] = reduce_to(sums.handed, operands.score_bias.shape)
        by_operand = {"src": sums.src, "value": sums.message, "dst": sums.dst, "edge": sums.edge}
        return grads | {name: merge_heads(x) for name, x in by_operand.items() if name in wanted}
