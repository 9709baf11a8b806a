"""What several test files need."""

import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import discover

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.cases import Case, Operator, cotangents, value_and_gradients
from jax_attn_bwd.check import QUICK, quick_jit

OPERATORS = discover()
# one of those that share their rules: in a folder those of several arguments, and those of one
FAMILIES = tuple({(o.call.__module__, len(o.differentiable) > 1): o for o in reversed(OPERATORS)}.values())[
    ::-1
]
thorough = pytest.mark.thorough
interpreted = pytest.mark.skipif(
    not mosaic_gpu.can_interpret(), reason="the Mosaic GPU interpreter of this JAX cannot run the kernels"
)
gradients_executed: collections.Counter[tuple[str, str]] = collections.Counter()


def case_params(*tags: str, thorough: Sequence[str] = (), kernels: Sequence[str] | None = None) -> list:
    """(operator, implementation, case) of every case with one of `tags`, discovered.

    Those with a tag of `thorough` alone are left to the thorough tier. With `kernels`, the Pallas kernels are
    implementations beside the portable ones, interpreted: cases with a tag of `kernels` in the default tier,
    those tagged "check" or "wide" beside them in the thorough one. The whole layer, which runs those of dense
    attention, has the former alone, in the thorough tier.
    """
    found = []
    for operator in OPERATORS:
        for implementation in operator.implementations:
            is_kernel = implementation.platform is not None
            if is_kernel and kernels is None:
                continue
            of_kernel = (*(kernels or ()), *(["cudnn"] if implementation.name == "cudnn" else []))
            default, rest = (of_kernel, ("check", "wide")) if is_kernel else (tags, thorough)
            borrowed = is_kernel and operator.name == "multi_head_attention"
            for case in operator.tagged(*default, *([] if borrowed else rest)):
                marks = [] if case.tags & set(default) and not borrowed else [pytest.mark.thorough]
                marks += [pytest.mark.kernel] if is_kernel else []
                marks += [interpreted] if implementation.name == mosaic_gpu.NAME else []
                name = f"{operator.name}[{implementation.name}]-{case.name}"
                found.append(pytest.param(operator, implementation.name, case, id=name, marks=marks))
    return found


def families(params: list) -> list:
    """All of them, those of `FAMILIES` as they are, the others in the thorough tier."""
    rest = {p.id: [] if p.values[0] in FAMILIES else [pytest.mark.thorough] for p in params}
    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, *rest[p.id]]) for p in params]


def firsts(params: list) -> list:
    """The first case of each operator and implementation."""
    return list({param.values[:2]: param for param in reversed(params)}.values())[::-1]


def first_of_each(params: list) -> list:
    """All of them, the `firsts` in the default tier, the others in the thorough one."""
    first = {param.id for param in firsts(params)}
    rest = {param.id: [] if param.id in first else [pytest.mark.thorough] for param in params}
    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, *rest[p.id]]) for p in params]


def count_gradients(operator: Operator, implementation: str) -> None:
    """Says that gradients of an implementation were compared; a run that compared none of one fails."""
    gradients_executed[operator.name, implementation] += 1


def assert_close(got, expected, rtol: float, name: str = "") -> None:
    """Largest difference at most `rtol` of the largest magnitude expected; NaN and inf must agree."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    assert (same | (np.isfinite(got) & np.isfinite(expected))).all(), f"{name}: NaN or inf disagree"
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, expected)).max(initial=0)
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    assert difference <= rtol * max(size, 1e-2), f"{name}: {difference:.2e} of {size:.2e}"


def assert_trees_close(got: dict, expected: dict, rtol: float) -> None:
    """`assert_close` of every entry, by name."""
    assert got.keys() == expected.keys()
    for name in expected:
        assert_close(got[name], expected[name], rtol, name)


def finite_loss(function, operator: Operator, arrays: dict, options: dict, seed: int = 1):
    """`{argument: array} -> scalar`: a random linear form of the finite part of all outputs."""
    outputs = jax.eval_shape(lambda: function(**arrays, **options))
    weights = cotangents(operator, outputs, seed)

    def loss(inputs):
        total = 0.0
        for x, weight in zip(function(**{**arrays, **inputs}, **options), weights, strict=True):
            form = (jnp.where(jnp.isfinite(x), x, 0) * weight).sum()
            total += form.astype(jnp.result_type(float))
        return total

    return loss


def saved_arrays(pullback) -> list:
    """What a pullback keeps in memory; what has no elements, tells by its shape what is differentiated."""
    return [x for x in jax.tree.leaves(pullback) if x.size]


def differentiated(operator: Operator, arrays: dict) -> dict:
    """The differentiable arguments of a call, by name."""
    return {name: arrays[name] for name in operator.differentiated(arrays)}


__all__ = [
    "FAMILIES",
    "OPERATORS",
    "QUICK",
    "Case",
    "Operator",
    "assert_close",
    "assert_trees_close",
    "case_params",
    "cotangents",
    "count_gradients",
    "differentiated",
    "families",
    "finite_loss",
    "first_of_each",
    "firsts",
    "gradients_executed",
    "interpreted",
    "quick_jit",
    "saved_arrays",
    "thorough",
    "value_and_gradients",
]
