"""What `python -m jax_attn_bwd.bench --gate PLATFORM` does."""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jax_attn_bwd.bench.gate import correctness, plan, report
from jax_attn_bwd.bench.gate.run import START_SECONDS, Child, Clock, Lost, run
from jax_attn_bwd.bench.gate.steps import Row
from jax_attn_bwd.bench.gate.worker import load_plan

PLAN = "jax_attn_bwd.bench.gate.plan:steps"
PLATFORMS = ("gpu", "cpu")
PARALLEL = {"gpu": 6, "cpu": 1}  # compilation keeps that many processor cores busy


def main(platform: str, out: Path, minutes: float, steps_of: str = PLAN) -> int:
    """0 if the gate is passed, 1 if not, 2 if this machine has no such device.

    Args:
      platform: "gpu", or "cpu" to try the gate with the portable path at tiny sizes.
      out: folder of the results.
      minutes: the deadline.
      steps_of: `module:function` that gives the steps.
    """
    jax.config.update("jax_platforms", "cpu")  # the GPU and its memory are the children's
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        return _main(platform, out, Clock(60 * minutes), steps_of, cache)


def _main(platform: str, out: Path, clock: Clock, steps_of: str, cache: str) -> int:
    settings = {"platform": platform, "tiny": platform == "cpu"}
    start = partial(_start, steps_of, settings, cache)
    try:
        environment = _greet(start)
    except Lost as lost:
        print(f"the gate could not start: {lost}", file=sys.stderr)
        return 2
    device = environment["device"]
    if platform == "gpu" and not (environment["platform"] == "gpu" and "NVIDIA" in device):
        print(f"--gate gpu needs an NVIDIA GPU; JAX finds {device}", file=sys.stderr)
        return 2

    rows: list[Row] = []
    proven = [correctness.subject(operator, name) for operator, name in plan.kernels(platform)]
    steps = load_plan(steps_of, settings)

    def record(found: list[Row]) -> None:
        rows.extend(found)
        report.write(out, environment, rows, proven, steps)

    record([])
    run(steps, start, clock, PARALLEL[platform], record)
    path = report.write(out, environment, rows, proven, steps)
    wrong = report.faults(rows, proven)
    report.show(rows, wrong)
    print(f"wrote {path} and {path.with_suffix('.md').name}")
    print(
        f"{len(steps)} steps, {len(rows)} rows, {clock.seconds - clock.left():.0f} s: {len(wrong)} faults"
    )
    return int(bool(wrong))


def _start(steps_of: str, settings: dict[str, Any], cache: str, library: str) -> Child:
    """A child on the platform; children share the GPU, so none takes all of its memory.

    They share the folder `cache` of compiled programs too: a case is compared, then repeated.
    """
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if settings["platform"] == "cpu" or library != "jax":
        environment["JAX_PLATFORMS"] = "cpu"
    elif chosen and "cpu" not in chosen.split(","):
        environment["JAX_PLATFORMS"] = f"{chosen},cpu"  # float64 is computed there
    return Child(steps_of, settings, library, environment)


def _greet(start: Callable[[str], Any]) -> dict[str, Any]:
    """What a first child says of the device; the parent itself never touches it."""
    child = start("jax")
    try:
        return child.greeting(START_SECONDS)
    finally:
        child.end()
