"""The contract of dense attention with small planes, else taken whole, cut into tiles as large ones are."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from contract import test_second_order, test_sharding, test_values
from helpers import QUICK, assert_close, assert_trees_close, case_params, first_of_each, thorough
from jax.sharding import AxisType

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product import plan as planning

CASE = ("operator", "implementation", "case")


def dense(*tags, thorough=()):
    return [p for p in case_params(*tags, thorough=thorough) if p.id.startswith("dot_product_attention[")]


@pytest.fixture(autouse=True)
def _cut(monkeypatch):
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)


@pytest.mark.parametrize(CASE, dense("check", thorough=("second", "edge", "hidden")))
def test_first_order(operator, implementation, case):
    test_values.test_first_order(operator, implementation, case)


@thorough
@pytest.mark.parametrize(CASE, dense("second"))
def test_every_mode_under_jit(operator, implementation, case):
    test_second_order.test_every_mode_under_jit(operator, implementation, case)


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=thorough, id="auto"), AxisType.Explicit]
)
@pytest.mark.parametrize(CASE, first_of_each(dense("shard")))
def test_sharded(operator, implementation, case, axis_type):
    test_sharding.on_one_device.cache_clear()
    test_sharding.test_jit_with_sharded_operands(operator, implementation, case, axis_type, (2, 4))


def test_positions_reach_tiles_that_indices_would_not(rng):
    """Positions run backwards, so that causality shows the upper half of the plane."""
    q, k, v = (jnp.asarray(rng.standard_normal((1, n, 1, 4))) for n in (300, 600, 600))
    row, column = jnp.arange(300)[::-1].astype(jnp.int32), jnp.arange(600)[::-1].astype(jnp.int32)
    got = dot_product_attention(q, k, v, is_causal=True, query_positions=row, key_value_positions=column)
    expected = dot_product_attention(q, k, v, mask=(row[:, None] >= column[None])[None, None])
    assert_close(got, expected, 1e-12)


def test_dropout_of_many_tiles(monkeypatch, rng):
    """Two by two tiles, of which no two drop alike, drop what the whole plane does."""
    q, dout, k, v = (jnp.asarray(rng.standard_normal((1, n, 1, 4))) for n in (300, 300, 600, 600))

    def gradients(logits):
        monkeypatch.setattr(planning, "MATERIALIZED_PLANE", logits)
        attend = partial(dot_product_attention, dropout_rate=0.5, dropout_key=jax.random.key(3))
        run = lambda *qkv: (attend(*qkv) * dout).sum()
        return dict(
            zip("qkv", jax.jit(jax.grad(run, (0, 1, 2)), compiler_options=QUICK)(q, k, v), strict=True)
        )

    assert_trees_close(gradients(0), gradients(2**20), 1e-12)
