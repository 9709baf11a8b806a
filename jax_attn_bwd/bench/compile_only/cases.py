"""What is compiled: static calls of every operator, in the shapes that training uses."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Operator, value_and_gradients

Shapes = Mapping[str, jax.ShapeDtypeStruct]
DIRECTIONS = ("forward", "gradients")
PORTABLE = (
    "H=64", "H=128 causal", "H=64 window 1024", "segments causal", "bias", "dropout",
    "width 4096 float32", "width 131072 bfloat16", "masked bfloat16", "causal float32",
)  # fmt: skip
_SOFTMAX = ("width 1000 float32", "width 131072 bfloat16", "masked float32", "causal bfloat16")
_LARGE = ("H=128", "one causal tile")
TPU = {  # chip: the cases that are compiled for it; the first chip compiles every kind of program
    "v5e": (
        *_LARGE, "H=64 window 1024", "grouped heads", "small indices", "small planes", "small rows float32",
        "small H=256", *_SOFTMAX,
    ),
    "v5p": ("H=128", "small indices", "width 131072 bfloat16"),
    "v6e": (*_LARGE, "small planes", "width 131072 bfloat16"),
    "tpu7x": ("H=128", "small rows float32", "width 131072 bfloat16"),
}  # fmt: skip


def directions(target: str) -> tuple[str, ...]:
    """What is compiled for a chip: on a TPU the gradients, whose program holds the forward's kernels."""
    return DIRECTIONS[1:] if target in TPU else DIRECTIONS


@dataclass(frozen=True)
class StaticCase:
    """One call of an operator, by the types of its arrays."""

    name: str
    operator: str
    shapes: Shapes
    options: Mapping[str, Any] = field(default_factory=dict)


def _attention(
    name, B=2, T=4096, S=4096, N=16, K=16, H=128, Hv=None, dtype="bfloat16", extra=None, **options
) -> StaticCase:
    """`extra`: `{argument: (shape, dtype)}` beside query, key and value."""
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv or H)}
    typed = {argument: (shape, dtype) for argument, shape in shapes.items()} | (extra or {})
    structs = {argument: jax.ShapeDtypeStruct(*spec) for argument, spec in typed.items()}
    return StaticCase(name, "dot_product_attention", structs, options)


def _softmax(name, shape, dtype="float32", extra=None, **options) -> StaticCase:
    typed = {"x": (shape, dtype)} | (extra or {})
    structs = {argument: jax.ShapeDtypeStruct(*spec) for argument, spec in typed.items()}
    return StaticCase(f"{name} {dtype}", "scaled_masked_softmax", structs, options)


def _attention_cases() -> Iterator[StaticCase]:
    for H, N in ((64, 32), (128, 16), (256, 8)):
        yield _attention(f"H={H}", N=N, K=N, H=H)
        yield _attention(f"H={H} causal", N=N, K=N, H=H, is_causal=True)
    yield _attention("H=128 causal, any order", is_causal=True, deterministic=False)
    yield _attention("H=64 window 1024", H=64, is_causal=True, local_window_size=(1024, 0))
    segments = {"query_segment_ids": ((2, 4096), "int32")}
    segments["key_value_segment_ids"] = segments["query_segment_ids"]
    yield _attention("segments causal", extra=segments, is_causal=True)
    lengths = {"query_seq_lengths": ((2,), "int32"), "key_value_seq_lengths": ((2,), "int32")}
    yield _attention("lengths", extra=lengths)
    yield _attention("grouped heads", K=2, is_causal=True)
    yield _attention("Hv=64, H=128", Hv=64)
    yield _attention("T=1023, S=2049", T=1023, S=2049)
    yield _attention("float16 causal", dtype="float16", is_causal=True)
    yield _attention("bias", T=1024, S=1024, extra={"bias": ((1, 16, 1024, 1024), "bfloat16")})
    yield _attention("mask", T=1024, S=1024, extra={"mask": ((2, 1, 1024, 1024), "bool")})
    key = {"dropout_key": ((2,), "uint32")}
    yield _attention("dropout", extra=key, dropout_rate=0.1)
    yield _attention("soft cap", logits_soft_cap=30.0, is_causal=True)
    yield _attention("sink", extra={"sink": ((16,), "float32")}, is_causal=True)
    yield from _crowded_cases()


def _crowded_cases() -> Iterator[StaticCase]:
    """What takes most registers and shared memory, in lengths that do not divide the tiles."""
    small = partial(_attention, T=300, S=500, N=4, K=2)
    cap: dict[str, Any] = {"is_causal": True, "logits_soft_cap": 30.0}
    window: dict[str, Any] = {**cap, "local_window_size": (100, 0)}
    lengths = (("query", 300), ("key_value", 500))
    tokens: dict[str, Any] = {
        f"{side}_{what}": ((2, n), "int32")
        for side, n in lengths
        for what in ("segment_ids", "positions")
    }
    planes: dict[str, Any] = {
        "bias": ((1, 4, 300, 500), "float32"),
        "mask": ((2, 1, 300, 500), "bool"),
    }
    rest: dict[str, Any] = {f"{side}_seq_lengths": ((2,), "int32") for side, _ in lengths}
    rest["dropout_key"] = ((2,), "uint32")
    yield small("H=64 window, soft cap", H=64, **window)
    yield small("odd lengths, soft cap", **cap)
    yield small("tokens, window, soft cap", extra=tokens, **window)
    yield small("bias and mask", extra=planes)
    everything = tokens | planes | rest
    yield small("H=256 everything", H=256, extra=everything, **cap, dropout_rate=0.1)
    yield small("Hv=256, H=192", H=192, Hv=256, is_causal=True)
    yield small("Hv=192, H=256", H=256, Hv=192, is_causal=True)


def _tpu_cases() -> Iterator[StaticCase]:
    """Compilation of the large tiles takes long: most options are compiled in small ones."""
    yield _attention("one causal tile", T=1024, S=1024, is_causal=True)
    small = partial(_attention, T=300, S=500, N=4, K=2)
    indices: dict[str, Any] = {
        f"{side}_segment_ids": ((2, n), "int32") for side, n in (("query", 300), ("key_value", 500))
    }
    indices |= {f"{side}_seq_lengths": ((2,), "int32") for side in ("query", "key_value")}
    indices["sink"] = ((4,), "float32")
    yield small("small indices", extra=indices, is_causal=True, local_window_size=(100, 0), H=80)
    planes: dict[str, Any] = {
        "bias": ((1, 4, 300, 500), "float32"),
        "mask": ((2, 1, 300, 500), "bool"),
    }
    planes["dropout_key"] = ((2,), "uint32")
    yield small("small planes", extra=planes, dropout_rate=0.1)
    rows: dict[str, Any] = {"bias": ((4, 300, 1), "float32"), "mask": ((300, 1), "bool")}
    rows["query_positions"] = ((300,), "int32")
    yield small("small rows float32", extra=rows, is_causal=True, dtype="float32")
    keys = {"bias": ((2, 1, 1, 500), "bfloat16")}
    yield small("small H=256", extra=keys, logits_soft_cap=30.0, H=256, Hv=64)


def _softmax_cases() -> Iterator[StaticCase]:
    for width, rows in ((1000, 16384), (4096, 4096), (131072, 128)):
        for dtype in ("float32", "bfloat16", "float16"):
            yield _softmax(f"width {width}", (rows, width), dtype)
    mask = {"mask": ((4, 1, 1, 1024), "bool")}
    for dtype in ("float32", "bfloat16"):
        yield _softmax("masked", (4, 8, 1024, 1024), dtype, mask, scale=0.125)
        yield _softmax("causal", (4, 8, 1024, 1024), dtype, is_causal=True, scale=0.125)


def _named_cases(operator: Operator) -> Iterator[StaticCase]:
    """Two named inputs of `operator`, in bfloat16: what an operator without shapes here is compiled with."""
    for case in itertools.islice(operator.tagged("check"), 2):
        arrays = case.arrays("bfloat16")
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        yield StaticCase(case.name, operator.name, shapes, case.options)


def cases(operator: Operator, implementation: str, target: str = "") -> tuple[StaticCase, ...]:
    """The calls of `operator` that are compiled; a few of them stand for all of the portable path."""
    known = [c for c in (*_attention_cases(), *_softmax_cases()) if c.operator == operator.name]
    if not known:
        return tuple(_named_cases(operator))
    if implementation == "mosaic_tpu":
        known += [c for c in _tpu_cases() if c.operator == operator.name]
        return tuple(c for c in known if c.name in TPU[target or "v5e"])
    return tuple(c for c in known if implementation != "xla" or c.name in PORTABLE)


def registered(implementation: str, names: tuple[str, ...] = ()) -> tuple[Operator, ...]:
    """The operators that have `implementation`; of those in `names`, if any are named."""
    return tuple(
        operator
        for operator in ops.discover()
        if (not names or operator.name in names)
        and implementation in {i.name for i in operator.implementations}
    )


def function(
    operator: Operator, case: StaticCase, direction: str, implementation: str
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """(what is compiled, the types of its arguments).

    "gradients" returns outputs and gradients for given cotangents, as a training step does.
    """
    names, types = tuple(case.shapes), tuple(case.shapes.values())
    options = {**case.options, "implementation": implementation}

    def forward(*arrays):
        return operator.call(**dict(zip(names, arrays, strict=True)), **options)

    if direction == "forward":
        return forward, types
    portable = {**options, "implementation": "xla"}  # it has the same outputs, and runs anywhere
    cotangents = jax.eval_shape(
        lambda arrays: operator.call(**arrays, **portable), dict(case.shapes)
    )

    def gradients(*arrays_and_cotangents):
        arrays = dict(zip(names, arrays_and_cotangents[: len(names)], strict=True))
        run = value_and_gradients(operator.call, operator.differentiated(arrays), arrays, options)
        return run(arrays_and_cotangents[len(names) :])

    return gradients, (*types, *cotangents)
