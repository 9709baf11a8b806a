"""GATv2, by Brody et al.: the activation comes before the product, so that no number of one end will do.

    u_e = h_src + h_dst (+ edge),   s_e = <a, act(u_e)>,   x_e = h_src

With ds and dx of the derivation in `backward.py`:

    du_e = ds_e a act'(u_e):   h_src, h_dst, edge get du_e                               (9)
    da   = sum_e ds_e act(u_e)                                                          (10)

References:
  Brody et al., How attentive are graph attention networks?, 2022, arXiv:2105.14491: the forward.
"""

from types import MappingProxyType

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import to_rank, total
from jax_attn_bwd.ops.graph.kinds.kind import (
    Edges,
    Kind,
    Rows,
    Sums,
    Tables,
    activate,
    heads_of,
    merge_heads,
    products,
    slope,
)
from jax_attn_bwd.ops.graph.loops import sum_of_group


class GATv2(Kind):
    """`graph_attention_v2`."""

    name = "gatv2"
    message_is_src = True
    sums_whole_chunks = True
    reads_twice = True
    placement = MappingProxyType({**Kind.placement, "attention_weights": (-1,)})

    def score_tables(self, operands):
        """Returns the features themselves, and a."""
        H, a = self.options.num_heads, operands.attention_weights
        src, dst, edge = (heads_of(x, H) for x in (operands.src, operands.dst, operands.edge))
        return src, dst, edge, None if a is None else a.reshape(H, -1)

    def score(self, t, rows):
        """Computes <a, act(u)>."""
        y = activate(self.options, total(*rows))
        return products(y, jnp.broadcast_to(t.a, y.shape[-3:]))  # XLA:CPU is slow without the R of a

    def score_tangent(self, t, a, rows, moving):
        """Computes <a, act'(u) du> + <da, act(u)>."""
        u, terms = total(*rows), []
        if any(x is not None for x in moving):
            dy = slope(self.options, u) * to_rank(total(*moving), u.ndim)
            terms.append(products(dy, jnp.broadcast_to(t.a, u.shape[-3:])))
        if a is not None:
            terms.append(products(activate(self.options, u), jnp.broadcast_to(a, u.shape[-3:])))
        return total(*terms)

    def needs(self, t, wanted: frozenset[str]) -> Sums:
        """Asks for a sum for each operand."""
        a = "attention_weights" in wanted
        return Sums(a=a, **{name: name in wanted for name in ("dst", "edge", "src")})

    def shares(self, t, need: Sums, edges: Edges) -> Sums:
        """Sums du by source, and returns du by edge, and da."""
        src = a = edge = None
        if need.src:
            src = edges.dx + sum_of_group(self._du(t, edges.ds, edges.rows), edges.chunk)
        if need.a:
            y = activate(self.options, total(*edges.rows))
            terms = edges.ds[..., None] * y
            if edges.chunk.exists is not None:  # XLA:GPU would write the terms, to sum them all at once
                terms = fusion.barrier(sum_of_group(terms, edges.chunk))
            a = terms.sum(0)  # (10)
        if need.edge:
            edge = self._du(t, edges.ds, edges.rows) + 0  # 0, not -0, where no gradient is
        return Sums(a=a, handed=edges.ds, edge=edge, src=src)

    def to_dst(self, t, handed, rows):
        """Returns du: every term of the sum u gets it (9)."""
        return self._du(t, handed, rows)

    def _du(self, t: Tables, ds: jax.Array, rows: Rows) -> jax.Array:
        """Computes the cotangent of u by (9)."""
        assert t.a is not None
        a = t.a.reshape((1,) * (ds.ndim - 1) + t.a.shape)
        return ds[..., None] * a * slope(self.options, total(*rows))

    def gradients(self, operands, sums, wanted):
        """Returns the sums, which are the gradients."""
        grads = {n: merge_heads(getattr(sums, n)) for n in ("src", "dst", "edge") if n in wanted}
        if "attention_weights" in wanted:
            grads["attention_weights"] = sums.a.reshape(-1)
        return grads
