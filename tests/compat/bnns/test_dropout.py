"""Dropout by the seed of the layer."""

from functools import partial

import jax
import numpy as np
import pytest
from compat.bnns.calls import B, Triple, backward, inputs, layer, source
from compat.programs import QUICK
from helpers import assert_close, thorough

from jax_attn_bwd.compat import bnns


def test_dropout_of_the_forward_is_that_of_the_backward():
    """The output is linear in the value, so two outputs tell the slope that its delta must give."""
    F = layer(("rows", "zero"))._replace(dropout=0.5, seed=7)
    query, key, value, dout = inputs()

    @partial(jax.jit, compiler_options=QUICK)
    def forward(F, value):
        return bnns.apply_multihead_attention(F, B, query, key, None, value)

    @partial(jax.jit, compiler_options=QUICK)
    def of_value(F):
        flags = dict(query_param_delta=None, key_param_delta=None, output_param_delta=Triple(dout))
        return backward(F, query, key, None, value, None, dout, **flags).value_param_delta

    step = np.random.default_rng(6).standard_normal(value.shape)
    out, other = forward(F, value), forward(F._replace(seed=8), value)
    moved = forward(F, value + step) - forward(F, value - step)
    plain = source(F, query, key, None, value, None, dout)["output"]
    assert np.abs(out - plain).max() > 0.1
    assert np.abs(out - other).max() > 0.1
    slope = (np.asarray(moved) * dout).sum() / 2
    assert_close(slope, (np.asarray(of_value(F).target_desc) * step).sum(), 1e-12)


@pytest.mark.parametrize("rate", [1.0, *(pytest.param(rate, marks=thorough) for rate in (0.0, -0.5, 3.0))])
def test_dropout_outside_of_0_to_1_is_none(rate):
    F, (query, key, value, dout) = layer(), inputs()
    out = bnns.apply_multihead_attention(F._replace(dropout=rate), B, query, key, None, value)
    assert_close(out, source(F, query, key, None, value, None, dout)["output"], 1e-12)
