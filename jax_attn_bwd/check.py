"""`python -m jax_attn_bwd.check`: every operator x implementation x dtype against float64, on this machine.

For each case the operator runs in the dtype, forward and gradients, under a random cotangent. Its error
against the definition in float64 must be at most twice that of the definition in the same dtype, plus
two units of rounding; in float64 at most 1e-10. Exit code 1 on a miss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import backend
from jax_attn_bwd._core.cases import Arrays, Case, Operator, cast, cotangents, value_and_gradients
from jax_attn_bwd._core.numerics import accumulator_dtype

DTYPES = ("float64", "float32", "bfloat16", "float16")
FLOAT64_LIMIT = 1e-10


@dataclass(frozen=True)
class Measurement:
    """One output or gradient of one case, beside its limit; both relative to its largest entry."""

    operator: str
    implementation: str
    dtype: str
    quantity: str
    case: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (a NaN is not)."""
        return self.error <= self.limit


def relative_error(got: Any, expected: Any) -> float:
    """Largest difference over the largest finite magnitude expected; inf where NaN or inf disagree."""
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


def evaluate(
    function: Any, operator: Operator, arrays: Arrays, options: Mapping, cts: tuple
) -> dict[str, np.ndarray]:
    """Outputs and gradients of `function`, by name: `out`, ..., `dquery`, ..."""
    run = value_and_gradients(function, operator.differentiated(arrays), arrays, options)
    outputs, gradients = run(cts)
    named = dict(zip(operator.outputs, outputs, strict=True))
    named |= {f"d{name}": gradient for name, gradient in gradients.items()}
    return {name: np.asarray(x.astype(accumulator_dtype(x.dtype))) for name, x in named.items()}


def _finite_cotangents(operator: Operator, outputs: dict[str, np.ndarray]) -> tuple:
    """Random cotangents, 0 where the output is not finite (the lse of a row that sees nothing)."""
    cts = cotangents(operator, tuple(outputs[name] for name in operator.outputs))
    return tuple(
        jnp.where(np.isfinite(outputs[name]), ct, 0)
        for name, ct in zip(operator.outputs, cts, strict=True)
    )


def measure(operator: Operator, implementation: str, case: Case, dtype: str) -> list[Measurement]:
    """The errors of one case in one dtype, beside their limits."""
    arrays, options = case.arrays(dtype), dict(case.options)
    with jax.enable_x64(True):
        exact = {name: cast(x, "float64") for name, x in arrays.items()}
        zeros = [jnp.zeros(x.shape) for x in operator.reference(**exact, **options)]
        outputs = evaluate(operator.reference, operator, exact, options, tuple(zeros))
        cts = _finite_cotangents(operator, outputs)
        cts = tuple(cast(cast(ct, dtype), "float64") for ct in cts)  # representable in dtype
        expected = evaluate(operator.reference, operator, exact, options, cts)
    cts = tuple(cast(np.asarray(ct), dtype) for ct in cts)
    plain = (
        {} if dtype == "float64" else evaluate(operator.reference, operator, arrays, options, cts)
    )
    got = evaluate(
        operator.call, operator, arrays, {**options, "implementation": implementation}, cts
    )
    rounding = float(jnp.finfo(dtype).eps)
    return [
        Measurement(
            operator.name, implementation, dtype, name, case.name, relative_error(got[name], expected[name]),
            2 * relative_error(plain[name], expected[name]) + 2 * rounding if plain else FLOAT64_LIMIT,
        )
        for name in expected
    ]  # fmt: skip


def unavailable(operator: Operator) -> dict[str, str]:
    """The implementations that cannot run on this machine, with the reason."""
    case = next(operator.tagged("check"))
    reasons = backend.explain(operator.call, **case.arrays("float32"), **case.options)
    return {name: reason for name, reason in reasons.items() if reason != "ok"}


def measurements(
    operators: Sequence[Operator], dtypes: Sequence[str]
) -> Iterator[list[Measurement]]:
    """Every case of every available implementation; nothing is computed before it is asked for."""
    for operator in operators:
        missing = unavailable(operator)
        for implementation in operator.implementations:
            if implementation.name in missing:
                continue
            for dtype in dtypes:
                for case in operator.tagged("check"):
                    yield measure(operator, implementation.name, case, dtype)


def worst(rows: Sequence[Measurement]) -> list[Measurement]:
    """Of each operator, implementation, dtype and quantity, the case nearest to (or over) its limit."""
    found: dict[tuple, Measurement] = {}
    for row in rows:
        key = (row.operator, row.implementation, row.dtype, row.quantity)
        if key not in found or not row.error / row.limit <= found[key].error / found[key].limit:
            found[key] = row
    return list(found.values())
