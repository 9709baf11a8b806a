"""The language-model example over a mesh: killed and resumed, on another mesh, in several processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close

import jax_attn_bwd

pytestmark = pytest.mark.thorough
ROOT = Path(jax_attn_bwd.__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_language_model.py"
STEPS = 12


def start(folder, *more, mesh="data=2,sequence=4", devices=8, through=()):
    """A run of the example whose checkpoints, one a step, lie in `folder`."""
    for module in ("flax", "matplotlib", "optax", "orbax.checkpoint", "rich"):
        pytest.importorskip(module)
    sizes = ("--steps", str(STEPS), "--context", "16", "--save-every", "1", "--mesh", mesh)
    command = [sys.executable, *map(str, through or (SCRIPT,)), *sizes, "--checkpoints", str(folder), *more]
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    env = kept | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env |= {"MPLBACKEND": "agg"}
    folder.parent.mkdir(exist_ok=True, parents=True)
    return subprocess.Popen(
        [*command, "--out", str(folder.parent / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=folder.parent,
    )


def output_of(process):
    """Its output; it must have ended well."""
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text[-3000:]
    return text


def losses(folder):
    """The losses of all steps, as the last checkpoint tells them."""
    (history,) = folder.glob(f"{STEPS}/history/metadata")
    found = json.loads(history.read_text())["losses"]
    assert len(found) == STEPS
    return np.array(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    output_of(start(folder))
    return losses(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The checkpoints of a run that was killed between its second step and its last."""
    folder = tmp_path_factory.mktemp("killed") / "checkpoints"
    process = start(folder)
    deadline = time.monotonic() + 200
    while not (folder / "2").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (folder / "2").exists()
    assert not (folder / str(STEPS)).exists()
    assert process.returncode == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("mesh", ["data=2,sequence=4", "data=4,sequence=2"])
def test_a_killed_run_resumes(mesh, whole, killed, tmp_path):
    """On the same mesh bit for bit."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(killed, folder)
    text = output_of(start(folder, "--resume", mesh=mesh))
    assert "resumed after step" in text
    if mesh == "data=2,sequence=4":
        np.testing.assert_array_equal(losses(folder), whole)
    assert_close(losses(folder), whole, 1e-4)


def test_another_run_is_not_resumed(killed):
    process = start(killed, "--resume", "--seed", "1")
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 1
    assert "holds a run with" in text.splitlines()[-1]


def test_a_mesh_of_another_size_is_refused(tmp_path):
    process = start(tmp_path / "c", mesh="data=2,sequence=2")
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 2
    assert "data=2,sequence=2 has 4 devices, and here are 8" in text


def several(count, folder):
    """Processes that train together, 8 devices in all."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    worker = Path(__file__).with_name("training.py")
    return [start(folder, devices=8 // count, through=(worker, SCRIPT, count, i, port)) for i in range(count)]


def test_several_processes_train_alike(whole, tmp_path):
    folder = tmp_path / "checkpoints"
    for process in several(2, folder):  # more spend their time in waiting for a core
        output_of(process)
    assert_close(losses(folder), whole, 1e-5)


def test_a_process_that_dies_takes_the_others_with_it(tmp_path):
    """They end with a message; none hangs."""
    folder = tmp_path / "checkpoints"
    first, second = several(2, folder)
    deadline = time.monotonic() + 200
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    text, _ = first.communicate(timeout=150)
    assert first.returncode != 0
    assert text.strip()
