"""The child process: runs the steps whose names it reads, one line of JSON for each."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from jax_attn_bwd.bench.errors import sentence
from jax_attn_bwd.bench.gate import progress
from jax_attn_bwd.bench.gate.steps import FAILED, Row, Step


def load_plan(reference: str, settings: dict[str, Any]) -> list[Step]:
    """The steps that `module:function` gives for `settings`."""
    module, function = reference.split(":")
    steps = getattr(importlib.import_module(module), function)(**settings)
    names = [step.name for step in every(steps)]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the gate's steps need different names, got twice: {sorted(repeated)}")
    return steps


def every(steps: Sequence[Step]) -> list[Step]:
    """The steps, and what may be run in their place."""
    return [x for step in steps for x in (step, step.instead) if x is not None]


def execute(step: Step) -> list[Row]:
    """The rows of a step; where it raises or gives none, one that says so."""
    try:
        rows = list(step.run())
    except Exception as error:  # whatever it is, the gate goes on and reports it
        return [step.row(FAILED, sentence(error))]
    return rows or [step.row(FAILED, "it gave no result")]


def healthy() -> bool:
    """Whether the device still computes: after a fault every later call of the process fails."""
    import jax.numpy as jnp

    try:
        return int(jnp.arange(4).sum()) == 6
    except Exception:
        return False


def describe(library: str) -> dict[str, Any]:
    """Where this process runs."""
    from jax_attn_bwd.bench.__main__ import environment

    if library == "jax":
        return environment()
    return {"library": library}


def serve(
    steps: Sequence[Step], lines: TextIO, answer: Callable[[dict[str, Any]], None], library: str
) -> None:
    """Runs the step that each line names; ends when the device is broken."""
    named = {step.name: step for step in every(steps)}
    for line in lines:
        rows = execute(named[line.rstrip("\n")])
        failed = any(row.status == FAILED for row in rows)
        broken = failed and library == "jax" and not healthy()
        answer({"rows": [asdict(row) for row in rows], "broken": broken})
        if broken:
            return


def main() -> None:
    """`python -m jax_attn_bwd.bench.gate.worker PLAN SETTINGS LIBRARY`."""
    plan, settings, library = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    steps = load_plan(plan, json.loads(settings))
    answer(describe(library))
    progress.listen(lambda doing: answer({"doing": doing}))
    serve(steps, sys.stdin, answer, library)
    channel.flush()
    os._exit(0)  # no destructor of a broken device may hold the gate up


if __name__ == "__main__":
    main()
