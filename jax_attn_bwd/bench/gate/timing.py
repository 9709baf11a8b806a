"""Times: how a call is timed, the workloads, and one step for each contender in a workload."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import dot_product_attention, dot_product_attention_bwd, scaled_masked_softmax
from jax_attn_bwd._core import backend
from jax_attn_bwd._core.cases import Case, Operator, cast, cotangents, value_and_gradients
from jax_attn_bwd.bench.errors import sentence
from jax_attn_bwd.bench.gate import peers, progress
from jax_attn_bwd.bench.gate.steps import FAILED, OK, PORTABLE, REFUSED, TIME, Row
from jax_attn_bwd.check import relative_error

ROUNDS = 9
AGREEMENT = (
    0.03  # of bfloat16 contenders, relative to the largest entry: they compute the same thing
)


def clock(call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Seconds of one call: the median over rounds of many calls, each round waited for once.

    The first calls compile and load. A round is long enough that starting it and waiting do not count.
    """
    for _ in range(2):
        wait(call())
    start = time.perf_counter()
    wait(call())
    once = time.perf_counter() - start
    calls = max(1, min(200, round(0.03 / once)))
    rounds = ROUNDS if once < 0.3 else 3
    times = []
    for _ in range(rounds):
        progress.tell(progress.LAUNCHING)
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


@dataclass(frozen=True)
class Attention:
    """A timed call of dense attention in bfloat16, T = S, heads as many as key heads."""

    direction: str  # "forward" or "backward"
    T: int
    H: int
    B: int = 1
    N: int = 16
    is_causal: bool = False
    window: int | None = None
    deterministic: bool = True

    @property
    def name(self) -> str:
        """Of the rows."""
        kind = (
            f"causal window {self.window}"
            if self.window
            else "causal"
            if self.is_causal
            else "full"
        )
        order = "" if self.deterministic else " any order"
        return f"{self.direction} H={self.H} B={self.B} T={self.T} N={self.N} {kind}{order}"

    @property
    def operations(self) -> float:
        """Floating-point operations, counted as is usual: causal is half, the backward 2.5 forwards."""
        pairs = self.T * self.T / (2 if self.is_causal else 1)
        if self.window is not None:
            pairs = sum(min(t, self.window) + 1 for t in range(self.T))
        return 4.0 * self.B * self.N * self.H * pairs * (2.5 if self.direction == "backward" else 1)

    @property
    def options(self) -> dict[str, Any]:
        """What `jax.nn.dot_product_attention` and ours are called with."""
        window = {} if self.window is None else {"local_window_size": (self.window, 0)}
        return {"is_causal": self.is_causal, **window}

    def arrays(self) -> tuple[jax.Array, ...]:
        """query, key, value, dout: random."""
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (self.B, self.T, self.N, self.H)
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)


def workloads(tiny: bool) -> tuple[Attention, ...]:
    """The table: 16k tokens and a model width of 2048, then what is special."""
    T, B, N = (48, 1, 2) if tiny else (8192, 2, 16)
    long = 64 if tiny else 16384
    F, G = partial(Attention, "forward"), partial(Attention, "backward")
    return (
        F(T, 128, B, N), F(T, 128, B, N, True), G(T, 128, B, N), G(T, 128, B, N, True),
        F(T, 64, B, 2 * N), G(T, 64, B, 2 * N), G(T, 64, B, 2 * N, True),
        G(T, 128, B, N, deterministic=False), G(T, 128, B, N, True, deterministic=False),
        G(T, 256, B, N // 2), G(T, 256, B, N // 2, True),
        G(long, 64, 1, 2 * N, True, 8 if tiny else 1024), G(2 * long, 128, 1, N, True),
    )  # fmt: skip


def ours(work: Attention, implementation: str) -> Callable[[], Any]:
    """Our call, compiled; the backward is handed `out` and `lse`, as a training step has them."""
    q, k, v, dout = work.arrays()
    options = {
        **work.options,
        "deterministic": work.deterministic,
        "implementation": implementation,
    }
    forward = progress.compiled(
        jax.jit(partial(dot_product_attention, return_residual=True, **options)), q, k, v
    )
    if work.direction == "forward":
        return lambda: forward(q, k, v)[0]
    out, lse = forward(q, k, v)
    saved = {"out": out, "lse": lse}
    function = jax.jit(partial(dot_product_attention_bwd, **options))
    backward = progress.compiled(function, dout, q, k, v, **saved)
    return lambda: backward(dout, q, k, v, **saved)[:3]


@cache
def _portable_result(work: Attention) -> list[np.ndarray]:
    return _numbers(ours(work, "xla")())


def _numbers(results: Any) -> list[np.ndarray]:
    """A sample of each result, enough to tell a wrong one; all of it would take seconds to copy."""
    leaves = [x for x in jax.tree.leaves(results) if x.ndim]
    return [
        np.asarray(x.reshape(-1)[:: max(1, x.size // 2**20)].astype(jnp.float32)) for x in leaves
    ]


def attention(work: Attention, contender: str) -> Iterator[Row]:
    """The time of one contender, whose result agrees with that of our portable path."""
    own = contender in backend.NAMES
    who = f"dot_product_attention[{contender}]" if own else contender
    try:
        call, how = (ours(work, contender), "") if own else peers.attention(work, contender)
        got = _numbers(call())
    except Exception as error:
        if own and not isinstance(error, NotImplementedError):
            raise
        yield Row(TIME, who, work.name, REFUSED, note=sentence(error))
        return
    errors = [relative_error(a, b) for a, b in zip(got, _portable_result(work), strict=True)]
    if not max(errors) <= AGREEMENT:
        note = f"disagrees with our portable path by {max(errors):.2g}: not timed"
        yield Row(TIME, who, work.name, FAILED if own else REFUSED, {"error": max(errors)}, note)
        return
    seconds = clock(call)
    figures = {"ms": seconds * 1e3, "TFLOP/s": work.operations / seconds / 1e12}
    yield Row(TIME, who, work.name, OK, figures, how)


def torch_attention(works: tuple[Attention, ...]) -> Iterator[Row]:
    """Torch's scaled_dot_product_attention in its own process, timed with its own events."""
    for work in works:
        if work.window is not None:
            continue  # it takes a window only as a dense mask
        try:
            seconds = peers.torch_seconds(work, ROUNDS)
        except peers.Absent as reason:
            yield Row(TIME, "torch SDPA", "every workload", REFUSED, note=str(reason))
            return
        except Exception as error:  # out of memory in one workload says nothing of the next
            yield Row(TIME, "torch SDPA", work.name, REFUSED, note=sentence(error))
            continue
        figures = {"ms": seconds * 1e3, "TFLOP/s": work.operations / seconds / 1e12}
        yield Row(TIME, "torch SDPA", work.name, OK, figures, "events; backward by autograd.grad")


def softmax_contenders(implementations: tuple[str, ...]) -> dict[str, Callable[[jax.Array], Any]]:
    """What computes a softmax over the last axis."""
    found = {
        f"scaled_masked_softmax[{name}]": partial(scaled_masked_softmax, implementation=name)
        for name in implementations
    }
    return {**found, "jax.nn.softmax": partial(jax.nn.softmax, axis=-1)}


def softmax(width: int, dtype: str, contenders: Mapping[str, Callable], size: int) -> Iterator[Row]:
    """GB/s of each contender, forward and backward, and its share of what a copy reaches."""
    x, dy = (
        jax.random.normal(jax.random.key(seed), (max(1, size // width), width), dtype)
        for seed in (0, 1)
    )
    copy = progress.compiled(jax.jit(lambda x: x + jnp.ones((), x.dtype)), x)
    ceiling = 2 * x.nbytes / clock(lambda: copy(x)) / 1e9
    yield Row(TIME, "copy", f"softmax {width} {dtype}", OK, {"GB/s": ceiling})
    for who, function in contenders.items():
        for direction, arrays in (("forward", 2), ("backward", 3)):
            what = f"softmax {direction} {width} {dtype}"
            try:
                call = _direction(direction, function, x, dy)
                seconds = clock(call)
            except NotImplementedError as reason:
                yield Row(TIME, who, what, REFUSED, note=str(reason)[:500])
                continue
            except Exception as error:  # one contender's failure is its own
                yield Row(TIME, who, what, FAILED, note=sentence(error))
                continue
            rate = arrays * x.nbytes / seconds / 1e9
            figures = {"ms": seconds * 1e3, "GB/s": rate, "share of the copy": rate / ceiling}
            yield Row(TIME, who, what, OK, figures)


def _direction(
    direction: str, function: Callable, x: jax.Array, dy: jax.Array
) -> Callable[[], Any]:
    """The call that is timed; the backward is the compiled pullback on saved residuals."""
    if direction == "forward":
        forward = progress.compiled(jax.jit(function), x)
        return lambda: forward(x)
    _, pullback = progress.compiled(jax.jit(partial(jax.vjp, function)), x)(x)
    backward = progress.compiled(jax.jit(lambda pullback, dy: pullback(dy)), pullback, dy)
    return lambda: backward(pullback, dy)


def portable(operator: Operator, case: Case, dtype: str) -> Iterator[Row]:
    """Time and temporary memory of our portable path, and of JAX's derivative of the definition."""
    arrays, what = case.arrays(dtype), f"{case.name} {dtype}"
    names = operator.differentiated(arrays)
    cts = cotangents(operator, jax.eval_shape(lambda: operator.call(**arrays, **case.options)))
    cts = tuple(cast(ct, dtype) for ct in cts)

    def row(who, function, options):
        step = jax.jit(_step(function, names, options))
        compiled = progress.compiled(step, arrays, cts)
        memory = compiled.memory_analysis()
        seconds = clock(partial(compiled, arrays, cts))
        figures = {"ms": seconds * 1e3, "temp MiB": memory.temp_size_in_bytes / 2**20}
        return Row(PORTABLE, who, what, OK, figures, "forward and gradients")

    yield row(f"{operator.name}[xla]", operator.call, {**case.options, "implementation": "xla"})
    who = f"{operator.name} by autodiff of reference.py"
    try:
        yield row(who, operator.reference, case.options)
    except Exception as error:  # the definition forms whole matrices: it may not fit
        yield Row(PORTABLE, who, what, REFUSED, note=sentence(error))


def _step(function: Callable, names: tuple[str, ...], options: Mapping) -> Callable:
    return lambda arrays, cts: value_and_gradients(function, names, arrays, options)(cts)
