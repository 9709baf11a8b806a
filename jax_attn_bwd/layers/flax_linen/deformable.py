"""Multi-scale deformable attention as a Flax linen module."""

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers import deformable
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention


class MultiScaleDeformableAttention(nn.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each with `kernel` and
    `bias`.

    Attributes:
      num_heads, features: M and C; these and those that follow `kernel_init`, with `num_levels` and
        `num_points`, see in `jax_attn_bwd.layers.deformable`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the four matrix products.
      kernel_init: initializer of `value_proj` and `output_proj`.

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
    padding_mode: PaddingMode = "zeros"
    method: SamplingMethod = "bilinear"
    deterministic_sums: bool = True
    implementation: Implementation | None = None
    forward_mode: bool = field(default=False, kw_only=True)  # the others keep their places
    use_4D_normalizer: bool = False
    offset_scale: float = 0.5
    projections: bool = True
    attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention
    deterministic: bool | None = None

    def setup(self) -> None:
        """Makes the four linear layers."""
        given = {name: getattr(self, name) for name in deformable.Keywords.__annotations__}
        self.config = config = deformable.configure("features", self.features, self.num_heads, given)
        dense = partial(nn.Dense, param_dtype=self.param_dtype, precision=self.precision)
        zeros = partial(dense, dtype=deformable.offsets_dtype(self.dtype), kernel_init=nn.initializers.zeros)
        self.sampling_offsets = zeros(2 * config.samples, bias_init=deformable.offsets_init(config))
        self.attention_weights = zeros(config.samples)
        if config.projections:
            self.value_proj, self.output_proj = (
                dense(self.features, dtype=self.dtype, kernel_init=self.kernel_init) for _ in range(2)
            )

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations
