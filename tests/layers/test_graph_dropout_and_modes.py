"""Dropout of the graph layers, and what the frameworks do to layers: modes, remat, scan, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import FRAMEWORKS, assert_all_close
from layers.graph_cases import KINDS, C, H, build, inputs, parameters

from jax_attn_bwd import BipartiteCSC


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        *((framework, "GATConv") for framework in FRAMEWORKS),
        *(pytest.param("flax_linen", kind, marks=thorough) for kind in KINDS[1:]),
    ],
)
def test_dropout(framework, kind):
    """It drops the given share of the weights, and the rest grows; a key repeats it; evaluation has none."""
    rate, nnz, rng = 0.4, 4000, np.random.default_rng(0)
    options, nodes = dict(dropout=rate), jnp.asarray(rng.standard_normal((50, 6)))
    graph = BipartiteCSC.from_coo(*rng.integers(0, 50, (2, nnz)), 50, 50)
    layer, params = build(framework, kind, 6, **options), parameters(rng, kind, 6, options)

    def weights(key, **more):
        return layer.call(params, nodes, graph, None, key=key, return_attention_weights=True, **more)[1]

    kept, dropped = weights(None), weights(jax.random.key(3))
    assert (np.asarray(kept) > 0).all()
    gone = np.asarray(dropped) == 0
    spread = np.sqrt(rate * (1 - rate) / gone.size)
    assert abs(gone.mean() - rate) < 5 * spread
    assert (gone[:, 0] != gone[:, 1]).any()
    assert_close(np.where(gone, 0, kept) / (1 - rate), dropped, 1e-12)
    np.testing.assert_array_equal(weights(jax.random.key(3)), dropped)
    assert ((np.asarray(weights(jax.random.key(4))) == 0) != gone).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_without_a_key_is_an_error(framework):
    layer = build(framework, "GATConv", 6, dropout=0.5)
    rng = np.random.default_rng(0)
    params, (x, graph, _) = parameters(rng, "GATConv", 6, {}), inputs(rng, 6, {})
    forget, error, message = {
        "flax_linen": ({"deterministic": None}, Exception, "deterministic"),
        "flax_nnx": ({"deterministic": False, "rngs": False}, AttributeError, "dropout"),
        "haiku": ({"is_training": None}, ValueError, "GATConv: is_training must be given .*0.5"),
        "equinox": ({"inference": False}, ValueError, "GATConv: key must be given while .*inference_mode"),
    }[framework]
    with pytest.raises(error, match=message):
        layer.call(params, x, graph, None, **forget)


def test_flax_nnx_holds_random_state_where_it_drops_and_nowhere_else():
    nnx = pytest.importorskip("flax.nnx")
    from jax_attn_bwd.layers.flax_nnx import GATConv

    for rate in (0.0, 0.5):
        layer = nnx.eval_shape(lambda rate=rate: GATConv(6, C, dropout=rate, rngs=nnx.Rngs(0)))
        assert bool(nnx.state(layer, nnx.RngState)) == bool(rate)


@thorough
def test_flax_nnx_modes_and_transformations():
    pytest.importorskip("flax")
    from flax import nnx

    from jax_attn_bwd.layers.flax_nnx import GATConv

    x, graph, _ = inputs(np.random.default_rng(0), 6, {})
    layer = GATConv(6, C, H, dropout=0.5, param_dtype=float, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda layer: layer(x, graph, return_attention_weights=True)[1])
    first, second = call(layer), call(layer)  # every call draws anew
    assert (np.asarray(first) != np.asarray(second)).any()
    layer.eval()
    np.testing.assert_array_equal(call(layer), call(layer))
    assert (np.asarray(call(layer)) > 0).all()
    layer.train()
    assert (np.asarray(call(layer)) == 0).any()
    layer.eval()
    grads = nnx.grad(lambda layer: jnp.sin(layer(x, graph)).sum())(layer)
    assert grads["lin"]["kernel"].shape == (6, H * C)
    assert not nnx.state(GATConv(6, C, rngs=nnx.Rngs(0)), nnx.RngState)  # none without dropout


def test_equinox_modes_and_transformations():
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import GATv2Conv

    x, graph, _ = inputs(np.random.default_rng(0), 6, {})
    layer = GATv2Conv(6, C, H, dropout=0.5, key=jax.random.key(0))
    call = eqx.filter_jit(lambda layer, key: layer(x, graph, key=key, return_attention_weights=True)[1])
    assert (np.asarray(call(layer, jax.random.key(1))) == 0).any()
    assert (np.asarray(call(eqx.nn.inference_mode(layer), None)) > 0).all()
    loss = lambda layer: jnp.sin(layer(x, graph, inference=True)).sum()
    grads = eqx.filter_jit(eqx.filter_grad(loss))(layer)
    assert grads.att.shape == (H, C)
    assert (np.asarray(grads.lin_r.weight) != 0).any()


@thorough
def test_flax_linen_transformations():
    """The attribute or the argument says whether to drop out; remat draws the same mask again."""
    flax = pytest.importorskip("flax")
    from jax_attn_bwd.layers.flax_linen import TransformerConv

    x, graph, _ = inputs(np.random.default_rng(0), 6, {})
    variables = {"params": parameters(np.random.default_rng(0), "TransformerConv", 6, {})}

    def loss(cls, variables):
        layer = cls(C, H, dropout=0.5, deterministic=False)
        out = layer.apply(variables, x, graph, rngs={"dropout": jax.random.key(0)})
        return jnp.sin(out).sum()

    plain = jax.grad(lambda v: loss(TransformerConv, v))(variables)
    again = jax.grad(lambda v: loss(flax.linen.remat(TransformerConv), v))(variables)
    assert_all_close(again, plain, 1e-12)
