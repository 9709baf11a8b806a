"""`load_torch` of each framework: PyTorch's names and layouts go into layers of the same options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import deformable_cases, delta_rule_cases, graph_cases
from layers.frameworks import (
    FRAMEWORKS,
    RENAMED,
    assert_all_close,
    frameworks,
    from_equinox,
    imported,
    lenient,
)

from jax_attn_bwd.layers.deformable import from_torch
from jax_attn_bwd.layers.gated_delta_net import fuse_projections

PREFIX = "net.0.conv."


def torch_state(tree):
    """A tree as in linen in the layout of PyTorch, under a prefix, beside another layer."""
    state = {"net.0.conv2.lin.weight": np.zeros((2, 2))}
    for name, x in tree.items():
        if isinstance(x, dict):
            state[f"{PREFIX}{name}.weight"] = np.asarray(x["kernel"]).T
            state |= {f"{PREFIX}{name}.bias": np.asarray(x["bias"])} if "bias" in x else {}
        else:
            state[PREFIX + name] = np.asarray(x)[None] if name.startswith("att") else np.asarray(x)
    return state


def load(framework, make, inputs, state, prefix=PREFIX, dtype="float64"):
    """The tree as in linen of a layer that `make(layers, **own arguments)` builds, loaded with `state`."""
    theirs, layers = imported(framework)
    if framework == "flax_linen":
        layer = make(layers, param_dtype=dtype)
        with lenient():  # inputs and parameters may differ in dtype
            shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *inputs))["params"]
        return layers.load_torch(shapes, state, prefix)
    if framework == "flax_nnx":
        layer = theirs.eval_shape(lambda: make(layers, param_dtype=dtype, rngs=theirs.Rngs(0)))
        assert layers.load_torch(layer, state, prefix) is None
        return theirs.to_pure_dict(theirs.state(layer, theirs.Param))
    if framework == "haiku":

        def forward(*inputs):
            return theirs.Linear(3, name="head")(make(layers, name="mine")(*inputs))

        shapes = jax.eval_shape(lambda: theirs.transform(forward).init(jax.random.key(0), *inputs))
        flat = layers.load_torch(shapes, "mine", state, prefix)
        assert flat.keys() == shapes.keys()
        assert flat.pop("head") is shapes["head"]
        tree = dict(flat.get("mine", {}))
        for path in flat.keys() - {"mine"}:
            names = {new: name for name, new in RENAMED.items()}
            tree[path.rpartition("/")[2]] = {names[p]: x for p, x in flat[path].items()}
        return tree
    layer = delta_rule_cases.of_zeros(lambda: make(layers, dtype=jnp.dtype(dtype), key=jax.random.key(0)))
    loaded = layers.load_torch(layer, state, prefix)
    assert type(loaded) is type(layer)
    assert loaded.config == layer.config
    return from_equinox(loaded, theirs)


def graph_maker(framework, name):
    kind, in_channels, options = graph_cases.CASES[name]
    sizes = (graph_cases.C, graph_cases.H)
    if framework in ("flax_nnx", "equinox"):
        sizes = (in_channels, *sizes)
    return lambda layers, **own: getattr(layers, kind)(*sizes, **options, **own)


@pytest.mark.parametrize("framework", frameworks("flax_linen", "haiku", "equinox"))
def test_graph_layers(framework):
    """Every parameter goes where the forward reads it, in the layer's dtype; what is unused stays out."""
    for name, (kind, in_channels, options) in graph_cases.CASES.items():
        rng = np.random.default_rng(0)
        tree = graph_cases.parameters(rng, kind, in_channels, options)
        inputs = graph_cases.inputs(rng, in_channels, options)
        state = torch_state(tree)
        if name == "gatv2_shared":
            state[f"{PREFIX}lin_r.weight"] = state[f"{PREFIX}lin_l.weight"]
        if name == "transformer":
            state[f"{PREFIX}lin_skip.weight"] = np.zeros((graph_cases.C, in_channels))
        got = load(framework, graph_maker(framework, name), inputs, state)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert_all_close(got, tree, 0)
    if framework != "haiku":  # has the dtype of the input
        narrow = load(framework, graph_maker(framework, name), inputs, state, dtype="float32")
        assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_deformable_attention(framework):
    cases = deformable_cases
    tree = from_torch(cases.torch_state(np.random.default_rng(0)))
    constants = ("num_points_scale", "n_points_scale")  # RT-DETRv2's own, and in transformers
    state = torch_state(tree) | {f"{PREFIX}{name}": np.ones(3) for name in constants}
    query, points, value, _ = cases.inputs(np.random.default_rng(0))
    width = {
        "flax_linen": "features",
        "flax_nnx": "in_features",
        "haiku": "model_size",
        "equinox": "query_size",
    }
    sizes = {"num_heads": cases.M, width[framework]: cases.C, "num_levels": cases.L, "num_points": 2}
    make = lambda layers, **own: layers.MultiScaleDeformableAttention(**sizes, **own)
    got = load(framework, make, (query, points, value, cases.LEVELS), state)
    assert_all_close(got, tree, 0)


def checkpoint_of_kimi_linear(state):
    """A state dict with the names that we have, as it is published."""
    state = {**state, "A_log": state["A_log"].reshape(1, 1, -1, 1)}
    convs = np.split(state.pop("conv1d.weight"), 3)
    return state | {f"{name}_conv1d.weight": x for name, x in zip("qkv", convs, strict=True)}


def transformers_of_kimi_linear(state):
    """The same as in transformers 5.24."""
    inside = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
    state = {**state, "A_log": state["A_log"].reshape(1, 1, -1, 1)}
    return {f"forget_gate.{name}" if name in inside else name: x for name, x in state.items()}


PUBLISHED = {"gated": (dict,), "kimi": (dict, checkpoint_of_kimi_linear, transformers_of_kimi_linear)}


@pytest.mark.parametrize(
    ("layer", "framework"), [("gated", "flax_linen"), *(("kimi", name) for name in FRAMEWORKS)]
)
def test_layers_around_the_delta_rule(layer, framework):
    case = delta_rule_cases.CASES[layer]
    state = delta_rule_cases.torch_state(case, np.random.default_rng(0))
    own = (delta_rule_cases.E,) if framework in ("flax_nnx", "equinox") else ()
    make = lambda layers, **more: getattr(layers, case.layer)(*own, *case.sizes, **more)
    inputs, expected = (jnp.zeros((1, 3, delta_rule_cases.E)),), delta_rule_cases.tree_of(state)
    for named in PUBLISHED[layer] if framework == "flax_nnx" else PUBLISHED[layer][-1:]:
        published = {PREFIX + name: x for name, x in named(state).items()}
        got = load(framework, make, inputs, published)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert_all_close(got, expected, 0)


def test_what_of_a_layer_of_kimi_linear_does_not_fit_is_named():
    case = delta_rule_cases.KIMI
    state = checkpoint_of_kimi_linear(delta_rule_cases.torch_state(case, np.random.default_rng(0)))
    make = lambda layers, **more: layers.KimiDeltaAttention(delta_rule_cases.E, *case.sizes, **more)
    state = {PREFIX + name: x for name, x in state.items()}
    wrong = {
        r"'conv1d\.kernel': \(4, 1, 45\).*got .*'q_conv1d\.kernel': \(4, 1, 15\)": ("k_conv1d.weight", None),
        r"'q_conv1d\.bias': \(15,\)": ("q_conv1d.bias", np.zeros(15)),
        r"\{'A_log': \(3,\)\}, got \{'A_log': \(4,\)\}": ("A_log", np.zeros((1, 1, 4, 1))),
        r"\{'g_b_proj\.bias': None\}, got \{'g_b_proj\.bias': \(15,\)\}": ("g_b_proj.bias", np.zeros(15)),
    }
    for message, (name, x) in wrong.items():
        changed = {n: y for n, y in {**state, PREFIX + name: x}.items() if y is not None}
        with pytest.raises(ValueError, match=f"load_torch: state must hold .*{message}"):
            load("flax_nnx", make, (), changed)


def test_four_projections_of_qwen3_5_are_fused():
    E, case, (K, N, H, HV) = delta_rule_cases.E, delta_rule_cases.GATED, delta_rule_cases.GATED.sizes
    state = delta_rule_cases.torch_state(case, np.random.default_rng(0), PREFIX)
    parted, G = {name: x for name, x in state.items() if "in_proj" not in name}, N // K
    qkvz = state[f"{PREFIX}in_proj_qkvz.weight"].reshape(K, -1, E)
    q, k, v, z = (x.reshape(-1, E) for x in np.split(qkvz, (H, 2 * H, 2 * H + G * HV), 1))
    ba = state[f"{PREFIX}in_proj_ba.weight"].reshape(K, -1, E)
    parts = {"qkv": np.concatenate([q, k, v]), "z": z, "b": ba[:, :G], "a": ba[:, G:]}
    parted |= {f"{PREFIX}in_proj_{name}.weight": x.reshape(-1, E) for name, x in parts.items()}
    fused = fuse_projections(parted, K, PREFIX)
    assert fused.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(fused[name], x)
    with pytest.raises(ValueError, match=r"fuse_projections: state must hold \['net\.0\.conv\.in_proj_qkv"):
        fuse_projections(state, K, PREFIX)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_does_not_fit_is_named(framework):
    kind, in_channels, options = graph_cases.CASES["gat"]
    rng = np.random.default_rng(0)
    state = torch_state(graph_cases.parameters(rng, kind, in_channels, options))
    inputs = graph_cases.inputs(rng, in_channels, options)
    wrong = {
        r"state must hold .*'lin\.kernel': \(6, 6\)\}, got \{'lin\.kernel': \(7, 6\)\}; build the layer": {
            f"{PREFIX}lin.weight": np.zeros((6, 7))
        },
        r"\{'res\.kernel': None\}, got \{'res\.kernel': \(6, 6\)\}": {
            f"{PREFIX}res.weight": np.zeros((6, 6))
        },
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            load(framework, graph_maker(framework, "gat"), inputs, state | changed)
    missing = {name: x for name, x in state.items() if not name.endswith("att_dst")}
    with pytest.raises(ValueError, match=r"\{'att_dst': \(2, 3\)\}, got \{'att_dst': None\}"):
        load(framework, graph_maker(framework, "gat"), inputs, missing)
    with pytest.raises(ValueError, match="prefix must end with a dot"):
        load(framework, graph_maker(framework, "gat"), inputs, state, "net.0.conv")


def test_the_layer_of_torch_itself_is_told_where_it_is_read():
    nnx, flax_nnx = pytest.importorskip("flax.nnx"), pytest.importorskip("jax_attn_bwd.layers.flax_nnx")
    layer = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"compat\.torch\.multi_head_attention_forward takes torch's weights"
    ):
        flax_nnx.load_torch(layer, {"in_proj_weight": np.ones((12, 4))})


def test_haiku_names_a_module_that_is_not_there():
    _, layers = imported("haiku")
    with pytest.raises(ValueError, match=r"module must be in params, got 'gat'; \['gat_conv/lin'\]"):
        layers.load_torch({"gat_conv/lin": {}}, "gat", {})
