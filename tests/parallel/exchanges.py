"""What a compiled program exchanges, and where."""

import re

from contract.test_sharding import COLLECTIVE

_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BODY = re.compile(r"while\(.*body=%?([\w.\-]+)")


def loops_and_collectives_in_them(compiled) -> tuple[int, int]:
    """(number of loops, number of collectives that stand in one, however deep)."""
    text = compiled.as_text()
    found = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    computations, bodies, reached = dict(found), _BODY.findall(text), set()
    waiting = list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += _CALLED.findall(computations[name])
    return len(bodies), sum(len(COLLECTIVE.findall(computations[name])) for name in reached)


def sent_rows(compiled) -> int:
    """Rows that all devices send by permutes."""
    found = re.findall(
        r"f64\[(\d+),.*? collective-permute.*source_target_pairs=\{(\S*?)\}\}", compiled.as_text()
    )
    return sum(int(rows) * pairs.count("{") for rows, pairs in found)
