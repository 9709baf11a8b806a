"""Layers for Haiku."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Unpack, overload

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.types import Fill, Implementation, Integers, Save
from jax_attn_bwd.layers import deformable, gated_delta_net, kimi_delta_attention, multi_head
from jax_attn_bwd.layers import delta_rule_layers as delta_rule
from jax_attn_bwd.layers import graph as convs
from jax_attn_bwd.layers.deformable import encoder_reference_points
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
]

_NAME = "MultiHeadAttention"
_NAMES = {"w": "kernel", "b": "bias", "scale": "scale"}  # of parameters, here and in linen
_XAVIER = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")


class MultiHeadAttention(keywords.ChecksNames, hk.MultiHeadAttention):
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

    @keywords.known
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
        is_causal: bool | None = None,
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
          is_causal: a query sees keys up to its own index; None = as the layer was made. With a cache it does
            anyway.
          tokens: see `jax_attn_bwd.layers.multi_head`.

        Returns:
          `[..., T, model_size]`.
        """
        tokens = multi_head.complete("MultiHeadAttention.__call__", multi_head.Tokens, tokens)
        numbers, mask = mask, multi_head.flax_mask(_NAME, mask, "pass them as bias=")
        dropout_rate = checks.rate(_NAME, "dropout_rate", dropout_rate)
        causal = multi_head.is_causal(_NAME, self._without_cache["is_causal"], is_causal)
        # Haiku's linear layers hold all heads side by side: their parameters are reshaped.
        N, H, Hv = self.num_heads, self.key_size, self.value_size
        sizes = {"query": (query, H), "key": (key, H), "value": (value, Hv)}
        arrays: list[Any] = []
        for name, (x, size) in sizes.items():
            w, b = self._projection(name, x.shape[-1], N * size, x.dtype)
            arrays += [w.reshape(x.shape[-1], N, size), None if b is None else b.reshape(N, size)]
        dtype = jnp.result_type(query, key, value)
        w, b = self._projection("linear", N * Hv, self.model_size, dtype)
        arrays += [w.reshape(N, Hv, self.model_size), b]
        params = MultiHeadAttentionParams(*arrays)
        # With a cache the call is the next step of a sequence.
        if self._cache_length is not None:
            if dropout_rate:
                expected, remedy = "be 0 with cache_length", "the cache is for decoding"
                raise ValueError(checks.message(_NAME, "dropout_rate", expected, dropout_rate, remedy))
            out = self._decoded(params, query, key, value, mask, bias, tokens)
            return multi_head.nan_if_additive(out, numbers)
        given: dict[str, Any] = {**tokens, **self._options, **self._without_cache}
        given |= dict(mask=mask, bias=bias, dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout)
        given["is_causal"] = causal
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
    def _projection(self, name: str, inputs: int, outputs: int, dtype: Any) -> tuple[jax.Array, Any]:
        """Returns (w `[inputs, outputs]`, b `[outputs]` or None); the product is the operator's."""
        held = _Holder(name)
        w = held("w", [inputs, outputs], dtype, self.w_init)
        return w, held("b", [outputs], dtype, self.b_init or jnp.zeros) if self.with_bias else None


@dataclass(eq=False, repr=False)
class _Conv(keywords.ChecksNames, hk.Module):
    kind: ClassVar[str]
    out_channels: int
    heads: int = 1
    concat: bool = True
    _: KW_ONLY
    dropout: float = 0.0
    edge_dim: int | None = None
    bias: bool = True
    w_init: hk.initializers.Initializer | None = None
    implementation: Implementation | None = None
    forward_mode: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        """Makes the layer of its fields, which the constructor has set."""
        if self.name is None and self.kind == "GATv2Conv":
            self.name = "gatv2_conv"  # Haiku would call it ga_tv2_conv
        super().__post_init__()
        self._config = convs.Config.of(self.kind, vars(self))
        self._w_init = self.w_init or _XAVIER

    # fmt: off
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: Literal[False] = False
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: Literal[True]
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: bool
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @keywords.known
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: bool = False,
    ) -> convs.Result:  # fmt: skip
        """Attends; arguments and results, but `is_training`, see in `jax_attn_bwd.layers.graph`.

        Args:
          is_training: whether to drop out, with `hk.next_rng_key()`; must be given to a layer with dropout.
        """
        # The parameters, made where there are none yet.
        config = self._config
        pair = isinstance(x, tuple | list)
        layers = {
            name: hk.Linear(linear.out_channels, with_bias=linear.bias, w_init=self._w_init, name=name)
            for name, linear in convs.linear_layers(config, (None, None) if pair else None).items()
        }
        dtype = jnp.result_type(x[0] if pair else x)
        vectors = {
            name: hk.get_parameter(name, shape, dtype, jnp.zeros if name == "bias" else self._w_init)
            for name, shape in convs.array_shapes(config).items()
        }
        # A key where a call drops edges.
        key = None
        if config.dropout:
            if is_training is None:
                expected = f"be given to a layer with dropout = {config.dropout}"
                raise ValueError(checks.message(config.kind, "is_training", expected, None))
            key = hk.next_rng_key() if is_training else None
        return convs.attend(config, layers, vectors, x, graph, edge_attr, key, return_attention_weights)


@dataclass(eq=False, repr=False)
class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    For other arguments, parameters, calls and differences from there see `jax_attn_bwd.layers.graph`.

    Args:
      w_init: initializer of the linear layers and the attention vectors; Xavier-uniform if None.
      name: name of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.haiku import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> model = hk.without_apply_rng(hk.transform(lambda x: GATConv(4, heads=2)(x, graph)))
      >>> x = jnp.ones((3, 5))
      >>> model.apply(model.init(jax.random.key(0), x), x).shape
      (3, 8)
    """

    _: KW_ONLY
    negative_slope: float = 0.2
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATConv"


@dataclass(eq=False, repr=False)
class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    All as in `GATConv`, with the argument `share_weights`.
    """

    _: KW_ONLY
    negative_slope: float = 0.2
    share_weights: bool = False
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATv2Conv"


@dataclass(eq=False, repr=False)
class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    All as in `GATConv`, but that it takes `beta` and `root_weight`, and not what only the other two take.
    """

    _: KW_ONLY
    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"


class MultiScaleDeformableAttention(keywords.ChecksNames, hk.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an `hk.Linear` with
    `w` and `b`.

    Offsets, locations and weights are computed in float32 or wider whatever the inputs. But a
    `hk.mixed_precision` policy set on this very class casts `reference_points` on their way in: set it
    on a module around this one.

    Args:
      num_heads, model_size, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
      w_init: initializer of `value_proj` and `output_proj`; Xavier-uniform if None.
      name: name of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.haiku import MultiScaleDeformableAttention
      >>> def forward(query, points, value):
      ...     layer = MultiScaleDeformableAttention(num_heads=2, model_size=8, num_levels=2)
      ...     return layer(query, points, value, ((3, 4), (1, 3)))
      >>> model = hk.without_apply_rng(hk.transform(forward))
      >>> inputs = jnp.ones((1, 5, 8)), jnp.full((1, 5, 2), 0.5), jnp.ones((1, 15, 8))
      >>> model.apply(model.init(jax.random.key(0), *inputs), *inputs).shape
      (1, 5, 8)
    """

    def __init__(
        self,
        num_heads: int = 8,
        model_size: int = 256,
        *,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
        **options: Unpack[deformable.Keywords],
    ):
        super().__init__(name=name)
        self.config = config = deformable.configure("model_size", model_size, num_heads, options)
        zeros = partial(hk.Linear, w_init=jnp.zeros)
        xavier = partial(hk.Linear, model_size, w_init=w_init or _XAVIER)
        b_init = deformable.offsets_init(config)
        self.sampling_offsets = zeros(2 * config.samples, b_init=b_init, name="sampling_offsets")
        self.attention_weights = zeros(config.samples, name="attention_weights")
        if config.projections:
            self.value_proj, self.output_proj = xavier(name="value_proj"), xavier(name="output_proj")

    # In the class itself: the frameworks wrap what they find there.
    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations


class _DeltaRuleLayer(keywords.ChecksNames, hk.Module):
    config: delta_rule.Config
    decode: bool
    _w_init: hk.initializers.Initializer

    @keywords.known
    def __call__(
        self, x: jax.Array, *, seq_lengths: Integers | None = None, segment_ids: Integers | None = None
    ) -> jax.Array:
        """Computes `[..., T, E]` of `x [..., T, E]`.

        Args:
          seq_lengths, segment_ids: see `jax_attn_bwd.layers.delta_rule_layers`.
        """
        # The parameters, made where there are none yet.
        config, x = self.config, self.config.tokens(x)
        linear = partial(hk.Linear, with_bias=False, w_init=self._w_init)
        linears = {name: linear(out, name=name) for name, (_, out) in config.projections.items()}
        linears[config.out_proj] = linear(x.shape[-1], name=config.out_proj)
        conv_init, ones = _drawn(delta_rule.conv_init), _drawn(jax.nn.initializers.ones)
        arrays = {
            "conv1d": _Holder("conv1d")("w", config.kernel_shape, x.dtype, conv_init),
            config.norm: _Holder(config.norm)("scale", (config.value_head_dim,), x.dtype, ones),
        }
        for name, (size, init) in config.vectors.items():
            arrays[name] = hk.get_parameter(name, (size,), x.dtype, _drawn(init))
        if not self.decode:
            return config.apply(linears, arrays, x, None, seq_lengths, segment_ids)[0]
        # A step of decoding.
        empty = config.empty(x.shape[:-2], x.dtype)._asdict()
        states = (hk.get_state(name, x.shape, x.dtype, jnp.zeros) for name, x in empty.items())
        out, cache = config.apply(linears, arrays, x, config.cache(*states), seq_lengths, segment_ids)
        for name, x in cache._asdict().items():
            hk.set_state(name, x)
        return out


class GatedDeltaNet(_DeltaRuleLayer):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj` and `conv1d`, each with `w`; `norm` with `scale`;
    `dt_bias`, `A_log`.

    Args:
      num_key_heads, num_value_heads, key_head_dim, value_head_dim: see
        `jax_attn_bwd.layers.gated_delta_net`.
      options: see `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
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
        **options: Unpack[delta_rule.Keywords],
    ):
        super().__init__(name=name)
        self.config, self.decode = gated_delta_net.Config.of(locals()), decode
        self._w_init = w_init or _XAVIER


class KimiDeltaAttention(_DeltaRuleLayer):
    """Kimi Delta Attention, the linear attention of Kimi Linear, from its projections to its output.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `f_b_proj`, `b_proj`, `g_a_proj`, `g_b_proj`,
    `o_proj` and `conv1d`, each with `w`; `o_norm` with `scale`; `dt_bias`, `A_log`.

    Args:
      num_heads, head_dim: see `jax_attn_bwd.layers.kimi_delta_attention`.
      options: see `jax_attn_bwd.layers.delta_rule_layers`, which also tells what a call takes.
      decode: whether calls go on from Haiku's state "conv_state" and "recurrent_state": use
        `hk.transform_with_state`, whose `init` returns empty ones.
      w_init: initializer of the projections; Xavier-uniform if None.
      name: name of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.haiku import KimiDeltaAttention
      >>> model = hk.without_apply_rng(hk.transform(lambda x: KimiDeltaAttention(2, 8)(x)))
      >>> x = jnp.ones((1, 5, 16))
      >>> model.apply(model.init(jax.random.key(0), x), x).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        decode: bool = False,
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
        **options: Unpack[delta_rule.Keywords],
    ):
        super().__init__(name=name)
        self.config, self.decode = kimi_delta_attention.Config.of(locals()), decode
        self._w_init = w_init or _XAVIER


class _Holder(hk.Module):
    """Holds parameters of a module that Haiku's layer, or the published one, has by this name."""

    def __call__(self, *spec: Any) -> jax.Array:
        return hk.get_parameter(*spec)


def _drawn(init: Any) -> Any:
    """Returns an initializer of JAX as one of Haiku."""
    return lambda *like: init(hk.next_rng_key(), *like)


def load_torch(
    params: Mapping[str, Mapping[str, Any]], module: str, state: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """`params` of a model with the values of a PyTorch module in one of its layers.

    Args:
      params: parameters of the whole model, as its `init` gives them; `jax.eval_shape` of them will do.
      module: the name of the layer in them, such as "gat_conv" or "encoder/~/gat_conv_1".
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A dict like `params`, in its dtypes, whose other layers are as they were.

    Raises:
      ValueError: no such module; and as told there.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.haiku import GATConv, load_torch
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> model = hk.without_apply_rng(hk.transform(lambda x: GATConv(3, heads=2, bias=False)(x, graph)))
      >>> x = jnp.ones((3, 5), "float32")
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> params = load_torch(model.init(jax.random.key(0), x), "gat_conv", state, "conv.")
      >>> model.apply(params, x)[0].tolist()
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    own = {path: x for path, x in params.items() if path == module or path.startswith(f"{module}/")}
    if not own:
        known = str(list(params))
        raise ValueError(checks.message("load_torch", "module", "be in params", repr(module), known))
    tree: dict[str, Any] = dict(own.get(module, {}))
    linears = {path: path.rpartition("/")[2] for path in own if path != module}
    for path, name in linears.items():
        tree[name] = {_NAMES[part]: x for part, x in own[path].items()}
    tree = loaded(tree, state, prefix)
    made = {path: {part: tree[name][_NAMES[part]] for part in own[path]} for path, name in linears.items()}
    if module in own:
        made[module] = {name: tree[name] for name in own[module]}
    return {**params, **made}
