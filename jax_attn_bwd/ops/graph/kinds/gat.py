"""GAT, by Velickovic et al.: additive scores, of one number of each end and of the edge.

    z_e = <h_src, a_src> + <h_dst, a_dst> (+ <edge, a_edge>),   s_e = act(z_e),   x_e = h_src

With ds and dx of the derivation in `backward.py`:

    dz_e = ds_e act'(z_e):   each of the three scalar shares gets dz_e                   (7)
    dh_src = sum dx + a_src sum dz,   da_src = sum_j h_j sum dz,   and so on             (8)

The gradient of a destination is a sum of numbers: no second pass reads features.

References:
  Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903: the forward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank, total
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.graph import placement
from jax_attn_bwd.ops.graph.kinds.kind import Edges, Kind, Sums, activate, heads_of, merge_heads, slope
from jax_attn_bwd.ops.graph.loops import sum_of_group
from jax_attn_bwd.ops.graph.spec import Operands


class GAT(Kind):
    """`graph_attention`; its tables of the score hold a number of each node, edge and head."""

    name = "gat"
    scores_of_numbers = True

    def score_tables(self, operands):
        """Computes the three shares of z."""
        sides = self._sides(operands)
        return *(None if x is None else _share(x, a, used) for x, used, a in sides), None

    def score_tables_tangent(self, operands, tangents):
        """Computes the tangents of the three shares."""
        da = tangents.attention_weights
        moving = [None] * 3 if da is None else self._split_weights(operands, da)
        given = zip(self._sides(operands), self._features(tangents), moving, strict=True)
        return *(_share_tangent(x, dx, used, a, da) for (x, used, a), dx, da in given), None

    def score(self, t, rows):
        """Computes act(z)."""
        return activate(self.options, total(*rows))

    def score_tangent(self, t, a, rows, moving):
        """Computes act'(z) dz."""
        if not any(x is not None for x in moving):
            return None
        z = total(*rows)
        return slope(self.options, z) * to_rank(total(*moving), z.ndim)

    def needs(self, t, wanted: frozenset[str]) -> Sums:
        """Asks for all sums where `attention_weights` is wanted: its gradient is made of them."""
        weights = "attention_weights" in wanted
        return Sums(
            handed="edge" in wanted or (weights and t.edge is not None),
            dst="dst" in wanted or weights,
            message="src" in wanted,
            src="src" in wanted or weights,
        )

    def shares(self, t, need: Sums, edges: Edges) -> Sums:
        """Computes dz, and its sum by source."""
        dz = edges.ds * slope(self.options, total(*edges.rows))  # (7)
        return Sums(handed=dz, src=sum_of_group(dz, edges.chunk))

    def to_dst(self, t, handed, rows):
        """Returns dz, which is handed on, as it is."""
        return handed

    def gradients(self, operands, sums, wanted):
        """Carries the gradients of the shares back through their products (8)."""
        # each operand gets dz times its weights; that of the message joins the sources
        grads = {}
        dz = {"src": sums.src, "dst": sums.dst, "edge": sums.handed}
        for (name, x), a in zip(
            dz.items(), self._split_weights(operands, operands.attention_weights), strict=True
        ):
            if name in wanted:
                spread = x[..., None] * a.astype(x.dtype)[None]
                grads[name] = merge_heads(sums.message + spread if name == "src" else spread)

        # the weights of each side get dz times its features, summed over all rows and gathered at the end
        if "attention_weights" in wanted:
            given = zip(dz.values(), self._features(operands), self._used(operands), strict=True)
            sides = [
                (x[..., None] * _shown(feature, used).astype(x.dtype)).sum(0)
                for x, feature, used in given
                if feature is not None
            ]
            sides = [jnp.stack(sides[:2]), *sides[2:]]  # both kinds of nodes in one collective
            whole = (reshard_like(x, x, (None,) * x.ndim) for x in sides)
            grads["attention_weights"] = jnp.concatenate([x.reshape(-1) for x in whole])
        return grads

    def _sides(self, operands: Operands) -> list[tuple[Any, jax.Array, jax.Array]]:
        """Returns of src, dst and edge the features, which of their rows are used, and their weights."""
        a = self._split_weights(operands, operands.attention_weights)
        return list(zip(self._features(operands), self._used(operands), a, strict=True))

    def _features(self, operands: Operands) -> list[jax.Array | None]:
        """Splits src, dst and edge into heads."""
        H = self.options.num_heads
        return [heads_of(x, H) for x in (operands.src, operands.dst, operands.edge)]

    def _used(self, operands: Operands) -> list[jax.Array]:
        """Tells which nodes have an edge, and which edges exist: the rows of the others are not read."""
        graph = operands.graph
        has_edge = placement.sources_with_edges(graph, operands.src)
        return [has_edge, graph.offsets[1:] > graph.offsets[:-1], graph.exists]

    def _split_weights(self, operands: Operands, weights: Any) -> list[jax.Array]:
        """Splits `weights`, `[source | destination | edge]`, into `[H, D]` each."""
        (_, dim), H = operands.src.shape, self.options.num_heads
        nodes, edge = jnp.split(weights, (2 * dim,))
        nodes = nodes.reshape(2, H, dim // H)  # the two together: their heads may be sharded
        return [nodes[0], nodes[1], edge.reshape(H, edge.size // H)]


@jax.custom_jvp
def _share(x: jax.Array, a: jax.Array, used: jax.Array) -> jax.Array:
    """Computes <x, a> per head: `[n, H, D]`, `[H, D]` -> `[n, H]`, accumulated.

    No one reads the result of rows that are not `used`, but the derivative by `a` sums over them too.
    """
    dtype = accumulator_dtype(x.dtype)
    return sum_of_products(x.astype(dtype), a.astype(dtype)[None])


@_share.defjvp
def _share_jvp(primals, tangents):
    (x, a, used), (dx, da, _) = primals, tangents
    return _share(x, a, used), _share(dx, a, used) + _share(_shown(x, used), da, used)


def _share_tangent(x: Any, dx: Any, used: Any, a: Any, da: Any) -> jax.Array | None:
    """Computes the tangent of `_share`; None is zero."""
    of_x = None if dx is None else _share(dx, a, used)
    return total(of_x, None if x is None or da is None else _share(x, da, used))


def _shown(x: jax.Array, used: jax.Array) -> jax.Array:
    """Keeps the rows that are used, 0 in place of the others."""
    return jnp.where(used[:, None, None], x, 0)
