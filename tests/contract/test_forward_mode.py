"""Calls with `forward_mode=True`: their tangents, and transformations of those, against the definition."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.programs import poisoned
from helpers import (
    OPERATORS,
    QUICK,
    assert_close,
    assert_trees_close,
    cotangents,
    differentiated,
    quick_jit,
    thorough,
)
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads

import jax_attn_bwd
from jax_attn_bwd import mods
from jax_attn_bwd._core.cases import is_floating

TAKE_IT = [
    o for o in OPERATORS if "forward_mode" in inspect.signature(getattr(jax_attn_bwd, o.name)).parameters
]
cases = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(o, c, id=f"{o.name}-{c.name}")
        for o in TAKE_IT
        for c in o.tagged("second", "ci")
        if "second" in c.tags or c.name == "tiles_dynamic"
    ],
)

# In every run, the tests of each input by itself taking long; of operators that are not named, the first.
FOR_ALL_INPUTS = {
    "dot_product_attention": "second_segments",
    "graph_attention": "second_dropout",
    "graph_attention_v2": "second_edge",
    "graph_transformer_attention": "second_edge_bias",
    "multi_head_attention": "second_packed",
    "multi_scale_deformable_attention": "second_softmax",
    "scaled_masked_softmax": "second_scale",
}


def all_but_one_thorough(name):
    """What composes them is one mechanism for all operators."""
    return pytest.mark.parametrize(
        "operator", [pytest.param(o, id=o.name, marks=[] if o.name == name else [thorough]) for o in TAKE_IT]
    )


def portable(operator):
    return next(i.name for i in operator.implementations if i.platform is None)


def drawn(operator, case, dtype=np.float64):
    """(arrays, those that are differentiated, tangents of them)."""
    arrays, rng = case.arrays(dtype), np.random.default_rng(7)
    inputs = differentiated(operator, arrays)
    return arrays, inputs, {n: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for n, x in inputs.items()}


def finite_outputs(function, arrays, options):
    """`inputs -> outputs`, with 0 where they are not finite, which is not differentiated."""

    def call(inputs):
        outputs = function(**{**arrays, **inputs}, **options)
        return tuple(jnp.where(jnp.isfinite(x), x, 0) for x in outputs)

    return call


def both_ways(operator, case, arrays):
    """The call in both modes, and the definition."""
    options = {**case.options, "implementation": portable(operator), "forward_mode": True}
    called = finite_outputs(operator.call, arrays, options)
    return called, finite_outputs(operator.reference, arrays, case.options)


def close(got, expected, rtol=1e-10):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, rtol)


@pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(o, c, id=f"{o.name}-{c.name}")
        for o in TAKE_IT
        for c in o.tagged("second")
        if c.name == FOR_ALL_INPUTS.get(o.name, next(o.tagged("second")).name)
    ],
)
def test_tangents_along_all_inputs(operator, case):
    arrays, inputs, along = drawn(operator, case)
    calls = both_ways(operator, case, arrays)
    got, expected = quick_jit(lambda *given: [jax.jvp(f, given[:1], given[1:]) for f in calls])(inputs, along)
    close(got, expected)


SHAPES = {"query": (1, 2, 2, 2), "key": (1, 3, 1, 2), "value": (1, 3, 1, 1)}
SOME = {  # operator, shapes of its arrays, options, which of them have a tangent; T is not S
    "scale, fixed sink": ("scaled_masked_softmax", {"x": (2, 5), "scale": (2, 1), "sink": ()}, {}, ["scale"]),
    "a scale of each": ("scaled_masked_softmax", {"x": (2, 5), "scale": (2, 5), "sink": ()}, {}, ["scale"]),
    "bias, cap": (
        "dot_product_attention", SHAPES | {"bias": (2, 2, 3)}, {"logits_soft_cap": 1.5, "scale": 2.0},
        ["bias"],
    ),
    "key, cap, sink": ("dot_product_attention", SHAPES | {"sink": (2,)}, {"logits_soft_cap": 1.5}, ["key"]),
    "what a score reads": (
        "dot_product_attention", SHAPES | {"mod_args_0": (2,)}, {"score_mod": mods.alibi}, ["mod_args_0"],
    ),
    "weights, sink, residual": (
        "multi_head_attention",
        {"query": (1, 2, 4), "key": (1, 3, 3), "query_kernel": (4, 2, 2), "key_kernel": (3, 1, 2),
         "value_kernel": (3, 1, 2), "bias_k": (1, 2), "bias_v": (1, 2), "sink": (2,),
         "out_kernel": (2, 2, 4)},
        {"return_weights": True, "logits_soft_cap": 1.5, "add_residual": True},
        ["query", "sink", "out_kernel"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_tangents_of_some_beside_what_is_fixed(name):
    called, shapes, options, some = SOME[name]
    operator, rng = next(o for o in TAKE_IT if o.name == called), np.random.default_rng(3)
    arrays = {n: jnp.asarray(rng.standard_normal(shape)) for n, shape in shapes.items()}
    along = {n: jnp.asarray(rng.standard_normal(shapes[n])) for n in some}

    def tangents(function, **more):
        run = lambda moved: function(**arrays | moved, **options, **more)
        return quick_jit(lambda moved: jax.jvp(run, (moved,), (along,))[1])({n: arrays[n] for n in some})

    close(tangents(operator.call, forward_mode=True), tangents(operator.reference))


@pytest.mark.parametrize(
    ("called", "named", "moving"),
    [
        ("graph_attention_v2", "second_edge", "edge"),
        ("graph_transformer_attention", "second_edge_bias", "key"),  # beside a fixed value
    ],
)
def test_one_tangent_beside_what_is_fixed_on_a_graph(called, named, moving):
    operator = next(o for o in TAKE_IT if o.name == called)
    (case,) = (c for c in operator.tagged("second") if c.name == named)
    arrays, inputs, along = drawn(operator, case)

    def tangents(call):
        return quick_jit(lambda x, t: jax.jvp(lambda x: call({**inputs, moving: x}), (x,), (t,)))

    got, expected = (
        tangents(call)(inputs[moving], along[moving]) for call in both_ways(operator, case, arrays)
    )
    close(got, expected)


def test_gradients_by_an_argument_and_by_the_tangent_of_a_fixed_one():
    x, bias, along, ct = (jnp.sin(jnp.arange(6.0) + i).reshape(2, 3) for i in range(4))

    def gradients(call):
        pushed = lambda x, t: jax.jvp(lambda bias: call(x, bias), (bias,), (t,))[1]
        return quick_jit(jax.grad(lambda x, t: (pushed(x, t) * ct).sum(), (0, 1)))(x, along)

    ours = partial(jax_attn_bwd.scaled_masked_softmax, forward_mode=True)
    close(gradients(lambda x, bias: ours(x, bias=bias)), gradients(lambda x, bias: jax.nn.softmax(x + bias)))


@cases
def test_tangents_together_and_one_by_one(operator, case):
    """What no one reads, of the arguments and of their tangents, may be NaN."""
    arrays, inputs, along = drawn(operator, case)

    def tangents(which):
        def found(arrays, along):
            call, inputs = both_ways(operator, case, arrays)[which], {n: arrays[n] for n in along}
            one = lambda n: jax.jvp(lambda x: call({**inputs, n: x}), (inputs[n],), (along[n],))
            return {"all": jax.jvp(call, (inputs,), (along,)), **{n: one(n) for n in along}}

        return jax.jit(found, compiler_options=QUICK)

    program = tangents(0)
    got = program(arrays, along)
    close(got, tangents(1)(arrays, along))
    cts = cotangents(operator, jax.eval_shape(lambda: operator.call(**arrays, **case.options)))
    if hiding := poisoned(operator, case, arrays, cts):
        bad = {n: hiding[0][n] for n in along}
        close(program(hiding[0], {n: jnp.where(bad[n] == arrays[n], along[n], jnp.nan) for n in along}), got)


@cases
def test_reverse_mode_has_the_same_bits(operator, case):
    arrays, inputs, _ = drawn(operator, case, np.float32)

    def gradients(forward_mode):
        options = {**case.options, "implementation": portable(operator), "forward_mode": forward_mode}
        call = finite_outputs(operator.call, arrays, options)
        loss = lambda inputs: sum((x * jnp.cos(x)).sum().astype(jnp.float32) for x in call(inputs))
        return jax.jit(jax.grad(loss), compiler_options=QUICK)(inputs)

    assert_trees_close(gradients(True), gradients(False), 0)


def transformations(call, inputs, along):
    """`{name: result}` of each composition of `call`, of one dict to a tuple."""
    norm = lambda outputs: sum((x**2).sum() for x in jax.tree.leaves(outputs))
    pushed = lambda f: lambda inputs: jax.jvp(f, (inputs,), (along,))
    stopped = lambda inputs: (lambda x, t: norm(jax.tree.map(jnp.subtract, x, jax.lax.stop_gradient(t))))(
        *pushed(call)(inputs)
    )
    loss = lambda inputs: norm(call(inputs))
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)
    one = next(iter(inputs))
    others = {name: x for name, x in inputs.items() if name != one}
    scanned = lambda x: jax.lax.scan(lambda c, _: (c + loss(x), None), 0.0, None, 2)[0]
    shared = jax.vmap(lambda x: call({**others, one: x}))
    return {
        "linearize": jax.linearize(call, inputs)[1](along),
        "vmap of jvp": jax.vmap(lambda x, t: jax.jvp(call, (x,), (t,)))(stack(inputs), stack(along)),
        "vmap of jvp, over tangents": jax.vmap(lambda t: jax.jvp(call, (inputs,), (t,))[1])(stack(along)),
        "jvp of vmap": jax.jvp(shared, (stack(inputs[one]),), (stack(along[one]),)),
        "jvp of jvp": pushed(pushed(call))(inputs),
        "grad of jvp": jax.grad(lambda inputs: norm(pushed(call)(inputs)))(inputs),
        "grad of jvp with the tangent stopped": jax.grad(stopped)(inputs),
        "jvp of grad": pushed(jax.grad(loss))(inputs)[1],
        "grad of remat": jax.grad(jax.checkpoint(loss))(inputs),
        "jvp of remat": pushed(jax.checkpoint(call))(inputs),
        "grad of remat of jvp": jax.grad(jax.checkpoint(lambda x: norm(pushed(call)(x))))(inputs),
        "jvp of scan": pushed(scanned)(inputs),
    }


@all_but_one_thorough("scaled_masked_softmax")
def test_transformations_of_it(operator):
    case = next(operator.tagged("second"))
    arrays, inputs, along = drawn(operator, case)
    got, expected = (
        jax.jit(partial(transformations, call), compiler_options=QUICK)(inputs, along)
        for call in both_ways(operator, case, arrays)
    )
    for name, result in expected.items():
        close(got[name], result)


@all_but_one_thorough("edge_mean")
def test_jacobians_column_by_column(operator):
    case = next(operator.tagged("second"))
    arrays, inputs, _ = drawn(operator, case)
    one = min(inputs, key=lambda name: inputs[name].size)
    called, defined = both_ways(operator, case, arrays)
    jacobian = lambda call: quick_jit(jax.jacfwd(lambda x: call({**inputs, one: x})))(inputs[one])
    close(jacobian(called), jacobian(defined))


@thorough
@pytest.mark.parametrize("operator", TAKE_IT, ids=lambda o: o.name)
@pytest.mark.parametrize("order", [1, 2])
def test_finite_differences_in_both_modes(operator, order):
    case = next(operator.tagged("second"))
    arrays, inputs, _ = drawn(operator, case)
    call = jax.jit(both_ways(operator, case, arrays)[0])
    check_grads(call, (inputs,), order=order, modes=["fwd", "rev"], rtol=1e-4)


@all_but_one_thorough("edge_max")
def test_narrow_dtypes_lose_no_more_than_the_plain_formula(operator):
    case = next(operator.tagged("second"))
    exact = drawn(operator, case)
    rounded = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)
    narrow = rounded(exact, jnp.bfloat16)
    wide = rounded(narrow, jnp.float64)

    def tangents(which, given):
        arrays, inputs, along = given
        call = both_ways(operator, case, arrays)[which]
        found = quick_jit(lambda inputs: jax.jvp(call, (inputs,), (along,))[1])(inputs)
        return [np.asarray(x, np.float64) for x in found]

    for got, plain, expected in zip(tangents(0, narrow), tangents(1, narrow), tangents(1, wide), strict=True):
        error = lambda x, expected=expected: np.linalg.norm(x - expected)
        assert error(got) <= 2 * error(plain) + 2**-9 * np.linalg.norm(expected)


@all_but_one_thorough("edge_mean")
def test_tangents_inside_shard_map(operator):
    """Each device has inputs of its own; what is not differentiated is on all of them."""
    case = next(operator.tagged("second"))
    arrays, inputs, along = drawn(operator, case)
    called, defined = both_ways(operator, case, arrays)
    mesh, spec = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,)), PartitionSpec("device")
    one = lambda inputs: [x[None] for x in called(jax.tree.map(lambda x: x[0], inputs))]
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)
    pushed = lambda f: quick_jit(lambda inputs, along: jax.jvp(f, (inputs,), (along,)))
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)
    got, expected = (pushed(f)(stack(inputs), stack(along)) for f in (mapped, jax.vmap(defined)))
    close(got, expected)


def test_the_value_of_the_appended_row_moves_alone():
    """The output is linear in it."""
    x, bias_k, bias_v, along = (jnp.sin(jnp.arange(4.0) + i)[None] for i in range(4))
    params = jax_attn_bwd.MultiHeadAttentionParams(bias_k=bias_k, bias_v=bias_v)
    moved = params._replace(bias_v=bias_v + along)
    call = partial(jax_attn_bwd.multi_head_attention, query=x, num_heads=1)
    push = lambda bias_v: call(params._replace(bias_v=bias_v), forward_mode=True)
    _, dout = jax.jvp(push, (bias_v,), (along,))
    assert_close(dout, call(moved) - call(params), 1e-12)


def test_a_residual_has_no_tangent():
    x, params = jnp.ones((2, 3)), jax_attn_bwd.MultiHeadAttentionParams(query_kernel=jnp.ones((3, 1, 3)))
    with pytest.raises(ValueError, match="return_residual must be left out with forward_mode=True"):
        jax_attn_bwd.multi_head_attention(params, x, return_residual=True, forward_mode=True)


def test_jax_without_such_operations_is_named(monkeypatch):
    monkeypatch.setattr("jax_attn_bwd._core.forward_mode._BASE", None)
    with pytest.raises(NotImplementedError, match=f"which JAX {jax.__version__} does not have"):
        jax_attn_bwd.scaled_masked_softmax(jnp.ones(3), forward_mode=True)
