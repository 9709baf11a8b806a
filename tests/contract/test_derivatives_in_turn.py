"""One jitted function differentiated by these operands and by those: no derivative is taken for another.

JAX keeps one structure of residuals for a call in a jitted function, that of the last forward that it traced.
"""

import functools

import jax
import numpy as np
import pytest
from helpers import QUICK, assert_trees_close, case_params, differentiated, families, finite_loss, thorough
from parallel.sequences import AXIS, TOKENS, draw, mesh

from jax_attn_bwd import parallel


def cases_of_most_operands(params):
    """For each operator: the case that has the most differentiable operands."""
    found = {}
    for operator, implementation, case in sorted(
        (p.values for p in params), key=lambda x: len(differentiated(x[0], x[2].arrays(np.float64)))
    ):
        found[operator.name] = pytest.param(operator, implementation, case, id=f"{operator.name}-{case.name}")
    return list(found.values())


def check_in_turn(loss, inputs):
    """`loss` of a dict: by all of it, by one entry, by all again, against gradients of new functions."""
    once = jax.jit(loss)

    def gradients(function, names):
        """The gradients of a new function each time: what is cached is `once`."""
        part = lambda moving: function({**inputs, **moving})
        return jax.jit(jax.grad(part), compiler_options=QUICK)({name: inputs[name] for name in names})

    expected = gradients(lambda inputs: loss(inputs), inputs)
    plain = lambda f: f
    for around, names in ((plain, [*inputs]), (plain, [*inputs][-1:]), (jax.checkpoint, [*inputs])):
        assert_trees_close(gradients(around(once), names), {n: expected[n] for n in names}, 1e-12)


@pytest.mark.parametrize(
    ("operator", "implementation", "case"),
    [
        pytest.param(*p.values, id=p.id, marks=[*p.marks, *[thorough] * (p.values[2].name == "everything")])
        for p in families(cases_of_most_operands(case_params("second", "ci")))
    ],
)
def test_of_every_operator(operator, implementation, case):
    arrays = case.arrays(np.float64)
    options = {**case.options, "implementation": implementation}
    check_in_turn(finite_loss(operator.call, operator, arrays, options), differentiated(operator, arrays))


@thorough
def test_of_a_ring(rng):
    attend = functools.partial(parallel.ring_attention, axis_name=AXIS, is_causal=True)
    attend = jax.shard_map(attend, mesh=mesh(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    names = ("query", "key", "value")
    loss = lambda inputs: (attend(*(inputs[name] for name in names)) ** 2).sum()
    check_in_turn(loss, {name: draw(rng, 1, 8, 2, 3) for name in names})
