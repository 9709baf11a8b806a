"""What the gate proves of an implementation: right to the dtype's rounding, deaf to poison, repeatable."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import backend
from jax_attn_bwd._core.cases import Arrays, Case, Operator, cast, cotangents, value_and_gradients
from jax_attn_bwd.bench.gate import progress
from jax_attn_bwd.bench.gate.cases import Poisoned
from jax_attn_bwd.bench.gate.steps import CORRECTNESS, FAILED, OK, POISON, REFUSED, REPEAT, Row
from jax_attn_bwd.check import evaluate, relative_error

REPEATS = 20
Wanted = tuple[str, ...] | None


def subject(operator: Operator, implementation: str) -> str:
    """How rows call what was run."""
    return f"{operator.name}[{implementation}]"


def refusal(
    operator: Operator, implementation: str, arrays: Arrays, options: Mapping
) -> str | None:
    """Why the implementation cannot run this call here; None if it can."""
    reasons = backend.explain(operator.call, **arrays, **options)
    reason = reasons.get(implementation, "the operator has no such implementation")
    return None if reason == "ok" else reason


def run(
    operator: Operator, function: Callable, arrays: Arrays, options: Mapping, wanted: Wanted = None
) -> Any:
    """`(arrays, cts) -> {output or d<argument>: array}` of `function`, jitted.

    What of `arrays` is differentiable is differentiated, or `wanted` alone.
    """
    names = operator.differentiated(arrays) if wanted is None else wanted

    def named(arrays, cts):
        outputs, gradients = value_and_gradients(function, names, arrays, options)(cts)
        found = dict(zip(operator.outputs, outputs, strict=True))
        return found | {f"d{name}": x for name, x in gradients.items()}

    return jax.jit(named)


def definition(operator: Operator, case: Case, dtype: str) -> tuple[dict, dict, tuple]:
    """(results in float64, results of the plain formula in `dtype`, cotangents), all on the CPU.

    The cotangents are representable in `dtype`, and 0 where the output is not finite. The plain formula
    runs operation by operation: each of its results is rounded.
    """
    reference = operator.reference
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = case.arrays(dtype)
        with jax.enable_x64(True):
            exact = {name: cast(x, "float64") for name, x in arrays.items()}
            outputs = jax.jit(lambda arrays: reference(**arrays, **case.options))(exact)
            cts = tuple(
                cast(jnp.where(jnp.isfinite(x), cast(ct, dtype), 0), "float64")
                for x, ct in zip(outputs, cotangents(operator, outputs), strict=True)
            )
            results = run(operator, reference, exact, case.options)(exact, cts)
            expected = {name: np.asarray(x) for name, x in results.items()}
        low = tuple(cast(np.asarray(ct), dtype) for ct in cts)
        plain = evaluate(reference, operator, arrays, case.options, low)
    return expected, plain, tuple(np.asarray(ct) for ct in cts)


def compare(
    operator: Operator,
    implementation: str,
    case: Case,
    dtype: str,
    kind: str = CORRECTNESS,
    wanted: Wanted = None,
    suffix: str = "",
) -> Iterator[Row]:
    """A row per output and gradient: its error against float64, beside the limit of `jax_attn_bwd.check`.

    `wanted`: the gradients that are computed, where not all; `suffix` then tells so in the rows.
    """
    who, what = subject(operator, implementation), f"{case.name} {dtype}{suffix}"
    arrays = case.arrays(dtype)
    if reason := refusal(operator, implementation, arrays, case.options):
        yield Row(kind, who, what, REFUSED, note=reason)
        return
    expected, plain, cts = definition(operator, case, dtype)
    options = {**case.options, "implementation": implementation}
    low = tuple(cast(ct, dtype) for ct in cts)
    function = run(operator, operator.call, arrays, options, wanted)
    got = progress.compiled(function, arrays, low)(arrays, low)
    rounding = float(jnp.finfo(dtype).eps)
    for name in [name for name in expected if name in got]:
        result = np.asarray(got[name]).astype(np.float64)
        error = relative_error(result, expected[name])
        limit = 2 * relative_error(plain[name], expected[name]) + 2 * rounding
        figures, note, status = {"error": error, "limit": limit}, "", OK
        if not error <= limit:
            status, (more, note) = FAILED, wrong_entries(result, expected[name], limit)
            figures |= more
        yield Row(kind, who, f"{what} {name}", status, figures, note)


def wrong_entries(
    got: np.ndarray, expected: np.ndarray, limit: float
) -> tuple[dict[str, float], str]:
    """What is wrong, in figures and in a sentence: the pattern of wrong entries tells of the cause."""
    if got.shape != expected.shape:
        return {}, f"shape {got.shape}, expected {expected.shape}"
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    with np.errstate(invalid="ignore"):
        off = np.abs(got - expected) / max(size, 1e-2)
    off = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, off)
    off = np.where(np.isnan(off), np.inf, off)
    worst = np.unravel_index(off.argmax(), off.shape)
    wrong = off > limit
    rows = [np.flatnonzero(wrong.any(tuple(a for a in range(off.ndim) if a != axis)))
            for axis in range(off.ndim)]  # fmt: skip
    spans = ", ".join(f"{r[0]}..{r[-1]} ({r.size})" if r.size else "none" for r in rows)
    where = f"worst at {tuple(map(int, worst))}: {got[worst]:.6g}, expected {expected[worst]:.6g}"
    figures = {"wrong share": float(wrong.mean()), "NaN": float(np.isnan(got).sum())}
    return figures, f"{where}; wrong along the axes of {got.shape}: {spans}"


def _bits(results: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(x).tobytes() for name, x in results.items()}


def repeat(operator: Operator, implementation: str, case: Case, dtype: str) -> Iterator[Row]:
    """One compiled program, run many times: every result must have the same bits. A race does not."""
    who, what = subject(operator, implementation), f"{case.name} {dtype}"
    arrays = case.arrays(dtype)
    if reason := refusal(operator, implementation, arrays, case.options):
        yield Row(REPEAT, who, what, REFUSED, note=reason)
        return
    options = {**case.options, "implementation": implementation}
    outputs = jax.eval_shape(lambda: operator.call(**arrays, **case.options))
    cts = cotangents(operator, outputs)
    program = progress.compiled(run(operator, operator.call, arrays, options), arrays, cts)
    first, moved = _bits(program(arrays, cts)), set()
    for _ in range(REPEATS):
        progress.tell(progress.LAUNCHING)
        again = _bits(program(arrays, cts))
        moved |= {name for name in first if again[name] != first[name]}
    note = f"not the same bits in {REPEATS} runs: {sorted(moved)}" if moved else ""
    yield Row(REPEAT, who, what, FAILED if moved else OK, {"runs": float(REPEATS)}, note)


def poison(
    operator: Operator, implementation: str, poisoned: Poisoned, dtype: str
) -> Iterator[Row]:
    """NaN where nothing attends: results are as with zeros there, and gradients there are 0."""
    case = poisoned.case
    who, what = subject(operator, implementation), f"{case.name} {dtype}"
    arrays = case.arrays(dtype)
    if reason := refusal(operator, implementation, arrays, case.options):
        yield Row(POISON, who, what, REFUSED, note=reason)
        return
    options = {**case.options, "implementation": implementation}
    hidden = poisoned.hidden(arrays)
    outputs = jax.eval_shape(lambda: operator.call(**arrays, **case.options))
    cts = cotangents(operator, outputs)
    dead = hidden.pop("dout", None)
    rest = tuple(jnp.zeros_like(ct) for ct in cts[1:])  # of an lse of -inf
    if not any(where.any() for where in hidden.values()):
        yield Row(POISON, who, what, FAILED, note="the case hides nothing")
        return

    program = progress.compiled(
        run(operator, operator.call, arrays, options), arrays, (cts[0], *rest)
    )

    def results(fill):
        filled = {name: _fill(arrays[name], where, fill) for name, where in hidden.items()}
        dout = cts[0] if dead is None else _fill(cts[0], dead, fill)
        found = program(arrays | filled, (dout, *rest))
        return {n: np.asarray(x).astype(np.float64) for n, x in found.items()}

    clean, got = results(0.0), results(np.nan)
    wrong = [name for name in got if relative_error(got[name], clean[name]) != 0]
    wrong += [name for name in got if np.isnan(got[name]).any() and name not in wrong]
    wrong += [f"d{n} where hidden" for n, where in hidden.items() if np.any(got[f"d{n}"][where])]
    note = f"changed by poison: {wrong}" if wrong else ""
    yield Row(POISON, who, what, FAILED if wrong else OK, note=note)


def _fill(x: Any, where: np.ndarray, value: float) -> jax.Array:
    """`x` with `value` where the mask over its leading axes is True."""
    spread = where.reshape(where.shape + (1,) * (x.ndim - where.ndim))
    return jnp.where(spread, jnp.asarray(value, x.dtype), x)
