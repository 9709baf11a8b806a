"""What the layers around the delta rule are in Equinox: their parameters, their call, and their cache."""

from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import keywords
from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.layers import delta_rule_layers
from jax_attn_bwd.layers import equinox_trees as trees

_Cache = TypeVar("_Cache", bound=delta_rule_layers.DeltaRuleCache)


class DeltaRuleLayer(keywords.ChecksNames, eqx.Module, Generic[_Cache]):
    """A layer that is built from its configuration; a class derived from this one lists its parameters."""

    config: delta_rule_layers.Config = eqx.field(static=True)

    def _build(self, kind: type[delta_rule_layers.Config], arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        config, dtype = kind.of(arguments, unbatched=True), arguments["dtype"]
        width, C = config.in_features, config.channels
        made: dict[str, Any] = {}
        dtype = jnp.result_type(float) if dtype is None else dtype
        keys = iter(jax.random.split(arguments["key"], len(config.projections) + len(config.vectors) + 2))
        for name, (inner, out) in {**config.projections, config.out_proj: (config.values, width)}.items():
            sizes: Any = (width if inner is None else inner, out)
            made[name] = trees.linear(*sizes, bias=None, dtype=dtype, key=next(keys))
        conv: Any = dict(groups=C, use_bias=False, dtype=dtype, key=next(keys))
        made["conv1d"] = eqx.nn.Conv1d(C, C, config.conv_kernel_dim, **conv)
        made[config.norm] = eqx.nn.RMSNorm(config.value_head_dim, use_bias=False, dtype=dtype)
        for name, (size, init) in config.vectors.items():
            made[name] = init(next(keys), (size,), dtype)
        for name, x in {**made, "config": config}.items():
            setattr(self, name, x)

    @keywords.known
    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[T, in_features]` of `x [T, in_features]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.delta_rule_layers`, here without batch axes:
            an int and `[T]`.
        """
        return self.config.apply(*self._parameters(), x, None, seq_lengths, segment_ids)[0]

    def init_cache(self, dtype: Any = None) -> _Cache:
        """An empty cache for `decode`.

        `dtype` is that of what the convolution reads; None = that of the parameters. For a batch:
        `jax.vmap(lambda _: layer.init_cache())(jnp.arange(batch))`.
        """
        cache: Any = self.config.empty((), vars(self)["conv1d"].weight.dtype if dtype is None else dtype)
        return cache

    def decode(
        self,
        x: jax.Array,
        cache: _Cache,
        *,
        seq_lengths: Integers | None = None,
        segment_ids: Integers | None = None,
    ) -> tuple[jax.Array, _Cache]:
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
        return self.config.apply(*self._parameters(), x, cache, seq_lengths, segment_ids)

    def _parameters(self) -> tuple[delta_rule_layers.Linears, delta_rule_layers.Arrays]:
        """Returns the projections, and the other arrays, by name."""
        config, held = self.config, vars(self)
        linears = {name: jax.vmap(held[name]) for name in (*config.projections, config.out_proj)}
        arrays = {"conv1d": held["conv1d"].weight.T, config.norm: held[config.norm].weight}
        return linears, arrays | {name: held[name] for name in config.vectors}
