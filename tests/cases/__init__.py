"""The operators with every case: those of the package, and those that tests and full compilation alone read.

A module here that is named like an operator's folder holds the latter: `CASES`, `{operator: cases}`.
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import cache

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Operator


@cache
def discover() -> tuple[Operator, ...]:
    """Every operator of the package, the cases of the tests behind its own."""
    more = {}
    for module in pkgutil.iter_modules(__path__):
        more |= importlib.import_module(f"{__name__}.{module.name}").CASES
    found = ops.discover()
    assert more.keys() <= {operator.name for operator in found}
    return tuple(replace(o, cases=(*o.cases, *more.get(o.name, ()))) for o in found)
