"""Batch axes of nodes and edges for one graph, beside what the cases and the shard cases hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import assert_close, assert_trees_close, interpreted, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.graph.calls import FUNCTIONS, QUICK, D, H, each_kind, every_kind, inputs, normal, random_edges

from jax_attn_bwd import BipartiteCSC, edge_softmax, explain, graph_attention, graph_attention_bwd
from jax_attn_bwd._core import pallas, targets

GRAPH = BipartiteCSC.from_coo(*random_edges(), 7, 5)
B = 8


@thorough
@every_kind
def test_entries_one_after_another(kind, monkeypatch):
    """They give what all give at once, to second order; a lone CPU computes them so."""
    call, arrays = FUNCTIONS[kind][0], inputs(kind, 7, 5, edge=23)
    batched = {n: x for n, x in arrays.items() if n not in ("attention_weights", "query")}
    arrays |= {n: normal(2, 3, *x.shape, seed=i) for i, (n, x) in enumerate(batched.items())}
    options = {"num_heads": H, "dropout_rate": 0.4, "dropout_key": jax.random.key(0)}

    def curvature(a):
        gradient = jax.grad(lambda a: jnp.sin(call(GRAPH, **a, **options)).sum())
        return jax.grad(lambda a: sum((g**2).sum() for g in gradient(a).values()))(a)

    expected = jax.jit(curvature, compiler_options=QUICK)(arrays)
    monkeypatch.setattr(targets, "is_one_cpu", lambda: True)
    in_turn = jax.jit(lambda a: curvature(a), compiler_options=QUICK)
    assert " while(" in in_turn.lower(arrays).as_text(dialect="hlo")
    assert_trees_close(in_turn(arrays), expected, 1e-11)


@each_kind("gat")
def test_an_entry_is_a_call(kind):
    """With dropout, an entry is the call whose batch offset is its number."""
    call, arrays = FUNCTIONS[kind][0], inputs(kind, 7, 5, edge=23)
    batched = {n: x for n, x in arrays.items() if n != "attention_weights"}
    batched = {n: normal(2, 3, *x.shape, seed=i) for i, (n, x) in enumerate(batched.items())}
    options = {"num_heads": H, "dropout_rate": 0.4, "dropout_key": jax.random.key(0)}
    got = call(GRAPH, **(arrays | batched), dropout_offset=(10, 1, 2, 0), **options)
    one = arrays | {n: x[1, 2] for n, x in batched.items()}
    assert_close(got[1, 2], call(GRAPH, **one, dropout_offset=(15, 1, 2, 0), **options), 1e-13)


@pytest.mark.parametrize("in_turn", [pytest.param(False, marks=thorough), True])
def test_an_empty_batch(in_turn, monkeypatch):
    monkeypatch.setattr(targets, "is_one_cpu", lambda: in_turn)
    src = jnp.ones((0, 2, 7, H * D))
    loss = lambda src, a: graph_attention(GRAPH, src, None, a, num_heads=H).sum()
    dsrc, da = jax.grad(loss, (0, 1))(src, jnp.ones(2 * H * D))
    assert dsrc.shape == src.shape
    assert not da.any()
    assert edge_softmax(GRAPH, jnp.ones((0, 23, 2))).shape == (0, 23, 2)


def step(arrays, dout):
    """The rule, and the backward as a plain function."""
    call = lambda a: graph_attention(GRAPH, **a, num_heads=H)
    out, pullback = jax.vjp(call, arrays)
    plain = graph_attention_bwd(dout, GRAPH, **arrays, num_heads=H, wrt=tuple(arrays))
    return {"out": out} | pullback(dout)[0], {n: getattr(plain, n) for n in arrays}


MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": None, "no mesh set": AxisType.Auto}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[thorough] * (n != "explicit")) for n in MESHES])
def test_a_sharded_batch_sums_the_gradients_of_parameters_alone(name):
    """Shared nodes and the attention vector have such sums, in the rule and in the plain backward."""
    arrays = inputs("gat", 7, 5, edge=23)
    arrays |= {"src": normal(B, 7, H * D), "edge": normal(B, 23, H * D, seed=5)}
    dout = normal(B, 5, H * D, seed=9)
    expected = step(arrays, dout)
    specs = {n: P("b") if x.ndim == 3 else P() for n, x in arrays.items()}
    mesh = jax.make_mesh((B,), ("b",), axis_types=(MESHES[name] or AxisType.Auto,))
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    args = (placed, jax.device_put(dout, NamedSharding(mesh, P("b"))))
    run = step
    if name == "manual":
        out_specs = ({"out": P("b")} | specs, specs)
        run = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("b")), out_specs=out_specs)
    compiled = jax.jit(lambda *args: run(*args), compiler_options=QUICK)
    if name in ("manual", "no mesh set"):
        compiled = compiled.lower(*args).compile()
    else:
        with jax.set_mesh(mesh):
            compiled = compiled.lower(*args).compile()
    for got, wanted in zip(compiled(*args), expected, strict=True):
        assert_trees_close(got, wanted, 1e-12)
    assert sum(collectives(compiled).values()) <= 4, collectives(compiled)  # dst and the vector, twice


@thorough
def test_lower_precision_of_what_many_entries_share():
    """An error at most twice the definition's."""
    call, definition = FUNCTIONS["gatv2"]
    arrays = {n: x.astype("bfloat16") for n, x in inputs("gatv2", 7, 5).items()}
    arrays["src"] = normal(64, 7, H * D, dtype="bfloat16")
    arrays["dst"] = jnp.abs(arrays["dst"])

    def gradient(function):
        loss = lambda a: function(a).astype("float32").sum()
        return lambda a: np.asarray(jax.jit(jax.grad(loss))(a)["dst"], np.float64)

    def plain(a):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            one = lambda src: definition(GRAPH, **(a | {"src": src}), num_heads=H)[0]
            return jax.vmap(one)(a["src"])

    wide = gradient(plain)({n: x.astype("float64") for n, x in arrays.items()})
    own, theirs = (
        np.abs(gradient(f)(arrays) - wide).max() for f in (lambda a: call(GRAPH, **a, num_heads=H), plain)
    )
    assert own <= 2 * theirs


@interpreted
@thorough
@pytest.mark.parametrize("kind", ["gat", "transformer"])
def test_kernels(kind):
    """With what entries share; a batch over an Explicit mesh is left to the portable path."""
    call, arrays = FUNCTIONS[kind][0], inputs(kind, 7, 5, dtype=np.float32, width=32)
    name = "src" if kind == "gat" else "query"
    arrays |= {name: normal(B, *arrays[name].shape, dtype=np.float32)}

    def gradient(arrays, implementation):
        options = {"num_heads": 4, "implementation": implementation}
        return jax.grad(lambda a: jnp.sin(call(GRAPH, **a, **options)).sum())(arrays)

    run = jax.jit(gradient, static_argnums=1, compiler_options=QUICK)
    with pallas.interpreting("mosaic_gpu"):
        assert_trees_close(run(arrays, "mosaic_gpu"), run(arrays, "xla"), 4e-6)
        mesh = jax.make_mesh((B,), ("b",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            placed = arrays | {name: jax.device_put(arrays[name], NamedSharding(mesh, P("b")))}
            reasons = explain(lambda **a: call(GRAPH, **a, num_heads=4), **placed)
    assert "several devices of an Explicit mesh; call it inside" in reasons["mosaic_gpu"]


def test_refused_shardings_of_a_batch():
    mesh = jax.make_mesh((B,), ("b",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda spec, *shape: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
        src, a = put(P("b"), B, 7, H * D), jnp.ones(2 * H * D)
        with pytest.raises(ValueError, match=r"dst must be sharded like src, \('b', None, None\)"):
            graph_attention(GRAPH, src, put(P(), B, 5, H * D), a, num_heads=H)
