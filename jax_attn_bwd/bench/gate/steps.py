"""The two records of the gate: a step to run, and a row of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CORRECTNESS, POISON, REPEAT, TIME, PORTABLE = "correctness", "poison", "repeat", "time", "portable"
PROOFS = (CORRECTNESS, POISON, REPEAT)
OK, FAILED, REFUSED, NOT_REACHED = "ok", "failed", "refused", "not reached"


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
      kind: one of the kinds above.
      subject: what was run: an operator with its implementation, or a peer.
      case: on what.
      status: "ok", "failed", "refused" (the implementation says that it cannot), or "not reached".
      figures: numbers by name.
      note: the error or the reason.
    """

    kind: str
    subject: str
    case: str
    status: str = OK
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Step:
    """Something to run in a child process.

    Attributes:
      kind, subject, case: of the row that tells of its failure; together they name the step.
      run: returns rows.
      seconds: without an answer for so long it counts as hung.
      phase: index into `run.PHASES`.
      alone: nothing else may run meanwhile: it is timed.
      library: steps of different libraries never share a process.
    """

    kind: str
    subject: str
    case: str
    run: Callable[[], Sequence[Row]]
    seconds: float = 60.0
    phase: int = 0
    alone: bool = False
    library: str = "jax"

    @property
    def name(self) -> str:
        """Unique within a plan."""
        return f"{self.kind} {self.subject} {self.case}"

    def row(self, status: str, note: str) -> Row:
        """The row of a step that has no results."""
        return Row(self.kind, self.subject, self.case, status, note=note)
