"""`GatedDeltaNet` in every framework: its arguments, its parameters, its call, and its cache.

    q, k, v, z = in_proj_qkvz(x),   b, a = in_proj_ba(x)
    q, k, v = silu(conv1d(q, k, v))                         the token itself and those right before it
    o = gated_delta_rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(b)), q and k of length 1
    out = out_proj(norm(o) silu(z))                         norm: over each head, times a learned scale

The layer of Qwen3-Next, where it stands in the place of three attention layers of four. Its parameters have
the published names, and the published order of heads inside: of each key head first its query, its key, then
the values of its value heads, then their z; likewise their b, then their a; the channels of the convolution
are all queries, all keys, all values.

    framework         <projection>                <conv1d>                  <norm>          A_log, dt_bias
    PyTorch           name.weight  [out, in]      .weight  [C, 1, taps]     .weight  [Hv]   [N]
    linen and NNX     name.kernel  [in, out]      .kernel  [taps, 1, C]     .scale   [Hv]   [N]
    Haiku             name/w       [in, out]      /w       [taps, 1, C]     /scale   [Hv]   [N]
    Equinox           name.weight  [out, in]      .weight  [C, 1, taps]     .weight  [Hv]   [N]

with <projection> one of in_proj_qkvz, in_proj_ba and out_proj, none of which has a bias. Qwen3.5 has the same
layer with four projections: `fuse_projections` makes two of them, for `load_torch`.

Constructors take, beside what their framework's layers take, by the names of Qwen3-Next's configuration
without `linear_`:
  * `in_features` (NNX and Equinox): E, the width of tokens and of the output;
  * `num_key_heads`, `num_value_heads`: K and N, a multiple of K: value head n reads key head n // (N / K);
  * `key_head_dim`, `value_head_dim`: H and Hv, the sizes of a head;
  * `conv_kernel_dim` (4): taps, how many tokens the convolution sees;
  * `rms_norm_eps` (1e-6): what is added to the mean of squares;
  * `precision` (None): how matrix products of the rule are taken, and in Flax those of the projections;
  * `implementation` (None), `forward_mode` (False): options of `jax_attn_bwd.gated_delta_rule`.

Calls take, beside the tokens x `[..., T, E]`:
  * `seq_lengths`: ints that broadcast to `[...]`, in [0, T]: tokens at or beyond are not read (out is 0
    there), and the cache is that after the last token before;
  * `segment_ids`: ints that broadcast to `[..., T]`: where the id differs from that of the token before, a
    document begins, as if it were alone: neither the state nor the convolution reaches into it. A cache
    belongs to the first document of a call, and after it to the last.

They return `[..., T, E]`. Shapes that disagree, and sizes out of range, are a ValueError, arguments of the
wrong kind a TypeError.

Decoding goes on from a cache of two states, which do not grow: the last tokens that the convolution still
sees, and the matrix of each head. A call then takes the next T tokens, a prompt, a piece of one, or one
token; `seq_lengths` tells how many of them are those of each row, so that rows of different length may be
filled together and decoded on.

  * linen: `decode=True`; the states are the variables "conv_state" and "recurrent_state" of "cache", which
    `init` makes of a batch of any length;
  * NNX: `decode=True`, at construction or in the call, after `init_cache(input_shape, dtype)`;
  * Haiku: `decode=True`; they are Haiku's state: use `hk.transform_with_state`;
  * Equinox: `cache = layer.init_cache()`, then `out, cache = layer.decode(x, cache)`.

Layers start as those of the authors: projections Xavier-uniform, the convolution uniform in
+-1 / sqrt(taps), the norm's scale 1, `A_log` the logarithm of a uniform number of [0.01, 16], and `dt_bias`
so that softplus of it is log-uniform in [0.001, 0.1] (in `transformers` it is 1, which forgets most within a
few tokens). The convolution, the gates and the norm are computed in float32 or wider.

Shapes: ... batch, T tokens, E width, K key heads, N value heads, G = N / K, H and Hv their sizes,
W = 2 H + G Hv, C = K W.

References:
  Yang et al., Gated delta networks, arXiv:2412.06464, 2024. Qwen3-Next, `transformers` 5, 2025.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype, saturated, to_rank
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.layers.torch_weights import as_array
from jax_attn_bwd.ops.linear_attention import gated_delta_rule

_NAME = "GatedDeltaNet"
_UNIT_EPSILON = 1e-6  # added to the squared length of queries and keys


class Keywords(TypedDict, total=False):
    """Lists what a layer may be given by name, in every framework."""

    conv_kernel_dim: int
    rms_norm_eps: float
    precision: Any
    implementation: Implementation | None
    forward_mode: bool


@dataclass(frozen=True)
class Config:
    """Holds what a layer is built from."""

    num_key_heads: int  # K
    num_value_heads: int  # N
    key_head_dim: int  # H
    value_head_dim: int  # Hv
    conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    precision: Any = None
    implementation: Implementation | None = None
    forward_mode: bool = False
    in_features: int | None = None  # None where it is read off the input
    unbatched: bool = False  # whether calls take one sequence, as in Equinox

    def __post_init__(self) -> None:
        """Checks everything that the operator does not."""
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        for name in sizes + (() if self.in_features is None else ("in_features",)):
            checks.integer(_NAME, name, getattr(self, name), least=1)
        if self.num_value_heads % self.num_key_heads:
            expected = f"be a multiple of num_key_heads = {self.num_key_heads}"
            raise ValueError(checks.message(_NAME, "num_value_heads", expected, self.num_value_heads))
        if checks.python_float(_NAME, "rms_norm_eps", self.rms_norm_eps) <= 0:
            raise ValueError(checks.message(_NAME, "rms_norm_eps", "be positive", self.rms_norm_eps))
        checks.precision(_NAME, self.precision)
        checks.flag(_NAME, "forward_mode", self.forward_mode)

    @property
    def values(self) -> int:
        """Returns the width of the values, and of z: N * Hv."""
        return self.num_value_heads * self.value_head_dim

    @property
    def row(self) -> int:
        """Returns how many channels of the convolution belong to a key head: W."""
        return 2 * self.key_head_dim + self.values // self.num_key_heads

    @property
    def channels(self) -> int:
        """Returns how many channels the convolution has: C = K * W."""
        return self.num_key_heads * self.row

    @property
    def projections(self) -> dict[str, int]:
        """Returns the width that each projection of the tokens has."""
        return {"in_proj_qkvz": self.channels + self.values, "in_proj_ba": 2 * self.num_value_heads}

    @property
    def kernel_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the kernel of the convolution, `[taps, 1, C]`."""
        return self.conv_kernel_dim, 1, self.channels

    def empty(self, batch: tuple[int, ...], dtype: Any) -> "GatedDeltaNetCache":
        """Returns the cache before the first token, of a layer that computes in `dtype`."""
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(checks.message(_NAME, "dtype", "be a floating dtype", dtype))
        conv, recurrent = _cache_shapes(self, batch)
        return GatedDeltaNetCache(jnp.zeros(conv, dtype), jnp.zeros(recurrent, accumulator_dtype(dtype)))


class GatedDeltaNetCache(NamedTuple):
    """What a layer keeps of the tokens so far.

    Attributes:
      conv_state: `[..., taps - 1, K, W]`, of the last tokens what the convolution reads, by key head.
      recurrent_state: `[..., N, H, Hv]`, float32 (float64 beside float64), the matrix of each value head.
    """

    conv_state: jax.Array
    recurrent_state: jax.Array


class Parts(NamedTuple):
    """Holds the projections, functions over the last axis, and the arrays."""

    in_proj_qkvz: Callable[[jax.Array], jax.Array]  # [..., E] -> [..., C + N * Hv]
    in_proj_ba: Callable[[jax.Array], jax.Array]  # [..., E] -> [..., 2 * N]
    out_proj: Callable[[jax.Array], jax.Array]  # [..., N * Hv] -> [..., E]
    conv1d: jax.Array  # [taps, 1, C]
    norm: jax.Array  # [Hv]
    dt_bias: jax.Array  # [N]
    A_log: jax.Array  # [N]


conv_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def dt_bias_init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Draws what softplus makes log-uniform in [0.001, 0.1]."""
    wide = accumulator_dtype(jnp.dtype(dtype))
    step = jnp.exp(jax.random.uniform(key, shape, wide, jnp.log(0.001), jnp.log(0.1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def A_log_init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Draws the logarithm of what is uniform in [0.01, 16]."""
    return jnp.log(jax.random.uniform(key, shape, accumulator_dtype(jnp.dtype(dtype)), 0.01, 16)).astype(
        dtype
    )


def fuse_projections(state: Mapping[str, Any], num_key_heads: int, prefix: str = "") -> dict[str, Any]:
    """Returns the state dict of a layer of Qwen3.5 as one of Qwen3-Next, for `load_torch`.

    Args:
      state: a state dict of NumPy arrays or CPU tensors, with `<prefix>in_proj_qkv.weight`, and those of
        in_proj_z, in_proj_b and in_proj_a.
      num_key_heads: K.
      prefix: what stands before these names, with the dot.

    Returns:
      `state` with `<prefix>in_proj_qkvz.weight` and `<prefix>in_proj_ba.weight` in the place of the four.

    Raises:
      ValueError: one of the four is missing.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd.layers.gated_delta_net import fuse_projections
      >>> rows = {"qkv": 12, "z": 4, "b": 2, "a": 2}
      >>> state = {f"in_proj_{name}.weight": np.ones((n, 3)) for name, n in rows.items()}
      >>> {name: x.shape for name, x in fuse_projections(state, 2).items()}
      {'in_proj_qkvz.weight': (16, 3), 'in_proj_ba.weight': (4, 3)}
    """
    names = {part: f"{prefix}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
    if missing := [name for name in names.values() if name not in state]:
        expected, remedy = f"hold {missing}", "that of Qwen3-Next is fused as it is"
        raise ValueError(checks.message("fuse_projections", "state", expected, list(state)[:8], remedy))
    qkv, z, b, a = (as_array(state[name]) for name in names.values())
    keys = (qkv.shape[0] - z.shape[0]) // 2
    q, k, v = jnp.split(qkv, (keys, 2 * keys))
    fused = {"qkvz": (q, k, v, z), "ba": (b, a)}
    found = {name: x for name, x in state.items() if name not in names.values()}
    for name, parts in fused.items():
        by_head = [x.reshape(num_key_heads, -1, x.shape[-1]) for x in parts]
        found[f"{prefix}in_proj_{name}.weight"] = jnp.concatenate(by_head, 1).reshape(-1, qkv.shape[-1])
    return found


def configure(
    num_key_heads: Any,
    num_value_heads: Any,
    key_head_dim: Any,
    value_head_dim: Any,
    keywords: Mapping[str, Any],
    **own: Any,
) -> Config:
    """Returns the configuration of a layer from the sizes of its heads, its keywords and `own`, checked."""
    given = checks.complete(f"{_NAME}.__init__", Config, Keywords, keywords) | own
    return Config(num_key_heads, num_value_heads, key_head_dim, value_head_dim, **given)


def apply(
    config: Config, parts: Parts, x: Any, cache: GatedDeltaNetCache | None, seq_lengths: Any, segment_ids: Any
) -> tuple[jax.Array, Any]:
    """Returns (the output `[..., T, E]` of a layer, the cache with its tokens, None where none is given)."""
    x = tokens(config, x)
    *batch, T, _ = x.shape
    lengths, document = _lengths(seq_lengths, x), _documents(segment_ids, x)
    _check_cache(config, cache, batch)
    if lengths is not None:
        number = to_rank(jnp.arange(T, dtype=jnp.int32), lengths.ndim + 1)
        x = jnp.where((number < lengths[..., None])[..., None], x, 0)
    # Each key head has its query and key, and the values, z, b and a of its value heads.
    K, G, H = config.num_key_heads, config.num_value_heads // config.num_key_heads, config.key_head_dim
    qkvz = parts.in_proj_qkvz(x)
    qkvz = qkvz.reshape(*batch, T, K, qkvz.shape[-1] // K)
    rows, z = qkvz[..., : config.row], qkvz[..., config.row :]
    ba = parts.in_proj_ba(x).reshape(*batch, T, K, 2 * G)
    b, a = (part.reshape(*batch, T, K * G) for part in (ba[..., :G], ba[..., G:]))
    # The convolution reads what stands before the first token, too.
    reach = config.conv_kernel_dim - 1
    in_front = [(0, 0)] * len(batch) + [(reach, 0)]
    if cache is None:
        rows = jnp.pad(rows, [*in_front, (0, 0), (0, 0)])
    else:
        axes = (*range(len(batch)), None, rows.ndim - 2, rows.ndim - 1)
        rows = jnp.concatenate([reshard_like(cache.conv_state.astype(rows.dtype), rows, axes), rows], -3)
    if document is not None:
        document = jnp.pad(document, in_front)
    mixed = _convolved(rows, _by_key_head(config, parts.conv1d), document)
    q, k, v = mixed[..., :H], mixed[..., H : 2 * H], mixed[..., 2 * H :]
    # One axis after the other, which JAX 0.10 asks for on an Explicit mesh.
    v, z = (part.reshape(*batch, T, K, G, config.value_head_dim) for part in (v, z))
    v, z = (part.reshape(*batch, T, K * G, config.value_head_dim) for part in (v, z))
    # The rule, from the state of the cache on.
    wide = accumulator_dtype(rows.dtype)
    step = jax.nn.softplus(a.astype(wide) + to_rank(parts.dt_bias.astype(wide), a.ndim))
    decay, beta = -jnp.exp(to_rank(parts.A_log.astype(wide), a.ndim)) * step, jax.nn.sigmoid(b.astype(wide))
    before = None if cache is None else cache.recurrent_state.astype(wide)
    own = document if document is None else document[..., reach:]
    options: Any = {name: getattr(config, name) for name in ("precision", "implementation", "forward_mode")}
    options |= dict(l2_norm_epsilon=_UNIT_EPSILON, initial_state=before, seq_lengths=lengths, segment_ids=own)
    out, state = gated_delta_rule(q, k, v, decay, beta, return_final_state=True, **options)
    out = _gated_norm(out, z, parts.norm, config.rms_norm_eps)
    out = parts.out_proj(out.reshape(*batch, T, config.values))
    if cache is None:
        return out, None
    last = _last_rows(rows, document, lengths, reach)
    return out, GatedDeltaNetCache(
        last.astype(cache.conv_state.dtype), state.astype(cache.recurrent_state.dtype)
    )


def tokens(config: Config, x: Any) -> jax.Array:
    """Returns `x [..., T, E]`, checked."""
    x = checks.floating(_NAME, "x", x)
    width = "E" if config.in_features is None else f"{config.in_features}"
    if x.ndim < 2 or config.in_features not in (None, x.shape[-1]):
        raise ValueError(checks.message(_NAME, "x", f"have shape [..., T, {width}]", x.shape))
    if config.unbatched and x.ndim != 2:
        expected, remedy = f"have shape [T, {width}]", "for a batch use jax.vmap"
        raise ValueError(checks.message(_NAME, "x", expected, x.shape, remedy))
    return x


def _lengths(seq_lengths: Any, x: jax.Array) -> jax.Array | None:
    """Returns the lengths as int32 `[...]`, checked."""
    if seq_lengths is None:
        return None
    *batch, T, _ = x.shape
    limits = {"least": 0} | ({"greatest": T} if isinstance(T, int) else {})
    lengths = checks.integers(_NAME, "seq_lengths", seq_lengths, **limits)
    checks.broadcasts(_NAME, "seq_lengths", lengths, "[...]", tuple(batch))
    return reshard_like(jnp.broadcast_to(saturated(lengths), batch), x, tuple(range(len(batch))))


def _documents(segment_ids: Any, x: jax.Array) -> jax.Array | None:
    """Returns of which document of its row each token is, from 0 on, int32 `[..., T]`."""
    if segment_ids is None:
        return None
    ids = checks.integers(_NAME, "segment_ids", segment_ids)
    checks.broadcasts(_NAME, "segment_ids", ids, "[..., T]", x.shape[:-1])
    ids = reshard_like(jnp.broadcast_to(ids, x.shape[:-1]), x, tuple(range(x.ndim - 1)))
    before = jnp.concatenate([ids[..., :1], ids[..., :-1]], -1)
    return jnp.cumsum(ids != before, -1, dtype=jnp.int32)


def _cache_shapes(config: Config, batch: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the two states."""
    conv = (config.conv_kernel_dim - 1, config.num_key_heads, config.row)
    recurrent = (config.num_value_heads, config.key_head_dim, config.value_head_dim)
    return (*batch, *conv), (*batch, *recurrent)


def _check_cache(config: Config, cache: Any, batch: list) -> None:
    """Raises for what is no cache of this layer and these rows."""
    if cache is None:
        return
    checks.instance(_NAME, "cache", cache, GatedDeltaNetCache, "begin with layer.init_cache()")
    for name, held, shape in zip(cache._fields, cache, _cache_shapes(config, batch), strict=True):
        checks.shape(_NAME, f"cache.{name}", held, "that of the rows of x", shape)


def _by_key_head(config: Config, kernel: jax.Array) -> jax.Array:
    """Turns the kernel `[taps, 1, C]` into `[taps, K, W]`: it is moved, not the tokens."""
    taps, K, H = config.conv_kernel_dim, config.num_key_heads, config.key_head_dim
    parts = jnp.split(kernel, (K * H, 2 * K * H), axis=-1)
    return jnp.concatenate([part.reshape(taps, K, part.shape[-1] // K) for part in parts], -1)


@jax.checkpoint
def _convolved(rows: jax.Array, kernel: jax.Array, document: jax.Array | None) -> jax.Array:
    """Returns `[..., T, K, W]` of `rows [..., taps - 1 + T, K, W]`: SiLU of the sum over the taps.

    Shifts and sums: XLA:CPU runs a convolution of as many groups as channels 10 to 30 times slower. The
    backward computes it again, as the norm: nothing wide is kept, in no more time.
    """
    taps, T = kernel.shape[0], rows.shape[-3] - kernel.shape[0] + 1
    wide, kernel = accumulator_dtype(rows.dtype), to_rank(kernel, rows.ndim)
    total: Any = 0
    for tap in range(taps):
        shifted = lax.slice_in_dim(rows, tap, tap + T, axis=rows.ndim - 3)
        if document is not None:  # of the document of the token itself
            own = document[..., tap : tap + T] == document[..., taps - 1 :]
            shifted = jnp.where(own[..., None, None], shifted, 0)
        total += kernel[..., tap, None, :, :].astype(wide) * shifted.astype(wide)
    return jax.nn.silu(total).astype(rows.dtype)


@partial(jax.checkpoint, static_argnums=3)
def _gated_norm(out: jax.Array, z: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Returns `out [..., T, N, Hv]` at root mean square 1 over each head, times `scale` and SiLU of z."""
    wide = accumulator_dtype(out.dtype)
    y = out.astype(wide)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon) * to_rank(scale.astype(wide), y.ndim)
    return (y * jax.nn.silu(z.astype(wide))).astype(out.dtype)


def _last_rows(
    rows: jax.Array, document: jax.Array | None, lengths: jax.Array | None, reach: int
) -> jax.Array:
    """Returns the `reach` rows up to the last token, `[..., taps - 1, K, W]`; 0 of other documents."""
    last = _up_to_the_end(rows, rows.ndim - 3, lengths, reach)
    if document is None:
        return last
    of = _up_to_the_end(document, document.ndim - 1, lengths, reach)
    return jnp.where((of == of[..., -1:])[..., None, None], last, 0)


def _up_to_the_end(x: jax.Array, axis: int, lengths: jax.Array | None, reach: int) -> jax.Array:
    """Returns the `reach` entries along an axis that begins as many before the first token."""
    size = x.shape[axis]
    if lengths is None or reach == 0:
        return lax.slice_in_dim(x, size - reach, size, axis=axis)
    # Sums of one entry each: no scatter in the gradient, and any sharding of the rows.
    number = to_rank(jnp.arange(size, dtype=jnp.int32), axis + 1)
    rest = (1,) * (x.ndim - axis - 1)
    is_here = [(number == lengths[..., None] + i).reshape(*x.shape[: axis + 1], *rest) for i in range(reach)]
    return jnp.stack([jnp.where(here, x, 0).sum(axis, dtype=x.dtype) for here in is_here], axis)
