"""Values and gradients of every operator x implementation x case, all discovered; kernels interpreted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.programs import first_order, is_kernel, poisoned, running, widest_dtype
from helpers import (
    OPERATORS,
    QUICK,
    assert_close,
    assert_trees_close,
    case_params,
    count_gradients,
    differentiated,
    finite_loss,
    first_of_each,
    firsts,
    thorough,
)

from jax_attn_bwd import check

# Options that the kernels' own tests have, over several tiles; "second" cases are poisoned.
COVERED_BY_KERNEL_TESTS = {
    "dot_product_attention": (
        "plain", "causal_window_cap", "bias_key", "segments_causal", "sink", "dropout", "tiles", "mod_causal",
    ),
    "multi_scale_deformable_attention": ("plain", "discrete", "border", "softmax", "one_pixel"),
    # half a unit in the last place of its inputs moves the exact gradients by up to 1.8 of float32's limit
    "gated_delta_rule": ("second_constant",),
}  # fmt: skip


def _left_to_the_portable_path(operator, case) -> bool:
    """With the probabilities saved the backward is the portable one; at a scale of 1e4 the rounding of
    sum(out * dout) alone is more than float32 gradients of whole planes are off by; thousands of queries
    take an interpreter half an hour, and every case some seconds.
    """
    left_out = ("large_logits", "many_queries", *COVERED_BY_KERNEL_TESTS.get(operator.name, ()))
    return case.options.get("save") == "probs" or case.name in left_out


def _marks(operator, implementation: str, case) -> list:
    """What XLA computes for the TPU kernels of deformable attention is left to the thorough tier, as are the
    kernels of linear attention: their interpreter is slow.
    """
    for_xla = operator.name == "multi_scale_deformable_attention" and case.name != "second"
    linear = operator.name in ("gated_delta_rule", "gated_linear_attention")
    slow = (for_xla and implementation == "mosaic_tpu") or (linear and is_kernel(operator, implementation))
    return [pytest.mark.thorough] if slow else []


pytestmark = pytest.mark.usefixtures("one_device")
CASE = ("operator", "implementation", "case")
EVERY = [
    pytest.param(*p.values, id=p.id, marks=[*p.marks, *_marks(*p.values)])
    for p in case_params("ci", "second", thorough=("edge", "hidden"), kernels=("second", "kernel"))
    if not (is_kernel(*p.values[:2]) and _left_to_the_portable_path(p.values[0], p.values[2]))
]


@pytest.mark.gradients
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter multiplies NaN
@pytest.mark.parametrize(CASE, EVERY)
def test_first_order(operator, implementation, case):
    """Against the definition; the plain backward; the same bits twice; NaN and Inf where no one reads."""
    with running(operator, implementation):
        first = first_order(operator, implementation, case)
        arrays, cts = first.target.arrays, first.target.cotangents
        outputs, gradients, plain = jax.block_until_ready(first.run(arrays, cts))
        for row in first.target.measure(implementation, outputs, gradients):
            assert row.ok, row
        assert gradients.keys() == set(operator.differentiated(arrays))
        if gradients:
            count_gradients(operator, implementation)
        for wrt, got in zip(first.subsets, plain, strict=True):
            assert_trees_close(got, {name: gradients[name] for name in wrt}, 1e-12)

        hiding = poisoned(operator, case, arrays, cts)
        again = jax.block_until_ready(first.run(*hiding if hiding else (arrays, cts)))
    if hiding is None:
        chex.assert_trees_all_equal(again, (outputs, gradients, plain))
        return
    hidden = operator.hidden(case.arrays(np.float64), case.options)
    for name in hidden.keys() & gradients.keys():
        assert not np.asarray(gradients[name])[hidden[name]].any(), name
    finite = [np.isfinite(np.asarray(x, np.float64)).all() for x in again[1].values()]
    assert all(finite), dict(zip(gradients, finite, strict=True))
    rtol = 0 if is_kernel(operator, implementation) else 1e-12
    for got, expected in zip(
        jax.tree.leaves(again), jax.tree.leaves((outputs, gradients, plain)), strict=True
    ):
        assert_close(got, expected, rtol, "poisoned")


CHECKED = case_params("check")
FIRST = {param.id for param in firsts(CHECKED)}
NARROWER = ("bfloat16", "float32", "float16")
IN_DTYPES = [  # the first case of each in all of them, the others in one, in turn
    pytest.param(
        *param.values,
        dtype,
        id=f"{param.id}-{dtype}",
        marks=[*param.marks, *[thorough] * (param.id not in FIRST or dtype != "bfloat16")],
    )
    for number, param in enumerate(CHECKED)
    for dtype in NARROWER
    if param.id in FIRST or dtype == NARROWER[number % 3]
]


NARROW = [
    pytest.param(*param.values, dtype, id=f"{param.id}-{dtype}", marks=[*param.marks, *marks])
    for param in case_params(check.MEANS)
    for dtype, marks in (("bfloat16", []), ("float16", [thorough]))
]


@pytest.mark.parametrize((*CASE, "dtype"), NARROW)
def test_with_means_within_three_times_what_rounding_once_takes(operator, implementation, case, dtype):
    with jax.enable_x64(False):
        wrong = [row for row in check.measure(operator, implementation, case, dtype) if not row.ok]
    assert not wrong


@pytest.mark.gradients
@pytest.mark.parametrize((*CASE, "dtype"), IN_DTYPES)
def test_low_precision_within_twice_the_plain_formula(operator, implementation, case, dtype):
    with jax.enable_x64(False):
        for row in check.measure(operator, implementation, case, dtype):
            assert row.ok, row
    count_gradients(operator, implementation)


@pytest.mark.parametrize(CASE, case_params("second", thorough=("ci", "edge")))
def test_outputs_and_gradients_keep_shape_and_dtype(operator, implementation, case):
    arrays = case.arrays(jnp.bfloat16)
    inputs = differentiated(operator, arrays)
    call = functools.partial(operator.call, **case.options, implementation=implementation)
    for name, x in zip(operator.outputs, jax.eval_shape(lambda: call(**arrays)), strict=True):
        assert x.dtype == ("float32" if name in operator.wide else "bfloat16"), name
    loss = finite_loss(operator.call, operator, arrays, {**case.options, "implementation": implementation})
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(jax.grad(loss), inputs), inputs)


@pytest.mark.parametrize(CASE, first_of_each(case_params("second")))
def test_nothing_is_computed_for_what_is_not_differentiated(operator, implementation, case):
    """A call differentiated in one argument takes fewer products, gathers and scatters than one in all."""
    arrays = case.arrays(np.float64)
    inputs = differentiated(operator, arrays)
    loss = finite_loss(operator.call, operator, arrays, {**case.options, "implementation": implementation})

    def each(inputs):
        alone = {name: jax.grad(loss)({name: inputs[name]})[name] for name in inputs}
        return alone, jax.grad(loss)(inputs)

    assert_trees_close(*jax.jit(each, compiler_options=QUICK)(inputs), 1e-12)

    def products(names):
        chosen = {name: inputs[name] for name in names}
        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(chosen))
        return sum(jaxpr.count(work) for work in ("dot_general", " gather", " scatter"))

    if len(inputs) > 1 and products(inputs):
        assert products(list(inputs)[:1]) < products(inputs)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_every_implementation_is_in_the_table(operator):
    """That its gradients were compared, the end of the run checks; that cases are hidden from, this does."""
    named = {values[1] for values in (p.values for p in EVERY) if values[0] is operator}
    assert named == {i.name for i in operator.implementations}
    cases = list(operator.tagged("ci", "second", "hidden"))
    hidden = [operator.hidden(case.arrays(np.float64), case.options) for case in cases]
    assert any(where.any() for found in hidden for where in found.values())


def test_the_widest_dtype_is_of_the_kernel():
    (dense,) = (o for o in OPERATORS if o.name == "dot_product_attention")
    case = next(dense.tagged("second"))
    for implementation, dtype in (("mosaic_gpu", "bfloat16"), ("mosaic_tpu", "float32"), ("xla", "float64")):
        with running(dense, implementation):
            assert widest_dtype(dense, implementation, case) == dtype
