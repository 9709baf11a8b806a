"""Every operator under JAX's transformations; the cases are those marked "check" or "second"."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    firsts,
    quick_jit,
    thorough,
)

pytestmark = pytest.mark.usefixtures("one_device")
parametrize = pytest.mark.parametrize
CASE = ("operator", "implementation", "case")
small = parametrize(CASE, firsts(case_params("second")))
rules = parametrize(CASE, families(firsts(case_params("second"))))  # whatever the formula is
first = parametrize(CASE, first_of_each(case_params("second")))
dense = next(o for o in OPERATORS if o.name == "dot_product_attention")


def loss_of(operator, implementation, case, dtype=np.float64):
    arrays = case.arrays(dtype)
    options = {**case.options, "implementation": implementation}
    loss = finite_loss(operator.call, operator, arrays, options)
    return loss, differentiated(operator, arrays), arrays, options


@first
def test_vmap_over_all_operands(operator, implementation, case):
    vmap_over(operator, implementation, case, lambda names: [tuple(names)])


@thorough
@small
def test_vmap_over_each_operand(operator, implementation, case):
    """For any two operands there is a call in which one is batched and the other is shared."""
    vmap_over(operator, implementation, case, lambda names: [(name,) for name in names if len(names) > 1])


def vmap_over(operator, implementation, case, subsets):
    """Values and gradients, batched and shared operands alike, against one call at a time."""
    _, _, arrays, options = loss_of(operator, implementation, case)
    rng = np.random.default_rng(3)
    stacked = {}
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            stacked[name] = jnp.stack([x, x + rng.standard_normal(x.shape)])
        else:
            stacked[name] = jnp.stack([x, x[..., ::-1]])
    outputs = jax.eval_shape(lambda: operator.call(**arrays, **options))
    cts = cotangents(operator, outputs)

    def step(inputs):
        def call(floating):
            out = operator.call(**{**inputs, **floating}, **options)
            return tuple(jnp.where(jnp.isfinite(x), x, 0) for x in out)

        out, pullback = jax.vjp(call, differentiated(operator, inputs))
        return dict(zip(operator.outputs, out, strict=True)), pullback(cts)[0]

    single = jax.jit(step, compiler_options=QUICK)
    for names in subsets(arrays):
        inputs = {n: stacked[n] if n in names else x for n, x in arrays.items()}
        axes = ({n: 0 if n in names else None for n in arrays},)
        out, gradients = jax.jit(jax.vmap(step, in_axes=axes), compiler_options=QUICK)(inputs)
        for b in range(2):
            one = {n: stacked[n][b] if n in names else x for n, x in arrays.items()}
            expected_out, expected = single(one)
            assert_trees_close(jax.tree.map(lambda x, b=b: x[b], out), expected_out, 1e-12)
            assert_trees_close(jax.tree.map(lambda x, b=b: x[b], gradients), expected, 1e-12)


@parametrize("batched", [("value",), ("query",), ("key",), ("query", "value")], ids=str)
def test_gradient_through_vmap_of_shared_operands(batched):
    """Gradients of operands that vmap shares (silently wrong in JAX 0.10 unless outputs are tied)."""
    case = next(c for c in dense.cases if c.name == "causal")
    arrays = case.arrays()
    rng = np.random.default_rng(2)
    arrays |= {n: jnp.asarray(rng.standard_normal((3, *arrays[n].shape))) for n in batched}

    def loss(function, inputs):
        def one(inputs):
            out, lse = function(**inputs, **case.options)
            return (jnp.cos(out) * out).sum() + (lse**2).sum()

        axes = ({n: 0 if n in batched else None for n in inputs},)
        return jax.vmap(one, in_axes=axes)(inputs).sum()

    got = jax.jit(jax.grad(lambda i: loss(dense.call, i)), compiler_options=QUICK)(arrays)
    expected = quick_jit(jax.grad(lambda i: loss(dense.reference, i)))(arrays)
    assert_trees_close(got, expected, 1e-12)


@rules
def test_eager_equals_jit(operator, implementation, case):
    loss, inputs, *_ = loss_of(operator, implementation, case)
    assert_trees_close(jax.grad(loss)(inputs), jax.jit(jax.grad(loss), compiler_options=QUICK)(inputs), 1e-12)


@rules
def test_scan_over_steps_and_remat(operator, implementation, case):
    loss, inputs, *_ = loss_of(operator, implementation, case)

    def scanned(inputs):
        return jax.lax.scan(lambda c, w: (c + w * loss(inputs), None), 0.0, jnp.ones(3) / 3)[0]

    @partial(jax.jit, compiler_options=QUICK)
    def gradients(inputs):
        return [jax.grad(f)(inputs) for f in (loss, scanned, jax.checkpoint(loss))]

    expected, *others = gradients(inputs)
    for got in others:
        assert_trees_close(got, expected, 1e-12)


@parametrize("policy_names", [("attention_out", "attention_lse"), ()], ids=["saved", "not saved"])
def test_remat_by_name_saves_the_forward(policy_names):
    """With both outputs saved by name, the rematerialised backward holds no second forward."""
    case = next(c for c in dense.cases if c.name == "plain")
    arrays = case.arrays()
    policy = jax.checkpoint_policies.save_only_these_names(*policy_names)

    def layer(inputs):
        out, _ = dense.call(**inputs)
        return jnp.sin(out).sum()

    gradient = jax.grad(jax.checkpoint(layer, policy=policy))
    assert_trees_close(jax.jit(gradient)(arrays), jax.jit(jax.grad(layer))(arrays), 1e-12)
    opaque = re.findall(r"custom_jvp_call\[\s*name=(\w+)", str(jax.make_jaxpr(gradient)(arrays)))
    assert opaque.count("forward") == (1 if policy_names else 2)


@thorough
@parametrize(CASE, [param for param in firsts(case_params("second")) if param.values[0] in FAMILIES])
def test_ahead_of_time_compilation(operator, implementation, case):
    loss, inputs, *_ = loss_of(operator, implementation, case)
    step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    assert_trees_close(step.lower(inputs).compile()(inputs)[1], step(inputs)[1], 0)


def test_donated_operands():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 4, 8))) for _ in range(3))
    expected, _ = dense.call(query=q, key=k, value=v)
    attend = jax.jit(lambda q, k, v: dense.call(query=q, key=k, value=v)[0], donate_argnums=0)
    assert_close(attend(q, k, v), expected, 1e-12)
    assert q.is_deleted()


@thorough
def test_second_order_through_many_tiles_with_traced_lengths():
    """Hessian-vector products over a grid of tiles, under jit, with lengths that are traced."""
    rng = np.random.default_rng(0)
    q, k, v, u = (jnp.asarray(rng.standard_normal((1, 520, 1, 4))) for _ in range(4))

    def loss(function, q, length):
        out, lse = function(query=q, key=k, value=v, is_causal=True, key_value_seq_lengths=length)
        return (out * u).sum() + (lse**2).sum()

    def products(function):
        def both(q, length):
            gradient = jax.grad(lambda q: loss(function, q, length))
            forward = jax.jvp(gradient, (q,), (u,))[1]
            reverse = jax.grad(lambda q: (gradient(q) * u).sum())(q)
            return forward, reverse

        return jax.jit(both)(q, jnp.asarray([300]))

    for got, expected in zip(products(dense.call), products(dense.reference), strict=True):
        assert_close(got, expected, 1e-10)
