"""Gated DeltaNet as an Equinox module."""

from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.layers import gated_delta_net as core
from jax_attn_bwd.layers.equinox.linear import linear


class GatedDeltaNet(eqx.Module):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Takes one sequence, without a batch axis, as the layers of `equinox.nn` do; for a batch use `jax.vmap`.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj`, each an `equinox.nn.Linear`; the weights of
    `conv1d`, an `equinox.nn.Conv1d`, and of `norm`, an `equinox.nn.RMSNorm`; `dt_bias`, `A_log`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.equinox import GatedDeltaNet
      >>> layer = GatedDeltaNet(16, 2, 4, 8, 8, key=jax.random.key(0))
      >>> layer(jnp.ones((5, 16))).shape
      (5, 16)
    """

    in_proj_qkvz: eqx.nn.Linear
    in_proj_ba: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    norm: eqx.nn.RMSNorm
    dt_bias: jax.Array
    A_log: jax.Array
    config: core.Config = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[core.Keywords],
    ):
        """Makes the layer.

        Args:
          in_features, num_key_heads, num_value_heads, key_head_dim, value_head_dim, options: see
            `jax_attn_bwd.layers.gated_delta_net`.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        sizes = num_key_heads, num_value_heads, key_head_dim, value_head_dim
        self.config = config = core.configure(*sizes, options, in_features=in_features, unbatched=True)
        keys, dtype = iter(jax.random.split(key, 6)), jnp.result_type(float) if dtype is None else dtype
        project = lambda width, out: linear(width, out, bias=None, dtype=dtype, key=next(keys))
        self.in_proj_qkvz, self.in_proj_ba = (project(in_features, n) for n in config.projections.values())
        self.out_proj, C = project(config.values, in_features), config.channels
        conv: Any = dict(groups=C, use_bias=False, dtype=dtype, key=next(keys))
        self.conv1d = eqx.nn.Conv1d(C, C, config.conv_kernel_dim, **conv)
        self.norm = eqx.nn.RMSNorm(value_head_dim, use_bias=False, dtype=dtype)
        self.dt_bias = core.dt_bias_init(next(keys), (num_value_heads,), dtype)
        self.A_log = core.A_log_init(next(keys), (num_value_heads,), dtype)

    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[T, in_features]` of `x [T, in_features]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.gated_delta_net`, here without batch axes: an int
            and `[T]`.
        """
        return core.apply(self.config, self._parts(), x, None, seq_lengths, segment_ids)[0]

    def init_cache(self, dtype: Any = None) -> core.GatedDeltaNetCache:
        """An empty cache for `decode`.

        `dtype` is that of what the convolution reads; None = that of the parameters. For a batch:
        `jax.vmap(lambda _: layer.init_cache())(jnp.arange(batch))`.
        """
        return self.config.empty((), self.in_proj_qkvz.weight.dtype if dtype is None else dtype)

    def decode(
        self,
        x: jax.Array,
        cache: core.GatedDeltaNetCache,
        *,
        seq_lengths: Integers | None = None,
        segment_ids: Integers | None = None,
    ) -> tuple[jax.Array, core.GatedDeltaNetCache]:
        """The next T tokens of a sequence, of which `cache` has those before: a prompt, or token by token.

        Takes `x [T, in_features]` and the cache that `init_cache` or the call before returned; `seq_lengths`
        and `segment_ids` as in the call. Returns (out `[T, in_features]`, the cache with these tokens).

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_attn_bwd.layers.equinox import GatedDeltaNet
          >>> layer = GatedDeltaNet(16, 2, 4, 8, 8, key=jax.random.key(0))
          >>> x, cache = jax.random.normal(jax.random.key(1), (5, 16)), layer.init_cache()
          >>> prompt, cache = layer.decode(x[:3], cache)
          >>> last, cache = layer.decode(x[3:], cache)
          >>> bool(jnp.allclose(jnp.concatenate([prompt, last]), layer(x), atol=1e-5))
          True
        """
        return core.apply(self.config, self._parts(), x, cache, seq_lengths, segment_ids)

    def _parts(self) -> core.Parts:
        linears = [jax.vmap(x) for x in (self.in_proj_qkvz, self.in_proj_ba, self.out_proj)]
        arrays = (self.conv1d.weight.T, self.norm.weight, self.dt_bias, self.A_log)
        parts: Any = (*linears, *arrays)
        return core.Parts(*parts)
