"""Strict by default: float64 available, no implicit promotion of dtypes or ranks, warnings are errors."""

import itertools
import os
import tempfile

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


def pytest_configure(config):
    """What one process compiles, the others of the run load."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="jax_attn_bwd_tests_")
    config.add_cleanup(folder.cleanup)
    for name, value in (
        ("jax_compilation_cache_dir", folder.name),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_runtest_teardown():
    """Linux allows a process 65,530 memory maps; what the caches hold takes hundreds for each test."""
    if next(finished_tests) % 25 == 0:
        jax.clear_caches()


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)
