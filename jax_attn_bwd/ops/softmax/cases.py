"""Named inputs of the scaled masked softmax."""

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator, both, case_of, mask, seen_with_bias, sink
from jax_attn_bwd.ops.softmax import api, reference


def case(name, shape=(2, 3, 9, 13), *, spread=1.0, extra=None, **options) -> Case:
    """Returns a case of these options, and of `case_of`; `extra(rng, {}) -> {argument: array}` adds to x."""

    def build(rng):
        return {"x": rng.normal(0, spread, shape)} | (extra(rng, {}) if extra else {})

    return case_of(name, build, **options)


def normal(**shapes):
    """Draws arrays of these names and shapes."""
    return lambda rng, n: {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def some_rows_masked(rng, n):
    """Draws a mask `[2, 1, 9, 13]` that hides all of two rows."""
    some = rng.random((2, 1, 9, 13)) < 0.5
    some[1, 0, 2:4] = False
    return {"mask": some}


def _large():
    """Rows of odd width, from one block's worth to many: what only a GPU runs soon enough."""
    repeated, one = ("large", "repeat"), ("large",)
    for width in (1000, 4099, 16385):
        yield case(f"large {width}", (1031, width), spread=3.0, tags=repeated, scale=0.5)
    yield case("large 131073", (2, 3, 131073), spread=3.0, tags=one)
    plane = (2, 4, 343, 1000)
    yield case("large masked", plane, tags=(*repeated, "poison"), extra=mask(2, 1, 1, 1000), scale=0.125)
    yield case("large causal", plane, tags=(*one, "poison"), is_causal=True, scale=0.125)


TIMED = tuple((2**27 // width, width) for width in (1024, 8192, 131072))
CASES = (
    case("mask_rows", extra=some_rows_masked, scale=0.5, tags=("ci", "check")),
    case("bias_heads", extra=both(normal(bias=(1, 3, 9, 13)), some_rows_masked), tags=("ci", "check")),
    case("scale_array", extra=both(normal(scale=(3, 1, 1)), some_rows_masked), tags=("ci", "check")),
    case("sink_heads", extra=both(sink(3, 1), some_rows_masked), scale=4.0, tags=("ci", "check")),
    case("causal_window", is_causal=True, local_window_size=2, scale=0.5, tags=("ci", "check")),
    case("axis_1", axis=1, extra=both(sink(9, 1), some_rows_masked), tags=("ci", "check")),
    case("large", spread=1e4, scale=0.125, tags=("ci", "check")),
    case("means", (2, 3, 9, 200), means={"y": 3.0}, scale=0.5, tags=("means",)),
    case(
        "means of all",
        (2, 3, 9, 200),
        extra=both(normal(scale=(3, 1, 1), bias=(1, 3, 9, 200)), sink(3, 1, spread=3.0)),
        means={"y": 3.0},
        times={"bias": 4},  # the backward reads y as they were rounded: 3.1 times in float16
        tags=("means",),
    ),
    *_large(),
    *(case(f"{list(shape)} bfloat16", shape, tags=("bench_gpu", "timed")) for shape in TIMED),
    *(case(f"{list(shape)} bfloat16", shape, tags=("timed",)) for shape in ((4096, 1024), (512, 32768))),
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
    seen, found = seen_with_bias(seen, arrays)
    return {**found, "x": ~seen, "y": ~seen}


OPERATORS = (
    Operator(
        name="scaled_masked_softmax",
        outputs=("y",),
        differentiable=api.DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        cases=CASES,
        hidden=_hidden,
    ),
)
