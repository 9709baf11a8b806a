"""Queries split over devices, and a cotangent placed otherwise."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.deformable.small import LEVELS, B, D, M, Q, sample

from jax_attn_bwd import multi_scale_deformable_attention, multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable.cases import locations


@thorough
def test_queries_split_over_devices():
    """In `shard_map` with the value replicated: its gradient is the sum over the devices."""
    rng = np.random.default_rng(0)
    at = locations(rng, (2, 8, 3), LEVELS, (2, 2)).reshape(2, 8, 3, 2, 2, 2)
    inputs = (rng.standard_normal((2, 14, 3, 4)), at, rng.standard_normal((2, 8, 3, 2, 2)))
    dout = rng.standard_normal((2, 8, 12))

    def step(value, at, weights, dout):
        out, pullback = jax.vjp(
            lambda v, a, w: multi_scale_deformable_attention(v, LEVELS, a, w, normalize="softmax"),
            value,
            at,
            weights,
        )
        return out, *pullback(dout)

    mesh = jax.make_mesh((2, 4), ("b", "q"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("b"), P("b", "q"), P("b", "q"), P("b", "q"))
    split = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P("b", "q"), *specs[:3]), check_vma=True
    )
    for got, expected in zip(jax.jit(split)(*inputs, dout), step(*inputs, jnp.asarray(dout)), strict=True):
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


@pytest.mark.parametrize(
    "moving", [(0, 1, 2), *(pytest.param(x, marks=thorough) for x in ((0,), (1, 2)))], ids=str
)
def test_tangents_of_queries_on_an_explicit_mesh(moving):
    """Some arguments move and others do not; each device has queries of its own."""
    rng = np.random.default_rng(0)
    at = locations(rng, (2, 8, 3), LEVELS, (2, 2)).reshape(2, 8, 3, 2, 2, 2)
    arrays = (rng.standard_normal((2, 14, 3, 4)), at, rng.standard_normal((2, 8, 3, 2, 2)))
    along = [rng.standard_normal(x.shape) for x in arrays]
    mesh = jax.make_mesh((4,), ("q",), axis_types=(AxisType.Explicit,))

    @jax.jit
    def tangent(arrays, along):
        def call(*some):
            given = dict(zip(moving, some, strict=True))
            value, at, weights = (given.get(i, x) for i, x in enumerate(arrays))
            return multi_scale_deformable_attention(
                value, LEVELS, at, weights, normalize="softmax", forward_mode=True
            )

        return jax.jvp(call, [arrays[i] for i in moving], [along[i] for i in moving])

    def on_mesh(xs):
        return [jax.device_put(x, P(None, "q") if i else P()) for i, x in enumerate(xs)]

    expected = tangent(arrays, along)
    with jax.set_mesh(mesh):
        got = tangent(on_mesh(arrays), on_mesh(along))
    for x, y in zip(got, expected, strict=True):
        assert tuple(x.sharding.spec)[:2] == (None, "q")
        assert_close(x, y, 1e-13)
