"""`Plan`: how a call of the layer is computed, decided once in the public function and used by every rule.

The layer chooses by what is asked for alone: sizes and the platform are dense attention's to choose by.
"""

from dataclasses import dataclass
from functools import partial

from jax_attn_bwd._core import backend
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd._core.sharding import types_of
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.multi_head.projections import attention_operands, project
from jax_attn_bwd.ops.multi_head.spec import Operands, Options

WAYS = (
    Way("projections", "projections.py", "in front of a way of dense attention, and behind it"),
    Way("appended rows", "appended.py", "`bias_k`, `bias_v`, `add_zero_attn`", "no array of keys is copied"),
    Way("plane of weights", "backward.py", "they are returned or saved: beside the way of dense attention"),
)
RULES: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything static of a call."""

    options: Options  # what is computed
    attention: blockwise.Plan  # how the dense attention inside is computed, by which of its implementations

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        has_plane = self.options.return_weights or self.options.save == "probs"
        return "plane of weights, " * has_plane + self.attention.way


def plan(operator: str, implementation: str | None, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call; raises where the implementation asked for cannot run it."""
    # what dense attention is handed: its shapes tell what can run it, and how
    heads = types_of(partial(project, options), operands)
    inner = types_of(attention_operands, operands, heads)
    around = lambda *attention: Plan(options, blockwise.planned(*attention))
    implementations = blockwise.IMPLEMENTATIONS
    return backend.planned(operator, implementations, implementation, options.attention, inner, around)
