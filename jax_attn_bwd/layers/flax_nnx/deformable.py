"""Multi-scale deformable attention as a Flax NNX module."""

from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_attn_bwd.layers import deformable

_XAVIER = nnx.initializers.xavier_uniform()


class MultiScaleDeformableAttention(nnx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `nnx.Linear`.

    Args:
      num_heads, in_features, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the four matrix products.
      kernel_init: initializer of `value_proj` and `output_proj`.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(2, 8, num_levels=2, rngs=nnx.Rngs(0))
      >>> query, value = jnp.ones((1, 5, 8), "float32"), jnp.ones((1, 15, 8), "float32")
      >>> layer(query, jnp.full((1, 5, 2), 0.5, "float32"), value, ((3, 4), (1, 3))).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int = 8,
        in_features: int = 256,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[deformable.Keywords],
    ):
        self.config = config = deformable.configure("in_features", in_features, num_heads, options)
        linear = partial(nnx.Linear, in_features, param_dtype=param_dtype, precision=precision, rngs=rngs)
        zeros = partial(linear, dtype=deformable.offsets_dtype(dtype), kernel_init=nnx.initializers.zeros)
        self.sampling_offsets = zeros(2 * config.samples, bias_init=deformable.offsets_init(config))
        self.attention_weights = zeros(config.samples)
        if config.projections:
            self.value_proj, self.output_proj = (
                linear(in_features, dtype=dtype, kernel_init=kernel_init) for _ in range(2)
            )

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations
