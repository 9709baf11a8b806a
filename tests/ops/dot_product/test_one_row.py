"""One query for each key head, as a pooling token has, on a CPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_attn_bwd import dot_product_attention

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
