"""`KimiDeltaAttention` in every framework: what it computes, its parameters and its arguments.

    q, k, v = q_proj(x), k_proj(x), v_proj(x)
    q, k, v = silu(conv1d(q, k, v))                         the token itself and those right before it
    g = -exp(A_log) softplus(f_b_proj(f_a_proj(x)) + dt_bias)   of each head and channel
    o = gated_delta_rule(q, k, v, g, sigmoid(b_proj(x))), q and k of length 1
    out = o_proj(o_norm(o) sigmoid(g_b_proj(g_a_proj(x))))  o_norm: over each head, times a learned scale

The layer of Kimi Linear (KDA), where it stands in the place of three attention layers of four. It differs
from `GatedDeltaNet` in the decay, one of each channel of the keys, in its gate, and in that keys have as many
heads as values. Its parameters have the names of the published checkpoint, but for the convolution, which is
one as in `transformers`; its channels are all queries, all keys, all values.

    framework         <projection>                <conv1d>                  <o_norm>        A_log
    checkpoint        name.weight  [out, in]      three, of q, k and v      .weight  [H]    [1, 1, N, 1]
    transformers      name.weight  [out, in]      .weight  [C, 1, taps]     .weight  [H]    [1, 1, N, 1]
    linen and NNX     name.kernel  [in, out]      .kernel  [taps, 1, C]     .scale   [H]    [N]
    Haiku             name/w       [in, out]      /w       [taps, 1, C]     /scale   [H]    [N]
    Equinox           name.weight  [out, in]      .weight  [C, 1, taps]     .weight  [H]    [N]

with <projection> one of q_proj, k_proj, v_proj, f_a_proj, f_b_proj, b_proj, g_a_proj, g_b_proj and o_proj,
none of which has a bias; dt_bias is `[N H]` everywhere. `load_torch` takes the state dict of a layer from
either: the checkpoint has q_conv1d, k_conv1d and v_conv1d, and `transformers` has f_a_proj, f_b_proj, A_log
and dt_bias in a module `forget_gate`.

Constructors take, by the names of Kimi Linear's configuration without `linear_`:
  * `num_heads`: N, of queries, keys and values alike;
  * `head_dim`: H, the size of a head, and the width between f_a_proj and f_b_proj, g_a_proj and g_b_proj.

All else, what calls take and how to decode from a cache, is told in `jax_attn_bwd.layers.delta_rule_layers`.

Layers start with `A_log` the logarithm of a uniform number of [1, 16] and `dt_bias` as told there, both as
those of the authors; the authors draw projections from a normal distribution.

Shapes: E width, N heads of size H, C = 3 N H.

References:
  Kimi Team, Kimi Linear, arXiv:2510.26692, 2025; `transformers` 5, 2026.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers import delta_rule_layers as shared


class KimiDeltaAttentionCache(shared.DeltaRuleCache):
    """What a `KimiDeltaAttention` keeps of the tokens so far.

    Attributes:
      conv_state: `[..., taps - 1, N, 3 H]`, of the last tokens what the convolution reads, by head.
      recurrent_state: `[..., N, H, H]`, float32 (float64 beside float64), the matrix of each head.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Config(shared.Config):
    """Holds what a `KimiDeltaAttention` is built from."""

    rms_norm_eps: float = 1e-5

    layer: ClassVar[str] = "KimiDeltaAttention"
    norm: ClassVar[str] = "o_norm"
    out_proj: ClassVar[str] = "o_proj"
    activation: ClassVar[Literal["silu", "sigmoid"]] = "sigmoid"
    cache: ClassVar[type[shared.DeltaRuleCache]] = KimiDeltaAttentionCache

    @classmethod
    def of(cls, arguments: Mapping[str, Any], unbatched: bool = False) -> Self:
        """Returns the configuration of a layer from the arguments of its constructor, checked."""
        N, H = (checks.integer(cls.layer, x, arguments[x], least=1) for x in ("num_heads", "head_dim"))
        sizes = dict(num_key_heads=N, num_value_heads=N, key_head_dim=H, value_head_dim=H)
        return super().of({**arguments, **sizes}, unbatched)

    @property
    def projections(self) -> dict[str, tuple[int | None, int]]:
        """Returns the widths, in and out, of each projection in front of the rule; None is E."""
        N, H = self.num_key_heads, self.key_head_dim
        whole = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (None, N * H))
        in_two = {
            "f_a_proj": (None, H),
            "f_b_proj": (H, N * H),
            "g_a_proj": (None, H),
            "g_b_proj": (H, N * H),
        }
        return {**whole, **in_two, "b_proj": (None, N)}

    @property
    def vectors(self) -> dict[str, tuple[int, Callable[..., jax.Array]]]:
        """Returns the size and the initialiser of `dt_bias` and `A_log`."""
        N = self.num_value_heads
        return {"dt_bias": (self.values, shared.dt_bias_init), "A_log": (N, shared.A_log_init(1.0))}

    def inputs(self, linears: shared.Linears, arrays: shared.Arrays, x: jax.Array) -> shared.Inputs:
        """Returns what the layer projects the tokens `x [..., T, E]` to."""
        N, H = self.num_key_heads, self.key_head_dim
        by_head = lambda x: x.reshape(*x.shape[:-1], N, H)
        q, k, v = (by_head(linears[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
        step, gate = (by_head(linears[f"{name}_b_proj"](linears[f"{name}_a_proj"](x))) for name in "fg")
        b = linears["b_proj"](x)
        return shared.Inputs(
            rows=jnp.concatenate([q, k, v], -1),
            log_decay=shared.log_decay(step, by_head(arrays["dt_bias"]), arrays["A_log"][:, None]),
            beta=jax.nn.sigmoid(b.astype(accumulator_dtype(b.dtype))),
            gate=gate,
        )
