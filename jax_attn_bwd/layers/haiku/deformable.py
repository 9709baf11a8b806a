"""Multi-scale deformable attention as a Haiku module."""

from collections.abc import Callable, Sequence
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers import deformable
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention


class MultiScaleDeformableAttention(hk.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Starts as in the source: offsets that point away from the reference point, one direction for each
    head and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `hk.Linear` with
    `w` and `b`. `load_torch` takes those of a published checkpoint, see `jax_attn_bwd.layers.deformable`.

    Offsets, locations and weights are computed in float32 or wider whatever the inputs. But a
    `hk.mixed_precision` policy set on this very class casts `reference_points` on their way in: set it
    on a module around this one.

    Args:
      num_heads: M.
      model_size: C, width of queries, values and output; a multiple of M.
      num_levels: L.
      num_points: sampling points of a head on each level, P, or (P_1, ..., P_L).
      w_init: initializer of `value_proj` and `output_proj`; Xavier-uniform if None.
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
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        w_init: hk.initializers.Initializer | None = None,
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
        name: str | None = None,
    ):
        super().__init__(name=name)
        config = deformable.configure(locals(), width="model_size")
        bias = deformable.offsets_bias(config)
        zeros = partial(hk.Linear, w_init=jnp.zeros)
        w_init = w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        self.config = config
        self.sampling_offsets = zeros(
            2 * config.samples, name="sampling_offsets", b_init=lambda shape, dtype: jnp.asarray(bias, dtype)
        )
        self.attention_weights = zeros(config.samples, name="attention_weights")
        if projections:
            self.value_proj = hk.Linear(model_size, w_init=w_init, name="value_proj")
            self.output_proj = hk.Linear(model_size, w_init=w_init, name="output_proj")

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations
