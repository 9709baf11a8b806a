"""One folder per operator, with the same file names in each, as far as it has the idea.

`api` the public functions, and the rules that `_core/operation.py` makes a custom_vjp of; `arguments` their
checks; `spec` options, operands and residuals; `reference` the definition; `plan` what is decided once for a
call; `forward`, `backward` and `tangent` the portable implementation, derivations first; `kernels` those of
chips; `cases` the named inputs that `check` reads.

A new operator is such a folder. `check` and the contract find it by its `cases`; its names stand in
`jax_attn_bwd/__init__.py`, a row that times it in `tests/bench/operators.py`, its page in
`.docs/pages/operators` and the list of `mkdocs.yml`; all other cases in `tests/cases`, its own tests in
`tests/ops`.

Dense attention has more ideas: `mask` who sees whom, `visibility` how that is read, `mod_functions` masks and
scores as functions; `plan` the ways of computing, of which `portable` has a file each: the `plane` at once,
`tiles`, and for GPUs `planes` in turn and `strips`; `clean_operands` what all of them read; `block` the chain
from products to probabilities, `online_softmax` the sums over tiles, `row_terms` lse and delta; `devices`
queries that lie on several devices; `blockwise` the door for layers and rings.

Graph attention is three operators that share their rules; `kinds` holds what they differ in, `structure`,
`groups` and `loops` the graph, `edge_ops` the sums over edges.

Linear attention: `layout` lays tokens out in groups of chunks, `decays` holds what the tokens of a chunk are
to one another.
"""

import importlib
import pkgutil
from typing import Any


def discover() -> tuple[Any, ...]:
    """Every operator of the package, as its `cases.py` describes it."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}.cases") for name in names]
    return tuple(operator for module in modules for operator in module.OPERATORS)
