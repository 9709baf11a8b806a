"""`compat.bnns` against the formulas of the source, forward and backward."""

import jax
import numpy as np
import pytest
from compat.bnns.calls import DM, B, H, L, S, added, backward, by_name, inputs, key_mask, layer, source
from compat.programs import QUICK
from helpers import assert_close, thorough

from jax_attn_bwd.compat import bnns

CASES = {
    "plain": ((), (), ()),
    "no_bias masked": ((S,), (L, S), ("float",)),
    "rows zero": ((B, S), (B, H, L, S), ("bool",)),
    "zero": ((B, S), (H, L, S), ("float",)),
    "rows no_bias": ((), (L, S), ("bool",)),
    "unbatched rows": ((S,), (H, L, S), ("bool",)),
}


DEFAULT = ("no_bias masked", "rows zero", "unbatched rows")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else thorough) for name in CASES]
)
def test_forward_and_backward_as_the_formulas(name):
    case = name.split()
    mask_shape, x_shape, kind = CASES[name]
    F, (query, key, value, dout) = layer(case), inputs(case)
    mask = key_mask(*mask_shape) if mask_shape else None
    x = added(kind, *x_shape) if x_shape else None
    expected = source(F, query, key, mask, value, x, dout)
    batch_size = None if "unbatched" in case else B

    def run(F, query, key, value, dout):
        out, cache = bnns.apply_multihead_attention(F, batch_size, query, key, mask, value, x, True)
        return out, backward(F, query, key, mask, value, x, dout, output=out, backprop_cache=cache)

    out, deltas = jax.jit(run, compiler_options=QUICK)(F, query, key, value, dout)
    got = {"output": out} | by_name(deltas)
    assert got.keys() == expected.keys()
    for argument, gradient in expected.items():
        assert_close(got[argument], gradient, 1e-12, argument)


def test_differentiating_the_forward_gives_the_deltas():
    F, (query, key, value, dout) = layer(("rows", "zero")), inputs()
    mask, x = key_mask(B, S), added(("float",), L, S)

    def both(F, query, key, value):
        run = lambda *a: bnns.apply_multihead_attention(a[0], B, a[1], a[2], mask, a[3], x)
        _, pullback = jax.vjp(run, F, query, key, value)
        return pullback(dout), by_name(backward(F, query, key, mask, value, x, dout))

    (dF, *dx), deltas = jax.jit(both, compiler_options=QUICK)(F, query, key, value)
    for name, gradient in zip(("query", "key", "value"), dx, strict=True):
        assert_close(gradient, deltas[f"{name}.target_desc"], 1e-12, name)
    for name in ("query", "key", "value", "output"):
        for field in ("weights", "bias"):
            gradient = getattr(getattr(dF, name), field)
            assert_close(gradient, deltas[f"{name}.{field}"], 1e-12, f"{name}.{field}")
    assert_close(dF.key_attn_bias, deltas["key_attn_bias"], 1e-12)
    assert_close(dF.value_attn_bias, deltas["value_attn_bias"], 1e-12)
    assert (dF.add_zero_attn, dF.dropout, dF.seed) == (True, 0.0, 0)


def test_a_target_of_numbers_is_no_leaf():
    x, w = np.ones((2, 5, 8)), np.ones((8, 4, 2))
    triple = bnns.BNNSMHAProjectionParameters((5, 8), w)
    F = bnns.BNNSLayerParametersMultiheadAttention(
        triple, triple, triple, output=bnns.BNNSMHAProjectionParameters((5, 8), w.reshape(8, 8))
    )
    run = lambda F: bnns.apply_multihead_attention(F, 2, x, x, None, x)
    np.testing.assert_allclose(jax.jit(run)(F), run(F), rtol=1e-12)
    gradient = jax.grad(lambda F: run(F).sum())(F)
    assert gradient.query.target_desc == (5, 8)
    assert gradient.query.weights.shape == w.shape


def test_everything_ignored_gives_the_output_bias():
    F, (query, key, value, dout) = layer(), inputs()
    mask = np.array([[True] * S, [False] * S])
    out, deltas = jax.jit(
        lambda: (
            bnns.apply_multihead_attention(F, B, query, key, mask, value),
            by_name(backward(F, query, key, mask, value, None, dout)),
        ),
        compiler_options=QUICK,
    )()
    np.testing.assert_array_equal(out[0], np.broadcast_to(F.output.bias, (L, DM)))
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(deltas[f"{name}.target_desc"][0], 0)
