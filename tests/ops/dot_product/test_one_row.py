"""What is computed on one CPU alone: one query for each key head, as a pooling token has, and empty rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product.reference import dot_product_attention as definition

B, S, N, H = 3, 40, 5, 24


@pytest.mark.parametrize("T", [1, 2])
def test_all_products_of_one_row_read_one_copy_of_keys_and_one_of_values(T, one_device):
    """More rows' products read both in two orders, and give their gradients in that of rows."""

    def step(query, key, value, dout):
        out, pull = jax.vjp(dot_product_attention, query, jnp.tanh(key), value)
        return out, pull(dout)

    jax.clear_caches()  # what was traced for several devices
    shapes = [jax.ShapeDtypeStruct((B, n, N, H), jnp.float32) for n in (T, S, S, T)]
    compiled = jax.jit(step).lower(*shapes).compile().as_text()
    jax.clear_caches()
    entry = compiled[compiled.index("ENTRY") :]
    orders = {"as they lie": f"{B},{N},{S},{H}", "turned": f"{B},{N},{H},{S}"}
    count = lambda shape: len(re.findall(rf"= f32\[{shape}\]\S* fusion\(", entry))
    found = {name: count(shape) for name, shape in orders.items()}
    assert found == ({"as they lie": 2, "turned": 0} if T == 1 else {"as they lie": 4, "turned": 2})


@pytest.mark.parametrize(("S", "sink"), [(7, None), (7, -jnp.inf), (1, 0.5)])
def test_rows_that_see_nothing(S, sink, one_device, rng):
    """Their maximum is a finite number; what they do not see is not read."""
    query, key, value, dout = (jnp.asarray(rng.standard_normal((2, n, 3, 4))) for n in (5, S, S, 5))
    mask = jnp.asarray(rng.random((2, 1, 5, S)) < 0.6).at[0, 0, 2].set(False).at[1, 0, :, 0].set(False)
    bias = jnp.asarray(rng.standard_normal((2, 3, 5, S))).at[1, :, 4].set(-jnp.inf)
    given = {} if sink is None else {"sink": jnp.full(3, sink)}
    jax.clear_caches()  # what was traced for several devices

    def of(call, key):
        return jax.vjp(lambda q, k, v: call(q, k, v, bias, mask, **given), query, key, value)

    out, pull = of(jax.jit(dot_product_attention), key.at[1, 0].set(jnp.nan))
    expected, pull_expected = of(lambda *given, **options: definition(*given, **options)[0], key)
    jax.clear_caches()
    assert_close(out, expected, 1e-12)
    for found, other in zip(pull(dout), pull_expected(dout), strict=True):
        assert_close(found, other, 1e-12)
    np.testing.assert_array_equal(out[0, 2], 0)
