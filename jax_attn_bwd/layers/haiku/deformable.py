"""Multi-scale deformable attention as a Haiku module."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd.layers import deformable


class MultiScaleDeformableAttention(hk.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Starts as in the source: offsets that point away from the reference point, one direction for each
    head and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `hk.Linear` with
    `w` and `b`. Those of a published checkpoint (see `jax_attn_bwd.layers.deformable`):

        {f"multi_scale_deformable_attention/~/{name}": {"w": x["kernel"], "b": x["bias"]}
         for name, x in from_torch(state, prefix).items()}

    Offsets, locations and weights are computed in float32 or wider whatever the inputs. But a
    `hk.mixed_precision` policy set on this very class casts `reference_points` on their way in: set it
    on a module around this one.

    Args:
      num_heads: M.
      model_size: C, width of queries, values and output; a multiple of M.
      num_levels: L.
      num_points: sampling points of a head on each level, P, or (P_1, ..., P_L).
      w_init: of `value_proj` and `output_proj`; Xavier-uniform if None.
      padding_mode, method, deterministic, implementation: options of
        `jax_attn_bwd.multi_scale_deformable_attention`. `deterministic` is about bits that repeat from run
        to run; the layer has no dropout.
      name: of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.haiku import MultiScaleDeformableAttention
      >>> def forward(query, points, value):
      ...     layer = MultiScaleDeformableAttention(num_heads=2, model_size=8, num_levels=2)
      ...     return layer(query, points, value, ((3, 4), (1, 3)))
      >>> model = hk.without_apply_rng(hk.transform(forward))
      >>> inputs = jnp.ones((1, 5, 8)), jnp.full((1, 5, 2), 0.5), jnp.ones((1, 15, 8))
      >>> model.apply(model.init(jax.random.key(0), *inputs), *inputs).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int = 8,
        model_size: int = 256,
        *,
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        w_init: hk.initializers.Initializer | None = None,
        padding_mode: str = "zeros",
        method: str = "bilinear",
        deterministic: bool = True,
        implementation: str | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        options = deformable.Options(padding_mode, method, deterministic, implementation)
        config = deformable.configure(
            num_heads, num_levels, num_points, options, model_size=model_size
        )
        bias = deformable.offsets_bias(config)
        zeros = partial(hk.Linear, w_init=jnp.zeros)
        w_init = w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        self._config = config
        self._linears = deformable.Linears(
            zeros(
                2 * config.samples, name="sampling_offsets",
                b_init=lambda shape, dtype: jnp.asarray(bias, dtype),
            ),
            zeros(config.samples, name="attention_weights"),
            hk.Linear(model_size, w_init=w_init, name="value_proj"),
            hk.Linear(model_size, w_init=w_init, name="output_proj"),
        )  # fmt: skip

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
            `[..., Q, 2 or 4]` where all levels share them. Keep them float32 also for a narrower query.
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
            self._config, self._linears, query, reference_points, value, spatial_shapes, mask
        )

    def sampling_locations(
        self, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
    ) -> jax.Array:
        """`[..., Q, M, sum P, 2]`, (x, y) from 0 to 1: where each head looks for each query."""
        return deformable.sampling_locations(
            self._config, self._linears, query, reference_points, spatial_shapes
        )
