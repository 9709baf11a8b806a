"""A prefix does not depend on what follows it, nor an entry of a batch on the others: not in one bit."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit, thorough

import jax_attn_bwd as jab
from jax_attn_bwd import MultiHeadAttentionParams

B, T, N, H = 2, 40, 2, 4
SEEN = 21  # tokens of the prefix
NORM = {"l2_norm_epsilon": 1e-6}


def tokens(*names, T=T, **more):
    return dict.fromkeys(names, (B, T, N, H)) | more


def softmax(x):
    return jab.scaled_masked_softmax(x, is_causal=True)


def attend(**arrays):
    return jab.dot_product_attention(**arrays, is_causal=True)


def layer(query):
    kernel = jnp.cos(jnp.arange(H * N * H, dtype=query.dtype)).reshape(H, N, H)
    params = MultiHeadAttentionParams(kernel, None, 2 * kernel, None, -kernel, None, kernel.reshape(N, H, H))
    return jab.multi_head_attention(params, query, is_causal=True)


def delta(**arrays):
    return jab.gated_delta_rule(**arrays, **NORM)


def erasing(erase_key, erase_query, **arrays):
    return jab.dplr_linear_attention(**arrays, erase_key=erase_key / 4, erase_query=erase_query / 4)


# name: the call, and the shapes of its arrays; tokens are their second axis
CAUSAL = {
    "softmax": (softmax, {"x": (B, T, T)}),
    "attention": (attend, tokens("query", "key", "value")),
    "attention in tiles": (attend, tokens("query", "key", "value", T=1100)),
    "layer": (layer, {"query": (B, T, H)}),
    "delta rule": (delta, tokens("query", "key", "value", log_decay=(B, T, N), beta=(B, T, N))),
    "delta rule, channels": (delta, tokens("query", "key", "value", "log_decay", beta=(B, T, N))),
    "erasing, channels": (erasing, tokens("query", "key", "value", "log_decay", "erase_key", "erase_query")),
    "linear": (jab.gated_linear_attention, tokens("query", "key", "value", log_decay=(B, T, N))),
    "linear, channels": (jab.gated_linear_attention, tokens("query", "key", "value", "log_decay")),
}


def drawn(shapes, seed):
    """Numbers in float32; the decays of the first draw are mild, those of others strong."""
    found = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        x = rng.standard_normal(shape)
        found[name] = (-abs(x) * (0.1 if seed == 0 else 50.0) if name == "log_decay" else x).astype(
            np.float32
        )
    return found


def assert_same_bits(found, expected, where):
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name][where], x[where], err_msg=name)


LONG = "attention in tiles", "layer", "erasing, channels"


@pytest.mark.parametrize("name", [pytest.param(n, marks=thorough if n in LONG else ()) for n in CAUSAL])
def test_what_follows_and_who_is_beside_moves_no_bit(name, one_device):
    call, shapes = CAUSAL[name]
    length = next(iter(shapes.values()))[1]
    seen = SEEN * length // T

    @quick_jit
    def step(arrays, weights):
        out, pull = jax.vjp(lambda x: call(**x), arrays)
        return {"out": out} | pull(
            weights * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        )[0]

    def changed(where):
        one, other = drawn(shapes, 0), drawn(shapes, 1)
        for n, x in one.items():
            other[n][where] = x[where]
        if name == "softmax":  # its columns are tokens, too
            other["x"][:, :seen, :seen] = one["x"][:, :seen, :seen]
        return one, other

    out = jax.eval_shape(lambda x: call(**x), drawn(shapes, 0))
    for where in ((slice(None), slice(seen)), (slice(1),)):
        weights = np.zeros(out.shape, out.dtype)
        weights[where] = 1
        if name == "softmax" and len(where) == 2:
            where = (slice(None), slice(seen), slice(seen))
        one, other = changed(where)
        assert_same_bits(step(other, weights), step(one, weights), where)


def test_nan_beyond_the_lengths_moves_no_bit(one_device):
    call, shapes = CAUSAL["linear, channels"]
    arrays, lengths = drawn(shapes, 0), np.array([SEEN, T], np.int32)

    @quick_jit
    def step(arrays):
        out, pull = jax.vjp(lambda x: call(**x, seq_lengths=lengths), arrays)
        return {"out": out} | pull(jnp.cos(out))[0]

    poisoned = {n: x.copy() for n, x in arrays.items()}
    for x in poisoned.values():
        x[0, SEEN:] = np.nan
    assert_same_bits(step(poisoned), step(arrays), slice(None))
