"""`compat.cugraph` against the formulas of the source written out densely, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.cugraph.calls import ACTIVATIONS, FAMILIES, NNZ, H, arrays, call, cotangent, source, structure
from helpers import assert_close, thorough

from jax_attn_bwd.compat import cugraph


@pytest.mark.parametrize(
    ("activation", "v2"),
    [
        pytest.param(activation, v2, marks=() if (case % 3 == 0) == v2 else thorough)
        for case, activation in enumerate(ACTIVATIONS)
        for v2 in (False, True)
    ],
)
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


@pytest.mark.parametrize("family", [pytest.param("mha_gat_n2n", marks=thorough), "mha_gat_v2_n2n_efeat"])
def test_the_forward_differentiates_to_the_backward(rng, edges, family):
    params = cugraph.mha_params(H, False, "Tanh")
    operands, g = arrays(rng, family), cotangent(rng, params)
    graph, forward = structure(edges), getattr(cugraph, f"{family}_fwd")
    _, _, grads = call(family, graph, params, g, operands)
    _, pullback = jax.vjp(jax.jit(lambda *arrays: forward(*arrays, graph, params)), *operands.values())
    for name, gradient in zip(operands, pullback(jnp.asarray(g)), strict=True):
        assert_close(gradient, getattr(grads, f"grad_{name}"), 1e-12, name)


def test_scores_are_differentiable(rng, edges):
    """Plane 1 is the softmax of plane 0, and plane 0 linear in the weights of a linear activation."""
    params, operands = cugraph.mha_params(H, True, "Linear"), arrays(rng, "mha_gat_n2n")
    src, dst, a = operands.values()
    weight = rng.standard_normal((2, H, NNZ))

    def planes(a):
        return cugraph.mha_gat_n2n_fwd(src, dst, a, structure(edges), params, return_softmax_scores=True)[1]

    _, pullback = jax.vjp(planes, jnp.asarray(a))
    (da,) = pullback(jnp.asarray(weight))
    step = 1e-6 * rng.standard_normal(a.shape)
    change = (weight * np.asarray(planes(a + step) - planes(a - step))).sum() / 2
    assert_close(np.vdot(da, step), change, 1e-7)


@pytest.mark.parametrize("family", ["mha_gat_n2n", "mha_gat_v2_n2n"])
def test_half_precision_has_scores_in_float32(rng, edges, family):
    """The suffix fp16_fp32 of the source: embeddings in half, scores in float32."""
    params = cugraph.mha_params(H)
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
