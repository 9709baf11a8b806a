"""Layers for Equinox."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, keywords, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Save
from jax_attn_bwd.layers import deformable, gated_delta_net, kimi_delta_attention, multi_head
from jax_attn_bwd.layers import delta_rule_layers as delta_rule
from jax_attn_bwd.layers import equinox_trees as trees
from jax_attn_bwd.layers import graph as convs
from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.equinox_delta_rule import DeltaRuleLayer
from jax_attn_bwd.layers.gated_delta_net import GatedDeltaNetCache
from jax_attn_bwd.layers.kimi_delta_attention import KimiDeltaAttentionCache
from jax_attn_bwd.layers.multi_head import KeyValueCache
from jax_attn_bwd.layers.torch_weights import loaded
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "GatedDeltaNetCache",
    "KeyValueCache",
    "KimiDeltaAttention",
    "KimiDeltaAttentionCache",
    "MultiHeadAttention",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
    "replace_attention",
]

_NAME = "MultiheadAttention"
_INPUTS = ("query", "key_", "value")
_XAVIER = jax.nn.initializers.xavier_uniform()
_Layer = TypeVar("_Layer", bound=eqx.Module)
_Tree = TypeVar("_Tree")


class MultiheadAttention(keywords.ChecksNames, eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` as one rule over the whole layer, `jax_attn_bwd.multi_head_attention`.

    Every argument of Equinox's, the same leaves in the same order and the same initial values: change the
    import, and `equinox.tree_deserialise_leaves` loads a checkpoint. Without a batch axis, as Equinox's; for
    a batch use `jax.vmap`. With `process_heads`, or projections other than `equinox.nn.Linear`, it runs the
    projections around `jax_attn_bwd.dot_product_attention`.

    Differs from Equinox's in that masks must be boolean, and that a query which sees nothing gives the output
    bias, not a mean over hidden keys. Dropout draws other masks than Equinox's for the same key.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.layers.equinox import MultiheadAttention
      >>> layer = MultiheadAttention(2, 8, is_causal=True, key=jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (5, 8))
      >>> layer(x, x, x).shape
      (5, 8)
    """

    is_causal: bool = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    local_window_size: tuple[int, int] | None = eqx.field(static=True)
    logits_soft_cap: float | None = eqx.field(static=True)
    mask_mod: Callable[..., Any] | None = eqx.field(static=True)
    score_mod: Callable[..., Any] | None = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    precision: Any = eqx.field(static=True)
    deterministic_sums: bool | None = eqx.field(static=True)
    save: str = eqx.field(static=True)
    implementation: Implementation | None = eqx.field(static=True)
    forward_mode: bool = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        key: jax.Array,
        is_causal: bool = False,
        scale: float | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        rotary: Rotary | None = None,
        precision: Any = None,
        deterministic_sums: bool | None = None,
        save: Save = "inputs",
        implementation: Implementation | None = None,
        forward_mode: bool = False,
    ):
        """Makes the layer.

        Args:
          num_heads: heads of queries, keys and values.
          query_size, key_size, value_size, output_size: widths of the inputs and of the output; None =
            query_size.
          qk_size, vo_size: sizes of a head of queries and keys, of values; None = query_size // num_heads.
          use_query_bias, use_key_bias, use_value_bias, use_output_bias: whether a projection has a bias.
          dropout_p, inference: probability of dropping a weight, and whether that is left out.
          dtype: dtype of the parameters; None = JAX's default.
          key: a PRNG key for the parameters.
          is_causal, save, and what stands between them: see `jax_attn_bwd.layers.multi_head`, which also
            tells what a call takes. `rotary` stands in the place of `process_heads` with
            `equinox.nn.RotaryPositionalEmbedding`; `deterministic` is Equinox's older name for `inference`.
          precision: precision of all matrix products; None follows `jax_default_matmul_precision`.
            Projections other than `equinox.nn.Linear`, or around `process_heads`, have their own.
        """
        arguments = locals()
        num_heads = multi_head.number_of_heads(_NAME, num_heads, query_size if qk_size is None else None)
        sizes = query_size, key_size, value_size, output_size, qk_size, vo_size
        biases = use_query_bias, use_key_bias, use_value_bias, use_output_bias
        super().__init__(num_heads, *sizes, *biases, dropout_p, inference, dtype, key=key)
        for name in (*multi_head.OPTIONS, "is_causal", "save"):
            setattr(self, name, arguments[name])
        # A pair of Python ints: `filter_jit` compares it with the windows of other layers.
        self.local_window_size = masks.window(_NAME, local_window_size)
        self.precision = checks.precision(_NAME, precision)

    @keywords.known
    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        bias: jax.Array | None = None,
        is_causal: bool | None = None,
        **tokens: Unpack[multi_head.Tokens],
    ) -> jax.Array:
        """Attends like Equinox's layer, with a bias and what tells sequences apart.

        Args:
          query: `[T, query_size]`.
          key_: `[S, key_size]`.
          value: `[S, value_size]`.
          mask: `[T, S]` or `[N, T, S]`, **bool**, True = attend.
          key: a PRNG key for dropout; not needed without it.
          inference: True = no dropout; None takes the attribute, which `equinox.nn.inference_mode` sets.
          deterministic: Equinox's older name for `inference`.
          process_heads: from query, key and value heads, `[T or S, N, size]`, to others of the same shapes.
          bias: broadcasts to `[N, T, S]`, floating; added to the logits.
          is_causal: a query sees keys up to its own index; None = as the layer was made.
          tokens: see `jax_attn_bwd.layers.multi_head`, here without batch axes. Under `jax.vmap` functions
            see each entry of the batch as its number 0: map over what differs between them.

        Returns:
          `[T, output_size]`.
        """
        tokens = multi_head.complete("MultiheadAttention.__call__", multi_head.Tokens, tokens)
        checks.rank(_NAME, "query", query, "[T, query_size]", 2, remedy="for a batch use jax.vmap")
        # Whether there is dropout.
        inference = deterministic if deterministic is not None else inference
        inference = self.dropout.inference if inference is None else inference
        drops = not inference and checks.rate(_NAME, "dropout.p", self.dropout.p) > 0
        key = _dropout_key(_NAME, key) if drops else None
        mask = None if mask is None else self._mask(mask, query.shape[0], key_.shape[0])
        # One rule for the whole layer.
        options: dict[str, Any] = {**tokens, **multi_head.options_of(self, "precision")}
        options["is_causal"] = multi_head.is_causal(_NAME, self.is_causal, is_causal)
        rotary = options.pop("rotary")
        options |= dict(mask=mask, bias=bias, dropout_rate=self.dropout.p if drops else 0.0, dropout_key=key)
        linears = (self.query_proj, self.key_proj, self.value_proj, self.output_proj)
        if process_heads is None and all(type(x) is eqx.nn.Linear for x in linears):
            options |= {"save": self.save, "rotary": rotary}
            params, given = self._params(), (query, key_, value)
            multi_head.check_widths(_NAME, _INPUTS, given, params)
            return multi_head.attend(params, given, **options)
        # With other projections, or a function between, the pieces run one after the other.
        inputs = zip(linears, (query, key_, value), strict=False)
        heads = tuple(self._project(linear, x) for linear, x in inputs)
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                got = [x.shape for x in heads]
                raise ValueError(checks.message(_NAME, "process_heads", f"keep the shapes {shapes}", got))
        q, k, v = multi_head.promote(None, *heads)
        positions = tokens["query_positions"], tokens["key_value_positions"]
        q, k = multi_head.rotated(_NAME, rotary, q, k, *positions)
        out = dot_product_attention(q, k, v, **options)
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))

    def init_cache(self, length: int, dtype: Any = None) -> KeyValueCache:
        """An empty cache for `decode`.

        Args:
          length: how many tokens it has room for.
          dtype: dtype of the keys and values in it; None = that of the parameters.

        Returns:
          A pytree of zeros. For a batch: `jax.vmap(lambda _: layer.init_cache(length))(jnp.arange(batch))`.

        Raises:
          TypeError, ValueError: `length` is no positive int. TypeError: `dtype` is not floating, or a
            projection is no `equinox.nn.Linear`.
        """
        length, linears = checks.integer(_NAME, "length", length, least=1), (self.key_proj, self.value_proj)
        self._plain("init_cache")
        dtype = jnp.result_type(*(linear.weight for linear in linears)) if dtype is None else dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(checks.message(_NAME, "dtype", "be a floating dtype", dtype))
        k, v = (jnp.zeros((length, self.num_heads, size), dtype) for size in (self.qk_size, self.vo_size))
        return KeyValueCache(k, v, jnp.zeros((), jnp.int32))

    def decode(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        cache: KeyValueCache,
        mask: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        **tokens: Unpack[multi_head.CacheTokens],
    ) -> tuple[jax.Array, KeyValueCache]:
        """The next T tokens of a sequence, of which `cache` has those before: causal, without dropout.

        A prompt may be one call, and then token by token. Under `jax.vmap` each row of a batch counts its own
        tokens.

        Args:
          query, key_, value: `[T, ...]`, of the new tokens.
          cache: what `init_cache` or the call before returned, with room for L tokens.
          mask: `[T, L]` or `[N, T, L]`, **bool**, True = attend.
          bias: broadcasts to `[N, T, L]`, floating; added to the logits.
          tokens: as in the call; those of keys are of the cache, `[L]`.

        Returns:
          out: `[T, output_size]`; NaN where a traced cache has no room for T tokens more.
          cache: with these tokens.

        Raises:
          ValueError: shapes disagree, or the cache is full. TypeError: an argument is of the wrong kind, or a
            projection is no `equinox.nn.Linear`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_attn_bwd.layers.equinox import MultiheadAttention
          >>> layer = MultiheadAttention(2, 8, is_causal=True, key=jax.random.key(0))
          >>> x, cache = jax.random.normal(jax.random.key(1), (5, 8)), layer.init_cache(5)
          >>> prompt, cache = layer.decode(x[:3], x[:3], x[:3], cache)
          >>> last, cache = layer.decode(x[3:], x[3:], x[3:], cache)
          >>> bool(jnp.allclose(jnp.concatenate([prompt, last]), layer(x, x, x), atol=1e-5))
          True
        """
        tokens = multi_head.complete("MultiheadAttention.decode", multi_head.CacheTokens, tokens)
        remedy = "for a batch use jax.vmap, of the cache too"
        checks.rank(_NAME, "query", query, "[T, query_size]", 2, remedy=remedy)
        checks.instance(_NAME, "cache", cache, KeyValueCache, "begin with layer.init_cache(length)")
        if cache.key.ndim != 3:
            expected, remedy = "be that of one row, its keys [L, N, H]", "for a batch use jax.vmap"
            raise ValueError(checks.message(_NAME, "cache", expected, cache.key.shape, remedy))
        # The new tokens attend to the cache, which then holds them.
        params = self._plain("decode")
        multi_head.check_widths(_NAME, _INPUTS, (query, key_, value), params)
        mask = None if mask is None else self._mask(mask, query.shape[0], cache.key.shape[0], "L")
        given: dict[str, Any] = {**tokens, **multi_head.options_of(self, "precision")}
        return multi_head.decode(_NAME, params, cache, query, key_, value, mask=mask, bias=bias, **given)

    def _plain(self, call: str) -> MultiHeadAttentionParams:
        """Returns the parameters of plain projections."""
        linears = (self.query_proj, self.key_proj, self.value_proj, self.output_proj)
        if other := [type(x).__name__ for x in linears if type(x) is not eqx.nn.Linear]:
            expected = f"be equinox.nn.Linear for {call}"
            raise TypeError(checks.message(_NAME, "projections", expected, other[0]))
        return self._params()

    def _mask(self, mask: Any, T: int, S: int, of: str = "S") -> Any:
        """Returns `mask`, checked."""
        mask = multi_head.boolean_mask(_NAME, mask)
        if mask.shape not in ((T, S), (self.num_heads, T, S)):
            expected = f"have shape [T, {of}] = {(T, S)} or [N, T, {of}] = {(self.num_heads, T, S)}"
            remedy = f"write jnp.broadcast_to(mask, {(T, S)})" if mask.shape == (S,) else ""
            raise ValueError(checks.message(_NAME, "mask", expected, mask.shape, remedy))
        return mask

    def _params(self) -> MultiHeadAttentionParams:
        """Returns parameters by head: weights are `[out, in]` in Equinox, the rows of a head side by side."""
        params: list[Any] = []
        for linear in (self.query_proj, self.key_proj, self.value_proj):
            heads = linear.weight.reshape(self.num_heads, -1, linear.weight.shape[-1])
            bias = None if linear.bias is None else linear.bias.reshape(self.num_heads, -1)
            params += [heads.transpose(2, 0, 1), bias]
        weight, bias = self.output_proj.weight, self.output_proj.bias
        params += [weight.T.reshape(self.num_heads, -1, weight.shape[0]), bias]
        return MultiHeadAttentionParams(*params)


MultiHeadAttention = MultiheadAttention


class _Conv(keywords.ChecksNames, eqx.Module):
    kind: ClassVar[str]
    inference: bool
    config: convs.Config = eqx.field(static=True)
    linears: tuple[str, ...] = eqx.field(static=True)

    def _build(self, arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        for field in fields(self):
            # Equinox flattens what the instance holds: a default of the class it takes for missing.
            if field.default is None:
                setattr(self, field.name, None)
        config, dtype = convs.Config.of(self.kind, arguments), arguments["dtype"]
        specs = convs.linear_layers(config, config.in_channels)
        shapes = convs.array_shapes(config)
        keys = iter(jax.random.split(arguments["key"], len(specs) + len(shapes)))
        for name, (width, out, bias) in specs.items():
            made = trees.linear(width, out, bias=0.0 if bias else None, dtype=dtype, key=next(keys))
            setattr(self, name, made)
        for name, shape in shapes.items():
            init = jax.nn.initializers.zeros if name == "bias" else _XAVIER
            kind = jnp.result_type(float) if dtype is None else dtype
            setattr(self, name, init(next(keys), shape, kind))
        self.config, self.linears, self.inference = config, tuple(specs), arguments["inference"]

    # fmt: off
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: bool) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @keywords.known
    def __call__(
        self, x: convs.Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: bool = False,
    ) -> convs.Result:  # fmt: skip
        """Attends; arguments and results, but `key` and `inference`, see in `jax_attn_bwd.layers.graph`.

        Args:
          key: a PRNG key for dropout; not needed without it.
          inference: True = no dropout; None takes the attribute, which `equinox.nn.inference_mode` sets.
        """
        # Parameters by name, and a key where a call drops edges.
        linears = {name: partial(trees.by_row, getattr(self, name)) for name in self.linears}
        arrays = {name: getattr(self, name) for name in convs.array_shapes(self.config)}
        drops = self.config.dropout and not (self.inference if inference is None else inference)
        key = _dropout_key(self.config.kind, key) if drops else None
        return convs.attend(self.config, linears, arrays, x, graph, edge_attr, key, return_attention_weights)


def _dropout_key(layer: str, key: jax.Array | None) -> jax.Array:
    """Returns `key`, which a call needs that drops something."""
    if key is None:
        expected = "be given while there is dropout"
        remedy = "pass inference=True or use equinox.nn.inference_mode"
        raise ValueError(checks.message(layer, "key", expected, None, remedy))
    return key


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.equinox import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer = GATConv(5, 4, heads=2, key=jax.random.key(0))
      >>> layer(jnp.ones((3, 5)), graph).shape
      (3, 8)
    """

    lin: eqx.nn.Linear | None = None
    lin_src: eqx.nn.Linear | None = None
    lin_dst: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None
    res: eqx.nn.Linear | None = None
    att_src: jax.Array | None = None
    att_dst: jax.Array | None = None
    att_edge: jax.Array | None = None
    bias: jax.Array | None = None

    kind: ClassVar[str] = "GATConv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        inference: bool = False,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[convs.GATConvKeywords],
    ):
        """Makes the layer.

        Args:
          in_channels, out_channels, heads, concat, options: see `jax_attn_bwd.layers.graph`.
          inference: True = no dropout.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.
    """

    lin_l: eqx.nn.Linear
    att: jax.Array
    lin_r: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None
    res: eqx.nn.Linear | None = None
    bias: jax.Array | None = None

    kind: ClassVar[str] = "GATv2Conv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        inference: bool = False, dtype: Any = None, key: jax.Array,
        **options: Unpack[convs.GATv2ConvKeywords],
    ):  # fmt: skip
        """Makes the layer, of the arguments of `GATConv` and `share_weights`."""
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.
    """

    lin_key: eqx.nn.Linear
    lin_query: eqx.nn.Linear
    lin_value: eqx.nn.Linear
    lin_skip: eqx.nn.Linear | None = None
    lin_beta: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None

    kind: ClassVar[str] = "TransformerConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        inference: bool = False, dtype: Any = None, key: jax.Array,
        **options: Unpack[convs.TransformerConvKeywords],
    ):  # fmt: skip
        """Makes the layer, of the arguments of `GATConv`, but the options."""
        self._build(locals())


class MultiScaleDeformableAttention(keywords.ChecksNames, eqx.Module):
    """Deformable-DETR's attention: each query looks at a few points of each feature map.

    Takes one picture, without a batch axis, as the layers of `equinox.nn` do. For a batch:

        jax.vmap(lambda query, points, value: layer(query, points, value, spatial_shapes))(...)

    Parameters: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each an
    `equinox.nn.Linear`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention
      >>> layer = MultiScaleDeformableAttention(2, 8, num_levels=2, key=jax.random.key(0))
      >>> query, value = jnp.ones((5, 8)), jnp.ones((15, 8))
      >>> layer(query, jnp.full((5, 2), 0.5), value, ((3, 4), (1, 3))).shape
      (5, 8)
    """

    sampling_offsets: eqx.nn.Linear
    attention_weights: eqx.nn.Linear
    value_proj: eqx.nn.Linear | None
    output_proj: eqx.nn.Linear | None
    config: deformable.Config = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int = 8,
        query_size: int = 256,
        *,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[deformable.Keywords],
    ):
        """Makes the layer.

        Args:
          num_heads, query_size, options: M, C and `Keywords` of `jax_attn_bwd.layers.deformable`, which see.
          dtype: dtype of the parameters.
          key: a PRNG key for `value_proj` and `output_proj`.
        """
        self.config = config = deformable.configure(
            "query_size", query_size, num_heads, options, unbatched=True
        )
        keys = jax.random.split(key)
        xavier = partial(trees.linear, query_size, dtype=dtype)
        zeros = partial(xavier, init=jax.nn.initializers.zeros, key=key)
        self.sampling_offsets = zeros(2 * config.samples, bias=deformable.offsets_bias(config))
        self.attention_weights = zeros(config.samples)
        own = config.projections
        self.value_proj, self.output_proj = (xavier(query_size, key=k) if own else None for k in keys)

    __call__ = deformable.Calls.__call__
    sampling_locations = deformable.Calls.sampling_locations

    def _linears(self) -> deformable.Linears:
        precise = (trees.widened(self.sampling_offsets), trees.widened(self.attention_weights))
        linears = (*precise, self.value_proj, self.output_proj)
        return deformable.Linears(*(deformable.as_it_is if x is None else jax.vmap(x) for x in linears))


class GatedDeltaNet(DeltaRuleLayer[GatedDeltaNetCache]):
    """Gated DeltaNet, the linear attention of Qwen3-Next, from its projections to its output.

    Takes one sequence, without a batch axis, as the layers of `equinox.nn` do; for a batch use `jax.vmap`.

    Parameters: `in_proj_qkvz`, `in_proj_ba`, `out_proj`, each an `equinox.nn.Linear`; the weights of
    `conv1d`, an `equinox.nn.Conv1d`, and of `norm`, an `equinox.nn.RMSNorm`; `dt_bias`, `A_log`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.equinox import GatedDeltaNet
      >>> layer = GatedDeltaNet(16, 2, 4, 8, 8, key=jax.random.key(0))
      >>> layer(jnp.ones((5, 16))).shape
      (5, 16)
    """

    in_proj_qkvz: eqx.nn.Linear
    in_proj_ba: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    norm: eqx.nn.RMSNorm
    dt_bias: jax.Array
    A_log: jax.Array

    def __init__(
        self,
        in_features: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[delta_rule.Keywords],
    ):
        """Makes the layer.

        Args:
          num_key_heads, num_value_heads, key_head_dim, value_head_dim: see
            `jax_attn_bwd.layers.gated_delta_net`.
          in_features, options: see `jax_attn_bwd.layers.delta_rule_layers`.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        self._build(gated_delta_net.Config, locals())


class KimiDeltaAttention(DeltaRuleLayer[KimiDeltaAttentionCache]):
    """Kimi Delta Attention, the linear attention of Kimi Linear, from its projections to its output.

    Takes one sequence, without a batch axis, as the layers of `equinox.nn` do; for a batch use `jax.vmap`.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `f_b_proj`, `b_proj`, `g_a_proj`, `g_b_proj` and
    `o_proj`, each an `equinox.nn.Linear`; the weights of `conv1d`, an `equinox.nn.Conv1d`, and of `o_norm`,
    an `equinox.nn.RMSNorm`; `dt_bias`, `A_log`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.layers.equinox import KimiDeltaAttention
      >>> layer = KimiDeltaAttention(16, 2, 8, key=jax.random.key(0))
      >>> layer(jnp.ones((5, 16))).shape
      (5, 16)
    """

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    f_a_proj: eqx.nn.Linear
    f_b_proj: eqx.nn.Linear
    g_a_proj: eqx.nn.Linear
    g_b_proj: eqx.nn.Linear
    b_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    conv1d: eqx.nn.Conv1d
    o_norm: eqx.nn.RMSNorm
    dt_bias: jax.Array
    A_log: jax.Array

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[delta_rule.Keywords],
    ):
        """Makes the layer.

        Args:
          num_heads, head_dim: see `jax_attn_bwd.layers.kimi_delta_attention`.
          in_features, options: see `jax_attn_bwd.layers.delta_rule_layers`.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        self._build(kimi_delta_attention.Config, locals())


def load_torch(layer: _Layer, state: Mapping[str, Any], prefix: str = "") -> _Layer:
    """`layer` with the values of a PyTorch module.

    Args:
      layer: built with the options of the PyTorch module.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A layer like `layer`, in its dtypes. For a layer inside a model `equinox.tree_at` puts it there.

    Example:
      >>> import jax, numpy as np
      >>> from jax_attn_bwd.layers.equinox import GATConv, load_torch
      >>> layer = GATConv(5, 3, heads=2, bias=False, key=jax.random.key(0))
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> float(load_torch(layer, state, "conv.").lin.weight[0, 0])
      1.0
    """
    return trees.with_weights(layer, lambda tree: loaded(tree, state, prefix))


def replace_attention(model: _Tree) -> _Tree:
    """Returns `model` with each `equinox.nn.MultiheadAttention` as ours, its weights kept.

    Found are those in modules, lists, dicts, and stacks that `equinox.filter_vmap` made for a scan.

    Args:
      model: a module, or another pytree of modules.

    Raises:
      TypeError: a layer, named by its path, is of a class of its own, which may attend otherwise.
      ValueError: the model has no such layer.

    Example:
      >>> import equinox as eqx, jax
      >>> from jax_attn_bwd.layers.equinox import MultiheadAttention, replace_attention
      >>> model = {"layers": [eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))]}
      >>> isinstance(replace_attention(model)["layers"][0], MultiheadAttention)
      True
    """
    own = {**multi_head.OPTIONS, "is_causal": False, "save": "inputs", "precision": None}
    return trees.replaced(model, MultiheadAttention, own)
