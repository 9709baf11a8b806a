"""Multi-head attention as an Equinox module."""

from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation, Save
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.multi_head import KeyValueCache
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

_NAME = "MultiheadAttention"
_INPUTS = ("query", "key_", "value")


class MultiheadAttention(eqx.nn.MultiheadAttention):
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
    local_window_size: tuple[int, int] | None = eqx.field(static=True)
    logits_soft_cap: float | None = eqx.field(static=True)
    mask_mod: Callable[..., Any] | None = eqx.field(static=True)
    score_mod: Callable[..., Any] | None = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    precision: Any = eqx.field(static=True)
    deterministic_sums: bool = eqx.field(static=True)
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
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        rotary: Rotary | None = None,
        precision: Any = None,
        deterministic_sums: bool = True,
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
        num_heads = checks.integer(_NAME, "num_heads", num_heads, least=1)
        sizes = query_size, key_size, value_size, output_size, qk_size, vo_size
        biases = use_query_bias, use_key_bias, use_value_bias, use_output_bias
        super().__init__(num_heads, *sizes, *biases, dropout_p, inference, dtype, key=key)
        for name in (*multi_head.OPTIONS, "is_causal", "save"):
            setattr(self, name, arguments[name])
        # A pair of Python ints: `filter_jit` compares it with the windows of other layers.
        self.local_window_size = masks.window(_NAME, local_window_size)
        self.precision = checks.precision(_NAME, precision)

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
        if drops and key is None:
            expected = "be given while there is dropout"
            remedy = "pass inference=True or use equinox.nn.inference_mode"
            raise ValueError(checks.message(_NAME, "key", expected, None, remedy))
        mask = None if mask is None else self._mask(mask, query.shape[0], key_.shape[0])
        # One rule for the whole layer.
        options: dict[str, Any] = {**tokens, **multi_head.options_of(self, "is_causal", "precision")}
        rotary = options.pop("rotary")
        key = key if drops else None
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
            raise TypeError(
                checks.message(_NAME, "projections", f"be equinox.nn.Linear for {call}", other[0])
            )
        return self._params()

    def _mask(self, mask: Any, T: int, S: int, of: str = "S") -> Any:
        """Returns `mask`, checked."""
        mask = multi_head.boolean_mask(_NAME, mask)
        if mask.shape not in ((T, S), (self.num_heads, T, S)):
            expected = f"have shape [T, {of}] = {(T, S)} or [N, T, {of}] = {(self.num_heads, T, S)}"
            raise ValueError(checks.message(_NAME, "mask", expected, mask.shape))
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
