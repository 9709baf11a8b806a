"""Multi-head attention as a Flax NNX module."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from jax_attn_bwd._core import backend, checks, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Save
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.attention_fn import attention_fn
from jax_attn_bwd.layers.multi_head import Tokens
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_NAME = "MultiHeadAttention"
_own_attention = attention_fn
# The class may be replaced by this one in a program: Flax's own call is kept.
_flax_call = nnx.MultiHeadAttention.__call__
_linear_call = nnx.LinearGeneral.__call__
_HANDED_ON = ("dtype", "precision", "dropout_rate", "broadcast_dropout", "save")


class _FlaxKeywords(TypedDict, total=False):
    """Lists what Flax's layer takes by name alone; an older Flax refuses what it has not."""

    dtype: Any
    param_dtype: Any
    broadcast_dropout: bool
    dropout_rate: float
    deterministic: bool | None
    precision: Any
    kernel_init: nnx.Initializer
    out_kernel_init: nnx.Initializer | None
    bias_init: nnx.Initializer
    out_bias_init: nnx.Initializer | None
    use_bias: bool
    decode: bool | None
    normalize_qk: bool
    qkv_promote_dtype: Callable[..., Any]
    out_promote_dtype: Callable[..., Any]
    ln_promote_dtype: Callable[..., Any]
    qkv_dot_general: Callable[..., Any] | None
    out_dot_general: Callable[..., Any] | None
    qkv_dot_general_cls: Any
    out_dot_general_cls: Any
    keep_rngs: bool
    kernel_metadata: Mapping[str, Any]
    out_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    out_bias_metadata: Mapping[str, Any]
    query_ln_scale_metadata: Mapping[str, Any]
    key_ln_scale_metadata: Mapping[str, Any]


class _CallKeywords(Tokens, total=False):
    """Lists what a call may tell of its tokens, and what newer versions of Flax take."""

    input_positions: Any
    out_sharding: Any
    qkv_sharding: Any


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with this package's attention and its backward.

    Every argument of Flax's, the same parameters, initial values, rngs and cache: change the import, and a
    checkpoint loads. It runs `jax_attn_bwd.multi_head_attention`, one rule over the whole layer. With
    `decode`, `normalize_qk`, `sow_weights`, `input_positions`, output shardings, or a dot_general, a
    promotion, an `attention_fn` or a projection layer of the caller's it runs the projections around
    `jax_attn_bwd.attention_fn`, or around theirs.

    Differs from Flax's in that a query which sees nothing gives the output bias, not a mean over hidden keys,
    and that inputs must be real. Dropout draws other masks than Flax's for the same key.

    Args:
      num_heads: heads of the queries.
      in_features: width of the inputs of queries.
      qkv_features: width of all heads together; None = in_features.
      out_features: width of the output; None = in_features.
      num_kv_heads: heads of keys and values, a divisor of num_heads; None = num_heads.
      in_kv_features: width of the inputs of keys and values; None = in_features.
      rngs: rng keys; options: as in `flax.nnx.MultiHeadAttention`.
      attention_fn: between the projections, in place of the rule over the whole layer; for an `nnx.RoPE`
        `jax_attn_bwd.configured_attention_fn(rope=nnx.RoPE())`, of which `rotary` is the faster form.
      local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, deterministic_sums, save,
        implementation, forward_mode: see `jax_attn_bwd.layers.multi_head`, which also tells what a call
        takes. (`deterministic` is Flax's: no dropout.)

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
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rngs: nnx.Rngs,
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
        **options: Unpack[_FlaxKeywords],
    ):
        names = (
            "local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, implementation, "
            "forward_mode, deterministic_sums"
        )
        arguments = locals()
        *ours, mode, sums = got = tuple(arguments[name] for name in names.split(", "))
        others = any(x is not None for x in ours) or (mode, sums) != (False, True)
        if attention_fn is not _own_attention and others:
            expected = "be left out with an attention_fn of the caller's"
            raise ValueError(checks.message(_NAME, names, expected, got, "bind them with functools.partial"))
        if implementation is not None:
            checks.choice(_NAME, "implementation", implementation, backend.NAMES)
        num_heads = checks.integer(_NAME, "num_heads", num_heads, least=1)
        sizes = dict(num_kv_heads=num_kv_heads, in_kv_features=in_kv_features)
        theirs: dict[str, Any] = {name: x for name, x in sizes.items() if x is not None} | dict(options)
        super().__init__(
            num_heads, in_features, qkv_features, out_features, attention_fn=attention_fn, rngs=rngs, **theirs
        )
        # A pair of Python ints: `nnx.jit` compares it with the windows of other layers.
        self.local_window_size = masks.window(_NAME, local_window_size)
        for name in (*(name for name in multi_head.OPTIONS if name != "local_window_size"), "save"):
            setattr(self, name, arguments[name])

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
        **options: Unpack[_CallKeywords],
    ) -> jax.Array:
        """Attends like Flax's layer.

        Args:
          inputs_q, inputs_k, inputs_v: `[..., T, Eq]`, `[..., S, Ek]`, `[..., S, Ev]`; None = the one before.
          mask: broadcasts to `[..., N, T, S]`; True, or a number that is not 0, attends.
          deterministic: True = no dropout; None takes the attribute.
          rngs: rngs for dropout; None takes the layer's own.
          sow_weights: store the weights `[..., N, T, S]` before dropout as `nnx.Intermediate`.
          decode: take one query and the cache of `init_cache`; None takes the attribute.
          is_causal: a query sees keys up to its own index. Decoding is causal anyway.
          options: what is told of tokens, see `jax_attn_bwd.layers.multi_head`, in whose `mod_args` an
            `nnx.Param` may stand for its array; `input_positions`, `out_sharding`, `qkv_sharding`, where this
            Flax has them.

        Returns:
          `[..., T, out_features]`.
        """
        told = {name: x for name, x in options.items() if name in Tokens.__optional_keys__}
        tokens: Tokens = multi_head.complete("MultiHeadAttention.__call__", Tokens, told)
        tokens["mod_args"] = jax.tree.map(_array_of, tokens["mod_args"], is_leaf=_is_variable)
        multi_head.check_values(_NAME, inputs_q, inputs_k, inputs_v)
        numbers, mask = mask, multi_head.flax_mask(_NAME, mask)
        _check_rngs(rngs)
        # What the call leaves out, the layer tells.
        others: dict[str, Any] = {
            name: x for name, x in options.items() if name not in tokens and x is not None
        }
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
        if unclear or others or sow_weights or decode or not self._is_whole():
            others |= dict(deterministic=deterministic, rngs=rngs, sow_weights=sow_weights)
            others |= dict(mask=mask, is_causal=is_causal and not decode)
            out = self._projected(inputs_q, inputs_k, inputs_v, tokens=tokens, decode=decode, **others)
            return multi_head.nan_if_additive(out, numbers)
        # Otherwise the whole layer runs under one rule.
        linears = (self.query, self.key, self.value, self.out)
        pairs = ((x.kernel[...], None if x.bias is None else x.bias[...]) for x in linears)
        params = MultiHeadAttentionParams(*(x for pair in pairs for x in pair))
        inputs = multi_head.inputs_of(inputs_q, inputs_k, inputs_v)
        multi_head.check_widths(_NAME, ("inputs_q", "inputs_k", "inputs_v"), inputs, params)
        given: dict[str, Any] = {**tokens, **multi_head.options_of(self, *_HANDED_ON)}
        given |= dict(mask=mask, is_causal=is_causal, dropout_key=stream() if drops and stream else None)
        return multi_head.nan_if_additive(multi_head.attend(params, inputs, **given), numbers)

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
            multi_head.check_room(_NAME, length, index)
        # Our attention takes the options of the layer, and the index in the cache; any takes the tokens.
        if attention is _own_attention:
            options = multi_head.options_of(self)
            attention = partial(attention, **options)
            tokens = tokens if index is None else multi_head.with_index(tokens, options, index)
        attention = multi_head.with_token_arguments(_NAME, attention, tokens)

        def sowing_here(*heads: Any, module: Any = None, **options: Any) -> jax.Array:
            return attention(*heads, module=None if module is None else self, **options)

        # Another module, of the same parameters and state, has the other attention: an attribute of this one
        # may not be set where it was made outside of a transformation.
        other = object.__new__(type(self))
        vars(other).update(vars(self), attention_fn=sowing_here)
        out = _flax_call(other, *inputs, decode=decode, **arguments)
        return out if index is None else multi_head.within_room(out, length, index + 1)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _array_of(x: Any) -> Any:
    """Returns the array of an `nnx.Variable`; anything else stays."""
    return x[...] if _is_variable(x) else x


def _check_rngs(rngs: Any) -> None:
    """Raises for what gives no random keys."""
    if rngs is not None and not callable(rngs):
        expected = "be nnx.Rngs or an nnx.RngStream"
        remedy = "write rngs=nnx.Rngs(dropout=key)"
        raise TypeError(checks.message(_NAME, "rngs", expected, type(rngs).__name__, remedy))
