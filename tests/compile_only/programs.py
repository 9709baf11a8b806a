"""What is compiled: the operators' cases in both directions, and the record of a compiled program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from cases import discover, shapes

from compile_only import devices
from jax_attn_bwd._core import mosaic_gpu
from jax_attn_bwd._core.cases import Case, Operator, value_and_gradients

DIRECTIONS = ("forward", "gradients")


@dataclass(frozen=True)
class Program:
    """A case in one direction, compiled for one chip.

    Attributes:
      expected: kernel launches of the program before it was compiled.
      temporary_bytes: what the compiled program allocates beside arguments and results.
      kernels: `gpu.Kernel`s or `tpu.Kernel`s.
      error: why it did not compile.
    """

    target: str
    operator: str
    implementation: str
    case: str
    direction: str
    expected: int = 0
    temporary_bytes: int | None = None
    kernels: list[Any] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        return f"{self.operator}[{self.implementation}] {self.case!r} {self.direction} for {self.target}"


def did_not_compile(programs: Sequence[Program]) -> list[str]:
    """The section of a page that tells of them; none if all did."""
    lines = [
        f"* {p.operator}[{p.implementation}] {p.case} {p.direction}, {p.target}: {p.error}"
        for p in programs
        if p.error
    ]
    return ["## Did not compile", "\n".join(lines)] if lines else []


def registered(implementation: str, names: tuple[str, ...] = ()) -> tuple[Operator, ...]:
    """The operators that have `implementation`; of those in `names`, if any are named."""
    return tuple(
        operator
        for operator in discover()
        if (not names or operator.name in names)
        and implementation in {i.name for i in operator.implementations}
    )


def cases(operator: Operator, implementation: str, target: str) -> tuple[Case, ...]:
    """The cases of `operator` that are compiled; a few of them stand for all of the portable path.

    Kernels for NVIDIA GPUs are Hopper's; those that run on others have cases that name them.
    """
    if implementation == mosaic_gpu.NAME and target not in devices.HOPPER:
        return tuple(operator.tagged(target))
    return tuple(operator.tagged("compile", target if target in devices.TPU else implementation))


def directions(operator: Operator, implementation: str, target: str) -> tuple[str, ...]:
    """What is compiled for a chip: on a TPU the gradients, whose program holds the forward's kernels, and
    elsewhere too if the forward has none.
    """
    by_name = {i.name: i for i in operator.implementations}
    portable = implementation != "xla" and by_name[implementation].forward is by_name["xla"].forward
    return DIRECTIONS[1:] if target in devices.TPU or portable else DIRECTIONS


def function(
    operator: Operator, case: Case, direction: str, implementation: str
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """(what is compiled, the types of its arguments).

    "gradients" returns outputs and gradients for given cotangents, as a training step does.
    """
    given, options = shapes(case), {**case.options, "implementation": implementation}
    names, types = tuple(given), tuple(given.values())

    def forward(*arrays):
        return operator.call(**dict(zip(names, arrays, strict=True)), **options)

    if direction == "forward":
        return forward, types
    portable = {**options, "implementation": "xla"}  # it has the same outputs, and runs anywhere
    cotangents = jax.eval_shape(lambda arrays: operator.call(**arrays, **portable), given)

    def gradients(*arrays_and_cotangents):
        arrays = dict(zip(names, arrays_and_cotangents[: len(names)], strict=True))
        run = value_and_gradients(operator.call, operator.differentiated(arrays), arrays, options)
        return run(arrays_and_cotangents[len(names) :])

    return gradients, (*types, *cotangents)
