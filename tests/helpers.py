"""What several test files need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn_bwd import ops
from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.cases import Case, Operator, cotangents, value_and_gradients

OPERATORS = ops.discover()
interpreted = pytest.mark.skipif(
    not mosaic_gpu.can_interpret(),
    reason="the Mosaic GPU interpreter of this JAX cannot run the kernels",
)


def case_params(*tags: str) -> list:
    """(operator, portable implementation, case) of every case with one of `tags`, discovered.

    Kernels do not run on a CPU: `ops/<operator>/test_<operator>_mosaic_gpu.py` interprets them on the
    same cases.
    """
    return [
        pytest.param(operator, implementation.name, case,
                     id=f"{operator.name}[{implementation.name}]-{case.name}")
        for operator in OPERATORS
        for implementation in operator.implementations
        if implementation.platform is None
        for case in operator.tagged(*tags)
    ]  # fmt: skip


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


def differentiated(operator: Operator, arrays: dict) -> dict:
    """The differentiable arguments of a call, by name."""
    return {name: arrays[name] for name in operator.differentiated(arrays)}


__all__ = [
    "OPERATORS", "Case", "Operator", "assert_close", "assert_trees_close", "case_params",
    "cotangents", "differentiated", "finite_loss", "interpreted", "value_and_gradients",
]  # fmt: skip
