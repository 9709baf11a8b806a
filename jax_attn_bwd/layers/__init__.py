"""Layers for Flax (linen and NNX), Haiku, Equinox, and attention for Keras, each in the module of its name.

    from jax_attn_bwd.layers.<framework> import ...

A framework is imported with its own module only, where that is first named.
"""

import importlib
from types import ModuleType

# module: (what it imports, what to install)
_FRAMEWORKS = {
    "equinox": ("equinox", "equinox"),
    "flax_linen": ("flax", "flax"),
    "flax_nnx": ("flax", "flax"),
    "haiku": ("haiku", "dm-haiku"),
    "keras": ("keras", "keras"),
}


def __getattr__(name: str) -> ModuleType:
    if name not in _FRAMEWORKS:
        frameworks = ", ".join(_FRAMEWORKS)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; layers stand in {frameworks}")
    package, distribution = _FRAMEWORKS[name]
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        remedy = f"install it with: pip install {distribution}"
        raise ImportError(f"{__name__}.{name} needs the package {package}; {remedy}", name=package) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_FRAMEWORKS})
