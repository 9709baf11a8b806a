"""Graph layers of Equinox through what treats a module as a pytree: training, scan, checkpoints."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough

from jax_attn_bwd import BipartiteCSC

CASES = {
    "gat": ("GATConv", {}),
    "gat_residual": ("GATConv", dict(residual=True, bias=False)),
    "gatv2": ("GATv2Conv", {}),
    "gatv2_shared": ("GATv2Conv", dict(share_weights=True)),
    "transformer": ("TransformerConv", {}),
    "transformer_plain": ("TransformerConv", dict(root_weight=False)),
}

NAMES = [pytest.param(name, marks=() if name == "gatv2" else thorough) for name in CASES]


def build(name, key=0):
    """(equinox, a layer, x, graph)."""
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers import equinox as layers

    kind, options = CASES[name]
    layer = getattr(layers, kind)(5, 4, heads=2, **options, key=jax.random.key(key))
    graph = BipartiteCSC.from_coo([0, 1, 2, 2], [1, 1, 0, 2], 3, 3)
    return eqx, layer, jax.random.normal(jax.random.key(7), (3, 5)), graph


@thorough
@pytest.mark.parametrize("name", CASES)
def test_training_steps_trace_once_and_scan(name):
    eqx, layer, x, graph = build(name)
    optax = pytest.importorskip("optax")
    optimizer, traces = optax.sgd(0.1), []

    def step(model, state):
        traces.append(1)
        loss = lambda model: jnp.sin(model(x, graph)).sum()
        grads = eqx.filter_grad(loss)(model)
        arrays = eqx.filter(model, eqx.is_array)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.apply_updates(model, updates), state

    state = optimizer.init(eqx.filter(layer, eqx.is_array))
    jitted, model = eqx.filter_jit(step), layer
    for _ in range(3):
        model, state = jitted(model, state)
    assert len(traces) == 1
    arrays, rest = eqx.partition(layer, eqx.is_array)

    def body(arrays, _):
        model, _ = step(eqx.combine(arrays, rest), state)
        return eqx.filter(model, eqx.is_array), None

    scanned, _ = jax.lax.scan(body, arrays, None, length=3)
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(scanned), strict=True)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)
    expected = eqx.filter(model, eqx.is_array)
    assert jax.tree.structure(scanned) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_into_another_layer(name):
    eqx, layer, x, graph = build(name)
    mapped = jax.tree.map(lambda leaf: leaf, layer)
    assert eqx.tree_equal(mapped, layer)
    assert mapped.__doc__ == type(layer).__doc__
    assert mapped.__module__ == type(layer).__module__
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, mapped)
    file.seek(0)
    _, other, _, _ = build(name, key=1)
    assert not eqx.tree_equal(other, layer)
    loaded = eqx.tree_deserialise_leaves(file, other)
    assert eqx.tree_equal(loaded, layer)
    assert_close(eqx.filter_jit(lambda layer: layer(x, graph))(loaded), layer(x, graph), 1e-9)
