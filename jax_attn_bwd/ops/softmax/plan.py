"""`Plan`: how a call is computed, decided once in the public function and used by every rule.

Every row is computed whole: the maximum, the exponentials, their sum and the quotient, which XLA fuses with
what stands around them. What is left to choose is the form of what hides entries.
"""

from dataclasses import dataclass

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd.ops.softmax.spec import Operands, Options

WAYS = (Way("whole rows", "forward.py", "everywhere"),)

HIDDEN_BY_A_SUM = Rule(
    "softmax_hidden_by_a_sum",
    "one CPU, a scale that is an array, something hidden, neither bias nor sink",
    "Hidden entries get -inf by a sum: a second select would part the library loop of XLA:CPU, and steps "
    "take 1.06 to 1.25 times as long.",
)
RULES = (HIDDEN_BY_A_SUM,)


@dataclass(frozen=True)
class Plan:
    """Everything static of a call."""

    options: Options  # what is computed
    implementation: str  # the name of the one that runs
    hidden_by_a_sum: bool = False  # -inf is added to what is hidden, instead of being selected

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        return WAYS[0].name


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call whose implementation is chosen."""
    _, scale, mask, bias, sink = operands
    shares_scale = scale is not None and scale.shape[options.axis] == 1
    is_hidden = (mask is not None or options.hides) and bias is None and sink is None
    by_a_sum = HIDDEN_BY_A_SUM.holds(targets.is_one_cpu() and shares_scale and is_hidden)
    return Plan(options, implementation, by_a_sum)
