"""Multi-scale deformable attention as a Flax linen module."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_attn_bwd.layers import deformable


class MultiScaleDeformableAttention(nn.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Starts as in the source: offsets that point away from the reference point, one direction for each
    head and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each with `kernel` and
    `bias`. Those of a published checkpoint: `{"params": from_torch(state, prefix)}`, see
    `jax_attn_bwd.layers.deformable`.

    Attributes:
      num_heads: M.
      features: C, width of queries, values and output; a multiple of M.
      num_levels: L.
      num_points: sampling points of a head on each level, P, or a tuple (P_1, ..., P_L).
      dtype: of the computation; None infers it from inputs and parameters. Offsets, locations and weights
        are computed in float32 or wider in any case.
      param_dtype: of the parameters.
      precision: of the four matrix products.
      kernel_init: of `value_proj` and `output_proj`.
      padding_mode, method, deterministic, implementation: options of
        `jax_attn_bwd.multi_scale_deformable_attention`. `deterministic` is about bits that repeat from run
        to run; the layer has no dropout.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.flax_linen import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(num_heads=2, features=8, num_levels=2)
      >>> query, value = jnp.ones((1, 5, 8), "float32"), jnp.ones((1, 15, 8), "float32")
      >>> points = jnp.full((1, 5, 2), 0.5, "float32")
      >>> params = layer.init(jax.random.key(0), query, points, value, ((3, 4), (1, 3)))
      >>> layer.apply(params, query, points, value, ((3, 4), (1, 3))).shape
      (1, 5, 8)
    """

    num_heads: int = 8
    features: int = 256
    num_levels: int = 4
    num_points: int | Sequence[int] = 4
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    padding_mode: str = "zeros"
    method: str = "bilinear"
    deterministic: bool = True
    implementation: str | None = None

    def setup(self) -> None:
        """Makes the four linear layers."""
        options = deformable.Options(
            self.padding_mode, self.method, self.deterministic, self.implementation
        )
        config = deformable.configure(
            self.num_heads, self.num_levels, self.num_points, options, features=self.features
        )
        bias = deformable.offsets_bias(config)
        dense = partial(nn.Dense, param_dtype=self.param_dtype, precision=self.precision)
        zeros = partial(
            dense, dtype=deformable.offsets_dtype(self.dtype), kernel_init=nn.initializers.zeros
        )
        self.config = config
        self.sampling_offsets = zeros(
            2 * config.samples, bias_init=lambda key, shape, dtype: jnp.asarray(bias, dtype)
        )
        self.attention_weights = zeros(config.samples)
        self.value_proj, self.output_proj = (
            dense(self.features, dtype=self.dtype, kernel_init=self.kernel_init) for _ in range(2)
        )

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
          query: `[..., Q, C]`, with its position embedding.
          reference_points: `[..., Q, L, 2]`, (x, y) from 0 to 1 across the padded picture, or boxes
            `[..., Q, L, 4]`, (x, y of the centre, width, height). `[..., Q, 1, 2 or 4]` or
            `[..., Q, 2 or 4]` where all levels share them. Keep them float32 also with a narrower `dtype`.
          value: `[..., S, C]`, the levels one after the other, each row by row.
          spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time.
          mask: `[..., S]`, bool, **True = keep**, False = padding, whose values are zeroed. The
            `input_padding_mask` of Deformable-DETR is its opposite, the `value_mask` of RT-DETR the same.

        Returns:
          `[..., Q, C]`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        return deformable.attend(
            self.config, self._linears(), query, reference_points, value, spatial_shapes, mask
        )

    def sampling_locations(
        self, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
    ) -> jax.Array:
        """`[..., Q, M, sum P, 2]`, (x, y) from 0 to 1: where each head looks for each query."""
        return deformable.sampling_locations(
            self.config, self._linears(), query, reference_points, spatial_shapes
        )

    def _linears(self) -> deformable.Linears:
        return deformable.Linears(*(getattr(self, name) for name in deformable.Linears._fields))
