"""What a compiled program sends between devices, and what it computes meanwhile, from its optimised HLO.

The instructions of a scheduled computation stand in the order in which they are issued. A transfer begins at
its `-start` and has to be there at its `-done`; a kernel or a product of matrices between the two hides it.
A transfer without the two is waited for; but a chain of fusions carries one on beside what they compute.
"""

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^ +(?=(?:ROOT )?%?[\w.\-]+ = )", re.M)  # its text may run over lines
_PARTS = re.compile(r"(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)", re.S)
_CALLED = re.compile(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHAIN = re.compile(r'chain_id="(\w+)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NOTES = re.compile(r"\{[^{}]*\}|/\*.*?\*/")  # layouts and comments
_LISTED = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")  # mesh['a'=2,'b'=4] {'b'}
_KERNELS = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__cublas|__cudnn|__triton)')

# how many bytes a device of n sends, as a share of the result
SENT = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
}


class Transfer(NamedTuple):
    """One collective of a program: what each device sends in a run of the program."""

    kind: str
    sent: float  # bytes
    times: int
    hidden: bool  # by a kernel or a product of matrices


class Instruction(NamedTuple):
    """`name = result opcode(operands), attributes`."""

    name: str
    result: str
    opcode: str
    operands: str
    text: str
    is_root: bool = False  # of its computation

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        branches = ",".join(_BRANCHES.findall(self.text))
        return _CALLED.findall(self.text) + [x.strip(" %") for x in branches.split(",") if x]

    @property
    def size(self) -> int:
        """Bytes of its result."""
        return size(self.result)


class Program:
    """The computations of a program's text."""

    def __init__(self, text: str):
        found = _COMPUTATION.findall(text)
        self.entry = next(name for entry, name, _ in found if entry)
        self.computations = {name: list(_instructions(body)) for _, name, body in found}
        self._heavy: dict[str, bool] = {}

    @cached_property
    def transfers(self) -> list[Transfer]:
        """Every collective that a run of the program meets; of branches, all."""
        return list(self._of(self.entry, 1))

    def _of(self, computation: str, times: int) -> Iterator[Transfer]:
        instructions = self.computations[computation]
        places = {x.name: i for i, x in enumerate(instructions)}
        chains: dict[str, tuple[Instruction, list[int]]] = {}
        for place, x in enumerate(instructions):
            kind = x.opcode.removesuffix("-done")
            if kind in SENT:
                start = instructions[places[names(x.operands)[0]]] if kind != x.opcode else x
                between = instructions[places[start.name] + 1 : place]
                sent = x.size * SENT[kind](_group(start))
                yield Transfer(kind, sent, times, any(map(self._is_heavy, between)))
            elif x.opcode == "fusion":
                for inner in self._fused(x):
                    chain = _CHAIN.search(inner.text)
                    chains.setdefault(chain[1] if chain else inner.name, (inner, []))[1].append(place)
            elif x.opcode not in ("reduce", "async-done", "async-update"):
                more = self.trips(x, instructions) if x.opcode == "while" else 1
                for name in x.called:
                    yield from self._of(name, times * more)

        for inner, where in chains.values():
            meanwhile = instructions[where[0] : where[-1] + 1]
            sent = inner.size * SENT[inner.opcode](_group(inner))
            yield Transfer(inner.opcode, sent, times, any(map(self._is_heavy, meanwhile)))

    def _fused(self, fusion: Instruction) -> Iterator[Instruction]:
        """The collectives inside a fusion."""
        for name in fusion.called:
            for x in self.computations[name]:
                if x.opcode in SENT:
                    yield x
                elif x.opcode == "fusion":
                    yield from self._fused(x)

    def trips(self, loop: Instruction, around: list[Instruction]) -> int:
        """How often a loop runs: told, or from its condition `counter < limit` and where it begins."""
        if told := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
            return int(told[1])
        try:
            condition = self.computations[_found(_CONDITION, loop)]
            compare = next(x for x in condition if x.opcode == "compare" and "direction=LT" in x.text)
            counter, limit = [_named(condition, name) for name in names(compare.operands)]
            number = int(_found(_INDEX, counter))
            (state,) = names(loop.operands)
            first = _named(around, names(_named(around, state).operands)[number])
            while first.opcode in ("copy", "bitcast"):
                first = _named(around, *names(first.operands))
            return int(limit.operands) - int(first.operands)
        except (LookupError, StopIteration, ValueError) as error:
            raise RuntimeError(f"a loop does not tell how often it runs:\n{loop.text[:300]}") from error

    def _is_heavy(self, x: Instruction) -> bool:
        if x.opcode in ("dot", "convolution") or _KERNELS.search(x.text):
            return True
        for name in x.called:
            if name not in self._heavy:
                self._heavy[name] = any(map(self._is_heavy, self.computations[name]))
        return any(self._heavy[name] for name in x.called)


def _instructions(body: str) -> Iterator[Instruction]:
    for text in _INSTRUCTION.split(body):
        if found := _PARTS.match(text):
            root, name, result, opcode, operands = found.groups()
            yield Instruction(name, result, opcode, operands, text, root is not None)


def size(types: str) -> int:
    """Bytes of arrays of these types, `f32[8,16]{1,0}` or a tuple of such."""
    return sum(
        math.prod(int(n) for n in shape.split(",") if n) * max(int(bits or 8), 8) // 8
        for _, bits, shape in _ARRAY.findall(_NOTES.sub("", types))
    )


def names(operands: str) -> list[str]:
    """The names of these operands."""
    return [x.split()[-1].lstrip("%") for x in _NOTES.sub("", operands).split(",") if x.strip()]


def _found(pattern: re.Pattern, x: Instruction) -> str:
    found = pattern.search(x.text)
    if found is None:
        raise LookupError(pattern.pattern)
    return found[1]


def _named(instructions: list[Instruction], name: str) -> Instruction:
    return next(x for x in instructions if x.name == name)


def _group(x: Instruction) -> int:
    """The number of devices that take part."""
    if x.opcode.startswith("collective-permute"):
        return 2
    if named := _NAMED.search(x.text):
        sizes = dict(axis.split("=") for axis in named[1].split(","))
        return math.prod(int(sizes[axis]) for axis in named[2].split(","))
    if listed := _LISTED.search(x.text):
        return int(listed[2]) if listed[2] else listed[1].count(",") + 1
    raise RuntimeError(f"the groups of a collective have another form:\n{x.text[:300]}")
