"""Kernels that run by themselves are those that ran on a chip: they trace to what ran there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from gpu import traces

from jax_attn_bwd._core import targets

KEPT = json.loads(traces.FILE.read_text())
RAN = {name: [g for g in found if g.ran] for name, found in targets.GENERATIONS.items()}


def test_what_ran_has_digests():
    assert {name for name, found in RAN.items() if found} == set(KEPT)
    for name, digests in KEPT.items():
        assert [g.traces for g in RAN[name]] == [traces.of_all(digests)]
        assert digests.keys() == traces.CALLS[name].keys()


@pytest.mark.skipif(jax.__version_info__[:2] != traces.JAX, reason="the digests are of JAX 0.12's programs")
def test_kernels_trace_to_what_ran():
    """In a process of its own, without the settings of tests."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "gpu.traces"]
    found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    differing = [(name, call) for name in KEPT for call, x in KEPT[name].items() if found[name][call] != x]
    assert not differing, (
        "these kernels are not those that ran on a chip. Run tests/gpu on one (test_kernels.py says how), "
        "or, where a change cannot matter, say why in its commit; then run `PYTHONPATH=tests python -m "
        "gpu.traces --write`, and write in GENERATIONS what it prints"
    )
