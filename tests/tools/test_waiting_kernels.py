"""GPU kernels that have run on no such GPU are not picked by themselves: a hang would be the user's."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import dot_product_attention, explain, scaled_masked_softmax
from jax_attn_bwd._core import targets
from jax_attn_bwd._core.backend import Implementation, select


def never(*args):
    raise AssertionError("dispatch runs nothing")


XLA = Implementation("xla", never, never)


def devices_elsewhere(platform, kind="some kind"):
    """The ambient mesh of a compile-only program."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


QUERY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
WITH_KERNELS = {
    "dot_product_attention": dot_product_attention,
    "scaled_masked_softmax": scaled_masked_softmax,
}


@pytest.fixture(params=WITH_KERNELS)
def hopper(request, monkeypatch):
    """A call on an H200: what `explain` says of it, and its program; no variable is set."""
    monkeypatch.delenv(targets.GPU_KERNELS, raising=False)
    function = WITH_KERNELS[request.param]
    operands = (QUERY,) * (3 if request.param == "dot_product_attention" else 1)

    def reasons(**options):
        with devices_elsewhere("gpu", "NVIDIA H200"):
            return explain(function, *operands, **options)

    def run(**options):
        with devices_elsewhere("gpu", "NVIDIA H200"):
            return str(jax.make_jaxpr(lambda *x: function(*x, **options))(*operands))

    return SimpleNamespace(reasons=reasons, program=run)


def launched(program):
    """Whether it holds a kernel."""
    return re.search(r"\bname=(attention|softmax)_forward\b", program) is not None


def generations(monkeypatch, ran):
    changed = tuple(g._replace(ran=ran) for g in targets.GENERATIONS["mosaic_gpu"])
    monkeypatch.setitem(targets.GENERATIONS, "mosaic_gpu", changed)


def test_gpu_kernels_that_have_not_run_are_passed_over_and_explain_says_so(hopper, monkeypatch):
    generations(monkeypatch, "")
    reasons = hopper.reasons()
    assert reasons["xla"] == "ok"
    assert reasons["mosaic_gpu"] == (
        "its kernels have not run on a Hopper GPU (compute capability 9.0) yet, so they are not picked by "
        "themselves; ask for them by name, or set JAX_ATTN_BWD_GPU_KERNELS=1"
    )
    assert not launched(hopper.program())


def test_gpu_kernels_that_have_not_run_run_by_name(hopper, monkeypatch):
    generations(monkeypatch, "")
    assert launched(hopper.program(implementation="mosaic_gpu"))


@pytest.mark.parametrize(("value", "picked"), [("1", True), ("cudnn", False), ("", False)])
def test_the_environment_turns_gpu_kernels_on(hopper, monkeypatch, value, picked):
    generations(monkeypatch, "")
    monkeypatch.setenv("JAX_ATTN_BWD_GPU_KERNELS", value)
    assert (hopper.reasons()["mosaic_gpu"] == "ok") == picked
    assert launched(hopper.program()) == picked


def test_gpu_kernels_that_have_run_are_picked(hopper, monkeypatch):
    generations(monkeypatch, "2026-01-01, 0123abc")
    assert hopper.reasons()["mosaic_gpu"] == "ok"
    assert launched(hopper.program())


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tpu_kernels_are_picked_as_ever(monkeypatch, kind):
    monkeypatch.delenv(targets.GPU_KERNELS, raising=False)
    with devices_elsewhere("tpu", kind):
        assert explain(dot_product_attention, QUERY, QUERY, QUERY)["mosaic_tpu"] == "ok"


def test_a_waiting_kernel_is_not_picked_but_runs_by_name():
    waiting = Implementation("mosaic_gpu", never, never, "gpu", waits=lambda: "not yet")
    with devices_elsewhere("gpu"):
        choose = lambda name: select("operator", (waiting, XLA), name, None, ()).name
        assert choose(None) == "xla"
        assert choose("mosaic_gpu") == "mosaic_gpu"
        assert explain(lambda: choose(None)) == {"mosaic_gpu": "not yet", "xla": "ok"}
