"""Tables and pages of the reports, in Markdown."""

import re
from collections.abc import Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Makes a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    shown = (["" if x is None else str(x).replace("|", "\\|") for x in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def page(*pieces: str) -> str:
    """Joins paragraphs, headings and tables to one page."""
    return "\n\n".join(pieces) + "\n"


def merged(old: str, new: str, operators: Sequence[str]) -> str:
    """Puts the rows of `operators`, of which alone `new` tells, in the place of theirs in `old`."""
    fresh = {part.partition("\n")[0]: part for part in _sections(new)}
    parts = []
    for part in _sections(old):
        heading, present = part.partition("\n")[0], rows(part)
        more = rows(fresh.pop(heading, ""))
        again = {cells(row)[:4] for row in more}
        kept = [row for row in present if cells(row)[0] not in operators and cells(row)[:4] not in again]
        parts.append(part.replace("\n".join(present), "\n".join([*kept, *more])) if present else part)
    return page(*(part.rstrip() for part in (*parts, *fresh.values())))


def _sections(page: str) -> list[str]:
    return [part for part in re.split(r"^(?=## )", page, flags=re.MULTILINE) if part]


def rows(section: str) -> list[str]:
    """The rows of a section's table."""
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return lines[2:]  # below the names and the rule


def cells(row: str) -> tuple[str, ...]:
    """The cells of a row."""
    return tuple(row.strip("| ").split(" | "))
