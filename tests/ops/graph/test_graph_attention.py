"""What is peculiar to graphs: their shapes, the order of edges, what is saved, what is never read."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, assert_trees_close
from jax import export

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import backend
from jax_attn_bwd.ops.graph import groups, reference
from jax_attn_bwd.ops.graph.spec import ACTIVATIONS

FUNCTIONS = {
    "gat": (jab.graph_attention, reference.graph_attention),
    "gatv2": (jab.graph_attention_v2, reference.graph_attention_v2),
    "transformer": (jab.graph_transformer_attention, reference.graph_transformer_attention),
}
every_kind = pytest.mark.parametrize("kind", FUNCTIONS)
H, D = 2, 3


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def random_edges(num_src=7, num_dst=5, nnz=23, seed=0):
    """The last two nodes of each side have no edge."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_src - 2, nnz), rng.integers(0, num_dst - 2, nnz)


def inputs(kind, num_src, num_dst, edge=None, dtype=np.float64, width=H * D):
    """Positional and edge arguments of a call, by name."""
    x, y = normal(num_src, width, dtype=dtype), normal(num_dst, width, seed=1, dtype=dtype)
    if kind == "transformer":
        found = {"query": y, "key": x, "value": normal(num_src, width, seed=2, dtype=dtype)}
    else:
        size = width if kind == "gatv2" else 2 * width + (width if edge else 0)
        found = {"src": x, "dst": y, "attention_weights": normal(size, seed=3, dtype=dtype)}
    return found | ({"edge": normal(edge, width, seed=4, dtype=dtype)} if edge else {})


def values_and_gradients(function, arrays, cts=None, **options):
    """Outputs and gradients by name, compiled, under random cotangents."""

    def run(arrays, cts):
        out, pullback = jax.vjp(lambda a: function(**a, num_heads=H, **options), arrays)
        leaves = out if isinstance(out, tuple) else (out,)
        if cts is None:
            cts = [normal(*x.shape, seed=9, dtype=x.dtype) for x in leaves]
        cts = [jnp.where(jnp.isfinite(x), ct, 0) for x, ct in zip(leaves, cts, strict=True)]
        (grads,) = pullback(tuple(cts) if isinstance(out, tuple) else cts[0])
        return {f"output {i}": x for i, x in enumerate(leaves)} | grads

    return jax.jit(run)(arrays, cts)


# ---------------------------------------------------------------------- graphs


@every_kind
def test_a_destination_without_edges_gives_zero_and_takes_no_gradient(kind):
    src, dst = random_edges()
    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    got = values_and_gradients(
        FUNCTIONS[kind][0], inputs(kind, 7, 5), graph=graph, return_residual=True
    )
    np.testing.assert_array_equal(got["output 0"][3:], 0)
    np.testing.assert_array_equal(got["output 1"][3:], -np.inf)
    nodes = ("query", "key", "value") if kind == "transformer" else ("dst", "src")
    for name, first in zip(nodes, (3, 5, 5), strict=False):
        np.testing.assert_array_equal(got[name][first:], 0)
        assert np.abs(got[name][:first]).max() > 0


@every_kind
def test_the_order_of_the_edges_does_not_matter(kind):
    """Edges and their data permuted together, as a list or by `map_csc_to_coo`."""
    src, dst = random_edges()
    order = np.random.default_rng(1).permutation(len(src))
    arrays = inputs(kind, 7, 5, edge=len(src))
    options = {"return_attention_weights": True}
    function = FUNCTIONS[kind][0]
    cts = [normal(5, H * D, seed=5), normal(len(src), H, seed=6)]
    one = values_and_gradients(
        function, arrays, cts, graph=BipartiteCSC.from_coo(src, dst, 7, 5), **options
    )
    graph = BipartiteCSC.from_coo(src[order], dst[order], 7, 5)
    permuted = arrays | {"edge": arrays["edge"][order]}
    two = values_and_gradients(function, permuted, [cts[0], cts[1][order]], graph=graph, **options)
    by_edge = ("output 1", "edge")
    assert_trees_close(two, {n: x[order] if n in by_edge else x for n, x in one.items()}, 1e-12)


@every_kind
def test_an_edge_that_occurs_twice_counts_twice(kind):
    """As one edge whose score is greater by log 2; here all edges of a node are doubled: no change."""
    src, dst = random_edges()
    function, arrays = FUNCTIONS[kind][0], inputs(kind, 7, 5)
    once = BipartiteCSC.from_coo(src, dst, 7, 5)
    twice = BipartiteCSC.from_coo(np.tile(src, 2), np.tile(dst, 2), 7, 5)
    one = values_and_gradients(function, arrays, graph=once)
    assert_trees_close(values_and_gradients(function, arrays, graph=twice), one, 1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_activations(kind, activation):
    """With one source of zeros beside one destination of zeros: at the kink as in `jax.nn`."""
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5, edge=len(src))
    arrays |= {"src": arrays["src"].at[src[0]].set(0), "dst": arrays["dst"].at[dst[0]].set(0)}
    arrays["edge"] = arrays["edge"].at[0].set(0)
    options = {"activation": activation, "alpha": -0.7}
    operator, definition = FUNCTIONS[kind]
    cts = [normal(5, H * D, seed=5)]
    got = values_and_gradients(operator, arrays, cts, graph=graph, **options)

    def plain(**arguments):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return definition(**arguments)[0]

    expected = values_and_gradients(plain, arrays, cts, graph=graph, **options)
    assert_trees_close(got, expected, 1e-12)


@every_kind
def test_a_hub_of_ten_thousand_edges(kind):
    """Float32 over many chunks, against the same in float64 by segment sums."""
    rng = np.random.default_rng(0)
    dst = np.concatenate([np.full(10_000, 2), rng.integers(0, 5, 500)])
    src = rng.integers(0, 300, len(dst))
    src[:4_000] = 11
    graph = BipartiteCSC.from_coo(src, dst, 300, 5)
    arrays = inputs(kind, 300, 5)

    def segments(src=None, dst=None, query=None, key=None, value=None, attention_weights=None,
                 num_heads=H, **_):  # fmt: skip
        ends = np.asarray(graph_src), np.asarray(graph_dst)
        heads = lambda x: x.reshape(x.shape[0], H, D)  # noqa: E731
        x, y = (key, query) if src is None else (src, dst)
        x, y = heads(x)[ends[0]], heads(y)[ends[1]]
        if kind == "transformer":
            s, x = (x * y).sum(-1) * D**-0.5, heads(value)[ends[0]]
        elif kind == "gat":
            a, b = attention_weights.reshape(2, 1, H, D)
            s = jax.nn.leaky_relu((x * a).sum(-1) + (y * b).sum(-1), 0.2)
        else:
            s = (jax.nn.leaky_relu(x + y, 0.2) * attention_weights.reshape(1, H, D)).sum(-1)
        p = jnp.exp(s - jax.ops.segment_max(s, ends[1], 5)[ends[1]])
        p = p / jax.ops.segment_sum(p, ends[1], 5)[ends[1]]
        return jax.ops.segment_sum(p[..., None] * x, ends[1], 5).reshape(5, H * D)

    graph_src, graph_dst = src, dst
    expected = values_and_gradients(segments, arrays)
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    got = values_and_gradients(FUNCTIONS[kind][0], narrow, graph=graph)
    assert_trees_close(got, expected, 3e-5)
    assert_trees_close(
        values_and_gradients(FUNCTIONS[kind][0], arrays, graph=graph), expected, 1e-11
    )


@every_kind
def test_graphs_of_one_capacity_share_a_program(kind):
    """One compilation for four graphs handed in as arguments; the padding changes nothing."""
    function, compilations = FUNCTIONS[kind][0], []

    @jax.jit
    def step(graph, arrays, ct):
        compilations.append(kind)
        out, pullback = jax.vjp(lambda a: function(graph, **a, num_heads=H), arrays)
        return {"out": out} | pullback(ct)[0]

    for nnz in (0, 1, 23, 40):
        src, dst = random_edges(nnz=nnz, seed=nnz)
        arrays = inputs(kind, 7, 5, edge=40)
        exact = {n: x[:nnz] if n == "edge" else x for n, x in arrays.items()}
        padded = BipartiteCSC.from_coo(src, dst, 7, 5, capacity=40)
        got = step(padded, arrays, normal(5, H * D, seed=5))
        assert len(compilations) == 1
        graph = BipartiteCSC.from_coo(src, dst, 7, 5)
        expected = values_and_gradients(function, exact, [normal(5, H * D, seed=5)], graph=graph)
        expected["out"] = expected.pop("output 0")
        np.testing.assert_array_equal(got["edge"][nnz:], 0)
        assert_trees_close(got | {"edge": got["edge"][:nnz]}, expected, 1e-12)


def test_a_batch_of_graphs():
    """`vmap` over graphs of one capacity, stacked."""
    graphs = [
        BipartiteCSC.from_coo(*random_edges(nnz=n, seed=n), 7, 5, capacity=30) for n in (9, 30)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *graphs)
    arrays = inputs("gat", 7, 5)

    def gradient(graph, arrays):
        def loss(a):
            out = jab.graph_attention(graph, **a, num_heads=H)
            return (jnp.sin(out) * normal(5, H * D, seed=5)).sum()

        return jax.grad(loss)(arrays)

    batched = jax.jit(jax.vmap(gradient, in_axes=(0, None)))(stacked, arrays)
    for i, graph in enumerate(graphs):
        single = gradient(graph, arrays)
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], batched), single, 1e-12)


# ---------------------------------------------------------------------- gradients, memory, order of sums


@every_kind
def test_only_inputs_out_and_lse_are_saved(kind):
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5)
    _, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
    saved = sorted(
        x.size for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)
    )
    rows = [5 * H, 5 * H, 5 * H * D]  # lse, its rounding, out
    assert saved == sorted([x.size for x in arrays.values()] + rows)


def largest(jaxpr):
    """Elements of the largest array of a program, in its loops too."""
    size = 0
    for equation in jaxpr.eqns:
        size = max([size, *(int(np.prod(v.aval.shape)) for v in equation.outvars)])
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            size = max(size, largest(inner)) if hasattr(inner, "eqns") else size
    return size


@every_kind
def test_no_array_of_edges_times_features(kind):
    E, width = 200_000, 32
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 90, E), rng.integers(0, 80, E), 90, 80)
    arrays = inputs(kind, 90, 80, dtype=np.float32, width=width)

    def step(arrays, ct):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
        return out, pullback(ct)

    jaxpr = jax.make_jaxpr(step)(arrays, normal(80, width, dtype=np.float32)).jaxpr
    assert E * H <= largest(jaxpr) <= E * width / 4


@every_kind
def test_sums_have_one_writer_off_the_cpu(kind, monkeypatch):
    """Where a scatter adds in any order, none may have two rows for one place; and the sums agree."""
    src, dst = random_edges(nnz=300)
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5, edge=300)
    function = FUNCTIONS[kind][0]
    expected = values_and_gradients(function, arrays, graph=graph)
    monkeypatch.setattr(backend, "target_platform", lambda: "gpu")
    monkeypatch.setattr(groups, "chunk_elements", lambda: 200)
    jax.clear_caches()
    try:
        assert_trees_close(values_and_gradients(function, arrays, graph=graph), expected, 1e-12)
        gradient = jax.grad(lambda a: function(graph, **a, num_heads=H).sum())
        text = str(jax.make_jaxpr(gradient)(arrays))
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    adds = re.findall(r"scatter-add\[.*?unique_indices=(\w+)", text, re.DOTALL)
    assert len(adds) >= 4
    assert set(adds) == {"True"}


def test_dst_none_means_the_first_sources():
    src, dst = random_edges()
    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    x, a, dout = normal(7, H * D), normal(2 * H * D, seed=1), normal(5, H * D, seed=2)
    shared = jax.vjp(lambda x, a: jab.graph_attention(graph, x, None, a, num_heads=H), x, a)
    spelt = jax.vjp(lambda x, a: jab.graph_attention(graph, x, x[:5], a, num_heads=H), x, a)
    assert_close(shared[0], spelt[0], 1e-14)
    grads = jab.graph_attention_bwd(dout, graph, x, None, a, num_heads=H)
    assert grads.dst is None
    for got, also, expected in zip(
        shared[1](dout), (grads.src, grads.attention_weights), spelt[1](dout), strict=True
    ):
        assert_close(got, expected, 1e-12)
        assert_close(also, expected, 1e-12)


@every_kind
def test_bwd_recomputes_what_it_is_not_given(kind):
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5)
    function = FUNCTIONS[kind][0]
    backward = getattr(jab, f"{function.__name__}_bwd")
    dout = normal(5, D, seed=5)
    _, pullback = jax.vjp(lambda a: function(graph, **a, num_heads=H, concat_heads=False), arrays)
    (expected,) = pullback(dout)
    out, lse = function(graph, **arrays, num_heads=H, return_residual=True)
    for given in ({}, {"out": out, "lse": lse}):
        grads = backward(dout, graph, **arrays, num_heads=H, concat_heads=False, **given)
        got = {n: x for n, x in grads._asdict().items() if x is not None}
        assert_trees_close(got, expected, 1e-12)


# ---------------------------------------------------------------------- what is never read


def test_nan_in_the_cotangent_of_a_hidden_weight_reaches_nothing():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    query, key, value = normal(2, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)
    bias = jnp.zeros((3, 1)).at[0].set(-jnp.inf)
    options = {"num_heads": 2, "score_bias": bias, "wrt": ("query", "key", "value")}
    dweights = normal(3, 2, seed=3)
    given = (None, graph, query, key, value)
    clean = jab.graph_transformer_attention_bwd(*given, dweights=dweights, **options)
    dirty = jab.graph_transformer_attention_bwd(
        *given, dweights=dweights.at[0].set(jnp.nan), **options
    )
    for name in options["wrt"]:
        assert_close(getattr(dirty, name), getattr(clean, name), 0, name)


def test_nan_in_a_bias_is_no_mask():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    bias = jnp.zeros((3, 1)).at[0].set(jnp.nan)
    query, key = normal(2, 4), normal(3, 4, seed=1)
    out = jab.graph_transformer_attention(graph, query, key, key, num_heads=2, score_bias=bias)
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()


@every_kind
def test_export_of_symbolic_widths(kind):
    """And of a graph as an argument, through bytes and back."""
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    (d,) = export.symbolic_shape("d")
    given = {n: x for n, x in inputs(kind, 3, 2).items() if n != "edge"}
    options = {"num_heads": H} | ({"scale": 0.5} if kind == "transformer" else {})

    def step(graph, arrays):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, **options), arrays)
        return out, pullback(jnp.cos(out))[0]

    def abstract(x):
        heads = x.shape[-1] // D
        return jax.ShapeDtypeStruct((*x.shape[:-1], heads * d), x.dtype)

    shapes = jax.tree.map(abstract, given)
    exported = export.deserialize(export.export(jax.jit(step))(graph, shapes).serialize())
    out, grads = exported.call(graph, given)
    expected, expected_grads = step(graph, given)
    assert_close(out, expected, 1e-12)
    assert_trees_close(grads, expected_grads, 1e-12)


def test_symbolic_head_size_asks_for_a_scale():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 3, 2)
    (d,) = export.symbolic_shape("d")
    q, k = (jax.ShapeDtypeStruct((n, 2 * d), jnp.float32) for n in (2, 3))
    with pytest.raises(
        ValueError, match="scale must be given where the size of a head is symbolic"
    ):
        export.export(
            jax.jit(lambda q, k: jab.graph_transformer_attention(graph, q, k, k, num_heads=2))
        )(q, k)


@every_kind
@pytest.mark.parametrize("order", [1, 2])
def test_poison_that_no_edge_refers_to_reaches_nothing(kind, order):
    """NaN in nodes without edges, in their dout, in edge data of the padding, behind a bias of -inf."""
    src, dst = random_edges(nnz=20)
    src[:3], dst[:3] = 5, 0  # source 5 has edges, all hidden by the bias of the transformer
    graph = BipartiteCSC.from_coo(src, dst, 7, 5, capacity=26)
    arrays = inputs(kind, 7, 5, edge=26)
    clean, dirty = dict(arrays), dict(arrays)
    edge = np.array(arrays["edge"])
    edge[20:] = np.nan
    dirty["edge"] = jnp.asarray(edge)
    first = 5 if kind == "transformer" else 6
    for name, nodes in {"src": first, "key": first, "value": first, "dst": 3, "query": 3}.items():
        if name in dirty:
            dirty[name] = dirty[name].at[nodes:].set(jnp.nan)
    if kind == "transformer":
        bias = normal(26, H, seed=7).at[:3].set(-jnp.inf)
        clean["score_bias"] = dirty["score_bias"] = bias
    dout = normal(5, H * D, seed=5)
    bad_dout = dout.at[3:].set(jnp.nan)

    def step(arrays, dout):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
        return {"out": out} | pullback(dout)[0]

    def again(arrays, dout):
        def form(arrays, dout):
            found = step(arrays, dout)
            return sum(jnp.vdot(x, normal(*x.shape, seed=8)) for x in found.values())

        return jax.grad(form)(arrays, dout)

    run = jax.jit(step if order == 1 else again)
    assert_trees_close(run(dirty, bad_dout), run(clean, dout), 1e-12)


# ---------------------------------------------------------------------- dropout


def test_dropout_depends_on_the_key_and_the_edge_alone():
    src, dst = random_edges(nnz=400)
    order = np.random.default_rng(1).permutation(400)
    x, a = normal(7, H * D), normal(2 * H * D, seed=1)

    def dropped(graph, key=0, **options):
        weights = jab.graph_attention(
            graph, x, x[:5], a, num_heads=H, dropout_rate=0.3, dropout_key=jax.random.key(key),
            return_attention_weights=True, **options,
        )[1]  # fmt: skip
        return np.asarray(weights[:400] == 0)

    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    mask = dropped(graph)
    np.testing.assert_array_equal(
        mask, dropped(BipartiteCSC.from_coo(src, dst, 7, 5, capacity=500))
    )
    shuffled = BipartiteCSC.from_coo(src[order], dst[order], 7, 5)
    np.testing.assert_array_equal(mask, dropped(shuffled))  # by number, whatever edge has it
    np.testing.assert_array_equal(mask[order], dropped(graph, dropout_offset=(0, 0, order, 0)))
    np.testing.assert_array_equal(mask[:, 1:], dropped(graph, dropout_offset=(0, 1, 0, 0))[:, :1])
    assert (mask != dropped(graph, key=1)).any()
    assert (mask[:, 0] != mask[:, 1]).any()


def test_dropout_keeps_the_share_and_the_mean():
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 50, 20_000), rng.integers(0, 40, 20_000), 50, 40)
    x, a = normal(50, H * D), normal(2 * H * D, seed=1)
    options = {"num_heads": H, "return_attention_weights": True}
    kept = jab.graph_attention(graph, x, x[:40], a, **options)[1]
    dropped = jab.graph_attention(
        graph, x, x[:40], a, dropout_rate=0.3, dropout_key=jax.random.key(3), **options
    )[1]
    survives = np.asarray(dropped != 0)
    assert abs(survives.mean() - 0.7) < 5 * (0.3 * 0.7 / survives.size) ** 0.5
    np.testing.assert_allclose(dropped[survives], kept[survives] / 0.7, rtol=1e-12)


# ---------------------------------------------------------------------- PyTorch Geometric

needs_pyg = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "torch_geometric")),
    reason="torch and torch_geometric are not installed",
)


@needs_pyg
@pytest.mark.filterwarnings("ignore")
@every_kind
@pytest.mark.parametrize("concat", [True, False], ids=["concat", "mean"])
def test_pytorch_geometric(kind, concat):
    """Values and gradients of its layers with identity projections, without self-loops."""
    import torch
    from torch_geometric import nn

    layer_type = {"gat": nn.GATConv, "gatv2": nn.GATv2Conv, "transformer": nn.TransformerConv}[kind]
    src, dst = random_edges(nnz=30)
    width, nodes = H * D, 7
    arrays = inputs(kind, nodes, nodes, edge=30, dtype=np.float32)
    extra = {"root_weight": False} if kind == "transformer" else {"add_self_loops": False}
    layer = layer_type(
        (width, width), D, heads=H, concat=concat, bias=False, edge_dim=width, **extra
    )
    eye, given = torch.eye(width), {n: torch.tensor(np.asarray(x)) for n, x in arrays.items()}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.shape == eye.shape:
                parameter.copy_(eye)
            elif name.endswith("bias"):
                parameter.zero_()
        if kind == "gat":
            parts = given["attention_weights"].split(width)
            for name, part in zip(("att_src", "att_dst", "att_edge"), parts, strict=True):
                getattr(layer, name).copy_(part.reshape(1, H, D))
        elif kind == "gatv2":
            layer.att.copy_(given["attention_weights"].reshape(1, H, D))
    if kind == "transformer":  # one x serves as key and value there
        arrays["value"] = arrays["key"]
        names = ("key", "query", "edge")
    else:
        names = ("src", "dst", "edge")
    leaves = [given[n].requires_grad_() for n in names]
    index = torch.tensor(np.stack([src, dst]))
    out = layer((leaves[0], leaves[1]), index, edge_attr=leaves[2])
    ct = np.array(normal(*out.shape, seed=5, dtype=np.float32))
    expected = torch.autograd.grad(out, leaves, torch.tensor(ct))
    graph = BipartiteCSC.from_coo(src, dst, nodes, nodes)
    got = values_and_gradients(
        FUNCTIONS[kind][0], arrays, [jnp.asarray(ct)], graph=graph, concat_heads=concat
    )
    assert_close(got["output 0"], out.detach().numpy(), 1e-5)
    if kind == "transformer":
        got["key"] = got["key"] + got["value"]
    for name, gradient in zip(names, expected, strict=True):
        assert_close(got[name], gradient.numpy(), 1e-5, name)


# ---------------------------------------------------------------------- errors

GRAPH = BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
X, Y, A = jnp.ones((3, 4)), jnp.ones((2, 4)), jnp.ones(8)


def gat(graph=GRAPH, src=X, dst=Y, attention_weights=A, num_heads=2, **options):
    return jab.graph_attention(graph, src, dst, attention_weights, num_heads=num_heads, **options)


def transformer(query=Y, key=X, value=X, num_heads=2, **options):
    return jab.graph_transformer_attention(GRAPH, query, key, value, num_heads=num_heads, **options)


KEY = jax.random.key(0)
BAD = {
    "graph": (
        TypeError,
        lambda: gat(graph=(0, 1)),
        "graph must be a BipartiteCSC, got tuple; build",
    ),
    "rank": (ValueError, lambda: gat(src=X[0]), "src must have shape [num_src, dim], got (4,)"),
    "nodes": (
        ValueError,
        lambda: gat(src=Y),
        "src must have shape [num_src, dim] = (3, 4), got (2, 4)",
    ),
    "dst": (
        ValueError,
        lambda: gat(dst=X),
        "dst must have shape [num_dst, dim] = (2, 4), got (3, 4)",
    ),
    "dtypes": (TypeError, lambda: gat(dst=Y.astype("bfloat16")), "src, dst must have one dtype"),
    "integers": (TypeError, lambda: gat(src=X.astype(int)), "src must be a floating-point array"),
    "heads": (
        ValueError,
        lambda: gat(num_heads=3),
        "num_heads must be positive and divide the width of src, 4, got 3",
    ),
    "heads kind": (TypeError, lambda: gat(num_heads=2.0), "num_heads must be an int, got float"),
    "attention vector": (
        ValueError,
        lambda: gat(attention_weights=jnp.ones(4)),
        "attention_weights must have shape [2 * dim] = (8,), got (4,)",
    ),
    "attention vector with edge": (
        ValueError,
        lambda: gat(edge=jnp.ones((3, 2))),
        "attention_weights must have shape [2 * dim + dim_edge] = (10,), got (8,)",
    ),
    "edge rows": (
        ValueError,
        lambda: gat(edge=jnp.ones((2, 2))),
        "edge must have shape [nnz, dim_edge] = (3, 2), got (2, 2)",
    ),
    "edge width": (
        ValueError,
        lambda: gat(edge=jnp.ones((3, 3))),
        "edge must have a width that num_heads = 2 divides, got (3, 3)",
    ),
    "edge of transformer": (
        ValueError,
        lambda: transformer(edge=jnp.ones((3, 2))),
        "edge must have shape [nnz, dim] = (3, 4), got (3, 2)",
    ),
    "activation": (
        ValueError,
        lambda: gat(activation="gelu"),
        "activation must be one of ('linear'",
    ),
    "alpha": (TypeError, lambda: gat(alpha=jnp.ones(())), "alpha must be a Python float"),
    "mask": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((3, 2))),
        "dropout_mask must have shape [H, nnz] = (2, 3), got (3, 2)",
    ),
    "mask and rate": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((2, 3)), dropout_rate=0.5, dropout_key=KEY),
        "dropout_mask must not be given together with dropout_rate or dropout_key, got both",
    ),
    "key": (
        ValueError,
        lambda: gat(dropout_rate=0.5),
        "dropout_key must be given when dropout_rate",
    ),
    "key without rate": (
        TypeError,
        lambda: gat(dropout_key=0),
        "dropout_key must be one JAX random key, got int",
    ),
    "offset with mask": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((2, 3)), dropout_offset=(0, -1, 0, 0)),
        "dropout_offset head must lie in",
    ),
    "rate": (ValueError, lambda: gat(dropout_rate=1.5), "dropout_rate must lie in [0, 1], got 1.5"),
    "bias": (
        ValueError,
        lambda: transformer(score_bias=jnp.ones((2, 2))),
        "score_bias must broadcast to [nnz, H] = (3, 2), got (2, 2)",
    ),
    "scale": (TypeError, lambda: transformer(scale=jnp.ones(())), "scale must be a Python float"),
    "implementation": (
        ValueError,
        lambda: gat(implementation="cuda"),
        "implementation must be None or",
    ),
    "kernel": (
        NotImplementedError,
        lambda: gat(implementation="triton"),
        "implementation='triton' cannot run this call",
    ),
    "scores": (
        ValueError,
        lambda: jab.edge_softmax(GRAPH, jnp.ones((2, 2))),
        "edge_softmax: scores must have shape [nnz, H] with nnz = 3, got (2, 2)",
    ),
    "dout": (
        ValueError,
        lambda: jab.graph_attention_bwd(X, GRAPH, X, Y, A, num_heads=2),
        "graph_attention_bwd: dout must have shape the shape of out = (2, 4), got (3, 4)",
    ),
    "lse": (
        TypeError,
        lambda: jab.graph_attention_bwd(
            Y, GRAPH, X, Y, A, num_heads=2, out=Y, lse=jnp.ones((2, 2), "bfloat16")
        ),
        "graph_attention_bwd: lse must have dtype",
    ),
    "wrt": (
        ValueError,
        lambda: jab.graph_attention_bwd(Y, GRAPH, X, Y, A, num_heads=2, wrt="edge"),
        "wrt must name arguments that were given, got 'edge', which is None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, call, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_dst_none_needs_enough_sources():
    graph = BipartiteCSC.from_coo([0], [2], 1, 3)
    expected = "dst must be given, or num_dst = 3 be at most num_src = 1, got None"
    with pytest.raises(ValueError, match=re.escape(expected)):
        jab.graph_attention(graph, X[:1], None, A, num_heads=2)
    assert gat(graph=graph, src=X[:1], dst=X).shape == (3, 4)


def test_the_four_operators_are_discovered():
    names = {o.name for o in OPERATORS}
    assert names >= {"edge_softmax", *(f.__name__ for f, _ in FUNCTIONS.values())}
