"""Named inputs of dense attention."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.case_arrays import bias, both, dropout_key, infinite_bias, mask, positions, segments
from jax_attn_bwd._core.cases import Operator
from jax_attn_bwd.ops.dot_product import api, mod_cases, reference, workloads
from jax_attn_bwd.ops.dot_product.mod_cases import case as _case

_KEY = dropout_key(7, 11)


def _lowest_bias(rng, n):
    """Rows whose logits are all huge and tied: float masks in the style of finfo.min."""
    bias = rng.standard_normal((2, 1, 9, 13))
    bias[0, 0, 2:4], bias[1, 0, 5] = -1e9, np.finfo(np.float32).min
    return {"bias": bias}


def _lengths(rng, n):
    return {
        "query_seq_lengths": np.array([n["T"] - 2, n["T"]], np.int32),
        "key_value_seq_lengths": np.array([0, n["S"] - 4], np.int32),
    }


def _short(rng, n):
    return {"key_value_seq_lengths": np.array([n["S"] - 1], np.int32)}


def _sink(rng, n):
    return {"sink": 20.0 * rng.standard_normal(n["N"])}  # large: a sink near 0 hides errors


def _edges():
    for T, S in itertools.product((0, 1, 5), (0, 1, 3)):
        if (T, S) != (5, 3):
            yield _case(f"T{T}_S{S}", T=T, S=S, tags=("edge",), extra=_sink if S == 3 else None)


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
    ("hidden_dropout", both(_lengths, _sink, _KEY), {"dropout_rate": 0.4, "is_causal": True}),
)
_SECOND = dict(B=(1,), T=3, S=4, N=2, K=1, H=2, Hv=3)

CASES = (
    _case("plain", tags=("ci", "check")),
    _case("causal", is_causal=True),
    _case("causal_more_queries", T=13, S=9, is_causal=True, tags=("edge", "cudnn")),
    _case("window", local_window_size=(3, 1)),
    _case(
        "causal_window_cap",
        is_causal=True,
        local_window_size=2,
        logits_soft_cap=1.5,
        scale=1.0,
        tags=("ci", "check"),
    ),
    _case("bias_full", extra=bias(2, 4, 9, 13)),
    _case("bias_key", extra=bias(1, 4, 1, 13), is_causal=True, tags=("ci", "check")),
    _case("bias_query", extra=bias(9, 1), tags=("edge",)),
    _case("bias_batch", extra=bias(2, 1, 1, 1), logits_soft_cap=2.0),
    _case("bias_low_rank", extra=bias(13), is_causal=True, tags=("edge",)),
    _case("bias_lowest", extra=_lowest_bias, tags=("edge", "rounded")),
    _case("bias_minus_inf", extra=infinite_bias, tags=("ci", "cudnn")),
    _case("mask_heads", extra=mask(1, 4, 9, 13), tags=("ci", "check")),
    _case("mask_key", extra=mask(2, 1, 1, 13, keep=0.3)),
    _case("mask_query", extra=mask(2, 1, 9, 1), tags=("edge",)),
    _case("lengths", extra=_lengths, tags=("ci", "check")),
    _case("segments_causal", extra=segments, is_causal=True, tags=("ci", "check", "cudnn")),
    _case("positions", extra=positions, is_causal=True, local_window_size=(4, 0)),
    _case("sink", extra=both(_sink, mask(2, 1, 9, 13, keep=0.1)), tags=("ci", "check")),
    _case("sink_lengths", extra=both(_sink, _lengths), tags=("edge", "cudnn")),
    _case("dropout", extra=_KEY, dropout_rate=0.4, tags=("ci", "check")),
    _case("dropout_offset", extra=_KEY, dropout_rate=0.4, dropout_offset=(3, 1, 5, 2)),
    _case("dropout_broadcast", extra=_KEY, dropout_rate=0.4, broadcast_dropout=True),
    _case("dropout_all", extra=_KEY, dropout_rate=1.0, tags=("edge",)),
    _case("no_batch", B=(), extra=bias(4, 9, 13)),
    _case("two_batch_axes", B=(2, 3), extra=bias(3, 1, 1, 13), is_causal=True),
    _case("one_key_head", N=3, K=1),
    _case("large_logits", scale=1e4, tags=("ci", "check")),
    # several tiles of the default tiling, none of them whole
    _case("tiles", B=(1,), T=531, S=1049, N=2, K=1, is_causal=True, extra=_sink, tags=("ci", "check")),
    _case(
        "tiles_dynamic",
        B=(2,),
        T=300,
        S=1100,
        N=2,
        K=1,
        tags=("ci",),
        is_causal=True,
        extra=both(_lengths, lambda rng, n: {"query_positions": np.arange(n["T"]) + 500}),
    ),
    *(_case(name, tags=("hidden",), extra=extra, **options) for name, extra, options in _HIDING),
    *_edges(),
    _case(
        "second_causal",
        **_SECOND,
        is_causal=True,
        logits_soft_cap=2.0,
        tags=("second",),
        extra=both(_sink, bias(2, 1, 4)),
    ),
    _case(
        "second_segments", **_SECOND, tags=("second",), extra=both(segments, _short, _KEY), dropout_rate=0.3
    ),
    _case(
        "shard",
        B=(4,),
        T=6,
        S=10,
        N=8,
        K=4,
        is_causal=True,
        tags=("shard",),
        extra=both(_sink, bias(4, 8, 6, 10)),
    ),
    _case("shard_window", B=(4,), T=6, S=10, N=8, K=8, local_window_size=3, tags=("shard",)),
    _case("shard_dropout", B=(4,), T=6, S=10, N=8, K=4, tags=("shard",), extra=_KEY, dropout_rate=0.3),
    _case("shard_broadcast_bias", B=(4,), T=6, S=10, N=8, K=4, tags=("shard",), extra=bias(1, 8, 1, 10)),
    _case(
        "shard_lengths",
        B=(4,),
        T=6,
        S=10,
        N=8,
        K=4,
        tags=("shard", "bounds"),
        extra=lambda rng, n: {"key_value_seq_lengths": np.array([3, 0, 10, 7], np.int32)},
    ),
    _case("shard_segments", B=(4,), T=6, S=10, N=8, K=4, tags=("shard", "bounds"), extra=segments),
    *workloads.CASES,
    *mod_cases.CASES,
)
MOD_ARGS = tuple(f"{mod_cases.PREFIX}{i}" for i in range(3))


_DIFFERENTIABLE = (*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *MOD_ARGS)


def _call(**arguments):
    return api.dot_product_attention(**mod_cases.with_mod_args(arguments), return_residual=True)


def _reference(deterministic_sums=True, **arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return reference.dot_product_attention(**_with_keep_mask(**mod_cases.with_mod_args(arguments)))


def _with_keep_mask(
    dropout_key=None, dropout_rate=0.0, broadcast_dropout=False, dropout_offset=None, **arguments
):
    """The arguments of the definition, which is handed the dropout mask of the whole plane."""
    if not dropout_rate:
        return arguments
    q, k = arguments["query"], arguments["key"]
    (*batch, T, N, _), S = q.shape, k.shape[-3]
    b, h, r, c = dropout_offset or (0, 0, 0, 0)
    u32 = jnp.uint32
    batches = jnp.arange(b, b + int(np.prod(batch)), dtype=u32).reshape(*batch, 1)
    heads = jnp.arange(h, h + N, dtype=u32)
    if broadcast_dropout:
        batches, heads = jnp.zeros_like(batches), jnp.zeros_like(heads)
    words = dropout.key_words(dropout_key)
    keys = tuple(x[..., None, None] for x in dropout.head_keys(words, batches, heads))
    rows, columns = jnp.arange(r, r + T, dtype=u32)[:, None], jnp.arange(c, c + S, dtype=u32)
    keep = dropout.keep(keys, rows, columns, dropout_rate)
    return arguments | {"keep": keep, "keep_factor": dropout.survivor_factor(dropout_rate)}


def seen(arrays, options, shape) -> np.ndarray:
    """Who sees whom `[..., N, T, S]`, of that shape, but for the bias; by NumPy, for tests."""
    *_, T, S = shape
    whole = np.ones(shape, bool)

    def rows(name, default):  # [...], [..., T] -> broadcasts as rows of [..., N, T, S]
        return np.asarray(arrays.get(name, default))[..., None, :, None]

    def columns(name, default):
        return rows(name, default).swapaxes(-1, -2)

    if "mask" in arrays:
        whole &= np.asarray(arrays["mask"])
    for name, place in (
        ("query_seq_lengths", np.arange(T)[:, None]),
        ("key_value_seq_lengths", np.arange(S)),
    ):
        if name in arrays:
            whole &= place < np.asarray(arrays[name])[..., None, None, None]
    if "query_segment_ids" in arrays:
        whole &= rows("query_segment_ids", 0) == columns("key_value_segment_ids", 0)
    row, column = rows("query_positions", np.arange(T)), columns("key_value_positions", np.arange(S))
    if options.get("is_causal"):
        whole &= column <= row
    if options.get("local_window_size") is not None:
        left, right = np.broadcast_to(options["local_window_size"], 2)
        whole &= (row - column <= left) & (column - row <= right)
    if "mask_mod" in options:
        numbers = (np.arange(math.prod(n)).reshape(n) for n in (shape[:-3], shape[-3:-2]))
        batch, head = (x[..., None, None] for x in numbers)
        args = mod_cases.with_mod_args({n: jnp.asarray(x) for n, x in arrays.items()}).get("mod_args", ())
        at = (jnp.asarray(x, jnp.int32) for x in (batch[..., None, :, :], head, row, column))
        at = (x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in at)
        whole &= np.asarray(options["mask_mod"](*at, *args))
    return whole


def with_bias(whole, arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(`whole` where the bias hides nothing, {"bias": its entries that stand at hidden places alone})."""
    if "bias" not in arrays:
        return whole, {}
    bias = np.asarray(arrays["bias"])
    lead = whole.ndim - bias.ndim
    repeated = tuple(i for i, n in enumerate(bias.shape, lead) if n == 1 and whole.shape[i] != 1)
    read = whole.any((*range(lead), *repeated), keepdims=True)
    return whole & (bias != -np.inf), {"bias": ~read.reshape(read.shape[lead:])}


def _hidden(arrays, options):
    (*batch, T, N, _), (S, K) = arrays["query"].shape, arrays["key"].shape[-3:-1]
    whole, bias = with_bias(seen(arrays, options, (*batch, N, T, S)), arrays)
    blind = ~whole.any(-1).swapaxes(-1, -2)  # [..., T, N]
    unseen = ~whole.reshape(*batch, K, N // K * T, S).any(-2).swapaxes(-1, -2)  # [..., S, K]
    rows = {"query": blind, "out": blind} | ({} if "sink" in arrays else {"lse": blind})
    return {**bias, **rows, "key": unseen, "value": unseen}


def _backward(cotangents, outputs, arrays, options, wrt):
    (dout, dlse), (out, lse) = cotangents, outputs
    wrt = dict.fromkeys("mod_args" if name in MOD_ARGS else name for name in wrt)
    arguments = mod_cases.with_mod_args({**arrays, **options})
    grads = api.dot_product_attention_bwd(dout, **arguments, out=out, lse=lse, dlse=dlse, wrt=tuple(wrt))
    found = {name: x for name, x in grads._asdict().items() if x is not None}
    of_args = dict(zip(MOD_ARGS, found.pop("mod_args", ()), strict=False))
    return found | {name: x for name, x in of_args.items() if x is not None}


OPERATORS = (
    Operator(
        name="dot_product_attention",
        outputs=("out", "lse"),
        differentiable=_DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        backward=_backward,
        cases=CASES,
        axes={
            "query": "BTNH",
            "key": "BSNH",
            "value": "BSNH",
            "bias": "BNTS",
            "mask": "BNTS",
            "sink": "N",
            "key_value_seq_lengths": "B",
            "query_segment_ids": "BT",
            "key_value_segment_ids": "BS",
            "out": "BTNH",
            "lse": "BTN",
            "mod_args_0": "N",
            "mod_args_1": "B",
        },
        backward_wrt=_DIFFERENTIABLE,
        hidden=_hidden,
        whole=MOD_ARGS,
    ),
)
