"""The two records of the gate: a step to run, and a row of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PROBE, CORRECTNESS, POISON, REPEAT = "probe", "correctness", "poison", "repeat"
TIME, PORTABLE = "time", "portable"
PROOFS = (PROBE, CORRECTNESS, POISON, REPEAT)
OK, FAILED, REFUSED, NOT_REACHED = "ok", "failed", "refused", "not reached"
SKIPPED = "skipped: hung"


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
      kind: one of the kinds above.
      subject: what was run: an operator with its implementation, or a peer.
      case: on what.
      status: "ok", "failed", "refused" (the implementation says that it cannot), "not reached", or
        "skipped: hung" (a kernel that it needs was lost before).
      figures: numbers by name.
      note: the error or the reason.
      step: the name of the step that found it.
    """

    kind: str
    subject: str
    case: str
    status: str = OK
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""
    step: str = ""


@dataclass(frozen=True)
class Step:
    """Something to run in a child process.

    Attributes:
      kind, subject, case: of the row that tells of its failure; together they name the step.
      run: returns rows.
      seconds: without an answer for so long it counts as hung; a launch has less, `run.LAUNCH_SECONDS`.
      phase: index into `run.PHASES`.
      alone: nothing else may run meanwhile: it is timed.
      library: steps of different libraries never share a process.
      needs: names of the kernels that it launches, of which the last is its own matter: the loss of a child
        counts against that one.
      instead: what is run when the step itself is not, since a kernel that it needs hangs.
    """

    kind: str
    subject: str
    case: str
    run: Callable[[], Sequence[Row]]
    seconds: float = 60.0
    phase: int = 0
    alone: bool = False
    library: str = "jax"
    needs: tuple[str, ...] = ()
    instead: "Step | None" = None

    @property
    def name(self) -> str:
        """Unique within a plan."""
        return f"{self.kind} {self.subject} {self.case}"

    def row(self, status: str, note: str) -> Row:
        """The row of a step that has no results."""
        return Row(self.kind, self.subject, self.case, status, note=note, step=self.name)
