"""GAT with heads over a mesh: its flat `attention_weights` are two rows of heads, so they stay whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import collectives

from jax_attn_bwd import BipartiteCSC, graph_attention

H, D = 8, 4
SPECS = {"src": P(None, "h"), "dst": P(None, "h"), "attention_weights": P()}


def setup():
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 7, 23), rng.integers(0, 5, 23), 7, 5)
    shapes = {"src": (7, H * D), "dst": (5, H * D), "attention_weights": (2 * H * D,)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return graph, arrays, jnp.asarray(rng.standard_normal((5, H * D)))


def step(graph, arrays, dout):
    heads = arrays["src"].shape[1] // D
    out, pullback = jax.vjp(lambda a: graph_attention(graph, **a, num_heads=heads), arrays)
    return {"out": out} | pullback(dout)[0]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_jit_with_sharded_heads(axis_type):
    """One collective: the gradient of the whole attention vector is gathered from the heads."""
    graph, arrays, dout = setup()
    expected = step(graph, arrays, dout)
    mesh = jax.make_mesh((4,), ("h",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        placed = {name: put(x, SPECS[name]) for name, x in arrays.items()}
        args = (put(graph, P()), placed, put(dout, P(None, "h")))
        compiled = jax.jit(step).lower(*args).compile()
        got = compiled(*args)
    assert_trees_close(got, expected, 1e-12)
    assert not got["out"].sharding.is_fully_replicated
    counted = collectives(compiled)
    assert sum(counted.values()) <= 1, counted


def test_shard_map_without_collectives():
    """Each device is given its own heads of the two rows of the attention vector."""
    graph, arrays, dout = setup()
    expected = step(graph, arrays, dout)
    rows = arrays | {"attention_weights": arrays["attention_weights"].reshape(2, H * D)}
    specs = dict.fromkeys(rows, P(None, "h"))

    def local(graph, rows, dout):
        flat = rows | {"attention_weights": rows["attention_weights"].reshape(-1)}
        found = step(graph, flat, dout)
        return found | {"attention_weights": found["attention_weights"].reshape(2, -1)}

    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    sharded = jax.jit(
        jax.shard_map(
            local, mesh=mesh, check_vma=True, in_specs=(P(), specs, P(None, "h")),
            out_specs={"out": P(None, "h")} | specs,
        )
    )  # fmt: skip
    got = sharded(graph, rows, dout)
    got["attention_weights"] = got["attention_weights"].reshape(-1)
    assert_trees_close(got, expected, 1e-12)
    assert not collectives(sharded.lower(graph, rows, dout).compile())
