"""Multi-scale deformable attention against its definition in float64 and torch; what it saves and forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, assert_trees_close
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd import multi_scale_deformable_attention, multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable import cpu
from jax_attn_bwd.ops.deformable.cases import locations

operator = next(o for o in OPERATORS if o.name == "multi_scale_deformable_attention")
LEVELS = ((6, 4), (3, 2))
QUICK = {"xla_backend_optimization_level": 0}  # for what runs once: compiling it takes longer


def sample(levels=LEVELS, *, B=1, Q=3, M=2, D=2, P=2, seed=0, spread=1.5, method="bilinear"):
    """Arrays of a call, ragged if P is a tuple; no sample nearer than 0.05 pixels to a kink."""
    rng = np.random.default_rng(seed)
    counts, split = (
        (P, (sum(P),)) if isinstance(P, tuple) else ((P,) * len(levels), (len(levels), P))
    )
    at = locations(rng, (B, Q, M), levels, counts, spread, method)
    return {
        "value": jnp.asarray(rng.standard_normal((B, sum(h * w for h, w in levels), M, D))),
        "sampling_locations": jnp.asarray(at.reshape(B, Q, M, *split, 2)),
        "attention_weights": jnp.asarray(rng.standard_normal((B, Q, M, *split))),
    }


def program(function, options, compiler_options=None):
    """`(arrays, dout) -> output and gradients by name`; without dout, under a random one."""

    def run(arrays, dout=None):
        (out,), pullback = jax.vjp(lambda arrays: function(**arrays, **options), arrays)
        if dout is None:
            dout = np.random.default_rng(9).standard_normal(out.shape)
        return {"out": out} | pullback((jnp.asarray(dout, out.dtype),))[0]

    return jax.jit(run, compiler_options=compiler_options)


def evaluate(function, arrays, options, dout=None):
    """Output and gradients by name."""
    return program(function, options, QUICK)(arrays, dout)


def assert_as_defined(arrays, rtol=1e-12, **options):
    got = evaluate(operator.call, arrays, options)
    assert_trees_close(got, evaluate(operator.reference, arrays, options), rtol)


# The shapes that other implementations are tested with, and those that broke them.
GRID = {
    "upstream": dict(Q=2),
    **{f"D{D}": dict(levels=((3, 5),), D=D)
       for D in (1, 4, 8, 16, 30, 32, 37, 64, 71, 128, 147, 256, 1025)},
    **{f"P{P}": dict(levels=((5, 3),), P=P) for P in (1, 3, 4, 8, 16, 21)},
    "P21_D147_M7": dict(levels=((3, 5), (2, 1)), P=21, D=147, M=7, Q=1),
    **{f"L{L}": dict(levels=((6, 4), (3, 5), (1, 1), (1, 7), (5, 1), (2, 2), (9, 1), (3, 3))[:L], P=1)
       for L in (3, 5, 8)},
    "one_pixel_level": dict(levels=((1, 1),)),
    "row": dict(levels=((1, 9),)),
    "column": dict(levels=((9, 1),)),
    "one_query": dict(Q=1),
    "prime_batch_and_queries": dict(B=7, Q=13),
    "many_queries": dict(B=8, Q=900, levels=((8, 5),), M=1, D=1, P=1),
    "far": dict(Q=40, spread=40.0),
    "ragged": dict(P=(3, 0)),
    "ragged_as_in_d_fine": dict(levels=((4, 6), (2, 3), (1, 2)), P=(3, 6, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", GRID)
def test_grid_of_shapes_against_the_definition(name):
    shape = {"levels": LEVELS} | GRID[name]
    options = {"num_points": shape["P"]} if isinstance(shape.get("P"), tuple) else {}
    assert_as_defined(sample(**shape), spatial_shapes=shape["levels"], **options)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_combination_of_options(data):
    draw = data.draw
    side = st.integers(1, 5)
    levels = tuple(draw(st.lists(st.tuples(side, side), min_size=1, max_size=3)))
    sizes = {name: draw(st.sampled_from([0, 1, 2, 3, 5])) for name in "BQMD"}
    points = draw(st.integers(0, 3) | st.tuples(*(st.integers(0, 3) for _ in levels)))
    options = {
        "spatial_shapes": levels,
        "padding_mode": draw(st.sampled_from(["zeros", "border"])),
        "method": draw(st.sampled_from(["bilinear", "bilinear", "discrete"])),
        "normalize": draw(st.sampled_from([None, "softmax"])),
    }
    if isinstance(points, tuple):
        options["num_points"] = points
    seed = draw(st.integers(0, 1000))
    arrays = sample(levels, **sizes, P=points, seed=seed, method=options["method"])
    assert_as_defined(arrays, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_mode": "border"}, {"normalize": "softmax"}, {"num_points": (1, 4)}],
    ids=["zeros", "border", "softmax", "ragged"],
)
def test_gradients_against_finite_differences(options):
    """Central differences in float64 along random directions, in each argument by itself."""
    arrays = sample(Q=5, D=3, P=options.get("num_points", 2))
    rng = np.random.default_rng(4)
    dout = rng.standard_normal((1, 5, 6))
    got = evaluate(operator.call, arrays, {"spatial_shapes": LEVELS, **options}, dout)

    @jax.jit
    def value(inputs):
        out = operator.call(**{**arrays, **inputs}, spatial_shapes=LEVELS, **options)[0]
        return (out * dout).sum()

    step = 1e-5  # of a level of 6 pixels; samples lie 0.05 pixels from kinks
    for name, x in arrays.items():
        for _ in range(3):
            u = rng.standard_normal(x.shape)
            slope = (value({name: x + step * u}) - value({name: x - step * u})) / (2 * step)
            assert_close((got[name] * u).sum(), slope, 1e-8, name)


@pytest.mark.parametrize("points", [3, (2, 0, 5)], ids=["rectangular", "ragged"])
def test_feature_maps_of_each_level(points):
    """A sequence of maps is the concatenated value; its gradient is a tuple of maps."""
    levels = ((3, 5), (2, 4), (1, 1))
    arrays = sample(levels, B=2, D=3, P=points)
    options = {"num_points": points} if isinstance(points, tuple) else {}
    expected = evaluate(operator.call, arrays, {"spatial_shapes": levels, **options})
    ends = np.cumsum([h * w for h, w in levels])[:-1]
    parts = jnp.split(arrays["value"], ends, axis=1)
    maps = tuple(x.reshape(2, *shape, 2, 3) for x, shape in zip(parts, levels, strict=True))
    rest = (levels, arrays["sampling_locations"], arrays["attention_weights"])
    dout = jnp.asarray(np.random.default_rng(9).standard_normal((2, 3, 6)))
    for sequence in (maps, list(maps)):
        out, pullback = jax.vjp(
            lambda maps: multi_scale_deformable_attention(maps, *rest, **options), sequence
        )
        assert_close(out, expected["out"], 1e-14)
        by_rule = multi_scale_deformable_attention_bwd(dout, sequence, *rest, **options).value
        assert isinstance(by_rule, tuple)
        for gradients in (pullback(dout)[0], by_rule):
            for gradient, x in zip(gradients, maps, strict=True):
                assert gradient.shape == x.shape
            flat = jnp.concatenate([x.reshape(2, -1, 2, 3) for x in gradients], 1)
            assert_close(flat, expected["value"], 1e-14)


def test_softmax_inside_the_rule_is_softmax_outside():
    arrays = sample(Q=7, P=3)
    logits = arrays["attention_weights"] * 5

    def outside(value, sampling_locations, logits):
        flat = jax.nn.softmax(logits.reshape(*logits.shape[:3], -1))
        weights = flat.reshape(logits.shape)
        return multi_scale_deformable_attention(value, LEVELS, sampling_locations, weights)

    def inside(value, sampling_locations, logits):
        return multi_scale_deformable_attention(
            value, LEVELS, sampling_locations, logits, normalize="softmax"
        )

    inputs = (arrays["value"], arrays["sampling_locations"], logits)
    dout = jnp.asarray(np.random.default_rng(9).standard_normal((1, 7, 4)))
    for shift in (0.0, 1e4, -1e4):
        got, pullback = jax.vjp(inside, *inputs[:2], logits + shift)
        expected, exact = jax.vjp(outside, *inputs)
        assert_close(got, expected, 1e-11)
        for a, b in zip(pullback(dout), exact(dout), strict=True):
            assert_close(a, b, 1e-11)


def test_masked_logits_take_no_part():
    """-inf masks a point: as if it were not there, whatever its location; all masked gives 0."""
    arrays = sample(Q=5, P=3)
    hidden = np.random.default_rng(2).random(arrays["attention_weights"].shape) < 0.4
    hidden[0, 2] = True
    logits = jnp.where(hidden, -jnp.inf, arrays["attention_weights"])
    weights = jnp.where(hidden, 0, jnp.exp(arrays["attention_weights"]))
    total = weights.sum((3, 4), keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    options = {"spatial_shapes": LEVELS, "normalize": "softmax"}
    got = evaluate(operator.call, arrays | {"attention_weights": logits}, options)
    plain = arrays | {"attention_weights": weights}
    expected = evaluate(operator.call, plain, {"spatial_shapes": LEVELS})
    for name in ("out", "value", "sampling_locations"):
        assert_close(got[name], expected[name], 1e-13, name)
    np.testing.assert_array_equal(got["out"][0, 2], 0)
    for name in ("sampling_locations", "attention_weights"):
        np.testing.assert_array_equal(np.asarray(got[name])[hidden], 0)
    at = jnp.where(hidden[..., None], jnp.nan, arrays["sampling_locations"])
    poisoned = arrays | {"attention_weights": logits, "sampling_locations": at}
    assert_trees_close(evaluate(operator.call, poisoned, options), got, 1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_locations_stay_float32_beside_a_narrow_value(dtype):
    """A row of 167 pixels 0, 1, 0, 1, ...: the output tells where the sample was taken.

    Locations rounded to bfloat16 are wrong by up to a third of a pixel, and some gradients have the
    wrong sign; float32 locations are not touched whatever the dtype of the value.
    """
    W = 167
    rng = np.random.default_rng(0)
    x = rng.integers(0, W - 1, 400) + rng.uniform(0.05, 0.95, 400)
    exact = np.where(x.astype(int) % 2, 1 - x % 1, x % 1)
    slope = np.where(x.astype(int) % 2, -W, W)
    value = jnp.asarray(np.arange(W) % 2, dtype).reshape(1, W, 1, 1)
    weights = jnp.ones((1, 400, 1, 1, 1), np.float32)

    def run(location_dtype):
        at = np.stack([(x + 0.5) / W, np.full(400, 0.5)], -1).reshape(1, 400, 1, 1, 1, 2)
        at = jnp.asarray(at, np.float32).astype(location_dtype)
        out, pullback = jax.vjp(
            lambda at: multi_scale_deformable_attention(value, ((1, W),), at, weights), at
        )
        (gradient,) = pullback(jnp.ones_like(out))
        assert (out.dtype, gradient.dtype) == (value.dtype, location_dtype)
        error = np.abs(np.asarray(out, np.float64).ravel() - exact)
        return error.max(), np.asarray(gradient, np.float64)[..., 0].ravel()

    error, gradient = run(np.float32)
    assert error < 2.0**-8
    assert_close(gradient, slope, 1e-6)
    error, gradient = run(jnp.bfloat16)
    assert 0.25 < error < 0.35
    assert (np.sign(gradient) != np.sign(slope)).any()


def test_only_the_inputs_are_saved():
    arrays = sample(B=2, Q=11, D=5)
    _, pullback = jax.vjp(lambda a: operator.call(**a, spatial_shapes=LEVELS), arrays)
    saved = sorted(x.size for x in jax.tree.leaves(pullback))
    assert saved == sorted(x.size for x in arrays.values())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_only_what_is_asked_is_computed(monkeypatch, platform):
    """The gradient of the value reads no pixel; the others add to none."""
    monkeypatch.setattr("jax_attn_bwd._core.backend.target_platform", lambda: platform)
    arrays = sample()

    def counts(*wrt):
        jaxpr = jax.make_jaxpr(
            lambda dout: multi_scale_deformable_attention_bwd(
                dout, spatial_shapes=LEVELS, wrt=wrt, implementation="xla", **arrays
            )
        )(jnp.zeros((1, 3, 4)))
        names = [equation.primitive.name for equation in equations(jaxpr.jaxpr)]
        return names.count("gather"), names.count("scatter-add")

    whole = counts("value", "sampling_locations", "attention_weights")
    gathers, scatters = counts("value")
    assert scatters == whole[1] > 0
    assert gathers < whole[0]
    for name in ("sampling_locations", "attention_weights"):
        gathers, scatters = counts(name)
        assert (gathers > 0, scatters) == (True, 0)


def equations(jaxpr):
    """The equations of a program, those of its loops' bodies among them."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(parameter):
                yield from equations(getattr(parameter, "jaxpr", parameter))


def is_program(x):
    return hasattr(x, "jaxpr") or hasattr(x, "eqns")


@pytest.mark.parametrize("loops", ["portable", "sorted", "cpu"])
@pytest.mark.parametrize("options", [{}, {"normalize": "softmax"}], ids=["weights", "logits"])
def test_nothing_has_the_extent_of_samples_and_channels(monkeypatch, options, loops):
    """No array of Q x L x P x D is formed; the largest is a small multiple of the inputs and outputs."""
    platform = "gpu" if loops == "sorted" else "cpu"
    monkeypatch.setattr("jax_attn_bwd._core.backend.target_platform", lambda: platform)
    if loops == "cpu":
        monkeypatch.setattr(cpu, "loops", lambda *_: cpu.Loops(True, True, True, 16))
    Q, D, P = 60, 32, 12
    arrays = sample(Q=Q, M=1, D=D, P=P)

    def step(arrays, dout):
        out, pullback = jax.vjp(
            lambda a: operator.call(**a, spatial_shapes=LEVELS, **options)[0], arrays
        )
        return out, pullback(dout)

    jaxpr = jax.make_jaxpr(step)(arrays, jnp.zeros((1, Q, D))).jaxpr
    largest = max(x.aval.size for equation in equations(jaxpr) for x in equation.outvars)
    assert largest >= Q * D  # the walk saw the loops
    assert largest < Q * len(LEVELS) * P * D / 2


def grid_sample(torch, value, levels, at, weights, padding_mode):
    """The pure PyTorch form that the published detectors fall back to."""
    B, _, M, D = value.shape
    Q, out, start = at.shape[1], 0, 0
    for level, (H, W) in enumerate(levels):
        plane = value[:, start : start + H * W].permute(0, 2, 3, 1).reshape(B * M, D, H, W)
        grid = 2 * at[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1  # [B * M, Q, P, 2]
        read = torch.nn.functional.grid_sample(
            plane, grid, mode="bilinear", padding_mode=padding_mode, align_corners=False
        )  # [B * M, D, Q, P]
        weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        out = out + (read * weight).sum(-1).reshape(B, M, D, Q)
        start += H * W
    return out.permute(0, 3, 1, 2).flatten(2)


@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
def test_as_grid_sample_of_torch(padding_mode):
    torch = pytest.importorskip("torch")
    levels = ((6, 4), (3, 5), (1, 1), (1, 7))
    arrays = sample(levels, B=2, Q=17, M=3, D=5, P=3)
    dout = np.random.default_rng(9).standard_normal((2, 17, 15))
    options = {"spatial_shapes": levels, "padding_mode": padding_mode}
    got = evaluate(operator.call, arrays, options, dout)
    value, at, weights = (
        torch.tensor(np.asarray(arrays[name]), requires_grad=True)
        for name in ("value", "sampling_locations", "attention_weights")
    )
    out = grid_sample(torch, value, levels, at, weights, padding_mode)
    out.backward(torch.tensor(dout))
    expected = {"out": out.detach(), "value": value.grad}
    expected |= {"sampling_locations": at.grad, "attention_weights": weights.grad}
    assert_trees_close(got, expected, 1e-12)
