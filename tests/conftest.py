"""Strict by default: float64 available, no implicit promotion of dtypes or ranks, warnings are errors."""

import gc
import itertools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")  # what Keras reads where it is imported
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# Neither the user's own choice of kernels counts, nor what this machine has proven.
os.environ["JAX_ATTN_BWD_KERNELS"] = os.environ["JAX_ATTN_BWD_GPU_KERNELS"] = ""
os.environ["JAX_ATTN_BWD_CACHE"] = os.devnull

import cudnn_twin
import jax
import pytest

from jax_attn_bwd.ops.dot_product.kernels import cudnn

cudnn.TWIN = cudnn_twin
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

collect_ignore_glob = ["models/*"]  # no tests: what `.ci/extras` runs where torch is installed
# Names of tests that take long, one a line: they are thorough, as those that are marked in their files.
SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
finished_tests = itertools.count(1)
names_of_all: pytest.StashKey = pytest.StashKey()  # of the tests that were found, also those left out
meant: pytest.StashKey = pytest.StashKey()  # {(operator, implementation)} whose gradients this run compares
missing: pytest.StashKey = pytest.StashKey()  # the pairs in `meant` whose gradients it never compared


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough, too")
    parser.addoption(
        "--thorough-share",
        metavar="K/N",
        help="run every N-th of the tests marked thorough, from the K-th on, too (K from 0)",
    )


def pytest_collection_modifyitems(config, items):
    """The tests that take long are left out unless they are asked for; no name differs from run to run."""
    slow = set(SLOW_TESTS.read_text().splitlines())
    config.stash[names_of_all] = {item.nodeid for item in items}
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"give ids to the parameters of {item.nodeid}: it names an address")
        if item.nodeid in slow:
            item.add_marker("thorough")
    if config.getoption("thorough") or "thorough" in config.getoption("markexpr"):
        return
    thorough = [item for item in items if item.get_closest_marker("thorough")]
    share = config.getoption("thorough_share")
    if share:
        first, step = map(int, share.split("/"))
        left_out = [item for place, item in enumerate(thorough) if place % step != first]
    else:
        left_out = thorough
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=left_out)


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


def pytest_collection_finish(session):
    """Tests marked gradients have a parameter `implementation`; see `pytest_sessionfinish`.

    An implementation may refuse every case of a share, so a share of the thorough tests promises none.
    """
    _collect_garbage_seldom()
    in_share = bool(session.config.getoption("thorough_share"))
    compared = {
        (item.callspec.params["operator"].name, item.callspec.params["implementation"])
        for item in session.items
        if item.get_closest_marker("gradients") and _can_run(item)
        if not (in_share and item.get_closest_marker("thorough"))
    }
    session.config.stash[meant] = compared


def _collect_garbage_seldom():
    """Tracing makes many objects, and each collection would go through all that the imports have made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _can_run(item):
    return not any(mark.args[0] for mark in item.iter_markers("skipif"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What Keras computes between our operators promotes dtypes and ranks implicitly."""
    if "keras" not in item.nodeid:
        return (yield)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A run fails whose contract was to compare gradients of an implementation, and compared none."""
    from helpers import gradients_executed

    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["meant"] = sorted(config.stash.get(meant, ()))
        config.workeroutput["executed"] = sorted(gradients_executed)
        return
    without = config.stash.get(meant, set()) - set(gradients_executed)
    if without and not (config.getoption("collectonly") or session.shouldstop or session.shouldfail):
        config.stash[missing] = without
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Gathers what the workers of pytest-xdist found."""
    from helpers import gradients_executed

    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(meant, set()).update(map(tuple, output.get("meant", ())))
    gradients_executed.update(map(tuple, output.get("executed", ())))


def pytest_terminal_summary(terminalreporter, config):
    for operator, implementation in sorted(config.stash.get(missing, ())):
        terminalreporter.line(f"no gradient of {operator}[{implementation}] was compared", red=True)


def pytest_runtest_teardown():
    """Linux allows a process 65,530 memory maps; what the caches hold takes dozens for each test.

    The first test behind it compiles anew what all share.
    """
    if next(finished_tests) % 100 == 0:
        jax.clear_caches()


@pytest.fixture
def all_names(pytestconfig):
    """The names of the tests that this run found, those that it leaves out among them."""
    return pytestconfig.stash[names_of_all]


@pytest.fixture
def one_device(monkeypatch):
    """What is traced is for a CPU with one device, as most users' is: nothing may be sharded there."""
    from jax_attn_bwd._core import targets

    monkeypatch.setattr(targets, "is_one_cpu", lambda: True)


@pytest.fixture
def narrow_products(one_device, monkeypatch):
    """What is traced is for a CPU with one device that has products of bfloat16; heads may be short."""
    from jax_attn_bwd._core import targets
    from jax_attn_bwd.ops.dot_product import plan

    jax.clear_caches()  # what was traced for another
    monkeypatch.setattr(targets, "_cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(plan, "NARROW_HEAD", 1)
    yield
    jax.clear_caches()


@pytest.fixture
def unproven(monkeypatch):
    """No generation of chips has passed the tests of its kernels: what proves them is a record alone."""
    from jax_attn_bwd._core import targets

    for name, generations in targets.GENERATIONS.items():
        monkeypatch.setitem(targets.GENERATIONS, name, tuple(g._replace(ran="") for g in generations))


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)
