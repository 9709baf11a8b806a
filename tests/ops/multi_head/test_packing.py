"""Sequences packed into one row: each as by itself, with every product in the precision asked for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, thorough
from jax import lax
from ops.multi_head.calls import EQ, HV, H, K, draw, layer, leaves_close, vjp

from jax_attn_bwd import explain, multi_head_attention

LENGTHS = (3, 5, 2)
IDS = jnp.asarray(np.repeat(np.arange(3), LENGTHS))
PLACES = jnp.asarray(np.concatenate([np.arange(n) for n in LENGTHS]))


def self_attention(**options):
    """(params, x [10, Eq], options of the packed row)."""
    params = layer(key_kernel=draw(EQ, K, H), value_kernel=draw(EQ, K, HV))
    ids = dict(query_segment_ids=IDS, key_value_segment_ids=IDS)
    places = dict(query_positions=PLACES, key_value_positions=PLACES)
    return params, draw(sum(LENGTHS), EQ), ids | places | options


def test_packed_sequences_are_what_each_is_by_itself():
    """With appended rows, which each of them sees."""
    band = dict(is_causal=True, local_window_size=(2, 0), add_zero_attn=True, logits_soft_cap=2.0)
    params, x, packed = self_attention(**band)

    def each(params, x):
        ends = np.cumsum(LENGTHS)[:-1]
        return jnp.concatenate([multi_head_attention(params, a, **band) for a in jnp.split(x, ends)])

    got = vjp(partial(multi_head_attention, **packed), params, x)
    leaves_close(got, vjp(each, params, x))


def test_every_product_is_of_the_precision_asked_for():
    params, x, packed = self_attention(add_zero_attn=True, logits_soft_cap=2.0, precision="highest")
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))

    def loss(params, x):
        return jnp.sin(multi_head_attention(params, x, **packed)).sum()

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*narrow))
    highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert 0 < program.count("dot_general[") == highest


@thorough
def test_a_batch_of_packed_rows_by_vmap_remat_and_grad_of_grad():
    params, x, packed = self_attention(logits_soft_cap=2.0, is_causal=True)
    rows = jnp.stack([x, x[::-1]])
    ids = jnp.stack([IDS, jnp.sort(IDS % 2)])

    def loss(x, ids, remat):
        own = packed | dict(query_segment_ids=ids, key_value_segment_ids=ids)
        call = lambda params, x: jnp.sin(multi_head_attention(params, x, **own)).sum()
        call = jax.checkpoint(call) if remat else call
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(call, (0, 1))(params, x)))

    mapped = jax.jit(jax.vmap(partial(jax.grad(loss), remat=True)))(rows, ids)
    for got, *one in zip(mapped, rows, ids, strict=True):
        assert_close(got, jax.jit(partial(jax.grad(loss), remat=False))(*one), 1e-11)


def test_lengths_may_be_lists_and_explain_takes_all():
    params, x, packed = self_attention(
        query_seq_lengths=7, key_value_seq_lengths=8, precision=lax.Precision.HIGH
    )
    out = multi_head_attention(params, x, **packed)
    expected = multi_head_attention(params, x, **packed | dict(query_seq_lengths=jnp.asarray(7)))
    assert_close(out, expected, 0)
    assert explain(multi_head_attention, params, x, **packed)["xla"] == "ok"
