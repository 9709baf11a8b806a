"""Linear attention with the sequence over devices: the numbers of one device, at one exchange each way."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, quick_jit, thorough
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, mesh

import jax_attn_bwd as jab
from jax_attn_bwd import parallel
from jax_attn_bwd.ops.linear_attention.cases import case

CASES = {
    "plain": dict(),
    "everything": dict(state=True, segments=3, lengths=(17, 24)),
    "channels": dict(decay="channel", state=True, lengths=(3, 24), segments=2),
    "constant": dict(decay="constant"),
    "linear": dict(delta=False, state=True, segments=4, lengths=(17, 24)),
    "linear channels": dict(delta=False, decay="channel"),
    "erasing": dict(erasing="values", state=True, segments=3, lengths=(17, 24)),
    "erasing channels": dict(erasing="keys", decay="channel"),
}
WHOLE = ("initial_state", "seq_lengths")


def spec(name, x):
    return P() if name in WHOLE or x.ndim == 1 else P(None, AXIS)


def both(name):
    """(arrays, the call on one device, the call on four)."""
    options = {"return_final_state": True, "l2_norm_epsilon": 0.1}
    arrays = dict(case("", T=24, **CASES[name]).arrays())
    if "seq_lengths" in arrays:  # of a dtype that holds no number below 0
        arrays["seq_lengths"] = arrays["seq_lengths"].astype(np.uint8)
    operator = "gated_delta_rule" if "beta" in arrays else "gated_linear_attention"
    operator = "dplr_linear_attention" if "erase_key" in arrays else operator
    plain, cut = getattr(jab, operator), getattr(parallel, operator)
    run = jax.shard_map(
        lambda arrays: cut(**arrays, **options, axis_name=AXIS),
        mesh=mesh(4),
        in_specs=({n: spec(n, x) for n, x in arrays.items()},),
        out_specs=(P(None, AXIS), P()),
    )
    return arrays, lambda x: plain(**x, **options), run


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("everything", "linear") else thorough) for n in CASES]
)
def test_numbers_of_one_device(name):
    arrays, plain, cut = both(name)
    inputs = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    weights = [jnp.asarray(np.random.default_rng(3).standard_normal(x.shape)) for x in plain(arrays)]

    def step(call):
        def loss(inputs):
            outputs = call({**arrays, **inputs})
            return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), outputs

        return quick_jit(jax.grad(loss, has_aux=True))

    (gradients, outputs), (expected, definition) = step(cut)(inputs), step(plain)(inputs)
    for got, x in zip(outputs, definition, strict=True):
        assert_close(got, x, 1e-12)
    assert_trees_close(gradients, expected, 1e-11)


def test_one_exchange_each_way():
    arrays, _, cut = both("plain")
    loss = lambda x: (cut(x)[0] ** 2).sum()
    text = jax.jit(jax.grad(loss)).lower(arrays).compile().as_text()
    kinds = re.findall(r"= .*? (all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)
    assert kinds == ["all-gather"] * 2, kinds


def test_outside_shard_map_it_is_refused():
    x = jnp.ones((1, 4, 2, 4))
    with pytest.raises(ValueError, match="axis_name must name an axis bound here"):
        parallel.gated_linear_attention(x, x, x, axis_name=AXIS)


def test_a_state_of_another_shape_is_refused():
    arrays, _, cut = both("linear")
    with pytest.raises(ValueError, match="initial_state must have shape"):
        jax.eval_shape(cut, arrays | {"initial_state": arrays["initial_state"][..., :2]})
