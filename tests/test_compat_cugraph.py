"""`compat.cugraph` against the formulas of the source system written out densely, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.compat import cugraph

N_SRC, N_DST, NNZ, H, D = 7, 6, 15, 2, 3
DIM, DIM_EDGE = H * D, 4
ACTIVATIONS = {
    "ELU": lambda z, alpha: np.where(z > 0, z, np.exp(np.minimum(z, 0)) - 1),
    "LeakyReLU": lambda z, alpha: np.where(z > 0, z, alpha * z),
    "Linear": lambda z, alpha: z,
    "ReLU": lambda z, alpha: np.maximum(z, 0),
    "Scalar": lambda z, alpha: alpha * z,
    "Sigmoid": lambda z, alpha: 1 / (1 + np.exp(-z)),
    "Tanh": lambda z, alpha: np.tanh(z),
}
SLOPES = {
    "ELU": lambda z, alpha: np.where(z > 0, 1, np.exp(np.minimum(z, 0))),
    "LeakyReLU": lambda z, alpha: np.where(z > 0, 1, alpha),
    "Linear": lambda z, alpha: np.ones_like(z),
    "ReLU": lambda z, alpha: np.where(z > 0, 1.0, 0.0),
    "Scalar": lambda z, alpha: np.full_like(z, alpha),
    "Sigmoid": lambda z, alpha: np.exp(-z) / (1 + np.exp(-z)) ** 2,
    "Tanh": lambda z, alpha: 1 - np.tanh(z) ** 2,
}
FAMILIES = ("mha_gat_n2n", "mha_gat_n2n_efeat", "mha_gat_v2_n2n", "mha_gat_v2_n2n_efeat")


@pytest.fixture
def edges(rng):
    """(source, destination) of each edge in the caller's order; node 2 has none, one edge is there twice."""
    dst = rng.choice([0, 1, 3, 4, 5], NNZ)
    src = rng.integers(0, N_SRC, NNZ)
    src[3], dst[3] = src[9], dst[9]
    return src, dst


def structure(edges, map_csc_to_coo=True):
    """The graph as the source is given it: sorted by destination, with the map to the caller's order."""
    src, dst = edges
    order = np.argsort(dst, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=N_DST))])
    return cugraph.make_bipartite_csc(offsets, src[order], N_SRC, order if map_csc_to_coo else None)


def arrays(rng, family):
    """{argument: array} of a forward call."""
    efeat, v2 = "efeat" in family, "v2" in family
    width = DIM if v2 else DIM_EDGE
    found = {"src_node_embedding": (N_SRC, DIM), "dst_node_embedding": (N_DST, DIM)}
    found |= {"edge_embedding": (NNZ, width)} if efeat else {}
    found["attention_weights"] = (DIM if v2 else 2 * DIM + efeat * width,)
    return {name: rng.standard_normal(shape) for name, shape in found.items()}


def heads(x):
    return x.reshape(len(x), H, -1)


def source(family, edges, params, g, *, attention_weights, edge_embedding=None, **embeddings):
    """(output, softmax_scores, gradients) edge by edge, the gradients by their formulas."""
    (src, dst), a = edges, attention_weights
    act, slope = (
        lambda z, f=table[params.activation]: f(z, params.alpha) for table in (ACTIVATIONS, SLOPES)
    )
    hs = heads(embeddings["src_node_embedding"])[src]
    hd = heads(embeddings["dst_node_embedding"])[dst]
    he = np.zeros((NNZ, H, 1)) if edge_embedding is None else heads(edge_embedding)
    if "v2" in family:
        a = a.reshape(H, D)
        z = hs + hd + he
        s = (a * act(z)).sum(-1)
    else:
        a_src, a_dst, a_edge = (x.reshape(H, -1) for x in np.split(a, (DIM, 2 * DIM)))
        z = (hs * a_src).sum(-1) + (hd * a_dst).sum(-1) + (he * a_edge).sum(-1) * (a_edge.size > 0)
        s = act(z)
    into = dst[None] == np.arange(N_DST)[:, None]  # [N_DST, NNZ]
    top = np.array([s[row].max(0) if row.any() else np.zeros(H) for row in into])
    e = np.exp(s - top[dst])
    p = e / (into @ e)[dst]
    per_head = np.einsum("ie,eh,ehd->ihd", into.astype(float), p, hs)
    out = per_head.reshape(N_DST, DIM) if params.concat_heads else per_head.mean(1)

    g = heads(g) if params.concat_heads else np.repeat(g[:, None] / H, H, 1)
    ds = p * ((g[dst] * hs).sum(-1) - (g * per_head).sum(-1)[dst])
    if "v2" in family:
        dz = ds[..., None] * a * slope(z)
        dhs, dhd, dhe, da = dz, dz, dz, (ds[..., None] * act(z)).sum(0).ravel()
    else:
        dz = (ds * slope(z))[..., None]
        dhs, dhd, dhe = dz * a_src, dz * a_dst, dz * a_edge
        da = np.concatenate([(dz * x).sum(0).ravel() for x in (hs, hd, he)])[: a.size]
    grads = {
        "src_node_embedding": np.zeros((N_SRC, DIM)),
        "dst_node_embedding": np.zeros((N_DST, DIM)),
    }
    np.add.at(grads["src_node_embedding"], src, (dhs + p[..., None] * g[dst]).reshape(NNZ, DIM))
    np.add.at(grads["dst_node_embedding"], dst, dhd.reshape(NNZ, DIM))
    grads |= {"attention_weights": da, "edge_embedding": dhe.reshape(NNZ, -1)}
    return out, np.stack([s.T, p.T]), grads


def call(family, graph, params, g, operands):
    """(output, softmax_scores, gradients) by the package, both directions in one program."""
    forward, backward = (getattr(cugraph, f"{family}_{way}") for way in ("fwd", "bwd"))

    @jax.jit
    def run(g, *arrays):
        out, planes = forward(*arrays, graph, params, return_softmax_scores=True)
        return out, planes, backward(g, *arrays, planes, graph, params)

    return run(g, *operands.values())


def cotangent(rng, params):
    return rng.standard_normal((N_DST, DIM if params.concat_heads else D))


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_as_the_source(rng, edges, v2, activation):
    """Outputs, both planes of scores in the caller's order, every gradient."""
    case = list(ACTIVATIONS).index(activation)
    family, concat = FAMILIES[2 * v2 + case % 2], case % 4 < 2
    params = cugraph.mha_params(H, concat, activation, 0.3)
    operands, g = arrays(rng, family), cotangent(rng, params)
    out, planes, grads = source(family, edges, params, g, **operands)
    got, got_planes, got_grads = call(family, structure(edges), params, g, operands)
    assert_close(got, out, 1e-13, "output_embedding")
    assert_close(got_planes[0], planes[0], 1e-13, "scores before the softmax")
    assert_close(got_planes[1], planes[1], 1e-13, "scores after the softmax")
    assert set(got_grads._fields) == {f"grad_{name}" for name in operands}
    for name in operands:
        assert_close(getattr(got_grads, f"grad_{name}"), grads[name], 1e-12, name)
    np.testing.assert_array_equal(got[2], 0)  # node 2 has no edge
    np.testing.assert_array_equal(got_grads.grad_dst_node_embedding[2], 0)


@pytest.mark.parametrize("family", ["mha_gat_n2n_efeat", "mha_gat_v2_n2n"])
def test_a_refused_gradient_is_none_and_the_others_stay(rng, edges, family):
    params = cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    graph, backward = structure(edges), getattr(cugraph, f"{family}_bwd")
    *_, full = call(family, graph, params, g, operands)
    for refused, flag in zip(full._fields, (None, False, np.False_, False), strict=False):
        grads = backward(g, *operands.values(), None, graph, params, **{refused: flag})
        assert getattr(grads, refused) is None
        for name in set(full._fields) - {refused}:
            assert_close(getattr(grads, name), getattr(full, name), 1e-13, name)
    none = dict.fromkeys(full._fields)
    assert set(backward(g, *operands.values(), None, graph, params, **none)) == {None}


@pytest.mark.parametrize("family", ["mha_gat_n2n", "mha_gat_v2_n2n_efeat"])
def test_the_forward_differentiates_to_the_backward(rng, edges, family):
    params = cugraph.mha_params(H, False, "Tanh")
    operands, g = arrays(rng, family), cotangent(rng, params)
    graph, forward = structure(edges), getattr(cugraph, f"{family}_fwd")
    _, _, grads = call(family, graph, params, g, operands)
    _, pullback = jax.vjp(
        jax.jit(lambda *arrays: forward(*arrays, graph, params)), *operands.values()
    )
    for name, gradient in zip(operands, pullback(jnp.asarray(g)), strict=True):
        assert_close(gradient, getattr(grads, f"grad_{name}"), 1e-12, name)


def test_scores_are_differentiable(rng, edges):
    """Plane 1 is the softmax of plane 0, and plane 0 linear in the weights of a linear activation."""
    params, operands = cugraph.mha_params(H, True, "Linear"), arrays(rng, "mha_gat_n2n")
    src, dst, a = operands.values()
    weight = rng.standard_normal((2, H, NNZ))

    def planes(a):
        return cugraph.mha_gat_n2n_fwd(
            src, dst, a, structure(edges), params, return_softmax_scores=True
        )[1]

    _, pullback = jax.vjp(planes, jnp.asarray(a))
    (da,) = pullback(jnp.asarray(weight))
    step = 1e-6 * rng.standard_normal(a.shape)
    change = (weight * np.asarray(planes(a + step) - planes(a - step))).sum() / 2
    assert_close(np.vdot(da, step), change, 1e-7)


def test_without_a_map_edges_are_in_the_order_of_the_graph(rng, edges):
    family, params = "mha_gat_n2n_efeat", cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    order = np.argsort(edges[1], kind="stable")
    out, planes, grads = source(family, tuple(x[order] for x in edges), params, g, **operands)
    got, got_planes, got_grads = call(family, structure(edges, False), params, g, operands)
    assert_close(got, out, 1e-13)
    assert_close(got_planes, planes, 1e-13)
    assert_close(got_grads.grad_edge_embedding, grads["edge_embedding"], 1e-12)


def test_one_array_for_both_sides(rng, edges):
    """The gradient of the sources then holds both shares."""
    family, params = "mha_gat_n2n", cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    both = operands | {"dst_node_embedding": operands["src_node_embedding"][:N_DST]}
    out, planes, grads = source(family, edges, params, g, **both)
    shares = grads["src_node_embedding"].copy()
    shares[:N_DST] += grads["dst_node_embedding"]
    single = operands | {"dst_node_embedding": None}
    got, got_planes, got_grads = call(family, structure(edges), params, g, single)
    assert_close(got, out, 1e-13)
    assert_close(got_planes, planes, 1e-13)
    assert_close(got_grads.grad_src_node_embedding, shares, 1e-12)
    assert got_grads.grad_dst_node_embedding is None


def test_padding_of_a_capacity_has_no_scores(rng, edges):
    family, params, room = "mha_gat_v2_n2n_efeat", cugraph.mha_params(H), NNZ + 5
    operands, g = arrays(rng, family), cotangent(rng, params)
    out, planes, grads = source(family, edges, params, g, **operands)
    padded = operands | {"edge_embedding": np.full((room, DIM), np.nan)}
    padded["edge_embedding"][:NNZ] = operands["edge_embedding"]
    graph = BipartiteCSC.from_coo(*edges, N_SRC, N_DST, capacity=room)
    got, got_planes, got_grads = call(family, graph, params, g, padded)
    assert_close(got, out, 1e-13)
    assert_close(got_planes[..., :NNZ], planes, 1e-13)
    np.testing.assert_array_equal(got_planes[..., NNZ:], 0)
    assert_close(got_grads.grad_edge_embedding[:NNZ], grads["edge_embedding"], 1e-12)
    np.testing.assert_array_equal(got_grads.grad_edge_embedding[NNZ:], 0)


def test_half_precision_has_scores_in_float32(rng, edges):
    """The suffix fp16_fp32 of the source: embeddings in half, scores in float32."""
    family, params = "mha_gat_n2n", cugraph.mha_params(H)
    half = {name: x.astype(np.float16) for name, x in arrays(rng, family).items()}
    g = cotangent(rng, params).astype(np.float16)
    wide = {name: x.astype(np.float64) for name, x in half.items()}
    out, planes, grads = source(family, edges, params, g.astype(np.float64), **wide)
    got, got_planes, got_grads = call(family, structure(edges), params, g, half)
    assert (got.dtype, got_planes.dtype) == (jnp.float16, jnp.float32)
    assert_close(got, out, 1e-3)
    assert_close(got_planes, planes, 1e-6)
    assert {gradient.dtype for gradient in got_grads} == {jnp.dtype(jnp.float16)}
    assert_close(got_grads.grad_src_node_embedding, grads["src_node_embedding"], 2e-3)


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("shape", [(0, 4), (4, 4), (5, 0)], ids=str)
def test_graphs_without_edges(shape, room):
    n_dst, n_src = shape
    graph = BipartiteCSC.from_coo([], [], n_src, n_dst, capacity=room)
    src, dst, a = jnp.ones((n_src, DIM)), jnp.ones((n_dst, DIM)), jnp.ones(2 * DIM)
    params = cugraph.mha_params(H)
    out, planes = cugraph.mha_gat_n2n_fwd(src, dst, a, graph, params, return_softmax_scores=True)
    np.testing.assert_array_equal(out, np.zeros((n_dst, DIM)))
    np.testing.assert_array_equal(planes, np.zeros((2, H, room)))
    grads = cugraph.mha_gat_n2n_bwd(out, src, dst, a, planes, graph, params)
    for gradient, x in zip(grads, (src, dst, a), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


@pytest.mark.parametrize(
    ("concat", "edge", "norm"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_mha_simple(rng, edges, concat, edge, norm):
    src, dst = edges
    key, value = rng.standard_normal((2, N_SRC, DIM))
    query, e = rng.standard_normal((N_DST, DIM)), rng.standard_normal((NNZ, DIM))
    bias, graph = rng.standard_normal((NNZ, H)), structure(edges)
    e = e if edge else None
    bias = bias if norm else None

    def plain(key, query, value, e, bias):
        at = lambda x: jnp.reshape(x, (len(x), H, D))  # noqa: E731
        k, v, q = at(key)[src], at(value)[src], at(query)[dst]
        k, v = (k, v) if e is None else (k + at(e), v + at(e))
        s = (q * k).sum(-1) / (D**0.5 if norm else 1.0)
        s = s if bias is None else s + bias
        terms = jnp.exp(s - s.max())
        p = terms / jax.ops.segment_sum(terms, dst, N_DST)[dst]
        out = jax.ops.segment_sum(p[..., None] * v, dst, N_DST)
        return out.reshape(N_DST, DIM) if concat else out.mean(1)

    operands = tuple(None if x is None else jnp.asarray(x) for x in (key, query, value, e, bias))
    g = jnp.asarray(cotangent(rng, cugraph.mha_params(H, concat)))
    expected, pullback = jax.vjp(plain, *operands)
    key, query, value, e, bias = operands
    arguments = (key, query, value, graph, H, concat, e, norm, bias)
    assert_close(cugraph.mha_simple_n2n(*arguments), expected, 1e-13)
    grads = cugraph.mha_simple_n2n_bwd(g, *arguments)
    for got, gradient, name in zip(grads, pullback(g), grads._fields, strict=True):
        assert (got is None) == (gradient is None)
        if gradient is not None:
            assert_close(got, gradient, 1e-12, name)
    refused = cugraph.mha_simple_n2n_bwd(g, *arguments, grad_query_emb=None, grad_edge_emb=False)
    assert refused.grad_query_emb is None
    assert refused.grad_edge_emb is None
    assert_close(refused.grad_key_emb, grads.grad_key_emb, 1e-13)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"params": cugraph.mha_params(4)}, ValueError, r"cugraph.mha_gat_n2n_bwd: num_heads must .* got 4"),
        ({"params": cugraph.mha_params(H, 1)}, TypeError, "concat_heads must be a Python bool"),
        ({"params": cugraph.mha_params(H, True, "Softplus")}, ValueError, r"one of \('ELU', 'LeakyReLU'"),
        ({"params": cugraph.mha_params(H, True, "ReLU", jnp.ones(()))}, TypeError, "alpha must be a Python"),
        ({"attention_weights": jnp.ones(DIM)}, ValueError, r"attention_weights must .* \(12,\), got \(6,\)"),
        ({"softmax_scores": jnp.ones((H, NNZ))}, ValueError, r"softmax_scores must .* \(2, 2, 15\)"),
        ({"softmax_scores": np.ones((2, H, NNZ), int)}, TypeError, "softmax_scores must be a floating"),
        ({"graph": None}, TypeError, "graph must be a BipartiteCSC"),
        ({"params": None}, TypeError, "params must be mha_params, got NoneType"),
        ({"params": cugraph.mha_params(H, True, "relu")}, ValueError, "'ReLU',.* got 'relu'"),
        ({"params": cugraph.mha_params(H, True, ["ReLU"])}, ValueError, "activation must be one of"),
        ({"grad_src_node_embedding": "no"}, TypeError, "grad_src_node_embedding must be None or False"),
        ({"grad_output_embedding": jnp.ones((N_DST, D))}, ValueError, "grad_output_embedding must have"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors(rng, edges, changed, error, message):
    operands, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    arguments = {"grad_output_embedding": cotangent(rng, params), **operands}
    arguments |= {"softmax_scores": None, "graph": structure(edges), "params": params} | changed
    with pytest.raises(error, match=message):
        cugraph.mha_gat_n2n_bwd(**arguments)


def test_errors_of_calls_with_more_arguments(rng, edges):
    given, params = arrays(rng, "mha_gat_n2n_efeat"), cugraph.mha_params(H)
    with pytest.raises(
        TypeError, match=r"cugraph.mha_gat_n2n_efeat_fwd: edge_embedding must be a floating"
    ):
        cugraph.mha_gat_n2n_efeat_fwd(
            **given | {"edge_embedding": None}, graph=structure(edges), params=params
        )
    key, query = jnp.ones((N_SRC, DIM)), jnp.ones((N_DST, DIM))
    with pytest.raises(ValueError, match=r"cugraph.mha_simple_n2n: key must have shape"):
        cugraph.mha_simple_n2n(key[:, 1:], query, key, structure(edges), H)
    with pytest.raises(ValueError, match=r"cugraph.mha_simple_n2n_bwd: dout must have shape"):
        cugraph.mha_simple_n2n_bwd(query[1:], key, query, key, structure(edges), H)


def test_an_array_to_write_a_gradient_into_asks_for_it(rng, edges):
    given, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    arguments = (cotangent(rng, params), *given.values(), None, structure(edges), params)
    grads = cugraph.mha_gat_n2n_bwd(
        *arguments, grad_src_node_embedding=jnp.zeros((N_SRC, DIM)), grad_attention_weights=None
    )
    expected = cugraph.mha_gat_n2n_bwd(*arguments)
    assert_close(grads.grad_src_node_embedding, expected.grad_src_node_embedding, 0)
    assert grads.grad_attention_weights is None
    asked = cugraph.mha_gat_n2n_bwd(*arguments, grad_attention_weights=np.True_)
    assert_close(asked.grad_attention_weights, expected.grad_attention_weights, 0)
    key, query, graph = jnp.ones((N_SRC, DIM)), jnp.ones((N_DST, DIM)), structure(edges)
    with pytest.raises(
        TypeError, match="mha_simple_n2n_bwd: grad_score_bias must be None or False"
    ):
        cugraph.mha_simple_n2n_bwd(query, key, query, key, graph, H, grad_score_bias="no")
