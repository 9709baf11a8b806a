"""Multi-head attention as a Flax NNX module."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from jax_attn_bwd._core import backend, checks, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Save
from jax_attn_bwd.layers.attention_fn import attention_fn
from jax_attn_bwd.layers.multi_head import (
    Tokens,
    attend,
    check_room,
    flax_mask,
    options_of,
    tokens_of,
    with_index,
    with_token_arguments,
    within_room,
)
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_NAME = "MultiHeadAttention"
_own_attention = attention_fn
_linear_call = nnx.LinearGeneral.__call__


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with this package's attention and its backward.

    Every argument of Flax's, the same parameters, initial values, rngs and cache: change the import, and a
    checkpoint loads. It runs `jax_attn_bwd.multi_head_attention`, one rule over the whole layer. With
    `decode`, `normalize_qk`, `sow_weights`, `input_positions`, output shardings, or a dot_general, a
    promotion, an `attention_fn` or a projection layer of the caller's it runs the projections around
    `jax_attn_bwd.attention_fn`, or around theirs.

    Differs from Flax's in that a query which sees nothing gives the output bias, not a mean over hidden keys.
    Dropout draws other masks than Flax's for the same key.

    Args:
      num_heads, in_features, ...: all of `flax.nnx.MultiHeadAttention`, by position or by name.
      attention_fn: between the projections, in place of the rule over the whole layer; for an `nnx.RoPE`
        `jax_attn_bwd.configured_attention_fn(rope=nnx.RoPE())`, of which `rotary` is the faster form.
      local_window_size: int or (left, right): a query at t sees keys from t - left to t + right; in decoding
        t is the index in the cache.
      logits_soft_cap: c > 0; the scaled logits become `c * tanh(logits / c)`.
      mask_mod, score_mod: masks and scores as functions, as in `jax_attn_bwd.dot_product_attention`
        (`jax_attn_bwd.mods` has named ones); in decoding a row is an index in the cache.
      rotary: `jax_attn_bwd.Rotary`: turns projected queries and keys by their positions, `query_positions`
        and `key_value_positions` of the call or the indices; in decoding the index in the cache.
      deterministic_sums: False lets a kernel add in any order where that is faster. (`deterministic` is
        Flax's: no dropout.)
      save: what the backward keeps beside the inputs: "inputs" (nothing), "qkv" or "probs", as in
        `jax_attn_bwd.multi_head_attention`, where that runs.
      implementation: option of `jax_attn_bwd.dot_product_attention`.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule;
        an `attention_fn` of the caller's is asked itself: `configured_attention_fn(forward_mode=True)`.

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
        logits_soft_cap: float | None = None,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        rotary: Rotary | None = None,
        deterministic_sums: bool = True,
        save: Save = "inputs",
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        **kwargs: Any,
    ):
        names = (
            "local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, implementation, "
            "forward_mode, deterministic_sums"
        )
        arguments = locals()
        *options, mode, sums = got = tuple(arguments[name] for name in names.split(", "))
        others = any(x is not None for x in options) or (mode, sums) != (False, True)
        if attention_fn is not _own_attention and others:
            expected = "be left out with an attention_fn of the caller's"
            raise ValueError(checks.message(_NAME, names, expected, got, "bind them with functools.partial"))
        if implementation is not None:
            checks.choice(_NAME, "implementation", implementation, backend.NAMES)
        num_heads = checks.integer(_NAME, "num_heads", num_heads, least=1)
        super().__init__(num_heads, *args, attention_fn=attention_fn, **kwargs)
        # A pair of Python ints: `nnx.jit` compares it with the windows of other layers.
        self.local_window_size = masks.window(_NAME, local_window_size)
        self.logits_soft_cap = logits_soft_cap
        self.mask_mod = mask_mod
        self.score_mod = score_mod
        self.rotary = rotary
        self.deterministic_sums = deterministic_sums
        self.save = save
        self.implementation = implementation
        self.forward_mode = forward_mode

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
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
        query_positions: jax.Array | None = None,
        key_value_positions: jax.Array | None = None,
        mod_args: tuple[Any, ...] = (),
        **options: Any,
    ) -> jax.Array:
        """Attends like Flax's layer.

        Args:
          inputs_q: `[..., T, Eq]`.
          inputs_k: `[..., S, Ek]`; None = `inputs_q`.
          inputs_v: `[..., S, Ev]`; None = `inputs_k`.
          mask: broadcasts to `[..., N, T, S]`, True = attend; of numbers, what is not 0 attends. Floating
            values other than 0 and 1 are an error where they are known, not where they are traced.
          deterministic: True = no dropout; None takes the attribute.
          rngs: rngs for dropout; None takes the layer's own.
          sow_weights: store the weights `[..., N, T, S]` before dropout as `nnx.Intermediate`.
          decode: take one query and the cache of `init_cache`; None takes the attribute.
          is_causal: a query sees keys up to its own index. Decoding is causal anyway.
          query_seq_lengths, key_value_seq_lengths: `[...]`; query_segment_ids, key_value_segment_ids,
            query_positions, key_value_positions: `[..., T]`, `[..., S]`: as in
            `jax_attn_bwd.dot_product_attention`. In decoding the keys are those of the cache, and a query's
            position is its index there, unless it is given. An `attention_fn` of the caller's is handed
            those that are given.
          mod_args: a tuple of what the functions read, with gradients to the floats that `score_mod` reads;
            an `nnx.Param` may stand for its array.
          options: `input_positions`, `out_sharding`, `qkv_sharding`, where this Flax has them.

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError: shapes disagree, or the cache is full (NaN where that is traced). TypeError: an argument
            is of the wrong kind, such as an additive mask.
        """
        tokens = tokens_of(locals())
        tokens["mod_args"] = jax.tree.map(_array_of, mod_args, is_leaf=lambda x: isinstance(x, nnx.Variable))
        mask = flax_mask(_NAME, mask)
        _check_rngs(rngs)
        # What the call leaves out, the layer tells.
        options = {name: x for name, x in options.items() if x is not None}
        decode = self.decode if decode is None else decode
        deterministic = self.deterministic if deterministic is None else deterministic
        drops = self.dropout_rate > 0 and not deterministic
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else self.rngs if rngs is None else rngs
        # What Flax itself refuses, or an option that this layer does not have, goes through Flax's own code.
        unclear = (
            decode is None
            or (inputs_k is None and inputs_v is not None)
            or (drops and (deterministic is None or stream is None))
        )
        if unclear or options or sow_weights or decode or not self._is_whole():
            return self._projected(
                inputs_q,
                inputs_k,
                inputs_v,
                tokens=tokens,
                mask=mask,
                deterministic=deterministic,
                rngs=rngs,
                sow_weights=sow_weights,
                decode=decode,
                is_causal=is_causal and not decode,
                **options,
            )
        # Otherwise the whole layer runs under one rule.
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        linears = (self.query, self.key, self.value, self.out)
        pairs = ((x.kernel[...], None if x.bias is None else x.bias[...]) for x in linears)
        return attend(
            MultiHeadAttentionParams(*(x for pair in pairs for x in pair)),
            inputs_q,
            inputs_k,
            inputs_v,
            dtype=self.dtype,
            mask=mask,
            is_causal=is_causal,
            precision=self.precision,
            dropout_rate=self.dropout_rate if drops else 0.0,
            dropout_key=stream() if drops and stream else None,
            broadcast_dropout=self.broadcast_dropout,
            save=self.save,
            **tokens,
            **options_of(self),
        )

    def _is_whole(self) -> bool:
        """Tells whether nothing stands between plain projections and the attention, or watches them."""
        linears = (self.query, self.key, self.value, self.out)
        plain = all(
            type(x) is nnx.LinearGeneral
            and x.dot_general is x.dot_general_cls is None
            and x.precision == self.precision
            and x.preferred_element_type is None
            and x.promote_dtype is dtypes.promote_dtype
            for x in linears
        )
        # `nnx.tabulate` wraps the calls of linear layers to tell of them
        plain = plain and nnx.LinearGeneral.__call__ is _linear_call
        return self.attention_fn is _own_attention and plain and not self.normalize_qk

    def _projected(self, *inputs: Any, tokens: Tokens, decode: Any, **arguments: Any) -> Any:
        """Calls Flax's own layer, around the attention that the attributes and the tokens ask for."""
        attention = self.attention_fn
        # A step of decoding must find room in the cache.
        index = self.cache_index[...] if decode and self.cache_index is not None else None
        length = 0 if self.cached_key is None else self.cached_key.shape[-3]
        if index is not None:
            check_room(_NAME, length, index)
        # Our attention takes the options of the layer, and the index in the cache; any takes the tokens.
        if attention is _own_attention:
            options = options_of(self)
            attention = partial(attention, **options)
            tokens = tokens if index is None else with_index(tokens, options, index)
        attention = with_token_arguments(_NAME, attention, tokens)

        def sowing_here(*heads: Any, module: Any = None, **options: Any) -> jax.Array:
            return attention(*heads, module=None if module is None else self, **options)

        # Another module, of the same parameters and state, has the other attention: an attribute of this one
        # may not be set where it was made outside of a transformation.
        other = object.__new__(type(self))
        vars(other).update(vars(self), attention_fn=sowing_here)
        out = nnx.MultiHeadAttention.__call__(other, *inputs, decode=decode, **arguments)
        return out if index is None else within_room(out, length, index + 1)


def _array_of(x: Any) -> Any:
    """Returns the array of an `nnx.Variable`; anything else stays."""
    return x[...] if isinstance(x, nnx.Variable) else x


def _check_rngs(rngs: Any) -> None:
    """Raises for what gives no random keys."""
    if rngs is not None and not callable(rngs):
        expected = "be nnx.Rngs or an nnx.RngStream"
        remedy = "write rngs=nnx.Rngs(dropout=key)"
        raise TypeError(checks.message(_NAME, "rngs", expected, type(rngs).__name__, remedy))
