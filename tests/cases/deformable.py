"""Cases of multi-scale deformable attention that tests, benchmarks and full compilation alone read."""

import numpy as np

from jax_attn_bwd.ops.deformable import api
from jax_attn_bwd.ops.deformable.cases import SQUARE, around, case, detector

_COMPILED = ("mosaic_gpu", "A100", "B200")
_SMALL = dict(B=1, Q=2, M=2, D=3, levels=((3, 2), (1, 2)), points=1)
_DETR = ((100, 167), (50, 84), (25, 42), (13, 21))


def _far(rng, arrays):
    at = arrays["sampling_locations"].copy()
    at[0, 0], at[0, 1], at[0, 2], at[1, 0, 0] = np.nan, np.inf, -np.inf, 1e30
    at[1, 1] = rng.uniform(-10, 10, at[1, 1].shape)
    return {"sampling_locations": at}


def _measured():
    yield detector("encoder, B1, Q=60", 1, None, ((8, 6), (4, 3)), ("quick",))
    yield detector("decoder, B1, Q=30", 1, 30, ((8, 6), (4, 3)), ("quick",))
    for Q in (32, 64, 256, 1024, 4096, 16384, 65536):
        tags = ("scaling",) if Q >= 256 else ("quick_scaling",)
        yield detector(f"decoder, 5440 pixels: Q={Q}", 1, Q, SQUARE, tags)


CASES = {
    "multi_scale_deformable_attention": (
        case("upstream", B=1, Q=2, M=2, D=2, levels=((6, 4), (3, 2))),
        case("ragged", points=(3, 0, 4), padding_mode="border", normalize="softmax"),
        case("far_locations", extra=_far),
        case("thin_levels", levels=((1, 7), (5, 1)), points=3),
        case("one_level", levels=((8, 9),), points=4, M=1, D=1, Q=1, tags=("edge",)),
        case("not_deterministic", deterministic_sums=False, tags=("edge",)),
        case("no_queries", Q=0, tags=("edge",)),
        case("no_points", points=0, tags=("edge",)),
        case("no_batch", B=0, tags=("edge",)),
        case("no_channels", D=0, tags=("edge",)),
        case("second", tags=("second",), **_SMALL),
        case("second_softmax", tags=("second",), normalize="softmax", **_SMALL),
        case("second_border", tags=("second",), padding_mode="border", **_SMALL),
        case("shard", B=4, Q=6, M=8, D=5, tags=("shard",)),
        case("shard_softmax", B=4, Q=6, M=8, D=5, tags=("shard",), normalize="softmax"),
        case(
            "bfloat16, D=256",
            Q=300,
            D=256,
            levels=((64, 64), (32, 32)),
            points=(3, 9),
            tags=(*_COMPILED, "tpu7x"),
            dtypes={"sampling_locations": "float32"},
        ),
        case(
            "encoder, B2, 100x167 to 13x21",
            B=2,
            Q=sum(h * w for h, w in _DETR),
            M=8,
            D=32,
            levels=_DETR,
            points=4,
            tags=(*_COMPILED, "v6e", "table"),
            dtype="float32",
            extra=around(_DETR, True),
        ),
        *_measured(),
    )
}


def _backward(cotangents, outputs, arrays, options, wrt):
    grads = api.multi_scale_deformable_attention_bwd(*cotangents, **arrays, **options, wrt=wrt)
    return {name: x for name, x in grads._asdict().items() if x is not None}


TRAITS = {
    "multi_scale_deformable_attention": {
        "backward": _backward,
        "backward_wrt": api.DIFFERENTIABLE,
        "axes": {
            "value": "BSND", "sampling_locations": "BQNLPX", "attention_weights": "BQNLP", "out": "BQN",
        },
    }
}  # fmt: skip
