"""Strict by default: float64 available, no implicit promotion of dtypes or ranks, warnings are errors."""

import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

finished_tests = itertools.count(1)


def pytest_runtest_teardown():
    """Linux allows a process 65,530 memory maps; what the caches hold takes hundreds for each test."""
    if next(finished_tests) % 25 == 0:
        jax.clear_caches()


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)
