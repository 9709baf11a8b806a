"""Multi-scale deformable attention as a Flax NNX module."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers import deformable
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention

_XAVIER = nnx.initializers.xavier_uniform()


class MultiScaleDeformableAttention(nnx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Starts as in the source: offsets that point away from the reference point, one direction for each
    head and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `nnx.Linear`.
    `load_torch` takes those of a published checkpoint, see `jax_attn_bwd.layers.deformable`.

    Args:
      num_heads: M.
      in_features: C, width of queries, values and output; a multiple of M.
      num_levels: L.
      num_points: sampling points of a head on each level, P, or (P_1, ..., P_L).
      dtype: dtype of the computation; None infers it from inputs and parameters. Offsets, locations and
        weights are computed in float32 or wider in any case.
      param_dtype: dtype of the parameters.
      precision: precision of the four matrix products.
      kernel_init: initializer of `value_proj` and `output_proj`.
      padding_mode, method, deterministic_sums, implementation, forward_mode: options of
        `jax_attn_bwd.multi_scale_deformable_attention`.
      use_4D_normalizer: offsets from boxes are in pixels of their level times the box, as in DINO, in place
        of boxes over the number of points.
      offset_scale: what offsets from boxes are multiplied by, the 1/2 of the sources.
      projections: False leaves out `value_proj` and `output_proj`, as D-FINE does: `value` is taken as it
        is, and the output is that of the heads, side by side.
      attention_fn: what is called in the place of that operator, with its arguments: over a mesh, a
        `partial` of `jax_attn_bwd.parallel.sharded_multi_scale_deformable_attention`.
      deterministic: the former name of `deterministic_sums`, deprecated.
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
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        padding_mode: PaddingMode = "zeros",
        method: SamplingMethod = "bilinear",
        deterministic_sums: bool = True,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        use_4D_normalizer: bool = False,
        offset_scale: float = 0.5,
        projections: bool = True,
        attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
    ):
        config = deformable.configure(locals(), width="in_features")
        bias = deformable.offsets_bias(config)
        linear = partial(nnx.Linear, in_features, param_dtype=param_dtype, precision=precision, rngs=rngs)
        zeros = partial(linear, dtype=deformable.offsets_dtype(dtype), kernel_init=nnx.initializers.zeros)
        self.config = config
        self.sampling_offsets = zeros(
            2 * config.samples, bias_init=lambda key, shape, dtype: jnp.asarray(bias, dtype)
        )
        self.attention_weights = zeros(config.samples)
        if projections:
            self.value_proj, self.output_proj = (
                linear(in_features, dtype=dtype, kernel_init=kernel_init) for _ in range(2)
            )

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations
