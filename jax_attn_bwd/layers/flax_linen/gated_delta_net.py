"""Gated DeltaNet as a Flax linen module."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_attn_bwd._core.types import Implementation, Integers
from jax_attn_bwd.layers import gated_delta_net as core


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj` and `conv1d`, each with `kernel`; `norm` with
    `scale`; `dt_bias`, `A_log`.

    Attributes:
      num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_kernel_dim, rms_norm_eps,
        precision, implementation, forward_mode: see `jax_attn_bwd.layers.gated_delta_net`, which also tells
        what a call takes.
      decode: whether calls go on from the variables "conv_state" and "recurrent_state" of "cache", which
        `init` makes: apply it with `mutable=["cache"]`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the three projections.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.flax_linen import GatedDeltaNet
      >>> layer, x = GatedDeltaNet(2, 4, 8, 8), jnp.ones((1, 5, 16), "float32")
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (1, 5, 16)
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    decode: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    implementation: Implementation | None = None
    forward_mode: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[..., T, E]` of `x [..., T, E]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.gated_delta_net`.
        """
        # The parameters, made where there are none yet.
        sizes = self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        options = {name: getattr(self, name) for name in core.Keywords.__annotations__}
        config = core.configure(*sizes, options)
        x = core.tokens(config, x)
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        dense = partial(dense, precision=self.precision, kernel_init=self.kernel_init)
        linears = {name: dense(width, name=name) for name, width in config.projections.items()}
        holder = partial(_Holder, param_dtype=self.param_dtype)
        vector = (self.num_value_heads,), self.param_dtype
        parts = core.Parts(
            **linears,
            out_proj=dense(x.shape[-1], name="out_proj"),
            conv1d=holder("kernel", config.kernel_shape, core.conv_init, name="conv1d")(),
            norm=holder("scale", (self.value_head_dim,), nn.initializers.ones, name="norm")(),
            dt_bias=self.param("dt_bias", core.dt_bias_init, *vector),
            A_log=self.param("A_log", core.A_log_init, *vector),
        )
        if not self.decode:
            return core.apply(config, parts, x, None, seq_lengths, segment_ids)[0]
        # A step of decoding; `init` makes the cache, and leaves it empty.
        steps = self.has_variable("cache", "conv_state")
        empty = config.empty(x.shape[:-2], x.dtype if self.dtype is None else self.dtype)
        held = [self.variable("cache", name, lambda x=x: x) for name, x in empty._asdict().items()]
        cache = core.GatedDeltaNetCache(*(variable.value for variable in held))
        out, cache = core.apply(config, parts, x, cache, seq_lengths, segment_ids)
        if steps:
            for variable, value in zip(held, cache, strict=True):
                variable.value = value
        return out


class _Holder(nn.Module):
    """Holds one parameter of a module that the published layer has by this name."""

    part: str
    shape: tuple[int, ...]
    init_fn: Callable[..., jax.Array]
    param_dtype: Any

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns it."""
        return self.param(self.part, self.init_fn, self.shape, self.param_dtype)
