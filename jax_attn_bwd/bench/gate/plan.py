"""The steps of the gate, the most important first."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from jax_attn_bwd import ops
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.bench.gate import cases, correctness, peers, timing
from jax_attn_bwd.bench.gate.steps import (
    CORRECTNESS,
    POISON,
    PORTABLE,
    PROBE,
    REPEAT,
    TIME,
    Step,
)  # fmt: skip

ATTENTION, SOFTMAX = "dot_product_attention", "scaled_masked_softmax"
PROBED, FIRST, TIMED, LAST = range(4)  # the phases


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
    found = [*_probed(proven, tiny), *_first(proven, tiny), *_timed(proven, tiny)]
    return [*found, *_last(proven, tiny)]


def _compare(
    operator: Operator,
    name: str,
    of: Sequence[Case],
    dtype: str,
    phase: int,
    direction: str = "backward",
) -> Iterator[Step]:
    """Outputs and gradients; where the kernels of the gradients hang, the outputs alone."""
    who = correctness.subject(operator, name)
    step = partial(Step, CORRECTNESS, who, seconds=90, phase=phase)
    for case in of:
        what, run = (
            f"{case.name} {dtype}",
            partial(correctness.compare, operator, name, case, dtype),
        )
        if name == "xla":
            yield step(what, _listed(run))
            continue
        kernels = cases.needs(operator, direction if "bias" not in case.name else "bias")
        alone = ", forward alone"
        forward = step(
            what + alone,
            _listed(partial(run, wanted=(), suffix=alone)),
            needs=cases.needs(operator, "forward"),
        )
        yield step(what, _listed(run), needs=kernels, instead=forward)


def _any_order(operator: Operator) -> Operator:
    return replace(operator, call=partial(operator.call, deterministic=False))


def _probed(proven: Sequence[tuple[Operator, str]], tiny: bool) -> Iterator[Step]:
    """Each kernel by itself, so that one that hangs or is wrong is known by name."""
    for operator, name in proven:
        for probe in cases.probes(operator, tiny):
            called = _any_order(operator) if probe.any_order else operator
            suffix = f" {probe.name}"
            run = partial(
                correctness.compare,
                called,
                name,
                probe.case,
                "bfloat16",
                PROBE,
                probe.wanted,
                suffix,
            )
            what = f"{probe.case.name} bfloat16{suffix}"
            who = correctness.subject(operator, name)
            yield Step(PROBE, who, what, _listed(run), 45, PROBED, needs=probe.needs)


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
        needed = () if name == "xla" else cases.needs(operator)
        compared = [case for case in large if "repeat" not in case.tags or "large" in case.tags]
        made = [*_compare(operator, name, own[:3], "bfloat16", FIRST)]
        made += _compare(operator, name, compared[:4], "bfloat16", FIRST)
        if operator.name == ATTENTION:
            fused = _any_order(operator), name, cases.any_order(tiny), "bfloat16", FIRST
            made += _compare(*fused, "any order")
        for poisoned in cases.poisoned(operator, tiny):
            run = partial(correctness.poison, operator, name, poisoned, "bfloat16")
            what = f"{poisoned.case.name} bfloat16"
            made.append(Step(POISON, who, what, _listed(run), 90, FIRST, needs=needed))
        for case in large:
            if "repeat" in case.tags:
                run = partial(correctness.repeat, operator, name, case, "bfloat16")
                what = f"{case.name} bfloat16"
                made.append(Step(REPEAT, who, what, _listed(run), 90, FIRST, needs=needed))
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
    attention = names.get(ATTENTION, [])
    for contender in attention:
        for work in works:
            run = partial(timing.attention, work, contender)
            kernels = _kernels_of(work) if contender != "xla" else ()
            who = f"{ATTENTION}[{contender}]"
            yield timed(who, work.name, _listed(run), 60, needs=kernels)
    contenders = tuple(dict.fromkeys([*names.get(SOFTMAX, []), "xla"]))
    size = 2**12 if tiny else 2**27
    widths = (16, 128) if tiny else (1024, 8192, 131072)
    for width, dtype in itertools.product(widths, ("float32", "bfloat16")):

        def softmax(case, names, width=width, dtype=dtype, **more):
            made = timing.softmax_contenders(names)
            run = partial(timing.softmax, width, dtype, made, size)
            return timed("softmax", case, _listed(run), 60, **more)

        others = softmax(f"{width} {dtype}, without kernels", ("xla",))
        kernels = ("softmax forward", "softmax backward") if contenders[1:] else ()
        yield softmax(f"{width} {dtype}", contenders, needs=kernels, instead=others)
    others = [*peers.JAX_PEERS, *(["xla"] if "xla" not in attention else [])]
    for contender, work in itertools.product(others, works):
        if not work.deterministic and contender not in attention:
            continue  # a peer has no such choice
        run = partial(timing.attention, work, contender)
        who = f"{ATTENTION}[{contender}]" if contender == "xla" else contender
        yield timed(who, work.name, _listed(run), 60)
    run = partial(timing.torch_attention, tuple(w for w in works if w.deterministic))
    yield timed("torch SDPA", "every workload", _listed(run), 90, library="torch")
    for operator in ops.discover():
        case = cases.bench(operator, tiny)
        run = partial(timing.portable, operator, case, "bfloat16")
        yield Step(PORTABLE, f"{operator.name}[xla]", case.name, _listed(run), 90, TIMED, True)


def _kernels_of(work: timing.Attention) -> tuple[str, ...]:
    """As `cases.needs`."""
    backward = "backward" if work.deterministic else "any order"
    return (
        "attention forward",
        *(["attention " + backward] if work.direction == "backward" else []),
    )
