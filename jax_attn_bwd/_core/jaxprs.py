"""Of jaxprs, what several readers of them ask."""

from typing import Any


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a constant that is written in it, `operand.val`."""
    from jax.extend.core import Literal  # a tenth of the time of importing this package, if at its top

    return isinstance(operand, Literal)


def scan_counts(equation: Any) -> tuple[int, int, int]:
    """How many operands of a scan are constants, are carried, and are taken entry by entry."""
    if "num_consts" in equation.params:  # JAX before 0.12
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        return consts, carry, len(equation.invars) - consts - carry
    consts, carry, xs = map(len, equation.params["ft_in"].unpack())
    return consts, carry, xs
