"""Groups of chunks, states that are handed on, what is saved, and numbers that overflow in other forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import shapes
from helpers import OPERATORS, assert_close, assert_trees_close, differentiated, finite_loss, quick_jit
from jax import export

import jax_attn_bwd as jab
from jax_attn_bwd.ops.linear_attention import plan as planning
from jax_attn_bwd.ops.linear_attention.cases import case
from jax_attn_bwd.ops.linear_attention.chunk import inverse

DELTA, LINEAR = (
    next(o for o in OPERATORS if o.name == n) for n in ("gated_delta_rule", "gated_linear_attention")
)
NORM = {"l2_norm_epsilon": 1e-6}


def gradients(function, operator, arrays, options):
    loss = finite_loss(function, operator, arrays, options)
    return quick_jit(jax.value_and_grad(loss))(differentiated(operator, arrays))


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("operator", [DELTA, LINEAR], ids=lambda o: o.name)
def test_groups_of_any_size(operator, decay, monkeypatch):
    """Seven chunks in groups of 1, 2 and 7: the last group is filled up."""
    one = case("", B=(1,), T=50, decay=decay, delta=operator is DELTA, state=True, segments=3, lengths=(44,))
    arrays, options = one.arrays(), NORM
    monkeypatch.setattr(planning, "CHUNK", 8)
    expected = gradients(operator.reference, operator, arrays, options)
    for m in (1, 2, 7):
        monkeypatch.setattr(planning, "_side_by_side", lambda *_, m=m: m)
        value, found = gradients(operator.call, operator, arrays, options)
        assert_close(value, expected[0], 1e-12)
        assert_trees_close(found, expected[1], 1e-10)


@pytest.mark.parametrize("operator", [DELTA, LINEAR], ids=lambda o: o.name)
def test_a_state_is_handed_on(operator):
    arrays = case("", T=37, delta=operator is DELTA, state=True).arrays()
    out, final = operator.call(**arrays, **NORM)
    state, outs = arrays.pop("initial_state"), []
    for part in (slice(0, 1), slice(1, 20), slice(20, 37)):
        tokens = {name: x[:, part] for name, x in arrays.items()}
        some, state = operator.call(**tokens, initial_state=state, **NORM)
        outs.append(some)
    assert_close(jnp.concatenate(outs, 1), out, 1e-12)
    assert_close(state, final, 1e-12)


def test_documents_are_as_if_alone():
    arrays = case("", B=(1,), T=30, state=True).arrays()
    ids = jnp.asarray([[4] * 7 + [5] * 12 + [9] * 11])
    out, final = DELTA.call(**arrays, segment_ids=ids, **NORM)
    state = arrays.pop("initial_state")
    for part in (slice(0, 7), slice(7, 19), slice(19, 30)):
        tokens = {name: x[:, part] for name, x in arrays.items()}
        alone, last = DELTA.call(**tokens, initial_state=state, **NORM)
        assert_close(out[:, part], alone, 1e-12)
        state = None
    assert_close(final, last, 1e-12)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverse_of_a_triangle_with_huge_powers(size):
    """The powers of this one reach 1e30 and more, its inverse does not."""
    plane = np.tril(2 * np.ones((1, size, size)), -1)
    exact = np.linalg.inv(np.eye(size) + plane[0])
    assert_close(inverse(jnp.asarray(plane, jnp.float32))[0], exact, 1e-5)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_decays_of_all_sizes_in_float32(decay, rng):
    """From none to more than float32 can hold the inverse of."""
    arrays = case("", T=100, decay=decay, state=True).arrays()
    g = -(10.0 ** rng.uniform(-4, 3, arrays["log_decay"].shape))
    arrays["log_decay"] = jnp.asarray(np.where(rng.random(g.shape) < 0.05, -np.inf, g))
    narrow = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    exact = {name: x.astype(jnp.float64) for name, x in narrow.items()}
    _, found = gradients(DELTA.call, DELTA, narrow, NORM)
    _, expected = gradients(DELTA.reference, DELTA, exact, NORM)
    for name, x in expected.items():
        assert_close(found[name], x, 1e-4, name)


def test_what_is_saved_is_no_more_than_the_inputs():
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = case("", B=(1,), T=512, K=2, N=2, H=64, Hv=64).arrays(dtype)
        tokens = [arrays[n] for n in ("query", "key", "value", "log_decay", "beta")]
        saved = jax.vjp(lambda *x: jab.gated_delta_rule(*x, **NORM), *tokens)[1]
        inputs = sum(x.nbytes for x in tokens)
        assert sum(x.nbytes for x in jax.tree.leaves(saved)) <= 2 * inputs


def test_remat_by_name_runs_no_second_forward():
    arrays = case("", B=(1,), T=70).arrays()
    call = lambda x: jnp.sin(DELTA.call(**x, **NORM)[0]).sum()
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_states")
    scans = lambda f: str(jax.make_jaxpr(jax.grad(f))(arrays)).count("reverse=False")
    assert scans(jax.checkpoint(call, policy=policy)) < scans(jax.checkpoint(call))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_export_with_a_symbolic_length(decay):
    b, t = export.symbolic_shape("b, t")
    given = shapes(case("", B=(2,), T=3, decay=decay), np.float64)
    symbolic = {n: jax.ShapeDtypeStruct((b, t, *x.shape[2:]), x.dtype) for n, x in given.items()}
    loss = lambda x: (jab.gated_delta_rule(**x, **NORM) ** 2).sum()
    restored = export.deserialize(export.export(jax.jit(loss))(symbolic).serialize(vjp_order=1)).call
    for T in (1, 70):
        arrays = case("", B=(3,), T=T, decay=decay).arrays()
        assert_trees_close(jax.grad(restored)(arrays), jax.jit(jax.grad(loss))(arrays), 1e-12)


def test_narrow_tokens_with_wide_gates():
    arrays = case("", T=40, state=True).arrays(jnp.bfloat16)
    wide = {n: arrays[n].astype(jnp.float32) for n in ("log_decay", "beta", "initial_state")}
    call = lambda x: jab.gated_delta_rule(**x, **NORM, return_final_state=True)
    out, final = call(arrays | wide)
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    found = jax.grad(lambda x: call(x)[0].astype(jnp.float32).sum())(arrays | wide)
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in (arrays | wide).items()}
