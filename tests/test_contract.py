"""The contract of every operator x implementation x case, all discovered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    OPERATORS,
    assert_close,
    assert_trees_close,
    case_params,
    cotangents,
    differentiated,
    finite_loss,
)
from jax.test_util import check_grads

from jax_attn_bwd import check

everything = pytest.mark.parametrize(
    ("operator", "implementation", "case"), case_params("ci", "edge", "second")
)
small = pytest.mark.parametrize(("operator", "implementation", "case"), case_params("second"))


def _calls(operator, implementation, case, dtype=np.float64):
    arrays = case.arrays(dtype)
    return arrays, {**case.options, "implementation": implementation}


@everything
def test_float64_against_definition(operator, implementation, case):
    for row in check.measure(operator, implementation, case, "float64"):
        assert row.ok, row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("operator", "implementation", "case"), case_params("check"))
def test_low_precision_within_twice_the_plain_formula(operator, implementation, case, dtype):
    with jax.enable_x64(False):
        for row in check.measure(operator, implementation, case, dtype):
            assert row.ok, row


@everything
def test_outputs_and_gradients_keep_shape_and_dtype(operator, implementation, case):
    arrays, options = _calls(operator, implementation, case, jnp.bfloat16)
    inputs = differentiated(operator, arrays)
    loss = finite_loss(operator.call, operator, arrays, options)
    gradients = jax.eval_shape(jax.grad(loss), inputs)
    for name, x in inputs.items():
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype), name


@pytest.mark.parametrize(("operator", "implementation", "case"), case_params("ci"))
def test_plain_backward_computes_what_is_asked(operator, implementation, case):
    arrays, options = _calls(operator, implementation, case)
    outputs, pullback = jax.vjp(
        lambda inputs: operator.call(**{**arrays, **inputs}, **options),
        differentiated(operator, arrays),
    )
    cts = cotangents(operator, outputs)
    (expected,) = pullback(cts)
    offered = tuple(name for name in operator.backward_wrt if name in expected)
    for wrt in {offered, offered[:1], offered[1:2] or offered}:
        got = operator.backward(cts, outputs, arrays, dict(case.options), wrt)
        assert_trees_close(got, {name: expected[name] for name in wrt}, 1e-12)


@pytest.mark.parametrize(("operator", "implementation", "case"), case_params("check"))
def test_nothing_is_computed_for_what_is_not_differentiated(operator, implementation, case):
    """A call differentiated in one argument takes fewer products, gathers and scatters than one in all."""
    arrays, options = _calls(operator, implementation, case)
    inputs = differentiated(operator, arrays)
    loss = finite_loss(operator.call, operator, arrays, options)
    together = jax.grad(loss)(inputs)
    for name in inputs:
        alone = jax.grad(loss)({name: inputs[name]})
        assert_close(alone[name], together[name], 1e-12, name)

    def products(names):
        chosen = {name: inputs[name] for name in names}
        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(chosen))
        return sum(jaxpr.count(work) for work in ("dot_general", " gather", " scatter"))

    if len(inputs) > 1 and products(inputs):
        first = operator.differentiable[0]
        assert products([first]) < products(inputs)


@pytest.mark.parametrize(("operator", "implementation", "case"), case_params("check"))
def test_one_program_gives_the_same_bits_twice(operator, implementation, case):
    arrays, options = _calls(operator, implementation, case, np.float32)
    step = jax.jit(jax.value_and_grad(finite_loss(operator.call, operator, arrays, options)))
    inputs = differentiated(operator, arrays)
    jax.tree.map(np.testing.assert_array_equal, step(inputs), step(inputs))


@small
def test_second_order_in_every_mode_under_jit(operator, implementation, case):
    arrays, options = _calls(operator, implementation, case)
    inputs = differentiated(operator, arrays)
    direction = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(5).normal(size=x.shape)), inputs
    )

    loss = finite_loss(operator.call, operator, arrays, options)
    gradient = jax.grad(loss)
    square = lambda i: sum((g**2).sum() for g in jax.tree.leaves(gradient(i)))  # noqa: E731
    modes = {
        "grad of grad": jax.grad(square),
        "forward over reverse": lambda i: jax.jvp(gradient, (i,), (direction,))[1],
        "hessian": jax.hessian(loss),
    }
    got = jax.jit(lambda i: {mode: function(i) for mode, function in modes.items()})(inputs)

    loss = finite_loss(operator.reference, operator, arrays, case.options)
    hessian, gradient = jax.jit(lambda i: (jax.hessian(loss)(i), jax.grad(loss)(i)))(inputs)
    for name, row in hessian.items():
        for other, block in row.items():
            assert_close(got["hessian"][name][other], block, 1e-10, f"hessian {name} {other}")
        assert_close(
            got["forward over reverse"][name], product(row, direction), 1e-10, f"jvp {name}"
        )
        assert_close(
            got["grad of grad"][name], 2 * product(row, gradient), 1e-10, f"grad of grad {name}"
        )


def product(row, vector):
    """A row of blocks of a Hessian times a vector, each by name."""
    return sum(np.tensordot(block, vector[name], vector[name].ndim) for name, block in row.items())


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_check_grads_to_order_two(operator):
    case = next(operator.tagged("second"))
    implementation = next(i.name for i in operator.implementations if i.platform is None)
    arrays, options = _calls(operator, implementation, case)
    loss = finite_loss(operator.call, operator, arrays, options)
    check_grads(loss, (differentiated(operator, arrays),), order=2, modes=["rev"], rtol=1e-4)


def test_every_implementation_has_gradient_tests():
    for operator in OPERATORS:
        for implementation in operator.implementations:
            if implementation.platform is not None:  # counted where kernels are interpreted
                continue
            found = [
                p for p in case_params("ci") if p.values[:2] == (operator, implementation.name)
            ]
            assert found
