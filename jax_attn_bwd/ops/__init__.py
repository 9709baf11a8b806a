"""One folder per operator, with the same file names in each.

`api` the public functions, and the rules that `_core/operation.py` makes a custom_vjp of; `arguments` their
checks; `spec` options, operands and residuals; `reference` the definition; `plan` what is decided once for a
call; `forward`, `backward` and `tangent` the portable implementation, derivations first; `kernels` those of
chips; `cases` the named inputs that tests, `check` and benchmarks read.

Dense attention has more ideas: `mask` who sees whom, `visibility` how that is read, `mod_functions` masks and
scores as functions; three engines, `materialized` (small planes), `tiles` (loops over tiles) and `strips`
(GPUs); `block` the chain from products to probabilities, `online_softmax` the sums over tiles, `row_terms`
lse and delta; `devices` queries and batches that are cut; `engine` the door for layers and rings.
"""

import importlib
import pkgutil
from typing import Any


def discover() -> tuple[Any, ...]:
    """Every operator of the package, as its `cases.py` describes it."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}.cases") for name in names]
    return tuple(operator for module in modules for operator in module.OPERATORS)
