"""Describes an operator to `check` and to tests: named inputs, and how to call it.

`ops/<operator>/cases.py` holds `OPERATORS`, a tuple of `Operator`; `ops.discover()` finds them. Their
cases are those that `check` reads; `tests/cases` adds others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.backend import Implementation

Arrays = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One named call.

    Tags tell who reads it. `jax_attn_bwd.check` reads "check", and on a CPU "means", those that are compared
    in narrow dtypes alone: numbers without a mean hide an error that all entries of a row share. On the chip
    at hand `check --enable` reads "large" (many tiles, none of them whole), "poison" (which is run again with
    NaN where no one looks), "any_order" (what `deterministic_sums=False` allows), and "timed". `tests/cases`
    names the others.
    """

    name: str  # unique among the operator's cases of a tag
    build: Callable[[np.random.Generator], Arrays]  # rng -> {argument: array}; floating arrays are float64
    options: Mapping[str, Any] = field(default_factory=dict)  # the static arguments
    tags: frozenset[str] = frozenset({"ci"})
    dtype: str = "bfloat16"  # of the floating arrays where a case is measured or compiled
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of arguments that have one of their own
    means: Mapping[str, float] = field(default_factory=dict)  # added to an argument, or an output's cotangent
    # how many times the error of rounding once a gradient has at most, by name, where 3 are too few
    times: Mapping[str, float] = field(default_factory=dict)

    def arrays(self, dtype: Any = np.float64, seed: int = 0) -> Arrays:
        """Returns the arrays, floating ones rounded to `dtype`."""
        arrays = self.build(np.random.default_rng(seed))
        arrays |= {name: arrays[name] + mean for name, mean in self.means.items() if name in arrays}
        return {name: cast(x, self.dtypes.get(name, dtype)) for name, x in arrays.items()}


def case_of(
    name, build, *, tags=("ci",), dtype="bfloat16", dtypes=None, means=None, times=None, **options
) -> Case:
    """Makes a case of its fields and the options of the call."""
    return Case(name, build, options, frozenset(tags), dtype, dtypes or {}, means or {}, times or {})


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator in one calling convention."""

    name: str  # of the public function
    outputs: tuple[str, ...]  # names of what `call` returns
    differentiable: tuple[str, ...]  # names of the arguments that have a gradient
    implementations: tuple[Implementation, ...]  # in the order in which `implementation=None` tries them
    call: Callable[..., tuple[jax.Array, ...]]  # (**arrays, **options, implementation=) -> outputs
    reference: Callable[..., tuple[jax.Array, ...]]  # (**arrays, **options) -> outputs, the definition
    cases: tuple[Case, ...]
    # (arrays, options) -> {argument or output: where}: entries of arguments, and of the cotangents of
    # outputs, that no one reads: boolean NumPy arrays that broadcast to them from the left. Whatever stands
    # there changes no output and no gradient.
    hidden: Callable[[Arrays, Mapping[str, Any]], dict[str, np.ndarray]] = lambda arrays, options: {}

    @property
    def folder(self) -> str:
        """Returns the name of the folder of `ops` that holds its definition."""
        return self.reference.__module__.split(".")[-2]

    def tagged(self, *tags: str) -> Iterator[Case]:
        """Returns the cases that have any of `tags`."""
        return (case for case in self.cases if case.tags & set(tags))

    def differentiated(self, arrays: Arrays) -> tuple[str, ...]:
        """Returns the differentiable arguments that a call has."""
        return tuple(name for name in self.differentiable if is_floating(arrays.get(name)))


def is_floating(x: Any) -> bool:
    """Tells whether `x` is an array of a floating dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def cast(x: Any, dtype: Any) -> Any:
    """Makes `x` a JAX array, of `dtype` if floating; by NumPy: each shape would be a program to compile."""
    if not is_floating(x):
        return x if isinstance(x, jax.Array) else jax.device_put(np.asarray(x))
    return jax.device_put(np.asarray(x).astype(dtype))


def cotangents(operator: Operator, outputs: tuple, seed: int = 1) -> tuple:
    """Returns a random cotangent for each output: a constant one proves nothing of a softmax."""
    rng = np.random.default_rng(seed)
    return tuple(cast(rng.standard_normal(x.shape), x.dtype) for x in outputs)


def value_and_gradients(
    function: Callable[..., tuple], differentiated: tuple[str, ...], arrays: Arrays, options: Mapping
) -> Callable[[tuple], tuple[tuple, dict]]:
    """Returns `cts -> (outputs, {name: gradient})` of `function`, by JAX."""

    def run(cts):
        def outputs(inputs):
            return function(**{**arrays, **inputs}, **options)

        out, pullback = jax.vjp(outputs, {name: arrays[name] for name in differentiated})
        return out, pullback(tuple(ct.astype(x.dtype) for ct, x in zip(cts, out, strict=True)))[0]

    return run


# Arrays that cases of several operators have in common. Each is a function `(rng, n) -> {argument: array}`,
# or returns one; `n` has a size for each shape letter: B (a tuple), T queries, S keys.
Extra = Callable[[np.random.Generator, Mapping[str, Any]], dict[str, np.ndarray]]


def both(*extras: Extra) -> Extra:
    """Draws the arrays of several of these functions, one after the other."""
    return lambda rng, n: {k: v for extra in extras for k, v in extra(rng, n).items()}


def mask(*shape: int, keep: float = 0.6) -> Extra:
    """Returns a boolean mask of that shape, True for a share of `keep`."""
    return lambda rng, n: {"mask": rng.random(shape) < keep}


def bias(*shape: int, spread: float = 1.0) -> Extra:
    """Returns a bias of that shape and standard deviation."""
    return lambda rng, n: {"bias": spread * rng.standard_normal(shape)}


def sink(*shape: int, spread: float = 20.0) -> Extra:
    """A sink of that shape and standard deviation, which is large: one near 0 would hide errors."""
    return lambda rng, n: {"sink": spread * rng.standard_normal(shape)}


def lengths(queries: Sequence[int | None], keys: Sequence[int | None]) -> Extra:
    """Lengths: by how many tokens each batch entry is short of the whole; None has no tokens."""

    def of(size, short):
        return np.array([0 if n is None else size - n for n in short], np.int32)

    return lambda rng, n: {
        "query_seq_lengths": of(n["T"], queries),
        "key_value_seq_lengths": of(n["S"], keys),
    }


def segments(count: int = 3) -> Extra:
    """Segment ids in order, `count` on each side; some queries, and some keys, are alone in theirs."""
    return lambda rng, n: {
        "query_segment_ids": np.sort(rng.integers(0, count, (*n["B"], n["T"])), -1).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(1, count + 1, (*n["B"], n["S"])), -1).astype(np.int32),
    }


def shared_segments(rng, n):
    """Segment ids of as many queries as keys, which share them."""
    ids = np.sort(rng.integers(0, 3, (*n["B"], n["T"])), -1).astype(np.int32)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def positions(rng, n):
    """Shuffles positions: those of the queries for all batch entries, those of the keys for each of two."""
    return {
        "query_positions": rng.permutation(n["S"])[: n["T"]].astype(np.int32),
        "key_value_positions": np.stack([rng.permutation(n["S"]) for _ in range(2)]).astype(np.int32),
    }


def dropout_key(*words: int) -> Extra:
    """Returns a raw random key of two words."""
    return lambda rng, n: {"dropout_key": np.array(words, np.uint32)}


# ---- what definitions are told, and what no one reads


def keep_mask(
    words: jax.Array,
    rate: float,
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    offset: Sequence[Any] | None = None,
    broadcast: bool = False,
) -> jax.Array:
    """Returns the mask of dropout `[*batch, N, T, S]` in one piece; `sizes` are (N, T, S)."""
    b, h, r, c = offset or (0, 0, 0, 0)
    N, T, S = sizes
    count = lambda start, n: jnp.arange(start, start + n, dtype=jnp.uint32)
    batches = count(b, math.prod(batch)).reshape(*batch, 1, 1, 1)
    heads = count(h, N)[:, None, None]
    if broadcast:
        batches, heads = jnp.zeros_like(batches), jnp.zeros_like(heads)
    keys = dropout.head_keys(words, batches, heads)
    return dropout.keep(keys, count(r, T)[:, None], count(c, S), rate)


def seen_with_bias(whole: np.ndarray, arrays: Arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns (`whole` where the bias hides nothing, {"bias": its entries at hidden places alone})."""
    if "bias" not in arrays:
        return whole, {}
    bias = np.asarray(arrays["bias"])
    lead = whole.ndim - bias.ndim
    repeated = tuple(i for i, n in enumerate(bias.shape, lead) if n == 1 and whole.shape[i] != 1)
    read = whole.any((*range(lead), *repeated), keepdims=True)
    return whole & (bias != -np.inf), {"bias": np.asarray(~read.reshape(read.shape[lead:]))}
