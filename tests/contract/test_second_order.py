"""Second order in every mode, under jit, on the "second" cases; what no one reads holds NaN and Inf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.programs import dtype_or_reason, is_kernel, poisoned, running
from helpers import (
    FAMILIES,
    OPERATORS,
    QUICK,
    assert_close,
    assert_trees_close,
    case_params,
    cotangents,
    differentiated,
    families,
    finite_loss,
    first_of_each,
    interpreted,
    quick_jit,
    thorough,
)
from jax.test_util import check_grads

pytestmark = pytest.mark.usefixtures("one_device")
CASE = ("operator", "implementation", "case")


def form(function, operator, options):
    """`(inputs, the other arrays, cotangents) -> scalar`: a linear form of the finite part of all outputs."""

    def loss(inputs, arrays, cts):
        outputs = function(**{**arrays, **inputs}, **options)
        terms = zip(outputs, cts, strict=True)
        return sum((jnp.where(jnp.isfinite(x), x, 0) * ct).sum().astype(jnp.float64) for x, ct in terms)

    return loss


def product(row, vector):
    """A row of blocks of a Hessian times a vector, each by name."""
    return sum(np.tensordot(block, vector[name], vector[name].ndim) for name, block in row.items())


def derivatives(loss, direction):
    """`(inputs, the other arrays, cotangents) -> {mode: its result}`; along one direction, which is drawn."""
    gradient = jax.grad(loss)
    square = lambda i, *rest: sum((g**2).sum() for g in jax.tree.leaves(gradient(i, *rest)))

    def modes(inputs, arrays, cts):
        by_input, by_ct = jax.grad(square, (0, 2))(inputs, arrays, cts)
        return {
            "grad of grad": by_input,
            "by cotangents": by_ct,
            "forward over reverse": jax.jvp(lambda i: gradient(i, arrays, cts), (inputs,), (direction,))[1],
        }

    return modes


@pytest.mark.parametrize(CASE, families(first_of_each(case_params("second"))))
def test_every_mode_under_jit(operator, implementation, case):
    """With the first case of each the whole Hessian, too."""
    arrays = case.arrays(np.float64)
    inputs = differentiated(operator, arrays)
    options = {**case.options, "implementation": implementation}
    cts = cotangents(operator, jax.eval_shape(lambda: operator.call(**arrays, **options)))
    direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(5).normal(size=x.shape)), inputs)

    loss, definition = (
        form(function, operator, given)
        for function, given in ((operator.call, options), (operator.reference, case.options))
    )
    whole = case is next(operator.tagged("second"))

    def modes(*given):
        hessian = {"hessian": jax.hessian(loss)(*given)} if whole else {}
        return derivatives(loss, direction)(*given) | hessian

    program = jax.jit(modes, compiler_options=QUICK)
    got = program(inputs, arrays, cts)
    if whole:
        defined = quick_jit(lambda *given: (jax.hessian(definition)(*given), jax.grad(definition)(*given)))
        hessian, gradient = defined(inputs, arrays, cts)
        for name, row in hessian.items():
            for other, block in row.items():
                assert_close(got["hessian"][name][other], block, 1e-10, f"hessian {name} {other}")
            assert_close(got["forward over reverse"][name], product(row, direction), 1e-10, f"jvp {name}")
            assert_close(got["grad of grad"][name], 2 * product(row, gradient), 1e-10, f"gradients {name}")
    else:
        expected = quick_jit(derivatives(definition, direction))(inputs, arrays, cts)
        for mode, found in expected.items():
            for x, y in zip(jax.tree.leaves(got[mode]), jax.tree.leaves(found), strict=True):
                assert_close(x, y, 1e-10, mode)

    hiding = poisoned(operator, case, arrays, cts)
    if hiding is not None:
        bad, bad_cts = hiding
        again = program({name: bad[name] for name in inputs}, bad, bad_cts)
        for x, expected in zip(jax.tree.leaves(again), jax.tree.leaves(got), strict=True):
            assert_close(x, expected, 1e-12, "poisoned")


# Kernels of the layer are the attention's; the rule of the graph kernels is one and the same, that of the TPU
# kernels of deformable attention the other TPU kernels'.
LIKE_OTHERS = ("multi_head_attention", "graph_attention_v2", "graph_transformer_attention")
LIKE_OTHERS += (("multi_scale_deformable_attention", "mosaic_tpu"),)
KERNELS = [
    pytest.param(o, i.name, marks=[pytest.mark.kernel, *marks])
    for o in OPERATORS
    for i in o.implementations
    if i.platform is not None
    for rest in ([thorough] if o.name in LIKE_OTHERS or (o.name, i.name) in LIKE_OTHERS else [],)
    for marks in ([*rest, interpreted] if i.name == "mosaic_gpu" else rest,)
]


@pytest.mark.parametrize(("operator", "implementation"), KERNELS)
def test_of_kernels_it_is_that_of_the_portable_path(operator, implementation):
    with running(operator, implementation):
        takes = lambda case: dtype_or_reason(operator, implementation, case)[0]
        tags = ("second", "kernel", *(["cudnn"] if implementation == "cudnn" else []))
        case = next(case for case in operator.tagged(*tags) if takes(case))
        dtype = takes(case)
        arrays = case.arrays(dtype)
        inputs = differentiated(operator, arrays)

        def curvature(name):
            options = {**case.options, "implementation": name}
            gradient = jax.grad(finite_loss(operator.call, operator, arrays, options))
            square = lambda i: sum((g.astype(np.float32) ** 2).sum() for g in gradient(i).values())
            both = lambda i: (jax.grad(square)(i), jax.jvp(gradient, (i,), (i,))[1])
            return jax.block_until_ready(jax.jit(both, compiler_options=QUICK)(inputs))

        for got, expected in zip(curvature(implementation), curvature("xla"), strict=True):
            assert_trees_close(got, expected, 4 * float(jnp.finfo(dtype).eps) if dtype != "float32" else 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(CASE, [p for p in case_params("ci") if p.values[2].name.startswith("tiles")])
def test_poison_over_several_tiles(operator, implementation, case):
    """Gradients of a linear form of the gradient, by the inputs and by the cotangents."""
    arrays = case.arrays(np.float64)
    options = {**case.options, "implementation": implementation}
    loss = form(operator.call, operator, options)
    cts = cotangents(operator, jax.eval_shape(lambda: operator.call(**arrays, **options)))
    names = list(differentiated(operator, arrays))

    def run(arrays, cts):
        def again(inputs, cts):
            gradients = jax.grad(loss)(inputs, arrays, cts)
            rng = np.random.default_rng(9)
            return sum(jnp.vdot(x, rng.standard_normal(x.shape)) for x in gradients.values())

        return jax.grad(again, (0, 1))({name: arrays[name] for name in names}, cts)

    hiding = poisoned(operator, case, arrays, cts)
    if hiding is None:
        pytest.skip("every entry is read")
    program = jax.jit(run, compiler_options=QUICK)
    results = program(*hiding), program(arrays, cts)
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close(got, expected, 1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", FAMILIES, ids=lambda o: o.name)
def test_check_grads_to_order_two(operator):
    case = next(operator.tagged("second"))
    implementation = next(i.name for i in operator.implementations if i.platform is None)
    assert not is_kernel(operator, implementation)
    arrays = case.arrays(np.float64)
    options = {**case.options, "implementation": implementation}
    loss = jax.jit(finite_loss(operator.call, operator, arrays, options))
    check_grads(loss, (differentiated(operator, arrays),), order=2, modes=["rev"], rtol=1e-4)
