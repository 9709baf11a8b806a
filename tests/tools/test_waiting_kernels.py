"""Kernels are picked by themselves only where they are proven, or where a user says so."""

import json
import logging
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import (
    MultiHeadAttentionParams,
    dot_product_attention,
    explain,
    multi_head_attention,
    multi_scale_deformable_attention,
    scaled_masked_softmax,
)
from jax_attn_bwd._core import records, targets
from jax_attn_bwd._core.backend import Implementation, select
from jax_attn_bwd.check import enable

H200, V6E = "NVIDIA H200", "TPU v6 lite"
QUERY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
CHIPS = {"H200": (H200, "mosaic_gpu"), "v6e": (V6E, "mosaic_tpu")}
CALLS = {"dot_product": (dot_product_attention, (QUERY,) * 3), "softmax": (scaled_masked_softmax, (QUERY,))}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch, unproven):
    monkeypatch.setenv("JAX_ATTN_BWD_CACHE", str(tmp_path))


@pytest.fixture
def told(monkeypatch, caplog):
    """`told()`: what was logged so far; nothing was before."""
    monkeypatch.setattr(records, "_told", set())
    caplog.set_level(logging.WARNING, "jax_attn_bwd")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "jax_attn_bwd"]


@pytest.fixture(params=[("H200", "dot_product"), ("v6e", "softmax")], ids="-".join)
def call(request):
    """A call on a chip that is not here: what `explain` says of its kernel; whether its program has one."""
    platform, family = request.param
    chip = SimpleNamespace(platform=platform, kind=CHIPS[platform][0], name=CHIPS[platform][1])
    function, operands = CALLS[family]

    def program(**options):
        with targets.aimed_at(chip.platform):
            text = str(jax.make_jaxpr(lambda *x: function(*x, **options))(*operands))
        return re.search(r"\bname=(attention|softmax)_(forward|rows)", text) is not None

    reason = lambda: explain(function, *operands, platform=chip.platform)[chip.name]
    return SimpleNamespace(chip=chip, family=family, reason=reason, launches=program)


def keep(kind, family, sizes=None, **kernels):
    """A record: of each kernel its milliseconds by case, or why it failed."""
    timed = {n: {} if isinstance(k, str) else k for n, k in kernels.items()}
    held = {n: {"failed": k if isinstance(k, str) else None, "times": timed[n]} for n, k in kernels.items()}
    cases = {case for times in timed.values() for case in times}
    sizes = sizes or dict.fromkeys(cases, (1000, 100))
    return enable.write(kind, family, {"written": "2026-01-01", "kernels": held, "sizes": sizes})


def is_picked(call):
    """Whether the kernel is picked: `explain` and the program agree."""
    launches = call.launches()
    assert (call.reason() == "ok") == launches
    return launches


# ---------------------------------------------------------------------- without a record


def test_without_a_record_the_portable_path_runs(call):
    assert not is_picked(call)
    assert call.reason() == (
        f"it is not proven on {targets.CHIPS[call.chip.platform][1]}: there is no record; `python -m "
        f"jax_attn_bwd.check --enable {call.family}` proves it there, "
        f"JAX_ATTN_BWD_KERNELS={call.chip.name} picks it unproven"
    )
    assert call.launches(implementation=call.chip.name)


def passed(monkeypatch, name, oldest_jax):
    """The code says that the kernels `name` have passed, on this JAX and later ones."""
    ran = {"ran": "2026-01-01, 0123abc", "oldest_jax": oldest_jax}
    found = tuple(generation._replace(**ran) for generation in targets.GENERATIONS[name])
    monkeypatch.setitem(targets.GENERATIONS, name, found)


def test_a_generation_that_the_code_says_to_have_passed(call, monkeypatch):
    passed(monkeypatch, call.chip.name, jax.__version_info__)
    assert is_picked(call)
    keep(call.chip.kind, call.family, **{call.chip.name: "wrong here"})
    assert not is_picked(call)  # the chip at hand knows better


def test_a_generation_passed_on_the_jax_it_ran_on_and_on_later_ones(call, monkeypatch):
    passed(monkeypatch, call.chip.name, (*jax.__version_info__[:2], jax.__version_info__[2] + 1))
    assert not is_picked(call)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("mosaic_tpu,mosaic_gpu", "ok"),
        ("none", "JAX_ATTN_BWD_KERNELS=none does not name it"),
        ("xla", "JAX_ATTN_BWD_KERNELS=xla does not name it"),
        ("xla, {}", "JAX_ATTN_BWD_KERNELS=xla, {} prefers xla"),
    ],
)
def test_the_environment_goes_before_all(call, monkeypatch, value, reason):
    name = call.chip.name
    keep(call.chip.kind, call.family, **{name: {"a": 1.0}, "xla": {"a": 2.0}})
    monkeypatch.setenv("JAX_ATTN_BWD_KERNELS", value.format(name))
    assert is_picked(call) == (reason == "ok")
    assert call.reason() == reason.format(name)


@pytest.mark.parametrize(("value", "gpu"), [("1", True), ("mosaic_gpu,cudnn", True), ("0", False)])
def test_the_older_variable_is_an_alias_for_gpus(call, monkeypatch, value, gpu):
    monkeypatch.setenv("JAX_ATTN_BWD_GPU_KERNELS", value)
    assert is_picked(call) == (gpu and call.chip.name == "mosaic_gpu")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KERNELS", "mosaic_gpu,fast", "must be none, or some of .*'mosaic_gpu'.*, got 'fast'"),
        ("KERNELS", "none,xla", "must be none, or some of .*, got 'none'"),
        ("GPU_KERNELS", "2", "must be none, or some of .*'mosaic_gpu'.*, got '2'"),
    ],
)
def test_a_variable_that_says_something_else_is_refused(monkeypatch, variable, value, words):
    monkeypatch.setenv(f"JAX_ATTN_BWD_{variable}", value)
    with pytest.raises(ValueError, match=f"JAX_ATTN_BWD_{variable} {words}"):
        explain(scaled_masked_softmax, QUERY, platform="H200")
    assert explain(scaled_masked_softmax, QUERY)["xla"] == "ok"  # it has no kernel to choose


# ---------------------------------------------------------------------- by a record


def test_a_kernel_that_is_proven_and_faster_is_picked(call):
    keep(call.chip.kind, call.family, **{call.chip.name: {"a": 1.0}, "xla": {"a": 2.0}})
    assert is_picked(call)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"a": 2.0}, "it is proven on .*, but slower than xla: 2 ms to 1 ms of xla at the nearest size, a$"),
        ({"a": 1.0}, "it is proven on .*, but slower than xla: 1 ms to 1 ms of xla"),
        ("a: 1.0% wrong", r"it failed on .* \(2026-01-01\): a: 1.0% wrong$"),
        ({}, "it is proven on .*, but was not timed beside xla"),
    ],
    ids=["slower", "as slow", "failed", "not timed"],
)
def test_a_kernel_that_is_not_is_passed_over_and_explain_says_why(call, times, words):
    keep(call.chip.kind, call.family, **{call.chip.name: times, "xla": {"a": 1.0}})
    assert not is_picked(call)
    assert re.match(words, call.reason())


def test_what_adds_in_any_order_is_picked_where_bits_may_vary_and_nothing_that_repeats_is_proven(monkeypatch):
    call = partial(explain, dot_product_attention, *(QUERY,) * 3, platform="H200")
    chosen = lambda sums: call(deterministic_sums=sums)["cudnn"]
    assert chosen(None).startswith(f"it is not proven on {H200}")
    cudnn, xla = {"a": 1.0}, {"a": 3.0}
    keep(H200, "dot_product", cudnn=cudnn, xla=xla)
    assert chosen(True) == "it adds in any order; deterministic_sums=None lets it be picked"
    assert chosen(None) == chosen(False) == "ok"
    keep(H200, "dot_product", cudnn=cudnn, mosaic_gpu={"a": 2.0}, xla=xla)
    assert chosen(None) == "it adds in any order; deterministic_sums=False picks it where it is faster"
    assert call()["mosaic_gpu"] == chosen(False) == "ok"
    keep(H200, "dot_product", cudnn=cudnn, mosaic_gpu={"a": 4.0}, xla=xla)
    assert chosen(None) == "ok"
    keep(H200, "dot_product", cudnn="a: 1.0% wrong")
    assert chosen(None) == f"it failed on {H200} (2026-01-01): a: 1.0% wrong"
    monkeypatch.setenv("JAX_ATTN_BWD_KERNELS", "cudnn")
    assert chosen(True) == "ok"


def test_a_layer_picks_as_the_attention_in_it_does():
    keep(H200, "dot_product", cudnn={"a": 1.0}, xla={"a": 2.0})
    x = jax.ShapeDtypeStruct((1, 256, 64), jnp.bfloat16)
    layer = partial(multi_head_attention, MultiHeadAttentionParams(), num_heads=1)
    call = lambda **options: explain(partial(layer, **options), x, x, x, platform="H200")["cudnn"]
    assert "in any order" in call(deterministic_sums=True)
    assert call() == call(deterministic_sums=False) == "ok"


def choices(name=None):
    """Three implementations on an H200; `name`: what is picked, or `explain` of it."""
    never = lambda *args: None
    kernels = [
        Implementation(n, never, never, "gpu", family="dot_product") for n in ("mosaic_tpu", "mosaic_gpu")
    ]
    return select("operator", (*kernels, Implementation("xla", never, never)), name, None, (QUERY,))


def test_the_fastest_at_the_nearest_size_is_picked():
    near, far = (32768, 256), (2**24, 8192)
    times = {
        "mosaic_tpu": {"near": 1.0, "far": 8.0},
        "mosaic_gpu": {"near": 2.0, "far": 4.0},
        "xla": {"near": 3.0, "far": 6.0},
    }
    keep(H200, "dot_product", {"near": near, "far": far}, **times)
    with targets.aimed_at("H200"):
        assert choices().name == "mosaic_tpu"
        reasons = explain(choices)
    assert reasons == {
        "mosaic_tpu": "ok",
        "mosaic_gpu": "it is proven, but mosaic_tpu is faster: 2 ms to 3 ms of xla at the nearest size, near",
        "xla": "ok",
    }
    keep(H200, "dot_product", {"far": far}, **{name: {"far": t["far"]} for name, t in times.items()})
    with targets.aimed_at("H200"):
        assert choices().name == "mosaic_gpu"


def test_times_of_the_operator_that_is_called_go_before_those_of_another():
    near, far = (32768, 256), (2**24, 8192)
    sizes = {"operator: far": far, "another: near": near, "operators: near": near}
    slow, fast = dict.fromkeys(sizes, 3.0), dict.fromkeys(sizes, 1.0)
    kernel = fast | {"operator: far": 4.0}
    keep(H200, "dot_product", sizes, mosaic_tpu=kernel, xla=slow)
    with targets.aimed_at("H200"):
        assert explain(choices)["mosaic_tpu"].endswith(
            "4 ms to 3 ms of xla at the nearest size, operator: far"
        )
    kernel.pop("operator: far")
    keep(H200, "dot_product", sizes, mosaic_tpu=kernel, xla=slow)
    with targets.aimed_at("H200"):
        assert explain(choices)["mosaic_tpu"] == "ok"  # those of another are better than none


def test_a_kernel_whose_sums_repeat_is_held_against_what_repeats():
    """`"xla"` is faster where it may add in any order; which of the two was asked for tells what counts."""
    case = "multi_scale_deformable_attention: encoder"
    same = case + records.SAME_BITS
    keep(V6E, "deformable", mosaic_tpu={case: 2.0, same: 2.0}, xla={case: 1.0, same: 3.0})
    shapes = (1, 80, 2, 32), (1, 9, 2, 2, 4, 2), (1, 9, 2, 2, 4)
    value, at, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def told(sums):
        call = partial(multi_scale_deformable_attention, deterministic_sums=sums)
        return explain(call, value, ((8, 8), (4, 4)), at, weights, platform="v6e")["mosaic_tpu"]

    assert told(True) == "ok"
    assert told(None) == told(False)
    assert told(None).endswith(f"but slower than xla: 2 ms to 1 ms of xla at the nearest size, {case}")


def test_nearest_counts_doublings_of_the_elements_and_of_the_longest_axis():
    at = records.size_of({"x": jnp.ones((4, 32)), "y": (jnp.ones((2, 64)), None)})
    assert at == (256, 64)
    assert records.size_of(()) == (0, 1)
    assert at.distance(records.Size(1024, 16)) == 4
    assert at.distance(records.Size(0, 64)) == 8


# ---------------------------------------------------------------------- the first call says how


def here(monkeypatch, kind=H200):
    """The chip aimed at is this machine's."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    monkeypatch.setattr(targets, "_default_device", lambda: device)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    )


def test_the_first_call_on_a_chip_says_once_how_to_prove_and_enable(monkeypatch, told):
    with here(monkeypatch):
        explain(choices)
        assert told() == []
        for _ in range(2):
            assert choices().name == "xla"
    (words,) = told()
    assert f"on this {H200}, for its kernels are not proven there (there is no record). `" in words
    assert "`python -m jax_attn_bwd.check --enable` proves them" in words


def test_nothing_is_said_where_nothing_could_be_done(monkeypatch, told):
    with targets.aimed_at("H200"):  # compiled for a chip elsewhere
        choices()
    with here(monkeypatch):
        choices("mosaic_gpu")
        monkeypatch.setenv("JAX_ATTN_BWD_KERNELS", "none")
        choices()
        monkeypatch.delenv("JAX_ATTN_BWD_KERNELS")
        keep(H200, "dot_product", mosaic_tpu="hangs", mosaic_gpu={"a": 2.0}, xla={"a": 1.0})
        assert choices().name == "xla"
    assert told() == []


# ---------------------------------------------------------------------- explain elsewhere


def test_explain_answers_for_a_chip_that_is_not_here():
    for chip, (platform, kind) in targets.CHIPS.items():
        got = explain(scaled_masked_softmax, QUERY, platform=chip)
        assert repr(got).startswith(f"scaled_masked_softmax on {kind}\n")
        assert ("mosaic_gpu" in got.refused) == (chip not in ("H100", "H200")), platform
    assert "not NVIDIA L40S" in explain(scaled_masked_softmax, QUERY, platform="NVIDIA L40S")["mosaic_gpu"]
    with pytest.raises(ValueError, match=r"platform must be one of .*'H100'.*, got 'h100'"):
        explain(scaled_masked_softmax, QUERY, platform="h100")


def test_explain_elsewhere_of_arrays_on_a_mesh_here():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((2, 256, 2, 64), jnp.bfloat16), jax.NamedSharding(mesh, jax.P("b")))
    call = lambda x: dot_product_attention(x, x, x * jnp.ones((64,), x.dtype)[None, None, None])
    assert "not proven on NVIDIA H200" in explain(call, x, platform="H200")["mosaic_gpu"]
    with jax.set_mesh(mesh):
        assert "not proven on NVIDIA H200" in explain(call, x, platform="H200")["mosaic_gpu"]


def test_explained_is_a_table_to_read_and_a_dict_to_programs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    got = explain(scaled_masked_softmax, QUERY, platform="H200")
    assert json.loads(json.dumps(got)) == {**got} == got
    lines = str(got).splitlines()
    assert lines[0] == f"scaled_masked_softmax on {H200}"
    assert lines[1] == "  mosaic_tpu  cannot run  it is a tpu kernel and the target platform is gpu"
    assert lines[2].startswith("  mosaic_gpu  by name     it is not proven on NVIDIA H200: ")
    assert lines[-1] == "  xla         picked      whole rows"
    assert max(map(len, lines)) <= 80


# ---------------------------------------------------------------------- what has run


@pytest.mark.parametrize("chip", ["H100", "H200", "A100", "B200", "v6e"])
def test_kernels_of_softmax_and_dense_attention_have_run_on_hopper(chip, monkeypatch):
    monkeypatch.undo()  # of what the other tests are told
    calls = [(scaled_masked_softmax, QUERY), (dot_product_attention, QUERY, QUERY, QUERY)]
    picked = [explain(*call, platform=chip)["mosaic_gpu"] == "ok" for call in calls]
    assert picked == [chip.startswith("H") and jax.__version_info__ >= (0, 11, 2)] * 2
