"""Progress and tables: with `rich` where it is installed, as plain text where it is not."""

import importlib.util
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_RICH = importlib.util.find_spec("rich") is not None


def progress(
    items: Iterable[T], total: int | None, description: str, doing: Callable[[T], str] = lambda item: ""
) -> Iterator[T]:
    """Yields `items`, showing how far it has come, what runs, and how long it will take.

    On a terminal it is a bar, else a line every ten seconds. `doing` says of the item at hand what runs.
    """
    if not _RICH or not sys.stderr.isatty():
        yield from _told(items, total, description, doing)
        return
    from rich import progress as bars
    from rich.console import Console

    left = bars.TimeRemainingColumn(elapsed_when_finished=True)
    columns = (
        "{task.description}",
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        left,
        "{task.fields[doing]}",
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total, doing="")
        for item in items:
            bar.update(task, doing=doing(item))
            yield item
            bar.advance(task)


def _told(items: Iterable[T], total: int | None, description: str, doing: Callable[[T], str]) -> Iterator[T]:
    started = told = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - told >= 10:
            of = left = ""
            if total is not None:
                of = f" of {total}"
                left = f", about {(total - done) * (now - started) / max(done, 1):.0f} s to go"
            runs = f": {what}" if (what := doing(item)) else ""
            line = f"{description}: {done}{of} after {now - started:.0f} s{left}{runs}"
            print(line, file=sys.stderr, flush=True)
            told = now
        yield item


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table; numbers are aligned to the right."""
    cells = [["" if x is None else str(x) for x in row] for row in rows]
    # plain text
    if not _RICH:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        print(title)
        for row in [list(columns), *cells]:
            print("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip())
        return
    # a table of `rich`, as wide as the terminal, or as a file may be
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        numeric = cells and all(_is_number(row[i]) for row in cells)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(drawn)


_said = [-10.0]  # when the last line of `status` was written


def status(text: str, share: float | None = None) -> None:
    """Writes what is done now: one line that is written over on a terminal, else a line every ten seconds.

    `share` is how much of it is done, 0 to 1, drawn as a bar.
    """
    now = time.monotonic()
    if share is not None:
        text = f"[{'#' * round(20 * share):.<20}] {text}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
    elif text and now - _said[0] >= 10:
        print(text, file=sys.stderr, flush=True)
        _said[0] = now


def columns(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Returns a title and rows in columns below it, the last one wrapped at the width of the terminal."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    width = max(shutil.get_terminal_size((120, 24)).columns, 60)
    lines = [title]
    for *cells, last in rows:
        head = "".join(f"  {cell:<{w}}" for cell, w in zip(cells, widths, strict=True)) + "  "
        told = textwrap.wrap(last, width - len(head), break_on_hyphens=False) or [""]
        lines += [(head + told[0]).rstrip(), *(" " * len(head) + line for line in told[1:])]
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(".", "").replace("-", "").replace("e", "").replace("+", "").isdigit()
