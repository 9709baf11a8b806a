"""`deterministic` of operators, now `deterministic_sums`: it still works, and says what it means."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_attn_bwd as jab
from jax_attn_bwd import parallel
from jax_attn_bwd._core import targets

X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 2, 4)))
TOKENS, NO_PARAMS = X[0].reshape(4, 8), jab.MultiHeadAttentionParams()
MAP = (jnp.ones((1, 6, 1, 1)), ((2, 3),), jnp.full((1, 1, 1, 1, 1, 2), 0.5), jnp.ones((1, 1, 1, 1, 1)))


def exchanged(exchange, **options):
    tokens = P(None, "sequence")
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("sequence",))
    call = partial(exchange, axis_name="sequence", **options)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))(X, X, X)


def backward(**options):
    out, lse = jab.dot_product_attention(X, X, X, return_residual=True)
    return jab.dot_product_attention_bwd(X, X, X, X, out=out, lse=lse, **options)


CALLS = {
    "dot_product_attention": partial(jab.dot_product_attention, X, X, X),
    "dot_product_attention_bwd": backward,
    "multi_head_attention": partial(jab.multi_head_attention, NO_PARAMS, TOKENS, num_heads=2),
    "multi_head_attention_bwd": partial(
        jab.multi_head_attention_bwd, jnp.ones((4, 16)), NO_PARAMS, TOKENS, num_heads=2
    ),
    "ring_attention": partial(exchanged, parallel.ring_attention),
    "all_gather_attention": partial(exchanged, parallel.all_gather_attention),
    "ulysses_attention": partial(exchanged, parallel.ulysses_attention),
    "multi_scale_deformable_attention": partial(jab.multi_scale_deformable_attention, *MAP),
    "multi_scale_deformable_attention_bwd": partial(
        jab.multi_scale_deformable_attention_bwd, jnp.ones((1, 1, 1)), *MAP
    ),
}


@pytest.mark.parametrize("operator", CALLS)
def test_the_former_name_warns_of_both_meanings(operator):
    with pytest.warns(DeprecationWarning, match=f"^{operator}: .* sums repeat .* in layers .*_sums=False"):
        CALLS[operator](deterministic=False)
    with pytest.raises(ValueError, match="deterministic_sums must say what deterministic=True"):
        CALLS[operator](deterministic=True, deterministic_sums=False)


def test_it_points_at_the_caller_and_has_its_effect(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS["multi_scale_deformable_attention"](deterministic=True)
    assert [w.filename for w in caught] == [__file__]
    monkeypatch.setattr(targets, "platform", lambda: "gpu")

    def sorts(**options):
        call = partial(CALLS["multi_scale_deformable_attention_bwd"], **options)
        return " sort[" in str(jax.make_jaxpr(call)())

    with pytest.warns(DeprecationWarning, match="deterministic_sums=True"):
        assert sorts(deterministic=True)
    with pytest.warns(DeprecationWarning, match="deterministic_sums=False"):
        assert not sorts(deterministic=False)
