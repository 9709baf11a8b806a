"""Multi-scale deformable attention: kinds of arguments, dtypes, export, devices, calls without jit."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_deformable_edges import LEVELS, B, D, M, Q, first_order, sample

from jax_attn_bwd import multi_scale_deformable_attention, multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable.cases import locations


@pytest.mark.parametrize(
    "shapes",
    [LEVELS, [list(x) for x in LEVELS], np.array(LEVELS), np.array(LEVELS, np.uint8)],
    ids=["tuple", "list", "int64", "uint8"],
)
def test_spatial_shapes_of_any_kind(shapes):
    arrays = sample()
    value, at, weights = arrays.values()
    expected = multi_scale_deformable_attention(value, LEVELS, at, weights)
    for table in (shapes, jnp.asarray(shapes)):
        call = jax.jit(lambda *a, t=table: multi_scale_deformable_attention(a[0], t, *a[1:]))
        np.testing.assert_array_equal(call(value, at, weights), expected)
    starts = np.array([0, 12])
    got = multi_scale_deformable_attention(value, shapes, at, weights, level_start_index=starts)
    np.testing.assert_array_equal(got, expected)


def test_spatial_shapes_as_a_static_argument():
    value, at, weights = sample().values()
    call = jax.jit(multi_scale_deformable_attention, static_argnums=1)
    expected = multi_scale_deformable_attention(value, LEVELS, at, weights)
    np.testing.assert_array_equal(call(value, LEVELS, at, weights), expected)


def test_every_gradient_has_the_dtype_of_its_argument():
    """And sums are taken in the widest of them."""
    run = first_order({"spatial_shapes": LEVELS})
    dout = np.random.default_rng(4).integers(-8, 9, (B, Q, M * D)).astype(np.float64)
    for value_dtype, dtype in (
        ("float64", "float32"),
        ("float32", "float64"),
        ("float16", "bfloat16"),
    ):
        arrays = {name: jnp.asarray(x, dtype) for name, x in sample().items()}
        arrays["value"] = arrays["value"].astype(value_dtype)
        got = run(arrays, dout)
        exact = run({name: x.astype(np.float64) for name, x in arrays.items()}, dout)
        assert got["out"].dtype == value_dtype
        for name, x in arrays.items():
            assert got[name].dtype == x.dtype
        for name, x in got.items():
            assert_close(x.astype(np.float64), exact[name], float(jnp.finfo(x.dtype).eps), name)


def test_export_with_symbolic_sizes():
    options = {"normalize": "softmax", "padding_mode": "border"}
    b, q, m, d = jax.export.symbolic_shape("b, q, m, d")
    shapes = ((b, 14, m, d), (b, q, m, 2, 2, 2), (b, q, m, 2, 2))

    def loss(value, at, weights):
        return jnp.sin(
            multi_scale_deformable_attention(value, LEVELS, at, weights, **options)
        ).sum()

    exported = jax.export.export(jax.jit(loss))(
        *(jax.ShapeDtypeStruct(s, np.float64) for s in shapes)
    )
    restored = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    arrays = sample()
    for part in (slice(None), slice(0, 1)):
        inputs = tuple(jnp.asarray(x[part]) for x in arrays.values())
        got, expected = (jax.grad(f, (0, 1, 2))(*inputs) for f in (restored, loss))
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-12)


def test_queries_split_over_devices():
    """In `shard_map` with the value replicated: its gradient is the sum over the devices."""
    rng = np.random.default_rng(0)
    at = locations(rng, (2, 8, 3), LEVELS, (2, 2)).reshape(2, 8, 3, 2, 2, 2)
    inputs = (rng.standard_normal((2, 14, 3, 4)), at, rng.standard_normal((2, 8, 3, 2, 2)))
    dout = rng.standard_normal((2, 8, 12))

    def step(value, at, weights, dout):
        out, pullback = jax.vjp(
            lambda v, a, w: multi_scale_deformable_attention(v, LEVELS, a, w, normalize="softmax"),
            value, at, weights,
        )  # fmt: skip
        return out, *pullback(dout)

    mesh = jax.make_mesh((2, 4), ("b", "q"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("b"), P("b", "q"), P("b", "q"), P("b", "q"))
    split = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P("b", "q"), *specs[:3]), check_vma=True
    )
    for got, expected in zip(
        jax.jit(split)(*inputs, dout), step(*inputs, jnp.asarray(dout)), strict=True
    ):
        assert_close(got, expected, 1e-13)


def test_plain_backward_on_an_explicit_mesh_with_another_dout():
    arrays = {name: jnp.asarray(np.concatenate([x, x])) for name, x in sample().items()}
    dout = jnp.asarray(np.random.default_rng(4).standard_normal((2 * B, Q, M * D)))
    expected = multi_scale_deformable_attention_bwd(dout, spatial_shapes=LEVELS, **arrays)
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, P("b")) for name, x in arrays.items()}
        got = multi_scale_deformable_attention_bwd(dout, spatial_shapes=LEVELS, **placed)
    for name, x in placed.items():
        assert getattr(got, name).sharding.is_equivalent_to(x.sharding, x.ndim)
        assert_close(getattr(got, name), getattr(expected, name), 1e-13)


def test_without_jit():
    arrays = sample()
    arrays["value"] = arrays["value"][..., :1]
    dout = np.random.default_rng(4).standard_normal((B, Q, M))
    expected = first_order({"spatial_shapes": LEVELS})(arrays, dout)
    with jax.disable_jit():
        got = first_order({"spatial_shapes": LEVELS})(arrays, jnp.asarray(dout))
    assert_trees_close(got, expected, 1e-13)
