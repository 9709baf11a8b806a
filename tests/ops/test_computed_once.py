"""What makes the rows that an operator reads by index is computed once, for forward and backward."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, saved_arrays

from jax_attn_bwd import (
    BipartiteCSC,
    MultiHeadAttentionParams,
    dot_product_attention,
    graph_attention,
    multi_head_attention,
    multi_scale_deformable_attention,
)
from jax_attn_bwd._core import targets

NODES = np.arange(24)
GRAPH = BipartiteCSC.from_coo(NODES * 7 % 24, NODES, 24, 24)
CALLS = {  # by operator: a call, and the shapes of what it is differentiated by
    "dense": (dot_product_attention, ((2, 16, 2, 8),) * 3),
    "layer": (
        lambda x, *kernels: multi_head_attention(MultiHeadAttentionParams(kernels[0], None, *kernels[1:]), x),
        ((2, 16, 16), (16, 2, 8), (16, 2, 8)),
    ),
    "graph": (lambda *x: graph_attention(GRAPH, *x, num_heads=2), ((24, 16), (24, 16), (32,))),
    "deformable": (
        lambda *x: multi_scale_deformable_attention(x[0], ((4, 4),), *x[1:]),
        ((1, 16, 2, 4), (1, 8, 2, 1, 2, 2), (1, 8, 2, 1, 2)),
    ),
}


@pytest.fixture
def barriers(one_device):
    """They stand where nothing may be sharded; what was traced elsewhere has none."""
    jax.clear_caches()


@pytest.mark.parametrize(
    ("operator", "transform"),
    [
        ("graph", lambda loss, _: loss),
        ("graph", jax.grad),
        pytest.param("deformable", jax.grad, marks=pytest.mark.thorough),
    ],
    ids=["graph, forward", "graph", "deformable"],
)
@pytest.mark.usefixtures("barriers")
def test_what_makes_the_operands_is_computed_once(operator, transform):
    function, shapes = CALLS[operator]
    loss = lambda *args: (function(*map(jnp.sin, args)) ** 2).sum()
    program = transform(loss, tuple(range(len(shapes))))
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(program).lower(*given).compile().as_text()
    assert len(re.findall(r" sine\(", compiled)) == len(shapes)


@pytest.mark.parametrize("operator", ["dense", "layer", "graph"])  # the other saves what it makes of them
@pytest.mark.usefixtures("barriers")
def test_a_compiled_forward_saves_its_operands_and_no_copies(operator):
    """As the outputs of barriers would be."""
    function, shapes = CALLS[operator]
    args = [jnp.full(shape, 0.5, jnp.float32) for shape in shapes]
    saved = saved_arrays(jax.vjp(jax.jit(function), *args)[1])
    pointers = {x.unsafe_buffer_pointer() for x in saved}
    assert {x.unsafe_buffer_pointer() for x in args} <= pointers


@pytest.mark.thorough
@pytest.mark.usefixtures("barriers")
@pytest.mark.parametrize("operator", ["graph"])
def test_barriers_change_no_derivative(operator, monkeypatch):
    """Mapped over, rematerialized, and differentiated twice."""
    function, shapes = CALLS[operator]
    args = [jnp.sin(jnp.arange(2.0 * math.prod(shape))).reshape(2, *shape) for shape in shapes]
    loss = lambda *args: (jax.checkpoint(function)(*args) ** 2).sum()
    first = jax.grad(loss, (0, 1, 2))
    second = jax.grad(lambda *args: sum((x**2).sum() for x in first(*args)), (0, 1, 2))
    with_barriers = jax.jit(jax.vmap(second))(*args)
    monkeypatch.setattr(targets, "is_one_cpu", lambda: False)
    jax.clear_caches()
    for got, expected in zip(with_barriers, jax.jit(jax.vmap(second))(*args), strict=True):
        assert_close(got, expected, 1e-12)
