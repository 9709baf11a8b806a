"""`Plan`: how a call of the layer is computed, decided once in the public function and used by every rule."""

from dataclasses import dataclass
from functools import partial

from jax_attn_bwd._core.sharding import types_of
from jax_attn_bwd.ops.dot_product import engine
from jax_attn_bwd.ops.multi_head.projections import attention_operands, project
from jax_attn_bwd.ops.multi_head.spec import Operands, Options


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      attention: how the dense attention inside is computed, by which of its implementations.
    """

    options: Options
    attention: engine.Plan


def plan(operator: str, implementation: str | None, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call; raises where the implementation asked for cannot run it."""
    # what dense attention is handed: its shapes tell what can run it, and how
    heads = types_of(partial(project, options), operands)
    inner = types_of(attention_operands, operands, heads)
    return Plan(options, engine.plan(operator, implementation, options.attention, inner))
