"""Named inputs of dense attention; arrays that functions of the call read are named `mod_args_<i>`."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import (
    Case,
    Operator,
    bias,
    both,
    dropout_key,
    infinite_bias,
    mask,
    positions,
    segments,
)
from jax_attn_bwd.ops.dot_product import api, reference, workloads

PREFIX = "mod_args_"


def case(name, *, B=(2,), T=9, S=13, N=4, K=2, H=8, Hv=6, tags=("ci",), extra=None, **options) -> Case:
    """`extra(rng, shape letters) -> {argument: array}` adds to query, key and value."""

    def build(rng):
        letters = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
        arrays = {
            "query": rng.standard_normal((*B, T, N, H)),
            "key": rng.standard_normal((*B, S, K, H)),
            "value": rng.standard_normal((*B, S, K, Hv)),
        }
        return arrays | (extra(rng, letters) if extra else {})

    return Case(name, build, options, frozenset(tags))


def _args(*draws):
    """`mod_args_0, mod_args_1, ...` of those draws."""
    return lambda rng, n: {f"{PREFIX}{i}": draw(rng, n) for i, draw in enumerate(draws)}


def _slopes(rng, n):
    return rng.random(n["N"])


def _documents(rng, n):
    return np.sort(rng.integers(0, 4, (*n["B"], max(n["T"], n["S"]))), -1).astype(np.int32)


def _prefix(rng, n):
    return rng.integers(0, n["S"], n["B"]).astype(np.int32)


def _table(farthest):
    return lambda rng, n: rng.standard_normal((n["N"], 2 * farthest + 1))


def _tree(rng, n):
    intervals = mods.tree_intervals([int(rng.integers(-1, i)) for i in range(max(n["T"], n["S"]))])
    return {f"{PREFIX}{i}": x for i, x in enumerate(intervals)}


def _blocks(query_size, key_size):
    """Chosen blocks of each batch entry, for all heads."""
    counts = lambda n: (-(-n["T"] // query_size), -(-n["S"] // key_size))
    return lambda rng, n: rng.random((*n["B"], 1, *counts(n))) < 0.4


_HOLES = np.add.outer(3 * np.arange(9), 2 * np.arange(13)) % 7 < 2
_PACKED, _BITS = mods.packed(_HOLES)


def _with(more, *draws):
    return lambda rng, n: {**more(rng, n), **_args(*draws)(rng, n)}


def _bias_and_sink(rng, n):
    return {"bias": rng.standard_normal((n["N"], 1, n["S"])), "sink": rng.standard_normal(n["N"])}


def _positions_and_lengths(rng, n):
    return {
        "query_positions": (np.arange(n["T"]) + 4).astype(np.int32),
        "key_value_positions": rng.permutation(n["S"]).astype(np.int32),
        "key_value_seq_lengths": np.array([n["S"] - 2, 3], np.int32),
    }


def _dropout(rng, n):
    return {"dropout_key": np.array([7, 11], np.uint32)}


def _by_batch_and_head(batch, head, row, column, width):
    """Each batch entry and head sees a band of its own; the last head sees nothing of the first entry."""
    return (jnp.abs(row - column) <= width[head] + batch) & ((head < 3) | (batch > 0))


def _scaled_where_near(logits, batch, head, row, column, factors, offsets):
    """Not monotone in the logits, with gradients of two arrays; hides what is far by -inf."""
    distance = (row - column).astype(logits.dtype)
    scored = jnp.sin(logits * factors[head]) + offsets[batch] * jnp.exp(-jnp.abs(distance))
    return jnp.where(jnp.abs(distance) < 5, scored, -jnp.inf)


_SECOND: dict[str, Any] = dict(B=(1,), T=3, S=4, N=2, K=1, H=2, Hv=3)
_TILES: dict[str, Any] = dict(B=(2,), T=300, S=1801, N=2, K=1)
_SHARD: dict[str, Any] = dict(B=(4,), T=6, S=10, N=8, K=4)

_MORE = ("hidden",)  # left to the thorough tests

_OF_FUNCTIONS = (
    case("mod_causal", mask_mod=mods.causal & mods.sliding_window(3), tags=("hidden", "check")),
    case("mod_global", mask_mod=mods.sliding_window(3, 1) | mods.global_tokens(2), tags=_MORE),
    case("mod_document", mask_mod=mods.causal & mods.document, extra=_args(_documents), tags=_MORE),
    case("mod_tree", mask_mod=mods.tree, extra=_tree, tags=_MORE),
    case("mod_blocks", mask_mod=mods.causal & mods.blocks(2, 4), extra=_args(_blocks(2, 4)), tags=_MORE),
    case("mod_packed", mask_mod=_PACKED, extra=_args(*(lambda rng, n, x=x: x for x in _BITS)), tags=_MORE),
    case(
        "mod_combined",
        mask_mod=mods.prefix_lm & mods.document | ~mods.dilated(2),
        extra=_args(_prefix, _documents),
        tags=("hidden", "wide"),
    ),
    case(
        "mod_batch_and_head",
        B=(2, 1),
        mask_mod=_by_batch_and_head,
        extra=_with(_bias_and_sink, lambda rng, n: np.array([0, 2, 5, 1], np.int32)),
    ),
    case("mod_alibi", score_mod=mods.alibi, is_causal=True, extra=_args(_slopes), tags=("hidden", "check")),
    case(
        "mod_relative",
        score_mod=mods.relative_bias(4),
        extra=_args(_table(4)),
        logits_soft_cap=2.0,
        tags=_MORE,
    ),
    case(
        "mod_score",
        score_mod=_scaled_where_near,
        extra=_with(_bias_and_sink, lambda rng, n: rng.random(4), lambda rng, n: rng.random(2)),
        logits_soft_cap=3.0,
    ),
    case(
        "mod_positions",
        mask_mod=mods.causal,
        score_mod=mods.soft_cap(2.0),
        extra=_positions_and_lengths,
        tags=_MORE,
    ),
    case(
        "mod_dropout",
        mask_mod=mods.sliding_window(4, 2),
        score_mod=mods.soft_cap(1.0),
        dropout_rate=0.4,
        extra=_dropout,
        tags=_MORE,
    ),
    # of indices alone
    case(
        "mod_kernel",
        mask_mod=mods.global_tokens(2) | mods.static_prefix_lm(4) | mods.causal & mods.dilated(2),
        score_mod=mods.static_alibi(4),
        extra=_bias_and_sink,
        logits_soft_cap=3.0,
        tags=("hidden", "wide"),
    ),
    case(
        "mod_kernel_mask",
        mask_mod=~mods.sliding_window(3, 1),
        extra=lambda rng, n: {"query_positions": (np.arange(n["T"]) + 4).astype(np.int32)},
        tags=("hidden", "wide"),
    ),
    case("mod_edge", T=1, S=1, mask_mod=~mods.causal, tags=("edge",)),
    case("mod_no_rows", T=0, S=3, mask_mod=mods.causal, tags=("edge",)),
    # several tiles of the default tiling, none of them whole
    case(
        "mod_tiles",
        **_TILES,
        mask_mod=mods.sliding_window(200) | mods.global_tokens(3),
        score_mod=mods.relative_bias(9),
        extra=_args(_table(9)),
        tags=_MORE,
    ),
    case(
        "mod_tiles_traced",
        **_TILES,
        is_causal=True,
        mask_mod=mods.document,
        score_mod=mods.alibi,
        extra=_args(_documents, _slopes),
    ),
    case(
        "second_mod",
        **_SECOND,
        tags=("second",),
        mask_mod=mods.sliding_window(2, 1),
        score_mod=mods.relative_bias(1),
        extra=_with(lambda rng, n: {"bias": rng.standard_normal((2, 1, 4))}, _table(1)),
        logits_soft_cap=2.0,
    ),
    case("shard_mod", **_SHARD, tags=("shard",), score_mod=mods.alibi, extra=_args(_slopes)),
    case(
        "shard_mod_mask",
        **_SHARD,
        tags=("shard", "bounds"),
        mask_mod=mods.causal | mods.prefix_lm,
        extra=lambda rng, n: {f"{PREFIX}1": _prefix(rng, n)},
    ),
)


def with_mod_args(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with the arrays `mod_args_<i>` as the tuple `mod_args`."""
    names = sorted(name for name in arguments if name.startswith(PREFIX))
    others = {name: x for name, x in arguments.items() if name not in names}
    return {**others, "mod_args": tuple(arguments[name] for name in names)} if names else others


pass

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
            yield case(f"T{T}_S{S}", T=T, S=S, tags=("edge",), extra=_sink if S == 3 else None)


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

CASES = (
    case("plain", tags=("ci", "check")),
    case("causal", is_causal=True),
    case("causal_more_queries", T=13, S=9, is_causal=True, tags=("edge", "cudnn")),
    case("window", local_window_size=(3, 1)),
    case(
        "causal_window_cap",
        is_causal=True,
        local_window_size=2,
        logits_soft_cap=1.5,
        scale=1.0,
        tags=("ci", "check"),
    ),
    case("bias_full", extra=bias(2, 4, 9, 13)),
    case("bias_key", extra=bias(1, 4, 1, 13), is_causal=True, tags=("ci", "check")),
    case("bias_query", extra=bias(9, 1), tags=("edge",)),
    case("bias_batch", extra=bias(2, 1, 1, 1), logits_soft_cap=2.0),
    case("bias_low_rank", extra=bias(13), is_causal=True, tags=("edge",)),
    case("bias_lowest", extra=_lowest_bias, tags=("edge", "rounded")),
    case("bias_minus_inf", extra=infinite_bias, tags=("ci", "cudnn")),
    case("mask_heads", extra=mask(1, 4, 9, 13), tags=("ci", "check")),
    case("mask_key", extra=mask(2, 1, 1, 13, keep=0.3)),
    case("mask_query", extra=mask(2, 1, 9, 1), tags=("edge",)),
    case("lengths", extra=_lengths, tags=("ci", "check")),
    case("segments_causal", extra=segments, is_causal=True, tags=("ci", "check", "cudnn")),
    case("positions", extra=positions, is_causal=True, local_window_size=(4, 0)),
    case("sink", extra=both(_sink, mask(2, 1, 9, 13, keep=0.1)), tags=("ci", "check")),
    case("sink_lengths", extra=both(_sink, _lengths), tags=("edge", "cudnn")),
    case("dropout", extra=_KEY, dropout_rate=0.4, tags=("ci", "check")),
    case("dropout_offset", extra=_KEY, dropout_rate=0.4, dropout_offset=(3, 1, 5, 2)),
    case("dropout_broadcast", extra=_KEY, dropout_rate=0.4, broadcast_dropout=True),
    case("dropout_all", extra=_KEY, dropout_rate=1.0, tags=("edge",)),
    case("no_batch", B=(), extra=bias(4, 9, 13)),
    case("two_batch_axes", B=(2, 3), extra=bias(3, 1, 1, 13), is_causal=True),
    case("one_key_head", N=3, K=1),
    case("large_logits", scale=1e4, tags=("ci", "check")),
    # several tiles of the default tiling, none of them whole
    case("tiles", B=(1,), T=531, S=1049, N=2, K=1, is_causal=True, extra=_sink, tags=("ci", "check")),
    case(
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
    *(case(name, tags=("hidden",), extra=extra, **options) for name, extra, options in _HIDING),
    *_edges(),
    case(
        "second_causal",
        **_SECOND,
        is_causal=True,
        logits_soft_cap=2.0,
        tags=("second",),
        extra=both(_sink, bias(2, 1, 4)),
    ),
    case(
        "second_segments", **_SECOND, tags=("second",), extra=both(segments, _short, _KEY), dropout_rate=0.3
    ),
    case("shard", **_SHARD, is_causal=True, tags=("shard",), extra=both(_sink, bias(4, 8, 6, 10))),
    case("shard_window", B=(4,), T=6, S=10, N=8, K=8, local_window_size=3, tags=("shard",)),
    case("shard_dropout", **_SHARD, tags=("shard",), extra=_KEY, dropout_rate=0.3),
    case("shard_broadcast_bias", **_SHARD, tags=("shard",), extra=bias(1, 8, 1, 10)),
    case(
        "shard_lengths",
        **_SHARD,
        tags=("shard", "bounds"),
        extra=lambda rng, n: {"key_value_seq_lengths": np.array([3, 0, 10, 7], np.int32)},
    ),
    case("shard_segments", **_SHARD, tags=("shard", "bounds"), extra=segments),
    *workloads.CASES,
    *_OF_FUNCTIONS,
)
MOD_ARGS = tuple(f"{PREFIX}{i}" for i in range(3))


_DIFFERENTIABLE = (*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *MOD_ARGS)


def _call(**arguments):
    return api.dot_product_attention(**with_mod_args(arguments), return_residual=True)


def _reference(deterministic_sums=True, **arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return reference.dot_product_attention(**_with_keep_mask(**with_mod_args(arguments)))


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
        args = with_mod_args({n: jnp.asarray(x) for n, x in arrays.items()}).get("mod_args", ())
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
    arguments = with_mod_args({**arrays, **options})
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
