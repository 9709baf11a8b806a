"""Deformable attention with split queries against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.parallel import sharded_multi_scale_deformable_attention

LEVELS = ((3, 4), (2, 3), (1, 2))  # 20 pixels
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def arrays_of(rng, batch=2, queries=16, heads=2, size=3, points=2):
    shape = (batch, queries, heads, len(LEVELS), points)
    return {
        "value": rng.standard_normal((batch, 20, heads, size)),
        "sampling_locations": rng.uniform(-0.1, 1.1, (*shape, 2)),
        "attention_weights": rng.standard_normal(shape),
    }


def maps(value):
    """One feature map for each level."""
    ends = np.cumsum([height * width for height, width in LEVELS])[:-1]
    parts = zip(jnp.split(value, ends, axis=1), LEVELS, strict=True)
    return [x.reshape(x.shape[0], *level, *x.shape[2:]) for x, level in parts]


def sharded(mesh, gathered, arrays, axis="queries", **options):
    call = functools.partial(sharded_multi_scale_deformable_attention, mesh=mesh, axis=axis)
    return call(spatial_shapes=LEVELS, gather_value=gathered, normalize="softmax", **arrays, **options)


@thorough
@pytest.mark.parametrize(("axis_type", "gathered"), [(AUTO, False), (EXPLICIT, True)])
def test_tangents_are_those_on_one_device(rng, axis_type, gathered):
    mesh = jax.make_mesh((4,), ("queries",), axis_types=(axis_type,))
    arrays, along = arrays_of(rng), arrays_of(rng)
    single = functools.partial(
        multi_scale_deformable_attention, spatial_shapes=LEVELS, normalize="softmax", forward_mode=True
    )
    over = functools.partial(sharded, mesh, gathered, forward_mode=True)
    tangent = lambda call: jax.jit(lambda x, dx: jax.jvp(call, (x,), (dx,)), compiler_options=QUICK)
    split, copies = NamedSharding(mesh, P(None, "queries")), NamedSharding(mesh, P())
    place = lambda name: split if gathered or name != "value" else copies
    put = lambda tree: {name: jax.device_put(x, place(name)) for name, x in tree.items()}
    got = tangent(over)(put(arrays), put(along))
    expected = tangent(lambda arrays: single(**arrays))(arrays, along)
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, 1e-12)


@pytest.mark.parametrize(
    ("axis_type", "gathered", "form"),
    [
        (AUTO, False, "maps"),
        (EXPLICIT, True, "padded"),
        pytest.param(EXPLICIT, False, "joined", marks=thorough),
        pytest.param(AUTO, True, "padded", marks=thorough),
        pytest.param(AUTO, False, "joined", marks=thorough),
    ],
)
def test_values_gradients_and_one_exchange(rng, axis_type, gathered, form):
    mesh = jax.make_mesh((8,), ("queries",), axis_types=(axis_type,))
    arrays, ct = arrays_of(rng), rng.standard_normal((2, 16, 6))

    def single(arrays):
        return multi_scale_deformable_attention(spatial_shapes=LEVELS, normalize="softmax", **arrays)

    def both(function):
        def step(arrays, ct):
            out, pullback = jax.vjp(function, arrays)
            return out, pullback(ct)[0]

        return jax.jit(step, compiler_options=QUICK)

    out, gradients = both(single)(arrays, ct)
    given = dict(arrays)
    if form == "padded":  # what lies past the pixels is not read
        given["value"] = np.pad(arrays["value"], ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=np.nan)
    split = NamedSharding(mesh, P(None, "queries"))
    copies = NamedSharding(mesh, P())
    put = {name: jax.device_put(x, split) for name, x in given.items() if name != "value"}
    put["value"] = jax.device_put(given["value"], split if gathered else copies)
    forms = {"maps": lambda arrays: arrays | {"value": maps(arrays["value"])}}

    def function(arrays):
        return sharded(mesh, gathered, forms.get(form, dict)(arrays))

    compiled = both(function).lower(put, jax.device_put(ct, split)).compile()
    forward = jax.jit(function, compiler_options=QUICK).lower(put).compile()
    assert collectives(forward) == ({"all-gather": 1} if gathered else {})
    expected = {"all-gather": 1, "reduce-scatter": 1} if gathered else {"all-reduce": 1}
    assert collectives(compiled) == expected
    got, found = compiled(put, jax.device_put(ct, split))
    assert got.sharding.is_equivalent_to(split, 3)
    assert_close(got, out, 1e-12, "out")
    found["value"] = found["value"][:, :20] if axis_type is AUTO else np.asarray(found["value"])[:, :20]
    for name in arrays:
        assert_close(found[name], gradients[name], 1e-12, name)


@thorough
@pytest.mark.parametrize("spec", [("data", "queries"), (None, "queries", "data")], ids=["batch", "heads"])
def test_batch_or_heads_over_another_axis(rng, spec):
    """They stay split along an Auto axis."""
    mesh = jax.make_mesh((2, 4), ("data", "queries"), axis_types=(AUTO,) * 2)
    arrays = arrays_of(rng)
    put = {name: jax.device_put(x, NamedSharding(mesh, P(*spec))) for name, x in arrays.items()}
    whole = P(*(None if axis == "queries" else axis for axis in spec))
    put["value"] = jax.device_put(arrays["value"], NamedSharding(mesh, whole))
    step = jax.jit(jax.grad(lambda a: jnp.sin(sharded(mesh, False, a)).sum()), compiler_options=QUICK)
    compiled = step.lower(put).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    whole = multi_scale_deformable_attention
    single = jax.grad(lambda a: jnp.sin(whole(spatial_shapes=LEVELS, normalize="softmax", **a)).sum())
    expected, got = single(arrays), compiled(put)
    for name in arrays:
        assert_close(got[name], expected[name], 1e-12, name)


def test_bad_arguments(rng):
    mesh = jax.make_mesh((8,), ("queries",))
    arrays = arrays_of(rng)
    odd = arrays_of(rng, queries=9)
    for error, text, changed in (
        (ValueError, "axis must name axes of the mesh", {"axis": "model"}),
        (TypeError, "mesh must be a jax.sharding.Mesh, got NoneType", {"mesh": None}),
        (ValueError, "sampling_locations must have .* a multiple of the 8 devices .* pad the queries", odd),
        (
            ValueError,
            r"value must have shape \[B, S', M, D\] with S' at least 20 .* of 8",
            {"gather_value": True},
        ),
        (TypeError, "value must be a floating-point", {"gather_value": True, "value": maps(arrays["value"])}),
        (TypeError, "gather_value must be a Python bool", {"gather_value": 1}),
        (TypeError, "spatial_shapes must be integers", {"spatial_shapes": ((1.0, 2.0),)}),
    ):
        call = {"mesh": mesh, "axis": "queries", "spatial_shapes": LEVELS} | arrays | changed
        with pytest.raises(error, match=f"sharded_multi_scale_deformable_attention: {text}"):
            sharded_multi_scale_deformable_attention(**call)


def test_an_abstract_mesh(rng):
    mesh = jax.make_mesh((8,), ("queries",))
    arrays = arrays_of(rng)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(sharded, mesh.abstract_mesh, False), compiler_options=QUICK)(arrays)
    expected = multi_scale_deformable_attention(spatial_shapes=LEVELS, normalize="softmax", **arrays)
    assert_close(got, expected, 1e-12)
