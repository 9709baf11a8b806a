"""Strips of GPUs where arrays tell who sees whom: mask arrays, lengths, segments and positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, quick_jit, thorough

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core.targets import aimed_at
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import reference
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Strips, plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

B, T, S, N = 2, 50, 70, 4


def schedule(length, **mask):
    """The schedule of 32 sequences of that length on a GPU."""
    x = jax.ShapeDtypeStruct((32, length, 12, 64), jnp.bfloat16)
    with aimed_at("H200"):
        return plan("xla", Options(scale=1.0), Operands(x, x, x, mask=Mask(**mask))).schedule


def test_what_arrays_tell_goes_by_strips():
    """In one tile nothing is skipped, and padding skips little. In more, segments and arrays skip tiles."""
    array = lambda *shape, dtype=jnp.bool_: jax.ShapeDtypeStruct(shape, dtype)
    lengths = array(32, dtype=jnp.int32)
    assert schedule(512, elements=array(32, 1, 512, 512)) == schedule(512)
    for length in (512, 2048):
        for mask in ({"elements": array(32, 1, 1, length)}, {"key_value_seq_lengths": lengths}):
            assert schedule(length, **mask) == schedule(length)
        assert not isinstance(schedule(length), Strips)
    assert not isinstance(schedule(2048, elements=array(32, 1, 2048, 2048)), Strips)
    ids = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), array(32, 2048, dtype=jnp.int32))
    assert schedule(2048, **ids).runtime_extent
    assert not isinstance(schedule(2048, elements=array(32, 1, 1, 2048), **ids), Strips)


@pytest.fixture
def strips(monkeypatch):
    def played(head_slices, runtime_extent=False):
        monkeypatch.setattr(planning, "on_gpu", lambda *_: Strips(24, 40, head_slices, runtime_extent))

    jax.clear_caches()  # what was traced with other tiles
    yield played
    jax.clear_caches()


MASKS = {
    "keys": (B, 1, 1, S),
    "keys of all": (S,),
    "rows": (B, 1, T, 1),
    "heads": (1, N, T, S),
    "plane": (T, S),
}
CALLS = {  # slices of merged batch and heads, whether widths are told at run time, mask array, options
    "keys": (2, False, "keys", {}),
    "keys, causal": (1, False, "keys", {"is_causal": True}),
    "keys of each head": (0, False, "heads", {"local_window_size": (9, 30)}),
    "rows": (1, False, "rows", {}),
    "plane, lengths": (4, False, "plane", {"key_value_seq_lengths": [33, 70], "query_seq_lengths": [50, 20]}),
    "segments": (2, False, None, {"query_segment_ids": "t", "key_value_segment_ids": "s", "is_causal": True}),
    "positions": (1, False, "keys", {"query_positions": "t", "local_window_size": (9, 3)}),
    "keys at run time": (2, True, "keys", {}),
    "keys of all at run time": (0, True, "keys of all", {"query_seq_lengths": [50, 20], "is_causal": True}),
}


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if call == "keys, causal" else thorough) for call in CALLS]
)
def test_strips_give_the_definition(call, strips, rng):
    """Outputs, and gradients for both cotangents; what the array hides from all may be NaN."""
    head_slices, runtime_extent, name, options = CALLS[call]
    strips(head_slices, runtime_extent)
    random = {"t": jnp.asarray(rng.integers(0, 3, (B, T))), "s": jnp.asarray(rng.integers(0, 3, (B, S)))}
    options = {k: random.get(x, x) if isinstance(x, str) else x for k, x in options.items()}
    options = {k: jnp.asarray(x) if isinstance(x, list) else x for k, x in options.items()}
    mask = None if name is None else jnp.asarray(rng.random(MASKS[name]) < 0.6)
    shapes = (T, N, 8), (S, 2, 8), (S, 2, 6), (T, N, 6), (T, N)
    q, k, v, dout, dlse = (jnp.asarray(rng.normal(size=(B, *shape))) for shape in shapes)
    poisoned = (k, v)
    if name == "keys":
        poisoned = [jnp.where(mask[:, 0, 0, :, None, None], x, jnp.nan) for x in (k, v)]

    def step(function, k, v):
        out, pull = jax.vjp(lambda q, k, v: function(q, k, v, mask=mask, **options), q, k, v)
        return out, pull((dout, jnp.where(jnp.isfinite(out[1]), dlse, 0)))

    found = jax.jit(
        partial(step, partial(dot_product_attention, return_residual=True)), compiler_options=QUICK
    )
    with jax.numpy_rank_promotion("allow"):
        expected = quick_jit(partial(step, reference.dot_product_attention))(k, v)
    for x, y in zip(jax.tree.leaves(found(*poisoned)), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-10)


@thorough
def test_derivatives_of_a_gradient_and_under_vmap(strips, rng):
    strips(2)
    mask = jnp.asarray(rng.random((3, B, 1, 1, S)) < 0.6)
    q, k, v, dout, along = (jnp.asarray(rng.normal(size=(B, n, 2, 8))) for n in (T, S, S, T, T))

    def second(function):
        def dq(q, mask):
            return jax.vjp(lambda q: function(q, k, v, mask=mask), q)[1](dout)[0]

        derivative = jax.grad(lambda q, mask: (dq(q, mask) * along).sum())
        return jax.jit(jax.vmap(derivative, (None, 0)), compiler_options=QUICK)(q, mask)

    with jax.numpy_rank_promotion("allow"):
        expected = second(lambda *args, **options: reference.dot_product_attention(*args, **options)[0])
    assert np.abs(expected).max() > 0.01
    assert_close(second(dot_product_attention), expected, 1e-10)
