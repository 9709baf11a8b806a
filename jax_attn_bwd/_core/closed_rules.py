"""The rules of an operation that takes the constants of its program as arguments."""

from dataclasses import dataclass

import jax

from jax_attn_bwd._core.mapped_rules import Rules


@dataclass(frozen=True)
class Closed:
    """`of`, with the array constants of its program behind its `n` arguments; they have no derivatives."""

    of: Rules
    n: int

    def out(self, args):
        given, constants = args[: self.n], args[self.n :]
        program = jax.make_jaxpr(lambda *args: self.of.out(args))(*given)
        return jax.core.eval_jaxpr(program.jaxpr, constants, *given)

    def forward(self, moves, args):
        outputs, residuals = self.of.forward(moves[: self.n], args[: self.n])
        return outputs, (residuals, [None] * (len(args) - self.n))

    def backward(self, residuals, cotangents):
        residuals, nothing = residuals
        return [*self.of.backward(residuals, cotangents), *nothing]

    def tangent(self, residuals, tangents):
        return self.of.tangent(residuals[0], tangents[: self.n])
