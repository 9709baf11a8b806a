"""Tables and pages of the reports, in Markdown."""

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
