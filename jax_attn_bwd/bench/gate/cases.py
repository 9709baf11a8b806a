"""Inputs of the gate beyond the operators' own: many tiles at odd lengths, poisoned ones, bench shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_attn_bwd._core.cases import Arrays, Case, Operator

Hidden = Callable[[Arrays], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Poisoned:
    """A case, and which entries of its arrays (and of `dout`, the outputs' cotangent) nothing may read."""

    case: Case
    hidden: Hidden


def _attention(
    name, tags, tiny, *, B=2, T=1031, S=1543, N=4, K=2, H=128, Hv=None, extra=None, **options
):
    """`tiny` shrinks the lengths, for a machine without a GPU."""
    T, S = (T // 40, S // 40) if tiny else (T, S)

    def build(rng):
        arrays = {
            "query": rng.standard_normal((B, T, N, H)),
            "key": rng.standard_normal((B, S, K, H)),
            "value": rng.standard_normal((B, S, K, Hv or H)),
        }
        return arrays | (extra(rng, B, T, S, N) if extra else {})

    return Case(name, build, options, frozenset(tags))  # fmt: skip


def _lengths(rng, B, T, S, N):
    return {
        "query_seq_lengths": np.linspace(T - 3, T // 2, B).astype(np.int32),
        "key_value_seq_lengths": np.linspace(S // 3, S - 1, B).astype(np.int32),
    }


def _segments(rng, B, T, S, N):
    query, key = (np.sort(rng.integers(low, low + 4, (B, n))) for low, n in ((0, T), (1, S)))
    return {
        "query_segment_ids": query.astype(np.int32),
        "key_value_segment_ids": key.astype(np.int32),
    }


def _sink(rng, B, T, S, N):
    return {"sink": 5 * rng.standard_normal(N)}


def _mask(rng, B, T, S, N):
    return {"mask": rng.random((B, 1, 1, S)) < 0.7}


def _bias(rng, B, T, S, N):
    return {"bias": rng.standard_normal((1, N, T, S))}


def _dropout(rng, B, T, S, N):
    return {"dropout_key": np.array([7, 11], np.uint32)}


def attention(tiny: bool) -> tuple[Case, ...]:
    """Dense attention over many tiles, none of them whole. "large" is checked, "repeat" also repeated."""
    both, one = ("large", "repeat"), ("large",)
    return (
        _attention("large H=128", both, tiny),
        _attention("large H=128 causal", both, tiny, is_causal=True),
        _attention("large H=64 causal", both, tiny, H=64, N=8, K=8, is_causal=True),
        _attention("large H=256 causal", both, tiny, H=256, is_causal=True),
        _attention("large window", both, tiny, H=64, is_causal=True, local_window_size=(200, 0)),
        _attention("large lengths", both, tiny, H=64, extra=_lengths, is_causal=True),
        _attention("large segments", both, tiny, H=64, extra=_segments, is_causal=True),
        _attention("large Hv", one, tiny, H=128, Hv=64, is_causal=True),
        _attention("large H=80", one, tiny, H=80, Hv=40, is_causal=True),
        _attention("large sink and cap", one, tiny, extra=_sink, logits_soft_cap=5.0),
        _attention("large mask", one, tiny, H=64, extra=_mask),
        _attention("large bias", one, tiny, H=64, extra=_bias, is_causal=True),
        _attention("large dropout", one, tiny, H=64, extra=_dropout, dropout_rate=0.2),
        _attention("large T=1", one, tiny, T=40, S=2083, N=16, K=2),
        _attention("many blocks", ("repeat",), tiny, B=8, T=2051, S=2051, N=16, K=4, is_causal=True),
    )  # fmt: skip


def any_order(tiny: bool) -> tuple[Case, ...]:
    """Dense attention for the fused backward, which `deterministic=False` allows."""
    return (
        _attention("any order H=64", (), tiny, H=64, is_causal=True),
        _attention("any order H=128", (), tiny, N=8, is_causal=True),
        _attention("any order segments", (), tiny, H=64, extra=_segments, is_causal=True),
        _attention("any order lengths", (), tiny, extra=_lengths, is_causal=True),
        _attention("any order grouped heads", (), tiny, H=64, N=16, K=2),
        _attention("any order odd T", (), tiny, T=797, S=1021, K=4, local_window_size=(150, 90)),
    )


@dataclass(frozen=True)
class Probe:
    """One kernel on one small case: the gradients `wanted` launch it, after the forward."""

    name: str
    case: Case
    wanted: tuple[str, ...]
    needs: tuple[str, ...]
    any_order: bool = False


def probes(operator: Operator, tiny: bool) -> tuple[Probe, ...]:
    """A probe of each kernel of an operator, small, of a few tiles."""
    size: dict[str, Any] = dict(B=1, T=333, S=461, N=2, K=1, is_causal=True)
    heads = [_attention(f"H={H}", (), tiny, **size, H=H) for H in (64, 128)]
    bias = _attention("H=64 bias", (), tiny, **size, H=64, extra=_bias)
    if operator.name == "dot_product_attention":
        qkv = ("query", "key", "value")
        return (
            *(Probe("forward", case, (), needs(operator, "forward")) for case in heads),
            *(Probe("dq", case, qkv[:1], needs(operator)) for case in heads),
            *(Probe("dk dv", case, qkv[1:], needs(operator)) for case in heads),
            Probe("dbias", bias, ("bias",), needs(operator, "bias")),
            *(Probe("fused", case, qkv, needs(operator, "any order"), True) for case in heads),
        )
    if operator.name == "scaled_masked_softmax":
        case = _softmax("13 x 1000", (), (13, 40 if tiny else 1000), scale=0.5)
        return (
            Probe("forward", case, (), needs(operator, "forward")),
            Probe("backward", case, ("x",), needs(operator)),
        )
    return ()


_NEEDS = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "bias": ("forward", "backward", "bias"),
    "any order": ("forward", "any order"),
}


def needs(operator: Operator, direction: str = "backward") -> tuple[str, ...]:
    """Names of the kernels that a call launches; the layers of attention launch those of attention."""
    if operator.name == "scaled_masked_softmax":  # XLA sums the gradient of its bias
        return tuple(f"softmax {name}" for name in _NEEDS[direction] if name != "bias")
    return tuple(f"attention {name}" for name in _NEEDS[direction])


def _softmax(name, tags, shape, extra=None, **options):
    def build(rng):
        return {"x": 3 * rng.standard_normal(shape)} | (extra(rng) if extra else {})

    return Case(name, build, options, frozenset(tags))


def softmax(tiny: bool) -> tuple[Case, ...]:
    """The softmax over rows of odd width, from one block's worth to many."""
    rows, widths = (3, (33, 257)) if tiny else (1031, (1000, 4099, 16385))
    mask = lambda rng: {"mask": rng.random((2, 1, 1, widths[0])) < 0.7}  # noqa: E731
    plane = (2, 4, rows // 3, widths[0])
    return (
        *(_softmax(f"large {w}", ("large", "repeat"), (rows, w), scale=0.5) for w in widths),
        _softmax("large 131073", ("large",), (2, 3, 257 if tiny else 131073)),
        _softmax("large masked", ("large", "repeat"), plane, extra=mask, scale=0.125),
        _softmax("large causal", ("large",), plane, is_causal=True, scale=0.125),
    )


def _behind_lengths(arrays: Arrays) -> dict[str, np.ndarray]:
    T, S = arrays["query"].shape[1], arrays["key"].shape[1]
    rows = np.arange(T)[None] >= np.asarray(arrays["query_seq_lengths"])[:, None]
    columns = np.arange(S)[None] >= np.asarray(arrays["key_value_seq_lengths"])[:, None]
    return {"query": rows, "dout": rows, "key": columns, "value": columns}


def _masked_keys(arrays: Arrays) -> dict[str, np.ndarray]:
    columns = ~np.asarray(arrays["mask"])[:, 0, 0]
    return {"key": columns, "value": columns}


def _other_segments(arrays: Arrays) -> dict[str, np.ndarray]:
    """Keys of segments that no query has, and queries of segments that no key has."""
    query, key = (np.asarray(arrays[f"{x}_segment_ids"]) for x in ("query", "key_value"))
    rows = np.stack([~np.isin(q, k) for q, k in zip(query, key, strict=True)])
    columns = np.stack([~np.isin(k, q) for q, k in zip(query, key, strict=True)])
    return {"query": rows, "dout": rows, "key": columns, "value": columns}


def _after_the_last_query(arrays: Arrays) -> dict[str, np.ndarray]:
    B, T, S = arrays["key"].shape[0], arrays["query"].shape[1], arrays["key"].shape[1]
    columns = np.broadcast_to(np.arange(S) >= T, (B, S))
    return {"key": columns, "value": columns}


def _masked_entries(arrays: Arrays) -> dict[str, np.ndarray]:
    return {"x": np.broadcast_to(~np.asarray(arrays["mask"]), arrays["x"].shape)}


def _above_the_diagonal(arrays: Arrays) -> dict[str, np.ndarray]:
    T, S = arrays["x"].shape[-2:]
    return {"x": np.broadcast_to(np.arange(S) > np.arange(T)[:, None], arrays["x"].shape)}


def poisoned(operator: Operator, tiny: bool) -> tuple[Poisoned, ...]:
    """The poison cases of an operator; none for one that is not listed here."""
    if operator.name == "dot_product_attention":
        size: dict[str, Any] = dict(T=533, S=701, H=64)
        return (
            Poisoned(_attention("lengths", (), tiny, **size, extra=_lengths), _behind_lengths),
            Poisoned(_attention("mask", (), tiny, **size, extra=_mask), _masked_keys),
            Poisoned(_attention("segments", (), tiny, **size, extra=_segments), _other_segments),
            Poisoned(_attention("causal", (), tiny, **size, is_causal=True), _after_the_last_query),
        )
    if operator.name == "scaled_masked_softmax":
        shape = (2, 3, 17, 29) if tiny else (2, 4, 311, 1000)
        mask = lambda rng: {"mask": rng.random((2, 1, 1, shape[-1])) < 0.7}  # noqa: E731
        return (
            Poisoned(_softmax("mask", (), shape, extra=mask, scale=0.5), _masked_entries),
            Poisoned(_softmax("causal", (), shape, is_causal=True), _above_the_diagonal),
        )
    return ()


def large(operator: Operator, tiny: bool) -> tuple[Case, ...]:
    """The cases over many tiles of an operator; none for one that is not listed here."""
    made = {"dot_product_attention": attention, "scaled_masked_softmax": softmax}.get(operator.name)
    return () if made is None else made(tiny)


def bench(operator: Operator, tiny: bool) -> Case:
    """The call on which the portable path meets JAX's own derivative of the definition."""
    if operator.name == "dot_product_attention":
        return _attention(
            "B=1 T=4000 causal", (), tiny, B=1, T=4000, S=4000, N=8, K=8, H=64, is_causal=True
        )
    if operator.name == "scaled_masked_softmax":
        return _softmax("8192 x 8192", (), (40, 40) if tiny else (8192, 8192), scale=0.5)
    tagged = [*operator.tagged("bench")] or [*operator.tagged("check")]
    if len(tagged) == 1:
        return tagged[0]
    rng = np.random.default_rng(0)
    return max(tagged, key=lambda case: sum(np.size(x) for x in case.build(rng).values()))
