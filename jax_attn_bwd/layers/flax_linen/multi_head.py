"""Multi-head attention as a Flax linen module."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Save
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.attention_fn import attention_fn
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_own_attention = attention_fn
_HANDED_ON = ("dtype", "is_causal", "precision", "dropout_rate", "broadcast_dropout", "save")
# Flax wraps methods: called inside another, the wrapped one would be intercepted and captured once more.
_flax_call = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with this package's attention and its backward.

    Every attribute and call argument of Flax's, the same parameters, initial values, rng streams and cache:
    change the import, and a checkpoint loads. It runs `jax_attn_bwd.multi_head_attention`, one rule over the
    whole layer. With `decode`, `normalize_qk`, `sow_weights`, a dot_general or an `attention_fn` of the
    caller's it runs Flax's projections around `jax_attn_bwd.attention_fn`, or around theirs; with an einsum
    of the caller's Flax's own attention.

    Differs from Flax's in that a query which sees nothing gives the output bias, not a mean over hidden keys,
    and that inputs must be real. Dropout draws other masks than Flax's for the same key. Where one rule runs,
    the projections are no `nn.DenseGeneral`: `nn.intercept_methods` and `capture_intermediates` do not see
    what they return.

    Attributes:
      is_causal, local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, deterministic_sums, save,
        implementation, forward_mode: see `jax_attn_bwd.layers.multi_head`, which also tells what a call
        takes. (`deterministic` is Flax's: no dropout.)

    Example:
      >>> import jax
      >>> from jax_attn_bwd.layers.flax_linen import MultiHeadDotProductAttention
      >>> layer = MultiHeadDotProductAttention(num_heads=2, is_causal=True)
      >>> x = jax.random.normal(jax.random.key(0), (1, 5, 8), "float32")
      >>> layer.init_with_output(jax.random.key(1), x)[0].shape
      (1, 5, 8)
    """

    attention_fn: Callable[..., jax.Array] = attention_fn
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    rotary: Rotary | None = None
    deterministic_sums: bool = True
    save: Save = "inputs"
    implementation: Implementation | None = None
    forward_mode: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        **tokens: Unpack[multi_head.Tokens],
    ) -> jax.Array:
        """Attends like Flax's layer.

        Args:
          inputs_q, inputs_k, inputs_v: `[..., T, Eq]`, `[..., S, Ek]`, `[..., S, Ev]`; None = the one before.
          inputs_kv: Flax's older name for keys and values.
          mask: broadcasts to `[..., N, T, S]`; True, or a number that is not 0, attends.
          deterministic: True = no dropout; None takes the attribute.
          dropout_rng: random key for dropout; None takes the rng "dropout".
          sow_weights: store the weights `[..., N, T, S]` before dropout in "intermediates".
          tokens: see `jax_attn_bwd.layers.multi_head`.

        Returns:
          `[..., T, out_features]`.
        """
        tokens = multi_head.complete("MultiHeadDotProductAttention.__call__", multi_head.Tokens, tokens)
        checks.integer(type(self).__name__, "num_heads", self.num_heads, least=1)
        multi_head.check_values(type(self).__name__, inputs_q, inputs_k, inputs_v)
        numbers, mask = mask, multi_head.flax_mask(type(self).__name__, mask)
        # Projections that were replaced, and names that Flax is leaving behind, go through its own code.
        names = inputs_kv is not None or (inputs_k is None and inputs_v is not None)
        if names or sow_weights or not self._is_whole():
            mode = dict(deterministic=deterministic, dropout_rng=dropout_rng, sow_weights=sow_weights)
            inputs = dict(inputs_k=inputs_k, inputs_v=inputs_v, inputs_kv=inputs_kv, mask=mask)
            return multi_head.nan_if_additive(self._projected(inputs_q, tokens, **inputs, **mode), numbers)
        # Otherwise the whole layer runs under one rule.
        given = multi_head.inputs_of(inputs_q, inputs_k, inputs_v)
        params = self._params(*given)
        drops = self.dropout_rate > 0 and not nn.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        options: dict[str, Any] = {**tokens, **multi_head.options_of(self, *_HANDED_ON)}
        options["dropout_key"] = dropout_rng if drops else None
        return multi_head.nan_if_additive(multi_head.attend(params, given, mask=mask, **options), numbers)

    @nn.nowrap
    def _is_whole(self) -> bool:
        """Tells whether nothing stands between projections and attention, or replaces a part."""
        custom = (
            self.qkv_dot_general,
            self.out_dot_general,
            self.qkv_dot_general_cls,
            self.out_dot_general_cls,
        )
        return (
            self.attention_fn is _own_attention
            and not (self.decode or self.normalize_qk or self._einsums())
            and all(x is None for x in custom)
        )

    @nn.nowrap
    def _einsums(self) -> bool:
        return bool(self.qk_attn_weights_einsum_cls or self.attn_weights_value_einsum_cls)

    @nn.nowrap
    def _params(self, *inputs: jax.Array) -> MultiHeadAttentionParams:
        """Returns the parameters, made where there are none yet."""
        # The sizes that Flax takes from the inputs where they are not given.
        features = self.out_features or inputs[0].shape[-1]
        heads, qkv_features = self.num_heads, self.qkv_features or inputs[0].shape[-1]
        if qkv_features % heads:
            expected = f"be a multiple of the {heads} heads"
            raise ValueError(checks.message(type(self).__name__, "qkv_features", expected, qkv_features))
        # Kernels and biases of query, key, value [E, N, H] and output [N, H, Eo], under Flax's names.
        size = (heads, qkv_features // heads)
        projection = partial(_Projection, use_bias=self.use_bias, param_dtype=self.param_dtype)
        inner = partial(projection, kernel_init=self.kernel_init, bias_init=self.bias_init)
        pairs = [
            inner((x.shape[-1],), size, name=name)()
            for x, name in zip(inputs, ("query", "key", "value"), strict=True)
        ]
        pairs.append(
            projection(
                size,
                (features,),
                kernel_init=self.out_kernel_init or self.kernel_init,
                bias_init=self.out_bias_init or self.bias_init,
                name="out",
            )()
        )
        return MultiHeadAttentionParams(*(x for pair in pairs for x in pair))

    @nn.nowrap
    def _projected(self, query: jax.Array, tokens: multi_head.Tokens, **arguments: Any) -> Any:
        """Calls Flax's own layer, around the attention that the attributes ask for."""
        name = type(self).__name__
        options: dict[str, Any] = {"is_causal": True} if self.is_causal else {}
        options |= {
            n: x
            for n, x in multi_head.options_of(self).items()
            if x is not None and x is not multi_head.OPTIONS[n]
        }
        # A step of decoding must find room in the cache.
        steps, length, index = self.decode and self.has_variable("cache", "cached_key"), 0, jnp.zeros(())
        if steps:
            held: Any = self.get_variable("cache", "cached_key")
            length, index = held.shape[-3], self.get_variable("cache", "cache_index")
            multi_head.check_room(name, length, index)
        # The caller's attention takes no options; ours takes those of the layer, and the index in the cache.
        if self.attention_fn is not _own_attention or self._einsums():
            if options:
                expected = f"be left out with an attention_fn or an einsum other than {__package__}'s"
                raise ValueError(checks.message(name, ", ".join(options), expected, options))
            attention = nn.dot_product_attention if self.attention_fn is _own_attention else self.attention_fn
        else:
            if steps:
                options.pop("is_causal", None)  # Flax hides the keys that are still to come
                tokens = multi_head.with_index(tokens, options, index)
            attention = partial(_own_attention, **options)
        # Modules are frozen: another one, in the same scope and state, has the other attention.
        module = object.__new__(type(self))
        attention = multi_head.with_token_arguments(name, attention, tokens)
        vars(module).update(vars(self), attention_fn=attention)
        out = _flax_call(module, query, **arguments)
        return multi_head.within_room(out, length, index + 1) if steps else out


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under the other name that Flax has for it.

    A module without a name is named after its class, so a checkpoint of one does not hold the other.
    """


class _Projection(nn.Module):
    """Holds kernel and bias of the `nn.DenseGeneral` of this name; the product is the operator's."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool
    param_dtype: Any
    kernel_init: nn.initializers.Initializer
    bias_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns (kernel `[*inputs, *outputs]`, bias `[*outputs]`)."""
        flat = math.prod(self.inputs), math.prod(self.outputs)
        kernel_init = partial(_flat, self.kernel_init, flat)
        kernel = self.param("kernel", kernel_init, self.inputs + self.outputs, self.param_dtype)
        if not self.use_bias:
            return kernel, None
        bias_init = partial(_flat, self.bias_init, flat[1:])
        return kernel, self.param("bias", bias_init, self.outputs, self.param_dtype)


def _flat(init: Any, flat: tuple[int, ...], key: jax.Array, shape: Any, dtype: Any) -> Any:
    """Calls `init` for a matrix, as Flax does, and gives it the `shape` of the parameter; boxes stay."""
    made = init(key, flat, dtype)
    return meta.replace_boxed(made, meta.unbox(made).reshape(shape))
