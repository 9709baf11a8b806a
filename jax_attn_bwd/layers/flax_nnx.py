"""Layers for Flax NNX."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_attn_bwd._core import backend, checks, keywords, masks, products
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Integers, Save
from jax_attn_bwd.layers import deformable, gated_delta_net, kimi_delta_attention, multi_head
from jax_attn_bwd.layers import delta_rule_layers as delta_rule
from jax_attn_bwd.layers import graph as convs
from jax_attn_bwd.layers.attention_fn import attention_fn, check_callable, is_ours
from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.multi_head import Tokens
from jax_attn_bwd.layers.torch_weights import loaded
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "MultiHeadAttention",
    "MultiScaleDeformableAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
    "replace_attention",
]

_NAME = "MultiHeadAttention"
_XAVIER = nnx.initializers.xavier_uniform()
_own_attention = attention_fn
# The class may be replaced by this one in a program: Flax's own call is kept.
_flax_layer = nnx.MultiHeadAttention
_flax_call = nnx.MultiHeadAttention.__call__
_Model = TypeVar("_Model")
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


class MultiHeadAttention(nnx.MultiHeadAttention, keywords.ChecksNames):
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
      is_causal, scale, local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, deterministic_sums,
        save, implementation, forward_mode: see `jax_attn_bwd.layers.multi_head`, which also tells what a call
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
        is_causal: bool = False,
        scale: float | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        rotary: Rotary | None = None,
        deterministic_sums: bool | None = None,
        save: Save = "inputs",
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        **options: Unpack[_FlaxKeywords],
    ):
        own = {name: x for name, x in locals().items() if name in multi_head.OPTIONS}
        if attention_fn is not _own_attention and own != multi_head.OPTIONS:
            expected = "be left out with an attention_fn of the caller's"
            remedy = "bind them with functools.partial"
            raise ValueError(checks.message(_NAME, ", ".join(own), expected, tuple(own.values()), remedy))
        if implementation is not None:
            checks.choice(_NAME, "implementation", implementation, backend.NAMES)
        check_callable(_NAME, attention_fn)
        width = in_features if qkv_features is None else None
        num_heads = multi_head.number_of_heads(_NAME, num_heads, width)
        sizes = dict(num_kv_heads=num_kv_heads, in_kv_features=in_kv_features)
        theirs: dict[str, Any] = {name: x for name, x in sizes.items() if x is not None} | dict(options)
        super().__init__(
            num_heads, in_features, qkv_features, out_features, attention_fn=attention_fn, rngs=rngs, **theirs
        )
        # A pair of Python ints: `nnx.jit` compares it with the windows of other layers.
        own["local_window_size"] = masks.window(_NAME, local_window_size)
        self.is_causal = checks.flag(_NAME, "is_causal", is_causal)
        for name, x in {**own, "save": save}.items():
            setattr(self, name, x)

    @keywords.known
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
        is_causal: bool | None = None,
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
          is_causal: a query sees keys up to its own index; None = as the layer was made. Decoding is causal
            anyway.
          options: what is told of tokens, see `jax_attn_bwd.layers.multi_head`, in whose `mod_args` an
            `nnx.Param` may stand for its array; `input_positions`, `out_sharding`, `qkv_sharding`, where this
            Flax has them.

        Returns:
          `[..., T, out_features]`.
        """
        told = {name: x for name, x in options.items() if name in Tokens.__optional_keys__}
        tokens: Tokens = multi_head.complete("MultiHeadAttention.__call__", Tokens, told)
        is_variable = lambda x: isinstance(x, nnx.Variable)
        array_of = lambda x: x[...] if is_variable(x) else x
        tokens["mod_args"] = jax.tree.map(array_of, tokens["mod_args"], is_leaf=is_variable)
        multi_head.check_values(_NAME, inputs_q, inputs_k, inputs_v)
        numbers, mask = mask, multi_head.flax_mask(_NAME, mask)
        if rngs is not None and not callable(rngs):
            expected, remedy = "be nnx.Rngs or an nnx.RngStream", "write rngs=nnx.Rngs(dropout=key)"
            raise TypeError(checks.message(_NAME, "rngs", expected, type(rngs).__name__, remedy))
        # What the call leaves out, the layer tells.
        is_causal = multi_head.is_causal(_NAME, self.is_causal, is_causal)
        others: dict[str, Any] = {n: x for n, x in options.items() if n not in tokens and x is not None}
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
        # `nnx.tabulate` wraps the calls of linear layers to tell of them, qwix replaces their products
        plain = plain and nnx.LinearGeneral.__call__ is _linear_call and not products.are_replaced()
        return self.attention_fn is _own_attention and plain and not self.normalize_qk

    def _projected(self, *inputs: Any, tokens: Tokens, decode: Any, **arguments: Any) -> Any:
        """Calls Flax's own layer, around the attention that the attributes and the tokens ask for."""
        attention = self.attention_fn
        # A step of decoding must find room in the cache.
        index = self.cache_index[...] if decode and self.cache_index is not None else None
        length = 0 if self.cached_key is None else self.cached_key.shape[-3]
        if index is not None:
            multi_head.check_room(_NAME, length, index)
            if inputs[0].shape[-2:-1] != (1,):
                remedy = "one after the other: layer(x[:, t : t + 1])"
                expected = "be one token, to decode"
                raise ValueError(checks.message(_NAME, "inputs_q", expected, inputs[0].shape, remedy))
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


class _Conv(keywords.ChecksNames, nnx.Module):
    kind: ClassVar[str]

    def _build(self, arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        config = convs.Config.of(self.kind, arguments)
        rngs, kernel_init, param_dtype = (arguments[name] for name in ("rngs", "kernel_init", "param_dtype"))
        shared = ("dtype", "param_dtype", "precision", "kernel_init", "rngs")
        linear: Any = partial(nnx.Linear, **{name: arguments[name] for name in shared})
        specs = convs.linear_layers(config, config.in_channels)
        for name, (width, out, bias) in specs.items():
            setattr(self, name, linear(width, out, use_bias=bias))
        for name, shape in convs.array_shapes(config).items():
            init = nnx.initializers.zeros if name == "bias" else kernel_init
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
        self.config = config
        self.linears = tuple(specs)
        # A layer without dropout holds no random state.
        streams = rngs if config.dropout else None
        self.dropout = nnx.Dropout(config.dropout, deterministic=arguments["deterministic"], rngs=streams)

    # fmt: off
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: bool) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @keywords.known
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: bool = False,
    ) -> convs.Result:  # fmt: skip
        """Attends; arguments and results, but `deterministic` and `rngs`, see in `jax_attn_bwd.layers.graph`.

        Args:
          deterministic: True = no dropout; None takes what `train()`, `eval()` or the constructor set.
          rngs: whose "dropout" is drawn from in place of the layer's own.
        """
        linears = {name: getattr(self, name) for name in self.linears}
        arrays = {name: getattr(self, name)[...] for name in convs.array_shapes(self.config)}
        deterministic = self.dropout.deterministic if deterministic is None else deterministic
        key = None
        if self.config.dropout and not deterministic:
            key = self.dropout.rngs() if rngs is None else rngs.dropout()
        return convs.attend(self.config, linears, arrays, x, graph, edge_attr, key, return_attention_weights)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Args:
      in_channels, out_channels, heads, concat, options: see `jax_attn_bwd.layers.graph`, which also tells the
        parameters, what a call takes, and the differences from PyTorch Geometric.
      deterministic: True = no dropout; `train()` and `eval()` set it. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_nnx import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer = GATConv(5, 4, heads=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 5), "float32"), graph).shape
      (3, 8)
      >>> ratings = BipartiteCSC.from_coo(src=[0, 2], dst=[1, 0], num_src=3, num_dst=2)
      >>> layer = GATConv((5, 6), 4, heads=2, add_self_loops=False, rngs=nnx.Rngs(0))
      >>> layer((jnp.ones((3, 5), "float32"), jnp.ones((2, 6), "float32")), ratings).shape  # users, items
      (2, 8)
    """

    kind: ClassVar[str] = "GATConv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[convs.GATConvKeywords],
    ):
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    All as in `GATConv`, with `share_weights` among the options.
    """

    kind: ClassVar[str] = "GATv2Conv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        deterministic: bool = False, dtype: Any = None, param_dtype: Any = jnp.float32,
        precision: Any = None, kernel_init: nnx.Initializer = _XAVIER, rngs: nnx.Rngs,
        **options: Unpack[convs.GATv2ConvKeywords],
    ):  # fmt: skip
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    All as in `GATConv`, but the options, see `jax_attn_bwd.layers.graph`.
    """

    kind: ClassVar[str] = "TransformerConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        deterministic: bool = False, dtype: Any = None, param_dtype: Any = jnp.float32,
        precision: Any = None, kernel_init: nnx.Initializer = _XAVIER, rngs: nnx.Rngs,
        **options: Unpack[convs.TransformerConvKeywords],
    ):  # fmt: skip
        self._build(locals())


class MultiScaleDeformableAttention(keywords.ChecksNames, nnx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `nnx.Linear`.

    Args:
      num_heads, in_features, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the four matrix products.
      kernel_init: initializer of `value_proj` and `output_proj`.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(2, 8, num_levels=2, rngs=nnx.Rngs(0))
      >>> query, value = jnp.ones((1, 5, 8), "float32"), jnp.ones((1, 15, 8), "float32")
      >>> layer(query, jnp.full((1, 5, 2), 0.5, "float32"), value, ((3, 4), (1, 3))).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int = 8,
        in_features: int = 256,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[deformable.Keywords],
    ):
        self.config = config = deformable.configure("in_features", in_features, num_heads, options)
        linear = partial(nnx.Linear, in_features, param_dtype=param_dtype, precision=precision, rngs=rngs)
        zeros = partial(linear, dtype=deformable.offsets_dtype(dtype), kernel_init=nnx.initializers.zeros)
        self.sampling_offsets = zeros(2 * config.samples, bias_init=deformable.offsets_init(config))
        self.attention_weights = zeros(config.samples)
        if config.projections:
            self.value_proj, self.output_proj = (
                linear(in_features, dtype=dtype, kernel_init=kernel_init) for _ in range(2)
            )

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations


class _DeltaRuleLayer(keywords.ChecksNames, nnx.Module):
    def _build(self, kind: type[delta_rule.Config], arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        self.config, self.decode = kind.of(arguments), arguments["decode"]
        config, width, C = self.config, self.config.in_features, self.config.channels
        shared = {name: arguments[name] for name in ("param_dtype", "rngs")}
        of_linears = {name: arguments[name] for name in ("dtype", "kernel_init")} | shared
        linear: Any = partial(nnx.Linear, use_bias=False, precision=config.precision, **of_linears)
        for name, (inner, out) in config.projections.items():
            setattr(self, name, linear(width if inner is None else inner, out))
        conv: Any = partial(nnx.Conv, C, C, config.conv_kernel_dim, feature_group_count=C, use_bias=False)
        self.conv1d = conv(kernel_init=delta_rule.conv_init, **shared)
        for name, (size, init) in config.vectors.items():
            drawn = init(shared["rngs"].params(), (size,), shared["param_dtype"])
            setattr(self, name, nnx.Param(drawn))
        setattr(self, config.norm, nnx.RMSNorm(config.value_head_dim, **shared))
        setattr(self, config.out_proj, linear(config.values, width))
        self.conv_state: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.recurrent_state: nnx.Cache[jax.Array] | None = nnx.data(None)

    @keywords.known
    def __call__(
        self,
        x: jax.Array,
        *,
        seq_lengths: Integers | None = None,
        segment_ids: Integers | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """Computes `[..., T, in_features]` of `x [..., T, in_features]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.delta_rule_layers`.
          decode: go on from the cache of `init_cache`; None takes the attribute.
        """
        config = self.config
        linears = {name: getattr(self, name) for name in (*config.projections, config.out_proj)}
        held = {"conv1d": self.conv1d.kernel, config.norm: getattr(self, config.norm).scale}
        held |= {name: getattr(self, name) for name in config.vectors}
        arrays = {name: param[...] for name, param in held.items()}
        if not (self.decode if decode is None else decode):
            return config.apply(linears, arrays, x, None, seq_lengths, segment_ids)[0]
        if self.conv_state is None or self.recurrent_state is None:
            expected, remedy = "be there to decode", "call init_cache"
            raise ValueError(checks.message(config.layer, "the cache", expected, None, remedy))
        cache = config.cache(self.conv_state[...], self.recurrent_state[...])
        out, cache = config.apply(linears, arrays, x, cache, seq_lengths, segment_ids)
        self.conv_state[...], self.recurrent_state[...] = cache
        return out

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache.

        Args:
          input_shape: of the inputs `[..., T, in_features]`, with any T.
          dtype: dtype of what the convolution reads.
        """
        if not isinstance(input_shape, tuple | list):
            expected, got = "be a shape, (..., T, in_features)", type(input_shape).__name__
            raise TypeError(checks.message(self.config.layer, "input_shape", expected, got, "write x.shape"))
        cache = self.config.empty(input_shape[:-2], dtype)
        self.conv_state, self.recurrent_state = (nnx.Cache(x) for x in cache)


class GatedDeltaNet(_DeltaRuleLayer):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj`, each an `nnx.Linear`; of `conv1d`, an `nnx.Conv`,
    the kernel and of `norm`, an `nnx.RMSNorm`, the scale; `dt_bias`, `A_log`.

    Args:
      num_key_heads, num_value_heads, key_head_dim, value_head_dim: see
        `jax_attn_bwd.layers.gated_delta_net`.
      in_features, options: see `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
      decode: whether calls go on from the cache of `init_cache`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the three projections.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import GatedDeltaNet
      >>> layer = GatedDeltaNet(16, 2, 4, 8, 8, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 16), "float32")).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        in_features: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        decode: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[delta_rule.Keywords],
    ):
        self._build(gated_delta_net.Config, locals())


class KimiDeltaAttention(_DeltaRuleLayer):
    """Kimi Delta Attention, the linear attention of Kimi Linear, from its projections to its output.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `f_b_proj`, `b_proj`, `g_a_proj`, `g_b_proj` and
    `o_proj`, each an `nnx.Linear`; of `conv1d`, an `nnx.Conv`, the kernel and of `o_norm`, an `nnx.RMSNorm`,
    the scale; `dt_bias`, `A_log`.

    Args:
      num_heads, head_dim: see `jax_attn_bwd.layers.kimi_delta_attention`.
      in_features, options: see `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
      decode: whether calls go on from the cache of `init_cache`.
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import KimiDeltaAttention
      >>> layer = KimiDeltaAttention(16, 2, 8, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 16), "float32")).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        decode: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[delta_rule.Keywords],
    ):
        self._build(kimi_delta_attention.Config, locals())


def load_torch(layer: nnx.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Sets the parameters of `layer` to the values of a PyTorch module, in their dtypes.

    Args:
      layer: built with the options of the PyTorch module.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Example:
      >>> import numpy as np
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import GATConv, load_torch
      >>> layer = GATConv(5, 3, heads=2, bias=False, rngs=nnx.Rngs(0))
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> load_torch(layer, {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}, "conv.")
      >>> float(layer.lin.kernel[0, 0])
      1.0
    """
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    nnx.update(layer, loaded(params, state, prefix))


def replace_attention(model: _Model) -> _Model:
    """Returns `model` with each `flax.nnx.MultiHeadAttention` as ours, its weights and cache kept.

    Found are those in modules, lists, dicts, and stacks that `nnx.vmap` made for a scan. The model that is
    given stays as it is; the new one has variables of its own, which begin as the same arrays.

    Args:
      model: a module, or another graph of NNX.

    Raises:
      TypeError: a layer, named by its path, is of a class of its own or has an attention function of the
        caller's, and so may attend otherwise.
      ValueError: the model has no such layer.

    Example:
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention, replace_attention
      >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> model = replace_attention(nnx.Sequential(layer, nnx.relu))
      >>> isinstance(model.layers[0], MultiHeadAttention)
      True
    """
    name, model = "replace_attention", nnx.clone(model)
    found = [(path, x) for path, x in nnx.iter_graph(model) if isinstance(x, nnx.MultiHeadAttention)]
    if not found:
        expected = "hold a flax.nnx.MultiHeadAttention"
        raise ValueError(checks.message(name, "model", expected, type(model).__name__))
    for path, layer in found:
        where, attention = ".".join(map(str, ("model", *path))), layer.attention_fn
        if isinstance(layer, MultiHeadAttention):
            continue
        if type(layer) is not _flax_layer:
            expected, remedy = "be a flax.nnx.MultiHeadAttention itself", "derive it from this module's"
            raise TypeError(checks.message(name, where, expected, type(layer).__name__, remedy))
        if attention is not nnx.dot_product_attention and not is_ours(attention):
            expected = "have Flax's own attention_fn, or one of jax_attn_bwd"
            remedy = "configured_attention_fn takes rope=, bias= and other options"
            raise TypeError(checks.message(name, where, expected, attention, remedy))
        # The clone is nobody else's: whatever holds the layer, and a scan over it, keeps it as it is.
        layer.__class__ = MultiHeadAttention
        own = {**multi_head.OPTIONS, "is_causal": False, "save": "inputs"}
        if attention is nnx.dot_product_attention:
            own["attention_fn"] = _own_attention
        for option, x in own.items():
            setattr(layer, option, x)
    return model
