"""Full compilation for NVIDIA chips and TPUs that are not here, within budgets; one process per chip.

It needs the packages of the `compile` and `compile-tpu` extras, and skips without them.
"""

import json
import re
import subprocess
import sys

import jax
import pytest
from helpers import thorough

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Case
from jax_attn_bwd.bench.compile_only import devices, gpu, programs

TARGETS = {"xla": ("H200", "B200"), "mosaic_gpu": tuple(devices.NVIDIA), "mosaic_tpu": tuple(devices.TPU)}
SAMPLE = {  # an H100 runs the very code of an H200: a case shows that it is accepted there
    "dot_product_attention": ("H=128 causal",),
    "scaled_masked_softmax": ("width 4096 bfloat16",),
    "multi_scale_deformable_attention": ("encoder, B2, 100x167 to 13x21",),
    **dict.fromkeys(gpu.GRAPH, ("compiled 4 x 16 everything", "compiled 8 x 64 everything")),
}


def operators(*rest):
    """All of them as parameters; those named in `rest` are left to the thorough tier."""
    return [pytest.param(o, id=o.name, marks=thorough if o.name in rest else ()) for o in ops.discover()]


def matrix():
    """(implementation, target, operator) of everything registered."""
    return [
        pytest.param(implementation, target, operator.name, id=f"{operator.name}[{implementation}]-{target}")
        for implementation, targets in TARGETS.items()
        for target in targets
        for operator in programs.registered(implementation)
        if programs.cases(operator, implementation, target)
    ]


@thorough
@pytest.mark.parametrize(("implementation", "target", "operator"), matrix())
def test_compiles_within_budgets(implementation, target, operator, tmp_path):
    if reason := devices.missing(target, sass=implementation != "xla"):
        pytest.skip(reason)
    out = tmp_path / "rows.json"
    program = [sys.executable, "-m", "jax_attn_bwd.bench.compile_only", "--target", target]
    program += ["--implementation", implementation, "--operator", operator, "--out", str(out)]
    only = SAMPLE.get(operator, ()) if implementation == "mosaic_gpu" and target != "H200" else ()
    done = subprocess.run(
        [*program, *(["--case", *only] if only else [])], capture_output=True, text=True, check=False
    )
    assert out.exists(), f"ended with {done.returncode}: {done.stderr[-3000:]}"
    rows = json.loads(out.read_text())["programs"]
    assert not [sentence for row in rows for sentence in row["violations"]]
    assert done.returncode == 0
    (described,) = programs.registered(implementation, (operator,))
    wanted = {
        (c.name, d)
        for c in programs.cases(described, implementation, target)
        for d in programs.directions(described, implementation, target)
        if not only or c.name in only
    }
    assert {(row["case"], row["direction"]) for row in rows} == wanted
    assert len(rows) == len(wanted) > 0
    compiled = sum(len(row["kernels"]) for row in rows)
    print(f"{len(rows)} programs, {compiled} kernels compiled")
    if implementation == "xla":
        return
    if implementation == "mosaic_tpu":
        for row in rows:
            found = {re.sub(r"_\d+x\d+.*", "", kernel["name"]) for kernel in row["kernels"]}
            assert sum("forward" in name for name in found) == 1, row["case"]
            assert found - {"attention_forward", "softmax_forward", "deformable_forward"}, row["case"]
        return
    for case in {row["case"] for row in rows}:
        if len(programs.directions(described, implementation, target)) == 1:
            assert all(row["kernels"] for row in rows), case
            continue
        forward, gradients = (
            {
                kernel["name"]
                for row in rows
                if (row["case"], row["direction"]) == (case, direction)
                for kernel in row["kernels"]
            }
            for direction in programs.DIRECTIONS
        )
        assert forward, case
        assert gradients - forward, f"{case}: the gradients have no kernel of their own"


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_attn_bwd import dot_product_attention, multi_scale_deformable_attention, scaled_masked_softmax
from jax_attn_bwd.bench.compile_only.devices import devices

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
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    none = "True 0 0 0 0 0"
    assert lines == [none, none, "True 1 0 0 0 0", none, none], done.stderr[-3000:]


def test_the_matrix_covers_every_kernel_that_is_registered():
    kinds = {i.name for o in ops.discover() for i in o.implementations if i.platform is not None}
    assert kinds <= set(TARGETS)
    assert {p.values[0] for p in matrix()} >= kinds | {"xla"}
    assert {p.values[2] for p in matrix()} == {o.name for o in ops.discover()}


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
        arrays, shapes = case.arrays("bfloat16"), case.shapes("bfloat16")
        assert {n: (x.shape, x.dtype) for n, x in arrays.items()} == {
            n: (x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for n, x in shapes.items()
        }, case.name


def test_a_case_far_beyond_any_memory_has_shapes():
    shape = (1 << 12, 1 << 20, 1 << 10)
    case = Case("huge", lambda rng: {"x": rng.normal(0, 3, shape), "keep": rng.random(3) < 0.5})
    x, keep = case.shapes().values()
    assert (x.shape, x.dtype, keep.shape, keep.dtype) == (shape, "bfloat16", (3,), bool)


@pytest.mark.parametrize("target", devices.NVIDIA)
def test_every_chip_has_its_description_in_the_package(target):
    from importlib import resources

    folder = resources.files("jax_attn_bwd.bench.compile_only") / "targets"
    assert "gpu_device_info" in (folder / f"{devices.NVIDIA[target]}.txtpb").read_text()
    assert "Apache License" in (folder / "SOURCE.md").read_text()
