"""Linear layers of Equinox with the initial values of these layers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

XAVIER = jax.nn.initializers.xavier_uniform()


def linear(
    width: int,
    out: int,
    *,
    key: jax.Array,
    dtype: Any,
    init: Callable[..., jax.Array] = XAVIER,
    bias: Any = 0.0,
) -> eqx.nn.Linear:
    """Returns a linear layer with weights from `init` and a constant `bias`, None = none."""
    layer = eqx.nn.Linear(width, out, use_bias=bias is not None, dtype=dtype, key=key)
    dtype = layer.weight.dtype
    layer = eqx.tree_at(lambda layer: layer.weight, layer, init(key, (out, width), dtype))
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, jnp.full(out, bias, dtype))
