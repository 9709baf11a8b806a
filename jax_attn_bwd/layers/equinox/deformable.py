"""Multi-scale deformable attention as an Equinox module."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers import deformable
from jax_attn_bwd.layers.equinox.weights import linear
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention


class MultiScaleDeformableAttention(eqx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Takes one picture, without a batch axis, as the layers of `equinox.nn` do. For a batch:

        jax.vmap(lambda query, points, value: layer(query, points, value, spatial_shapes))(...)

    Starts as in the source: offsets that point away from the reference point, one direction for each
    head and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an
    `equinox.nn.Linear`. `load_torch` takes those of a published checkpoint, see
    `jax_attn_bwd.layers.deformable`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(2, 8, num_levels=2, key=jax.random.key(0))
      >>> query, value = jnp.ones((5, 8)), jnp.ones((15, 8))
      >>> layer(query, jnp.full((5, 2), 0.5), value, ((3, 4), (1, 3))).shape
      (5, 8)
    """

    sampling_offsets: eqx.nn.Linear
    attention_weights: eqx.nn.Linear
    value_proj: eqx.nn.Linear | None
    output_proj: eqx.nn.Linear | None
    config: deformable.Config = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int = 8,
        query_size: int = 256,
        *,
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        padding_mode: PaddingMode = "zeros",
        method: SamplingMethod = "bilinear",
        deterministic_sums: bool = True,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        use_4D_normalizer: bool = False,
        offset_scale: float = 0.5,
        projections: bool = True,
        attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention,
        dtype: Any = None,
        deterministic: bool | None = None,
        key: jax.Array,
    ):
        """Makes the layer.

        Args:
          num_heads: M.
          query_size: C, width of queries, values and output; a multiple of M.
          num_levels: L.
          num_points: sampling points of a head on each level, P, or (P_1, ..., P_L).
          padding_mode, method, deterministic_sums, implementation, forward_mode: options of
            `jax_attn_bwd.multi_scale_deformable_attention`.
          use_4D_normalizer: offsets from boxes are in pixels of their level times the box, as in DINO, in
            place of boxes over the number of points.
          offset_scale: what offsets from boxes are multiplied by, the 1/2 of the sources.
          projections: False leaves out `value_proj` and `output_proj`, as D-FINE does: `value` is taken as it
            is, and the output is that of the heads, side by side.
          attention_fn: what is called in the place of that operator, with its arguments: over a mesh, a
            `partial` of `jax_attn_bwd.parallel.sharded_multi_scale_deformable_attention`.
          deterministic: the former name of `deterministic_sums`, deprecated.
          dtype: dtype of the parameters. Offsets, locations and weights are computed in float32 or wider in
            any case.
          key: a PRNG key for `value_proj` and `output_proj`.
        """
        config = deformable.configure(locals(), width="query_size")
        keys = jax.random.split(key)
        xavier = partial(linear, query_size, dtype=dtype)
        zeros = partial(xavier, init=jax.nn.initializers.zeros, key=key)
        self.config = config
        self.sampling_offsets = zeros(2 * config.samples, bias=deformable.offsets_bias(config))
        self.attention_weights = zeros(config.samples)
        self.value_proj, self.output_proj = (xavier(query_size, key=k) if projections else None for k in keys)

    def __call__(
        self,
        query: jax.Array,
        reference_points: jax.Array,
        value: jax.Array,
        spatial_shapes: Any,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          query: `[Q, C]`, with its position embedding.
          reference_points: `[Q, L, 2]`, (x, y) from 0 to 1 across the padded picture, or boxes
            `[Q, L, 4]`, (x, y of the centre, width, height). `[Q, 1, 2 or 4]` or `[Q, 2 or 4]` where all
            levels share them. Keep them float32 also for a narrower query.
          value: `[S, C]`, the levels one after the other, each row by row.
          spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time.
          mask: `[S]`, bool, **True = keep**, False = padding, whose values are zeroed. The
            `input_padding_mask` of Deformable-DETR is its opposite, the `value_mask` of RT-DETR the same.

        Returns:
          `[Q, C]`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        _check_unbatched(query)
        return deformable.attend(
            self.config, self._linears(), query, reference_points, value, spatial_shapes, mask
        )

    def sampling_locations(
        self, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
    ) -> jax.Array:
        """`[Q, M, sum P, 2]`, (x, y) from 0 to 1: where each head looks for each query."""
        _check_unbatched(query)
        return deformable.sampling_locations(
            self.config, self._linears(), query, reference_points, spatial_shapes
        )

    def _linears(self) -> deformable.Linears:
        precise = (_widen(self.sampling_offsets), _widen(self.attention_weights))
        linears = (*precise, self.value_proj, self.output_proj)
        return deformable.Linears(*(deformable.as_it_is if x is None else jax.vmap(x) for x in linears))


def _widen(layer: eqx.nn.Linear) -> eqx.nn.Linear:
    """Returns `layer` with parameters in float32 or wider: it computes offsets or logits."""
    return jax.tree.map(lambda x: x.astype(accumulator_dtype(x.dtype)), layer)


def _check_unbatched(query: jax.Array) -> None:
    """Raises for more than one picture."""
    if jnp.ndim(query) != 2:
        name, remedy = "MultiScaleDeformableAttention", "for a batch use jax.vmap"
        raise ValueError(checks.message(name, "query", "have shape [Q, C]", jnp.shape(query), remedy))
