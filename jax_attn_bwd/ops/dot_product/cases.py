"""Named inputs of dense attention; arrays that functions of the call read are named `mod_args_<i>`."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd._core import cases as draw
from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.dot_product import api, reference

PREFIX = "mod_args_"


def case(
    name, *, B=(2,), T=9, S=13, N=4, K=2, H=8, Hv=6,
    tags=("ci",), dtype="bfloat16", dtypes=None, means=None, extra=None, **options,
) -> Case:  # fmt: skip
    """Makes a case; `extra(rng, shape letters) -> {argument: array}` adds to query, key and value."""

    def build(rng):
        letters = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
        arrays = {
            "query": rng.standard_normal((*B, T, N, H)),
            "key": rng.standard_normal((*B, S, K, H)),
            "value": rng.standard_normal((*B, S, K, Hv)),
        }
        return arrays | (extra(rng, letters) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype, dtypes or {}, means or {})


def args(*draws):
    """Draws the arrays `mod_args_0, mod_args_1, ...`, each by one function."""
    return lambda rng, n: {f"{PREFIX}{i}": draw(rng, n) for i, draw in enumerate(draws)}


def slopes(rng, n):
    """Draws a number for each head."""
    return rng.random(n["N"])


def with_mod_args(arguments: dict[str, Any]) -> dict[str, Any]:
    """Puts the arrays `mod_args_<i>` of `arguments` in one tuple `mod_args`."""
    names = sorted(name for name in arguments if name.startswith(PREFIX))
    others = {name: x for name, x in arguments.items() if name not in names}
    return {**others, "mod_args": tuple(arguments[name] for name in names)} if names else others


KEY = draw.dropout_key(7, 11)
LENGTHS = draw.lengths((2, 0), (None, 4))  # an entry without keys


def large(name, tags, *, B=2, T=4096, S=None, N=16, K=None, H=128, Hv=None, extra=(), **options) -> Case:
    """Returns a case in the sizes of training; `extra`: functions as that of `case`."""
    sizes = {"B": (B,), "T": T, "S": S or T, "N": N, "K": K or N, "H": H, "Hv": Hv or H}
    return case(name, **sizes, tags=tags, extra=draw.both(*extra), **options)


def partial_lengths(rng, n):
    """Draws lengths that leave every batch entry some tokens."""
    (B,) = n["B"]
    return {
        "query_seq_lengths": np.linspace(n["T"] - 3, n["T"] // 2, B).astype(np.int32),
        "key_value_seq_lengths": np.linspace(n["S"] // 3, n["S"] - 1, B).astype(np.int32),
    }


def _large() -> Iterator[Case]:
    """Yields many tiles, none of them whole, and sizes of training: what only a GPU runs soon enough."""
    tiled = partial(large, tags=("large",), T=1031, S=1543, N=4, K=2)
    again = partial(tiled, tags=("large", "repeat"))
    poison = partial(tiled, tags=("large", "repeat", "poison"))
    causal: dict[str, Any] = {"is_causal": True}
    # Head sizes, and what hides elements; those that are poisoned hide whole rows or columns.
    yield again("large H=128")
    yield poison("large H=128 causal", **causal)
    yield again("large H=64 causal", H=64, N=8, K=8, **causal)
    yield again("large H=256 causal", H=256, **causal)
    yield again("large window", H=64, **causal, local_window_size=(200, 0))
    yield poison("large lengths", H=64, extra=(partial_lengths,), **causal)
    yield poison("large segments", H=64, extra=(draw.segments(4),), **causal)
    yield tiled("large Hv", H=128, Hv=64, **causal)
    yield tiled("large H=80", H=80, Hv=40, **causal)
    yield tiled("large sink and cap", extra=(draw.sink(4, spread=5.0),), logits_soft_cap=5.0)
    yield poison("large mask", H=64, extra=(draw.mask(2, 1, 1, 1543, keep=0.7),))
    yield tiled("large bias", H=64, extra=(draw.bias(1, 4, 1031, 1543),), **causal)
    yield tiled("large dropout", H=64, extra=(KEY,), dropout_rate=0.2)
    yield tiled("large T=40", T=40, S=2083, N=16)
    fused = partial(tiled, tags=("any_order",), deterministic_sums=False)
    yield fused("any order H=64", H=64, **causal)
    yield fused("any order H=128", N=8, **causal)
    yield fused("any order segments", H=64, extra=(draw.segments(4),), **causal)
    yield fused("any order lengths", extra=(partial_lengths,), **causal)
    yield fused("any order grouped heads", H=64, N=16)
    yield fused("any order odd T", T=797, S=1021, K=4, local_window_size=(150, 90))
    for B, T in ((32, 256), (8, 1024), (4, 4096), (1, 16384)):
        yield large(f"H=128 B={B} T={T} N=16 causal", ("timed",), B=B, T=T, is_causal=True)


CASES = (
    case("plain", tags=("ci", "check")),
    case(
        "causal_window_cap",
        is_causal=True,
        local_window_size=2,
        logits_soft_cap=1.5,
        scale=1.0,
        tags=("ci", "check"),
    ),
    case("bias_key", extra=draw.bias(1, 4, 1, 13), is_causal=True, tags=("ci", "check")),
    case("mask_heads", extra=draw.mask(1, 4, 9, 13), tags=("ci", "check")),
    case("lengths", extra=LENGTHS, tags=("ci", "check")),
    case("segments_causal", extra=draw.segments(), is_causal=True, tags=("ci", "check", "cudnn")),
    case("sink", extra=draw.both(draw.sink(4), draw.mask(2, 1, 9, 13, keep=0.1)), tags=("ci", "check")),
    case("dropout", extra=KEY, dropout_rate=0.4, tags=("ci", "check")),
    case("large_logits", scale=1e4, tags=("ci", "check")),
    case("tiles", B=(1,), T=531, S=1049, N=2, K=1, is_causal=True, extra=draw.sink(2), tags=("ci", "check")),
    case("mod_causal", mask_mod=mods.causal & mods.sliding_window(3), tags=("hidden", "check")),
    case("mod_alibi", score_mod=mods.alibi, is_causal=True, extra=args(slopes), tags=("hidden", "check")),
    case("means", B=(1,), T=400, S=400, N=16, K=8, Hv=8, means={"value": 3.0}, tags=("means",)),
    *_large(),
)
MOD_ARGS = tuple(f"{PREFIX}{i}" for i in range(3))


def _call(**arguments):
    return api.dot_product_attention(**with_mod_args(arguments), return_residual=True)


def _reference(deterministic_sums=True, **arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return reference.dot_product_attention(**_with_keep_mask(**with_mod_args(arguments)))


def _with_keep_mask(
    dropout_key=None, dropout_rate=0.0, broadcast_dropout=False, dropout_offset=None, **arguments
):
    """Returns the arguments of the definition, which is handed the dropout mask of the whole plane."""
    if not dropout_rate:
        return arguments
    q, k = arguments["query"], arguments["key"]
    (*batch, T, N, _), S = q.shape, k.shape[-3]
    words, sizes = dropout.key_words(dropout_key), (N, T, S)
    keep = draw.keep_mask(words, dropout_rate, tuple(batch), sizes, dropout_offset, broadcast_dropout)
    return arguments | {"keep": keep, "keep_factor": dropout.survivor_factor(dropout_rate)}


def seen(arrays, options, shape) -> np.ndarray:
    """Tells who sees whom `[..., N, T, S]`, of that shape, but for the bias; by NumPy, for tests."""
    # Arrays as rows and columns of [..., N, T, S].
    *_, T, S = shape
    whole = np.ones(shape, bool)

    def rows(name, default):  # [...], [..., T] -> broadcasts as rows of [..., N, T, S]
        return np.asarray(arrays.get(name, default))[..., None, :, None]

    def columns(name, default):
        return rows(name, default).swapaxes(-1, -2)

    # One condition after the other.
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


def _hidden(arrays, options):
    (*batch, T, N, _), (S, K) = arrays["query"].shape, arrays["key"].shape[-3:-1]
    whole, bias = draw.seen_with_bias(seen(arrays, options, (*batch, N, T, S)), arrays)
    blind = ~whole.any(-1).swapaxes(-1, -2)  # [..., T, N]
    unseen = ~whole.reshape(*batch, K, N // K * T, S).any(-2).swapaxes(-1, -2)  # [..., S, K]
    rows = {"query": blind, "out": blind} | ({} if "sink" in arrays else {"lse": blind})
    return {**bias, **rows, "key": unseen, "value": unseen}


OPERATORS = (
    Operator(
        name="dot_product_attention",
        outputs=("out", "lse"),
        differentiable=(*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *MOD_ARGS),
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        cases=CASES,
        hidden=_hidden,
    ),
)
