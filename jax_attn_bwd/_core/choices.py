"""What a choice is made of: ways of computing, and named rules that choose among them.

Each operator's `plan.py` opens with both as tables, `WAYS` and `RULES`. A plan asks a rule by `holds`, which
tells whether its condition is true here and nobody has switched it off, and notes its name for `explain` and
for the race that measures what each rule is worth. The rules of `fusion.py` and `products.py` are asked while
a call is traced; those of a plan before that.

Rules are switched off by name: `without(...)` for tests and the race, or the environment variable
`JAX_ATTN_BWD_WITHOUT`, names with commas between them. What was traced before stays as it is.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

WITHOUT = "JAX_ATTN_BWD_WITHOUT"  # environment variable: names of rules, with commas between them

T = TypeVar("T")
Reason = Literal["speed", "compile time", "memory", "accuracy", "crash"]


class Way(NamedTuple):
    """A way of computing, as one row of a table."""

    name: str  # as `explain` calls it
    file: str  # of the operator's folder
    taken: str  # where: platform and size
    gain: str = ""  # beside the way that would be taken otherwise
    measured: str = ""  # the file of tests/bench/results, or the commit, that has the figure


_known: dict[str, "Rule"] = {}


@dataclass(frozen=True)
class Rule:
    """A rule that changes how a call is computed, never what."""

    name: str  # by which it is switched off
    when: str  # its condition, in words
    gain: str  # what it gains and the program that showed it, or what goes wrong without it
    reason: Reason = "speed"
    until: str = ""  # the JAX that needs it no longer; "" = none is known

    def __post_init__(self) -> None:
        _known[self.name] = self  # a module that is loaded again replaces its own

    def holds(self, condition: Any = True) -> bool:
        """Tells whether `condition` is true and the rule is not switched off, and notes that it held."""
        if self.name in _switched_off() or not condition:
            return False
        if (names := _noted.get()) is not None and self.name not in names:
            names.append(self.name)
        return True


_noted: contextvars.ContextVar[Any] = contextvars.ContextVar("noted", default=None)  # list of names, or None
_off: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("off", default=frozenset())


@contextlib.contextmanager
def during(variable: contextvars.ContextVar[T], value: T) -> Iterator[T]:
    """Gives a variable that value inside."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def noted() -> contextlib.AbstractContextManager[list[str]]:
    """Collects the names of the rules that hold for what is planned and traced inside."""
    return during(_noted, [])


def without(*names: str) -> contextlib.AbstractContextManager[Any]:
    """Switches rules off for what is planned and traced inside; programs that were traced before stay.

    Raises:
      ValueError: there is no rule of that name.
    """
    return during(_off, _off.get() | _names(names, "without"))


def _switched_off() -> frozenset[str]:
    said = os.environ.get(WITHOUT)
    return _off.get() | _names(said.split(","), WITHOUT) if said else _off.get()


def _names(names: Any, where: str) -> frozenset[str]:
    found = frozenset(name.strip() for name in names)
    if unknown := sorted(found - _known.keys()):
        raise ValueError(f"{where}: there is no rule {unknown[0]!r}; the rules are {tuple(sorted(_known))}")
    return found


def known() -> tuple[Rule, ...]:
    """Returns all rules of the modules that are imported."""
    return tuple(_known.values())


class Choice(NamedTuple):
    """How an implementation computes a call: one of `explain(...).choices`."""

    implementation: str
    way: str
    rules: tuple[str, ...]

    def __str__(self) -> str:
        """Tells it in one line."""
        return self.way + (f"; rules: {', '.join(self.rules)}" if self.rules else "")
