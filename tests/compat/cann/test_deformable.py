"""`compat.cann`'s deformable attention against a literal float64 transcription of the source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough

from jax_attn_bwd.compat import cann
from jax_attn_bwd.ops.deformable.cases import locations

SHAPE = ((6, 4), (3, 5), (1, 1))


def starts(spatial_shape):
    sizes = [height * width for height, width in spatial_shape]
    return np.cumsum([0, *sizes[:-1]])


def source(value, spatial_shape, level_start_index, location, attn_weight, grad_output):
    """(out, grad_value, grad_location, grad_attn_weight), level by level and corner by corner."""
    bs, _, heads, channels = value.shape
    out = np.zeros(grad_output.shape)
    gradients = [np.zeros_like(x) for x in (value, location, attn_weight)]
    grad_value, grad_location, grad_attn_weight = gradients
    b, m = np.arange(bs)[:, None, None, None], np.arange(heads)[:, None]
    for level, ((h, w), start) in enumerate(zip(spatial_shape, level_start_index, strict=True)):
        w_im = location[:, :, :, level, :, 0] * w - 0.5  # [bs, num_queries, num_heads, num_points]
        h_im = location[:, :, :, level, :, 1] * h - 0.5
        with np.errstate(invalid="ignore"):
            inside = (h_im > -1) & (w_im > -1) & (h_im < h) & (w_im < w)
        h_im, w_im = np.where(inside, h_im, 0), np.where(inside, w_im, 0)
        h_low, w_low = np.floor(h_im).astype(int), np.floor(w_im).astype(int)
        lh, lw = h_im - h_low, w_im - w_low
        weight = np.where(inside, attn_weight[:, :, :, level], 0)
        for dh, dw in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row, column = h_low + dh, w_low + dw
            seen = inside & (row >= 0) & (row < h) & (column >= 0) & (column < w)
            pixel = np.where(seen, start + row * w + column, 0)
            by_h, by_w = (lh if dh else 1 - lh), (lw if dw else 1 - lw)
            v = np.where(seen[..., None], value[b, pixel, m], 0)
            out += (v * (by_h * by_w * weight)[..., None]).sum(3)
            d = (v * grad_output[:, :, :, None]).sum(-1)
            grad_attn_weight[:, :, :, level] += by_h * by_w * d
            grad_location[:, :, :, level, :, 0] += w * weight * (by_h if dw else -by_h) * d
            grad_location[:, :, :, level, :, 1] += h * weight * (by_w if dh else -by_w) * d
            term = (by_h * by_w * weight * seen)[..., None] * grad_output[:, :, :, None]
            np.add.at(grad_value, (b, pixel, m), term)
    return out.reshape(*out.shape[:2], heads * channels), *gradients


def call(spatial_shape=SHAPE, *, bs=2, num_queries=7, num_heads=3, channels=8, num_points=2, dtype=None):
    """Arguments of the gradient, in the source's order."""
    rng = np.random.default_rng(0)
    at = locations(rng, (bs, num_queries, num_heads), spatial_shape, (num_points,) * len(spatial_shape))
    layout = (bs, num_queries, num_heads, len(spatial_shape), num_points)
    size = sum(height * width for height, width in spatial_shape)
    value = rng.standard_normal((bs, size, num_heads, channels))
    weight = rng.standard_normal(layout)
    grad_output = rng.standard_normal((bs, num_queries, num_heads, channels))
    arrays = value, at.reshape(*layout, 2), weight, grad_output
    value, at, weight, grad_output = (jnp.asarray(x, dtype or np.float64) for x in arrays)
    return value, spatial_shape, starts(spatial_shape), at, weight, grad_output


def assert_as_the_source(arguments, rtol=1e-12):
    """The forward, `jax.grad` of it, and the gradient by hand; dtypes are those of the arguments."""
    value, shape, start, at, weight, grad_output = arguments
    wide = (np.asarray(x, np.float64) for x in (value, at, weight, grad_output))
    wide = dict(zip(("value", "location", "attn_weight", "grad_output"), wide, strict=True))
    expected, *gradients = source(spatial_shape=shape, level_start_index=start, **wide)
    out, pullback = jax.vjp(
        lambda v, x, w: cann.multi_scale_deformable_attention(v, shape, start, x, w), value, at, weight
    )
    assert out.dtype == value.dtype
    assert_close(out.astype(np.float64), expected, rtol, "out")
    by_jax = pullback(grad_output.reshape(out.shape))
    by_hand = cann.multi_scale_deformable_attention_grad(*arguments)
    assert isinstance(by_hand, tuple)
    for got in (by_jax, by_hand):
        names = ("value", "location", "attn_weight")
        for name, x, y, z in zip(names, got, gradients, (value, at, weight), strict=True):
            assert (x.shape, x.dtype) == (z.shape, z.dtype), name
            assert_close(x.astype(np.float64), y, rtol, name)


def test_as_the_source():
    assert_as_the_source(call())


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        pytest.param("float32", 1e-6, marks=thorough),
        ("float16", 5e-4),
        pytest.param("bfloat16", 4e-3, marks=thorough),
    ],
)
def test_dtypes_are_kept_and_summed_in_float32(dtype, rtol):
    assert_as_the_source(call(dtype=dtype), rtol)


def test_float32_locations_beside_a_narrow_value():
    value, shape, start, *_, grad_output = call(dtype="bfloat16")
    _, _, _, at, weight, _ = call(dtype="float32")
    assert_as_the_source((value, shape, start, at, weight, grad_output), 4e-3)


BEYOND = (
    dict(channels=12),
    dict(num_queries=1),
    dict(bs=33, num_queries=2),
    dict(num_heads=17, num_points=17, num_queries=2, spatial_shape=((3, 2),)),
)
FAR_BEYOND = (
    dict(channels=1),
    dict(channels=264, num_queries=2),
    dict(spatial_shape=((2, 2),) * 5, channels=256, num_points=252, num_queries=1, num_heads=1, bs=1),
    dict(spatial_shape=((2, 3),) * 11, num_queries=3),
    dict(num_queries=500_001, spatial_shape=((2, 3),), channels=1, num_heads=1, num_points=1, bs=1),
)


@pytest.mark.parametrize(
    "beyond",
    [*BEYOND, *(pytest.param(beyond, marks=thorough) for beyond in FAR_BEYOND)],
    ids=lambda beyond: "-".join(f"{name}={x}" for name, x in beyond.items() if name != "spatial_shape"),
)
def test_sizes_beyond_the_limits_of_the_source(beyond):
    """channels a multiple of 8 and at most 256, their sum with points and levels 512, 9 levels, 32 to
    499999 queries, a batch of 32; its open repository adds 16 heads and 16 points."""
    assert_as_the_source(call(**beyond), 1e-11)


def test_the_last_axis_of_location_is_x_y():
    """A map of 2 rows and 4 columns: location (5/8, 1/4) is the centre of column 2 of row 0."""
    value = jnp.arange(8.0).reshape(1, 8, 1, 1)
    at = jnp.asarray([0.625, 0.25]).reshape(1, 1, 1, 1, 1, 2)
    out = cann.multi_scale_deformable_attention(value, ((2, 4),), [0], at, jnp.ones((1, 1, 1, 1, 1)))
    assert out.ravel().tolist() == [2.0]


def test_weights_are_not_normalised():
    value, shape, start, at, weight, _ = call()
    out = cann.multi_scale_deformable_attention(value, shape, start, at, weight)
    twice = cann.multi_scale_deformable_attention(value, shape, start, at, 2 * weight)
    assert_close(twice, 2 * out, 1e-14)


def test_grad_output_with_heads_and_channels_on_one_axis_or_two():
    *arguments, grad_output = call()
    apart = cann.multi_scale_deformable_attention_grad(*arguments, grad_output)
    merged = cann.multi_scale_deformable_attention_grad(*arguments, grad_output.reshape(2, 7, 24))
    jax.tree.map(np.testing.assert_array_equal, merged, apart)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(np.int32, marks=thorough), pytest.param(np.int64, marks=thorough), list, jnp.asarray, None],
    ids=["int32", "int64", "list", "jax", "none"],
)
def test_tables_of_any_kind(kind):
    value, shape, start, *rest = call()
    expected = cann.multi_scale_deformable_attention_grad(value, shape, start, *rest)
    if kind is None:
        tables = shape, None
    elif kind is list:
        tables = [list(x) for x in shape], start.tolist()
    else:
        tables = tuple(jnp.asarray(x) if kind is jnp.asarray else np.array(x, kind) for x in (shape, start))
    got = cann.multi_scale_deformable_attention_grad(value, *tables, *rest)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(x, marks=thorough) for x in (np.inf, -np.inf))])
def test_locations_that_are_not_finite_are_skipped(bad):
    value, shape, start, at, weight, grad_output = call()
    at = at.at[:, ::2].set(bad)
    assert_as_the_source((value, shape, start, at, weight, grad_output))
    out = cann.multi_scale_deformable_attention(value, shape, start, at, weight)
    np.testing.assert_array_equal(out[:, ::2], 0)


def test_empty_tensors():
    for empty in (dict(bs=0), dict(num_queries=0), dict(num_points=0)):
        assert_as_the_source(call(**empty))


def test_under_jit_and_vmap():
    value, shape, start, at, weight, grad_output = call()
    expected = cann.multi_scale_deformable_attention_grad(value, shape, start, at, weight, grad_output)

    def gradient(value, at, weight, grad_output):
        return cann.multi_scale_deformable_attention_grad(value, shape, start, at, weight, grad_output)

    got = jax.jit(jax.vmap(gradient))(*(x[None] for x in (value, at, weight, grad_output)))
    for a, b in zip(got, expected, strict=True):
        assert_close(a[0], b, 1e-14)


@pytest.mark.parametrize("width", [3, *(pytest.param(x, marks=thorough) for x in (6, 7, 9, 12))])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_at_an_integer_pixel_the_derivative_is_the_right_hand_one(transform, width):
    """Where XLA contracts `location * width - 0.5`, a pixel would otherwise lie to the left of itself."""
    value = np.random.default_rng(0).standard_normal(width)
    at = (np.arange(width) + 0.5) / width
    assert (at * width - 0.5 == np.arange(width)).all()
    location = np.stack([at, np.full(width, 0.5)], -1).reshape(1, width, 1, 1, 1, 2)

    def gradient(value, location):
        ones = np.ones((1, width, 1, 1, 1)), np.ones((1, width, 1, 1))
        return cann.multi_scale_deformable_attention_grad(value, ((1, width),), [0], location, *ones)

    got = transform(gradient)(value.reshape(1, width, 1, 1), location).grad_location[..., 0]
    assert_close(got.ravel(), width * np.diff([*value, 0]), 1e-14)
