"""Cases of dense attention that are compiled for chips that are not there: the shapes that training uses."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from cases.dot_product_mods import documents, prefix, table, tree
from jax_attn_bwd import mods
from jax_attn_bwd._core.cases import Case, segments, sink
from jax_attn_bwd.ops.dot_product.cases import KEY, args, large, partial_lengths, slopes

_FARTHEST = 128  # distance of a learned bias


def _positions(rng, n):
    sides = {"query_positions": n["T"], "key_value_positions": n["S"]}
    return {k: np.broadcast_to(np.arange(m, dtype=np.int32), (*n["B"], m)) for k, m in sides.items()}


_PREFIXES_AND_DOCUMENTS = args(prefix, documents)
_ROWS_AND_COLUMNS = args(
    lambda rng, n: rng.standard_normal((*n["B"], n["T"])), lambda rng, n: rng.standard_normal(n["S"])
)
_DISTANCES = args(table(_FARTHEST))


def _by_row_and_column(logits, batch, head, row, column, by_row, by_column):
    return logits * by_row[batch, row] + by_column[column]


def _near_by_array(batch, head, row, column, table):
    return table[head, jnp.clip(row - column, 0, _FARTHEST)] > 0


_PACKED, _BITS = mods.packed(np.add.outer(3 * np.arange(300), 2 * np.arange(500)) % 7 < 2)


def _chosen(rng, n):
    return rng.random((*n["B"], n["N"], -(-n["T"] // 64), -(-n["S"] // 20))) < 0.4


_BLOCKS_AND_BITS = args(_chosen, *(lambda rng, n, x=x: x for x in _BITS))


def _mask_plane(rng, n):
    return {"mask": rng.random((*n["B"], 1, n["T"], n["S"])) < 0.7}


def _mask_rows(rng, n):
    return {"mask": rng.random((n["T"], 1)) < 0.7, "query_positions": np.arange(n["T"], dtype=np.int32)}


def _bias_plane(rng, n):
    return {"bias": rng.standard_normal((1, n["N"], n["T"], n["S"]))}


def _bias_rows(rng, n):
    return {"bias": rng.standard_normal((n["N"], n["T"], 1))}


def _bias_keys(rng, n):
    return {"bias": rng.standard_normal((*n["B"], 1, 1, n["S"]))}


_HOPPER = ("mosaic_gpu",)
_TABLE = ("mosaic_gpu", "table")
_GPU = ("mosaic_gpu", "xla", "table")

_WINDOW_AND_FIRST = mods.sliding_window(1024) | mods.global_tokens(4)


def _compiled() -> Iterator[Case]:
    """The shapes that training uses, for chips that are not there."""

    def case(name, tags=_TABLE, **arguments):
        return large(name, tags, **arguments)

    causal: dict[str, Any] = {"is_causal": True}
    yield case("H=64", _GPU, N=32, H=64)
    yield case("H=64 causal", _HOPPER, N=32, H=64, **causal)
    yield case("H=128", (*_TABLE, "v5e", "v5p", "v6e", "tpu7x"))
    yield case("H=128 causal", _GPU, **causal)
    yield case("H=256", N=8, H=256)
    yield case("H=256 causal", N=8, H=256, **causal)
    yield case("H=128 causal, any order", _HOPPER, **causal, deterministic_sums=False)
    yield case("H=64 window 1024", (*_GPU, "v5e"), H=64, **causal, local_window_size=(1024, 0))
    yield case("segments causal", _GPU, extra=(segments(4),), **causal)
    yield case("lengths", extra=(partial_lengths,))
    yield case("grouped heads", (*_TABLE, "v5e"), K=2, **causal)
    yield case("Hv=64, H=128", Hv=64)
    yield case("T=1023, S=2049", T=1023, S=2049)
    yield case("float16 causal", dtype="float16", **causal)
    yield case("bias", _GPU, T=1024, extra=(_bias_plane,))
    yield case("mask", T=1024, extra=(_mask_plane,))
    yield case("dropout", _GPU, extra=(KEY,), dropout_rate=0.1)
    yield case("soft cap", logits_soft_cap=30.0, **causal)
    yield case("causal by a function", mask_mod=mods.causal)
    yield case("documents by a function", extra=(args(documents),), mask_mod=mods.causal & mods.document)
    yield case("window and first tokens by a function", mask_mod=_WINDOW_AND_FIRST)
    yield case("learned alibi", extra=(args(slopes),), score_mod=mods.alibi, **causal)
    yield case("sink", _HOPPER, extra=(sink(16, spread=5.0),), dtypes={"sink": "float32"}, **causal)


_small = partial(large, T=300, S=500, N=4, K=2)
_NEAR = mods.static_prefix_lm(30) | mods.causal & mods.dilated(2) & ~mods.sliding_window(9)
_NEAR |= mods.global_tokens(8)


def _crowded() -> Iterator[Case]:
    """What takes most registers and shared memory, in lengths that do not divide the tiles."""
    small = partial(_small, tags=_HOPPER, dtypes={"bias": "float32"})
    cap: dict[str, Any] = {"is_causal": True, "logits_soft_cap": 30.0}
    window: dict[str, Any] = {**cap, "local_window_size": (100, 0)}
    tokens, planes = (segments(4), _positions), (_bias_plane, _mask_plane)
    everything = (*tokens, *planes, partial_lengths, KEY)
    yield small("H=64 window, soft cap", tags=_TABLE, H=64, **window)
    yield small("odd lengths, soft cap", tags=_TABLE, **cap)
    yield small("tokens, window, soft cap", tags=_TABLE, extra=tokens, **window)
    yield small("bias and mask", tags=_TABLE, extra=planes)
    yield small("bias and segments, causal", extra=(_bias_plane, segments(4)), is_causal=True)
    yield small("mask and segments, causal", extra=(_mask_plane, segments(4)), is_causal=True)
    yield small("mask and segments, soft cap", extra=(_mask_plane, segments(4)), **cap)
    yield small("function", tags=_TABLE, mask_mod=_NEAR)
    yield small("function of positions, soft cap", extra=(_positions,), mask_mod=_NEAR, logits_soft_cap=30.0)
    of_arrays, given = {"mask_mod": mods.prefix_lm & mods.document}, (_PREFIXES_AND_DOCUMENTS, _positions)
    yield small("function of arrays and positions, soft cap", extra=given, **of_arrays, logits_soft_cap=30.0)
    yield small("score", tags=_TABLE, score_mod=mods.static_alibi(4))
    yield small(
        "score, masked, positions", extra=(_positions,), score_mod=mods.soft_cap(30.0), mask_mod=_NEAR
    )
    crowd = {"extra": (_bias_plane, KEY, segments(4)), "dropout_rate": 0.1, "logits_soft_cap": 30.0}
    yield small("score and all else", score_mod=mods.soft_cap(30.0), mask_mod=mods.causal, **crowd)
    yield small("H=256, score", H=256, score_mod=mods.soft_cap(30.0), is_causal=True)
    yield small("H=64, score", tags=_TABLE, H=64, score_mod=mods.soft_cap(30.0), is_causal=True)
    alibi, lines = {"score_mod": mods.alibi}, {"score_mod": _by_row_and_column}
    for H in (64, 128, 256):
        tags = _HOPPER if H == 128 else _TABLE
        yield small(f"H={H}, learned alibi", tags=tags, H=H, extra=(args(slopes),), is_causal=True, **alibi)
        yield small(
            f"H={H}, score of rows and columns", tags=_TABLE, H=H, extra=(_ROWS_AND_COLUMNS,), **lines
        )
    crowd = {"extra": (_ROWS_AND_COLUMNS, _bias_plane, segments(4)), "logits_soft_cap": 30.0}
    yield small("score of rows and columns and all else", **lines, mask_mod=_NEAR, **crowd)
    yield small("tree", tags=_TABLE, mask_mod=mods.tree, extra=(tree,))
    more = {"extra": (*given, *planes, KEY), "dropout_rate": 0.1}
    yield small("H=256, function of arrays, planes", H=256, **more, **of_arrays)
    functions: dict[str, Any] = {"mask_mod": mods.sliding_window(100), "extra": everything[2:], **cap}
    yield small("H=256, function and planes", H=256, **functions, dropout_rate=0.1)
    yield small("H=256 everything", H=256, extra=everything, **cap, dropout_rate=0.1)
    yield small("Hv=256, H=192", H=192, Hv=256, is_causal=True)
    yield small("Hv=192, H=256", H=256, Hv=192, is_causal=True)


def _for_tpus() -> Iterator[Case]:
    """Compilation of the large tiles takes long: most options are compiled in small ones."""
    yield large("one causal tile", ("v5e", "v6e"), T=1024, is_causal=True)
    small = partial(_small, dtypes={"bias": "float32", "sink": "float32"})
    indices: dict[str, Any] = {
        "extra": (segments(4), partial_lengths, sink(4, spread=5.0)),
        "local_window_size": (100, 0),
    }
    yield small("small indices", ("v5e", "v5p"), H=80, is_causal=True, **indices)
    planes = (_bias_plane, _mask_plane, KEY)
    yield small("small planes", ("v5e", "v6e"), extra=planes, dropout_rate=0.1)
    rows = (_bias_rows, _mask_rows)
    yield small("small rows float32", ("v5e", "tpu7x"), dtype="float32", extra=rows, is_causal=True)
    yield large("one causal tile by a function", ("v5e", "v6e", "table"), T=1024, mask_mod=mods.causal)
    functions: dict[str, Any] = {"mask_mod": _NEAR, "score_mod": mods.static_alibi(6)}
    yield small("small functions", ("v5e", "v6e", "table"), N=6, **functions)
    arrays = {"mask_mod": mods.prefix_lm & mods.document, "extra": (args(prefix, documents, slopes),)}
    yield small("small functions of arrays", ("v5e", "v6e"), score_mod=mods.alibi, **arrays)
    lines = {"score_mod": _by_row_and_column, "extra": (_ROWS_AND_COLUMNS,)}
    yield small("small score of rows and columns", ("v5e", "v6e", "table"), **lines)
    distances = {"score_mod": mods.relative_bias(_FARTHEST), "extra": (_DISTANCES,)}
    yield small("small score of distances", ("v5e", "v6e", "table"), **distances)
    both = {**distances, "mask_mod": _near_by_array, "extra": (_DISTANCES, _bias_plane)}
    yield small("small functions of distances, bias", ("v5e", "v6e", "table"), **both)
    blocks = {
        "mask_mod": mods.blocks(64, 20) & _PACKED,
        "extra": (args(_chosen, *(lambda rng, n, x=x: x for x in _BITS)),),
    }
    yield small("small blocks and bits", ("v5e", "v6e", "mosaic_gpu"), H=64, **blocks)
    yield small("chosen blocks", _HOPPER, mask_mod=mods.blocks(64, 20) & mods.causal, extra=(args(_chosen),))
    more: dict[str, Any] = {"mask_mod": mods.sliding_window(100, 20), "score_mod": mods.soft_cap(30.0)}
    yield small("small functions of positions", ("v5e",), extra=(_positions, _bias_rows), **more)
    yield _small("small H=256", ("v5e",), H=256, Hv=64, extra=(_bias_keys,), logits_soft_cap=30.0)


CASES = {"dot_product_attention": (*_compiled(), *_crowded(), *_for_tpus())}
