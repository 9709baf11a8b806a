"""Whole planes of GPUs: where they are chosen, and that all at once and in turn they give the definition."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, quick_jit, thorough
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core.targets import aimed_at
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import reference
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Materialized, Planes, Strips, Tiles, plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

AT_ONCE = Materialized(whole_rows=True, formed_again=True, fused_dp=True)
IN_TURN = partial(Planes, fused_dp=True)


def schedule(shape, dtype=jnp.bfloat16, bias=None, heads=None, sink=None, **mask):
    """The schedule of a call on an H200; `bias` is the shape in front of its rows and columns."""
    x, k = (jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), dtype) for n in (shape[2], heads or shape[2]))
    bias = None if bias is None else jax.ShapeDtypeStruct((*bias, shape[1], shape[1]), dtype)
    with aimed_at("H200"):
        return plan("xla", Options(scale=1.0), Operands(x, k, k, bias, sink=sink, mask=Mask(**mask))).schedule


def test_planes_are_cut_where_the_plain_formula_holds_more_than_2_gib():
    """Then they take a quarter of that, at most 2 GiB. Short causal calls are whole, long ones strips."""
    assert schedule((32, 128, 12, 64)) == schedule((32, 512, 12, 64)) == AT_ONCE
    assert schedule((32, 128, 12, 64), is_causal=True) == AT_ONCE
    assert schedule((2, 128, 12, 64)) == Materialized(whole_rows=True)  # a few MiB, which XLA may keep
    assert isinstance(schedule((8, 512, 16, 64), is_causal=True), Strips)
    assert isinstance(schedule((8, 512, 16, 64), window=(20, 0)), Strips)
    assert schedule((4, 4096, 16, 128)) == IN_TURN(4, 1)
    assert schedule((4, 4096, 16, 128), jnp.float32) == IN_TURN(1, 8)
    assert schedule((1, 4096, 16, 128)) == IN_TURN(1, 4)
    assert schedule((4, 4096, 16, 128), heads=2) == IN_TURN(4, 1)
    assert schedule((4, 4096, 16, 128), jnp.float16) == Planes(4, 1)  # which lacks the range of dp
    assert isinstance(schedule((1, 4096, 16, 128), heads=1), Strips)  # nothing can be cut
    assert isinstance(schedule((1, 16384, 2, 128)), Strips)  # no plane of a head has room


def test_padding_and_biases_have_planes():
    """What entries share is cut by heads alone; segments, and beside a bias windows, leave tiles to skip."""
    array = lambda *shape, dtype=jnp.bool_: jax.ShapeDtypeStruct(shape, dtype)
    ids = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), array(4, 4096, dtype=jnp.int32))
    shape = (4, 4096, 16, 128)
    assert schedule(shape, elements=array(4, 1, 1, 4096)) == IN_TURN(4, 1)
    assert schedule(shape, key_value_seq_lengths=array(4, dtype=jnp.int32)) == IN_TURN(4, 1)
    assert schedule(shape, bias=(1, 16)) == schedule(shape, bias=(16,)) == IN_TURN(1, 4)
    assert schedule(shape, bias=(4, 16)) == schedule(shape, bias=(4, 1), is_causal=True) == IN_TURN(4, 1)
    assert schedule((1, 2048, 16, 64), bias=(1, 16)) == AT_ONCE
    assert schedule(shape, sink=array(16, dtype=jnp.bfloat16)) == Planes(4, 1)  # p sums to less than 1
    assert schedule(shape, jnp.float32, sink=array(16, dtype=jnp.float32)) == IN_TURN(1, 8)
    assert isinstance(schedule(shape, bias=(1, 16), window=(20, 0)), Tiles)
    assert isinstance(schedule(shape, bias=(1, 16), **ids), Tiles)
    assert schedule(shape, **ids).runtime_extent


@pytest.fixture
def planes(monkeypatch):
    def played(found):
        monkeypatch.setattr(planning, "on_gpu", lambda *_: found)

    jax.clear_caches()  # what was traced with other tiles
    yield played
    jax.clear_caches()


B, T, S = 2, 20, 28
CALLS = {  # schedule; query heads, key heads; the bias in front of T, S; other options
    "full": (AT_ONCE, 2, 2, None, {}),
    "full, by entries": (IN_TURN(2, 1), 2, 2, None, {}),
    "grouped, by heads": (IN_TURN(1, 2), 4, 2, None, {"sink": True}),
    "keys, by both": (Planes(2, 2), 4, 2, None, {"mask": (B, 1, 1, S)}),
    "rows that see nothing": (AT_ONCE, 2, 2, None, {"mask": (B, 1, T, S), "sink": True}),
    "lengths": (Planes(2, 1), 2, 1, None, {"lengths": True, "logits_soft_cap": 3.0}),
    "bias that entries share": (Planes(1, 2), 4, 2, (1, 4), {}),
    "bias that entries share, by both": (IN_TURN(2, 2), 4, 2, (4,), {"sink": True}),
    "bias that heads share": (IN_TURN(1, 2), 2, 2, (2, 1), {}),
    "bias of each, causal, capped": (AT_ONCE, 2, 2, (2, 2), {"is_causal": True, "logits_soft_cap": 3.0}),
}
DEFAULT = ("rows that see nothing", "bias that entries share, by both")


def arrays_of(call, rng):
    found, N, K, bias, options = CALLS[call]
    shapes = (T, N, 8), (S, K, 8), (S, K, 6), (T, N, 6), (T, N), (T, N, 8)
    q, k, v, dout, dlse, along = (jnp.asarray(rng.normal(size=(B, *shape))) for shape in shapes)
    options = dict(options)
    sink = jnp.asarray(rng.normal(size=N)) if options.pop("sink", False) else None
    if options.pop("lengths", False):
        options |= {"key_value_seq_lengths": jnp.array([9, S]), "query_seq_lengths": jnp.array([T, 11])}
    if "mask" in options:
        mask = rng.random(options["mask"]) < 0.6
        mask[..., 5] = False
        if mask.shape[-2] > 1:
            mask[:, :, 3] = False
        options["mask"] = jnp.asarray(mask)
    if bias is not None:  # a row and a column of it hide all
        numbers = rng.normal(size=(*bias, T, S))
        numbers[..., 7, :] = numbers[..., 5] = -np.inf
        bias = jnp.asarray(numbers)
    return found, (q, k, v, sink, bias), (dout, dlse), along, options


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if call in DEFAULT else thorough) for call in CALLS]
)
def test_planes_give_the_definition(call, planes, rng):
    """Outputs, gradients for both cotangents, and of one call a derivative of these."""
    found, operands, cotangents, along, options = arrays_of(call, rng)
    planes(found)

    def outputs_and_gradients(function):
        def both(q):
            call = lambda q, k, v, sink, bias: function(q, k, v, sink=sink, bias=bias, **options)
            out, pull = jax.vjp(call, q, *operands[1:])
            dout, dlse = cotangents
            return out, pull((dout, jnp.where(jnp.isfinite(out[1]), dlse, 0)))

        second = lambda q: jax.grad(lambda q: (both(q)[1][0] * along).sum())(q)
        return quick_jit(lambda q: (both(q), second(q) if "by both" in call else None))(operands[0])

    ours = outputs_and_gradients(partial(dot_product_attention, return_residual=True))
    with jax.numpy_rank_promotion("allow"):
        expected = outputs_and_gradients(reference.dot_product_attention)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-10)


@pytest.mark.parametrize("call", ["rows that see nothing", "bias that entries share, by both"])
def test_planes_hide_poison_and_nothing_else(call, planes, rng):
    """NaN in a query that sees nothing, its cotangent, and a key that nothing sees; what is seen passes."""
    found, (q, k, v, _, bias), (dout, _), _, options = arrays_of(call, rng)
    planes(found)
    row = 7 if bias is not None else 3

    @quick_jit
    def step(q, k, v, dout):
        attend = lambda q, k, v: dot_product_attention(q, k, v, bias=bias, **options)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    clean = step(q, k, v, dout)
    hidden = [x.at[:, at].set(jnp.nan) for x, at in ((q, row), (k, 5), (v, 5), (dout, row))]
    for x, y in zip(*map(jax.tree.leaves, (step(*hidden), clean)), strict=True):
        assert_close(x, y, 1e-12)
    out, (dq, *_) = step(q.at[:, 2].set(jnp.nan), k, v, dout)
    assert jnp.isnan(out[:, 2]).all()
    assert jnp.isnan(dq[:, 2]).all()
    assert_close(out[:, :2], clean[0][:, :2], 1e-12)


def test_the_backward_of_a_large_plane_forms_its_logits_again(planes):
    """Else XLA takes those of the forward, and each layer of a model keeps a plane."""
    x = jnp.ones((1, 8, 1, 4), jnp.float64)
    step = lambda q, k, v: jax.grad(lambda *qkv: jnp.sin(dot_product_attention(*qkv)).sum(), (0, 1, 2))(
        q, k, v
    )
    products = []
    for found in (AT_ONCE, replace(AT_ONCE, formed_again=False)):
        planes(found)
        jax.clear_caches()
        text = jax.jit(step).lower(x, x, x).compile().as_text()
        products.append(len(re.findall(r"\[[\d,]*8,8\]\S* dot\(", text)))
    assert products == [3, 2]  # logits, those of the backward, cotangents of the probabilities


@pytest.mark.parametrize("mean", [3, pytest.param(0, marks=thorough)])
@pytest.mark.parametrize("lead", [(1, 2), *(pytest.param(x, marks=thorough) for x in (None, (2, 2)))])
@pytest.mark.parametrize("found", [AT_ONCE, pytest.param(IN_TURN(1, 2), marks=thorough)])
def test_planes_in_bfloat16_are_as_near_as_the_plain_formula(found, lead, mean, planes, rng):
    """The output and each gradient are at most 1.6 times as far from float64's as those of `jax.nn` are.

    As they are computed for a GPU, in the mean square. A mean of keys and values makes errors of delta large.
    """
    planes(found)
    shapes = [((2, 96, 2, 16), at) for at in (0, mean, mean, 0)] + (
        [] if lead is None else [((*lead, 96, 96), 0)]
    )
    narrow = [jnp.asarray(rng.normal(at, size=shape), jnp.bfloat16) for shape, at in shapes]

    def step(call, arrays):
        q, k, v, dout, *bias = arrays
        out, pull = jax.vjp(call, q, k, v, *bias)
        return jax.tree.leaves((out, pull(dout)))

    with aimed_at("H200"):
        traced = jax.make_jaxpr(partial(step, partial(dot_product_attention, implementation="xla")))(narrow)
    ours = jax.jit(jaxpr_as_fun(traced), compiler_options=QUICK)(*narrow)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain_step = jax.jit(partial(step, jax.nn.dot_product_attention), compiler_options=QUICK)
        plain, exact = plain_step(narrow), plain_step([x.astype(jnp.float64) for x in narrow])
    error = lambda x, y: np.sqrt(np.square(np.asarray(x, np.float64) - np.asarray(y)).mean())
    for x, y, z in zip(ours, plain, exact, strict=True):
        assert error(x, z) <= 1.6 * error(y, z)


@thorough
@pytest.mark.parametrize("found", [AT_ONCE, IN_TURN(2, 2)])
def test_planes_under_vmap_and_remat(found, planes, rng):
    planes(found)
    q, k, v, dout, along = (jnp.asarray(rng.normal(size=(B, n, 2, 8))) for n in (T, S, S, T, T))
    mask = jnp.asarray(rng.random((3, B, 1, 1, S)) < 0.6)

    def second(function):
        def dq(q, mask):
            return jax.vjp(jax.checkpoint(lambda q: function(q, k, v, mask=mask)), q)[1](dout)[0]

        derivative = jax.grad(lambda q, mask: (dq(q, mask) * along).sum())
        return quick_jit(jax.vmap(derivative, (None, 0)))(q, mask)

    with jax.numpy_rank_promotion("allow"):
        expected = second(lambda *args, **options: reference.dot_product_attention(*args, **options)[0])
    assert_close(second(dot_product_attention), expected, 1e-10)


@thorough
@pytest.mark.parametrize("found", [replace(AT_ONCE, fused_dp=False), IN_TURN(2, 2)])
def test_planes_on_an_explicit_mesh(found, planes, rng):
    """Each device has slices of its own batch entries and heads, and sums alone are exchanged.

    Batch and heads of several devices are not one axis of a product.
    """
    planes(found)
    shapes = (T, 4, 8), (S, 4, 8), (S, 4, 6), (T, 4, 6)
    arrays = [jnp.asarray(rng.normal(size=(4, *shape))) for shape in shapes]
    bias = jnp.asarray(rng.normal(size=(1, 4, T, S)))

    @quick_jit
    def step(q, k, v, dout, bias):
        out, pull = jax.vjp(partial(dot_product_attention), q, k, v, bias)
        return out, pull(dout)

    expected = step(*arrays, bias)
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, P("b", None, "n")) for x in arrays]
        assert planning._may_fuse_dp(found, Operands(*placed[:3])) is found.fused_dp
        compiled = step.lower(*placed, jax.device_put(bias, P(None, "n"))).compile()
        sharded = compiled(*placed, jax.device_put(bias, P(None, "n")))
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-12)
    assert set(collectives(compiled)) <= {"all-reduce"}
