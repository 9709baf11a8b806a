"""Groups of chunks, states that are handed on, what is saved, and numbers that overflow in other forms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import shapes
from helpers import (
    OPERATORS,
    assert_close,
    assert_trees_close,
    differentiated,
    finite_loss,
    quick_jit,
    thorough,
)
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_attn_bwd as jab
from jax_attn_bwd._core import choices, targets
from jax_attn_bwd.ops.linear_attention import plan as planning
from jax_attn_bwd.ops.linear_attention.cases import case
from jax_attn_bwd.ops.linear_attention.matrix import product, solve

DELTA, LINEAR, ERASING = (
    next(o for o in OPERATORS if o.name == n)
    for n in ("gated_delta_rule", "gated_linear_attention", "dplr_linear_attention")
)
NORM = {"l2_norm_epsilon": 1e-6}
# On some CPUs JAX 0.10 multiplies by a library that ends the process at arrays of eight axes (see Limits).
WITHOUT_YNN = {} if jax.__version_info__ >= (0, 11) else {"xla_cpu_experimental_ynn_fusion_type": ""}


def gradients(function, operator, arrays, options):
    loss = finite_loss(function, operator, arrays, options)
    return quick_jit(jax.value_and_grad(loss))(differentiated(operator, arrays))


@pytest.mark.parametrize(
    ("operator", "decay", "at_once"),
    [
        pytest.param(DELTA, "head", False, id="delta-head"),
        pytest.param(LINEAR, "channel", True, id="linear-channel"),
        pytest.param(DELTA, "channel", False, id="delta-channel, halves"),
        pytest.param(DELTA, "channel", True, id="delta-channel", marks=thorough),
        pytest.param(LINEAR, "channel", False, id="linear-channel, halves", marks=thorough),
        pytest.param(LINEAR, "head", False, id="linear-head", marks=thorough),
    ],
)
def test_groups_of_any_size(operator, decay, at_once, monkeypatch):
    """Seven chunks in groups of 1 and 2: the last one is filled up; decays of channels also as on a chip."""
    one = case("", B=(1,), T=50, decay=decay, delta=operator is DELTA, state=True, segments=3, lengths=(44,))
    arrays, options = one.arrays(), NORM
    monkeypatch.setattr(planning, "CHUNK", 8)
    monkeypatch.setenv(choices.WITHOUT, "" if at_once else "linear_halvings_at_once")
    expected = gradients(operator.reference, operator, arrays, options)
    for m in (1, 2):
        monkeypatch.setattr(planning, "_side_by_side", lambda *_, m=m: m)
        value, found = gradients(operator.call, operator, arrays, options)
        assert_close(value, expected[0], 1e-12)
        assert_trees_close(found, expected[1], 1e-10)


@pytest.mark.parametrize(
    ("operator", "decay"),
    [
        (ERASING, "channel"),
        pytest.param(DELTA, "head", marks=thorough),
        pytest.param(DELTA, "channel", marks=thorough),
    ],
    ids=["erasing", "delta", "delta-channel"],
)
def test_one_product_a_chunk(operator, decay, monkeypatch):
    """As on a GPU: eleven chunks, of which a trip of the loop takes eight."""
    erasing = "keys" if operator is ERASING else None
    one = case("", B=(1,), T=84, decay=decay, erasing=erasing, state=True, segments=3, lengths=(79,))
    monkeypatch.setattr(planning, "CHUNK", 8)
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    way = jab.explain(getattr(jab, operator.name), **shapes(one, jnp.float32)).choices[-1].way
    assert way.endswith("chunks of 8 tokens, 11 side by side, one product a chunk")
    arrays = one.arrays()
    value, found = gradients(operator.call, operator, arrays, NORM)
    expected = gradients(operator.reference, operator, arrays, NORM)
    assert_close(value, expected[0], 1e-12)
    assert_trees_close(found, expected[1], 1e-10)


def in_parts(arrays, cuts, is_one_document):
    """(out, final state) of the call on all tokens, and of calls on parts that hand on their states."""
    starts, ends = (0, *cuts), (*cuts, arrays["value"].shape[1])

    @quick_jit
    def run(arrays):
        ids = np.repeat(np.arange(len(starts)), np.subtract(ends, starts))[None]
        told = {} if is_one_document else {"segment_ids": jnp.asarray(ids)}
        whole = DELTA.call(**arrays, **told, **NORM)
        state, outs = arrays["initial_state"], []
        for a, b in zip(starts, ends, strict=True):
            part = {name: x[:, a:b] for name, x in arrays.items() if name != "initial_state"}
            out, last = DELTA.call(**part, initial_state=state, **NORM)
            state = last if is_one_document else None
            outs.append(out)
        return whole, (jnp.concatenate(outs, 1), last)

    return run(arrays)


@pytest.mark.parametrize("is_one_document", [True, False], ids=["handed on", "documents"])
def test_parts_of_a_sequence(is_one_document):
    """A state is handed on; and documents are as if alone."""
    arrays = case("", T=37, state=True).arrays()
    for whole, parts in zip(*in_parts(arrays, (1, 20), is_one_document), strict=True):
        assert_close(parts, whole, 1e-12)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_inverse_of_a_triangle_with_huge_powers(size):
    """The powers of this one reach 1e30 and more, its inverse does not."""
    plane = np.tril(2 * np.ones((1, size, size)), -1)
    exact = np.linalg.inv(np.eye(size) + plane[0])
    assert_close(quick_jit(partial(solve, product))(jnp.asarray(plane, jnp.float32))[0], exact, 1e-5)


@pytest.mark.parametrize(
    ("decay", "at_once"),
    [
        pytest.param("head", False, id="head"),
        pytest.param("channel", True, id="channel"),
        pytest.param("channel", False, id="channel, halves"),
    ],
)
def test_decays_of_all_sizes_in_float32(decay, at_once, rng, monkeypatch):
    """From none to more than float32 can hold the inverse of; also as a chip takes halves."""
    monkeypatch.setenv(choices.WITHOUT, "" if at_once else "linear_halvings_at_once")
    arrays = case("", T=100, decay=decay, state=True).arrays()
    g = -(10.0 ** rng.uniform(-4, 3, arrays["log_decay"].shape))
    arrays["log_decay"] = jnp.asarray(np.where(rng.random(g.shape) < 0.05, -np.inf, g))
    narrow = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    exact = {name: x.astype(jnp.float64) for name, x in narrow.items()}
    _, found = gradients(DELTA.call, DELTA, narrow, NORM)
    _, expected = gradients(DELTA.reference, DELTA, exact, NORM)
    for name, x in expected.items():
        assert_close(found[name], x, 1e-4, name)


@pytest.mark.parametrize(
    ("operator", "decay", "at_once"),
    [
        pytest.param(DELTA, "channel", True, id="delta-channel"),
        pytest.param(LINEAR, "channel", False, id="linear-channel, halves"),
        pytest.param(LINEAR, "head", False, id="linear-head"),
        pytest.param(LINEAR, "channel", True, id="linear-channel", marks=thorough),
        pytest.param(DELTA, "channel", False, id="delta-channel, halves", marks=thorough),
        pytest.param(DELTA, "head", False, id="delta-head", marks=thorough),
    ],
)
def test_the_derivatives_of_a_strong_decay(operator, decay, at_once, monkeypatch):
    """They are of e-16, and as exact as any: no difference is taken of what does not pass that token."""
    monkeypatch.setenv(choices.WITHOUT, "" if at_once else "linear_halvings_at_once")
    arrays = case("", B=(1,), T=5, N=2, decay=decay, delta=operator is DELTA, state=True).arrays()
    arrays["log_decay"] = jnp.zeros_like(arrays["log_decay"]).at[:, 2].set(-16)
    along = jnp.zeros_like(arrays["log_decay"]).at[:, 2].set(1)

    def derivatives(function, told, dtype):
        rest, along_g = ({n: x.astype(dtype) for n, x in tree.items()} for tree in (arrays, {"g": along}))
        g, along_g = rest.pop("log_decay"), along_g["g"]
        loss = lambda g: sum(
            jnp.sin(1 + jnp.arange(x.size, dtype=dtype)) @ x.ravel()
            for x in function(**rest, log_decay=g, **NORM, **told)
        )
        tangent = jax.jvp(loss, (g,), (along_g,))[1]
        return (
            jax.grad(loss)(g)[:, 2],
            tangent,
            jax.grad(lambda g: (jax.grad(loss)(g) * along_g).sum())(g)[:, 2],
        )

    found = quick_jit(partial(derivatives, operator.call, {"forward_mode": True}, jnp.float32))()
    expected = quick_jit(partial(derivatives, operator.reference, {}, jnp.float64))()
    for name, one, other in zip(("gradient", "tangent", "second"), found, expected, strict=True):
        size = float(abs(other).max())
        assert 0 < size < 1e-5
        assert_close(np.asarray(one, np.float64) / size, other / size, 1e-4, name)


def test_the_norm_of_rows_of_any_size():
    """Squares of 1e20 overflow in float32. The gradient is that of a row of length 1, divided by the size."""
    arrays = {n: x.astype(jnp.float32) for n, x in case("", B=(1,), T=3, N=2, H=8).arrays().items()}
    unit = arrays.pop("key")
    unit /= jnp.linalg.norm(unit, axis=-1, keepdims=True)

    def step(key):
        out, pull = jax.vjp(lambda x: DELTA.call(**arrays, key=x, l2_norm_epsilon=1e-12)[0], key)
        return out, pull(jnp.cos(out))[0]

    step = quick_jit(step)
    out, dkey = step(unit)
    for size in (1e12, 1e16, 1e20, 1e38):
        found, gradient = step(unit * jnp.float32(size))
        assert_close(found, out, 1e-5, str(size))
        if size < 1e37:  # beyond it underflows
            assert_close(gradient * jnp.float32(size), dkey, 1e-5, str(size))


def test_channels_on_a_mesh_of_one_device(one_device):
    arrays = case("", T=20, N=2, decay="channel", delta=False).arrays()
    step = jax.grad(lambda x: jnp.sin(LINEAR.call(**x)[0]).sum())
    expected, spec = quick_jit(step)(arrays), PartitionSpec("x", None, "y")
    mesh = jax.make_mesh((1, 1), ("x", "y"), devices=jax.devices()[:1], axis_types=2 * (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, spec))
        mapped = jax.shard_map(step, in_specs=spec, out_specs=spec)
        assert_trees_close(quick_jit(step)(placed), expected, 1e-5)
        assert_trees_close(quick_jit(mapped)(placed), expected, 1e-5)


@pytest.mark.usefixtures("one_device")
def test_explain_names_how_tokens_see_one_another_and_the_rules_that_chose_it():
    def portable(T, decay):
        given = shapes(case("", B=(1,), T=T, decay=decay, delta=False), jnp.float32)
        return jab.explain(jab.gated_linear_attention, **given).choices[-1]

    assert portable(1, "head").way == "one token"
    assert portable(512, "head").way.startswith("plane; chunks of 64 tokens")
    few = portable(16, "channel")
    assert few.way == "all halvings at once; chunks of 16 tokens, 1 side by side"
    assert few.rules == ("linear_merged_stacks", "linear_halvings_at_once", "linear_cached_groups")
    with choices.without("linear_halvings_at_once"):
        assert portable(512, "channel").way.startswith("halvings; chunks of 64")


def test_what_is_saved_is_no_more_than_the_inputs():
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for dtype in (jnp.float32, jnp.bfloat16):
        tokens = shapes(case("", B=(1,), T=512, K=2, N=2, H=64, Hv=64), dtype)
        saved = jax.eval_shape(lambda x: jax.vjp(lambda x: jab.gated_delta_rule(**x, **NORM), x)[1], tokens)
        assert size(tokens) <= size(saved) <= 2 * size(tokens) + 64


def test_remat_by_name_runs_no_second_forward():
    arrays = case("", B=(1,), T=70).arrays()
    call = lambda x: jnp.sin(DELTA.call(**x, **NORM)[0]).sum()
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_states")
    scans = lambda f: str(jax.make_jaxpr(jax.grad(f))(arrays)).count("reverse=False")
    assert scans(jax.checkpoint(call, policy=policy)) < scans(jax.checkpoint(call))


@thorough
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_export_with_a_symbolic_length(decay):
    b, t = export.symbolic_shape("b, t")
    given = shapes(case("", B=(2,), T=3, decay=decay), np.float64)
    symbolic = {n: jax.ShapeDtypeStruct((b, t, *x.shape[2:]), x.dtype) for n, x in given.items()}
    loss = lambda x: (jab.gated_delta_rule(**x, **NORM) ** 2).sum()
    restored = export.deserialize(export.export(jax.jit(loss))(symbolic).serialize(vjp_order=1)).call
    arrays = case("", B=(3,), T=70, decay=decay).arrays()
    both = quick_jit(lambda x: (jax.grad(restored)(x), jax.grad(loss)(x)))
    assert_trees_close(*both(arrays), 1e-12)


def test_narrow_tokens_with_wide_gates():
    given = shapes(case("", T=40, state=True), jnp.bfloat16)
    for name in ("log_decay", "beta", "initial_state"):
        given[name] = given[name].update(dtype=jnp.float32)
    call = lambda x: jab.gated_delta_rule(**x, **NORM, return_final_state=True)
    out, final = jax.eval_shape(call, given)
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    found = jax.eval_shape(jax.grad(lambda x: call(x)[0].astype(jnp.float32).sum()), given)
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in given.items()}


@pytest.mark.parametrize("maps", [1, 2])
def test_vmap_of_grouped_heads_whose_channels_have_decays(maps, rng, one_device):
    """XLA:CPU of JAX 0.12 ends the process at a product of float32 arrays that have eight axes."""
    shapes = [(3, 20, K, 8) for K in (2, 2, 4, 4)]  # query, key, value, log_decay; 3 = the batch
    numbers = [jnp.asarray(rng.standard_normal((2**maps, *shape)), jnp.float32) for shape in shapes]

    def step(query, key, value, log_decay):
        out, pull = jax.vjp(jab.gated_linear_attention, query, key, value, -abs(log_decay))
        return out, pull(jnp.cos(out))

    mapped = step
    for _ in range(maps):
        mapped = jax.vmap(mapped)
    jit = partial(jax.jit, compiler_options=WITHOUT_YNN)
    found = jit(mapped)(*(x.reshape(*[2] * maps, *x.shape[1:]) for x in numbers))
    alone = jit(step)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(alone(*one) for one in zip(*numbers, strict=True)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one.reshape(other.shape), other, 1e-5)
