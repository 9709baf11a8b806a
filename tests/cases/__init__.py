"""The operators with every case: those of the package, and those that tests and full compilation alone read.

The modules here, named like the operators' folders, hold the latter: `CASES`, `{operator: cases}`.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Case, Operator


@cache
def _more() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for module in pkgutil.iter_modules(__path__):
        for name, cases in importlib.import_module(f"{__name__}.{module.name}").CASES.items():
            found.setdefault(name, []).extend(cases)
    return found


def with_more(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators with the cases of the tests behind their own."""
    return tuple(replace(o, cases=(*o.cases, *_more().get(o.name, ()))) for o in operators)


@cache
def discover() -> tuple[Operator, ...]:
    """Every operator of the package, with all cases."""
    return with_more(ops.discover())
