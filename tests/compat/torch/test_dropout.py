"""Dropout of the weights, in training alone."""

import jax
import numpy as np
import pytest
from compat.programs import QUICK
from compat.torch.calls import D, E, H, L, N, S, arrays, call
from helpers import assert_close, thorough

from jax_attn_bwd.compat import torch as compat


@pytest.mark.parametrize(
    "static", [(), pytest.param(("static_k", "static_v"), marks=thorough)], ids=["projected", "static"]
)
def test_weights_are_those_after_dropout(static):
    case = frozenset({"no_bias", "per_head", "zero", *static})
    given = arrays(case)

    def run(seed, need_weights):
        return call(
            compat.multi_head_attention_forward,
            given,
            dropout_p=0.5,
            need_weights=need_weights,
            average_attn_weights=False,
            add_zero_attn=True,
            dropout_key=jax.random.key(seed),
        )

    (out, weights), (without, none), (_, other) = jax.jit(
        lambda: (run(1, True), run(1, False), run(2, True)), compiler_options=QUICK
    )()
    weights = np.asarray(weights)
    if static:
        v = given["static_v"].reshape(N, H, S, D)
    else:
        v = given["value"] @ given["in_proj_weight"][2 * E :].T
        v = v.reshape(S, N, H, D).transpose(1, 2, 0, 3)
    v = np.concatenate([v, np.zeros((N, H, 1, D))], 2)
    expected = (weights @ v).transpose(2, 0, 1, 3).reshape(L, N, E) @ given["out_proj_weight"].T
    assert none is None
    assert_close(out, expected, 1e-12)
    assert_close(without, expected, 1e-12)
    assert 0.3 < (weights == 0).mean() < 0.7
    assert (np.asarray(other) != weights).any()
    assert len({weights[n, h].tobytes() for n in range(N) for h in range(H)}) == N * H


def test_no_dropout_outside_training():
    given = arrays(frozenset({"plain"}))
    expected = call(compat.multi_head_attention_forward, given)
    got = call(compat.multi_head_attention_forward, given, dropout_p=0.5, training=False)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)
