"""Every operator sharded over 8 virtual devices: same numbers, and no more collectives than promised."""

import collections
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    QUICK,
    assert_close,
    case_params,
    cotangents,
    differentiated,
    first_of_each,
    firsts,
    thorough,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn_bwd
from jax_attn_bwd._core.sharding import on_shards

COLLECTIVE = re.compile(
    r"= .*? (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
CASE = ("operator", "implementation", "case")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {  # where one axis is of size 1: each axis once, and each type
    "auto-BxN": (AUTO, (2, 4)),
    "explicit-BxN": (EXPLICIT, (2, 4)),
    "auto-N": (AUTO, (1, 4)),
    "explicit-B": (EXPLICIT, (4, 1)),
}
SHARD = case_params("shard")
every_shard_case = pytest.mark.parametrize(CASE, first_of_each(SHARD))
FIRST = {param.id for param in firsts(SHARD)}
ON_MESHES = [  # the first case of each on all meshes, the others where both axes are split, types in turn
    pytest.param(
        *param.values,
        *mesh,
        id=f"{param.id}-{name}",
        marks=[*param.marks, *[thorough] * (name != "explicit-BxN" or param.id not in FIRST)],
    )
    for number, param in enumerate(SHARD)
    for name, mesh in MESHES.items()
    if param.id in FIRST or name == ("explicit-BxN", "auto-BxN")[number % 2]
]


def takes_forward_mode(operator) -> bool:
    return "forward_mode" in inspect.signature(getattr(jax_attn_bwd, operator.name)).parameters


def collectives(compiled) -> dict[str, int]:
    """How many collectives of each kind the program holds."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def budget(operator, case, arrays, names, shape) -> int:
    """One for each gradient that was broadcast over a split axis, and each output that is a sum over split
    heads; one for tile bounds; of what lies whole on each device one for each split axis; else none.
    """
    split = {axis for axis, n in zip("bh", shape, strict=True) if n > 1}
    summed = [name for name in names if split - set(spec(operator, name, arrays[name]))]
    summed = [name for name in summed if name not in operator.whole]
    summed += [name for name in names if name in operator.whole for _ in split]
    outputs = len(operator.sums_over_heads) if "h" in split else 0
    return len(summed) + outputs + ("bounds" in case.tags and "b" in split)


def spec(operator, name, x, split="BN") -> P:
    """Batch axes over "b", head axes over "h"; axes of size 1 are not split."""
    letters = operator.axes[name][-x.ndim :] if x.ndim else ""
    mesh_axis = {letter: {"B": "b", "N": "h"}[letter] for letter in split}
    return P(*(mesh_axis.get(c) if n > 1 else None for c, n in zip(letters, x.shape, strict=True)))


@functools.cache
def on_one_device(operator, implementation, case):
    """(arrays, differentiated names, cotangents, step, (outputs, gradients)); cotangents of what is not
    finite are 0.
    """
    arrays = case.arrays(np.float64)
    options = {**case.options, "implementation": implementation}
    names = tuple(differentiated(operator, arrays))

    def step(arrays, cts):
        def call(inputs):
            return operator.call(**{**arrays, **inputs}, **options)

        out, pullback = jax.vjp(call, {name: arrays[name] for name in names})
        return dict(zip(operator.outputs, out, strict=True)), pullback(cts)[0]

    outputs = jax.eval_shape(lambda: operator.call(**arrays, **options))
    cts = cotangents(operator, outputs)
    single = jax.jit(step, compiler_options=QUICK)
    outputs, _ = single(arrays, cts)
    cts = tuple(
        jnp.where(jnp.isfinite(outputs[name]), ct, 0) for name, ct in zip(operator.outputs, cts, strict=True)
    )
    return arrays, names, cts, step, single(arrays, cts)


def put(operator, mesh, name, x):
    """The operand on the devices that its axes are split over."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or name not in operator.axes:
        return x
    whole = P(*(None,) * x.ndim)
    return jax.device_put(
        x, NamedSharding(mesh, whole if name in operator.whole else spec(operator, name, x))
    )


@pytest.mark.parametrize((*CASE, "axis_type", "shape"), ON_MESHES)
def test_jit_with_sharded_operands(operator, implementation, case, axis_type, shape):
    arrays, names, cts, step, expected = on_one_device(operator, implementation, case)
    mesh = jax.make_mesh(shape, ("b", "h"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        placed = {name: put(operator, mesh, name, x) for name, x in arrays.items()}
        placed_cts = tuple(put(operator, mesh, n, ct) for n, ct in zip(operator.outputs, cts, strict=True))
        compiled = jax.jit(step, compiler_options=QUICK).lower(placed, placed_cts).compile()
        out, gradients = compiled(placed, placed_cts)

    for name in operator.outputs:
        assert_close(out[name], expected[0][name], 1e-12, name)
    for name in names:
        assert_close(gradients[name], expected[1][name], 1e-12, name)
        if axis_type == AxisType.Explicit:
            assert gradients[name].sharding.spec == placed[name].sharding.spec, name
    for name in operator.outputs:
        if any(mesh.shape[axis] > 1 for axis in spec(operator, name, out[name]) if axis):
            assert not out[name].sharding.is_fully_replicated, name
    counted = collectives(compiled)
    assert sum(counted.values()) <= budget(operator, case, arrays, names, shape), counted


@pytest.mark.parametrize(
    CASE,
    [pytest.param(*p.values, id=p.id, marks=[*p.marks, *[thorough] * (p.id not in FIRST)]) for p in SHARD],
)
def test_explicit_mesh_of_one_device(operator, implementation, case, one_device):
    """There axes are named, though nothing is split: what one CPU does may not lose them."""
    arrays, names, cts, step, expected = on_one_device(operator, implementation, case)
    mesh = jax.make_mesh((1, 1), ("b", "h"), devices=jax.devices()[:1], axis_types=(EXPLICIT,) * 2)
    with jax.set_mesh(mesh):
        placed = {name: put(operator, mesh, name, x) for name, x in arrays.items()}
        placed_cts = tuple(put(operator, mesh, n, ct) for n, ct in zip(operator.outputs, cts, strict=True))
        out, gradients = jax.jit(step, compiler_options=QUICK)(placed, placed_cts)
    for name in operator.outputs:
        assert_close(out[name], expected[0][name], 1e-12, name)
    for name in names:
        assert_close(gradients[name], expected[1][name], 1e-12, name)
        assert gradients[name].sharding.spec == placed[name].sharding.spec, name


@thorough
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize(CASE, [p for p in SHARD if p.id in FIRST and takes_forward_mode(p.values[0])])
def test_tangents_with_sharded_operands(operator, implementation, case, axis_type):
    """Compiled ahead of time."""
    arrays, names, *_ = on_one_device(operator, implementation, case)
    options = {**case.options, "implementation": implementation, "forward_mode": True}
    rng = np.random.default_rng(7)
    along = {name: jnp.asarray(rng.standard_normal(arrays[name].shape)) for name in names}

    def step(arrays, along):
        call = lambda inputs: operator.call(**{**arrays, **inputs}, **options)
        return jax.jvp(call, ({name: arrays[name] for name in names},), (along,))[1]

    expected = jax.jit(step, compiler_options=QUICK)(arrays, along)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        placed = {name: put(operator, mesh, name, x) for name, x in arrays.items()}
        placed_along = {name: put(operator, mesh, name, x) for name, x in along.items()}
        compiled = jax.jit(step, compiler_options=QUICK).lower(placed, placed_along).compile()
        got = compiled(placed, placed_along)
    for name, x, y in zip(operator.outputs, got, expected, strict=True):
        assert y.any() or not y.size, name
        assert_close(x, y, 1e-12, name)


@thorough
@every_shard_case
def test_shard_map_with_checked_replication(operator, implementation, case):
    arrays, names, cts, step, expected = on_one_device(operator, implementation, case)
    if case.options.get("dropout_rate"):
        arrays = {**arrays, "dropout_offset": None}
    split = "B" if operator.sums_over_heads else "BN"  # the sum over shards of heads is the caller's
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)

    def local(arrays, cts):
        if "dropout_offset" in arrays:  # a shard does not know where it lies: the caller tells it
            batch, heads = arrays["query"].shape[0], arrays["query"].shape[2]
            head = jax.lax.axis_index("h") * heads if "N" in split else 0
            offset = (jax.lax.axis_index("b") * batch, head, 0, 0)
            arrays = {**arrays, "dropout_offset": offset}
        return step(arrays, cts)

    specs = {
        name: P() if name not in operator.axes or x is None else spec(operator, name, x, split)
        for name, x in arrays.items()
    }
    cts_specs = tuple(spec(operator, n, ct, split) for n, ct in zip(operator.outputs, cts, strict=True))
    out_specs = (dict(zip(operator.outputs, cts_specs, strict=True)), {n: specs[n] for n in names})
    sharded = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, cts_specs), out_specs=out_specs, check_vma=True),
        compiler_options=QUICK,
    )
    compiled = sharded.lower(arrays, cts).compile()
    out, gradients = compiled(arrays, cts)
    for name in operator.outputs:
        assert_close(out[name], expected[0][name], 1e-12, name)
    for name in names:
        assert_close(gradients[name], expected[1][name], 1e-12, name)
    counted = collectives(compiled)
    axes = {"b", "h"} if "N" in split else {"b"}
    summed = [name for name in names if axes - set(specs[name])]
    assert sum(counted.values()) <= len(summed), counted


def test_other_operands_may_be_sharded_otherwise_on_an_explicit_mesh():
    """A sink, bias or length that lies otherwise than the query is resharded, and its gradient back."""
    dense = next(o for o in OPERATORS if o.name == "dot_product_attention")
    rng = np.random.default_rng(0)
    arrays = {n: jnp.asarray(rng.standard_normal((4, 6, 8, 8))) for n in ("query", "key", "value")}
    arrays |= {
        "sink": jnp.asarray(rng.standard_normal(8)),
        "bias": jnp.asarray(rng.standard_normal((4, 1, 6, 6))),
    }
    lengths = jnp.asarray([1, 2, 3, 6])

    def gradients(inputs, lengths):
        def loss(inputs):
            out, lse = dense.call(**inputs, key_value_seq_lengths=lengths)
            return (jnp.sin(out)).sum() + lse.sum()

        return jax.grad(loss)(inputs)

    expected = gradients(arrays, lengths)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = {
            "query": P("b", None, "h"),
            "key": P("b", None, "h"),
            "value": P("b", None, "h"),
            "sink": P("b"),
            "bias": P(None, None, "b"),
        }
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
        got = gradients(placed, jax.device_put(lengths, NamedSharding(mesh, P("h"))))
    for name in arrays:
        assert_close(got[name], expected[name], 1e-12, name)
        assert got[name].sharding.is_equivalent_to(placed[name].sharding, got[name].ndim), name


def test_what_lies_over_two_mesh_axes_is_summed_over_the_third_alone():
    """Of what each device computes of its own shards."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    rows, columns = P(("a", "b"), None), P(("a", "b"), "c")
    run = on_shards(lambda x: x.sum(1, keepdims=True), mesh.abstract_mesh, (columns,), rows, mesh.axis_names)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)))
    with jax.set_mesh(mesh):
        got = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, columns)))
    assert_close(got, x.sum(1, keepdims=True), 1e-14)
