"""What reads a traced operator: `checkify`, exporters of jaxprs, and what cannot take a `custom_vjp`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FAMILIES,
    assert_close,
    case_params,
    differentiated,
    finite_loss,
    firsts,
    quick_jit,
    thorough,
)
from jax.experimental import checkify

import jax_attn_bwd as jab
from jax_attn_bwd._core.jaxpr.walk import equations

pytestmark = pytest.mark.usefixtures("one_device")
parametrize = pytest.mark.parametrize
SMALL = firsts(case_params("second"))
INDICES = checkify.index_checks | checkify.float_checks


def gradients_of(operator, implementation, case):
    """(a function of the differentiated arguments that gives the value and all gradients, these)"""
    arrays = case.arrays(np.float64)
    loss = finite_loss(operator.call, operator, arrays, {**case.options, "implementation": implementation})
    return jax.value_and_grad(loss), differentiated(operator, arrays)


PACKAGE = str(Path(jab.__file__).parent)
# Jits of ours in the program of a value and its gradients. One around the forward and one around the backward
# make each a program of its own where a call stands outside of `jax.jit`.
JITS = {
    "multi_head_attention": 8,  # beside these two its projections and its output, and what undoes them
    "multi_scale_deformable_attention": 3,  # beside these two the body of a checkpoint: `_core.remat`
}


def jits(jaxpr):
    """Those of this package; `_as_they_are` is what stands for a barrier before JAX 0.12."""
    for equation in jaxpr.eqns:
        name, held = equation.params.get("name"), list(equation.params.values())
        if equation.primitive.name in ("jit", "pjit") and name != "_as_they_are":
            path = equation.params["jaxpr"].jaxpr.debug_info.func_filename or ""
            yield from [name] if path.startswith(PACKAGE) else []
        for inner in jax.tree.leaves(held, is_leaf=lambda x: hasattr(x, "eqns")):
            yield from jits(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else []


@parametrize(("operator", "implementation", "case"), SMALL)
def test_jaxprs_are_of_what_exporters_know(monkeypatch, operator, implementation, case):
    """Four have no rule for `lax.reduce` by a maximum; `jnp.shape` is an operation under jax2onnx.

    Some stop at a jit within a program, so there is none that could be left out.
    """
    for name in ("shape", "ndim"):
        monkeypatch.setattr(jnp, name, lambda x: pytest.fail("a shape is an attribute of an array"))
    jax.clear_caches()
    function, inputs = gradients_of(operator, implementation, case)
    jaxpr = jax.make_jaxpr(function)(inputs)
    assert "reduce" not in {equation.primitive.name for equation in equations(jaxpr)}
    found = list(jits(jaxpr.jaxpr))
    assert len(found) == JITS.get(operator.name, 2), found


@parametrize("options", [{}, {"scale": -0.5, "is_causal": True}, {"bias": np.zeros(3)}], ids=str)
def test_the_maximum_of_a_softmax_is_one_that_exporters_know(options):
    found = names(lambda x: jab.scaled_masked_softmax(x, **options), jnp.ones((3, 3)))
    assert "reduce_max" in found
    assert "reduce" not in found


def names(function, *arrays) -> set[str]:
    """Of all primitives."""
    return {equation.primitive.name for equation in equations(jax.make_jaxpr(function)(*arrays))}


def long_attention():
    q = jax.ShapeDtypeStruct((1, 1024, 1, 4), np.float32)
    return lambda q: jab.dot_product_attention(q, q, q, is_causal=True), q


def deformable_attention():
    value, at = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1, 20, 1, 2), (1, 3, 1, 2, 2, 2)))
    call = jab.multi_scale_deformable_attention
    return lambda value, at: call(value, ((4, 4), (2, 2)), at, at[..., 0]), value, at


@parametrize("program", [long_attention, deformable_attention])
@parametrize("differentiate", [False, pytest.param(True, marks=thorough)])
def test_checkify_of_indices(program, differentiate):
    """JAX refuses a checkpoint whose body makes constants, as these checks do."""
    call, *arrays = program()
    run = jax.grad(lambda *x: call(*x).sum()) if differentiate else call
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # what checkify adds
        jax.eval_shape(checkify.checkify(run, errors=INDICES), *arrays)


def test_checkify_takes_no_point_outside_of_a_feature_map_for_a_mistake():
    call, *arrays = deformable_attention()
    value, at = (jnp.linspace(-0.5, 1.5, x.size, dtype=x.dtype).reshape(x.shape) for x in arrays)
    run = jax.jit(checkify.checkify(call, errors=checkify.index_checks))
    assert run(value, at)[0].get() is None


@parametrize("forward_mode", [False, True])
def test_checkify_finds_nan(forward_mode):
    attend = lambda x: jab.dot_product_attention(x, x, x, forward_mode=forward_mode)
    run = jax.jit(checkify.checkify(attend, errors=INDICES))
    x = jnp.ones((1, 3, 1, 2), np.float32)
    assert run(x)[0].get() is None
    assert "nan generated" in run(x.at[0, 1].set(jnp.nan))[0].get()


def test_checkify_reports_padding_that_may_hold_nan():
    """The output is right; what nothing sees is summed once, to be told apart, and that sum is NaN."""
    attend = lambda q, k: jab.dot_product_attention(q, k, k, key_value_seq_lengths=np.array([1]))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 2)))
    error, out = checkify.checkify(attend, errors=INDICES)(x, x.at[0, 1:].set(jnp.nan))
    assert "nan generated" in error.get()
    assert_close(out, jnp.broadcast_to(x[:, :1], out.shape), 1e-12)


@parametrize("transform", [jax.jacfwd, lambda f: lambda x: jax.jvp(jax.vmap(f), (x[None],), (x[None],))])
def test_an_error_of_forward_mode_names_the_remedy(transform):
    x = jnp.ones((1, 3, 1, 2))
    remedy = r"can't apply forward-mode autodiff.*\n.*dot_product_attention.*forward_mode=True"
    with pytest.raises(TypeError, match=remedy):
        transform(lambda x: jab.dot_product_attention(x, x, x))(x)


FLAGS = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3")


@thorough
@pytest.mark.skipif(not hasattr(jax.config, FLAGS[0]), reason="this JAX has no such flags")
@parametrize(("operator", "implementation", "case"), [p for p in SMALL if p.values[0] in FAMILIES])
def test_jax_s_own_flags_change_no_gradient(operator, implementation, case):
    """Under jit, vmap and remat, and gradients of gradients."""
    gradient, inputs = gradients_of(operator, implementation, case)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x / 2]), inputs)

    def second(inputs):
        squares = lambda inputs: sum((x**2).sum() for x in jax.tree.leaves(gradient(inputs)[1]))
        return gradient(inputs)[0], jax.grad(jax.checkpoint(squares))(inputs)

    run = lambda: quick_jit(jax.vmap(second))(stacked)
    expected = run()
    for flag in FLAGS:
        try:
            jax.config.update(flag, True)
            jax.clear_caches()
            found = run()
        finally:
            jax.config.update(flag, False)
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert_close(x, y, 1e-12, flag)
