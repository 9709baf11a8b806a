"""The Hopper kernels of linear attention: which calls they take; in the interpreter, beyond the contract."""

import jax
import numpy as np
import pytest
from helpers import OPERATORS, interpreted, thorough

import jax_attn_bwd as jab
from jax_attn_bwd import check
from jax_attn_bwd._core import choices, pallas
from jax_attn_bwd.ops.linear_attention import api, plan, spec
from jax_attn_bwd.ops.linear_attention.arguments import prepare
from jax_attn_bwd.ops.linear_attention.cases import NORM, case
from jax_attn_bwd.ops.linear_attention.kernels import hopper_pieces
from jax_attn_bwd.ops.linear_attention.kernels.inputs import of_call

NAME = "mosaic_gpu"
DELTA, LINEAR = (
    next(o for o in OPERATORS if o.name == n) for n in ("gated_delta_rule", "gated_linear_attention")
)
pytestmark = pytest.mark.kernel


def refusal(operator, dtype="bfloat16", **sizes):
    arrays = case("", delta=operator is DELTA, **sizes).arrays(dtype)
    with pallas.interpreting(NAME):
        return jab.explain(operator.call, **arrays)[NAME]


@interpreted
def test_what_is_refused_says_why():
    assert refusal(DELTA) == refusal(LINEAR, "float16", H=128, Hv=128, decay="constant") == "ok"
    assert "not float32" in refusal(DELTA, "float32")
    assert refusal(DELTA, H=160) == "keys may have at most 128 channels and values 128, got 160 and 5"
    assert refusal(DELTA, H=128, Hv=128, decay="channel") == refusal(LINEAR, decay="channel") == "ok"
    assert refusal(LINEAR, T=0) == "there is nothing to compute"


def test_it_runs_by_name_alone():
    """Other kernels of Hopper have run on a chip; these have not."""
    arrays = case("", T=64, H=64, Hv=64).arrays("bfloat16")
    reasons = jab.explain(DELTA.call, **arrays, platform="H100")
    assert reasons["xla"] == "ok"
    assert jax.__version_info__ < (0, 12) or reasons[NAME].startswith("it is not proven on")


@pytest.mark.parametrize("sizes", [dict(H=128, Hv=128), dict(H=64, Hv=64), dict(H=3, Hv=5)])
def test_states_take_no_more_than_the_inputs(sizes):
    """And are those that the portable path saves by the same plan."""
    arrays = case("", B=(1,), T=300, N=2, **sizes).arrays("bfloat16")
    options, operands = prepare(
        "", *(arrays[n] for n in ("query", "key", "value", "log_decay", "beta")), is_delta=True,
        initial_state=None, scale=None, l2_norm_epsilon=None, seq_lengths=None, segment_ids=None,
        precision=None,
    )  # fmt: skip
    kept = plan.plan(NAME, options, operands)
    states = jax.eval_shape(lambda x: api.PORTABLE.forward(kept, x), operands).states
    assert kept.chunk == 64
    a_group = kept.chunk * kept.side_by_side
    inputs = sum(operands[i].nbytes for i in range(3)) * a_group // 300
    assert states.size * 4 // states.shape[0] <= inputs or kept.side_by_side == 1
    given = of_call(kept, operands, (64, 64))
    assert given.value.shape[1] == states.shape[0] * a_group


@thorough
@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        (DELTA, dict(B=(1,), T=141, H=72, Hv=40, K=1, N=2, state=True, growth=0.1, **NORM)),
        (DELTA, dict(T=70, decay="constant", lengths=(70, 3), segments=3)),
        (LINEAR, dict(B=(1,), T=67, H=128, Hv=128, K=1, N=1, state=True, growth=0.05)),
        (LINEAR, dict(T=1, decay="none")),
        (DELTA, dict(B=(1,), T=70, H=72, Hv=40, K=1, N=2, decay="channel", state=True, growth=0.1, **NORM)),
        (LINEAR, dict(B=(2,), T=66, K=1, N=1, decay="channel", lengths=(66, 3), segments=3)),
    ],
)
def test_against_definition(operator, sizes, dtype):
    one = case("", delta=operator is DELTA, **sizes)
    with pallas.interpreting(NAME):
        for row in check.measure(operator, NAME, one, dtype):
            assert row.ok, row


@thorough
@interpreted
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_rounding_is_at_most_twice_that_of_the_portable_path(decay):
    one = case("", B=(1,), T=130, H=64, Hv=64, K=1, N=1, decay=decay, growth=0.05, **NORM)
    aim = check.target(DELTA, one, "bfloat16")
    with pallas.interpreting(NAME):
        runs = {
            name: check._in_one_program(DELTA, {**one.options, "implementation": name}, aim)
            for name in (NAME, "xla")
        }
    of = {
        name: {"out": out, **{f"d{n}": x for n, x in grads.items()}}
        for name, ((out, _), grads) in runs.items()
    }
    for name in ("out", "dquery", "dkey", "dvalue"):
        exact = aim.expected[name]
        error = {n: np.square(np.asarray(x[name], np.float64) - exact).mean() ** 0.5 for n, x in of.items()}
        assert error[NAME] <= 2 * error["xla"], (name, error)


def _one_far_below(rng, arrays):
    """Lets nearly nothing of the state through at one token."""
    g = arrays["log_decay"].copy()
    g[:, 20] = -30
    return {"log_decay": g}


@thorough
@interpreted
@pytest.mark.parametrize(
    ("scale", "decay"), [(None, "head"), (1e-20, "head"), (0.0, "head"), (None, "channel")]
)
def test_strong_decays_and_small_scales(scale, decay):
    """Gradients keep their digits: of a decay of e^-30, and of queries whose scale squared is 0."""
    sizes = dict(B=(1,), T=40, K=1, N=1, state=True, decay=decay)
    one = case("", growth=0.1, extra=_one_far_below, scale=scale, **sizes, **NORM)
    aim = check.target(DELTA, one, "bfloat16")
    with pallas.interpreting(NAME):
        _, grads = check._in_one_program(DELTA, {**one.options, "implementation": NAME}, aim)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in grads.values())
    for name in ("query", "key"):
        found, exact = np.asarray(grads[name], np.float64), aim.expected[f"d{name}"]
        assert np.linalg.norm(found - exact) <= 0.02 * np.linalg.norm(exact), name
    dg, exact = (np.asarray(x, np.float64)[:, 20] for x in (grads["log_decay"], aim.expected["dlog_decay"]))
    assert 0 < np.abs(exact).max() < 1e-10
    np.testing.assert_allclose(dg, exact, rtol=0.05)


def planned(implementation=NAME, **sizes):
    """The plan of a call of shapes alone, and what `explain` says of its way."""
    sizes = dict(B=1, T=4096, K=8, N=8, H=128, Hv=128) | sizes
    B, T, K, N, H, Hv = sizes.values()
    rows = [jax.ShapeDtypeStruct((B, T, heads, n), "bfloat16") for heads, n in ((K, H), (K, H), (N, Hv))]
    gates = [jax.ShapeDtypeStruct((B, T, N), "float32")] * 2
    return plan.plan(implementation, spec.Options(True, 1.0, 1e-6), spec.Operands(*rows, *gates))


def test_few_programs_walk_over_pieces():
    assert planned().way.endswith(", 8 pieces")
    assert [planned(**sizes).pieces for sizes in (dict(), dict(Hv=64), dict(T=1024), dict(B=2))] == [
        8,
        8,
        4,
        4,
    ]
    # pieces of less than four chunks, programs that fill a third of the chip, other chips
    alone = dict(T=767), dict(B=3), dict(implementation="mosaic_tpu")
    assert [planned(**sizes).pieces for sizes in alone] == [1, 1, 1]
    with choices.without("linear_pieces"):
        assert planned().pieces == 1


@pytest.mark.parametrize(("T", "lengths"), [(4096, [8] * 8), (4224, [10] * 6 + [6]), (1152, [6, 6, 6])])
def test_pieces_are_all_of_a_walk(T, lengths):
    """And states are saved before the chunks that they are saved before without pieces."""
    chosen = planned(T=T)
    cut = hopper_pieces.cut(chosen, T)
    steps = [tuple(map(int, cut.steps(piece))) for piece in range(cut.count)]
    assert [count for _, count in steps] == lengths
    assert [first for first, _ in steps] == list(np.cumsum([0, *lengths[:-1]]))
    assert all(first % chosen.side_by_side == 0 for first, _ in steps)


@thorough
@interpreted
@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        (DELTA, dict(T=192, H=72, Hv=40, state=True, growth=0.1, **NORM)),
        (DELTA, dict(T=193, H=8, Hv=72, lengths=(167,), segments=2, **NORM)),
        (LINEAR, dict(T=261, H=64, Hv=72, decay="constant", state=True)),
        (LINEAR, dict(T=261, H=8, Hv=8, segments=2, lengths=(259,))),
    ],
)
def test_pieces_are_exact(operator, sizes, monkeypatch):
    """What float32 results differ by from those of one walk is what states are rounded by in products."""
    monkeypatch.setattr(plan, "_CHUNKS_OF_A_PIECE", 1)
    one = case("", delta=operator is DELTA, B=(1,), K=1, N=1, **sizes)
    aim, of = check.target(operator, one, "bfloat16"), {}
    for rules in ((), ("linear_pieces",)):
        with pallas.interpreting(NAME), choices.without(*rules):
            (out, final), grads = check._in_one_program(
                operator, {**one.options, "implementation": NAME}, aim
            )
        of[rules] = {"out": out, "final_state": final} | {f"d{name}": x for name, x in grads.items()}
    for name, found in of[()].items():
        found, alone = (np.asarray(x, np.float64) for x in (found, of["linear_pieces",][name]))
        exact = np.asarray(aim.expected[name], np.float64)
        error = [np.linalg.norm(x - exact) for x in (found, alone)]
        assert error[0] <= 1.01 * error[1] + 1e-6 * np.linalg.norm(exact), name
        limit = 1e-4 if name in ("final_state", "dinitial_state") else 4e-3
        assert np.linalg.norm(found - alone) <= limit * np.linalg.norm(exact), name
