"""Multi-scale deformable attention as an Equinox module."""

from functools import partial
from typing import Any, Unpack

import equinox as eqx
import jax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers import deformable
from jax_attn_bwd.layers.equinox.linear import linear


class MultiScaleDeformableAttention(eqx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Takes one picture, without a batch axis, as the layers of `equinox.nn` do. For a batch:

        jax.vmap(lambda query, points, value: layer(query, points, value, spatial_shapes))(...)

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an
    `equinox.nn.Linear`.

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
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[deformable.Keywords],
    ):
        """Makes the layer.

        Args:
          num_heads, query_size, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
          dtype: dtype of the parameters.
          key: a PRNG key for `value_proj` and `output_proj`.
        """
        self.config = config = deformable.configure(
            "query_size", query_size, num_heads, options, unbatched=True
        )
        keys = jax.random.split(key)
        xavier = partial(linear, query_size, dtype=dtype)
        zeros = partial(xavier, init=jax.nn.initializers.zeros, key=key)
        self.sampling_offsets = zeros(2 * config.samples, bias=deformable.offsets_bias(config))
        self.attention_weights = zeros(config.samples)
        own = config.projections
        self.value_proj, self.output_proj = (xavier(query_size, key=k) if own else None for k in keys)

    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations

    def _linears(self) -> deformable.Linears:
        precise = (_widen(self.sampling_offsets), _widen(self.attention_weights))
        linears = (*precise, self.value_proj, self.output_proj)
        return deformable.Linears(*(deformable.as_it_is if x is None else jax.vmap(x) for x in linears))


def _widen(layer: eqx.nn.Linear) -> eqx.nn.Linear:
    """Returns `layer` with parameters in float32 or wider: it computes offsets or logits."""
    return jax.tree.map(lambda x: x.astype(accumulator_dtype(x.dtype)), layer)
