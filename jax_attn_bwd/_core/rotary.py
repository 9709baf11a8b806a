"""Rotary position embedding: pairs of features of a head, turned by angles that grow with the position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank

_LARGEST_SIZE = 1024  # of a head


@dataclass(frozen=True)
class Rotary:
    """What turns queries and keys by their positions, so that a logit depends on the distance alone.

        (a, b) of pair j at position p  becomes  (a cos t - b sin t, a sin t + b cos t),   t = p * frequency_j
        frequency_j = base^(-2 j / size)

    Positions are `query_positions` and `key_value_positions`, or where these are None the indices. Angles
    are computed in float32 (float64 for float64): beyond a position of 1e5 they lose digits.

    Args:
      base: of the frequencies; a Python float above 1 (10,000; 500,000 in Llama 3).
      size: how many of a head's features are turned, the first ones; None = all. Even.
      interleaved: pairs are neighbours, features 2 j and 2 j + 1 (the paper, GPT-J, Llama's own weights).
        False: feature j and j + size / 2 (GPT-NeoX, Hugging Face's Llama, `equinox.nn`'s, `flax.nnx.RoPE`).
      frequencies: [size / 2] Python floats or a NumPy array, radians a position, in place of those of
        `base`: scaled ones (linear, NTK, YaRN, Llama 3.1). A constant: it has no gradient.

    Example:
      >>> import jax
      >>> from jax_attn_bwd import MultiHeadAttentionParams, Rotary, multi_head_attention
      >>> x, w_q, w_k, w_v = jax.random.normal(jax.random.key(0), (4, 16, 16))
      >>> q, k, v = (w.reshape(16, 2, 8) for w in (w_q, w_k, w_v))
      >>> params = MultiHeadAttentionParams(query_kernel=q, key_kernel=k, value_kernel=v)
      >>> multi_head_attention(params, x, is_causal=True, rotary=Rotary(base=500_000.0)).shape
      (16, 16)

    References:
      Su et al., RoFormer, 2021, arXiv:2104.09864, section 3.2.2.
    """

    base: float = 10_000.0
    size: int | None = None
    interleaved: bool = False
    frequencies: Sequence[float] | np.ndarray | None = None

    def __post_init__(self) -> None:
        """Checks the fields; frequencies become a tuple."""
        # numbers and flags
        name = "Rotary"
        base = checks.python_float(name, "base", self.base)
        if base <= 1:
            raise ValueError(checks.message(name, "base", "be above 1", base))
        checks.flag(name, "interleaved", self.interleaved)
        if self.size is not None and checks.integer(name, "size", self.size, least=1) % 2:
            raise ValueError(checks.message(name, "size", "be even: features are turned in pairs", self.size))
        # frequencies: static, and hashable from here on
        if self.frequencies is not None:
            if isinstance(self.frequencies, jax.Array):
                expected, got = "be Python floats", "a JAX array"
                remedy = "they are static: pass NumPy's, numpy.asarray(frequencies)"
                raise TypeError(checks.message(name, "frequencies", expected, got, remedy))
            given = np.asarray(self.frequencies, np.float64)
            if given.ndim != 1 or not np.isfinite(given).all():
                raise ValueError(checks.message(name, "frequencies", "be finite, [size / 2]", given.shape))
            object.__setattr__(self, "frequencies", tuple(given.tolist()))

    def of_heads(self, operator: str, H: int) -> np.ndarray:
        """The frequencies of heads of size H, float64 `[size / 2]`; raises where they do not fit."""
        size = H if self.size is None else self.size
        if size % 2 or size > H:
            expected = f"be even and at most the head size {H}"
            raise ValueError(checks.message(operator, "rotary.size", expected, size, "set Rotary(size=...)"))
        if self.frequencies is None:
            return self.base ** (-2 * np.arange(size // 2) / max(size, 1))
        if len(self.frequencies) != size // 2:
            expected = f"have length size / 2 = {size // 2}"
            got = len(self.frequencies)
            raise ValueError(checks.message(operator, "rotary.frequencies", expected, got))
        return np.asarray(self.frequencies)


def _guarded(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor, which takes no size of a head for a base: elsewhere the size comes first."""

    @wraps(init)
    def guarded(self: Rotary, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], int) and args[0] <= _LARGEST_SIZE:
            expected, got = "have its name where it could be a size", f"Rotary({args[0]})"
            remedy = (
                f"all features of a head are turned by Rotary(), {args[0]} of them by Rotary(size={args[0]})"
            )
            raise ValueError(checks.message("Rotary", "base", expected, got, remedy))
        init(self, *args, **kwargs)

    return guarded


Rotary.__init__ = keywords.known(_guarded(Rotary.__init__))  # type: ignore[method-assign]


def checked(operator: str, rotary: Any, H: int) -> Rotary | None:
    """Returns `rotary`, which fits heads of size H, or None."""
    if rotary is None:
        return None
    checks.instance(operator, "rotary", rotary, Rotary, "write rotary=Rotary(base=10_000.0)")
    rotary.of_heads(operator, H)
    return rotary


def rotate(rotary: Rotary, x: jax.Array, positions: jax.Array | None, back: bool = False) -> jax.Array:
    """Turns `x [..., L, heads, H]` by `positions [..., L]`, in float32 or wider; `back` by minus those."""
    # the angle of each pair at each position
    x = x.astype(accumulator_dtype(x.dtype))
    frequencies = jnp.asarray(rotary.of_heads("rotary", x.shape[-1]), x.dtype)
    index = jnp.arange(x.shape[-3], dtype=jnp.int32) if positions is None else positions
    angles = to_rank(index, x.ndim - 2)[..., None].astype(x.dtype) * to_rank(frequencies, x.ndim - 1)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]  # [..., L, 1, size / 2]
    sin = -sin if back else sin
    # pairs that are neighbours, or half the turned features apart; the rest stays
    half = frequencies.size
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rotary.interleaved:
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(turned.shape)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned
