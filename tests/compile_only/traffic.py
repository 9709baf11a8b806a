"""What a compiled program reads and writes, and how many kernels it launches, from its optimised HLO.

Every kernel counts what it must read and write of the device's memory: its operands once each and its
results, and of an array that it slices, updates in place or gathers from, that part alone, at most all of it
once. On a TPU what lies in the memory on the chip does not count. What a cache saves and what a product reads
again the program does not tell, so this is not a time. Loops count as often as they run. Of branches the
dearest counts, unless it is told how often each is taken: the program does not tell.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_only.schedule import Instruction, Program, names, size

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "async-update", "domain", "add-dependency",
}  # fmt: skip
_ON_THE_CHIP = re.compile(r"\[[\d,]*\](?=\{[^{}]*S\(1\)[^{}]*\})")  # a TPU's, told by the layout
_WORKSPACE = re.compile(r'custom_call_target="__(cublas|cudnn|triton)')
_SCRATCH = re.compile(r"\bs8\[[\d,]*\](\{[^}]*\})?")
_ELEMENT_BY_ELEMENT = ("bitcast", "convert", "copy", "reshape", "transpose")
_PART = ("dynamic-slice", "slice", "gather")
_SORT = 4  # passes over what is sorted, 8 bits of the keys in each


@dataclass(frozen=True)
class Traffic:
    """Of one run of a program.

    Attributes:
      bytes: read and written.
      launches: kernels, library calls and copies.
      by_kernel: {name of an instruction: its bytes, in all runs}.
    """

    bytes: int
    launches: int
    by_kernel: dict[str, int]


def of(text: str, branches: Sequence[float] = ()) -> Traffic:
    """The traffic of the program `text`; conditionals with as many `branches` take each that often."""
    reader = _Reader(Program(_ON_THE_CHIP.sub("[0]", text)), tuple(branches))
    total: dict[str, float] = {}
    launches = 0.0
    for x, number, times in reader.kernels(reader.program.entry, 1.0):
        total[x.name] = total.get(x.name, 0) + number * times
        launches += times
    return Traffic(round(sum(total.values())), round(launches), {name: round(n) for name, n in total.items()})


class _Reader:
    def __init__(self, program: Program, branches: tuple[float, ...]):
        self.program, self.branches = program, branches

    def kernels(self, computation: str, times: float) -> Iterator[tuple[Instruction, int, float]]:
        """(instruction, bytes of one run, number of runs) of all that runs in a computation."""
        instructions = self.program.computations[computation]
        known = {x.name: x for x in instructions}
        for x in instructions:
            opcode = x.opcode
            if opcode == "while":
                runs = self.program.trips(x, instructions)
                for name in x.called:
                    yield from self.kernels(name, times * runs)
            elif opcode == "conditional" and len(x.called) == len(self.branches):
                for name, share in zip(x.called, self.branches, strict=True):
                    yield from self.kernels(name, times * share)
            elif opcode == "conditional":
                sides = [list(self.kernels(name, times)) for name in x.called]
                yield from max(sides, key=lambda side: sum(number * runs for _, number, runs in side))
            elif opcode in ("call", "async-start"):
                for name in x.called:
                    yield from self.kernels(name, times)
            elif opcode not in _FREE and not opcode.endswith("-done"):
                yield x, self._moved(x, known), times * (_SORT if self._sorts(x) else 1)

    def _sorts(self, x: Instruction) -> bool:
        body = self.program.computations[x.called[0]] if x.opcode == "fusion" else [x]
        return any(y.opcode == "sort" for y in body)

    def _moved(self, x: Instruction, known: dict[str, Instruction]) -> int:
        """The bytes that one kernel reads and writes."""
        operands = [known[name] for name in names(x.operands) if name in known]
        if x.opcode in ("fusion", "fusion-start"):
            body = self.program.computations[x.called[0]]
            number = {i: y for y in body if y.opcode == "parameter" for i in [int(y.operands)]}
            read = sum(self._read(number[i], body) for i in range(len(operands)))
            return read + self._written(x, body)
        if x.opcode == "dynamic-update-slice":
            return 2 * operands[1].size
        if x.opcode == "scatter":
            return operands[-1].size + 2 * min(operands[-1].size, x.size) + operands[1].size
        if x.opcode in _PART:
            return 2 * x.size + sum(y.size for y in operands[1:])
        result = x.size
        if _WORKSPACE.search(x.text):
            result = size(_SCRATCH.sub("", x.result))
        return result + sum(y.size for y in operands)

    def _read(self, x: Instruction, body: list[Instruction]) -> int:
        """What a fusion reads of an operand, or of what it makes of one element by element: all, or parts."""
        parts = 0
        for user in (y for y in body if x.name in names(y.operands)):
            first, *others = names(user.operands)
            if user.opcode in _ELEMENT_BY_ELEMENT:
                parts += self._read(user, body) * x.size // max(user.size, 1)
            elif first == x.name and x.name not in others and user.opcode in _PART:
                parts += min(self._read(user, body), user.size) if user.opcode == "slice" else user.size
            elif first == x.name and user.opcode in ("dynamic-update-slice", "scatter"):
                parts += 0
            elif user.opcode == "fusion":  # on a TPU they nest
                inner = self.program.computations[user.called[0]]
                given = {int(y.operands): y for y in inner if y.opcode == "parameter"}
                used = [number for number, name in enumerate(names(user.operands)) if name == x.name]
                parts += sum(self._read(given[number], inner) for number in used)
            else:
                return x.size
        return x.size if x.is_root else min(parts, x.size)

    def _written(self, fusion: Instruction, body: list[Instruction]) -> int:
        """What a fusion writes: its results, or the parts that it updates."""
        known = {y.name: y for y in body}
        root = next(y for y in body if y.is_root)
        roots = [known[name] for name in names(root.operands)] if root.opcode == "tuple" else [root]
        total = 0
        for found in roots:
            while found.opcode == "bitcast" and names(found.operands)[0] in known:
                found = known[names(found.operands)[0]]
            if found.opcode == "dynamic-update-slice":
                total += known[names(found.operands)[1]].size
            elif found.opcode == "scatter":
                total += 2 * min(known[names(found.operands)[-1]].size, found.size)
            else:
                total += found.size
        return total
