"""Gated DeltaNet as a Haiku module."""

from functools import partial
from typing import Any, Unpack

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.layers import gated_delta_net as core


class GatedDeltaNet(hk.Module):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj` and `conv1d`, each with `w`; `norm` with `scale`;
    `dt_bias`, `A_log`.

    Args:
      num_key_heads, num_value_heads, key_head_dim, value_head_dim, options: see
        `jax_attn_bwd.layers.gated_delta_net`, which also tells what a call takes.
      decode: whether calls go on from Haiku's state "conv_state" and "recurrent_state": use
        `hk.transform_with_state`, whose `init` returns empty ones.
      w_init: initializer of the three projections; Xavier-uniform if None.
      name: name of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.haiku import GatedDeltaNet
      >>> model = hk.without_apply_rng(hk.transform(lambda x: GatedDeltaNet(2, 4, 8, 8)(x)))
      >>> x = jnp.ones((1, 5, 16))
      >>> model.apply(model.init(jax.random.key(0), x), x).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        decode: bool = False,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
        **options: Unpack[core.Keywords],
    ):
        super().__init__(name=name)
        sizes = num_key_heads, num_value_heads, key_head_dim, value_head_dim
        self.config, self.decode = core.configure(*sizes, options), decode
        self._w_init = w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")

    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[..., T, E]` of `x [..., T, E]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.gated_delta_net`.
        """
        # The parameters, made where there are none yet.
        config, x = self.config, core.tokens(self.config, x)
        linear = partial(hk.Linear, with_bias=False, w_init=self._w_init)
        heads = (config.num_value_heads,)
        parts = core.Parts(
            **{name: linear(width, name=name) for name, width in config.projections.items()},
            out_proj=linear(x.shape[-1], name="out_proj"),
            conv1d=_Holder("conv1d")("w", config.kernel_shape, x.dtype, core.conv_init),
            norm=_Holder("norm")("scale", (config.value_head_dim,), x.dtype, jax.nn.initializers.ones),
            dt_bias=_parameter("dt_bias", heads, x.dtype, core.dt_bias_init),
            A_log=_parameter("A_log", heads, x.dtype, core.A_log_init),
        )
        if not self.decode:
            return core.apply(config, parts, x, None, seq_lengths, segment_ids)[0]
        # A step of decoding.
        empty = config.empty(x.shape[:-2], x.dtype)._asdict()
        states = (hk.get_state(name, x.shape, x.dtype, jnp.zeros) for name, x in empty.items())
        cache = core.GatedDeltaNetCache(*states)
        out, cache = core.apply(config, parts, x, cache, seq_lengths, segment_ids)
        for name, x in cache._asdict().items():
            hk.set_state(name, x)
        return out


class _Holder(hk.Module):
    """Holds one parameter of a module that the published layer has by this name."""

    def __call__(self, *spec: Any) -> jax.Array:
        """Returns it."""
        return _parameter(*spec)


def _parameter(name: str, shape: tuple[int, ...], dtype: Any, init: Any) -> jax.Array:
    """Returns a parameter with an initializer of JAX."""
    return hk.get_parameter(name, shape, dtype, lambda *like: init(hk.next_rng_key(), *like))
