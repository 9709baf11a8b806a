"""What nothing sees reaches nothing; static keys; symbolic lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.programs import outputs_and_gradients
from compat.torch.calls import D, E, H, L, N, S, arrays, call
from helpers import assert_close

from jax_attn_bwd.compat import torch as compat


def test_nan_that_nothing_sees_reaches_nothing():
    """Also where one of keys and values is given and the other projected."""
    case = frozenset({"static_v", "padding_bool", "attn_bool"})
    given = arrays(case)
    given["attn_mask"][1] = True
    poisoned = {name: given[name].copy() for name in ("query", "key", "static_v")}
    poisoned["query"][1] = np.nan
    hidden = given["key_padding_mask"]
    poisoned["key"][hidden.T] = np.nan
    poisoned["static_v"].reshape(N, H, S, D).swapaxes(1, 2)[hidden] = np.nan
    floats = sorted(name for name, x in given.items() if x.dtype != bool)

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving})

    def everything(given):
        moving = {name: jnp.asarray(given[name]) for name in floats}
        return outputs_and_gradients(run, moving, lambda outputs: tuple(np.ones(x.shape) for x in outputs))

    assert np.isnan(poisoned["key"]).any()
    expected, got = everything(given), everything({**given, **poisoned})
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-13), got, expected)


@pytest.mark.thorough
def test_exports_with_symbolic_lengths():
    t, s = jax.export.symbolic_shape("t, s")
    w, w_o = arrays(frozenset({"plain"}))["in_proj_weight"], np.eye(E)

    def run(q, k, v):
        return compat.multi_head_attention_forward(q, k, v, E, H, w, None, None, None, False, 0.0, w_o, None)

    exported = jax.export.export(jax.jit(run))(
        *(jax.ShapeDtypeStruct((n, N, E), np.float64) for n in (t, s, s))
    )
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.standard_normal((n, N, E))) for n in (L, S, S)]
    for got, expected in zip(exported.call(*given), run(*given), strict=True):
        assert_close(got, expected, 1e-12)


def test_causal_static_keys_have_a_length_of_their_own():
    """`is_causal` hides what the mask hides, where keys of another length are handed over projected."""
    given = arrays(frozenset({"plain"}))
    rng = np.random.default_rng(0)
    static = {n: rng.standard_normal((N * H, S, D)) for n in ("static_k", "static_v")}
    empty = {n: np.zeros((0, N, E)) for n in ("key", "value")}
    more = dict(static, attn_mask=np.triu(np.ones((L, S), bool), 1), training=False)
    masked, _ = call(compat.multi_head_attention_forward, {**given, **empty}, **more)
    hinted, _ = call(
        compat.multi_head_attention_forward, {**given, **empty}, **more, is_causal=True, need_weights=False
    )
    assert_close(hinted, masked, 1e-12)
