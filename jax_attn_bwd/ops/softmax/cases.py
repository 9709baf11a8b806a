"""Named inputs of the scaled masked softmax."""

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.softmax import api, reference


def _case(
    name, shape=(2, 3, 9, 13), *, spread=1.0, tags=("ci",), dtype="bfloat16", extra=None, **options
) -> Case:
    """`extra(rng) -> {argument: array}` adds to x."""

    def build(rng):
        return {"x": rng.normal(0, spread, shape)} | (extra(rng) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype)


def _normal(**shapes):
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _mask(*shape, keep=0.6):
    return lambda rng: {"mask": rng.random(shape) < keep}


def _some_rows_masked(rng):
    mask = rng.random((2, 1, 9, 13)) < 0.5
    mask[1, 0, 2:4] = False
    return {"mask": mask}


def _infinite_bias(rng):
    bias = rng.standard_normal((3, 9, 13))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[1, 4] = -np.inf
    return {"bias": bias}


def _sink(*shape):
    return lambda rng: {"sink": 20.0 * rng.standard_normal(shape)}  # large: one near 0 hides errors


def _both(*extras):
    return lambda rng: {k: v for extra in extras for k, v in extra(rng).items()}


def _large():
    """Rows of odd width, from one block's worth to many: what only a GPU runs soon enough."""
    both, one = ("large", "repeat"), ("large",)
    for width in (1000, 4099, 16385):
        yield _case(f"large {width}", (1031, width), spread=3.0, tags=both, scale=0.5)
    yield _case("large 131073", (2, 3, 131073), spread=3.0, tags=one)
    plane = (2, 4, 343, 1000)
    yield _case("large masked", plane, tags=(*both, "poison"), extra=_mask(2, 1, 1, 1000), scale=0.125)
    yield _case("large causal", plane, tags=(*one, "poison"), is_causal=True, scale=0.125)


def _measured():
    for shape, tags in (((2, 2, 64, 64), ("quick",)), ((4, 8, 1024, 1024), ("bench",))):
        for dtype in ("float32", "bfloat16"):
            mask = _mask(shape[0], 1, 1, shape[-1], keep=0.8)
            yield _case(f"{list(shape)} {dtype}", shape, tags=tags, dtype=dtype, extra=mask, scale=0.125)
    for width in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        tags = ("scaling",) if width >= 1024 else ("quick_scaling",)
        mask = _mask(1, width, keep=0.8)
        yield _case(f"256 rows: S={width}", (256, width), tags=tags, dtype="float32", extra=mask)
    for width in (1024, 8192, 131072):
        for dtype in ("float32", "bfloat16"):
            shape, timed = (2**27 // width, width), ("timed",) if dtype == "bfloat16" else ()
            yield _case(f"{list(shape)} {dtype}", shape, tags=("bench_gpu", *timed), dtype=dtype)
    for shape in ((4096, 1024), (512, 32768)):
        yield _case(f"{list(shape)} bfloat16", shape, tags=("timed",), dtype="bfloat16")


def _compiled():
    """The shapes that training uses, for chips that are not there."""
    tags = {
        "width 1000 float32": ("v5e",),
        "width 1000 bfloat16": ("table",),
        "width 1000 float16": ("table",),
        "width 4096 float32": ("xla", "table"),
        "width 4096 bfloat16": ("table",),
        "width 131072 float32": ("table",),
        "width 131072 float16": ("table",),
        "width 131072 bfloat16": ("xla", "v5e", "v5p", "v6e", "tpu7x"),
        "masked float32": ("v5e",),
        "masked bfloat16": ("xla", "table"),
        "causal float32": ("xla", "table"),
        "causal bfloat16": ("v5e",),
    }

    def case(name, shape, dtype, **arguments):
        name = f"{name} {dtype}"
        return _case(name, shape, tags=("mosaic_gpu", *tags.get(name, ())), dtype=dtype, **arguments)

    for width, rows in ((1000, 16384), (4096, 4096), (131072, 128)):
        for dtype in ("float32", "bfloat16", "float16"):
            yield case(f"width {width}", (rows, width), dtype)
    for dtype in ("float32", "bfloat16"):
        mask = _mask(4, 1, 1, 1024)
        yield case("masked", (4, 8, 1024, 1024), dtype, extra=mask, scale=0.125)
        yield case("causal", (4, 8, 1024, 1024), dtype, is_causal=True, scale=0.125)


CASES = (
    _case("plain"),
    _case("scale", scale=0.25),
    _case("negative_scale", scale=-3.0),
    _case("scale_zero", scale=0.0, extra=_some_rows_masked),
    _case("mask_rows", extra=_some_rows_masked, scale=0.5, tags=("ci", "check")),
    _case("mask_key", extra=_mask(2, 1, 1, 13)),
    _case("mask_heads", extra=_mask(1, 3, 9, 13)),
    _case("mask_low_rank", extra=_mask(9, 1)),
    _case("uniform", extra=_some_rows_masked, fully_masked="uniform", scale=2.0),
    _case("bias_key", extra=_normal(bias=(2, 1, 1, 13)), scale=2.0),
    _case("bias_heads", extra=_both(_normal(bias=(1, 3, 9, 13)), _some_rows_masked), tags=("ci", "check")),
    _case("bias_minus_inf", extra=_infinite_bias),
    _case("scale_array", extra=_both(_normal(scale=(3, 1, 1)), _some_rows_masked), tags=("ci", "check")),
    _case("scale_scalar", extra=_both(_normal(scale=()), _normal(bias=(13,)))),
    _case("scale_columns", extra=_both(_normal(scale=(13,)), _some_rows_masked)),
    _case("sink_heads", extra=_both(_sink(3, 1), _some_rows_masked), scale=4.0, tags=("ci", "check")),
    _case("sink_rows", extra=_both(_sink(2, 1, 9), _normal(scale=(1,)))),
    _case("sink_uniform", extra=_both(_sink(), _some_rows_masked), fully_masked="uniform"),
    _case("causal", is_causal=True),
    _case("causal_window", is_causal=True, local_window_size=2, scale=0.5, tags=("ci", "check")),
    _case("window", local_window_size=(0, 3), extra=_some_rows_masked),
    _case("axis_0", axis=0, extra=_some_rows_masked, scale=0.5),
    _case("axis_1", axis=1, extra=_both(_sink(9, 1), _some_rows_masked), tags=("ci", "check")),
    _case("rank_1", (13,), scale=0.5),
    _case("rank_2", (9, 13), is_causal=True),
    _case("rank_5", (2, 1, 3, 5, 4), extra=_mask(3, 1, 4)),
    _case(
        "hidden_scale",
        tags=("hidden",),
        fully_masked="nan",
        extra=_both(_some_rows_masked, _normal(scale=(9, 1))),
    ),
    _case(
        "hidden_bias_scale",
        tags=("hidden",),
        extra=_both(_infinite_bias, _some_rows_masked, _normal(scale=(3, 1, 1))),
    ),
    _case(
        "hidden_uniform",
        tags=("hidden",),
        fully_masked="uniform",
        extra=_both(_some_rows_masked, _normal(scale=(13,)), _sink(9)),
    ),
    _case(
        "hidden_axis_1",
        tags=("hidden",),
        axis=1,
        extra=_both(_mask(2, 3, 9, 13, keep=0.5), _sink(9, 13), _normal(scale=(3, 1, 1))),
    ),
    _case("large", spread=1e4, scale=0.125, tags=("ci", "check")),
    _case("no_rows", (2, 0, 13), tags=("edge",)),
    _case("no_columns", (2, 9, 0), tags=("edge",), extra=_sink(9)),
    _case("one_column", (2, 9, 1), tags=("edge",), extra=_mask(9, 1)),
    _case(
        "second_scale",
        (2, 3, 4),
        tags=("second",),
        extra=_both(_normal(scale=(2, 1, 1), bias=(1, 4)), _mask(3, 4), _sink(3)),
    ),
    _case("second_mask", (2, 3, 4), tags=("second",), extra=_mask(2, 3, 4, keep=0.5), scale=0.5),
    _case("second_causal", (2, 3, 4), tags=("second",), is_causal=True, fully_masked="uniform"),
    _case("shard", (4, 8, 6, 10), tags=("shard",), scale=0.5, extra=_mask(4, 8, 6, 10)),
    _case("shard_causal", (4, 8, 6, 10), tags=("shard",), is_causal=True, extra=_normal(bias=(4, 8, 6, 10))),
    _case("shard_broadcast_bias", (4, 8, 6, 10), tags=("shard",), extra=_normal(bias=(1, 8, 6, 10))),
    _case("shard_sink", (4, 8, 6, 10), tags=("shard",), extra=_sink(8, 1)),
    *_large(),
    *_measured(),
    *_compiled(),
)


def _call(**arguments):
    return (api.scaled_masked_softmax(**arguments),)


def _reference(**arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (reference.scaled_masked_softmax(**arguments),)


def _hidden(arrays, options):
    shape = arrays["x"].shape
    row, column = np.arange(shape[-2])[:, None] if len(shape) > 1 else 0, np.arange(shape[-1])
    seen = np.ones(shape, bool) & np.asarray(arrays.get("mask", True))
    if options.get("is_causal"):
        seen &= column <= row
    if options.get("local_window_size") is not None:
        left, right = np.broadcast_to(options["local_window_size"], 2)
        seen &= (row - column <= left) & (column - row <= right)
    found = {}
    if "bias" in arrays:
        bias = np.asarray(arrays["bias"])
        lead = seen.ndim - bias.ndim
        repeated = tuple(i for i, n in enumerate(bias.shape, lead) if n == 1 and shape[i] != 1)
        read = seen.any((*range(lead), *repeated), keepdims=True)
        found["bias"] = ~read.reshape(read.shape[lead:])
        seen = seen & (bias != -np.inf)
    return {**found, "x": ~seen, "y": ~seen}


def _backward(cotangents, outputs, arrays, options, wrt):
    scale = arrays.get("scale", options.get("scale", 1.0))
    mask, axis = arrays.get("mask"), options.get("axis", -1)
    dx = api.scaled_masked_softmax_bwd(cotangents[0], outputs[0], mask, scale=scale, axis=axis)
    return {"x": dx}


OPERATORS = (
    Operator(
        name="scaled_masked_softmax",
        outputs=("y",),
        differentiable=api.DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        backward=_backward,
        cases=CASES,
        axes={"x": "BNTS", "mask": "BNTS", "bias": "BNTS", "sink": "BNT", "scale": "BNTS", "y": "BNTS"},
        backward_wrt=("x",),
        hidden=_hidden,
    ),
)
