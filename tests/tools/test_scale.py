"""What a training step over a pod sends: formulas beside compiled programs; the reading of schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_only import scale, schedule
from helpers import QUICK, assert_close, thorough
from jax.sharding import Mesh

from jax_attn_bwd.parallel import zigzag

SMALL = scale.Model(64, 3, 16, 8, 4, 4, 32, 8, "float32")


def mesh(n):
    return Mesh(np.array(jax.devices()[:n]), (scale.AXIS,))


@pytest.mark.parametrize(
    "kind", ["ulysses", *(pytest.param(x, marks=thorough) for x in ("ring", "all_gather"))]
)
def test_a_step_sends_what_the_formulas_say(kind):
    step, types = scale.sharded(SMALL, kind, mesh(4))
    compiled = step.lower(*types).compile(QUICK)
    found = schedule.Program(compiled.as_text()).transfers
    sent, _ = scale.predicted(SMALL, kind, 4)
    total = sum(x.sent * x.times for x in found)
    if kind == "all_gather" and jax.__version_info__ < (0, 11):  # older XLA:CPU keeps what was gathered
        assert total < sent
    else:
        assert total == pytest.approx(sent, rel=1e-4)  # and the loss
    assert not any(x.hidden for x in found)  # XLA:CPU has no transfers that are not waited for


def trained(kind, n, rng):
    """Two steps over n devices: losses and weights."""
    state, tokens, targets, _ = scale.sharded(SMALL, kind, mesh(n))[1]
    weights = {name: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for name, x in state[0].items()}
    moments = {name: (jnp.zeros_like(x), jnp.zeros_like(x)) for name, x in weights.items()}
    text = jnp.asarray(rng.integers(0, SMALL.vocabulary, SMALL.tokens + 1), jnp.int32)
    told = (text[:-1], text[1:], jnp.arange(SMALL.tokens, dtype=jnp.int32))
    if kind != "ulysses":
        told = tuple(zigzag(x, n) for x in told)
    step, _ = scale.sharded(SMALL, kind, mesh(n))
    step = step.lower((weights, moments, jnp.zeros((), jnp.float32)), *told).compile(QUICK)
    state, losses = (weights, moments, jnp.zeros((), jnp.float32)), []
    for _ in range(2):
        state, loss = step(state, *told)
        losses.append(loss)
    return jnp.stack(losses), state[0]


@thorough
@pytest.mark.parametrize("kind", scale.ATTENTION)
def test_a_step_is_that_of_one_device(kind):
    losses, weights = trained(kind, 4, np.random.default_rng(0))
    expected, other = trained(kind, 1, np.random.default_rng(0))
    assert_close(losses, expected, 1e-5)
    assert losses[1] < losses[0]
    for name, x in weights.items():
        assert_close(x, other[name], 1e-4, name)


SCHEDULE = """HloModule step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %dot.1 = f32[8]{0} dot(%p, %p), lhs_contracting_dims={0}
}

%body (x: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %x = (s32[], bf16[4,8]{1,0:T(4,128)(2,1)}) parameter(0)
  %permute-start = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)})
      collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %fusion.1 = f32[8]{0} fusion(%z), kind=kOutput, calls=%fused
  %permute-done = bf16[4,8]{1,0} collective-permute-done(%permute-start)
  %gather-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%y), replica_groups=[2,4]<=[8]
  %gather-done = bf16[16,8]{1,0} all-gather-done(%gather-start)
}

%condition (y: (s32[], bf16[4,8])) -> pred[] {
  %y = (s32[], bf16[4,8]{1,0}) parameter(0)
  %limit = s32[] constant(9)
  %counter = s32[] get-tuple-element(%y), index=0
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

ENTRY %main (a: f32[]) -> f32[] {
  %two = s32[] constant(2)
  %first = s32[] copy(%two)
  %t = (s32[], bf16[4,8]) tuple(%first, %start)
  %w = (s32[], bf16[4,8]) while(%t), condition=%condition, body=%body,
    backend_config={"known_trip_count":{"n":"7"}}
  ROOT %all-reduce.1 = f32[16]{0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%fused
}
"""


def test_a_schedule_is_read():
    found = schedule.Program(SCHEDULE).transfers
    assert found == [
        ("collective-permute", 64, 7, True),
        ("all-gather", 256 * 3 / 4, 7, False),
        ("all-reduce", 64 * 2 * 3 / 4, 1, False),
    ]
    for groups in ("[2,4]<=[8]", "mesh['a'=2,'b'=2,'c'=2] {'a','c'}", "{{0,2,4,6},{1,3,5,7}}"):
        assert schedule.Program(SCHEDULE.replace("{{0,1,2,3}}", groups)).transfers == found
    with pytest.raises(RuntimeError, match="groups of a collective have another form"):
        _ = schedule.Program(SCHEDULE.replace("{{0,1,2,3}}", "all")).transfers


CHAINED = """
%gathering (p: bf16[4,8]) -> bf16[16,8] {
  %inner = bf16[16,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
}

%beside (p: bf16[4,8]) -> bf16[16,8] {
  %inner.1 = bf16[16,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
  %dot.2 = f32[8]{0} dot(%p, %p), lhs_contracting_dims={0}
}

ENTRY %main (a: f32[]) -> f32[] {
  %chain.0 = bf16[4,8] fusion(%a), kind=kCustom, calls=%gathering
  %chain.1 = bf16[4,8] fusion(%chain.0), kind=kCustom, calls=%beside
}
"""


def test_a_chain_of_fusions_is_one_transfer():
    assert schedule.Program(CHAINED).transfers == [("all-gather", 256 * 3 / 4, 1, True)]
    alone = CHAINED.replace("calls=%beside", "calls=%gathering")
    assert schedule.Program(alone).transfers == [("all-gather", 256 * 3 / 4, 1, False)]


def test_a_loop_that_does_not_tell_how_often_it_runs():
    """TPU programs have such: the number follows from its condition, and from where its counter begins."""
    text = SCHEDULE.replace("known_trip_count", "unknown")
    assert [x.times for x in schedule.Program(text).transfers] == [7, 7, 1]
    for told in ("direction=LT", "s32[] constant(9)", "s32[] constant(2)"):
        with pytest.raises(RuntimeError, match="does not tell how often it runs"):
            _ = schedule.Program(text.replace(told, "")).transfers


def test_a_page_tells_what_did_not_compile():
    transfers = schedule.Program(SCHEDULE.replace("bf16[4,8]", "bf16[4,524288]")).transfers
    rows = [
        scale.Row("256 v5e", "ring", 2**34, 2**33, 2.0**30, transfers),
        scale.Row("256 v5e", "ulysses", error="ValueError: key heads"),
    ]
    page = scale.markdown(rows)
    assert "| 256 v5e | ring | 16.0 of 15.8 | 8.0 | 0.0 | 1.0 | 100 | collective-permute 0.0" in page
    assert "* 256 v5e, ulysses: ValueError: key heads" in page
