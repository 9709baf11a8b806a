"""Named inputs of multi-scale deformable attention."""

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.deformable import api, reference

LEVELS = ((6, 4), (3, 5), (1, 1))  # not square: swapped axes show


def locations(rng, shape, levels, points, spread=1.5, method="bilinear"):
    """`[*shape, K, 2]`: up to `spread` pixels outside the level, never nearer than 0.05 to a kink.

    There rounding decides between two pixels, and no two precisions need agree.
    """
    kinks = 0.0 if method == "discrete" else 0.5  # of loc * size, at integers or between them
    size = np.repeat(np.array(levels)[:, ::-1], points, axis=0)  # [K, 2], (W, H)
    low, high = np.floor(-spread), np.ceil(size + spread)
    whole = np.floor(low + rng.random((*shape, len(size), 2)) * (high - low))
    return (whole + kinks + rng.uniform(0.05, 0.95, whole.shape)) / size


def _case(
    name, *, B=2, Q=7, M=3, D=5, levels=LEVELS, points=2, tags=("ci",), extra=None, **options
) -> Case:
    """`points` is P, or (P_1, ..., P_L); `extra(rng, arrays) -> {argument: array}` replaces arrays."""
    counts = (points,) * len(levels) if isinstance(points, int) else points
    options = {"spatial_shapes": levels, **options}
    if not isinstance(points, int):
        options["num_points"] = points

    def build(rng):
        split = (len(levels), points) if isinstance(points, int) else (sum(points),)
        at = locations(rng, (B, Q, M), levels, counts, method=options.get("method", "bilinear"))
        arrays = {
            "value": rng.standard_normal((B, sum(h * w for h, w in levels), M, D)),
            "sampling_locations": at.reshape(B, Q, M, *split, 2),
            "attention_weights": rng.standard_normal((B, Q, M, *split)),
        }
        return arrays | (extra(rng, arrays) if extra else {})

    return Case(name, build, options, frozenset(tags))


def _far(rng, arrays):
    at = arrays["sampling_locations"].copy()
    at[0, 0], at[0, 1], at[0, 2], at[1, 0, 0] = np.nan, np.inf, -np.inf, 1e30
    at[1, 1] = rng.uniform(-10, 10, at[1, 1].shape)
    return {"sampling_locations": at}


def _masked_logits(rng, arrays):
    logits = 3 * arrays["attention_weights"]
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[0, 1, 2] = -np.inf
    return {"attention_weights": logits}


def _one_pixel(rng, arrays):
    at = np.full_like(arrays["sampling_locations"], 0.5)
    return {"sampling_locations": at + rng.uniform(0.01, 0.04, at.shape)}


_SMALL = dict(B=1, Q=2, M=2, D=3, levels=((3, 2), (1, 2)), points=1)

CASES = (
    _case("plain", tags=("ci", "check")),
    _case("upstream", B=1, Q=2, M=2, D=2, levels=((6, 4), (3, 2))),
    _case("border", padding_mode="border", tags=("ci", "check")),
    _case("discrete", method="discrete", tags=("ci", "check")),
    _case("softmax", normalize="softmax", extra=_masked_logits, tags=("ci", "check")),
    _case("ragged", points=(3, 0, 4), padding_mode="border", normalize="softmax"),
    _case("far_locations", extra=_far),
    _case("one_pixel", Q=31, extra=_one_pixel, tags=("ci", "check")),
    _case("thin_levels", levels=((1, 7), (5, 1)), points=3),
    _case("one_level", levels=((8, 9),), points=4, M=1, D=1, Q=1),
    _case("many_queries", B=1, Q=2100, M=4, D=3, levels=((3, 2),), tags=("ci", "check")),
    _case("not_deterministic", deterministic=False),
    _case("no_queries", Q=0, tags=("edge",)),
    _case("no_points", points=0, tags=("edge",)),
    _case("no_batch", B=0, tags=("edge",)),
    _case("no_channels", D=0, tags=("edge",)),
    _case("second", tags=("second",), **_SMALL),
    _case("second_softmax", tags=("second",), normalize="softmax", **_SMALL),
    _case("second_border", tags=("second",), padding_mode="border", **_SMALL),
    _case("shard", B=4, Q=6, M=8, D=5, tags=("shard",)),
    _case("shard_softmax", B=4, Q=6, M=8, D=5, tags=("shard",), normalize="softmax"),
)


def _call(*, spatial_shapes, value, **arguments):
    return (api.multi_scale_deformable_attention(value, spatial_shapes, **arguments),)


def _reference(deterministic=True, **arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (reference.multi_scale_deformable_attention(**arguments),)


def _backward(cotangents, outputs, arrays, options, wrt):
    grads = api.multi_scale_deformable_attention_bwd(*cotangents, **arrays, **options, wrt=wrt)
    return {name: x for name, x in grads._asdict().items() if x is not None}


OPERATORS = (
    Operator(
        name="multi_scale_deformable_attention",
        outputs=("out",),
        differentiable=api.DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        backward=_backward,
        cases=CASES,
        axes={
            "value": "BSND",
            "sampling_locations": "BQNLPX",
            "attention_weights": "BQNLP",
            "out": "BQN",
        },
        backward_wrt=api.DIFFERENTIABLE,
    ),
)
