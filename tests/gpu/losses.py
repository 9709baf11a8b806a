"""A plugin of pytest: each test runs in a worker that may be killed, and lost kernels are not tried for ever.

A launch that hangs, or that takes its process along, costs a worker of pytest-xdist. A test names the kernels
that it launches, `@pytest.mark.launches("forward", "backward")`: the loss counts against the last of them.
What needs a kernel that was lost twice is not run any more, and counts as failed.
"""

import contextlib
import faulthandler
import hashlib
import sys
import tempfile
from pathlib import Path

import pytest

WORKERS = 4  # compilation keeps as many cores busy
TEST_SECONDS = 300  # a test compiles for minutes at most
LAUNCH_SECONDS = 20.0  # a launch that takes longer hangs
LOSSES = 2
_folder = pytest.StashKey[Path]()


def isolate(config):
    """Settles that there are workers, before pytest-xdist reads it; to be called first of all."""
    for plugin in ("xdist", "timeout"):
        if not config.pluginmanager.hasplugin(plugin):
            raise pytest.UsageError(f"the tests on a GPU need pytest-{plugin}: a kernel may hang")
    option = config.option
    option.numprocesses = WORKERS if option.numprocesses is None else option.numprocesses
    option.maxworkerrestart, option.maxschedchunk = "9999", 1


@contextlib.contextmanager
def launching(seconds=LAUNCH_SECONDS):
    """Ends this process if the block takes longer, whoever holds the interpreter's lock."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _file(folder, kind, text):
    return folder / f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def lost(folder, kernel):
    """How many workers a kernel has cost."""
    file = _file(folder, "lost", kernel)
    return len(file.read_text()) if file.exists() else 0


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if not hasattr(config, "workerinput"):
        isolate(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    option = config.option  # the parent has one, and each worker
    option.timeout = TEST_SECONDS if option.timeout is None else option.timeout
    option.timeout_method = "thread"  # a signal waits for the launch that hangs
    config.addinivalue_line("markers", "launches(*kernels): the kernels that a test launches, its own last")
    if hasattr(config, "workerinput"):
        config.stash[_folder] = Path(config.workerinput["losses"])
        return
    folder = tempfile.TemporaryDirectory(prefix="jax_attn_bwd_losses_")
    config.add_cleanup(folder.cleanup)
    config.stash[_folder] = Path(folder.name)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["losses"] = str(node.config.stash[_folder])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report, sched):
    """In the parent: a worker died in a test."""
    folder = sched.config.stash[_folder]
    running = _file(folder, "running", crashitem)
    if running.exists():
        kernel = running.read_text()
        with _file(folder, "lost", kernel).open("a") as file:
            file.write("x")
        report.longrepr = f"{report.longrepr}: lost in {kernel}, {lost(folder, kernel)} times so far"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """In a worker: says which kernel is at stake, unless one that is needed was lost before."""
    kernels = [name for mark in item.iter_markers("launches") for name in mark.args]
    folder = item.config.stash[_folder]
    for kernel in kernels:
        if lost(folder, kernel) >= LOSSES:
            pytest.fail(f"not run: {kernel} was lost {LOSSES} times", pytrace=False)
    if kernels:
        _file(folder, "running", item.nodeid).write_text(kernels[-1])
