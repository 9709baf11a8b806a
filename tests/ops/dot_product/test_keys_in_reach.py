"""Keys behind the last that a band over indices lets some query see are left out of a small plane."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, assert_trees_close, thorough

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.plan import Materialized

operator = next(o for o in OPERATORS if o.name == "dot_product_attention")
B, T, S, N, K, H = 2, 5, 12, 4, 2, 8
BANDS = [
    ({"is_causal": True}, 5),
    ({"is_causal": True, "local_window_size": (2, 0)}, 5),
    ({"local_window_size": (1, 3)}, 8),
    ({"local_window_size": (9, 7)}, None),
]


@functools.partial(jax.jit, static_argnames=("is_causal", "local_window_size"))
def definition(**inputs):
    return operator.reference(**inputs)[0]


def arrays(rng, bias):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    inputs = {"query": draw(B, T, N, H), "key": draw(B, S, K, H), "value": draw(B, S, K, 6)}
    inputs |= {"bias": draw(*bias), "sink": draw(N)}
    rest = {
        "mask": jnp.asarray(rng.random((B, 1, T, S)) < 0.8),
        "key_value_seq_lengths": jnp.asarray([3, S], jnp.int32),
    }
    return inputs, rest


@pytest.mark.parametrize(
    "bias", [(1, N, T, S), *(pytest.param(shape, marks=thorough) for shape in ((N, T, 1), (B, 1, 1, S)))]
)
@pytest.mark.parametrize(("band", "keys"), [BANDS[0], *(pytest.param(*x, marks=thorough) for x in BANDS[1:])])
def test_they_have_no_part_and_gradient_zero(band, keys, bias, rng, one_device, monkeypatch):
    inputs, rest = arrays(rng, bias)
    schedules, default = [], planning.default_schedule
    monkeypatch.setattr(
        planning, "default_schedule", lambda *x, **y: schedules.append(default(*x, **y)) or schedules[-1]
    )

    def step(function, inputs, **more):
        out, pullback = jax.vjp(lambda x: function(**x, **rest, **band, **more), inputs)
        (gradients,) = pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))
        return gradients | {"out": out}

    expected = step(definition, inputs)
    assert_trees_close(step(dot_product_attention, inputs), expected, 1e-12)
    assert schedules[0] == Materialized(schedules[0].batch_slices, keys)
    if keys is None:
        return
    # what lies there is not read
    hidden = {name: inputs[name].at[:, keys:].set(jnp.nan) for name in ("key", "value")}
    poisoned = step(dot_product_attention, inputs | hidden, dropout_rate=0.0)
    assert_trees_close(poisoned, expected, 1e-12)
    assert not np.asarray(poisoned["key"][:, keys:]).any()


def test_where_indices_do_not_tell(rng, one_device):
    """Positions are known at run time."""
    inputs, _ = arrays(rng, (1, N, T, S))
    positions = jnp.asarray(rng.permutation(S)[:T][None], jnp.int32)
    got = dot_product_attention(**inputs, is_causal=True, query_positions=positions)
    expected = definition(**inputs, is_causal=True, query_positions=positions)
    assert_close(got, expected, 1e-12)
