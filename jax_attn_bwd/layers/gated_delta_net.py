"""`GatedDeltaNet` in every framework: what it computes, its parameters and its arguments.

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

Constructors take, by the names of Qwen3-Next's configuration without `linear_`:
  * `num_key_heads`, `num_value_heads`: K and N, a multiple of K: value head n reads key head n // (N / K);
  * `key_head_dim`, `value_head_dim`: H and Hv, the sizes of a head.

All else, what calls take and how to decode from a cache, is told in `jax_attn_bwd.layers.delta_rule_layers`.

Layers start as those of the authors: `A_log` as the logarithm of a uniform number of [0.01, 16], and
`dt_bias` as told there (in `transformers` it is 1, which forgets most within a few tokens).

Shapes: E width, K key heads, N value heads, H and Hv their sizes, C = 2 K H + N Hv.

References:
  Yang et al., Gated delta networks, arXiv:2412.06464, 2024. Qwen3-Next, `transformers` 5, 2025.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers import delta_rule_layers as shared
from jax_attn_bwd.layers.torch_weights import as_array


class GatedDeltaNetCache(shared.DeltaRuleCache):
    """What a `GatedDeltaNet` keeps of the tokens so far.

    Attributes:
      conv_state: `[..., taps - 1, K, W]`, of the last tokens what the convolution reads, by key head.
      recurrent_state: `[..., N, H, Hv]`, float32 (float64 beside float64), the matrix of each value head.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Config(shared.Config):
    """Holds what a `GatedDeltaNet` is built from."""

    layer: ClassVar[str] = "GatedDeltaNet"
    norm: ClassVar[str] = "norm"
    out_proj: ClassVar[str] = "out_proj"
    activation: ClassVar[Literal["silu", "sigmoid"]] = "silu"
    cache: ClassVar[type[shared.DeltaRuleCache]] = GatedDeltaNetCache

    @property
    def projections(self) -> dict[str, tuple[int | None, int]]:
        """Returns the widths, in and out, of each projection in front of the rule; None is E."""
        return {
            "in_proj_qkvz": (None, self.channels + self.values),
            "in_proj_ba": (None, 2 * self.num_value_heads),
        }

    @property
    def vectors(self) -> dict[str, tuple[int, Callable[..., jax.Array]]]:
        """Returns the size and the initialiser of `dt_bias` and `A_log`."""
        N = self.num_value_heads
        return {"dt_bias": (N, shared.dt_bias_init), "A_log": (N, shared.A_log_init(0.01))}

    def inputs(self, linears: shared.Linears, arrays: shared.Arrays, x: jax.Array) -> shared.Inputs:
        """Returns what the layer projects the tokens `x [..., T, E]` to."""
        # Each key head has its query and key, and the values, z, b and a of its value heads.
        K, G, tokens = self.num_key_heads, self.num_value_heads // self.num_key_heads, x.shape[:-1]
        qkvz = linears["in_proj_qkvz"](x)
        qkvz = qkvz.reshape(*tokens, K, qkvz.shape[-1] // K)
        ba = linears["in_proj_ba"](x).reshape(*tokens, K, 2 * G)
        b, a = (part.reshape(*tokens, K * G) for part in (ba[..., :G], ba[..., G:]))
        return shared.Inputs(
            rows=qkvz[..., : self.row],
            log_decay=shared.log_decay(a, arrays["dt_bias"], arrays["A_log"]),
            beta=jax.nn.sigmoid(b.astype(accumulator_dtype(b.dtype))),
            gate=shared.of_value_heads(self, qkvz[..., self.row :]),
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
