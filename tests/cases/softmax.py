"""Cases of the scaled masked softmax that tests, benchmarks and full compilation alone read."""

import numpy as np

from jax_attn_bwd import scaled_masked_softmax_bwd
from jax_attn_bwd._core.cases import both, mask, sink
from jax_attn_bwd.ops.softmax.cases import TIMED, case, normal, some_rows_masked


def _infinite_bias(rng, n):
    bias = rng.standard_normal((3, 9, 13))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[1, 4] = -np.inf
    return {"bias": bias}


def _measured():
    for shape, tags in (((2, 2, 64, 64), ("quick",)), ((4, 8, 1024, 1024), ("bench",))):
        for dtype in ("float32", "bfloat16"):
            padding = mask(shape[0], 1, 1, shape[-1], keep=0.8)
            name = f"{list(shape)} {dtype}"
            yield case(name, shape, tags=tags, dtype=dtype, extra=padding, scale=0.125)
    for width in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        tags = ("scaling",) if width >= 1024 else ("quick_scaling",)
        padding = mask(1, width, keep=0.8)
        yield case(f"256 rows: S={width}", (256, width), tags=tags, dtype="float32", extra=padding)
    for shape in TIMED:
        yield case(f"{list(shape)} float32", shape, tags=("bench_gpu",), dtype="float32")


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

    def compiled(name, shape, dtype, **arguments):
        name = f"{name} {dtype}"
        return case(name, shape, tags=("mosaic_gpu", *tags.get(name, ())), dtype=dtype, **arguments)

    for width, rows in ((1000, 16384), (4096, 4096), (131072, 128)):
        for dtype in ("float32", "bfloat16", "float16"):
            yield compiled(f"width {width}", (rows, width), dtype)
    for dtype in ("float32", "bfloat16"):
        padding = mask(4, 1, 1, 1024)
        yield compiled("masked", (4, 8, 1024, 1024), dtype, extra=padding, scale=0.125)
        yield compiled("causal", (4, 8, 1024, 1024), dtype, is_causal=True, scale=0.125)


CASES = {
    "scaled_masked_softmax": (
        case("plain"),
        case("scale", scale=0.25),
        case("negative_scale", scale=-3.0),
        case("scale_zero", scale=0.0, extra=some_rows_masked),
        case("mask_key", extra=mask(2, 1, 1, 13)),
        case("mask_heads", extra=mask(1, 3, 9, 13)),
        case("mask_low_rank", extra=mask(9, 1)),
        case("uniform", extra=some_rows_masked, fully_masked="uniform", scale=2.0),
        case("bias_key", extra=normal(bias=(2, 1, 1, 13)), scale=2.0),
        case("bias_minus_inf", extra=_infinite_bias),
        case("scale_scalar", extra=both(normal(scale=()), normal(bias=(13,)))),
        case("scale_columns", extra=both(normal(scale=(13,)), some_rows_masked)),
        case("sink_rows", extra=both(sink(2, 1, 9), normal(scale=(1,)))),
        case("sink_uniform", extra=both(sink(), some_rows_masked), fully_masked="uniform"),
        case("causal", is_causal=True),
        case("window", local_window_size=(0, 3), extra=some_rows_masked),
        case("axis_0", axis=0, extra=some_rows_masked, scale=0.5),
        case("rank_1", (13,), scale=0.5),
        case("rank_2", (9, 13), is_causal=True),
        case("rank_5", (2, 1, 3, 5, 4), extra=mask(3, 1, 4)),
        case(
            "hidden_scale",
            tags=("hidden",),
            fully_masked="nan",
            extra=both(some_rows_masked, normal(scale=(9, 1))),
        ),
        case(
            "hidden_bias_scale",
            tags=("hidden",),
            extra=both(_infinite_bias, some_rows_masked, normal(scale=(3, 1, 1))),
        ),
        case(
            "hidden_uniform",
            tags=("hidden",),
            fully_masked="uniform",
            extra=both(some_rows_masked, normal(scale=(13,)), sink(9)),
        ),
        case(
            "hidden_axis_1",
            tags=("hidden",),
            axis=1,
            extra=both(mask(2, 3, 9, 13, keep=0.5), sink(9, 13), normal(scale=(3, 1, 1))),
        ),
        case("no_rows", (2, 0, 13), tags=("edge",)),
        case("no_columns", (2, 9, 0), tags=("edge",), extra=sink(9)),
        case("one_column", (2, 9, 1), tags=("edge",), extra=mask(9, 1)),
        case(
            "second_scale",
            (2, 3, 4),
            tags=("second",),
            extra=both(normal(scale=(2, 1, 1), bias=(1, 4)), mask(3, 4), sink(3)),
        ),
        case("second_mask", (2, 3, 4), tags=("second",), extra=mask(2, 3, 4, keep=0.5), scale=0.5),
        case("second_causal", (2, 3, 4), tags=("second",), is_causal=True, fully_masked="uniform"),
        case("shard", (4, 8, 6, 10), tags=("shard",), scale=0.5, extra=mask(4, 8, 6, 10)),
        case(
            "shard_causal", (4, 8, 6, 10), tags=("shard",), is_causal=True, extra=normal(bias=(4, 8, 6, 10))
        ),
        case("shard_broadcast_bias", (4, 8, 6, 10), tags=("shard",), extra=normal(bias=(1, 8, 6, 10))),
        case("shard_sink", (4, 8, 6, 10), tags=("shard",), extra=sink(8, 1)),
        *_measured(),
        *_compiled(),
    )
}


def _backward(cotangents, outputs, arrays, options, wrt):
    scale = arrays.get("scale", options.get("scale", 1.0))
    mask, axis = arrays.get("mask"), options.get("axis", -1)
    return {"x": scaled_masked_softmax_bwd(cotangents[0], outputs[0], mask, scale=scale, axis=axis)}


TRAITS = {
    "scaled_masked_softmax": {
        "backward": _backward,
        "backward_wrt": ("x",),
        "axes": {"x": "BNTS", "mask": "BNTS", "bias": "BNTS", "sink": "BNT", "scale": "BNTS", "y": "BNTS"},
    }
}
