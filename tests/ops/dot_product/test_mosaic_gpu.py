"""The Mosaic GPU kernels of dense attention, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS

from jax_attn_bwd import check
from jax_attn_bwd._core import mosaic_gpu, pallas

NAME = "mosaic_gpu"
(OPERATOR,) = (o for o in OPERATORS if o.name == "dot_product_attention")
interpreted = pytest.mark.skipif(
    not mosaic_gpu.can_interpret(),
    reason="the Mosaic GPU interpreter of this JAX cannot run the kernels",
)


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def refusal(case, dtype="bfloat16"):
    """Why the kernels cannot run a case."""
    implementation = {"implementation": NAME}
    try:
        jax.eval_shape(
            lambda a: OPERATOR.call(**a, **case.options, **implementation), case.arrays(dtype)
        )
    except NotImplementedError as error:
        return str(error)
    return None


CASES = list(OPERATOR.tagged("ci", "edge", "second", "shard"))


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_against_definition(case):
    print(case.name, refusal(case))
    if refusal(case):
        return
    measured = check.measure(OPERATOR, NAME, case, "bfloat16")
    for row in measured:
        print(row.quantity, row.error, row.limit)
        assert row.ok, row
