"""Which implementation runs, why the others do not, and what `explain` tells of it."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_attn_bwd
from jax_attn_bwd import (
    compat,
    dot_product_attention,
    explain,
    multi_scale_deformable_attention,
    scaled_masked_softmax,
)
from jax_attn_bwd._core import backend, targets
from jax_attn_bwd._core.backend import Implementation, select


def never(*args):
    raise AssertionError("dispatch runs nothing")


def fake(name, platform=None, reason=None, ran="today"):
    """An implementation that cannot run for `reason`; kernels have passed their tests on the chip."""
    return Implementation(
        name, never, never, platform, lambda options, operands: reason, "operator", lambda: ran
    )


TPU, GPU, XLA = fake("mosaic_tpu", "tpu"), fake("mosaic_gpu", "gpu"), fake("xla")
ALL = (TPU, GPU, XLA)


def chosen(implementations=ALL, requested=None, operands=()):
    return select("operator", implementations, requested, None, operands).name


def reasons(implementations=ALL, operands=()):
    """What `explain` says of these."""

    def call():
        select("operator", implementations, None, None, operands)

    return explain(call)


def devices_elsewhere(platform, kind="some kind", axes=(AxisType.Explicit,)):
    """The ambient mesh of a compile-only program."""
    names = ("x", "y")[: len(axes)]
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,) * len(axes), names, axis_types=axes, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


# ---------------------------------------------------------------------- the platform aimed at


def test_platform_is_that_of_jax_where_nothing_else_is_said():
    assert targets.platform() == jax.default_backend() == "cpu"


def test_platform_follows_the_default_device():
    with jax.default_device(jax.devices("cpu")[1]):
        assert targets.platform() == "cpu"
    for name in ("cpu", "gpu", "tpu"):  # JAX takes the name of a platform as well
        with jax.default_device(name):
            assert targets.platform() == name


def test_platform_follows_the_ambient_mesh_before_the_default_device():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.default_device("tpu"), jax.set_mesh(mesh):
        assert targets.platform() == "cpu"


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_platform_follows_an_abstract_mesh_that_names_its_device(platform):
    with devices_elsewhere(platform):
        assert targets.platform() == platform
        traced = []
        jax.eval_shape(lambda: traced.append(targets.platform()))
        assert traced == [platform]
    assert targets.platform() == "cpu"


def test_platform_of_an_abstract_mesh_without_device_is_that_of_jax():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert targets.platform() == "cpu"


# ---------------------------------------------------------------------- what is picked


@pytest.mark.parametrize(("platform", "name"), [("tpu", "mosaic_tpu"), ("gpu", "mosaic_gpu")])
def test_none_picks_the_kernel_of_the_platform_aimed_at(platform, name):
    assert chosen() == "xla"
    with devices_elsewhere(platform):
        assert chosen() == name


def test_none_picks_the_first_of_the_list_that_can():
    able, unable = fake("mosaic_tpu", "gpu"), fake("mosaic_gpu", "gpu", "heads of 7")
    with devices_elsewhere("gpu"):
        assert chosen((able, GPU, XLA)) == "mosaic_tpu"
        assert chosen((GPU, able, XLA)) == "mosaic_gpu"
        assert chosen((unable, able, XLA)) == "mosaic_tpu"
        assert chosen((unable, XLA)) == "xla"


def test_supports_sees_options_and_operands():
    seen = []
    implementation = replace(GPU, supports=lambda *call: seen.append(call))
    with devices_elsewhere("gpu"):
        assert select("operator", (implementation, XLA), None, "o", (1.0,)).name == "mosaic_gpu"
    assert seen == [("o", (1.0,))]


def test_supports_is_not_asked_on_another_platform():
    """It may import what only that platform has."""
    assert chosen((Implementation("mosaic_gpu", never, never, "gpu", never), XLA)) == "xla"


def test_a_name_is_an_order():
    with devices_elsewhere("gpu"):
        assert chosen(requested="xla") == "xla"
        assert chosen(requested="mosaic_gpu") == "mosaic_gpu"


def refused(exception, words, **call):
    with pytest.raises(exception, match=words):
        chosen(**call)


def test_kernel_of_another_platform_is_refused_with_both_platforms():
    words = (
        "operator: implementation='mosaic_tpu' cannot run this call: "
        "it is a tpu kernel and the target platform is cpu; implementation=None picks"
    )
    refused(NotImplementedError, words, requested="mosaic_tpu")
    with devices_elsewhere("gpu"):
        words = "tpu kernel and the target platform is gpu"
        refused(NotImplementedError, words, requested="mosaic_tpu")


def test_kernel_that_cannot_is_refused_with_its_own_reason():
    implementations = (fake("mosaic_gpu", "gpu", "head size 7 is odd"), XLA)
    with devices_elsewhere("gpu"):
        refused(
            NotImplementedError,
            "'mosaic_gpu' cannot run this call: head size 7 is odd; ",
            implementations=implementations,
            requested="mosaic_gpu",
        )


def test_known_name_that_the_operator_lacks_is_not_implemented():
    words = "'mosaic_gpu' cannot run this call: this operator has no such implementation"
    refused(NotImplementedError, words, implementations=(TPU, XLA), requested="mosaic_gpu")


@pytest.mark.parametrize("name", ["triton", "XLA", "", 3])
def test_unknown_name_is_a_value_error_that_lists_the_known(name):
    words = rf"operator: implementation must be None or one of .*'mosaic_gpu'.*, got {name!r}"
    refused(ValueError, words, requested=name)


@pytest.mark.parametrize(
    "axes", [(AxisType.Auto,), (AxisType.Explicit, AxisType.Auto)], ids=["auto", "mixed"]
)
def test_kernel_on_a_mesh_with_auto_axes_is_refused_with_the_remedy(axes):
    with devices_elsewhere("gpu", axes=axes):
        assert chosen() == "xla"
        words = "'mosaic_gpu' cannot run .* type Auto; wrap .* jax.shard_map, or .* Explicit axes"
        refused(NotImplementedError, words, requested="mosaic_gpu")


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Manual])
def test_kernel_on_a_mesh_without_auto_axes_is_picked(kind):
    with devices_elsewhere("gpu", axes=(kind,)):
        assert chosen() == "mosaic_gpu"


def test_mesh_of_the_operands_counts_without_an_ambient_one():
    """Arrays that were device_put on an Auto mesh, and nothing set: JAX partitions all the same."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones(4), jax.NamedSharding(mesh, P("x")))
    kernel = (fake("mosaic_gpu", "cpu"), XLA)
    assert chosen(kernel, operands=(jnp.ones(4),)) == "mosaic_gpu"
    assert chosen(kernel, operands=(jnp.ones(4), {"x": x})) == "xla"


def test_kernel_inside_shard_map_of_an_auto_mesh_is_picked():
    """The remedy of the message works."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    seen = []

    def shard(x):
        seen.append(chosen((fake("mosaic_gpu", "cpu"), XLA), operands=(x,)))
        return x

    jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.ones(4))
    assert set(seen) == {"mosaic_gpu"}


# ---------------------------------------------------------------------- explain


def test_explain_gives_every_reason_in_the_order_of_preference():
    implementations = (TPU, fake("mosaic_gpu", "gpu", "no"), fake("second", "gpu"), XLA)
    with devices_elsewhere("gpu"):
        got = reasons(implementations)
    assert list(got) == ["mosaic_tpu", "mosaic_gpu", "second", "xla"]
    assert got["mosaic_tpu"] == "it is a tpu kernel and the target platform is gpu"
    assert (got["mosaic_gpu"], got["second"], got["xla"]) == ("no", "ok", "ok")
    assert got.refused == {name: got[name] for name in ("mosaic_tpu", "mosaic_gpu")}


def shapes(*names):
    sizes = {"query": (2, 5, 6, 4), "key": (2, 7, 3, 4), "value": (2, 7, 3, 8)}
    return tuple(jax.ShapeDtypeStruct(sizes[name], jnp.float32) for name in names)


QKV = shapes("query", "key", "value")


def test_explain_takes_shapes():
    assert explain(dot_product_attention, *QKV, is_causal=True)["xla"] == "ok"
    mask = jax.ShapeDtypeStruct((5, 7), bool)
    assert explain(dot_product_attention, *QKV, mask=mask)["xla"] == "ok"
    assert explain(scaled_masked_softmax, QKV[0])["xla"] == "ok"


def test_explain_takes_arrays_of_jax_and_numpy():
    arrays = [np.ones(x.shape, x.dtype) for x in QKV]
    assert explain(dot_product_attention, *arrays)["xla"] == "ok"
    arrays = [jnp.asarray(x) for x in arrays]
    key = jax.random.key(0)
    got = explain(dot_product_attention, *arrays, dropout_rate=0.5, dropout_key=key)
    assert got["xla"] == "ok"


def test_explain_computes_nothing():
    """Shapes far beyond any memory."""
    x = jax.ShapeDtypeStruct((1024, 1 << 20, 128, 256), jnp.bfloat16)
    assert explain(dot_product_attention, x, x, x)["xla"] == "ok"


def test_explain_of_a_function_that_calls_an_operator():
    def layer(params, x, *, causal):
        q, k, v = (jnp.einsum("...tnh,hd->...tnd", x, w) for w in params)
        return dot_product_attention(q, k, v, is_causal=causal).mean()

    params = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 3
    assert explain(layer, params, QKV[0], causal=True)["xla"] == "ok"


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, jax.value_and_grad, lambda f: jax.vmap(f, in_axes=(0, 0, 0))],
    ids=["jit", "checkpoint", "value_and_grad", "vmap"],
)
def test_explain_sees_through_transformations(wrap):
    def total(*args):
        return dot_product_attention(*args).mean()

    assert explain(wrap(total), *QKV)["xla"] == "ok"


def test_explain_of_the_plain_backward():
    q, k, v = QKV
    out, lse = (jax.ShapeDtypeStruct((2, 5, 6, 8), q.dtype), jax.ShapeDtypeStruct(q.shape[:3], q.dtype))
    got = explain(jax_attn_bwd.dot_product_attention_bwd, out, q, k, v, out=out, lse=lse)
    assert got["xla"] == "ok"


def test_explain_of_compat_names_the_operator_behind_it():
    assert explain(compat.cann.scaled_masked_softmax, QKV[0], None)["xla"] == "ok"


def test_explain_reports_bad_arguments_as_the_call_does():
    with pytest.raises(ValueError, match="dot_product_attention: key must have shape"):
        explain(dot_product_attention, QKV[0], QKV[2], QKV[2])


def test_explain_ends_with_the_call():
    """Afterwards, also after an error, operators run again."""
    explain(scaled_masked_softmax, QKV[0])
    with pytest.raises(ValueError, match="calls no operator"):
        explain(jnp.sin, QKV[0])
    assert scaled_masked_softmax(jnp.zeros(4)).tolist() == [0.25] * 4


def test_explain_does_not_spoil_a_jitted_function():
    """The trace that explain broke off must not be what a later call runs."""
    f = jax.jit(functools.partial(scaled_masked_softmax, scale=2.0))
    x = jnp.zeros((3, 4))
    assert explain(f, x)["xla"] == "ok"
    assert f(x).tolist() == [[0.25] * 4] * 3


def test_explain_of_a_jitted_function_that_has_already_run():
    """JAX does not trace it a second time, and the operator must be found all the same."""
    f = jax.jit(functools.partial(scaled_masked_softmax, scale=3.0))
    x = jnp.zeros((3, 4))
    f(x)
    assert explain(f, x)["xla"] == "ok"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_runs_everywhere(operator):
    """The portable path comes last, supports every call, and so `None` always finds one."""
    *kernels, last = operator.implementations
    assert (last.name, last.platform) == ("xla", None)
    assert last.supports(SimpleNamespace(), ()) is None
    names = [i.name for i in operator.implementations]
    assert len(set(names)) == len(names)
    assert set(names) <= set(backend.NAMES)
    assert all(i.platform in ("tpu", "gpu") for i in kernels)


def test_explain_leaves_known_integers_known():
    value, points, weights = (jnp.ones((1, 6, 1, 1)), jnp.ones((1, 1, 1, 1, 1, 2)), jnp.ones((1,) * 5))
    shapes = jnp.asarray([[2, 3]])
    assert explain(multi_scale_deformable_attention, value, shapes, points, weights)["xla"] == "ok"


def test_explain_refuses_an_unknown_name():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        explain(dot_product_attention, x, x, x, implementation="fast")
