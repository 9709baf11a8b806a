"""Which queries see a key and which keys are seen: by the definition, in linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import (
    KernelOptions,
    Operands,
    Options,
    Residuals,
    Result,
    Sizes,
    Wanted,
)

B, K, G = 2, 2, 3


def whole_plane(rules, arguments, T, S):
    """`[B, K, G, T, S]` by the definition, in NumPy."""
    row, column = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((B, K * G, T, S), bool)
    if "mask" in arguments:
        seen &= arguments["mask"]
    if "bias" in arguments:
        seen &= arguments["bias"] != -np.inf
    for name, index in (("query", row), ("key_value", column)):
        if f"{name}_seq_lengths" in arguments:
            seen &= (index < arguments[f"{name}_seq_lengths"][:, None, None])[:, None]
    if "query_segment_ids" in arguments:
        query, key = arguments["query_segment_ids"], arguments["key_value_segment_ids"]
        seen &= (query[:, :, None] == key[:, None, :])[:, None]
    at = arguments.get("query_positions", np.arange(T)[None])[:, :, None]
    distance = (at - arguments.get("key_value_positions", np.arange(S)[None])[:, None, :])[:, None]
    if rules.is_causal:
        seen &= distance >= 0
    if rules.window is not None:
        seen &= (distance <= rules.window[0]) & (-distance <= rules.window[1])
    return seen.reshape(B, K, G, T, S)


def drawn(rng, T, S):
    """Some of the arguments that conditions are read from."""
    may = {
        "mask": lambda: rng.random([(B, 1, 1, S), (1, K * G, T, 1), (B, K * G, T, S)][rng.integers(3)]) < 0.2,
        "bias": lambda: np.where(rng.random((B, 1, T, S)) < 0.7, -np.inf, 0.5),
        "query_seq_lengths": lambda: rng.integers(0, T + 1, B),
        "key_value_seq_lengths": lambda: rng.integers(0, S + 1, B),
        "query_positions": lambda: rng.integers(0, 3 * T, (B, T)),
        "key_value_positions": lambda: rng.integers(0, 3 * S, (1, S)),
    }
    found = {name: draw() for name, draw in may.items() if rng.random() < 0.3}
    if rng.random() < 0.4:
        found["query_segment_ids"] = rng.integers(0, 9, (B, T))
        found["key_value_segment_ids"] = rng.integers(0, 9, (1, S))
    return found


def mask_and_bias(rules, arguments):
    narrow = lambda x: jnp.asarray(x, np.int32 if np.issubdtype(x.dtype, np.integer) else x.dtype)
    arrays = {name: narrow(x) for name, x in arguments.items()}
    bias, elements = arrays.pop("bias", None), arrays.pop("mask", None)
    return rules.replace(elements=elements, **arrays), bias


@thorough
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 1 << 22]))
def test_used_queries_and_keys_are_exact(seed, block_elements):
    rng = np.random.default_rng(seed)
    T, S = ((11, 7), (11, 7), (1, 3), (4, 0))[rng.integers(4)]
    window = (None, (2, 1), (0, 3))[rng.integers(3)]
    rules = Mask(bool(rng.random() < 0.4), window)
    arguments = drawn(rng, T, S)
    before = visibility.BLOCK_ELEMENTS
    visibility.BLOCK_ELEMENTS = block_elements  # 1: one query at a time
    try:
        live, seen = visibility.used_queries_and_keys(
            *mask_and_bias(rules, arguments), Sizes((B,), T, S, K, G)
        )
    finally:
        visibility.BLOCK_ELEMENTS = before
    expected = whole_plane(rules, arguments, T, S)
    live, seen = (True if x is None else np.asarray(x) for x in (live, seen))
    np.testing.assert_array_equal(np.broadcast_to(live, (B, K, G, T)), expected.any(-1))
    np.testing.assert_array_equal(np.broadcast_to(seen, (B, K, S)), expected.any((2, 3)))


def test_the_plane_is_the_definition(rng):
    for is_causal in (False, True):
        arguments = drawn(rng, 6, 5) | {"query_seq_lengths": np.array([0, 4])}
        rules = Mask(is_causal, (3, 1))
        found = visibility.of_plane(*mask_and_bias(rules, arguments), Sizes((B,), 6, 5, K, G))
        expected = whole_plane(rules, arguments, 6, 5)
        np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


TOKENS = {
    "segments": ("query_segment_ids", "key_value_segment_ids"),
    "positions": ("query_positions", "key_value_positions"),
    "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
}


@pytest.mark.parametrize("given", TOKENS)
def test_nothing_of_size_t_times_s_is_formed(given):
    """What kernels are handed, and the queries that see nothing, at T = S = 16384: compiled memory."""
    n = 16384
    shape = (1,) if given == "lengths" else (1, n)
    tokens = dict.fromkeys(TOKENS[given], jax.ShapeDtypeStruct(shape, jnp.int32))
    x, rows = jax.ShapeDtypeStruct((1, n, 1, 8), jnp.float32), jax.ShapeDtypeStruct((1, n, 1), jnp.float32)
    sink = jax.ShapeDtypeStruct((1,), jnp.float32)
    mask = Mask(is_causal=True, window=(64, 0), **tokens)
    options = KernelOptions.of(Options(scale=1.0), mask)

    def prepared(operands, rows):
        residuals = Residuals(operands, Result(operands.value, rows, None), Wanted(frozenset({"query"})))
        values = kernel_inputs.row_values(options, residuals, operands.value, None)
        return values, kernel_inputs.inputs(options, operands, None, kernel_inputs.Padding(128, 128, 8))

    operands = Operands(x, x, x, sink=sink, mask=mask)
    compiled = jax.jit(prepared).lower(operands, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * n / 16
