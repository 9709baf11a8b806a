"""Gated DeltaNet as a Flax NNX module."""

from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.layers import gated_delta_net as core

_NAME = "GatedDeltaNet"
_XAVIER = nnx.initializers.xavier_uniform()


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj`, each an `nnx.Linear`; of `conv1d`, an `nnx.Conv`,
    the kernel and of `norm`, an `nnx.RMSNorm`, the scale; `dt_bias`, `A_log`.

    Args:
      in_features, num_key_heads, num_value_heads, key_head_dim, value_head_dim, options: see
        `jax_attn_bwd.layers.gated_delta_net`, which also tells what a call takes.
      decode: whether calls go on from the cache of `init_cache`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the three projections.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import GatedDeltaNet
      >>> layer = GatedDeltaNet(16, 2, 4, 8, 8, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 16), "float32")).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        in_features: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        decode: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[core.Keywords],
    ):
        sizes = num_key_heads, num_value_heads, key_head_dim, value_head_dim
        self.config = config = core.configure(*sizes, options, in_features=in_features)
        self.decode, shared = decode, dict(param_dtype=param_dtype, rngs=rngs)
        linear: Any = partial(nnx.Linear, use_bias=False, dtype=dtype, kernel_init=kernel_init, **shared)
        linear = partial(linear, precision=config.precision)
        self.in_proj_qkvz, self.in_proj_ba = (linear(in_features, n) for n in config.projections.values())
        C = config.channels
        conv: Any = partial(nnx.Conv, C, C, config.conv_kernel_dim, feature_group_count=C, use_bias=False)
        self.conv1d = conv(kernel_init=core.conv_init, **shared)
        self.dt_bias, self.A_log = (
            nnx.Param(init(rngs.params(), (num_value_heads,), param_dtype))
            for init in (core.dt_bias_init, core.A_log_init)
        )
        self.norm = nnx.RMSNorm(value_head_dim, **shared)
        self.out_proj = linear(config.values, in_features)
        self.conv_state: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.recurrent_state: nnx.Cache[jax.Array] | None = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        seq_lengths: Integers | None = None,
        segment_ids: Integers | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """Computes `[..., T, in_features]` of `x [..., T, in_features]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.gated_delta_net`.
          decode: go on from the cache of `init_cache`; None takes the attribute.
        """
        arrays: Any = (self.conv1d.kernel, self.norm.scale, self.dt_bias, self.A_log)
        linears = (self.in_proj_qkvz, self.in_proj_ba, self.out_proj)
        parts = core.Parts(*linears, *(param[...] for param in arrays))
        if not (self.decode if decode is None else decode):
            return core.apply(self.config, parts, x, None, seq_lengths, segment_ids)[0]
        if self.conv_state is None or self.recurrent_state is None:
            message = checks.message(_NAME, "the cache", "be there to decode", None, "call init_cache")
            raise ValueError(message)
        cache = core.GatedDeltaNetCache(self.conv_state[...], self.recurrent_state[...])
        out, cache = core.apply(self.config, parts, x, cache, seq_lengths, segment_ids)
        self.conv_state[...], self.recurrent_state[...] = cache
        return out

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache.

        Args:
          input_shape: of the inputs `[..., T, in_features]`, with any T.
          dtype: dtype of what the convolution reads.
        """
        cache = self.config.empty(input_shape[:-2], dtype)
        self.conv_state, self.recurrent_state = (nnx.Cache(x) for x in cache)
