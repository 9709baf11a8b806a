"""One folder per operator, with the same file names in each.

`api` the public functions and the custom_vjp; `spec` options and residuals; `reference` the
definition; `forward` and `backward` the portable implementation; `cases` the named inputs that tests,
`check` and benchmarks read.
"""

import importlib
import pkgutil
from typing import Any


def discover() -> tuple[Any, ...]:
    """Every operator of the package, as its `cases.py` describes it."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}.cases") for name in names]
    return tuple(operator for module in modules for operator in module.OPERATORS)
