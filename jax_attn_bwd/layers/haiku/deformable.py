"""Multi-scale deformable attention as a Haiku module."""

from functools import partial
from typing import Unpack

import haiku as hk
import jax.numpy as jnp

from jax_attn_bwd.layers import deformable


class MultiScaleDeformableAttention(hk.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `hk.Linear` with
    `w` and `b`.

    Offsets, locations and weights are computed in float32 or wider whatever the inputs. But a
    `hk.mixed_precision` policy set on this very class casts `reference_points` on their way in: set it
    on a module around this one.

    Args:
      num_heads, model_size, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
      w_init: initializer of `value_proj` and `output_proj`; Xavier-uniform if None.
      name: name of the module.

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
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
        **options: Unpack[deformable.Keywords],
    ):
        super().__init__(name=name)
        self.config = config = deformable.configure("model_size", model_size, num_heads, options)
        zeros = partial(hk.Linear, w_init=jnp.zeros)
        w_init = w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        b_init = deformable.offsets_init(config)
        self.sampling_offsets = zeros(2 * config.samples, b_init=b_init, name="sampling_offsets")
        self.attention_weights = zeros(config.samples, name="attention_weights")
        if config.projections:
            self.value_proj = hk.Linear(model_size, w_init=w_init, name="value_proj")
            self.output_proj = hk.Linear(model_size, w_init=w_init, name="output_proj")

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations
