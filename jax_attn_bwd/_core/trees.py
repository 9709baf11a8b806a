"""Trees of arrays: of which only some are floating, and those that `jax.export` writes under a name.

What is not floating has None in the place of its gradient.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import export

T = TypeVar("T")


def floats(args: Any) -> Any:
    """Returns `args` with None in the place of what is not floating: their gradients have this structure."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, args)


def over_floats(f: Callable[..., Any], numbers: Any, args: Any, otherwise: Any = lambda old: None) -> Any:
    """Maps `f(x, arg)` over the `numbers`, and `otherwise(arg)` over the arguments that have none."""
    pick = lambda x, arg: otherwise(arg) if x is None else f(x, arg)
    return jax.tree.map(pick, numbers, args, is_leaf=lambda x: x is None)


def filled(args: Any, numbers: Any) -> Any:
    """Returns `args` with `numbers`, which have the structure of `floats`, in place of their floats."""
    return over_floats(lambda new, old: new, numbers, args, otherwise=lambda old: old)


def in_dtypes_of(args: Any, gradients: Any) -> Any:
    """Returns the `gradients` of floats in `args`, in their dtypes; None stays None."""
    if gradients is None:
        return None
    return over_floats(lambda x, arg: x.astype(jnp.result_type(arg)), gradients, args)


def exportable_tuple(cls: type[T]) -> type[T]:
    """Registers a `NamedTuple` that an exported program may take and return."""
    return _registered(cls, export.register_namedtuple_serialization)


def exportable_dataclass(cls: type[T]) -> type[T]:
    """Registers a dataclass likewise, whose static fields are integers, None, or tuples of them."""
    register = partial(
        export.register_pytree_node_serialization,
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: _tuples(json.loads(text.decode())),
    )
    return _registered(cls, register)


def _tuples(x: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _registered(cls: type[T], register: Callable[..., Any]) -> type[T]:
    """Registers `cls`, which keeps its former class where this package is imported twice in one process.

    JAX has no way to take a name back: what is exported of the later class is refused, by its type.
    """
    try:
        register(cls, serialized_name=f"jax_attn_bwd.{cls.__name__}")
    except ValueError as error:
        if "Duplicate serialization registration" not in str(error):
            raise
    return cls
