"""What is saved, computed and formed."""

import jax
import jax.numpy as jnp
import pytest
from helpers import saved_arrays
from ops.deformable.calls import LEVELS, operator, sample

from jax_attn_bwd import multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable import plan


def test_only_the_inputs_are_saved():
    arrays = sample(B=2, Q=11, D=5)
    _, pullback = jax.vjp(lambda a: operator.call(**a, spatial_shapes=LEVELS), arrays)
    saved = sorted(x.size for x in saved_arrays(pullback))
    assert saved == sorted(x.size for x in arrays.values())


@pytest.mark.parametrize(
    ("platform", "sums", "many"),
    [("cpu", None, None), ("gpu", None, None), ("gpu", True, None), ("gpu", None, 0)],
)
def test_only_what_is_asked_is_computed(monkeypatch, platform, sums, many):
    """The gradient of the value reads no pixel; the others add to none."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: platform)
    monkeypatch.setattr(plan, "_LEVEL_ROWS", plan._LEVEL_ROWS if many is None else many)
    arrays = sample()

    def counts(*wrt):
        jaxpr = jax.make_jaxpr(
            lambda dout: multi_scale_deformable_attention_bwd(
                dout, spatial_shapes=LEVELS, wrt=wrt, implementation="xla", deterministic_sums=sums, **arrays
            )
        )(jnp.zeros((1, 3, 4)))
        names = [equation.primitive.name for equation in equations(jaxpr.jaxpr)]
        return names.count("gather"), sum(name.startswith("scatter") for name in names)

    whole = counts("value", "sampling_locations", "attention_weights")
    gathers, scatters = counts("value")
    assert scatters == whole[1] > 0
    assert gathers < whole[0]
    for name in ("sampling_locations", "attention_weights"):
        gathers, scatters = counts(name)
        assert (gathers > 0, scatters) == (True, 0)


def equations(jaxpr):
    """The equations of a program, those of its loops' bodies among them."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(parameter):
                yield from equations(getattr(parameter, "jaxpr", parameter))


def is_program(x):
    return hasattr(x, "jaxpr") or hasattr(x, "eqns")


@pytest.mark.parametrize("on_cpu", [False, True], ids=["portable", "cpu"])
@pytest.mark.parametrize("options", [{}, {"normalize": "softmax"}], ids=["weights", "logits"])
def test_nothing_has_the_extent_of_samples_and_channels(monkeypatch, options, on_cpu):
    """No array of Q x L x P x D is formed; the largest is a small multiple of the inputs and outputs."""
    of_cpu = plan.Loops("point by point", "pairs of pixels", "by channel", True, 16)
    chosen = of_cpu if on_cpu else plan.Loops()
    monkeypatch.setattr(plan, "fastest_loops", lambda *_: chosen)
    Q, D, P = 60, 32, 12
    arrays = sample(Q=Q, M=1, D=D, P=P)

    def step(arrays, dout):
        out, pullback = jax.vjp(lambda a: operator.call(**a, spatial_shapes=LEVELS, **options)[0], arrays)
        return out, pullback(dout)

    jaxpr = jax.make_jaxpr(step)(arrays, jnp.zeros((1, Q, D))).jaxpr
    largest = max(x.aval.size for equation in equations(jaxpr) for x in equation.outvars)
    assert largest >= Q * D  # the walk saw the loops
    assert largest < Q * len(LEVELS) * P * D / 2
