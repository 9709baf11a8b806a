"""Layers for Flax linen."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from jax_attn_bwd._core import checks, keywords, products
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Fill, Implementation, Integers, PaddingMode, SamplingMethod, Save
from jax_attn_bwd.layers import deformable, gated_delta_net, kimi_delta_attention, multi_head
from jax_attn_bwd.layers import delta_rule_layers as delta_rule
from jax_attn_bwd.layers import graph as convs
from jax_attn_bwd.layers.attention_fn import attention_fn, check_callable
from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.torch_weights import loaded
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "MultiScaleDeformableAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
]

_own_attention = attention_fn
_HANDED_ON = ("dtype", "precision", "dropout_rate", "broadcast_dropout", "save")
# Flax wraps methods: called inside another, the wrapped one would be intercepted and captured once more.
_flax_call = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)


class MultiHeadDotProductAttention(keywords.ChecksNames, nn.MultiHeadDotProductAttention):
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
      is_causal, scale, local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, deterministic_sums,
        save, implementation, forward_mode: see `jax_attn_bwd.layers.multi_head`, which also tells what a call
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
    scale: float | None = None
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    rotary: Rotary | None = None
    deterministic_sums: bool | None = None
    save: Save = "inputs"
    implementation: Implementation | None = None
    forward_mode: bool = False

    @nn.compact
    @keywords.known
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
        is_causal: bool | None = None,
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
          is_causal: a query sees keys up to its own index; None = as the layer was made. Decoding is causal
            anyway.
          tokens: see `jax_attn_bwd.layers.multi_head`.

        Returns:
          `[..., T, out_features]`.
        """
        tokens = multi_head.complete("MultiHeadDotProductAttention.__call__", multi_head.Tokens, tokens)
        checks.integer(type(self).__name__, "num_heads", self.num_heads, least=1)
        multi_head.check_values(type(self).__name__, inputs_q, inputs_k, inputs_v)
        numbers, mask = mask, multi_head.flax_mask(type(self).__name__, mask)
        causal = multi_head.is_causal(type(self).__name__, self.is_causal, is_causal)
        # Projections that were replaced, and names that Flax is leaving behind, go through its own code.
        names = inputs_kv is not None or (inputs_k is None and inputs_v is not None)
        if names or sow_weights or not self._is_whole():
            mode = dict(deterministic=deterministic, dropout_rng=dropout_rng, sow_weights=sow_weights)
            inputs = dict(inputs_k=inputs_k, inputs_v=inputs_v, inputs_kv=inputs_kv, mask=mask)
            return multi_head.nan_if_additive(
                self._projected(inputs_q, tokens, causal, **inputs, **mode), numbers
            )
        # Otherwise the whole layer runs under one rule.
        given = multi_head.inputs_of(inputs_q, inputs_k, inputs_v)
        params = self._params(*given)
        drops = self.dropout_rate > 0 and not nn.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        options: dict[str, Any] = {**tokens, **multi_head.options_of(self, *_HANDED_ON)}
        options |= dict(is_causal=causal, dropout_key=dropout_rng if drops else None)
        return multi_head.nan_if_additive(multi_head.attend(params, given, mask=mask, **options), numbers)

    @nn.nowrap
    def _is_whole(self) -> bool:
        """Tells whether nothing stands between projections and attention, or replaces a part."""
        if self.decode or self.normalize_qk or self._einsums() or products.are_replaced():
            return False
        names = ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls")
        return self.attention_fn is _own_attention and all(getattr(self, name) is None for name in names)

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
        names = ("query", "key", "value")
        pairs = [inner((x.shape[-1],), size, name=name)() for x, name in zip(inputs, names, strict=True)]
        kernel_init, bias_init = (
            self.out_kernel_init or self.kernel_init,
            self.out_bias_init or self.bias_init,
        )
        outer = partial(projection, kernel_init=kernel_init, bias_init=bias_init)
        pairs.append(outer(size, (features,), name="out")())
        return MultiHeadAttentionParams(*(x for pair in pairs for x in pair))

    @nn.nowrap
    def _projected(
        self, query: jax.Array, tokens: multi_head.Tokens, is_causal: bool, **arguments: Any
    ) -> Any:
        """Calls Flax's own layer, around the attention that the attributes ask for."""
        name = type(self).__name__
        options: dict[str, Any] = {"is_causal": True} if is_causal else {}
        own = multi_head.options_of(self)
        options |= {n: x for n, x in own.items() if x is not None and x is not multi_head.OPTIONS[n]}
        # A step of decoding must find room in the cache.
        steps, length, index = self.decode and self.has_variable("cache", "cached_key"), 0, jnp.zeros(())
        if steps:
            held: Any = self.get_variable("cache", "cached_key")
            length, index = held.shape[-3], self.get_variable("cache", "cache_index")
            multi_head.check_room(name, length, index)
        # The caller's attention takes no options; ours takes those of the layer, and the index in the cache.
        if self.attention_fn is not _own_attention or self._einsums():
            check_callable(name, self.attention_fn)
            if options:
                expected = f"be left out with an attention_fn or an einsum other than {__name__}'s"
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


class _Conv(keywords.ChecksNames, nn.Module):
    kind: ClassVar[str]
    out_channels: int
    heads: int = 1
    concat: bool = True
    dropout: float = 0.0
    edge_dim: int | None = None
    bias: bool = True
    deterministic: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    implementation: Implementation | None = None
    forward_mode: bool = field(default=False, kw_only=True)  # the others keep their places

    # fmt: off
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: Literal[False] = False
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: Literal[True]
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: bool
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @nn.compact
    @keywords.known
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: bool = False,
    ) -> convs.Result:  # fmt: skip
        """Attends; arguments and results, but `deterministic`, see in `jax_attn_bwd.layers.graph`.

        Args:
          deterministic: True = no dropout; None takes the attribute. With dropout one of the two must be
            given, and an rng "dropout" where it is False.
        """
        # The parameters, made where there are none yet.
        config, dense = convs.Config.of(self.kind, vars(self)), _dense(self)
        pair = (None, None) if isinstance(x, tuple | list) else None
        layers = {
            name: dense(linear.out_channels, use_bias=linear.bias, name=name)
            for name, linear in convs.linear_layers(config, pair).items()
        }
        init_of = lambda name: nn.initializers.zeros if name == "bias" else self.kernel_init
        vectors = {
            name: self.param(name, init_of(name), shape, self.param_dtype)
            for name, shape in convs.array_shapes(config).items()
        }
        # A key where a call drops edges.
        key = None
        if config.dropout and not nn.merge_param("deterministic", self.deterministic, deterministic):
            key = self.make_rng("dropout")
        return convs.attend(config, layers, vectors, x, graph, edge_attr, key, return_attention_weights)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    For other attributes, parameters, calls and differences from there see `jax_attn_bwd.layers.graph`.

    Attributes:
      deterministic: True = no dropout; may be given at the call instead. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_linen import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer, x = GATConv(4, heads=2), jnp.ones((3, 5), "float32")
      >>> params = layer.init(jax.random.key(0), x, graph)
      >>> layer.apply(params, x, graph).shape
      (3, 8)
    """

    negative_slope: float = 0.2
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATConv"


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    All as in `GATConv`, with the attribute `share_weights`.
    """

    negative_slope: float = 0.2
    share_weights: bool = False
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATv2Conv"


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    All as in `GATConv`, but that it has `beta` and `root_weight` in the place of what follows `forward_mode`.
    """

    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"


class MultiScaleDeformableAttention(keywords.ChecksNames, nn.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each with `kernel` and
    `bias`.

    Attributes:
      num_heads, features: M and C; these and those that follow `kernel_init`, with `num_levels` and
        `num_points`, see in `jax_attn_bwd.layers.deformable`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the four matrix products.
      kernel_init: initializer of `value_proj` and `output_proj`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.flax_linen import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(num_heads=2, features=8, num_levels=2)
      >>> query, value = jnp.ones((1, 5, 8), "float32"), jnp.ones((1, 15, 8), "float32")
      >>> points = jnp.full((1, 5, 2), 0.5, "float32")
      >>> params = layer.init(jax.random.key(0), query, points, value, ((3, 4), (1, 3)))
      >>> layer.apply(params, query, points, value, ((3, 4), (1, 3))).shape
      (1, 5, 8)
    """

    num_heads: int = 8
    features: int = 256
    num_levels: int = 4
    num_points: int | Sequence[int] = 4
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    padding_mode: PaddingMode = "zeros"
    method: SamplingMethod = "bilinear"
    deterministic_sums: bool | None = None
    implementation: Implementation | None = None
    forward_mode: bool = field(default=False, kw_only=True)  # the others keep their places
    use_4D_normalizer: bool = False
    offset_scale: float = 0.5
    projections: bool = True
    attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention
    deterministic: bool | None = None

    def setup(self) -> None:
        """Makes the four linear layers."""
        given = {name: getattr(self, name) for name in deformable.Keywords.__annotations__}
        self.config = config = deformable.configure("features", self.features, self.num_heads, given)
        dense = _dense(self)
        zeros = partial(dense, dtype=deformable.offsets_dtype(self.dtype), kernel_init=nn.initializers.zeros)
        self.sampling_offsets = zeros(2 * config.samples, bias_init=deformable.offsets_init(config))
        self.attention_weights = zeros(config.samples)
        if config.projections:
            self.value_proj, self.output_proj = dense(self.features), dense(self.features)

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations


class GatedDeltaNet(keywords.ChecksNames, nn.Module):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj` and `conv1d`, each with `kernel`; `norm` with
    `scale`; `dt_bias`, `A_log`.

    Attributes:
      num_key_heads, num_value_heads, key_head_dim, value_head_dim: see
        `jax_attn_bwd.layers.gated_delta_net`.
      conv_kernel_dim, rms_norm_eps, precision, implementation, forward_mode: see
        `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
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
    @keywords.known
    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[..., T, E]` of `x [..., T, E]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.delta_rule_layers`.
        """
        return _by_delta_rule(self, gated_delta_net.Config, x, seq_lengths, segment_ids)


class KimiDeltaAttention(keywords.ChecksNames, nn.Module):
    """Kimi Delta Attention, the linear attention of Kimi Linear, from its projections to its output.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `f_b_proj`, `b_proj`, `g_a_proj`, `g_b_proj`,
    `o_proj` and `conv1d`, each with `kernel`; `o_norm` with `scale`; `dt_bias`, `A_log`.

    Attributes:
      num_heads, head_dim: see `jax_attn_bwd.layers.kimi_delta_attention`.
      conv_kernel_dim, rms_norm_eps, precision, implementation, forward_mode: see
        `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
      decode: whether calls go on from the variables "conv_state" and "recurrent_state" of "cache", which
        `init` makes: apply it with `mutable=["cache"]`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.flax_linen import KimiDeltaAttention
      >>> layer, x = KimiDeltaAttention(2, 8), jnp.ones((1, 5, 16), "float32")
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (1, 5, 16)
    """

    num_heads: int
    head_dim: int
    conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-5
    decode: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    implementation: Implementation | None = None
    forward_mode: bool = False

    @nn.compact
    @keywords.known
    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[..., T, E]` of `x [..., T, E]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.delta_rule_layers`.
        """
        return _by_delta_rule(self, kimi_delta_attention.Config, x, seq_lengths, segment_ids)


def _by_delta_rule(layer: Any, kind: type[delta_rule.Config], x: Any, *told: Any) -> jax.Array:
    """Calls a layer around the delta rule, within its compact call."""
    # The parameters, made where there are none yet.
    config = kind.of(vars(layer))
    x = config.tokens(x)
    dense, holder = partial(_dense(layer), use_bias=False), partial(_Holder, param_dtype=layer.param_dtype)
    linears = {name: dense(width, name=name) for name, (_, width) in config.projections.items()}
    linears[config.out_proj] = dense(x.shape[-1], name=config.out_proj)
    ones, size = nn.initializers.ones, (config.value_head_dim,)
    arrays = {
        "conv1d": holder("kernel", config.kernel_shape, delta_rule.conv_init, name="conv1d")(),
        config.norm: holder("scale", size, ones, name=config.norm)(),
    }
    for name, (width, init) in config.vectors.items():
        arrays[name] = layer.param(name, init, (width,), layer.param_dtype)
    if not layer.decode:
        return config.apply(linears, arrays, x, None, *told)[0]
    # A step of decoding; `init` makes the cache, and leaves it empty.
    steps = layer.has_variable("cache", "conv_state")
    empty = config.empty(x.shape[:-2], x.dtype if layer.dtype is None else layer.dtype)
    held = [layer.variable("cache", name, lambda x=x: x) for name, x in empty._asdict().items()]
    out, cache = config.apply(linears, arrays, x, config.cache(*(v.value for v in held)), *told)
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


def _dense(layer: Any) -> partial[nn.Dense]:
    """Returns `nn.Dense` as the attributes of `layer` have it."""
    options = dict(dtype=layer.dtype, param_dtype=layer.param_dtype, precision=layer.precision)
    return partial(nn.Dense, kernel_init=layer.kernel_init, **options)


def load_torch(params: Mapping[str, Any], state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`params` of one layer with the values of a PyTorch module.

    Args:
      params: parameters of the layer, `variables["params"]` of its `init` or the part of a model's that has
        its name; `jax.eval_shape` of them will do.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A tree like `params`, in its dtypes.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_linen import GATConv, load_torch
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer, x = GATConv(3, heads=2, bias=False), jnp.ones((3, 5), "float32")
      >>> params = jax.eval_shape(lambda key: layer.init(key, x, graph), jax.random.key(0))["params"]
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> params = load_torch(params, state, "conv.")
      >>> layer.apply({"params": params}, x, graph)[0].tolist()
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    return loaded(params, state, prefix)
