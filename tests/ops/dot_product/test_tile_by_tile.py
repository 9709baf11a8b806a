"""The contract of dense attention with small planes, else taken whole, cut into tiles as large ones are."""

import pytest
from contract import test_second_order, test_sharding, test_values
from helpers import case_params, first_of_each, thorough
from jax.sharding import AxisType

from jax_attn_bwd.ops.dot_product import tiling

CASE = ("operator", "implementation", "case")


def dense(*tags, thorough=()):
    return [p for p in case_params(*tags, thorough=thorough) if p.id.startswith("dot_product_attention[")]


@pytest.fixture(autouse=True)
def _cut(monkeypatch):
    monkeypatch.setattr(tiling, "WHOLE_LOGITS", 0)


@pytest.mark.parametrize(CASE, dense("check", "second", thorough=("ci", "edge", "hidden")))
def test_first_order(operator, implementation, case):
    test_values.test_first_order(operator, implementation, case)


@pytest.mark.parametrize(CASE, first_of_each(dense("second")))
def test_every_mode_under_jit(operator, implementation, case):
    test_second_order.test_every_mode_under_jit(operator, implementation, case)


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=thorough, id="auto"), AxisType.Explicit]
)
@pytest.mark.parametrize(CASE, first_of_each(dense("shard")))
def test_sharded(operator, implementation, case, axis_type):
    test_sharding.on_one_device.cache_clear()
    test_sharding.test_jit_with_sharded_operands(operator, implementation, case, axis_type, (2, 4))
