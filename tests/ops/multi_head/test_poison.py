"""NaN and inf in rows that nothing sees reach nothing."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from ops.multi_head.calls import EK, EO, EQ, EV, QUICK, B, S, T, draw, inputs, layer, leaves_close

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention, multi_head_attention_bwd


def test_poison_in_queries_that_have_no_keys():
    params, query = layer("bias_k", "bias_v"), draw(B, T, EQ).at[0, 0].set(jnp.nan)
    grads = multi_head_attention_bwd(
        draw(B, T, EO), params, query, jnp.zeros((B, 0, EK)), jnp.zeros((B, 0, EV)), wrt="params"
    )
    for name, x in zip(grads.params._fields, grads.params, strict=True):
        assert x is None or jnp.isfinite(x).all(), name


HIDDEN = {
    "mask of keys": dict(mask=np.arange(S) < 4),
    "mask of queries and keys": dict(mask=(np.arange(T)[:, None] != 2) & (np.arange(S) < 4)),
    "bias": dict(bias=np.where(np.arange(S) < 4, 0.5, -np.inf)),
    "window": dict(is_causal=True, local_window_size=(0, 0)),
}


PAIRS = [("mask of queries and keys", "probs"), ("bias", "inputs")]
REST = [
    pytest.param(name, save, order, marks=thorough)
    for name, save, order in itertools.product(HIDDEN, ("inputs", "probs"), (1, 2))
    if order == 2 or (name, save) not in PAIRS
]


@pytest.mark.parametrize(("name", "save", "order"), [*((*pair, 1) for pair in PAIRS), *REST])
def test_poison_in_rows_that_nothing_sees(name, save, order):
    options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in HIDDEN[name].items()}
    params = layer("bias_k", "bias_v")
    seen = np.arange(S) < (4 if name != "window" else T)
    live = np.arange(T) != (2 if name == "mask of queries and keys" else T)
    clean = inputs()

    @partial(jax.jit, compiler_options=QUICK)
    def gradients(q, k, v):
        def loss(params, q, k, v):
            out = multi_head_attention(params, q, k, v, save=save, **options)
            return jnp.where(live[:, None], jnp.sin(out), 0).sum()

        first = jax.grad(loss, argnums=(0, 1, 2, 3))
        if order == 1:
            return first(params, q, k, v)
        square = lambda *a: sum((g**2).sum() for g in jax.tree.leaves(first(*a)))
        return jax.grad(square, argnums=(0, 1, 2, 3))(params, q, k, v)

    q, k, v = clean
    expected = gradients(jnp.where(live[:, None], q, 0), *(jnp.where(seen[:, None], x, 0) for x in (k, v)))
    got = gradients(
        jnp.where(live[:, None], q, jnp.nan),
        *(jnp.where(seen[:, None], x, poison) for x, poison in ((k, jnp.inf), (v, jnp.nan))),
    )
    leaves_close(got, expected, 1e-10)


@pytest.mark.parametrize(
    ("options", "calls"), [({}, False), ({"is_causal": True}, False), ({"mask": np.ones(3, bool)}, True)]
)
def test_where_shapes_tell_that_nothing_is_hidden_no_compiled_function_is_called(options, calls):
    """A call in a traced program stops some exporters, and costs an eager call a launch."""
    attend = lambda x: multi_head_attention(MultiHeadAttentionParams(), x, num_heads=2, **options)
    program = jax.make_jaxpr(jax.grad(lambda x: attend(x).sum()))(jnp.ones((1, 3, 4)))
    assert ("without_poison" in str(program)) == calls
