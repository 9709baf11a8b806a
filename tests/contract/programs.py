"""One compiled program per case for all that is asked of it at first order."""

import contextlib
import zlib
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers import QUICK

from jax_attn_bwd import check, explain
from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.cases import cast

# kernels as a chip runs them, which rounds a product and a sum together
FUSED = {"xla_llvm_disable_expensive_passes": True}
POISON = np.array([np.nan, np.inf, -np.inf])


class FirstOrder(NamedTuple):
    """A case in the widest dtype that the implementation takes, and its program, compiled."""

    target: check.Target
    implementation: str
    run: object  # (arrays, cotangents) -> (outputs, gradients, {number of a subset: plain gradients})
    subsets: tuple[tuple[str, ...], ...]


def is_kernel(operator, implementation: str) -> bool:
    return next(i for i in operator.implementations if i.name == implementation).platform is not None


def running(operator, implementation: str):
    """Kernels are interpreted inside."""
    kernel = is_kernel(operator, implementation)
    return pallas.interpreting(implementation) if kernel else contextlib.nullcontext()


def dtype_or_reason(operator, implementation: str, case) -> tuple[str | None, str]:
    """(the widest dtype in which it can run the case, or None; why it can in none)."""
    if not is_kernel(operator, implementation):
        return "float64", ""
    for dtype in ("float32", "bfloat16"):
        reason = explain(operator.call, **case.arrays(dtype), **case.options)[implementation]
        if reason == "ok":
            return dtype, ""
    return None, reason


def widest_dtype(operator, implementation: str, case) -> str:
    """Skips where `supports()` refuses the case in every dtype."""
    dtype, reason = dtype_or_reason(operator, implementation, case)
    return dtype or pytest.skip(reason)


def first_order(operator, implementation: str, case) -> FirstOrder:
    """Outputs, gradients, and where it is portable the plain backward for several subsets of gradients."""
    portable = not is_kernel(operator, implementation)
    aim = check.target(operator, case, widest_dtype(operator, implementation, case))
    names = operator.differentiated(aim.arrays)
    offered = tuple(n for n in operator.backward_wrt if n in names)
    subsets = tuple(dict.fromkeys((offered, offered[:1], offered[1:2] or offered)))
    if "second" not in case.tags:  # one argument, another one in each case
        subsets = (offered[zlib.crc32(case.name.encode()) % max(len(offered), 1) :][:1],)
    if not portable or "rounded" in case.tags:
        subsets = ()
    options = {**case.options, "implementation": implementation}

    def run(arrays, cts):
        def call(inputs):
            return operator.call(**{**arrays, **inputs}, **options)

        outputs, pullback = jax.vjp(call, {name: arrays[name] for name in names})
        cts = tuple(ct.astype(x.dtype) for ct, x in zip(cts, outputs, strict=True))
        again = [operator.backward(cts, outputs, arrays, dict(case.options), wrt) for wrt in subsets]
        plain = [{n: found[n] for n in wrt} for found, wrt in zip(again, subsets, strict=True)]
        return outputs, pullback(cts)[0], plain

    compiled = jax.jit(run, compiler_options=QUICK if portable else FUSED)
    return FirstOrder(aim, implementation, compiled.lower(aim.arrays, aim.cotangents).compile(), subsets)


def poisoned(operator, case, arrays, cts):
    """(arrays, cotangents) with NaN, Inf and -Inf in turns wherever no one reads; None if all is read."""
    exact = {name: np.asarray(x) for name, x in case.arrays(np.float64).items()}
    hidden = operator.hidden(exact, case.options)
    if not any(where.any() for where in hidden.values()):
        return None

    def fill(name, x):
        if name not in hidden:
            return x
        where = hidden[name].reshape(hidden[name].shape + (1,) * (x.ndim - hidden[name].ndim))
        pick = POISON[np.random.default_rng(3).integers(0, 3, x.shape)]
        return cast(np.where(where, pick, np.asarray(x.astype(np.float64))), x.dtype)

    bad = {name: fill(name, x) for name, x in arrays.items()}
    return bad, tuple(fill(name, ct) for name, ct in zip(operator.outputs, cts, strict=True))
