"""Operands on an explicit mesh."""

import jax
import jax.numpy as jnp
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import scaled_masked_softmax, scaled_masked_softmax_bwd
from jax_attn_bwd._core.sharding import match_type


def test_operands_are_placed_like_x_on_an_explicit_mesh(rng):
    x, bias, dy = (jnp.asarray(rng.standard_normal((4, 4, 6))) for _ in range(3))
    mask, sink = jnp.asarray(rng.random((4, 4, 6)) < 0.7), jnp.asarray(rng.standard_normal((4, 4)))

    def step(x, bias, mask, sink, dy):
        y, pullback = jax.vjp(
            lambda *a: scaled_masked_softmax(a[0], mask, bias=a[1], sink=a[2]), x, bias, sink
        )
        return y, *pullback(match_type(dy, y)), scaled_masked_softmax_bwd(dy, y, mask)

    expected = jax.jit(step)(x, bias, mask, sink, dy)
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    specs = (P("b", "h"), P(None, None, "b"), P("h", "b"), P(), P("h"))
    with jax.set_mesh(mesh):
        arrays = zip((x, bias, mask, sink, dy), specs, strict=True)
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in arrays]
        got = jax.jit(lambda *a: step(*a))(*placed)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-13)


def test_rows_that_see_nothing_are_zero_where_each_device_holds_one_column():
    mesh = jax.make_mesh((4,), ("c",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.full((2, 4), -jnp.inf), NamedSharding(mesh, P(None, "c")))
    for y in jax.jit(lambda x, one: (scaled_masked_softmax(x), scaled_masked_softmax(one)))(x, x[:, :1]):
        assert not y.any()
