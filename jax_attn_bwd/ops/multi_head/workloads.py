"""Inputs of the cases of the layer, and their builder."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_attn_bwd._core.cases import Case

_SIZES = dict(B=(2,), T=5, S=7, N=4, K=2, H=3, Hv=5, Eq=6, Ek=7, Ev=8, Eo=9)
_SHAPES = {
    "query_kernel": "Eq N H", "query_bias": "N H", "key_kernel": "Ek K H", "key_bias": "K H",
    "value_kernel": "Ev K Hv", "value_bias": "K Hv", "out_kernel": "N Hv Eo", "out_bias": "Eo",
    "bias_k": "K H", "bias_v": "K Hv", "sink": "N",
    "query": "B T Eq", "key": "B S Ek", "value": "B S Ev",
}  # fmt: skip
KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")
BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")
INPUTS = ("query", "key", "value")
ROWS = ("bias_k", "bias_v")
_BIG = {"sink": 10.0}  # near 0 it would hide errors


def case(
    name: str,
    given: tuple[str, ...] = (*INPUTS, *KERNELS, *BIASES),
    *,
    tags: tuple[str, ...] = ("ci",),
    extra: Callable | None = None,
    sizes: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> Case:
    """`given` names the arrays; `extra(rng, sizes) -> {argument: array}` adds others."""
    n = {**_SIZES, **(sizes or {})}

    def build(rng):
        arrays = {}
        for argument in given:
            shape = []
            for letter in _SHAPES[argument].split():
                size = n[letter]
                shape += size if isinstance(size, tuple) else [size]
            # Kernels as at initialisation: heads near 1, so that the softmax is not saturated.
            spread = shape[0] ** -0.5 if argument in KERNELS[:3] else _BIG.get(argument, 1.0)
            arrays[argument] = rng.normal(0, spread, shape)
        return arrays | (extra(rng, n) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype)


def lengths(rng, n):
    return {
        "query_seq_lengths": np.array([n["T"], n["T"] - 2], np.int32),
        "key_value_seq_lengths": np.array([n["S"] - 3, 0], np.int32),
    }


def shared_segments(rng, n):
    ids = np.sort(rng.integers(0, 3, (*n["B"], n["T"])), -1).astype(np.int32)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}
