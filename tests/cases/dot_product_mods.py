"""Cases of dense attention with masks and scores that are functions, which tests alone read."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd.ops.dot_product.cases import KEY, PREFIX, args, case, slopes


def documents(rng, n):
    return np.sort(rng.integers(0, 4, (*n["B"], max(n["T"], n["S"]))), -1).astype(np.int32)


def prefix(rng, n):
    return rng.integers(0, n["S"], n["B"]).astype(np.int32)


def table(farthest):
    return lambda rng, n: rng.standard_normal((n["N"], 2 * farthest + 1))


def tree(rng, n):
    intervals = mods.tree_intervals([int(rng.integers(-1, i)) for i in range(max(n["T"], n["S"]))])
    return {f"{PREFIX}{i}": x for i, x in enumerate(intervals)}


def _blocks(query_size, key_size):
    """Chosen blocks of each batch entry, for all heads."""
    counts = lambda n: (-(-n["T"] // query_size), -(-n["S"] // key_size))
    return lambda rng, n: rng.random((*n["B"], 1, *counts(n))) < 0.4


_HOLES = np.add.outer(3 * np.arange(9), 2 * np.arange(13)) % 7 < 2
_PACKED, _BITS = mods.packed(_HOLES)


def _with(more, *draws):
    return lambda rng, n: {**more(rng, n), **args(*draws)(rng, n)}


def _bias_and_sink(rng, n):
    return {"bias": rng.standard_normal((n["N"], 1, n["S"])), "sink": rng.standard_normal(n["N"])}


def _positions_and_lengths(rng, n):
    return {
        "query_positions": (np.arange(n["T"]) + 4).astype(np.int32),
        "key_value_positions": rng.permutation(n["S"]).astype(np.int32),
        "key_value_seq_lengths": np.array([n["S"] - 2, 3], np.int32),
    }


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

CASES = {
    "dot_product_attention": (
        case("mod_global", mask_mod=mods.sliding_window(3, 1) | mods.global_tokens(2), tags=_MORE),
        case("mod_document", mask_mod=mods.causal & mods.document, extra=args(documents), tags=_MORE),
        case("mod_tree", mask_mod=mods.tree, extra=tree, tags=_MORE),
        case("mod_blocks", mask_mod=mods.causal & mods.blocks(2, 4), extra=args(_blocks(2, 4)), tags=_MORE),
        case("mod_packed", mask_mod=_PACKED, extra=args(*(lambda rng, n, x=x: x for x in _BITS)), tags=_MORE),
        case(
            "mod_combined",
            mask_mod=mods.prefix_lm & mods.document | ~mods.dilated(2),
            extra=args(prefix, documents),
            tags=("hidden", "wide"),
        ),
        case(
            "mod_batch_and_head",
            B=(2, 1),
            mask_mod=_by_batch_and_head,
            extra=_with(_bias_and_sink, lambda rng, n: np.array([0, 2, 5, 1], np.int32)),
        ),
        case(
            "mod_relative",
            score_mod=mods.relative_bias(4),
            extra=args(table(4)),
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
            extra=KEY,
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
            extra=args(table(9)),
            tags=_MORE,
        ),
        case(
            "mod_tiles_traced",
            **_TILES,
            is_causal=True,
            mask_mod=mods.document,
            score_mod=mods.alibi,
            extra=args(documents, slopes),
        ),
        case(
            "second_mod",
            **_SECOND,
            tags=("second",),
            mask_mod=mods.sliding_window(2, 1),
            score_mod=mods.relative_bias(1),
            extra=_with(lambda rng, n: {"bias": rng.standard_normal((2, 1, 4))}, table(1)),
            logits_soft_cap=2.0,
        ),
        case("shard_mod", **_SHARD, tags=("shard",), score_mod=mods.alibi, extra=args(slopes)),
        case(
            "shard_mod_mask",
            **_SHARD,
            tags=("shard", "bounds"),
            mask_mod=mods.causal | mods.prefix_lm,
            extra=lambda rng, n: {f"{PREFIX}1": prefix(rng, n)},
        ),
    )
}
