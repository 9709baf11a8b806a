"""`MultiHeadAttn`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.calls import heads
from jax_attn_bwd.compat.megengine.call import multi_head_attention
from jax_attn_bwd.compat.megengine.packing import BIASES, PROJECTIONS

_NAME = "megengine.MultiHeadAttn"


@dataclass(frozen=True)
class MultiHeadAttn:
    """MegEngine's layer around `multi_head_attention`: its arguments, and parameters in a dictionary.

    The dictionary has the names of the source's state dictionary, so one that it saved, as NumPy arrays, may
    be handed over as it is: "io_weight_bias" `(1, length)` and, with `add_bias_kv`, "bias_k" and "bias_v".

    Differs from the source's in that the dropout rates count (its `reset_parameters` sets both to 0), that
    what it refuses works (`add_bias_kv`, `add_zero_attn`, `reslink`), and that `training` is given at the
    call, False where it is not.

    Args:
      embed_dim: width of query and output, and of each projection over all heads.
      num_heads: divides embed_dim.
      attn_dropout, out_dropout: rates of the weights and of the output, in training.
      bias: whether all four projections have one.
      add_bias_kv: one learned row after the projected keys and values, `(1, 1, embed_dim)` each.
      add_zero_attn: a row of zeros after it.
      reslink: add the query to the output.
      kdim, vdim: widths of key and value; None = embed_dim.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import megengine
      >>> layer = megengine.MultiHeadAttn(8, 2)
      >>> params = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (2, 5, 8), "float32")
      >>> out, _ = layer(params, x, x, x, is_causal=True)
      >>> parts = megengine.unpack_io_weight_bias(
      ...     params["io_weight_bias"], 8, 2, qbias=True, kbias=True, vbias=True, obias=True)
      >>> out.shape, parts.query_weight.shape, parts.out_bias.shape
      ((2, 5, 8), (8, 8), (8,))
    """

    embed_dim: int
    num_heads: int
    attn_dropout: float = 0.0
    out_dropout: float = 0.0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    reslink: bool = False
    kdim: int | None = None
    vdim: int | None = None

    def __post_init__(self) -> None:
        """Raises where the sizes do not fit."""
        embed_dim = checks.integer(_NAME, "embed_dim", self.embed_dim, least=1)
        heads(_NAME, self.num_heads, embed_dim=embed_dim)
        for name in ("kdim", "vdim"):
            if getattr(self, name) is not None:
                checks.integer(_NAME, name, getattr(self, name), least=1)
        for name in ("bias", "add_bias_kv", "add_zero_attn", "reslink"):
            checks.flag(_NAME, name, getattr(self, name))

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """Initial parameters: weights as the source draws them (Xavier, of the packed array), biases 0."""
        E = self.embed_dim
        length = (2 * E + (self.kdim or E) + (self.vdim or E)) * E
        of_weights, of_rows = jax.random.split(key)
        biases = 4 * E if self.bias else 0
        bound = math.sqrt(6 / (1 + length + biases))
        weights = jax.random.uniform(of_weights, (1, length), dtype, -bound, bound)
        params = {"io_weight_bias": jnp.pad(weights, ((0, 0), (0, biases)))}
        if self.add_bias_kv:
            bound = math.sqrt(6 / (1 + E))
            rows = jax.random.uniform(of_rows, (2, 1, 1, E), dtype, -bound, bound)
            params |= {"bias_k": rows[0], "bias_v": rows[1]}
        return params

    def __call__(
        self,
        params: Mapping[str, jax.Array],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        key_padding_mask: jax.Array | None = None,
        attn_mask: jax.Array | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = False,
        is_causal: bool = False,
        maybe_cudnn_style_mask: bool = False,
        *,
        training: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """(output, weights or None): `multi_head_attention` of these parameters, whose arguments these are.

        Raises:
          ValueError: `params` holds other names; as `multi_head_attention`. TypeError: as that.
        """
        names = ("io_weight_bias", *(("bias_k", "bias_v") if self.add_bias_kv else ()))
        if not isinstance(params, Mapping) or set(params) != set(names):
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(checks.message(_NAME, "params", f"be a dictionary of {list(names)}", got))
        # All projections are as wide as the query.
        E = self.embed_dim
        weights: Any = {"bias_k": None, "bias_v": None, **params}
        sizes: Any = dict.fromkeys(PROJECTIONS, E) | dict.fromkeys(BIASES, self.bias)
        return multi_head_attention(
            query,
            key,
            value,
            E,
            self.num_heads,
            self.attn_dropout,
            self.out_dropout,
            **weights,
            **sizes,
            add_zero_attn=self.add_zero_attn,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            maybe_cudnn_style_mask=maybe_cudnn_style_mask,
            reslink=self.reslink,
            training=training,
            dropout_key=dropout_key,
        )
