"""Of jaxprs, what several readers of them ask."""

from typing import Any


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a constant that is written in it, `operand.val`."""
    from jax.extend.core import Literal  # a tenth of the time of importing this package, if at its top

    return isinstance(operand, Literal)
