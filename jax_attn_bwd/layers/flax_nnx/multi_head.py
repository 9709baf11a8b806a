"""Multi-head attention as a Flax NNX module."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_attn_bwd._core import backend, checks, masks
from jax_attn_bwd.layers.arguments import positive
from jax_attn_bwd.layers.attention_fn import attention_fn
from jax_attn_bwd.layers.multi_head import FLAX_NUMBERS, attend, boolean_mask, within_window
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_NAME = "MultiHeadAttention"
_own_attention = attention_fn


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with this package's attention and its backward.

    Every argument of Flax's, the same parameters, initial values, rngs and cache: change the import, and a
    checkpoint loads. It runs `jax_attn_bwd.multi_head_attention`, one rule over the whole layer. With
    `decode`, `normalize_qk`, `sow_weights`, `precision`, `input_positions`, output shardings, or a
    dot_general, a promotion, an `attention_fn` or a projection layer of the caller's it runs the projections
    around `jax_attn_bwd.attention_fn`, or around theirs.

    Differs from Flax's in that masks must be boolean (`dtype=bool` in `nnx.make_causal_mask` and the like),
    and that a query which sees nothing gives the output bias, not a mean over hidden keys. Dropout draws
    other masks than Flax's for the same key.

    Args:
      num_heads, in_features, ...: all of `flax.nnx.MultiHeadAttention`, by position or by name.
      attention_fn: between the projections, in place of the rule over the whole layer. For rotary
        embeddings `functools.partial(jax_attn_bwd.attention_fn, rope=nnx.RoPE())`.
      local_window_size: int or (left, right): a query at t sees keys from t - left to t + right; in decoding
        t is the index in the cache.
      save: what the backward keeps beside the inputs: "inputs" (nothing), "qkv" or "probs", as in
        `jax_attn_bwd.multi_head_attention`, where that runs.
      implementation: of the attention, as in `jax_attn_bwd.dot_product_attention`.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention
      >>> layer = MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jax.random.normal(jax.random.key(0), (1, 5, 8), "float32"), is_causal=True).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int,
        *args: Any,
        attention_fn: Callable[..., jax.Array] = attention_fn,
        local_window_size: int | tuple[int, int] | None = None,
        save: str = "inputs",
        implementation: str | None = None,
        **kwargs: Any,
    ):
        if attention_fn is not _own_attention and not (local_window_size is implementation is None):
            expected = "be left out with an attention_fn of the caller's"
            got = (local_window_size, implementation)
            raise ValueError(
                checks.message(_NAME, "local_window_size, implementation", expected, got)
            )
        own = attention_fn is _own_attention
        if implementation is not None:
            checks.choice(_NAME, "implementation", implementation, backend.NAMES)
            attention_fn = _attention_by(implementation)
        num_heads = positive(_NAME, "num_heads", num_heads)
        super().__init__(num_heads, *args, attention_fn=attention_fn, **kwargs)
        self._own_attention = attention_fn if own else None
        # As a pair of Python ints: `nnx.jit` compares it with those of other layers.
        self.local_window_size = masks.window(_NAME, local_window_size)
        self.save = save
        self.implementation = implementation

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> jax.Array:
        """As Flax's.

        Args:
          inputs_q: `[..., T, Eq]`.
          inputs_k: `[..., S, Ek]`; None = `inputs_q`.
          inputs_v: `[..., S, Ev]`; None = `inputs_k`.
          mask: broadcasts to `[..., N, T, S]`, **bool**, True = attend.
          deterministic: True = no dropout; None takes the attribute.
          rngs: of dropout; None takes the layer's own.
          sow_weights: store the weights `[..., N, T, S]` before dropout as `nnx.Intermediate`.
          decode: take one query and the cache of `init_cache`; None takes the attribute.
          is_causal: a query sees keys up to its own index. Decoding is causal anyway.
          options: `input_positions`, `out_sharding`, `qkv_sharding`, where this Flax has them.

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind, such as a float mask.
        """
        mask = boolean_mask(_NAME, mask, FLAX_NUMBERS)
        _check_rngs(rngs)
        options = {name: x for name, x in options.items() if x is not None}
        decode = self.decode if decode is None else decode
        deterministic = self.deterministic if deterministic is None else deterministic
        drops = self.dropout_rate > 0 and not deterministic
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else self.rngs if rngs is None else rngs
        unclear = (
            decode is None
            or (inputs_k is None and inputs_v is not None)
            or (drops and (deterministic is None or stream is None))
        )
        if unclear or options or sow_weights or decode or not self._is_whole():
            return super().__call__(
                inputs_q, inputs_k, inputs_v,
                mask=self._in_window(mask, decode, inputs_q, inputs_k),
                deterministic=deterministic, rngs=rngs, sow_weights=sow_weights, decode=decode,
                is_causal=is_causal and not decode, **options,
            )  # fmt: skip
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        linears = (self.query, self.key, self.value, self.out)
        pairs = ((x.kernel[...], None if x.bias is None else x.bias[...]) for x in linears)
        return attend(
            MultiHeadAttentionParams(*(x for pair in pairs for x in pair)),
            inputs_q, inputs_k, inputs_v, dtype=self.dtype, mask=mask, is_causal=is_causal,
            local_window_size=self.local_window_size,
            dropout_rate=self.dropout_rate if drops else 0.0,
            dropout_key=stream() if drops and stream else None, broadcast_dropout=self.broadcast_dropout,
            save=self.save, implementation=self.implementation,
        )  # fmt: skip

    def _is_whole(self) -> bool:
        """Whether nothing stands between plain projections and the attention."""
        linears = (self.query, self.key, self.value, self.out)
        plain = all(
            type(x) is nnx.LinearGeneral
            and x.dot_general is x.dot_general_cls is x.precision is None
            and x.preferred_element_type is None
            and x.promote_dtype is dtypes.promote_dtype
            for x in linears
        )
        own = self.attention_fn is self._own_attention
        return own and plain and not self.normalize_qk and self.precision is None

    def _in_window(self, mask: Any, decode: Any, query: jax.Array, key: Any) -> Any:
        """`mask` with the window; that of a decoded query lies around the index of the cache."""
        if self.local_window_size is None:
            return mask
        if decode and self.cached_key is not None and self.cache_index is not None:
            row, length = self.cache_index[...][None], self.cached_key.shape[-3]
        else:
            row = jnp.arange(query.shape[-2], dtype=jnp.int32)
            length = (query if key is None else key).shape[-2]
        batch = query.ndim - 2
        return within_window(_NAME, mask, row, batch, length, self.local_window_size)


def _check_rngs(rngs: Any) -> None:
    if rngs is not None and not callable(rngs):
        expected = "be nnx.Rngs or an nnx.RngStream"
        remedy = "write rngs=nnx.Rngs(dropout=key)"
        raise TypeError(checks.message(_NAME, "rngs", expected, type(rngs).__name__, remedy))


@cache  # layers are of one graphdef, and `nnx.jit` traces them once, where their attributes are equal
def _attention_by(implementation: str) -> Callable[..., jax.Array]:
    return partial(attention_fn, implementation=implementation)
