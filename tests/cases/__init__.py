"""The operators with every case: those of the package, and those that tests and benchmarks alone read.

The modules here, named like the operators' folders, hold the latter: `CASES`, `{operator: cases}`; and what
tests alone ask of an operator: `TRAITS`, `{operator: fields of Tested}`.

Tags beside those of `Case`: "ci" for every test; "edge" degenerate shapes; "hidden" where much is hidden;
"second" small enough for hessians; "rounded" where the outputs are too coarse for a plain backward; "shard"
divisible by 4 in batch and heads, "bounds" too if its tile bounds differ from shard to shard; "repeat" is run
again for its bits where a GPU is at hand. "bench" is measured on a CPU, "quick" small enough to try that,
"bench_gpu" on a GPU; "scaling" is one case at many sizes, named `series: letter=size`, "quick_scaling" at two
small ones. "kernel" is for kernels alone, "cudnn" for that one, "wide" too, where what takes long is run.
"compile" is compiled for chips that are not there, by every implementation; "xla", "mosaic_gpu" or the name
of a TPU, by that one; "A100" and "B200" for these by kernels that are not Hopper's alone; with "table" the
kernels are compiled for the pages of `tests/bench/results`, not in every run.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import jax
import numpy as np

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Case, Operator, is_floating


@dataclass(frozen=True, eq=False)
class Tested(Operator):
    """An operator, its plain backward, and how its arrays may be cut.

    Attributes:
      backward: `(cotangents, outputs, arrays, options, wrt) -> {name: gradient}`: the public `_bwd`.
      backward_wrt: the gradients that `backward` offers.
      axes: `{argument or output: letters of its axes}`, right-aligned; B and N are batch and heads.
      whole: arguments that lie whole on each device; inside `jax.shard_map` a caller may cut them by `axes`.
      wide: outputs that are float32 beside narrower arrays.
      sums_over_heads: outputs that are sums over heads: shards of heads hold shares of them.
    """

    backward: Callable[..., dict[str, Any]] = lambda *_: {}
    backward_wrt: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    wide: tuple[str, ...] = ("lse",)
    sums_over_heads: tuple[str, ...] = ()


@cache
def _more() -> tuple[dict[str, list[Case]], dict[str, dict[str, Any]]]:
    cases: dict[str, list[Case]] = {}
    traits: dict[str, dict[str, Any]] = {}
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        for name, more in module.CASES.items():
            cases.setdefault(name, []).extend(more)
        traits |= getattr(module, "TRAITS", {})
    return cases, traits


def with_more(operators: Iterable[Operator]) -> tuple[Tested, ...]:
    """The operators with the cases of the tests behind their own, and with what tests alone ask."""
    cases, traits = _more()

    def more(o: Operator) -> Tested:
        own = {x.name: getattr(o, x.name) for x in fields(o)}
        return Tested(**own | traits[o.name] | {"cases": (*o.cases, *cases.get(o.name, ()))})

    return tuple(map(more, operators))


def shapes(case: Case, dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Types of the arrays of a case, which are not made; floating ones are of `dtype`, else the case's."""
    found = {}
    for name, x in case.build(_Zeros()).items():
        own = case.dtypes.get(name, dtype or case.dtype) if is_floating(x) else np.asarray(x).dtype
        found[name] = jax.ShapeDtypeStruct(np.shape(x), own)
    return found


class _Zeros(np.random.Generator):
    """Gives zeros to a case whose shapes are asked for; they take memory only where they are few."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size=None, *args, **kwargs):
        shape = () if size is None else tuple(np.atleast_1d(size))
        return np.zeros(shape) if math.prod(shape) < 2**16 else np.broadcast_to(0.0, shape)

    def normal(self, loc=0.0, scale=1.0, size=None):
        return self.standard_normal(size)

    def random(self, size=None, *args, **kwargs):
        return self.standard_normal(size)


def infinite_bias(rng, n):
    """A bias `[2, 1, T, S]` that is -inf in places, and in all of one row, which sees nothing."""
    bias = rng.standard_normal((2, 1, n["T"], n["S"]))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[1, 0, n["T"] // 2] = -np.inf
    return {"bias": bias}


@cache
def discover() -> tuple[Tested, ...]:
    """Every operator of the package, with all cases."""
    return with_more(ops.discover())
