"""What is done to modules of Equinox, which are trees: made, widened, given values, put in place."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers.torch_weights import name_of_weight

XAVIER = jax.nn.initializers.xavier_uniform()
_WITH_WEIGHT = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.RMSNorm)
T = TypeVar("T")


def linear(
    width: int, out: int, *, key: jax.Array, dtype: Any, init: Any = XAVIER, bias: Any = 0.0
) -> eqx.nn.Linear:
    """Returns a linear layer with weights from `init` and a constant `bias`, None = none."""
    layer = eqx.nn.Linear(width, out, use_bias=bias is not None, dtype=dtype, key=key)
    dtype = layer.weight.dtype
    layer = eqx.tree_at(lambda layer: layer.weight, layer, init(key, (out, width), dtype))
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, jnp.full(out, bias, dtype))


def by_row(linear: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a linear layer of one vector to `[..., in]`."""
    for _ in range(x.ndim - 1):
        linear = jax.vmap(linear)
    return linear(x)


def widened(layer: eqx.nn.Linear) -> eqx.nn.Linear:
    """Returns `layer` with parameters in float32 or wider: it computes offsets or logits."""
    return jax.tree.map(lambda x: x.astype(accumulator_dtype(x.dtype)), layer)


def with_weights(layer: T, values_for: Callable[[dict[str, Any]], dict[str, Any]]) -> T:
    """Returns `layer` with the values that are found for the tree of its parameters, as in Flax."""
    tree = {name: x for name, x in vars(layer).items() if eqx.is_array(x)}
    modules: dict[str, Any] = {name: x for name, x in vars(layer).items() if isinstance(x, _WITH_WEIGHT)}
    for name, module in modules.items():
        bias = {} if module.bias is None else {"bias": module.bias}
        tree[name] = {name_of_weight(module.weight): module.weight.T, **bias}
    made = values_for(tree)
    for name, module in modules.items():
        both = (made[name][name_of_weight(module.weight)].T, made[name].get("bias"))
        where = lambda module: (module.weight, module.bias)
        made[name] = eqx.tree_at(where, module, both, is_leaf=lambda x: x is None)
    return eqx.tree_at(lambda layer: [getattr(layer, name) for name in made], layer, list(made.values()))


def replaced(model: T, ours: type, options: Mapping[str, Any]) -> T:
    """Returns `model` with each attention layer of Equinox as an `ours`, which has `options` of its own."""
    found = []

    def is_attention(x: Any) -> bool:
        return isinstance(x, eqx.nn.MultiheadAttention)

    def replace(path: Any, x: Any) -> Any:
        if not is_attention(x):
            return x
        found.append(path)
        if isinstance(x, ours):
            return x
        if type(x) is not eqx.nn.MultiheadAttention:
            expected, remedy = "be an equinox.nn.MultiheadAttention itself", f"derive it from {ours.__name__}"
            where = f"model{jax.tree_util.keystr(path)}"
            raise TypeError(checks.message("replace_attention", where, expected, type(x).__name__, remedy))
        new: Any = object.__new__(ours)  # its arrays may have axes in front, over which a scan runs
        for name, value in {**vars(x), **options}.items():
            object.__setattr__(new, name, value)
        return new

    made = jax.tree_util.tree_map_with_path(replace, model, is_leaf=is_attention)
    if not found:
        expected = "hold an equinox.nn.MultiheadAttention"
        raise ValueError(checks.message("replace_attention", "model", expected, type(model).__name__))
    return made
