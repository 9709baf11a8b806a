"""Multi-scale deformable attention: what a CPU takes where queries are many, or samples few, at any size."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, assert_trees_close, differentiated, finite_loss, thorough
from ops.deformable.calls import QUICK

from jax_attn_bwd import explain, multi_scale_deformable_attention, multi_scale_deformable_attention_bwd
from jax_attn_bwd._core import choices
from jax_attn_bwd.ops.deformable import plan
from jax_attn_bwd.ops.deformable.cases import locations
from jax_attn_bwd.ops.deformable.spec import Operands, Options

operator = next(o for o in OPERATORS if o.name == "multi_scale_deformable_attention")
OPTIONS = Options(spatial_shapes=((64, 85),), num_points=(4,))
QUERIES = 3  # queries of a block: most cases have a last block of fewer
ROW = "row for each corner"
CORNERS = plan.Loops(dvalue=ROW, dpoints=ROW)
MANY = plan.Loops(dpoints="by channel", on_all_cores=True)
PAIRED = MANY._replace(dvalue="pairs of pixels", paired_queries=512)


@pytest.fixture(params=["loops", "corners", "by_pixel"])
def forced(monkeypatch, request):
    def chosen(options, operands, pieces):
        if request.param == "corners":
            return CORNERS
        if request.param == "by_pixel":  # one large entry
            return CORNERS._replace(by_pixel=True)
        if options.method != "bilinear":
            return MANY
        return PAIRED._replace(paired_queries=min(operands.attention_weights.shape[1], QUERIES))

    monkeypatch.setattr(plan, "fastest_loops", chosen)


def cases(tag, *kept):
    """Those with a tag; all but `kept` are left to the thorough tier."""
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in kept else [thorough])
        for case in operator.tagged(tag)
    ]


def loss(function, case):
    return finite_loss(function, operator, case.arrays(), case.options)


@pytest.mark.parametrize("case", cases("ci", "many_queries", "ragged"))
def test_loops_of_a_cpu(forced, case):
    inputs = differentiated(operator, case.arrays())
    run = lambda function: jax.jit(jax.value_and_grad(loss(function, case)), compiler_options=QUICK)(inputs)
    (value, gradients), (expected_value, expected) = run(operator.call), run(operator.reference)
    np.testing.assert_allclose(value, expected_value, rtol=1e-11, atol=1e-13)
    assert_trees_close(gradients, expected, 1e-11)


@thorough
@pytest.mark.parametrize("case", [c for c in cases("second") if c.id != "second_softmax"])  # no loop has it
def test_their_derivatives(forced, case):
    """The gradient of the gradients' norm."""
    inputs = differentiated(operator, case.arrays())

    def norm(function, inputs):
        gradients = jax.grad(loss(function, case))(inputs)
        return sum((x**2).sum() for x in gradients.values())

    second = jax.jit(jax.grad(norm, argnums=1), static_argnums=0, compiler_options=QUICK)
    assert_trees_close(second(operator.call, inputs), second(operator.reference, inputs), 1e-10)


def problem(B=2, Q=5, M=2, D=3, levels=((3, 4), (2, 2)), points=2, dtype=np.float64, spread=1.5):
    """(cotangent, value, locations, weights)."""
    rng = np.random.default_rng(3)
    at = locations(rng, (B, Q, M), levels, (points,) * len(levels), spread)
    arrays = (
        rng.standard_normal((B, Q, M * D)),
        rng.standard_normal((B, sum(h * w for h, w in levels), M, D)),
        at.reshape(B, Q, M, len(levels), points, 2),
        rng.standard_normal((B, Q, M, len(levels), points)),
    )
    return tuple(jnp.asarray(x, dtype) for x in arrays), levels


@thorough
def test_under_vmap(forced):
    """All arrays are mapped over, or the cotangent alone."""
    (dout, *rest), levels = problem(B=4)

    def gradients(dout, value, at, weights):
        _, pullback = jax.vjp(
            lambda *x: multi_scale_deformable_attention(x[0], levels, *x[1:]), value, at, weights
        )
        return pullback(dout)

    expected = gradients(dout, *rest)
    entries = [x.reshape(2, 2, *x.shape[1:]) for x in (dout, *rest)]
    got = jax.vmap(gradients)(*entries)
    for x, y in zip(got, expected, strict=True):
        assert_close(x.reshape(y.shape), y, 1e-12)
    factors = jnp.asarray([1.0, -2.5])
    got = jax.vmap(lambda f: gradients(f * dout, *rest))(factors)
    for x, y in zip(got, expected, strict=True):
        assert_close(x[1], -2.5 * y, 1e-12)


def test_a_clamped_point_reaches_one_pixel_of_its_pair(forced):
    value, at = jnp.zeros((1, 3, 1, 1)), jnp.full((1,) * 5 + (2,), -0.9)
    nan, weight = jnp.full((1, 1, 1), jnp.nan), jnp.ones((1,) * 5)
    call = multi_scale_deformable_attention_bwd
    grads = call(nan, value, ((1, 3),), at, weight, padding_mode="border", wrt="value")
    assert np.isnan(grads.value).ravel().tolist() == [True, False, False]


@pytest.mark.parametrize("padding", [pytest.param("zeros", marks=thorough), "border"])
def test_a_cotangent_that_is_not_a_number_reaches_its_own_pixels(forced, monkeypatch, padding):
    """Padding and the neighbour of a clamped point stay out of it, as in the portable loop."""
    (dout, value, at, weights), levels = problem(Q=7, spread=3.0)
    dout = dout.at[0, 2].set(jnp.nan).at[1, 4, 1].set(jnp.inf)

    def dvalue():
        return multi_scale_deformable_attention_bwd(
            dout, value, levels, at, weights, padding_mode=padding, wrt="value"
        ).value

    got = dvalue()
    monkeypatch.setattr(plan, "fastest_loops", lambda *_: plan.Loops())
    expected = dvalue()
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=thorough) for d in ("float32", "bfloat16", "float16")]
)
def test_in_low_precision(forced, monkeypatch, dtype):
    """It is as near to float64 as the portable loops: sums are float32, results are rounded once."""
    arrays, levels = problem(Q=40, D=30)
    narrow = [x.astype(jnp.float32) for x in arrays]
    narrow = [narrow[0].astype(dtype), narrow[1].astype(dtype), *narrow[2:]]

    def results(dout, *operands):
        out, pullback = jax.vjp(lambda *x: multi_scale_deformable_attention(x[0], levels, *x[1:]), *operands)
        return [np.asarray(x, np.float64) for x in (out, *pullback(dout))]

    got = results(*narrow)
    monkeypatch.setattr(plan, "fastest_loops", lambda *_: plan.Loops())
    portable = results(*narrow)
    exact = results(*(x.astype(jnp.float64) for x in narrow))
    for x, y, z in zip(got, portable, exact, strict=True):
        eps = float(jnp.finfo(dtype).eps) * np.abs(z).max()
        assert np.abs(x - z).max() <= 2 * np.abs(y - z).max() + 2 * eps


def shapes(B, Q, M, D, S, dtype=jnp.float32):
    return Operands(
        jax.ShapeDtypeStruct((B, S, M, D), dtype),
        jax.ShapeDtypeStruct((B, Q, M, 4, 2), jnp.float32),
        jax.ShapeDtypeStruct((B, Q, M, 4), jnp.float32),
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 5440, 8, 32, 5440), PAIRED),
        ((1, 5440, 8, 256, 5440), PAIRED._replace(paired_queries=64)),
        ((8, 700, 8, 32, 5440), PAIRED._replace(dpoints="point by point")),
        ((8, 300, 8, 32, 5440), plan.Loops(on_all_cores=True)),  # more pixels than pairs
        ((1, 700, 8, 32, 5440), plan.Loops(dvalue="pairs of pixels", paired_queries=512)),
        ((1, 300, 8, 32, 5440), plan.Loops()),
        ((1, 100, 8, 32, 5440), CORNERS._replace(by_pixel=True)),
        ((2, 40, 8, 32, 5440), CORNERS),
        ((1, 80, 8, 32, 5440), CORNERS._replace(by_pixel=True)),
        ((1, 300, 8, 16, 784), CORNERS._replace(dvalue="pairs of pixels", paired_queries=300)),
        ((1, 300, 8, 16, 5440), CORNERS),
        ((0, 5440, 8, 32, 5440), plan.Loops()),
        ((1, 5440, 8, 0, 5440), MANY),
        ((1, 4096, 1 << 10, 32, 1 << 15), plan.Loops(on_all_cores=True)),  # 2^30 numbers
    ],
)
def test_which_loops(monkeypatch, one_device, sizes, expected):
    assert plan.fastest_loops(OPTIONS, shapes(*sizes)) == expected
    nearest = plan.fastest_loops(replace(OPTIONS, method="discrete"), shapes(*sizes))
    *of_rows, pixels = sizes
    if 0 < 4 * math.prod(of_rows) <= 1 << 20:  # a point has one corner
        large = of_rows[0] == 1 and pixels * math.prod(of_rows[2:]) > 1 << 20
        assert nearest == CORNERS._replace(by_pixel=large)
    else:
        assert nearest == expected._replace(dvalue="point by point", paired_queries=0)
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "tpu")
    assert plan.fastest_loops(OPTIONS, shapes(*sizes)) == plan.Loops()


@pytest.mark.usefixtures("one_device")
def test_explain_names_the_loops_and_the_rules_that_chose_them():
    def portable(*sizes):
        value, at, weights = shapes(*sizes)
        at, weights = (jax.ShapeDtypeStruct((*x.shape[:3], 1, *x.shape[3:]), x.dtype) for x in (at, weights))
        found = explain(multi_scale_deformable_attention, value, OPTIONS.spatial_shapes, at, weights)
        return found.choices[-1]

    many, few = portable(1, 5440, 8, 32, 5440), portable(2, 40, 8, 32, 5440)
    assert "pairs of pixels, 512 queries" in many.way
    assert many.rules == ("deformable_all_cores", "deformable_pairs", "deformable_by_channel")
    assert f"value's gradient: {ROW}" in few.way
    assert few.rules == ("deformable_corners",)
    with choices.without("deformable_pairs"):
        assert "pairs" not in portable(1, 5440, 8, 32, 5440).way


def test_operands_that_may_be_sharded_keep_their_heads_apart():
    """Whether they are is not known while tracing; these tests have several devices."""
    assert plan.fastest_loops(OPTIONS, shapes(1, 5440, 8, 32, 5440)) == plan.Loops(on_all_cores=True)


@pytest.mark.usefixtures("one_device")
def test_what_makes_a_cotangent_is_computed_once(monkeypatch):
    monkeypatch.setattr(plan.split, "pieces_for_rows", lambda *_: None)
    (dout, value, at, weights), levels = problem(B=1, levels=((16, 24), (8, 12)), dtype=np.float32)

    def step(dout, value, at, weights):
        call = lambda *x: multi_scale_deformable_attention(x[0], levels, *x[1:])
        out, pullback = jax.vjp(lambda *x: jnp.sin(call(*x)), value, at, weights)
        return out, pullback(dout)

    program = jax.jit(step).lower(dout, value, at, weights).compile().as_text()
    assert len(re.findall(r" cosine\(", program)) == 1


def test_the_gradient_of_one_large_entry_is_not_copied_under_vmap(one_device):
    (_, *operands), levels = problem(B=1, M=8, D=32, levels=((64, 65),), dtype=np.float32)

    def dvalue(*operands):
        out, pullback = jax.vjp(lambda *x: multi_scale_deformable_attention(x[0], levels, *x[1:]), *operands)
        return pullback(out)[0]

    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in operands]
    memory = jax.jit(jax.vmap(dvalue)).lower(*mapped).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 2


def test_no_loop_is_compiled_for_one_core(one_device):
    """XLA marks what it does not share between cores; before JAX 0.12 it does so with small loops only."""
    (dout, value, at, weights), levels = problem(B=1, Q=4100, M=2, D=8, dtype=np.float32)

    def step(dout, *operands):
        out, pullback = jax.vjp(lambda *x: multi_scale_deformable_attention(x[0], levels, *x[1:]), *operands)
        return out, pullback(dout)

    program = jax.jit(step).lower(dout, value, at, weights).compile().as_text()
    assert "while(" in program
    assert "xla_cpu_small_call" not in program
