"""`python -m jax_attn_bwd.check`: every operator x implementation x dtype against float64, on this machine.

For each case the operator runs in the dtype, forward and gradients, under a random cotangent. Its error
against the definition in float64 must be at most twice that of the definition in the same dtype, plus
two units of rounding; in float64 at most 1e-10.

In the same narrow dtype the definition rounds as the operator does, and numbers without a mean hide an error
that a row shares. So the cases with means are held against the definition in float32, rounded once at its
end: on a CPU each gradient of portable code must have at most three times its error, or one rounding of the
largest entry. Forward and backward are two programs there: in one, XLA may hand on what was not rounded yet.
Exit code 1 on a miss.
"""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.cases import Arrays, Case, Operator, cast, cotangents, value_and_gradients
from jax_attn_bwd._core.numerics import accumulator_dtype

FLOAT64_LIMIT = 1e-10
MEANS, TIMES = "means", 3  # the tag of cases with means; as large as the error of rounding once theirs may be
_RUNNING = threading.Lock()  # two programs of several devices at once may wait for each other
# options of the compiler for a program that runs once or twice: most of the time goes into compiling
QUICK: dict[str, Any] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class Measurement:
    """Holds the error and the limit of one output or gradient, both relative to its largest entry."""

    operator: str
    implementation: str
    dtype: str
    quantity: str
    case: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Tells whether the error is within the limit (a NaN is not)."""
        return self.error <= self.limit


def relative_error(got: Any, expected: Any) -> float:
    """Returns the largest difference over the largest finite entry expected; inf where NaN or inf differ."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        return np.inf
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    finite = np.isfinite(got) & np.isfinite(expected)
    if not (same | finite).all():
        return np.inf
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, expected))
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    return float(difference.max(initial=0) / max(size, 1e-2))


def _run(function: Any, operator: Operator, options: Mapping) -> Any:
    """Makes `(arrays, cts) -> (outputs, {name: gradient})` of a call."""

    def run(arrays, cts):
        names = operator.differentiated(arrays)
        return value_and_gradients(function, names, arrays, options)(cts)

    return run


def _by_name(operator: Operator, outputs: tuple, gradients: dict) -> dict[str, np.ndarray]:
    named = dict(zip(operator.outputs, outputs, strict=True))
    named |= {f"d{name}": gradient for name, gradient in gradients.items()}
    return {name: np.asarray(x).astype(accumulator_dtype(x.dtype)) for name, x in named.items()}


def quick_jit(function: Any) -> Any:
    """Jits a definition: soon compiled, and no rounding left out."""
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False, **QUICK})


@cache
def _definition(operator: Operator, case: Case) -> Any:
    """Compiles the definition into one program, which the dtypes of a case share."""
    return quick_jit(_run(operator.reference, operator, case.options))


def _on_cpu() -> contextlib.AbstractContextManager:
    """Places what is computed on a CPU, where float64 is exact; where JAX has none, on whatever it has."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


class Target(NamedTuple):
    """Holds a case in one dtype: what it is called with, and what its results are measured by."""

    operator: Operator
    case: Case
    dtype: str
    arrays: Arrays
    cotangents: tuple
    expected: dict[str, np.ndarray]
    limits: dict[str, float]

    def measure(self, implementation: str, outputs: tuple, gradients: dict) -> list[Measurement]:
        """Measures the errors of an implementation, beside their limits."""
        got = _by_name(self.operator, outputs, gradients)
        about = self.operator.name, implementation, self.dtype
        return [
            Measurement(*about, name, self.case.name, relative_error(got[name], x), self.limits[name])
            for name, x in self.expected.items()
        ]


def target(operator: Operator, case: Case, dtype: str) -> Target:
    """Runs the definition in float64, and in `dtype` for the limits, both on the CPU."""
    with _on_cpu():
        arrays, define = case.arrays(dtype), _definition(operator, case)
        with jax.enable_x64(True):
            exact = {name: cast(x, "float64") for name, x in arrays.items()}
            zeros = jax.eval_shape(lambda: operator.reference(**exact, **case.options))
            outputs, _ = define(exact, tuple(np.zeros(x.shape) for x in zeros))
            # random, 0 where the output is not finite (the lse of a row that sees nothing)
            drawn = zip(operator.outputs, outputs, cotangents(operator, outputs), strict=True)
            finite = (np.where(np.isfinite(x), ct + case.means.get(name, 0), 0) for name, x, ct in drawn)
            cts = tuple(cast(cast(ct, dtype), "float64") for ct in finite)  # representable in dtype
            expected = _by_name(operator, *define(exact, cts))
        cts = tuple(cast(ct, dtype) for ct in cts)
        limits = dict.fromkeys(expected, FLOAT64_LIMIT)
        if dtype != "float64":
            plain, rounding = _by_name(operator, *define(arrays, cts)), float(jnp.finfo(dtype).eps)
            limits = {n: 2 * relative_error(plain[n], x) + 2 * rounding for n, x in expected.items()}
        if MEANS in case.tags and accumulator_dtype(dtype) != dtype:
            limits |= _of_rounding_once(operator, case, dtype, (arrays, cts), expected)
        return Target(operator, case, dtype, arrays, cts, expected, limits)


def _of_rounding_once(
    operator: Operator, case: Case, dtype: str, given: tuple[Arrays, tuple], expected: dict[str, np.ndarray]
) -> dict[str, float]:
    """Returns the limits of gradients by the definition in float32, which is rounded at its end."""
    arrays, cts = given
    wide = lambda x: cast(np.asarray(x, np.float32), "float32") if getattr(x, "dtype", None) == dtype else x
    _, gradients = _definition(operator, case)({n: wide(x) for n, x in arrays.items()}, tuple(map(wide, cts)))
    limits = {}
    for name, x in gradients.items():
        error = relative_error(cast(x, arrays[name].dtype), expected[f"d{name}"])
        limits[f"d{name}"] = max(case.times.get(name, TIMES) * error, float(jnp.finfo(dtype).eps) / 2)
    return limits


def measure(operator: Operator, implementation: str, case: Case, dtype: str) -> list[Measurement]:
    """Measures the errors of one case in one dtype, beside their limits."""
    aim = target(operator, case, dtype)
    options = {**case.options, "implementation": implementation}
    run = _in_two_programs if MEANS in case.tags else _in_one_program
    return aim.measure(implementation, *run(operator, options, aim))


def _in_one_program(operator: Operator, options: Mapping, aim: Target) -> tuple[tuple, dict]:
    call = _run(operator.call, operator, options)
    program = jax.jit(call).lower(aim.arrays, aim.cotangents).compile()
    with _RUNNING:
        return jax.block_until_ready(program(aim.arrays, aim.cotangents))


def _in_two_programs(operator: Operator, options: Mapping, aim: Target) -> tuple[tuple, dict]:
    names = operator.differentiated(aim.arrays)

    def forward(arrays):
        call = lambda moved: operator.call(**{**arrays, **moved}, **options)
        return jax.vjp(call, {name: arrays[name] for name in names})

    def backward(pullback, outputs, cts):
        (gradients,) = pullback(tuple(ct.astype(x.dtype) for ct, x in zip(cts, outputs, strict=True)))
        return gradients

    with _RUNNING:
        outputs, pullback = jax.block_until_ready(jax.jit(forward)(aim.arrays))
        return outputs, jax.block_until_ready(jax.jit(backward)(pullback, outputs, aim.cotangents))
