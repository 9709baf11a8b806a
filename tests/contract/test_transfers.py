"""Checks of values that are known while a program is traced move nothing under `jax.transfer_guard`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import jax_attn_bwd as jab
from jax_attn_bwd import mods
from jax_attn_bwd._core import checks

X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 2, 4)))
IDS, LENGTH, ROWS = jnp.array([[0, 0, 1, 1]]), jnp.array([3]), jnp.arange(4)
CALLS = {
    "a mask of numbers": lambda x: jab.attention_fn(x, x, x, mask=jnp.ones((1, 1, 4, 4))),
    "segments": lambda x: jab.dot_product_attention(
        x, x, x, query_segment_ids=IDS, key_value_segment_ids=IDS
    ),
    "lengths": lambda x: jab.dot_product_attention(x, x, x, key_value_seq_lengths=LENGTH),
    "positions": lambda x: jab.dot_product_attention(x, x, x, query_positions=ROWS, is_causal=True),
    "functions": lambda x: jab.dot_product_attention(x, x, x, mask_mod=mods.document, mod_args=(IDS,)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_check_fetches_nothing_that_a_guard_holds_back(call, monkeypatch):
    expected = jax.jit(CALLS[call])(X)
    fetched = []
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(x))
    monkeypatch.setattr(np, "asarray", _refusing_arrays(np.asarray))
    with jax.transfer_guard("disallow"):
        traced = jax.jit(lambda x: CALLS[call](x)).trace(X)
    assert not fetched
    monkeypatch.undo()
    assert_close(traced.lower().compile()(X), expected, 0)


def _refusing_arrays(asarray):
    def checked(x, *args, **options):
        assert not isinstance(x, jax.Array), "an array on a device is read"
        return asarray(x, *args, **options)

    return checked


@pytest.mark.parametrize("guard", [jax.transfer_guard, jax.transfer_guard_device_to_host])
def test_what_is_known(guard):
    assert checks.known(ROWS).tolist() == [0, 1, 2, 3]
    with guard("disallow"):
        assert checks.known(ROWS) is None
        assert checks.known([1, 2]).tolist() == [1, 2]
