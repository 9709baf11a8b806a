"""Names under which `jax.export` writes the pytrees that an exported program may take and return."""

import json
from typing import Any, TypeVar

from jax import export

T = TypeVar("T")


def exportable_tuple(cls: type[T]) -> type[T]:
    """Class decorator of a `NamedTuple`."""
    return export.register_namedtuple_serialization(cls, serialized_name=_name(cls))


def exportable_dataclass(cls: type[T]) -> type[T]:
    """Class decorator of a registered dataclass whose static fields are integers, None, or tuples of them."""
    return export.register_pytree_node_serialization(
        cls,
        serialized_name=_name(cls),
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: _tuples(json.loads(text.decode())),
    )


def _tuples(x: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _name(cls: type) -> str:
    return f"jax_attn_bwd.{cls.__name__}"
