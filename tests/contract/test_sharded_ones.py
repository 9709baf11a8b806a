"""One batch entry on a mesh whose batch axis has one device: JAX names that axis in the type all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import shapes
from contract.programs import is_kernel
from helpers import assert_close, assert_trees_close, case_params, differentiated, firsts, quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product import plan as planning


def letters(operator, name, x):
    return operator.axes.get(name, "")[-x.ndim :] if x.ndim else ""


def has_batch(operator, case):
    return any("B" in letters(operator, name, x) for name, x in shapes(case).items())


CASES = [
    param
    for param in firsts(case_params("shard"))
    if not is_kernel(*param.values[:2]) and has_batch(param.values[0], param.values[2])
]


def axes(operator, name, x) -> P:
    """Every batch axis over "b", and heads over "h"."""
    names = {"B": "b", "N": "h"} if name not in operator.whole else {}
    return P(*(names.get(letter) for letter in letters(operator, name, x)))


@pytest.mark.parametrize(("operator", "implementation", "case"), CASES)
def test_one_entry(operator, implementation, case, monkeypatch):
    """Values and gradients are as on one device; tile by tile."""
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)
    options = {**case.options, "implementation": implementation}
    arrays = {
        name: jnp.asarray(x[:1] if letters(operator, name, x).startswith("B") else x)
        for name, x in case.arrays(np.float64).items()
    }
    names = list(differentiated(operator, arrays))

    def step(given):
        rest = {name: x for name, x in given.items() if name not in names}
        call = lambda inputs: operator.call(**inputs, **rest, **options)
        outputs, pull = jax.vjp(call, {name: given[name] for name in names})
        return dict(zip(operator.outputs, outputs, strict=True)) | pull(tuple(map(jnp.sin, outputs)))[0]

    expected = quick_jit(step)(arrays)
    mesh = jax.make_mesh((1, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        put = lambda name, x: jax.device_put(x, NamedSharding(mesh, axes(operator, name, x)))
        placed = {name: put(name, x) if name in operator.axes else x for name, x in arrays.items()}
        assert any("b" in jax.typeof(x).sharding.spec for name, x in placed.items() if name in operator.axes)
        got = quick_jit(step)(placed)

    # a bias of the keys moves all logits of a row alike: its gradient is the rounding of a sum that is 0
    if "key_bias" in expected:
        terms = np.abs(expected["query_bias"]).max()
        for grads in (got, expected):
            assert np.abs(grads.pop("key_bias")).max() <= 1e-12 * terms
    assert_trees_close(got, expected, 1e-12)


def test_one_entry_of_many_tokens(monkeypatch):
    """The tokens take several tiles, and the last one is filled up."""
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 1, 520, 2, 4)))
    gradients = jax.grad(
        lambda q, k, v: (dot_product_attention(q, k, v, is_causal=True) ** 2).sum(), (0, 1, 2)
    )
    expected = quick_jit(gradients)(q, k, v)
    mesh = jax.make_mesh((1, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = (jax.device_put(x, NamedSharding(mesh, P("b", None, "h"))) for x in (q, k, v))
        got = quick_jit(gradients)(*placed)
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, 1e-12)
