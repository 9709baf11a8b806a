"""Names under which `jax.export` writes the pytrees that an exported program may take and return."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from jax import export

T = TypeVar("T")


def exportable_tuple(cls: type[T]) -> type[T]:
    """Class decorator of a `NamedTuple`."""
    return _registered(cls, export.register_namedtuple_serialization)


def exportable_dataclass(cls: type[T]) -> type[T]:
    """Class decorator of a registered dataclass whose static fields are integers, None, or tuples of them."""
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
