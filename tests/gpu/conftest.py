"""`python -m pytest tests/gpu` on a machine with an NVIDIA GPU: every kernel, compiled for it and run on it.

A run of its own: JAX sees the GPU there, and not here beside tests that want 8 CPU devices. On a machine
without one JAX_ATTN_BWD_GPU_TESTS=interpret tries the tests themselves, on the smallest cases.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from gpu import losses

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("JAX_ATTN_BWD_GPU_TESTS") == "interpret"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers share the GPU


def _own(config):
    """Whether nothing but these tests is asked for."""
    folders = [Path(config.invocation_params.dir, str(arg).split("::")[0]).resolve() for arg in config.args]
    return bool(folders) and all(folder.is_relative_to(HERE) for folder in folders)


@functools.cache
def absent():
    """Why there is no kernel to run here; None if there is. No device is touched: that is for the workers."""
    if INTERPRETED:
        return None
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "this machine has no NVIDIA GPU"
    return None if "GPU 0" in said.stdout else "this machine has no NVIDIA GPU"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if not _own(config) or hasattr(config, "workerinput"):
        return
    if absent() is None:
        losses.isolate(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not _own(config):
        return
    config.pluginmanager.register(losses, "losses")
    jax.config.update("jax_enable_x64", False)  # users run it so
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    if not INTERPRETED and absent() is None:
        jax.config.update("jax_platforms", "cuda,cpu")  # float64 is computed on the CPU


def pytest_ignore_collect(collection_path, config):
    """Other runs leave these tests out."""
    return None if _own(config) else True


def pytest_runtest_makereport(item, call):
    """A worker whose device is broken ends: every later call of it would fail."""
    failed = call.when == "call" and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception)
    if failed and not _healthy():
        print(call.excinfo.getrepr(style="short"), file=sys.__stderr__, flush=True)
        os._exit(3)


def _healthy():
    try:
        return int(jax.numpy.arange(4).sum()) == 6
    except Exception:
        return False
