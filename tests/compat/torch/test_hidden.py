"""What nothing sees reaches nothing; static keys; symbolic lengths."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.programs import outputs_and_gradients
from compat.torch.calls import D, E, H, L, N, S, arrays, call
from helpers import assert_close

import jax_attn_bwd
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
def test_a_row_of_torch_that_sees_nothing():
    """What README says: 0 with gradient 0 from its functions, from its module NaN or the bias alone."""
    torch = pytest.importorskip("torch")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 2, 4))
    seen = np.array([[True, False, True], [False] * 3, [True] * 3])

    def theirs(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, torch.tensor(seen)).swapaxes(1, 2)

    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    expected = theirs(*tensors)
    expected.sum().backward()
    out, pullback = jax.vjp(lambda *x: jax_attn_bwd.dot_product_attention(*x, mask=seen), q, k, v)
    assert_close(out, expected.detach(), 1e-13)
    for found, tensor in zip(pullback(jnp.ones_like(out)), tensors, strict=True):
        assert_close(found, tensor.grad, 1e-13)
    assert not out[0, 1].any()
    assert not expected[0, 1].any()
    assert not tensors[0].grad[0, 1].any()

    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    hidden = lambda logit, batch, head, row, column: torch.where(row == 1, -torch.inf, logit)
    with warnings.catch_warnings(action="ignore"):  # it is not compiled
        out, lse = flex(*(x.detach().swapaxes(1, 2) for x in tensors), hidden, return_lse=True)
    assert not out[0, :, 1].any()
    assert (lse[0, :, 1] == -torch.inf).all()

    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    torch.nn.init.ones_(module.out_proj.bias)
    x = torch.tensor(q.reshape(1, 3, 8))
    rows = [
        module(x, x, x, attn_mask=~torch.tensor(seen), need_weights=asked)[0][0, 1] for asked in (True, False)
    ]
    assert rows[0].isnan().all()
    assert (rows[1] == 1).all()


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
