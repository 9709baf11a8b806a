"""Full compilation for NVIDIA chips and TPUs that are not here, within budgets; one process per chip.

It needs the packages of the `compile` and `compile-tpu` extras, and skips without them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from cases import shapes
from compile_only import devices, programs
from helpers import OPERATORS, thorough

from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.cases import Case

TESTS = Path(__file__).parents[1]
TARGETS = {"mosaic_gpu": ("H200", "H100", "B200", "A100"), "mosaic_tpu": tuple(devices.TPU), "xla": ("H200",)}
# cases that an H100 compiles too: it runs the very code of an H200, and they show that it accepts it
ON_AN_H100 = ("H=128 causal, any order", "width 4096 float16", "bfloat16, D=256")


def operators(*rest):
    """All of them as parameters; those named in `rest` are left to the thorough tier."""
    return [pytest.param(o, id=o.name, marks=thorough if o.name in rest else ()) for o in OPERATORS]


def compiled_here(implementation, target):
    """(operator, case) of what is compiled for a chip; for the pages of `tests/bench/results` it is more."""
    return [
        (operator, case)
        for operator in programs.registered(implementation)
        for case in programs.cases(operator, implementation, target)
        if implementation == "xla" or "table" not in case.tags
        if target != "H100" or case.name in ON_AN_H100
    ]


def run_python(*arguments, check=True):
    """A process of its own, which finds compile_only, too."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment)


@thorough
@pytest.mark.parametrize(
    ("implementation", "target"), [(name, chip) for name, chips in TARGETS.items() for chip in chips]
)
def test_compiles_within_budgets(implementation, target, tmp_path):
    if reason := devices.missing(target, sass=implementation != "xla"):
        pytest.skip(reason)
    found = compiled_here(implementation, target)
    out = tmp_path / "rows.json"
    program = ["-m", "compile_only", "--target", target]
    program += ["--implementation", implementation, "--out", str(out)]
    program += ["--operator", *sorted({operator.name for operator, _ in found})]
    program += ["--case", *sorted({case.name for _, case in found})]
    done = run_python(*program, check=False)
    assert out.exists(), f"ended with {done.returncode}: {done.stderr[-3000:]}"
    rows = json.loads(out.read_text())["programs"]
    assert not [sentence for row in rows for sentence in row["violations"]]
    assert done.returncode == 0
    wanted = {
        (operator.name, case.name, direction)
        for operator, case in found
        for direction in programs.directions(operator, implementation, target)
    }
    assert {(row["operator"], row["case"], row["direction"]) for row in rows} == wanted
    assert len(rows) == len(wanted) > 0
    kernels = {
        (row["operator"], row["case"], row["direction"]): {kernel["name"] for kernel in row["kernels"]}
        for row in rows
    }
    print(f"{len(rows)} programs, {sum(map(len, kernels.values()))} kernels compiled")
    if implementation == "xla":
        return
    for operator, case, _ in wanted:
        gradients = kernels[operator, case, "gradients"]
        if implementation == "mosaic_tpu":  # the program of the gradients holds the forward, too
            forward = {name for name in gradients if "forward" in name}
            assert len({re.sub(r"_\d+x\d+.*", "", name) for name in forward}) == 1, case
        else:
            forward = kernels.get((operator, case, "forward"), set())
            assert forward or (operator, case, "forward") not in wanted, case
        assert gradients - forward, f"{operator} {case}: the gradients have no kernel of their own"


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_attn_bwd import dot_product_attention, multi_scale_deformable_attention, scaled_masked_softmax
from compile_only.devices import devices

mesh = Mesh(np.array(devices("H200", 4)).reshape(2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)

def array(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

def count(function, *arrays):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile().as_text()
    kernels = len(re.findall("custom-call.*mosaic_gpu", text))
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    print(kernels > 0, *(len(re.findall(rf" {name}(?:-start)?\\(", text)) for name in names))

def attention(q, k, v, dout, bias=None, sink=None):
    call = lambda q, k, v, bias, sink: dot_product_attention(
        q, k, v, bias, sink=sink, is_causal=True, implementation="mosaic_gpu")
    out, pull = jax.vjp(call, q, k, v, bias, sink)
    return out, pull(dout)

def softmax(x, dy):
    y, pull = jax.vjp(lambda x: scaled_masked_softmax(x, implementation="mosaic_gpu"), x)
    return y, pull(dy)

def deformable(value, points, weights, dout):
    call = lambda *operands: multi_scale_deformable_attention(
        operands[0], ((8, 8), (4, 4)), *operands[1:], implementation="mosaic_gpu")
    out, pull = jax.vjp(call, value, points, weights)
    return out, pull(dout)

q = array((4, 1000, 8, 128), jnp.bfloat16, "b", None, "n", None)
k = array((4, 1000, 4, 128), jnp.bfloat16, "b", None, "n", None)
bias = array((1, 8, 1, 1000), jnp.float32, None, "n")
sink = array((8,), jnp.float32, "n")
x = array((8, 16, 1000), jnp.float32, "b", "n")
value = array((4, 80, 8, 32), jnp.bfloat16, "b", None, "n")
points = array((4, 100, 8, 2, 4, 2), jnp.float32, "b", None, "n")
weights = array((4, 100, 8, 2, 4), jnp.float32, "b", None, "n")
dout = array((4, 100, 256), jnp.bfloat16, "b", None, "n")
spec = P("b", None, "n")
grads = (spec, spec, spec, None, None)
local = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, grads))
count(attention, q, k, k, q)
count(local, q, k, k, q)
count(attention, q, k, k, q, bias, sink)
count(softmax, x, x)
count(deformable, value, points, weights, dout)
"""


@thorough
def test_sharded_kernels_compile_within_budgets_of_collectives():
    """On an Explicit mesh and in `shard_map`: one all-reduce, of what was broadcast over the batch."""
    if reason := devices.missing("H200"):
        pytest.skip(reason)
    done = run_python("-c", SHARDED, check=False)
    lines = done.stdout.splitlines()
    none = "True 0 0 0 0 0"
    assert lines == [none, none, "True 1 0 0 0 0", none, none], done.stderr[-3000:]


ROUNDED = """
import jax, jax.numpy as jnp
from jax_attn_bwd._core.fusion import rounded
from compile_only import devices

lost = lambda x: x - rounded(x, jnp.bfloat16).astype(x.dtype)
(device,) = devices.devices("H200")
print(devices.lower(lost, (jax.ShapeDtypeStruct((8, 128), "float32"),), device).compile().as_text())
"""


@thorough
def test_what_rounding_takes_is_within_budgets_of_a_gpu():
    """XLA:GPU takes a conversion there and back for nothing: it would subtract the number from itself."""
    if reason := devices.missing("H200"):
        pytest.skip(reason)
    done = run_python("-c", ROUNDED)
    ((x, y),) = re.findall(r" subtract\(%(\S+), %(\S+)\)", done.stdout)
    assert x != y


BESIDE_PLAIN = """
import sys
from compile_only import devices, traffic_table

(device,) = devices.devices("H200")
pairs = *traffic_table.dense((2, 1024, 8, 64)), *traffic_table.others()
(pair,) = [pair for pair in pairs if pair.name.startswith(sys.argv[1])]
for call in (pair.ours, pair.plain):
    figures = traffic_table.figures(call, pair, device)
    print(figures.traffic.bytes, figures.temporary_bytes)
"""


@thorough
@pytest.mark.parametrize("name", ["dot_product_attention, bias", "multi_scale_deformable_attention"])
def test_traffic_and_memory_are_within_budgets_of_a_gpu(name):
    """Dense attention in tiles would move half as much again, and strips that widen the bias for each reader
    a tenth; samples summed so that XLA:GPU does not take the gathers in would write a row for each: 90 MB.
    """
    if reason := devices.missing("H200"):
        pytest.skip(reason)
    done = run_python("-c", BESIDE_PLAIN, name)
    ours, plain = ([int(x) for x in line.split()] for line in done.stdout.splitlines()[-2:])
    assert ours[0] <= plain[0]
    assert ours[1] <= plain[1]


STEP_OF_A_GRAPH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from compile_only import compiling, devices, traffic
import jax_attn_bwd
from jax_attn_bwd._core import targets

name, edges, capacity, implementation = sys.argv[1:]
(device,), rng = devices.devices("H100"), np.random.default_rng(0)
share = (np.arange(2708) + 1.0) ** (-0.7 if edges == "hubs" else 0)
src, dst = rng.choice(2708, (2, 13_000), p=share / share.sum())
with targets.aimed_at("H100"):
    graph = jax_attn_bwd.BipartiteCSC.from_coo(src, dst, 2708, 2708, capacity=int(capacity) or None)
types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), graph)
size = 128 if name == "graph_attention" else 64
x, a = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2708, 64), (size,)))

def step(graph, dout, *arrays):
    function = getattr(jax_attn_bwd, name)
    call = lambda *arrays: function(graph, *arrays, num_heads=8, implementation=implementation)
    out, pullback = jax.vjp(call, *arrays)
    return out, pullback(dout)

compiled = devices.lower(step, (types, x, x, x, a), device).compile(compiling.WITHOUT_GPU)
print(traffic.of(compiled.as_text()).launches)
"""


@thorough
@pytest.mark.parametrize(
    ("name", "edges", "capacity", "implementation", "limit"),
    [
        ("graph_attention_v2", "even", 0, "xla", 19),
        ("graph_attention_v2", "hubs", 0, "xla", 20),
        ("graph_attention", "even", 14_000, "mosaic_gpu", 21),
    ],
)
def test_launches_of_a_small_graph_are_within_budgets_of_a_gpu(name, edges, capacity, implementation, limit):
    """What a step has of its graph alone is in the graph, and a sum takes two launches, with hubs, too."""
    if reason := devices.missing("H100"):
        pytest.skip(reason)
    step = run_python("-c", STEP_OF_A_GRAPH, name, edges, str(capacity), implementation)
    assert int(step.stdout.splitlines()[-1]) <= limit


STEP_OF_A_DELTA_RULE = """
import jax, jax.numpy as jnp
from compile_only import compiling, devices, traffic
from jax_attn_bwd import gated_delta_rule
from jax_attn_bwd._core import mosaic_gpu

def launch(body, name, *, out_type, **_):
    # in the place of a kernel, which takes long to compile: a call that the compiler knows nothing of
    leaves, structure = jax.tree.flatten(out_type)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    call = jax.ffi.ffi_call("cu_lu_pivots_to_permutation", types)
    return lambda *operands: structure.unflatten(call(*jax.tree.leaves(operands), name=name))

mosaic_gpu.launch = launch
rows, gates = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096, 8, 128), (1, 4096, 8)))

def step(dout, *arrays):
    call = lambda *x: gated_delta_rule(*x, l2_norm_epsilon=1e-6, implementation="mosaic_gpu")
    out, pullback = jax.vjp(call, *arrays)
    return out, pullback(dout)

(device,) = devices.devices("H100")
compiled = devices.lower(step, (*[rows] * 4, gates, gates), device).compile(compiling.WITHOUT_GPU)
print(traffic.of(compiled.as_text()).launches)
"""


@thorough
def test_launches_of_a_delta_rule_on_a_hopper():
    """Eight kernels, three launches before them and one behind them."""
    if reason := devices.missing("H100") or mosaic_gpu.too_old():
        pytest.skip(reason)
    assert int(run_python("-c", STEP_OF_A_DELTA_RULE).stdout.splitlines()[-1]) == 12


def test_every_kernel_that_is_registered_is_compiled_for_each_of_its_chips():
    kernels = {(o.name, i.name) for o in OPERATORS for i in o.implementations if i.platform is not None}
    kernels = {(o, name) for o, name in kernels if name != "cudnn"}  # whose plans are made on a GPU
    for name, chips in TARGETS.items():
        for chip in chips:
            found = {(operator.name, case.name) for operator, case in compiled_here(name, chip)}
            compiled, names = map(set, zip(*found, strict=True))
            registered = {
                (o.name, c.name) for o in programs.registered(name) for c in programs.cases(o, name, chip)
            }
            assert compiled == {operator for operator, _ in registered} or chip == "H100", chip
            # the command takes the names of operators and of cases apart
            assert found == {(operator, case) for operator, case in registered if case in names}, chip
    assert {name for _, name in kernels} | {"xla"} == set(TARGETS)
    on_first = {(o.name, name) for name, chips in TARGETS.items() for o, _ in compiled_here(name, chips[0])}
    assert on_first >= kernels | {(o.name, "xla") for o in OPERATORS}


@pytest.mark.parametrize("direction", ["forward", pytest.param("gradients", marks=thorough)])
@pytest.mark.parametrize("operator", operators("dot_product_attention"))
def test_every_compiled_case_is_a_call_that_the_operator_accepts(operator, direction):
    tags = ("compile", "xla", "mosaic_gpu", *devices.TPU)
    found = list(operator.tagged(*tags))
    assert len({case.name for case in found}) == len(found) > 0
    for case in found:
        function, arguments = programs.function(operator, case, direction, "xla")
        results = jax.eval_shape(function, *arguments)
        leaves = jax.tree.leaves(results)
        assert len(leaves) >= len(operator.outputs) + (direction == "gradients")


@pytest.mark.parametrize(
    "operator", operators("multi_head_attention", "multi_scale_deformable_attention", "graph_attention")
)
def test_a_case_tells_the_types_of_its_arrays_without_making_them(operator):
    small = [*operator.tagged("ci", "edge", "second", "quick")]
    for case in small:
        arrays, types = case.arrays("bfloat16"), shapes(case, "bfloat16")
        assert {n: (x.shape, x.dtype) for n, x in arrays.items()} == {
            n: (x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for n, x in types.items()
        }, case.name


def test_a_case_far_beyond_any_memory_has_shapes():
    shape = (1 << 12, 1 << 20, 1 << 10)
    case = Case("huge", lambda rng: {"x": rng.normal(0, 3, shape), "keep": rng.random(3) < 0.5})
    x, keep = shapes(case).values()
    assert (x.shape, x.dtype, keep.shape, keep.dtype) == (shape, "bfloat16", (3,), bool)


@pytest.mark.parametrize("target", devices.NVIDIA)
def test_every_chip_has_its_description_in_the_package(target):
    from importlib import resources

    folder = resources.files("compile_only") / "targets"
    assert "gpu_device_info" in (folder / f"{devices.NVIDIA[target]}.txtpb").read_text()
    assert "Apache License" in (folder / "SOURCE.md").read_text()
