"""The steps of the gate, the most important first."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.bench.gate import cases, correctness, peers, timing
from jax_attn_bwd.bench.gate.steps import CORRECTNESS, POISON, PORTABLE, REPEAT, TIME, Step

SOFTMAX = "scaled_masked_softmax"
FIRST, TIMED, LAST = range(3)  # the phases


def kernels(platform: str) -> list[tuple[Operator, str]]:
    """(operator, implementation) of what the gate proves: the kernels of `platform`.

    A CPU has none; there the portable path takes their place, so that the gate itself can be tried.
    """
    return [
        (operator, i.name)
        for operator in ops.discover()
        for i in operator.implementations
        if (i.name == "xla" if platform == "cpu" else i.platform == platform)
    ]


def dtypes(operator: Operator, tiny: bool) -> tuple[str, ...]:
    """What the kernels of an operator are proven in."""
    if tiny:
        return ("bfloat16",)
    return ("bfloat16", "float16", *(("float32",) if operator.name == SOFTMAX else ()))


def steps(platform: str, tiny: bool) -> list[Step]:
    """Every step, in order."""
    proven = kernels(platform)
    found = [*_first(proven, tiny), *_timed(proven, tiny)]
    return [*found, *_last(proven, tiny)]


def _compare(
    operator: Operator, name: str, of: Sequence[Case], dtype: str, phase: int
) -> Iterator[Step]:
    for case in of:
        run = partial(correctness.compare, operator, name, case, dtype)
        who = correctness.subject(operator, name)
        yield Step(CORRECTNESS, who, f"{case.name} {dtype}", _listed(run), 90, phase)


def _listed(run):
    return lambda: list(run())


def _first(proven: Sequence[tuple[Operator, str]], tiny: bool) -> Iterator[Step]:
    """Small cases, then many tiles, poison and repeats, in bfloat16; then the other dtypes.

    Operators take turns, so that a slow one does not hold back the next.
    """
    rounds: list[list[Step]] = []
    for operator, name in proven:
        who = correctness.subject(operator, name)
        own = tuple(operator.tagged("check"))
        large = cases.large(operator, tiny)
        compared = [case for case in large if "repeat" not in case.tags or "large" in case.tags]
        made = [*_compare(operator, name, own[:3], "bfloat16", FIRST)]
        made += _compare(operator, name, compared[:4], "bfloat16", FIRST)
        for poisoned in cases.poisoned(operator, tiny):
            run = partial(correctness.poison, operator, name, poisoned, "bfloat16")
            made.append(Step(POISON, who, f"{poisoned.case.name} bfloat16", _listed(run), 90))
        for case in large:
            if "repeat" in case.tags:
                run = partial(correctness.repeat, operator, name, case, "bfloat16")
                made.append(Step(REPEAT, who, f"{case.name} bfloat16", _listed(run), 90))
        made += _compare(operator, name, own[3:], "bfloat16", FIRST)
        made += _compare(operator, name, compared[4:], "bfloat16", FIRST)
        for dtype in dtypes(operator, tiny)[1:]:
            made += _compare(operator, name, [*compared[:2], *own], dtype, FIRST)
        rounds.append(made)
    for turn in itertools.zip_longest(*rounds):
        yield from (step for step in turn if step is not None)


def _last(proven: Sequence[tuple[Operator, str]], tiny: bool) -> Iterator[Step]:
    """Every other named case of the kernels, then the portable path on the same device."""
    for operator, name in proven:
        own = [*operator.tagged("ci", "edge", "second")]
        rest = [case for case in own if "check" not in case.tags]
        yield from _compare(operator, name, rest[:2] if tiny else rest, "bfloat16", LAST)
    for operator in ops.discover():
        if (operator, "xla") not in proven:
            checked = tuple(operator.tagged("check"))
            yield from _compare(operator, "xla", checked, "bfloat16", LAST)


def _timed(proven: Sequence[tuple[Operator, str]], tiny: bool) -> Iterator[Step]:
    """Our kernels in every workload, then the peers in the same order, then the portable paths."""
    timed = partial(Step, TIME, phase=TIMED, alone=True)
    works = timing.workloads(tiny)
    names = {operator.name: [n for o, n in proven if o is operator] for operator, _ in proven}
    attention = names.get("dot_product_attention", [])
    for contender in attention:
        for work in works:
            run = partial(timing.attention, work, contender)
            yield timed(f"dot_product_attention[{contender}]", work.name, _listed(run), 60)
    contenders = tuple(dict.fromkeys([*names.get(SOFTMAX, []), "xla"]))
    size = 2**12 if tiny else 2**27
    widths = (16, 128) if tiny else (1024, 8192, 131072)
    for width, dtype in itertools.product(widths, ("float32", "bfloat16")):
        made = timing.softmax_contenders(contenders)
        run = partial(timing.softmax, width, dtype, made, size)
        yield timed("softmax", f"{width} {dtype}", _listed(run), 60)
    others = [*peers.JAX_PEERS, *(["xla"] if "xla" not in attention else [])]
    for contender, work in itertools.product(others, works):
        if not work.deterministic and contender not in attention:
            continue  # a peer has no such choice
        run = partial(timing.attention, work, contender)
        who = f"dot_product_attention[{contender}]" if contender == "xla" else contender
        yield timed(who, work.name, _listed(run), 60)
    run = partial(timing.torch_attention, tuple(w for w in works if w.deterministic))
    yield timed("torch SDPA", "every workload", _listed(run), 90, library="torch")
    for operator in ops.discover():
        case = cases.bench(operator, tiny)
        run = partial(timing.portable, operator, case, "bfloat16")
        yield Step(PORTABLE, f"{operator.name}[xla]", case.name, _listed(run), 90, TIMED, True)
