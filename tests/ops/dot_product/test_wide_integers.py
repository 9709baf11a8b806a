"""Traced integers wider than int32: ids stay distinct, lengths and positions do not wrap around."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, multi_head_attention, parallel

B, T, S, N, H = 2, 8, 12, 2, 4
HIGH = 2**32
KINDS = (parallel.ring_attention, parallel.all_gather_attention, parallel.ulysses_attention)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def ids(length, *batch):
    """Some differ in their high words alone, some are negative."""
    return jnp.asarray(np.random.default_rng(length).choice([0, HIGH, -HIGH, 5, 5 + HIGH], (*batch, length)))


@pytest.mark.parametrize(("query_batch", "key_batch"), [((B,), (B,)), ((), (B,)), ((1,), ())])
def test_segment_ids(query_batch, key_batch):
    q, k, given = draw(B, T, N, H), draw(B, S, N, H), (ids(T, *query_batch), ids(S, *key_batch))
    query_ids, key_ids = map(np.asarray, given)
    mask = (query_ids[..., :, None] == key_ids[..., None, :]).reshape(-1, 1, T, S)

    def loss(of, q, k):
        return jnp.sin(of(q, k)).sum()

    @jax.jit
    def by_ids(query_ids, key_ids, q, k):
        attend = lambda q, k: dot_product_attention(
            q, k, k, query_segment_ids=query_ids, key_value_segment_ids=key_ids
        )
        return jax.value_and_grad(partial(loss, attend), (0, 1))(q, k)

    masked = partial(loss, lambda q, k: dot_product_attention(q, k, k, mask=mask))
    expected = jax.value_and_grad(masked, (0, 1))(q, k)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), by_ids(*given, q, k), expected)


def test_lengths_and_positions_do_not_wrap():
    q, k = draw(B, T, N, H), draw(B, S, N, H)
    run = jax.jit(lambda **told: dot_product_attention(q, k, k, is_causal=True, **told))
    lengths = jnp.array([3, 9])
    plain = run(key_value_seq_lengths=lengths, query_positions=jnp.full((T,), S))
    far = run(key_value_seq_lengths=lengths, query_positions=jnp.full((T,), HIGH))
    np.testing.assert_array_equal(far, plain)
    beyond = run(key_value_seq_lengths=jnp.array([HIGH + 1, -HIGH]))
    np.testing.assert_array_equal(beyond, run(key_value_seq_lengths=jnp.array([S, 0])))


def test_the_layer_has_them_too():
    x, told = draw(T, 8), ids(T)
    call = partial(multi_head_attention, MultiHeadAttentionParams(), x, num_heads=2)
    got = jax.jit(lambda told: call(query_segment_ids=told, key_value_segment_ids=told))(told)
    assert_close(got, call(mask=told[:, None] == told[None]), 1e-12)


@pytest.mark.parametrize("exchange", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_over_devices(exchange, layout):
    """An id means the same on every device; lengths are those of the whole sequence."""
    q, told, lengths, tokens = draw(B, S, N, H), ids(S, B), jnp.array([HIGH, 7]), P(None, "x")
    attend = lambda q, told, lengths: exchange(
        q, q, q, axis_name="x", layout=layout, query_segment_ids=told, key_value_segment_ids=told,
        key_value_seq_lengths=lengths,
    )  # fmt: skip
    mesh = Mesh(jax.devices()[:2], ("x",))
    attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(tokens, tokens, P()), out_specs=tokens))
    lay, back = (parallel.zigzag, parallel.unzigzag) if layout == "zigzag" else (lambda x, n, axis: x,) * 2
    got = back(attend(lay(q, 2, 1), lay(told, 2, 1), lengths), 2, 1)
    same = told[:, None, :, None] == told[:, None, None, :]
    mask = same & (np.arange(S) < np.asarray(lengths)[:, None, None, None])
    assert_close(got, dot_product_attention(q, q, q, mask=mask), 1e-12)
