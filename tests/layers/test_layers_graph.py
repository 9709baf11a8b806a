"""`GATConv`, `GATv2Conv`, `TransformerConv` of each framework, by the definition and by PyTorch Geometric."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.layers.graph import from_torch, on_graphs_tuple
from jax_attn_bwd.layers.graph_parameters import Config, arrays, linears
from jax_attn_bwd.ops.graph import reference

N_SRC, N_DST, NNZ, H, C, EDGE = 7, 5, 17, 2, 3, 4
FRAMEWORKS = ("flax_linen", "flax_nnx", "haiku", "equinox")
KINDS = ("GATConv", "GATv2Conv", "TransformerConv")


def flax_linen(kind, in_channels, **options):
    pytest.importorskip("flax")
    from jax_attn_bwd.layers import flax_linen as layers

    layer = getattr(layers, kind)(C, H, **options)

    def init(key, *inputs):
        return layer.init(key, *inputs, deterministic=True)["params"]

    def call(params, *inputs, key=None, **call_options):
        rngs = None if key is None else {"dropout": key}
        call_options = {"deterministic": key is None, **call_options}
        return layer.apply({"params": params}, *inputs, rngs=rngs, **call_options)

    return SimpleNamespace(init=init, call=call)


def flax_nnx(kind, in_channels, **options):
    pytest.importorskip("flax")
    from flax import nnx

    from jax_attn_bwd.layers import flax_nnx as layers

    def layer(key):
        return getattr(layers, kind)(in_channels, C, H, **options, rngs=nnx.Rngs(key))

    def init(key, *inputs):
        return nnx.to_pure_dict(nnx.state(layer(key), nnx.Param))

    def call(params, *inputs, key=None, **call_options):
        made = layer(0)
        nnx.update(made, params)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return made(*inputs, **{"deterministic": key is None, "rngs": rngs, **call_options})

    return SimpleNamespace(init=init, call=call)


HAIKU_NAMES = {
    "GATConv": "gat_conv",
    "GATv2Conv": "gatv2_conv",
    "TransformerConv": "transformer_conv",
}


def haiku(kind, in_channels, **options):
    hk = pytest.importorskip("haiku")
    from jax_attn_bwd.layers import haiku as layers

    root, renamed = HAIKU_NAMES[kind], {"kernel": "w", "bias": "b"}

    def forward(*inputs, **call_options):
        return getattr(layers, kind)(C, H, **options)(*inputs, **call_options)

    model = hk.transform(forward)

    def init(key, *inputs):
        flat, tree = model.init(key, *inputs, is_training=False), {}
        for path, x in flat.items():
            if path == root:
                tree |= x
            else:
                tree[path.removeprefix(f"{root}/")] = {
                    p: x[q] for p, q in renamed.items() if q in x
                }
        return tree

    def call(params, *inputs, key=None, **call_options):
        flat = {root: {}}
        for name, x in params.items():
            if isinstance(x, dict):
                flat[f"{root}/{name}"] = {renamed[part]: p for part, p in x.items()}
            else:
                flat[root][name] = x
        return model.apply(flat, key, *inputs, **{"is_training": key is not None, **call_options})

    return SimpleNamespace(init=init, call=call)


def equinox(kind, in_channels, **options):
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers import equinox as layers

    def layer(key):
        return getattr(layers, kind)(in_channels, C, H, **options, key=key)

    def init(key, *inputs):
        made, tree = layer(key), {}
        for name in made.linears:
            linear = getattr(made, name)
            tree[name] = {"kernel": linear.weight.T}
            tree[name] |= {} if linear.bias is None else {"bias": linear.bias}
        return tree | {name: getattr(made, name) for name in arrays(made.config)}

    def call(params, *inputs, key=None, **call_options):
        made = layer(jax.random.key(0))
        for name, x in params.items():  # as the docstring says
            if isinstance(x, dict):
                parts = ("weight", "bias")[: len(x)]
                where = lambda layer: [getattr(getattr(layer, name), p) for p in parts]  # noqa: B023, E731
                made = eqx.tree_at(where, made, [x["kernel"].T, x.get("bias")][: len(x)])
            else:
                made = eqx.tree_at(lambda layer: getattr(layer, name), made, x)  # noqa: B023
        return made(*inputs, **{"key": key, "inference": key is None, **call_options})

    return SimpleNamespace(init=init, call=call)


ADAPTERS = dict(zip(FRAMEWORKS, (flax_linen, flax_nnx, haiku, equinox), strict=True))
CASES = {  # kind, in_channels, options; an int stands for one array whose first rows are the destinations
    "gat": ("GATConv", 6, {}),
    "gat_pair": ("GATConv", (6, 4), dict(edge_dim=EDGE, residual=True, concat=False, negative_slope=0.1)),
    "gatv2_shared": ("GATv2Conv", 6, dict(share_weights=True, bias=False, residual=True)),
    "gatv2_pair": ("GATv2Conv", (6, 4), dict(edge_dim=EDGE, concat=False, negative_slope=0.3)),
    "transformer": ("TransformerConv", 6, dict(concat=False, root_weight=False, beta=True)),
    "transformer_pair": ("TransformerConv", (6, 4), dict(edge_dim=EDGE, beta=True)),
    "transformer_plain": ("TransformerConv", 6, dict(bias=False)),
}  # fmt: skip


def build(framework, kind, in_channels, **options):
    """`init(key, *inputs) -> params` and `call(params, *inputs)` of a layer, `params` in the tree of Flax."""
    return ADAPTERS[framework](kind, in_channels, **options)


def layout(kind, in_channels, options):
    """(linear layers, shapes of the other parameters) by name."""
    defaults = dict(concat=True, dropout=0.0, edge_dim=None, bias=True, implementation=None)
    config = Config(kind, C, H, **(defaults | options))
    return linears(config, in_channels), arrays(config)


def parameters(rng, kind, in_channels, options):
    found, shapes = layout(kind, in_channels, options)
    tree = {}
    for name, (width, out, bias) in found.items():
        tree[name] = {"kernel": jnp.asarray(rng.standard_normal((width, out)))}
        tree[name] |= {"bias": jnp.asarray(rng.standard_normal(out))} if bias else {}
    return tree | {name: jnp.asarray(rng.standard_normal(s)) for name, s in shapes.items()}


def edge_list(rng):
    """(src, dst): the last destination has no edge, and one edge is there twice."""
    src, dst = rng.integers(0, N_SRC, NNZ), rng.integers(0, N_DST - 1, NNZ)
    src[1], dst[1] = src[0], dst[0]
    return src, dst


def inputs(rng, in_channels, options):
    """(x, graph, edge_attr)."""
    graph = BipartiteCSC.from_coo(*edge_list(rng), N_SRC, N_DST)
    edge = jnp.asarray(rng.standard_normal((NNZ, EDGE))) if "edge_dim" in options else None
    if isinstance(in_channels, int):
        return jnp.asarray(rng.standard_normal((N_SRC, in_channels))), graph, edge
    x = zip((N_SRC, N_DST), in_channels, strict=True)
    return tuple(jnp.asarray(rng.standard_normal(shape)) for shape in x), graph, edge


def definition(kind, params, x, graph, edge, options):
    """(out, weights) of a layer in plain formulas around the operators' definitions."""

    def dense(name, x):
        out = x @ params[name]["kernel"]
        return out + params[name]["bias"] if "bias" in params[name] else out

    x_src, x_dst = x if isinstance(x, tuple) else (x, x[:N_DST])
    edge = None if edge is None else dense("lin_edge", edge)
    more = dict(num_heads=H, concat_heads=options.get("concat", True), edge=edge)
    slope = options.get("negative_slope", 0.2)
    if kind == "GATConv":
        one, two = ("lin_src", "lin_dst") if "lin_src" in params else ("lin", "lin")
        a = [params[n].ravel() for n in ("att_src", "att_dst", "att_edge") if n in params]
        out, weights, _ = reference.graph_attention(
            graph, dense(one, x_src), dense(two, x_dst), jnp.concatenate(a), alpha=slope, **more
        )
    elif kind == "GATv2Conv":
        dst = dense("lin_r" if "lin_r" in params else "lin_l", x_dst)
        a = params["att"].ravel()
        out, weights, _ = reference.graph_attention_v2(
            graph, dense("lin_l", x_src), dst, a, alpha=slope, **more
        )
    else:
        q, k, v = dense("lin_query", x_dst), dense("lin_key", x_src), dense("lin_value", x_src)
        out, weights, _ = reference.graph_transformer_attention(graph, q, k, v, **more)
        skip = dense("lin_skip", x_dst) if "lin_skip" in params else 0
        if "lin_beta" in params:
            beta = jax.nn.sigmoid(dense("lin_beta", jnp.concatenate([out, skip, out - skip], 1)))
            return beta * skip + (1 - beta) * out, weights
        out = out + skip
    out = out + dense("res", x_dst) if "res" in params else out
    return (out + params["bias"] if "bias" in params else out), weights


def values_and_gradients(function, *arguments):
    """The outputs, and the gradients of all arguments for random cotangents."""
    outputs, pullback = jax.vjp(function, *arguments)
    rng = np.random.default_rng(5)
    cotangents = (jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in outputs)
    return outputs, pullback(tuple(cotangents))


def assert_all_close(got, expected, rtol):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        assert_close(y, x, rtol, jax.tree_util.keystr(path))


@pytest.fixture(scope="module", params=CASES)
def expected(request):
    """(name, parameters, inputs, the definition's outputs and gradients)."""
    kind, in_channels, options = CASES[request.param]
    rng = np.random.default_rng(0)
    params = parameters(rng, kind, in_channels, options)
    x, graph, edge = inputs(rng, in_channels, options)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        result = values_and_gradients(
            jax.jit(lambda params, x, edge: definition(kind, params, x, graph, edge, options)),
            params, x, edge,
        )  # fmt: skip
    return request.param, params, (x, graph, edge), result


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_outputs_and_gradients_are_those_of_the_definition(expected, framework):
    name, params, (x, graph, edge), result = expected
    kind, in_channels, options = CASES[name]
    layer = build(framework, kind, in_channels, **options)

    def function(params, x, edge):
        return layer.call(params, x, graph, edge, return_attention_weights=True)

    assert_all_close(values_and_gradients(function, params, x, edge), result, 1e-11)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
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


def geometric(kind, in_channels, options):
    """A layer of PyTorch Geometric in float64."""
    pytest.importorskip("torch", reason="compares with PyTorch Geometric")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        nn = pytest.importorskip("torch_geometric.nn", reason="compares with PyTorch Geometric")
    own = {} if kind == "TransformerConv" else {"add_self_loops": False}
    return getattr(nn, kind)(in_channels, C, H, **options, **own).double()


@pytest.mark.parametrize(
    ("name", "framework"),
    list(zip(CASES, ("flax_linen", "flax_nnx", "haiku", "equinox") * 2, strict=False)),
)
def test_as_pytorch_geometric_with_its_parameters(rng, name, framework):
    kind, in_channels, options = CASES[name]
    module = geometric(kind, in_channels, options)
    import torch

    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    params = from_torch({f"net.0.{n}": p for n, p in module.state_dict().items()}, "net.0.")
    unused = {"gatv2_shared": "lin_r", "transformer": "lin_skip"}.get(name)
    params = {n: x for n, x in params.items() if n != unused}
    shaped = parameters(np.random.default_rng(0), kind, in_channels, options)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shaped)

    arguments = inputs(np.random.default_rng(0), in_channels, options)
    edges = edge_list(np.random.default_rng(0))  # what `inputs` began with
    x, graph, edge = arguments
    tensors = [torch.tensor(np.asarray(a), requires_grad=True) for a in jax.tree.leaves((x, edge))]
    nodes = tensors if edge is None else tensors[:-1]
    given = (nodes[0], nodes[0][:N_DST]) if len(nodes) == 1 else tuple(nodes)
    out, (_, weights) = module(
        given, torch.tensor(np.stack(edges)), None if edge is None else tensors[-1],
        return_attention_weights=True,
    )  # fmt: skip
    douts = [rng.standard_normal(y.shape) for y in (out, weights)]
    torch.autograd.backward([out, weights], [torch.tensor(g) for g in douts])
    slopes = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    layer = build(framework, kind, in_channels, **options)
    got, pullback = jax.vjp(
        lambda *a: layer.call(a[0], a[1], graph, a[2], return_attention_weights=True),
        params,
        x,
        edge,
    )
    assert_all_close(got, (out.detach().numpy(), weights.detach().numpy()), 1e-12)
    dparams, *grads = pullback(tuple(jnp.asarray(g) for g in douts))
    assert_all_close(grads, [t.grad.numpy() for t in tensors], 1e-10)
    assert_all_close(dparams, from_torch(slopes), 1e-10)


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        *((framework, "GATConv") for framework in FRAMEWORKS),
        *(("flax_linen", kind) for kind in KINDS[1:]),
    ],
)
def test_dropout(framework, kind):
    """Of the weights, in the given share; the rest grows; the same for the same key; none in evaluation."""
    rate, nnz, rng = 0.4, 4000, np.random.default_rng(0)
    options, nodes = dict(dropout=rate), jnp.asarray(rng.standard_normal((50, 6)))
    graph = BipartiteCSC.from_coo(*rng.integers(0, 50, (2, nnz)), 50, 50)
    layer, params = build(framework, kind, 6, **options), parameters(rng, kind, 6, options)

    def weights(key, **more):
        return layer.call(
            params, nodes, graph, None, key=key, return_attention_weights=True, **more
        )[1]

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
        "equinox": (
            {"inference": False},
            ValueError,
            "GATConv: key must be given while .*inference_mode",
        ),
    }[framework]
    with pytest.raises(error, match=message):
        layer.call(params, x, graph, None, **forget)


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
    call = eqx.filter_jit(
        lambda layer, key: layer(x, graph, key=key, return_attention_weights=True)[1]
    )
    assert (np.asarray(call(layer, jax.random.key(1))) == 0).any()
    assert (np.asarray(call(eqx.nn.inference_mode(layer), None)) > 0).all()
    loss = lambda layer: jnp.sin(layer(x, graph, inference=True)).sum()  # noqa: E731
    grads = eqx.filter_jit(eqx.filter_grad(loss))(layer)
    assert grads.att.shape == (H, C)
    assert (np.asarray(grads.lin_r.weight) != 0).any()


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


@pytest.mark.parametrize("name", ["gat_pair", "gatv2_pair", "transformer_pair"])
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

    exact = values_and_gradients(function, params, x, edge)
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x, edge))
    with jax.enable_x64(False):
        got = values_and_gradients(function, *narrow)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_all_close(got, exact, 1e-4)  # that of the bias of lin_key cancels to 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bfloat16(framework):
    kind, in_channels, options = CASES["gat_pair"]
    rng = np.random.default_rng(0)
    narrow = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)  # noqa: E731
    params = narrow(parameters(rng, kind, in_channels, options))
    x, graph, edge = inputs(rng, in_channels, options)
    x, edge = narrow(x), narrow(edge)
    flax = framework.startswith("flax")
    layer = build(
        framework, kind, in_channels, **options, **({"dtype": jnp.bfloat16} if flax else {})
    )
    out, weights = layer.call(
        wide(params) if flax else params, x, graph, edge, return_attention_weights=True
    )
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.bfloat16)
    exact = build(framework, kind, in_channels, **options)
    assert_close(out, exact.call(wide(params), wide(x), graph, wide(edge)), 4e-2)


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
        return values_and_gradients(
            lambda params, x: (layer.call(params, x, graph, edge),), params, x
        )

    assert_all_close(run(padded, poisoned), run(graph, edge), 1e-12)


def test_gat_forms_nothing_as_wide_as_its_edges_and_heads():
    """lin_edge and att_edge are joined before they meet the edges."""
    options, nnz = dict(edge_dim=EDGE), 1009
    rng = np.random.default_rng(0)
    params = parameters(rng, "GATConv", 6, options)
    graph = BipartiteCSC.from_coo(*rng.integers(0, N_SRC, (2, nnz)), N_SRC, N_SRC)
    x, edge = jnp.zeros((N_SRC, 6)), jnp.zeros((nnz, EDGE))
    layer = build("flax_linen", "GATConv", 6, **options)
    function = lambda params: layer.call(params, x, graph, edge).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(function))(params))
    assert f"[{nnz},{H}]" in text
    assert f"[{nnz},{H * C}]" not in text
    assert f"[{nnz},{H},{C}]" not in text


def test_edge_features_of_one_number_may_lack_an_axis(rng):
    options = dict(edge_dim=1)
    params, (x, graph, _) = parameters(rng, "GATConv", 6, options), inputs(rng, 6, {})
    edge = jnp.asarray(rng.standard_normal(NNZ))
    layer = build("haiku", "GATConv", 6, **options)
    np.testing.assert_array_equal(
        layer.call(params, x, graph, edge), layer.call(params, x, graph, edge[:, None])
    )


def test_pair_of_one_width_shares_the_layer_where_in_channels_is_an_int(rng):
    """As in PyTorch Geometric; the frameworks that ask for no width have a layer for each side of a pair."""
    params, (x, graph, _) = parameters(rng, "GATConv", 6, {}), inputs(rng, 6, {})
    layer = build("flax_nnx", "GATConv", 6)
    pair = layer.call(params, (x, x[:N_DST]), graph)
    assert_close(pair, layer.call(params, x, graph), 1e-13)


def test_graphs_tuple(rng):
    """A padded batch of two graphs; nodes of the one do not see the other, and edges stay as they are."""
    jraph = pytest.importorskip("jraph")
    singles = []
    for nodes, edges in ((4, 6), (3, 5)):
        singles.append(jraph.GraphsTuple(
            nodes=jnp.asarray(rng.standard_normal((nodes, 6))),
            edges=jnp.asarray(rng.standard_normal((edges, EDGE))),
            senders=jnp.asarray(rng.integers(0, nodes, edges)),
            receivers=jnp.asarray(rng.integers(0, nodes, edges)),
            n_node=jnp.array([nodes]), n_edge=jnp.array([edges]), globals=None,
        ))  # fmt: skip
    batch = jraph.pad_with_graphs(jraph.batch(singles), n_node=10, n_edge=16, n_graph=4)
    options = dict(edge_dim=EDGE, residual=True)
    params = parameters(rng, "GATConv", 6, options)
    layer = build("flax_linen", "GATConv", 6, **options)
    apply = on_graphs_tuple(lambda *arguments, **more: layer.call(params, *arguments, **more))

    out = jax.jit(apply)(batch, BipartiteCSC.from_jraph(batch))
    assert isinstance(out, jraph.GraphsTuple)
    assert out.edges.shape == (16, EDGE)
    for got, single in zip(jraph.unbatch(jraph.unpad_with_graphs(out)), singles, strict=True):
        assert_close(got.nodes, apply(single).nodes, 1e-12)
        np.testing.assert_array_equal(got.edges, single.edges)
    graph, weights = apply(batch, return_attention_weights=True)
    assert_close(graph.nodes, out.nodes, 1e-12)
    assert weights.shape == (16, H)
    with pytest.raises(TypeError, match="build the graph outside jit"):
        jax.jit(apply)(batch)


def call_with(framework="flax_nnx", kind="GATConv", in_channels=(6, 4), **changed):
    """A call of a layer that is right but for what `changed` says."""
    rng = np.random.default_rng(0)
    options = {"edge_dim": EDGE} | changed.pop("options", {})
    x, graph, edge = inputs(rng, (6, 4), {"edge_dim": EDGE})
    arguments = {"x": x, "graph": graph, "edge_attr": edge} | changed
    layer = build(framework, kind, in_channels, **options)
    params = parameters(rng, kind, (6, 4), {"edge_dim": EDGE})
    return layer.call(params, *arguments.values())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": jnp.zeros((N_SRC + 1, 6))}, ValueError, r"x must have shape \[num_src, channels\] .* 7, got"),
        ({"x": jnp.zeros((N_SRC, 6), int)}, TypeError, "x must be a floating-point array"),
        ({"x": (jnp.zeros((N_SRC, 6)),)}, ValueError, r"x must be an array or a pair .* got 1 of them"),
        ({"x": (jnp.zeros((N_SRC, 6)), None)}, TypeError, "x_dst must be a floating-point array"),
        ({"x": (jnp.zeros((N_SRC, 6)), jnp.zeros((N_SRC, 4)))}, ValueError, "x_dst must .* num_dst = 5"),
        ({"graph": None}, TypeError, "GATConv: graph must be a BipartiteCSC"),
        ({"edge_attr": None}, ValueError, "edge_attr must be given with edge_dim = 4, got None"),
        (
            {"framework": "flax_linen", "options": {"edge_dim": None}}, ValueError,
            "edge_attr must be None with edge_dim = None, got an array",
        ),
        ({"edge_attr": jnp.zeros((NNZ, 5))}, ValueError, r"edge_attr must have shape \[nnz, edge_dim\]"),
        ({"in_channels": (6, 4, 4)}, ValueError, "in_channels must be an int or a pair"),
        ({"in_channels": 0}, ValueError, "in_channels must be a positive int"),
        ({"options": {"dropout": 1.5}}, ValueError, r"dropout must lie in \[0, 1\]"),
        ({"options": {"concat": 1}}, TypeError, "concat must be a Python bool"),
        ({"options": {"edge_dim": 0}}, ValueError, "edge_dim must be a positive int"),
        ({"options": {"implementation": "mine"}}, ValueError, "mine"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        call_with(**changed)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_names_itself_in_errors(framework, kind):
    with pytest.raises(TypeError, match=f"{kind}: graph must be a BipartiteCSC"):
        call_with(framework, kind, graph="graph")


@pytest.mark.parametrize("framework", ["flax_nnx", "equinox"])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_another_width_than_the_layer_was_built_for_are_an_error(framework, kind):
    wide, narrow = jnp.zeros((N_SRC, 7)), jnp.zeros((N_DST, 5))
    for in_channels, x, message in (
        ((6, 6), wide, r"x must have shape \[num_src, in_channels\] = \(7, 6\), got \(7, 7\)"),
        ((6, 5), (wide, narrow), r"x_src must have shape .* = \(7, 6\), got \(7, 7\)"),
        ((7, 4), (wide, narrow), r"x_dst must have shape \[num_dst, .* = \(5, 4\), got \(5, 5\)"),
        ((7, 4), wide, r"x must be a pair .* with in_channels = \(7, 4\), got one array"),
    ):
        with pytest.raises(ValueError, match=f"{kind}: {message}"):
            call_with(framework, kind, in_channels, x=x)


def test_one_array_for_more_destinations_than_sources_is_an_error():
    graph = BipartiteCSC.from_coo([0], [3], 2, 4)
    with pytest.raises(
        ValueError, match=r"x must be a pair \(x_src, x_dst\) where num_src = 2 < num_dst"
    ):
        build("flax_nnx", "GATConv", 6).call({}, jnp.zeros((2, 6)), graph)


def test_from_torch_names_what_is_missing():
    with pytest.raises(ValueError, match=r"start with 'conv2.', got \['conv1.att_src'\]"):
        from_torch({"conv1.att_src": np.zeros((1, H, C))}, "conv2.")
    with pytest.raises(
        ValueError, match=r"prefix must end with a dot, got 'conv1'; 'conv1' would also"
    ):
        from_torch({"conv1.att_src": np.zeros((1, H, C))}, "conv1")


def test_a_framework_is_imported_with_its_layers_only():
    """In the order in which none may have come with the one before (Haiku itself imports Flax)."""
    program = """
import sys
def present(): return {"equinox", "haiku", "flax", "torch", "jraph"} & set(sys.modules)
import jax_attn_bwd, jax_attn_bwd.layers.graph
assert not present(), present()
import jax_attn_bwd.layers.equinox.graph
assert present() == {"equinox"}, present()
import jax_attn_bwd.layers.flax_linen.graph
assert present() == {"equinox", "flax"}, present()
assert "jax_attn_bwd.layers.flax_nnx" not in sys.modules
"""
    for package in ("equinox", "flax"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
