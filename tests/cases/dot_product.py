"""Cases of dense attention that tests and benchmarks read; those with functions are in `dot_product_mods`."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cases import infinite_bias
from jax_attn_bwd import dot_product_attention_bwd
from jax_attn_bwd._core.cases import Case, bias, both, mask, positions, segments, sink
from jax_attn_bwd.ops.dot_product.cases import KEY, LENGTHS, MOD_ARGS, OPERATORS, case, large, with_mod_args

_SECOND: dict[str, Any] = dict(B=(1,), T=3, S=4, N=2, K=1, H=2, Hv=3)
_SHARD: dict[str, Any] = dict(B=(4,), T=6, S=10, N=8, K=4)


def _lowest_bias(rng, n):
    """Rows whose logits are all huge and tied: float masks in the style of finfo.min."""
    bias = rng.standard_normal((2, 1, 9, 13))
    bias[0, 0, 2:4], bias[1, 0, 5] = -1e9, np.finfo(np.float32).min
    return {"bias": bias}


def _short(rng, n):
    return {"key_value_seq_lengths": np.array([n["S"] - 1], np.int32)}


def _edges():
    for T, S in itertools.product((0, 1, 5), (0, 1, 3)):
        if (T, S) != (5, 3):
            yield case(f"T{T}_S{S}", T=T, S=S, tags=("edge",), extra=sink(4) if S == 3 else None)


def _hide_from_groups(rng, n):
    """Columns hidden from the heads of one group are seen by those of the other."""
    mask = rng.random((2, 4, 9, 13)) < 0.7
    mask[:, :2, :, ::3] = False
    mask[:, 2:, :, 1::3] = False
    return {"mask": mask}


def _hide_by_two(rng, n):
    """Neither the mask nor causality hides column 3 alone: rows that the mask lets see it come before it."""
    mask = rng.random((2, 1, 9, 13)) < 0.8
    mask[:, :, 3:, 3] = False
    return {"mask": mask}


def _hide_beyond_lengths(rng, n):
    """Column 1 is seen by rows beyond the query length only."""
    mask = np.ones((2, 1, 9, 13), bool)
    mask[:, :, :7, 1] = False
    return {"mask": mask, "query_seq_lengths": np.array([7, 6], np.int32)}


def _hide_by_bias(rng, n):
    """Column 2 is within the window of rows 1 to 4, to all of which the bias hides it."""
    bias = rng.standard_normal((1, 1, 9, 13))
    bias[:, :, 1:5, 2] = -np.inf
    return {"bias": bias}


def _far_positions(rng, n):
    """Queries far to the right of most keys, some beyond the reach of every key."""
    return {"query_positions": (np.arange(n["T"]) + n["S"] - 3).astype(np.int32)}


def _late_keys(rng, n):
    """The first queries precede every key; the last keys follow every query."""
    at = {"query_positions": np.arange(9, dtype=np.int32)}
    return at | {"key_value_positions": np.arange(13, dtype=np.int32) + 4}


_HIDING: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("hidden_groups", both(_hide_from_groups, bias(2, 4, 9, 13)), {}),
    ("hidden_rows", both(mask(1, 4, 9, 1, keep=0.5), bias(1, 4, 9, 1)), {}),
    ("hidden_everything", lambda rng, n: {"mask": np.zeros((1, 1), bool)}, {}),
    ("hidden_by_two", _hide_by_two, {"is_causal": True}),
    ("hidden_lengths", _hide_beyond_lengths, {}),
    ("hidden_by_bias", _hide_by_bias, {"local_window_size": (2, 1)}),
    ("hidden_positions", _far_positions, {"local_window_size": (2, 0), "is_causal": True}),
    ("hidden_late_keys", _late_keys, {"is_causal": True}),
    ("hidden_dropout", both(LENGTHS, sink(4), KEY), {"dropout_rate": 0.4, "is_causal": True}),
)


def _measured() -> Iterator[Case]:
    """Yields float32 for a CPU; for a GPU 16k tokens and a model width of 2048, then what is special."""
    # On a CPU.
    cpu = partial(large, B=1, N=8, H=64, dtype="float32")
    for T, tags in ((256, ("quick",)), (2048, ("bench",)), (4096, ("bench",))):
        yield cpu(f"T=S={T} full", tags, T=T)
        yield cpu(f"T=S={T} causal", tags, T=T, is_causal=True)
    for T, window, tags in ((512, 64, ("quick",)), (4096, 256, ("bench",)), (8192, 256, ("bench",))):
        yield cpu(f"T=S={T} window {window}", tags, T=T, is_causal=True, local_window_size=(window, 0))
    yield cpu("T=S=32768 causal, memory only", ("bench",), T=32768, is_causal=True)
    for T in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        tags = ("scaling",) if T >= 1024 else ("quick_scaling",)
        for series, options in (("causal", {}), ("causal, window 1024", {"local_window_size": (1024, 0)})):
            yield cpu(f"{series}: T={T}", tags, N=1, T=T, is_causal=True, **options)

    # On a GPU.
    gpu = partial(large, tags=("bench_gpu",), T=8192)
    for H, N in ((128, 16), (64, 32), (256, 8)):
        yield gpu(f"H={H} B=2 T=8192 N={N} full", N=N, H=H)
        yield gpu(f"H={H} B=2 T=8192 N={N} causal", N=N, H=H, is_causal=True)
    yield gpu("H=128 B=2 T=8192 N=16 causal, any order", is_causal=True, deterministic_sums=False)
    name, causal = "H=64 B=1 T=16384 N=32 causal window 1024", {"is_causal": True}
    yield gpu(name, B=1, T=16384, N=32, H=64, **causal, local_window_size=(1024, 0))
    yield gpu("H=128 B=1 T=32768 N=16 causal", B=1, T=32768, is_causal=True)


CASES = {
    "dot_product_attention": (
        case("causal", is_causal=True),
        case("causal_more_queries", T=13, S=9, is_causal=True, tags=("edge", "cudnn")),
        case("window", local_window_size=(3, 1)),
        case("bias_full", extra=bias(2, 4, 9, 13)),
        case("bias_query", extra=bias(9, 1), tags=("edge",)),
        case("bias_batch", extra=bias(2, 1, 1, 1), logits_soft_cap=2.0),
        case("bias_low_rank", extra=bias(13), is_causal=True, tags=("edge",)),
        case("bias_lowest", extra=_lowest_bias, tags=("edge", "rounded")),
        case("bias_minus_inf", extra=infinite_bias, tags=("ci", "cudnn")),
        case("mask_key", extra=mask(2, 1, 1, 13, keep=0.3)),
        case("mask_query", extra=mask(2, 1, 9, 1), tags=("edge",)),
        case("positions", extra=positions, is_causal=True, local_window_size=(4, 0)),
        case("sink_lengths", extra=both(sink(4), LENGTHS), tags=("edge", "cudnn")),
        case("dropout_offset", extra=KEY, dropout_rate=0.4, dropout_offset=(3, 1, 5, 2)),
        case("dropout_broadcast", extra=KEY, dropout_rate=0.4, broadcast_dropout=True),
        case("dropout_all", extra=KEY, dropout_rate=1.0, tags=("edge",)),
        case("no_batch", B=(), extra=bias(4, 9, 13)),
        case("two_batch_axes", B=(2, 3), extra=bias(3, 1, 1, 13), is_causal=True),
        case("one_key_head", N=3, K=1),
        # several tiles of the default tiling, none of them whole
        case(
            "tiles_dynamic",
            B=(2,),
            T=300,
            S=1100,
            N=2,
            K=1,
            tags=("ci",),
            is_causal=True,
            extra=both(LENGTHS, lambda rng, n: {"query_positions": np.arange(n["T"]) + 500}),
        ),
        *(case(name, tags=("hidden",), extra=extra, **options) for name, extra, options in _HIDING),
        *_edges(),
        case(
            "second_causal",
            **_SECOND,
            is_causal=True,
            logits_soft_cap=2.0,
            tags=("second",),
            extra=both(sink(2), bias(2, 1, 4)),
        ),
        case(
            "second_segments",
            **_SECOND,
            tags=("second",),
            extra=both(segments(), _short, KEY),
            dropout_rate=0.3,
        ),
        case("shard", **_SHARD, is_causal=True, tags=("shard",), extra=both(sink(8), bias(4, 8, 6, 10))),
        case("shard_window", B=(4,), T=6, S=10, N=8, K=8, local_window_size=3, tags=("shard",)),
        case("shard_dropout", **_SHARD, tags=("shard",), extra=KEY, dropout_rate=0.3),
        case("shard_broadcast_bias", **_SHARD, tags=("shard",), extra=bias(1, 8, 1, 10)),
        case(
            "shard_lengths",
            **_SHARD,
            tags=("shard", "bounds"),
            extra=lambda rng, n: {"key_value_seq_lengths": np.array([3, 0, 10, 7], np.int32)},
        ),
        case("shard_segments", **_SHARD, tags=("shard", "bounds"), extra=segments()),
        large("many blocks", ("repeat",), B=8, T=2051, K=4, is_causal=True),
        *_measured(),
    )
}


def _backward(cotangents, outputs, arrays, options, wrt):
    (dout, dlse), (out, lse) = cotangents, outputs
    wrt = dict.fromkeys("mod_args" if name in MOD_ARGS else name for name in wrt)
    arguments = with_mod_args({**arrays, **options})
    grads = dot_product_attention_bwd(dout, **arguments, out=out, lse=lse, dlse=dlse, wrt=tuple(wrt))
    found = {name: x for name, x in grads._asdict().items() if x is not None}
    of_args = dict(zip(MOD_ARGS, found.pop("mod_args", ()), strict=False))
    return found | {name: x for name, x in of_args.items() if x is not None}


TRAITS = {
    "dot_product_attention": {
        "backward": _backward,
        "backward_wrt": OPERATORS[0].differentiable,
        "axes": {
            "query": "BTNH", "key": "BSNH", "value": "BSNH", "bias": "BNTS", "mask": "BNTS", "sink": "N",
            "key_value_seq_lengths": "B", "query_segment_ids": "BT", "key_value_segment_ids": "BS",
            "out": "BTNH", "lse": "BTN", "mod_args_0": "N", "mod_args_1": "B",
        },
        "whole": MOD_ARGS,
    }
}  # fmt: skip
