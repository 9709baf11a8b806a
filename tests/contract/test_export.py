"""Every operator exported with its gradients, and with symbolic shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FAMILIES,
    OPERATORS,
    assert_close,
    assert_trees_close,
    case_params,
    differentiated,
    finite_loss,
    firsts,
    quick_jit,
    thorough,
)
from jax import export

parametrize = pytest.mark.parametrize
SMALL = [param for param in firsts(case_params("second")) if param.values[0] in FAMILIES]
dense = next(o for o in OPERATORS if o.name == "dot_product_attention")


@thorough
@parametrize(("operator", "implementation", "case"), SMALL)
def test_export_with_gradients(operator, implementation, case):
    arrays = case.arrays(np.float64)
    inputs = differentiated(operator, arrays)
    loss = finite_loss(operator.call, operator, arrays, {**case.options, "implementation": implementation})
    exported = export.export(jax.jit(loss))(inputs)
    restored = export.deserialize(exported.serialize(vjp_order=2))

    def both(gradient):
        square = lambda i: sum((g**2).sum() for g in gradient(i).values())
        return quick_jit(lambda i: (gradient(i), jax.grad(square)(i)))

    got, expected = both(jax.grad(restored.call))(inputs), both(jax.grad(loss))(inputs)
    assert_trees_close(got[0], expected[0], 1e-12)
    assert_trees_close(got[1], expected[1], 1e-10)


@thorough
@parametrize(("operator", "implementation", "case"), SMALL)
def test_export_of_a_tangent(operator, implementation, case):
    arrays = case.arrays(np.float64)
    inputs, rng = differentiated(operator, arrays), np.random.default_rng(7)
    along = {name: jnp.asarray(rng.standard_normal(x.shape)) for name, x in inputs.items()}
    options = {**case.options, "implementation": implementation, "forward_mode": True}
    loss = finite_loss(operator.call, operator, arrays, options)
    tangent = jax.jit(lambda inputs, along: {"tangent": jax.jvp(loss, (inputs,), (along,))[1]})
    restored = export.deserialize(export.export(tangent)(inputs, along).serialize())
    assert_trees_close(restored.call(inputs, along), tangent(inputs, along), 1e-12)


SYMBOLIC = {
    "causal": dict(is_causal=True, local_window_size=5),
    "full": dict(),
    "lengths": dict(key_value_seq_lengths=np.array([3, 7], np.int32)),
}


@thorough
@parametrize(
    ("name", "dims"), [("causal", "8*t, 8*s"), ("full", "8*t, 8*s"), ("causal", "t, s"), ("lengths", "t, s")]
)
def test_export_with_symbolic_lengths(name, dims):
    options = SYMBOLIC[name]
    t, s = export.symbolic_shape(dims)
    query = jax.ShapeDtypeStruct((2, t, 4, 8), np.float64)
    key = jax.ShapeDtypeStruct((2, s, 2, 8), np.float64)

    def loss(query, key):
        out, lse = dense.call(query=query, key=key, value=key, **options)
        return (jnp.sin(out)).sum() + jnp.cos(lse).sum()

    exported = export.export(jax.jit(loss))(query, key)
    restored = export.deserialize(exported.serialize(vjp_order=1)).call
    rng = np.random.default_rng(0)
    for T, S in ((8, 16), (304, 640)):
        q, k = (
            jnp.asarray(rng.standard_normal((2, T, 4, 8))),
            jnp.asarray(rng.standard_normal((2, S, 2, 8))),
        )
        got = quick_jit(jax.grad(restored, argnums=(0, 1)))(q, k)
        expected = quick_jit(jax.grad(loss, argnums=(0, 1)))(q, k)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-12)


@thorough
def test_softmax_exports_with_symbolic_shapes():
    import jax_attn_bwd

    b, n = export.symbolic_shape("b, n")

    def loss(x):
        return jnp.sin(jax_attn_bwd.scaled_masked_softmax(x, scale=0.5, is_causal=True)).sum()

    exported = export.export(jax.jit(loss))(jax.ShapeDtypeStruct((b, n, n), np.float64))
    restored = export.deserialize(exported.serialize(vjp_order=1)).call
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 5)))
    assert_close(jax.grad(restored)(x), jax.grad(loss)(x), 1e-12)
