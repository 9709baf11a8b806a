"""What runs over several devices, under the contract of every operator, and in `jax_attn_bwd.check`."""

import functools

import jax
import numpy as np
import pytest
from cases import with_more
from contract import test_derivatives_in_turn as in_turn
from contract import test_second_order as second_order
from contract import test_transforms as transforms
from helpers import FAMILIES, QUICK, assert_close, assert_trees_close, differentiated, finite_loss, thorough
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, TOKENS, draw, mesh

from jax_attn_bwd import check, parallel
from jax_attn_bwd.check import __main__ as command
from jax_attn_bwd.parallel import cases as named

OPERATORS = with_more(named.OPERATORS)
CONTRACTS = {
    "derivatives in turn": in_turn.test_of_every_operator,
    "second order": second_order.test_every_mode_under_jit,
    "vmap": transforms.test_vmap_over_all_operands,
    "eager": transforms.test_eager_equals_jit,
    "scan and remat": transforms.test_scan_over_steps_and_remat,
}
QUICKEST = ("scaled_masked_softmax",)
NAMES = [operator.name for operator in OPERATORS]
by_name = pytest.mark.parametrize("operator", OPERATORS, ids=NAMES)


def test_all_have_cases():
    """Whatever `parallel` exports that attends."""
    exported = {name for name in dir(parallel) if name.endswith(("_attention", "_rule"))}
    assert {name.removeprefix("parallel.") for name in NAMES} == exported
    assert {operator.name for operator in command.discover()} >= exported


# All of them of the ring; of the others, which share its rules or have one call of an operator, one in turn.
OF_EACH = [
    (operator, contract)
    for i, operator in enumerate(OPERATORS)
    for j, contract in enumerate(CONTRACTS)
    if operator.name == "ring_attention" or (i + j) % 5 == 0
]


@thorough
@pytest.mark.parametrize(("operator", "contract"), OF_EACH, ids=lambda x: getattr(x, "name", x))
def test_contract(contract, operator):
    CONTRACTS[contract](operator, "xla", next(operator.tagged("second")))


@thorough
@by_name
def test_values(operator):
    case = next(operator.tagged("check"))
    assert not [row for row in check.measure(operator, "xla", case, "float64") if not row.ok]


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        pytest.param(o, dtype, id=f"{o.name}-{dtype}", marks=() if first else thorough)
        for o in OPERATORS
        for dtype in ("bfloat16", "float16")
        for first in [(o.name, dtype) == ("ring_attention", "bfloat16")]
    ],
)
def test_with_means(operator, dtype):
    """In narrow dtypes, each gradient within three times what rounding once takes."""
    with jax.enable_x64(False):
        cases = list(operator.tagged(check.MEANS))
        rows = [row for case in cases for row in check.measure(operator, "xla", case, dtype)]
    assert rows
    assert not [row for row in rows if not row.ok]


@pytest.mark.parametrize(
    "operator", [pytest.param(o, id=o.name, marks=() if o.name in QUICKEST else thorough) for o in FAMILIES]
)
def test_without_jit_inside_shard_map(operator):
    """By itself JAX runs no rule with symbolic zeros there, if nothing is differentiated."""
    case = next(operator.tagged("second"))
    arrays = case.arrays()
    inputs = differentiated(operator, arrays)
    loss = finite_loss(operator.call, operator, arrays, {**case.options, "implementation": "xla"})
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    both = lambda inputs: (loss(inputs), jax.grad(loss)(inputs))
    value, gradients = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P())(inputs)
    expected = jax.jit(both, compiler_options=QUICK)(inputs)
    assert_close(value, expected[0], 1e-12)
    assert_trees_close(gradients, expected[1], 1e-12)


@thorough
def test_a_ring_without_jit(rng):
    attend = functools.partial(parallel.ring_attention, axis_name=AXIS, is_causal=True)
    run = jax.shard_map(attend, mesh=mesh(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    q, k, v = (draw(rng, 1, 8, 2, 3) for _ in range(3))
    assert_close(run(q, k, v), jax.jit(run)(q, k, v), 1e-12)
