"""What keeps a run on a GPU alive: launches that hang or kill their process, tried here without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import thorough

pytestmark = thorough
GPU = Path(__file__).parents[1] / "gpu"
FAKE = """
import os, time
import pytest
from losses import launching

def sleep():
    with launching(1.0):
        time.sleep(60)

@pytest.mark.launches("forward")
def test_forward():
    pass

@pytest.mark.launches("forward", "slow")
@pytest.mark.parametrize("n", range(4))
def test_launch_that_hangs(n):
    sleep()

@pytest.mark.launches("forward", "broken")
@pytest.mark.parametrize("n", range(3))
def test_launch_that_kills_its_process(n):
    os._exit(3)

@pytest.mark.launches("forward", "late")
@pytest.mark.timeout(2)
def test_compilation_that_does_not_end():
    time.sleep(60)

@pytest.mark.launches("slow", "other")
def test_what_needs_a_lost_kernel():
    pass

@pytest.mark.launches("forward")
def test_what_needs_none_of_them():
    pass
"""


def run(folder, *more):
    (folder / "test_fake.py").write_text(FAKE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "losses", "-p", "no:cacheprovider", "-rA", *more]
    environment = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
    return subprocess.run(
        [*command, "test_fake.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment, "PYTHONPATH": str(GPU), "COLUMNS": "250"},
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One worker, so that the order is known."""
    done = run(tmp_path_factory.mktemp("losses"), "-n", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_run_goes_on_after_lost_workers_and_fails(report):
    assert "2 passed" in report
    assert "9 failed" in report
    for name in ("test_forward", "test_what_needs_none_of_them"):
        assert f"PASSED test_fake.py::{name}" in report


@pytest.mark.parametrize(
    ("test", "kernel"), [("test_launch_that_hangs", "slow"), ("test_launch_that_kills_its_process", "broken")]
)
def test_a_kernel_that_cost_two_workers_is_not_run_again_and_counts_as_failed(report, test, kernel):
    lines = [line for line in report.splitlines() if line.startswith(f"FAILED test_fake.py::{test}[")]
    lost = [line for line in lines if "crashed while running" in line]
    assert [line.split(": ")[-1] for line in lost] == [f"lost in {kernel}, {n} times so far" for n in (1, 2)]
    rest = [line for line in lines if line not in lost]
    assert rest
    assert all(line.endswith(f"Failed: not run: {kernel} was lost 2 times") for line in rest)


def test_what_needs_a_lost_kernel_is_not_run_either(report):
    assert "test_what_needs_a_lost_kernel - Failed: not run: slow was lost 2 times" in report


def test_a_test_that_takes_too_long_costs_its_worker(report):
    assert "crashed while running 'test_fake.py::test_compilation_that_does_not_end': lost in late" in report


def test_without_its_plugins_it_does_not_start(tmp_path):
    done = run(tmp_path, "-p", "no:timeout")
    assert done.returncode == 4
    assert "the tests on a GPU need pytest-timeout" in done.stderr


def test_other_runs_leave_the_tests_of_the_gpu_out_and_a_machine_without_says_why_once():
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}  # no nvidia-smi
    environment.pop("JAX_ATTN_BWD_GPU_TESTS", None)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for arguments, said in (
        ([str(GPU)], "1 skipped"),
        ([str(GPU), str(GPU.parent / "tools" / "test_layering.py"), "--collect-only"], "tests collected"),
    ):
        done = subprocess.run(
            [*pytest_, *arguments],
            cwd=GPU.parents[1],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert said in done.stdout, done.stdout + done.stderr
        assert "test_kernels.py::" not in done.stdout
        if "skipped" in said:
            assert "this machine has no NVIDIA GPU" in done.stdout
