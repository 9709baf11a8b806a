"""What runs over several CPU devices is compiled anew for each test: see the page "Limits"."""

import jax
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Keeps its programs out of the compilation cache that the processes of a run share."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        return (yield)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
