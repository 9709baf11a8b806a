"""`GATConv`, `GATv2Conv`, `TransformerConv` of each framework, by the definition."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import (
    FRAMEWORKS,
    assert_all_close,
    assert_tangents_agree,
    frameworks,
    jitted,
    values_and_gradients,
)
from layers.graph_cases import CASES, EDGE, N_DST, N_SRC, NNZ, C, H, build, definition, inputs, parameters

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph import plan, reference


def cases(**default):
    """(framework, case), every one; those that are not named in `framework=cases` are thorough."""
    return [
        pytest.param(framework, name, marks=() if name in default[framework] else thorough)
        for framework in FRAMEWORKS
        for name in CASES
    ]


@cache
def expected(name):
    """(parameters, inputs, the definition's outputs and gradients)."""
    kind, in_channels, options = CASES[name]
    rng = np.random.default_rng(0)
    params = parameters(rng, kind, in_channels, options)
    x, graph, edge = inputs(rng, in_channels, options)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        function = lambda params, x, edge: definition(kind, params, x, graph, edge, options)
        result = jitted(partial(values_and_gradients, function))(params, x, edge)
    return params, (x, graph, edge), result


@pytest.mark.parametrize(
    ("framework", "name"),
    cases(
        flax_linen=("gat_pair", "transformer"),
        flax_nnx=("gatv2_pair",),
        haiku=("transformer_pair",),
        equinox=("gat_pair",),
    ),
)
def test_outputs_and_gradients_are_those_of_the_definition(framework, name):
    params, (x, graph, edge), result = expected(name)
    kind, in_channels, options = CASES[name]
    layer = build(framework, kind, in_channels, **options)

    def function(params, x, edge):
        return layer.call(params, x, graph, edge, return_attention_weights=True)

    got = jitted(partial(values_and_gradients, function))(params, x, edge)
    assert_all_close(got, result, 1e-11)


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("flax_linen", "gat_pair"),
        ("flax_nnx", "gatv2_pair"),
        ("haiku", "transformer_pair"),
        pytest.param("equinox", "gat_pair", marks=thorough),
    ],
)
def test_tangents_agree_with_the_gradients_of_the_definition(framework, name):
    params, (x, graph, edge), (outputs, gradients) = expected(name)
    kind, in_channels, options = CASES[name]
    layer = build(framework, kind, in_channels, forward_mode=True, **options)
    call = lambda params, x, edge: layer.call(params, x, graph, edge, return_attention_weights=True)
    assert_tangents_agree(call, (params, x, edge), outputs, gradients)


@pytest.mark.parametrize(
    ("framework", "name"),
    cases(
        flax_linen=("transformer_pair",),
        flax_nnx=("gatv2_pair",),
        haiku=("transformer_pair",),
        equinox=("transformer_pair",),
    ),
)
def test_initial_parameters(framework, name):
    """Names and shapes as they are documented; Xavier-uniform, and biases 0."""
    kind, in_channels, options = CASES[name]
    arguments = inputs(np.random.default_rng(0), in_channels, options)
    arguments = jax.tree.map(lambda a: a.astype("float32") if a.dtype == float else a, arguments)
    params = build(framework, kind, in_channels, **options).init(jax.random.key(1), *arguments)
    shaped = parameters(np.random.default_rng(0), kind, in_channels, options)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shaped)
    leaves = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(params)}
    for path, x in leaves.items():
        if "bias" in path:
            np.testing.assert_array_equal(x, 0)
        else:
            bound = np.sqrt(6 / sum(x.shape))
            assert 0 < np.abs(x).max() <= bound
            assert np.unique(x).size == x.size
    spread = np.concatenate([np.ravel(x) * np.sqrt(sum(x.shape) / 6) for x in leaves.values()])
    assert np.abs(spread).max() > 0.9
    first = {float(x.ravel()[0]) for x in leaves.values()} - {0.0}
    assert len(first) == sum("bias" not in path for path in leaves)  # no two from one key


@pytest.mark.parametrize(
    "name", ["gat_pair", *(pytest.param(name, marks=thorough) for name in ("gatv2_pair", "transformer_pair"))]
)
def test_without_x64(name):
    """Strict promotion finds a stray float64 or int64 constant."""
    kind, in_channels, options = CASES[name]
    rng = np.random.default_rng(0)
    params, (x, graph, edge) = (
        parameters(rng, kind, in_channels, options),
        inputs(rng, in_channels, options),
    )
    layer = build("flax_linen", kind, in_channels, **options, dropout=0.3)

    def function(params, x, edge):
        return (layer.call(params, x, graph, edge, key=jax.random.key(0)),)

    exact = jitted(partial(values_and_gradients, function))(params, x, edge)
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x, edge))
    with jax.enable_x64(False):
        got = jitted(partial(values_and_gradients, function))(*narrow)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_all_close(got, exact, 1e-4)  # the gradient of the bias of lin_key cancels to 0


@pytest.mark.parametrize("framework", frameworks())
def test_bfloat16(framework):
    kind, in_channels, options = CASES["gat_pair"]
    rng = np.random.default_rng(0)
    narrow = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    params = narrow(parameters(rng, kind, in_channels, options))
    x, graph, edge = inputs(rng, in_channels, options)
    x, edge = narrow(x), narrow(edge)
    flax = framework.startswith("flax")
    layer = build(framework, kind, in_channels, **options, **({"dtype": jnp.bfloat16} if flax else {}))
    out, weights = layer.call(wide(params) if flax else params, x, graph, edge, return_attention_weights=True)
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.bfloat16)
    exact = build(framework, kind, in_channels, **options)
    assert_close(out, exact.call(wide(params), wide(x), graph, wide(edge)), 4e-2)


@thorough
@pytest.mark.parametrize("name", ["gat_pair", "gatv2_pair", "transformer_pair"])
def test_nan_in_the_padding_of_edge_features_reaches_nothing(name):
    kind, in_channels, options = CASES[name]
    rng = np.random.default_rng(0)
    params, (x, graph, edge) = (
        parameters(rng, kind, in_channels, options),
        inputs(rng, in_channels, options),
    )
    ends = reference.ends(graph)
    padded = BipartiteCSC.from_coo(*map(np.asarray, ends), N_SRC, N_DST, capacity=NNZ + 3)
    poisoned = jnp.concatenate([edge, jnp.full((3, EDGE), jnp.nan)])
    layer = build("flax_linen", kind, in_channels, **options)

    def run(graph, edge):
        function = lambda params, x: layer.call(params, x, graph, edge)
        return jitted(partial(values_and_gradients, function))(params, x)

    assert_all_close(run(padded, poisoned), run(graph, edge), 1e-12)


def test_gat_forms_nothing_as_wide_as_its_edges_and_heads(monkeypatch):
    """lin_edge and att_edge are joined before they meet the edges; the operator itself is in chunks."""
    for limit in ("whole_elements", "chunk_elements"):
        monkeypatch.setattr(plan, limit, lambda: 500)
    options, nnz = dict(edge_dim=EDGE), 1009
    rng = np.random.default_rng(0)
    params = parameters(rng, "GATConv", 6, options)
    graph = BipartiteCSC.from_coo(*rng.integers(0, N_SRC, (2, nnz)), N_SRC, N_SRC)
    x, edge = jnp.zeros((N_SRC, 6)), jnp.zeros((nnz, EDGE))
    layer = build("flax_linen", "GATConv", 6, **options)
    function = lambda params: layer.call(params, x, graph, edge).sum()
    text = str(jax.make_jaxpr(jax.grad(function))(params))
    assert f"[{nnz},{H}]" in text
    assert f"[{nnz},{H * C}]" not in text
    assert f"[{nnz},{H},{C}]" not in text
