"""Multi-head attention as a Haiku module."""

from typing import Any, Unpack

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Save
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_NAME = "MultiHeadAttention"


class MultiHeadAttention(hk.MultiHeadAttention):
    """`haiku.MultiHeadAttention` as one rule over the whole layer, `jax_attn_bwd.multi_head_attention`.

    Every argument of Haiku's, the same parameters ("query", "key", "value", "linear", each with "w" and "b")
    and initial values: change the import, and a checkpoint loads.

    Differs from Haiku's in that masks may have fewer axes, that a mask to be added is an error, that inputs
    must be real, and that a query which sees nothing gives the output bias, not a mean over hidden keys or,
    in float16, NaN. The softmax is computed in float32 or wider. A mixed-precision policy on `hk.Linear` does
    not reach the projections inside, and the batch axes of query, key and value must be equal, not broadcast.

    Args:
      num_heads, key_size, w_init_scale, w_init, with_bias, b_init, value_size, model_size, name: as Haiku's.
      is_causal, save, options: see `jax_attn_bwd.layers.multi_head`, which also tells what a call takes.
      precision: precision of all matrix products; None follows `jax_default_matmul_precision`.
      cache_length: L: decode with a cache. A call then takes the next T tokens (a prompt, or one), attends to
        those before too, causally, and keeps keys and values in Haiku's state ("cached_key",
        "cached_value", "cache_index"): use `hk.transform_with_state`. The parameters are those of the layer
        without it. Masks, and what is told of keys, are of the cache; dropout is left out.

    Example:
      >>> import haiku as hk
      >>> import jax
      >>> from jax_attn_bwd.layers.haiku import MultiHeadAttention
      >>> def forward(x):
      ...     w_init = hk.initializers.VarianceScaling()
      ...     return MultiHeadAttention(2, key_size=4, w_init=w_init, is_causal=True)(x, x, x)
      >>> model = hk.without_apply_rng(hk.transform(forward))
      >>> x = jax.random.normal(jax.random.key(0), (1, 5, 8))
      >>> model.apply(model.init(jax.random.key(1), x), x).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int,
        key_size: int,
        w_init_scale: float | None = None,
        *,
        w_init: hk.initializers.Initializer | None = None,
        with_bias: bool = True,
        b_init: hk.initializers.Initializer | None = None,
        value_size: int | None = None,
        model_size: int | None = None,
        is_causal: bool = False,
        precision: Any = None,
        save: Save = "inputs",
        cache_length: int | None = None,
        name: str | None = None,
        **options: Unpack[multi_head.Keywords],
    ):
        options = multi_head.complete("MultiHeadAttention.__init__", multi_head.Keywords, options)
        num_heads = checks.integer(_NAME, "num_heads", num_heads, least=1)
        sizes: Any = dict(value_size=value_size, model_size=model_size)
        inits: Any = dict(w_init=w_init, with_bias=with_bias, b_init=b_init)
        super().__init__(num_heads, key_size, w_init_scale, **inits, **sizes, name=name)
        # What a call hands on; a cache leaves out what its steps do not take.
        self._cache_length = None
        if cache_length is not None:
            self._cache_length = checks.integer(_NAME, "cache_length", cache_length, least=1)
        self._options: dict[str, Any] = {**options, "precision": precision}
        self._without_cache: dict[str, Any] = dict(is_causal=is_causal, save=save)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = False,
        **tokens: Unpack[multi_head.Tokens],
    ) -> jax.Array:
        """Attends like Haiku's layer, with a bias, dropout and what tells sequences apart.

        Args:
          query: `[..., T, Eq]`.
          key: `[..., S, Ek]`.
          value: `[..., S, Ev]`.
          mask: broadcasts to `[..., N, T, S]`; True, or a number that is not 0, attends.
          bias: broadcasts to `[..., N, T, S]`, floating; added to the logits.
          dropout_rate: probability of dropping an attention probability, with `hk.next_rng_key()`.
          broadcast_dropout: one dropout mask for batch and heads.
          tokens: see `jax_attn_bwd.layers.multi_head`.

        Returns:
          `[..., T, model_size]`.
        """
        tokens = multi_head.complete("MultiHeadAttention.__call__", multi_head.Tokens, tokens)
        numbers, mask = mask, multi_head.flax_mask(_NAME, mask, "pass them as bias=")
        dropout_rate = checks.rate(_NAME, "dropout_rate", dropout_rate)
        # Haiku's linear layers hold all heads side by side: their parameters are reshaped.
        N, H, Hv = self.num_heads, self.key_size, self.value_size
        sizes = {"query": (query, H), "key": (key, H), "value": (value, Hv)}
        arrays: list[Any] = []
        for name, (x, size) in sizes.items():
            w, b = self._projection(name)(x.shape[-1], N * size, x.dtype)
            arrays += [w.reshape(x.shape[-1], N, size), None if b is None else b.reshape(N, size)]
        dtype = jnp.result_type(query, key, value)
        w, b = self._projection("linear")(N * Hv, self.model_size, dtype)
        arrays += [w.reshape(N, Hv, self.model_size), b]
        params = MultiHeadAttentionParams(*arrays)
        # With a cache the call is the next step of a sequence.
        if self._cache_length is not None:
            if dropout_rate:
                remedy = "the cache is for decoding"
                raise ValueError(
                    checks.message(_NAME, "dropout_rate", "be 0 with cache_length", dropout_rate, remedy)
                )
            out = self._decoded(params, query, key, value, mask, bias, tokens)
            return multi_head.nan_if_additive(out, numbers)
        given: dict[str, Any] = {**tokens, **self._options, **self._without_cache}
        given |= dict(mask=mask, bias=bias, dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout)
        dropout_key = hk.next_rng_key() if dropout_rate else None
        out = multi_head.attend(params, (query, key, value), dropout_key=dropout_key, **given)
        return multi_head.nan_if_additive(out, numbers)

    @hk.transparent
    def _decoded(self, params, query, key, value, mask, bias, tokens: multi_head.Tokens) -> jax.Array:
        """Attends from the next tokens, to those before in the state too."""
        size = (*key.shape[:-2], self._cache_length, self.num_heads)
        dtype = jnp.result_type(key, value, params.key_kernel, params.value_kernel)
        cache = multi_head.KeyValueCache(
            hk.get_state("cached_key", (*size, self.key_size), dtype, jnp.zeros),
            hk.get_state("cached_value", (*size, self.value_size), dtype, jnp.zeros),
            hk.get_state("cache_index", (), jnp.int32, jnp.zeros),
        )
        out, cache = multi_head.decode(
            _NAME, params, cache, query, key, value, mask=mask, bias=bias, **tokens, **self._options
        )
        for name, x in zip(("cached_key", "cached_value", "cache_index"), cache, strict=True):
            hk.set_state(name, x)
        return out

    @hk.transparent
    def _projection(self, name: str) -> "_Projection":
        return _Projection(self.w_init, self.with_bias, self.b_init or jnp.zeros, name)


class _Projection(hk.Module):
    """Holds the parameters of the `hk.Linear` of this name; the product is the operator's."""

    def __init__(self, w_init: Any, with_bias: bool, b_init: Any, name: str):
        super().__init__(name=name)
        self._w_init, self._with_bias, self._b_init = w_init, with_bias, b_init

    def __call__(self, inputs: int, outputs: int, dtype: Any) -> tuple[jax.Array, Any]:
        """Returns (w `[inputs, outputs]`, b `[outputs]` or None)."""
        w = hk.get_parameter("w", [inputs, outputs], dtype, init=self._w_init)
        if not self._with_bias:
            return w, None
        return w, hk.get_parameter("b", [outputs], dtype, init=self._b_init)
