"""Inputs of dense attention in the sizes of training: run on a GPU, measured, compiled for other chips."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd._core.cases import Case

_FARTHEST = 128  # distance of a learned bias
_QUERIES, _KEYS = "query_seq_lengths", "key_value_seq_lengths"


def _case(
    name, tags, B=2, T=4096, S=None, N=16, K=None, H=128, Hv=None,
    dtype="bfloat16", extra=(), dtypes=None, **options,
) -> Case:  # fmt: skip
    """`extra`: functions `(rng, B, T, S, N) -> {argument: array}` beside query, key and value."""
    S, K = S or T, K or N

    def build(rng):
        arrays = {
            "query": rng.standard_normal((B, T, N, H)),
            "key": rng.standard_normal((B, S, K, H)),
            "value": rng.standard_normal((B, S, K, Hv or H)),
        }
        for more in extra:
            arrays |= more(rng, B, T, S, N)
        return arrays

    return Case(name, build, options, frozenset(tags), dtype, dtypes or {})


def _lengths(rng, B, T, S, N):
    return {
        _QUERIES: np.linspace(T - 3, T // 2, B).astype(np.int32),
        _KEYS: np.linspace(S // 3, S - 1, B).astype(np.int32),
    }


def _segments(rng, B, T, S, N):
    query, key = (np.sort(rng.integers(low, low + 4, (B, n))) for low, n in ((0, T), (1, S)))
    return {"query_segment_ids": query.astype(np.int32), "key_value_segment_ids": key.astype(np.int32)}


def _positions(rng, B, T, S, N):
    sides = {"query_positions": (B, T), "key_value_positions": (B, S)}
    return {name: np.broadcast_to(np.arange(n, dtype=np.int32), (B, n)) for name, (B, n) in sides.items()}


def _documents(rng, B, T, S, N):
    return {"mod_args_0": np.sort(rng.integers(0, 4, (B, max(T, S))), -1).astype(np.int32)}


def _prefixes_and_documents(rng, B, T, S, N):
    documents = _documents(rng, B, T, S, N)["mod_args_0"]
    return {"mod_args_0": rng.integers(0, S, B).astype(np.int32), "mod_args_1": documents}


def _slopes(rng, B, T, S, N):
    return {"mod_args_2": rng.random(N)}


def _learned_slopes(rng, B, T, S, N):
    return {"mod_args_0": rng.random(N)}


def _of_rows_and_columns(rng, B, T, S, N):
    return {"mod_args_0": rng.standard_normal((B, T)), "mod_args_1": rng.standard_normal(S)}


def _by_row_and_column(logits, batch, head, row, column, by_row, by_column):
    return logits * by_row[batch, row] + by_column[column]


def _distances(rng, B, T, S, N):
    return {"mod_args_0": rng.standard_normal((N, 2 * _FARTHEST + 1))}


def _near_by_array(batch, head, row, column, table):
    return table[head, jnp.clip(row - column, 0, _FARTHEST)] > 0


def _tree(rng, B, T, S, N):
    first, last = mods.tree_intervals([int(rng.integers(-1, i)) for i in range(max(T, S))])
    return {"mod_args_0": first, "mod_args_1": last}


_PACKED, _BITS = mods.packed(np.add.outer(3 * np.arange(300), 2 * np.arange(500)) % 7 < 2)


def _chosen(rng, B, T, S, N):
    return {"mod_args_0": rng.random((B, N, -(-T // 64), -(-S // 20))) < 0.4}


def _blocks_and_bits(rng, B, T, S, N):
    return _chosen(rng, B, T, S, N) | {f"mod_args_{i}": x for i, x in enumerate(_BITS, 1)}


def _sink(rng, B, T, S, N):
    return {"sink": rng.normal(0, 5, N)}


def _mask(rng, B, T, S, N):
    return {"mask": rng.random((B, 1, 1, S)) < 0.7}


def _mask_plane(rng, B, T, S, N):
    return {"mask": rng.random((B, 1, T, S)) < 0.7}


def _mask_rows(rng, B, T, S, N):
    return {"mask": rng.random((T, 1)) < 0.7, "query_positions": np.arange(T, dtype=np.int32)}


def _bias(rng, B, T, S, N):
    return {"bias": rng.standard_normal((1, N, T, S))}


def _bias_rows(rng, B, T, S, N):
    return {"bias": rng.standard_normal((N, T, 1))}


def _bias_keys(rng, B, T, S, N):
    return {"bias": rng.standard_normal((B, 1, 1, S))}


def _dropout(rng, B, T, S, N):
    return {"dropout_key": np.array([7, 11], np.uint32)}


def _large() -> Iterator[Case]:
    """Many tiles, none of them whole: what only a GPU runs soon enough."""
    large = partial(_case, tags=("large",), T=1031, S=1543, N=4, K=2)
    again = partial(large, tags=("large", "repeat"))
    poison = partial(large, tags=("large", "repeat", "poison"))
    causal: dict[str, Any] = {"is_causal": True}
    yield again("large H=128")
    yield poison("large H=128 causal", **causal)
    yield again("large H=64 causal", H=64, N=8, K=8, **causal)
    yield again("large H=256 causal", H=256, **causal)
    yield again("large window", H=64, **causal, local_window_size=(200, 0))
    yield poison("large lengths", H=64, extra=(_lengths,), **causal)
    yield poison("large segments", H=64, extra=(_segments,), **causal)
    yield large("large Hv", H=128, Hv=64, **causal)
    yield large("large H=80", H=80, Hv=40, **causal)
    yield large("large sink and cap", extra=(_sink,), logits_soft_cap=5.0)
    yield poison("large mask", H=64, extra=(_mask,))
    yield large("large bias", H=64, extra=(_bias,), **causal)
    yield large("large dropout", H=64, extra=(_dropout,), dropout_rate=0.2)
    yield large("large T=40", T=40, S=2083, N=16)
    yield _case("many blocks", ("repeat",), B=8, T=2051, K=4, **causal)
    fused = partial(large, tags=("any_order",), deterministic_sums=False)
    yield fused("any order H=64", H=64, **causal)
    yield fused("any order H=128", N=8, **causal)
    yield fused("any order segments", H=64, extra=(_segments,), **causal)
    yield fused("any order lengths", extra=(_lengths,), **causal)
    yield fused("any order grouped heads", H=64, N=16)
    yield fused("any order odd T", T=797, S=1021, K=4, local_window_size=(150, 90))


def _measured() -> Iterator[Case]:
    """float32 for a CPU; for a GPU 16k tokens and a model width of 2048, then what is special."""
    cpu = partial(_case, B=1, N=8, H=64, dtype="float32")
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
    gpu = partial(_case, tags=("bench_gpu",), T=8192)
    for H, N in ((128, 16), (64, 32), (256, 8)):
        yield gpu(f"H={H} B=2 T=8192 N={N} full", N=N, H=H)
        yield gpu(f"H={H} B=2 T=8192 N={N} causal", N=N, H=H, is_causal=True)
    yield gpu("H=128 B=2 T=8192 N=16 causal, any order", is_causal=True, deterministic_sums=False)
    name, causal = "H=64 B=1 T=16384 N=32 causal window 1024", {"is_causal": True}
    yield gpu(name, B=1, T=16384, N=32, H=64, **causal, local_window_size=(1024, 0))
    yield gpu("H=128 B=1 T=32768 N=16 causal", B=1, T=32768, is_causal=True)
    for B, T in ((32, 256), (8, 1024), (4, 4096), (1, 16384)):
        yield _case(f"H=128 B={B} T={T} N=16 causal", ("timed",), B=B, T=T, is_causal=True)


_HOPPER = ("mosaic_gpu",)
_TABLE = ("mosaic_gpu", "table")
_GPU = ("mosaic_gpu", "xla", "table")

_WINDOW_AND_FIRST = mods.sliding_window(1024) | mods.global_tokens(4)


def _compiled() -> Iterator[Case]:
    """The shapes that training uses, for chips that are not there."""

    def case(name, tags=_TABLE, **arguments):
        return _case(name, tags, **arguments)

    causal: dict[str, Any] = {"is_causal": True}
    yield case("H=64", _GPU, N=32, H=64)
    yield case("H=64 causal", _HOPPER, N=32, H=64, **causal)
    yield case("H=128", (*_TABLE, "v5e", "v5p", "v6e", "tpu7x"))
    yield case("H=128 causal", _GPU, **causal)
    yield case("H=256", N=8, H=256)
    yield case("H=256 causal", N=8, H=256, **causal)
    yield case("H=128 causal, any order", _HOPPER, **causal, deterministic_sums=False)
    yield case("H=64 window 1024", (*_GPU, "v5e"), H=64, **causal, local_window_size=(1024, 0))
    yield case("segments causal", _GPU, extra=(_segments,), **causal)
    yield case("lengths", extra=(_lengths,))
    yield case("grouped heads", (*_TABLE, "v5e"), K=2, **causal)
    yield case("Hv=64, H=128", Hv=64)
    yield case("T=1023, S=2049", T=1023, S=2049)
    yield case("float16 causal", dtype="float16", **causal)
    yield case("bias", _GPU, T=1024, extra=(_bias,))
    yield case("mask", T=1024, extra=(_mask_plane,))
    yield case("dropout", _GPU, extra=(_dropout,), dropout_rate=0.1)
    yield case("soft cap", logits_soft_cap=30.0, **causal)
    yield case("causal by a function", mask_mod=mods.causal)
    yield case("documents by a function", extra=(_documents,), mask_mod=mods.causal & mods.document)
    yield case("window and first tokens by a function", mask_mod=_WINDOW_AND_FIRST)
    yield case("learned alibi", extra=(_learned_slopes,), score_mod=mods.alibi, **causal)
    yield case("sink", _HOPPER, extra=(_sink,), dtypes={"sink": "float32"}, **causal)
    yield from _crowded()
    yield from _for_tpus()


_small = partial(_case, T=300, S=500, N=4, K=2)
_NEAR = mods.static_prefix_lm(30) | mods.causal & mods.dilated(2) & ~mods.sliding_window(9)
_NEAR |= mods.global_tokens(8)


def _crowded() -> Iterator[Case]:
    """What takes most registers and shared memory, in lengths that do not divide the tiles."""
    small = partial(_small, tags=_HOPPER, dtypes={"bias": "float32"})
    cap: dict[str, Any] = {"is_causal": True, "logits_soft_cap": 30.0}
    window: dict[str, Any] = {**cap, "local_window_size": (100, 0)}
    tokens, planes = (_segments, _positions), (_bias, _mask_plane)
    everything = (*tokens, *planes, _lengths, _dropout)
    yield small("H=64 window, soft cap", tags=_TABLE, H=64, **window)
    yield small("odd lengths, soft cap", tags=_TABLE, **cap)
    yield small("tokens, window, soft cap", tags=_TABLE, extra=tokens, **window)
    yield small("bias and mask", tags=_TABLE, extra=planes)
    yield small("bias and segments, causal", extra=(_bias, _segments), is_causal=True)
    yield small("mask and segments, causal", extra=(_mask_plane, _segments), is_causal=True)
    yield small("mask and segments, soft cap", extra=(_mask_plane, _segments), **cap)
    yield small("function", tags=_TABLE, mask_mod=_NEAR)
    yield small("function of positions, soft cap", extra=(_positions,), mask_mod=_NEAR, logits_soft_cap=30.0)
    of_arrays, given = {"mask_mod": mods.prefix_lm & mods.document}, (_prefixes_and_documents, _positions)
    yield small("function of arrays and positions, soft cap", extra=given, **of_arrays, logits_soft_cap=30.0)
    yield small("score", tags=_TABLE, score_mod=mods.static_alibi(4))
    yield small(
        "score, masked, positions", extra=(_positions,), score_mod=mods.soft_cap(30.0), mask_mod=_NEAR
    )
    crowd = {"extra": (_bias, _dropout, _segments), "dropout_rate": 0.1, "logits_soft_cap": 30.0}
    yield small("score and all else", score_mod=mods.soft_cap(30.0), mask_mod=mods.causal, **crowd)
    yield small("H=256, score", H=256, score_mod=mods.soft_cap(30.0), is_causal=True)
    yield small("H=64, score", tags=_TABLE, H=64, score_mod=mods.soft_cap(30.0), is_causal=True)
    alibi, lines = {"score_mod": mods.alibi}, {"score_mod": _by_row_and_column}
    for H in (64, 128, 256):
        tags = _HOPPER if H == 128 else _TABLE
        yield small(
            f"H={H}, learned alibi", tags=tags, H=H, extra=(_learned_slopes,), is_causal=True, **alibi
        )
        yield small(
            f"H={H}, score of rows and columns", tags=_TABLE, H=H, extra=(_of_rows_and_columns,), **lines
        )
    crowd = {"extra": (_of_rows_and_columns, _bias, _segments), "logits_soft_cap": 30.0}
    yield small("score of rows and columns and all else", **lines, mask_mod=_NEAR, **crowd)
    yield small("tree", tags=_TABLE, mask_mod=mods.tree, extra=(_tree,))
    more = {"extra": (*given, *planes, _dropout), "dropout_rate": 0.1}
    yield small("H=256, function of arrays, planes", H=256, **more, **of_arrays)
    functions: dict[str, Any] = {"mask_mod": mods.sliding_window(100), "extra": everything[2:], **cap}
    yield small("H=256, function and planes", H=256, **functions, dropout_rate=0.1)
    yield small("H=256 everything", H=256, extra=everything, **cap, dropout_rate=0.1)
    yield small("Hv=256, H=192", H=192, Hv=256, is_causal=True)
    yield small("Hv=192, H=256", H=256, Hv=192, is_causal=True)


def _for_tpus() -> Iterator[Case]:
    """Compilation of the large tiles takes long: most options are compiled in small ones."""
    yield _case("one causal tile", ("v5e", "v6e"), T=1024, is_causal=True)
    small = partial(_small, dtypes={"bias": "float32", "sink": "float32"})
    indices: dict[str, Any] = {"extra": (_segments, _lengths, _sink), "local_window_size": (100, 0)}
    yield small("small indices", ("v5e", "v5p"), H=80, is_causal=True, **indices)
    planes = (_bias, _mask_plane, _dropout)
    yield small("small planes", ("v5e", "v6e"), extra=planes, dropout_rate=0.1)
    rows = (_bias_rows, _mask_rows)
    yield small("small rows float32", ("v5e", "tpu7x"), dtype="float32", extra=rows, is_causal=True)
    yield _case("one causal tile by a function", ("v5e", "v6e", "table"), T=1024, mask_mod=mods.causal)
    functions: dict[str, Any] = {"mask_mod": _NEAR, "score_mod": mods.static_alibi(6)}
    yield small("small functions", ("v5e", "v6e", "table"), N=6, **functions)
    arrays = {"mask_mod": mods.prefix_lm & mods.document, "extra": (_prefixes_and_documents, _slopes)}
    yield small("small functions of arrays", ("v5e", "v6e"), score_mod=mods.alibi, **arrays)
    lines = {"score_mod": _by_row_and_column, "extra": (_of_rows_and_columns,)}
    yield small("small score of rows and columns", ("v5e", "v6e", "table"), **lines)
    distances = {"score_mod": mods.relative_bias(_FARTHEST), "extra": (_distances,)}
    yield small("small score of distances", ("v5e", "v6e", "table"), **distances)
    both = {**distances, "mask_mod": _near_by_array, "extra": (_distances, _bias)}
    yield small("small functions of distances, bias", ("v5e", "v6e", "table"), **both)
    blocks = {"mask_mod": mods.blocks(64, 20) & _PACKED, "extra": (_blocks_and_bits,)}
    yield small("small blocks and bits", ("v5e", "v6e", "mosaic_gpu"), H=64, **blocks)
    yield small("chosen blocks", _HOPPER, mask_mod=mods.blocks(64, 20) & mods.causal, extra=(_chosen,))
    more: dict[str, Any] = {"mask_mod": mods.sliding_window(100, 20), "score_mod": mods.soft_cap(30.0)}
    yield small("small functions of positions", ("v5e",), extra=(_positions, _bias_rows), **more)
    yield _small("small H=256", ("v5e",), H=256, Hv=64, extra=(_bias_keys,), logits_soft_cap=30.0)


CASES = (*_large(), *_measured(), *_compiled())
