"""Named inputs of multi-scale deformable attention."""

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd._core.records import SAME_BITS
from jax_attn_bwd.ops.deformable import api, reference

LEVELS = ((6, 4), (3, 5), (1, 1))  # not square: swapped axes show
SQUARE = ((64, 64), (32, 32), (16, 16), (8, 8))


def locations(rng, shape, levels, points, spread=1.5, method="bilinear"):
    """`[*shape, K, 2]`: up to `spread` pixels outside the level, never nearer than 0.05 to a kink.

    There rounding decides between two pixels, and no two precisions need agree.
    """
    kinks = 0.0 if method == "discrete" else 0.5  # of loc * size, at integers or between them
    size = np.repeat(np.array(levels)[:, ::-1], points, axis=0)  # [K, 2], (W, H)
    low, high = np.floor(-spread), np.ceil(size + spread)
    whole = np.floor(low + rng.random((*shape, len(size), 2)) * (high - low))
    return (whole + kinks + rng.uniform(0.05, 0.95, whole.shape)) / size


def case(
    name, *, B=2, Q=7, M=3, D=5, levels=LEVELS, points=2,
    tags=("ci",), dtype="bfloat16", dtypes=None, means=None, extra=None, **options,
) -> Case:  # fmt: skip
    """Returns a case; `points` is P, or (P_1, ..., P_L); `extra(rng, arrays)` replaces some arrays."""
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

    return Case(name, build, options, frozenset(tags), dtype, dtypes or {}, means or {})


def _masked_logits(rng, arrays):
    logits = 3 * arrays["attention_weights"]
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[0, 1, 2] = -np.inf
    return {"attention_weights": logits}


def _one_pixel(rng, arrays):
    at = np.full_like(arrays["sampling_locations"], 0.5)
    return {"sampling_locations": at + rng.uniform(0.01, 0.04, at.shape)}


def around(levels, everywhere):
    """Points about 2 pixels from a query for each pixel, or from queries anywhere; weights add up to 1."""

    def replaced(rng, arrays):
        B, Q, M, *points, _ = arrays["sampling_locations"].shape
        centres = [(np.argwhere(np.ones(x))[:, ::-1] + 0.5) / x[::-1] for x in levels]
        centres = np.concatenate(centres) if everywhere else rng.random((Q, 2))
        sizes = np.array(levels)[:, None, ::-1]  # [L, 1, (W, H)]
        weights = 0.1 + rng.random((B, Q, M, *points))
        return {
            "sampling_locations": centres[:, None, None, None]
            + 2 * rng.standard_normal((B, Q, M, *points, 2)) / sizes,
            "attention_weights": weights / weights.sum((-2, -1), keepdims=True),
        }

    return replaced


def detector(name, B, Q, levels, tags, **options):
    """The encoder of a detector asks once for every pixel, around its own place; the decoder `Q` times."""
    sizes = {"B": B, "Q": Q or sum(h * w for h, w in levels), "M": 8, "D": 32, "levels": levels, "points": 4}
    return case(name, **sizes, tags=tags, dtype="float32", extra=around(levels, Q is None), **options)


_COCO = ((100, 134), (50, 67), (25, 34), (13, 17))
_TIMED = ("bench", "bench_gpu", "timed")
CASES = (
    case("plain", tags=("ci", "check", "compile")),
    case("border", padding_mode="border", tags=("ci", "check", "compile")),
    case("discrete", method="discrete", tags=("ci", "check")),
    case("softmax", normalize="softmax", extra=_masked_logits, tags=("ci", "check")),
    case("one_pixel", Q=31, extra=_one_pixel, tags=("ci", "check")),
    case("many_queries", B=1, Q=2100, M=4, D=3, levels=((3, 2),), tags=("ci", "check")),
    case("means", Q=40, D=8, normalize="softmax", means={"value": 3.0}, tags=("means",)),
    case("large", Q=1237, D=40, levels=((37, 29), (13, 7), (1, 5)), tags=("large", "repeat", "poison")),
    case(
        "large, softmax, ragged",
        Q=701,
        D=130,
        levels=((37, 29), (13, 7), (5, 1)),
        points=(5, 0, 9),
        padding_mode="border",
        normalize="softmax",
        tags=("large",),
    ),
    detector("encoder, B1, Q=5440", 1, None, SQUARE, _TIMED),
    detector("decoder, B1, Q=300", 1, 300, SQUARE, _TIMED),
    detector("encoder, B2, 100x134 to 13x17", 2, None, _COCO, _TIMED),
    detector(f"encoder, B1, Q=5440{SAME_BITS}", 1, None, SQUARE, ("timed",), deterministic_sums=True),
    detector(f"decoder, B1, Q=300{SAME_BITS}", 1, 300, SQUARE, ("timed",), deterministic_sums=True),
)


def _call(*, spatial_shapes, value, **arguments):
    return (api.multi_scale_deformable_attention(value, spatial_shapes, **arguments),)


def _reference(deterministic_sums=True, **arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (reference.multi_scale_deformable_attention(**arguments),)


def _hidden(arrays, options):
    """Pixels that no sample reads, samples outside or behind a logit of -inf, rows without samples."""
    # each sample's position and weight, [B, Q, M, K], and whether it counts
    value, levels = arrays["value"], options["spatial_shapes"]
    (B, _, M, D), (Q, P) = value.shape, (arrays["sampling_locations"].shape[1], options.get("num_points"))
    P = P or (arrays["sampling_locations"].shape[-2],) * len(levels)
    location = np.asarray(arrays["sampling_locations"]).reshape(B, Q, M, sum(P), 2)
    weight = np.asarray(arrays["attention_weights"]).reshape(B, Q, M, sum(P))
    is_softmax = options.get("normalize") == "softmax"
    finite = np.isfinite(location).all(-1) & ((weight != -np.inf) | (not is_softmax))
    counts, unread = np.array(finite), np.ones(value.shape[:3], bool)
    size = np.repeat(np.array(levels)[:, ::-1], P, axis=0)  # [K, 2], (W, H)
    start = np.repeat(np.cumsum([0, *(h * w for h, w in levels[:-1])]), P)
    position = np.where(finite[..., None], location, 0) * size - 0.5
    if options.get("method") == "discrete":
        position = np.clip(np.floor(position + 1), 0, size - 1)
    elif options.get("padding_mode") == "border":
        position = np.clip(position, 0, size - 1)
    else:
        counts &= ((position > -1) & (position < size)).all(-1)
    position = np.where(counts[..., None], position, 0)
    # the pixels that some sample reads
    b, m = np.arange(B)[:, None, None, None], np.arange(M)[:, None]
    for step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        pixel = np.floor(position).astype(int) + step
        read = counts & ((pixel >= 0) & (pixel < size)).all(-1)
        read &= ((position != np.floor(position)) | (np.array(step) == 0)).all(-1)
        index = np.where(read, start + pixel[..., 1] * size[:, 0] + pixel[..., 0], 0)
        where = np.broadcast_arrays(b, index, m)
        unread[tuple(x[read] for x in where)] = False
    found = {"value": unread, "sampling_locations": ~counts.reshape(arrays["sampling_locations"].shape[:-1])}
    if not is_softmax:
        found["attention_weights"] = ~counts.reshape(arrays["attention_weights"].shape)
    return found | {"out": np.repeat(~counts.any(-1), D, axis=-1)}


OPERATORS = (
    Operator(
        name="multi_scale_deformable_attention",
        outputs=("out",),
        differentiable=api.DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        cases=CASES,
        hidden=_hidden,
    ),
)
