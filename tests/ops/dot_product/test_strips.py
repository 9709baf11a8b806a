"""The portable path of GPUs: where it is chosen, and that its strips, played small, give the definition."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, thorough
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core.targets import aimed_at
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import reference
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Strips, plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

PLAIN = Options(scale=1.0)


def schedule(shape, kind, platform, options=PLAIN, **mask):
    """The schedule of a call on one such device."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        return plan("xla", options, Operands(x, x, x, mask=Mask(**mask))).schedule


def test_strips_are_for_gpus():
    shape = (4, 4096, 16, 128)
    causal = schedule(shape, "NVIDIA H200", "gpu", is_causal=True)
    assert causal == Strips(512, 512, head_slices=1)
    full = schedule((1, 32768, 2, 128), "NVIDIA A100-SXM4-80GB", "gpu")  # one plane has no room
    assert isinstance(full, Strips)
    for kind, platform in (("cpu", "cpu"), ("TPU v5e", "tpu")):
        assert not isinstance(schedule(shape, kind, platform, is_causal=True), Strips)
    here = plan("xla", PLAIN, Operands(*(jnp.zeros((4, 4096, 1, 1)),) * 3))
    assert not isinstance(here.schedule, Strips)
    dropped = Options(scale=1.0, dropout_rate=0.1)
    assert not isinstance(schedule(shape, "NVIDIA H200", "gpu", dropped, is_causal=True), Strips)


def test_large_strips_are_cut_by_heads():
    causal = schedule((64, 4096, 16, 128), "NVIDIA H200", "gpu", is_causal=True)
    assert (causal.head_slices, causal.block_q) == (4, 512)


def test_devices_of_a_mesh_have_the_strips_of_one():
    """Where types tell how arrays lie; of Auto axes they do not, and batch and heads are not merged."""
    alone = schedule((4, 4096, 16, 128), "NVIDIA H200", "gpu", is_causal=True)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=1, platform="gpu")
    for kind, merged in ((AxisType.Explicit, True), (AxisType.Auto, False)):
        mesh = AbstractMesh((2, 4), ("b", "n"), (kind, kind), abstract_device=device)
        sharding = NamedSharding(mesh, P("b", None, "n") if merged else P())
        x = jax.ShapeDtypeStruct((8, 4096, 64, 128), jnp.bfloat16, sharding=sharding)
        with jax.sharding.use_abstract_mesh(mesh):
            found = plan("xla", PLAIN, Operands(x, x, x, mask=Mask(is_causal=True))).schedule
        assert (found == alone) == merged
        assert isinstance(found, Strips)
        assert (found.head_slices > 0) == merged


def test_a_gpu_s_product_rounds_the_probabilities_that_it_reads():
    """They stand in memory in float32, for what ends the product of their cotangent."""
    x = jax.ShapeDtypeStruct((1, 512, 16, 16), jnp.bfloat16)  # two strips
    out = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    gradient = jax.grad(lambda *qkv: out(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
    with aimed_at("H200"):
        text = jax.jit(gradient).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    rounding = [line for line in products if "lhs_precision_type = bf16" in line]
    assert len(rounding) == 2
    assert all("x256xf32>" in line for line in rounding)
    assert len(products) == 2 * (3 + 5)


@pytest.fixture
def strips(monkeypatch):
    def played(head_slices):
        def schedule(_, options, operands):
            return Strips(24, 40, head_slices)

        monkeypatch.setattr(planning, "on_gpu", schedule)

    jax.clear_caches()  # what was traced with other tiles
    yield played
    jax.clear_caches()


CALLS = {  # into how many slices merged batch and heads are cut; T, S, query heads, key heads; options
    "full, ragged": (2, 50, 70, 2, 2, {}),
    "causal, grouped": (1, 72, 72, 4, 2, {"is_causal": True}),
    "window, rows that see nothing": (2, 60, 33, 2, 1, {"local_window_size": (9, 3), "sink": True}),
    "soft cap, keys that no one sees": (0, 40, 90, 2, 2, {"is_causal": True, "logits_soft_cap": 3.0}),
    "cap and window, more blocks of keys than of rows": (
        1, 30, 100, 1, 1, {"local_window_size": (9, 60), "logits_soft_cap": 3.0},
    ),
}  # fmt: skip
DEFAULT = ("window, rows that see nothing", "cap and window, more blocks of keys than of rows")


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if call in DEFAULT else thorough) for call in CALLS]
)
def test_strips_give_the_definition(call, strips, rng):
    """Outputs, gradients for both cotangents, and of one call a derivative of these."""
    head_slices, T, S, N, K, options = CALLS[call]
    strips(head_slices)
    options = dict(options)
    sink = jnp.asarray(rng.normal(size=N)) if options.pop("sink", False) else None
    shapes = (T, N, 8), (S, K, 8), (S, K, 6), (T, N, 6), (T, N), (T, N, 8)
    q, k, v, dout, dlse, along = (jnp.asarray(rng.normal(size=(2, *shape))) for shape in shapes)

    def outputs_and_gradients(function):
        def both(q):
            out, pull = jax.vjp(lambda q, k, v, sink: function(q, k, v, sink=sink, **options), q, k, v, sink)
            return out, pull((dout, dlse))

        second = lambda q: jax.grad(lambda q: (both(q)[1][0] * along).sum())(q)
        step = lambda q: (both(q), second(q) if "grouped" in call else None)
        return jax.jit(step, compiler_options=QUICK)(q)

    found = outputs_and_gradients(partial(dot_product_attention, return_residual=True))
    with jax.numpy_rank_promotion("allow"):
        expected = outputs_and_gradients(reference.dot_product_attention)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-10)


def test_huge_tied_logits_and_a_dominant_sink(strips):
    """What rounding takes from lse = 1e9 + log 20 is kept; a sink far above the logits overflows nothing."""
    strips(1)
    q, k = jnp.ones((1, 6, 1, 1), jnp.float32), jnp.ones((1, 20, 1, 1), jnp.float32)
    call = partial(dot_product_attention, return_residual=True, scale=1.0)
    dv = jax.jit(lambda q, k: jax.vjp(lambda v: call(1e9 * q, k, v)[0], k)[1](q)[0], compiler_options=QUICK)
    assert_close(dv(q, k), k * 6 / 20, 1e-5)
    out, lse = jax.jit(call)(q, k, k, sink=jnp.full(1, 1e3, jnp.float32))
    assert not out.any()
    assert (lse == 1e3).all()


def test_a_sink_of_minus_infinity_is_none(strips, rng):
    """In rows that see nothing, too."""
    strips(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 1, 4))) for n in (30, 10, 10))
    call = partial(dot_product_attention, q, k, v, local_window_size=(9, 3), return_residual=True)
    both = jax.jit(lambda sink: (call(sink=sink), call()), compiler_options=QUICK)
    found, expected = both(jnp.full(1, -jnp.inf))
    assert (expected[1] == -jnp.inf).any()
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, 1e-12)


def test_gradients_of_what_devices_share_are_summed_in_float32(strips):
    """Keys that all of them hold have a share from the queries of each."""
    strips(1)
    attend = jax.shard_map(
        dot_product_attention,
        mesh=jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=(P(None, "x"), P(), P()),
        out_specs=P(None, "x"),
    )
    x = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.bfloat16)
    gradients = jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
    program = str(jax.make_jaxpr(gradients)(x, x, x))
    assert re.findall(r"(\w+)\[1,8,1,4\]\S* = psum", program) == ["f32", "f32"]


@thorough
@pytest.mark.parametrize("order", [1, 2])
def test_strips_on_an_explicit_mesh(order, strips, rng):
    """Each device has strips of its own batch entries and heads, and a step exchanges nothing."""
    strips(1)
    shapes = (30, 4, 8), (50, 2, 8), (50, 2, 6), (30, 4, 6), (30, 4)
    arrays = [jnp.asarray(rng.normal(size=(4, *shape))) for shape in shapes]
    attend = partial(dot_product_attention, local_window_size=(9, 3), return_residual=True)

    def step(q, k, v, *cotangents):
        def first(*operands):
            out, pull = jax.vjp(attend, *operands)
            return out, pull(cotangents)

        if order == 1:
            return first(q, k, v)
        return jax.grad(lambda *x: sum((g * g).sum() for g in first(*x)[1]), (0, 1, 2))(q, k, v)

    step = jax.jit(step, compiler_options=QUICK)
    expected = step(*arrays)
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, P("b", None, "n")) for x in arrays]
        compiled = step.lower(*placed).compile()
        found = compiled(*placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-12)
        assert x.sharding.spec[:3] == ("b", None, "n")
    assert order == 2 or not collectives(compiled)


def test_strips_have_second_derivatives_by_what_enters_a_barrier(strips, rng):
    """By keys alone: in the forward they have a tangent where what stands beside them has none."""
    strips(1)
    q, k, v, dout, along = (jnp.asarray(rng.normal(size=(1, 30, 1, 4))) for _ in range(5))

    def second(function):
        dq = lambda k: jax.vjp(lambda q: function(q, k, v, is_causal=True), q)[1](dout)[0]
        return jax.jit(jax.grad(lambda k: (dq(k) * along).sum()), compiler_options=QUICK)(k)

    with jax.numpy_rank_promotion("allow"):
        expected = second(lambda *args, **options: reference.dot_product_attention(*args, **options)[0])
    assert_close(second(dot_product_attention), expected, 1e-10)


@thorough
def test_strips_in_bfloat16_are_as_near_as_the_plain_formula(strips, rng):
    """The output and each gradient are at most twice as far from float64's as those of `jax.nn` are."""
    strips(1)
    narrow = [jnp.asarray(rng.normal(size=(2, 96, 2, 16)), jnp.bfloat16) for _ in range(4)]

    def step(call, arrays):
        q, k, v, dout = arrays
        out, pull = jax.vjp(partial(call, is_causal=True), q, k, v)
        return jax.tree.leaves((out, pull(dout)))

    ours = jax.jit(partial(step, dot_product_attention), compiler_options=QUICK)(narrow)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain_step = jax.jit(partial(step, jax.nn.dot_product_attention), compiler_options=QUICK)
        plain, exact = plain_step(narrow), plain_step([x.astype(jnp.float64) for x in narrow])
    error = lambda x, y: np.abs(np.asarray(x, np.float64) - np.asarray(y)).max()
    for x, y, z in zip(ours, plain, exact, strict=True):
        assert error(x, z) <= 2 * error(y, z)
