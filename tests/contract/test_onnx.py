"""Operators exported to ONNX by jax2onnx and computed by onnxruntime: `.ci/extras onnx` installs both."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn_bwd as jab

jax2onnx = pytest.importorskip("jax2onnx", reason="jax2onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        jax.__version_info__ >= (0, 11), reason="jax2onnx 0.17 exports no nested jit of this JAX"
    ),
    pytest.mark.filterwarnings("ignore"),  # of jax2onnx
]
LEVELS = ((4, 4), (2, 2))
POINTS = [(2, 20, 2, 4), (2, 3, 2, 2, 4, 2), (2, 3, 2, 2, 4)]
GRAPH = jab.BipartiteCSC.from_edge_index(np.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]), 4)


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def layer(x):
    kernels = {f"{name}_kernel": draw(6, 2, 4) for name in ("query", "key", "value")}
    params = jab.MultiHeadAttentionParams(**kernels, out_kernel=draw(2, 4, 6), out_bias=draw(6))
    return jab.multi_head_attention(params, x, num_heads=2, is_causal=True)


def attend(q, k, v):
    return jab.dot_product_attention(q, k, v, is_causal=True)


def deformable(value, locations, weights, **options):
    """Points lie outside of the feature maps, too: onnxruntime refuses an index beyond an array."""
    return jab.multi_scale_deformable_attention(value, LEVELS, locations, weights, **options)


def decayed(q, k, v, log_decay, beta=None):
    rule = jab.gated_linear_attention if beta is None else jab.gated_delta_rule
    return rule(q, k, v, -jnp.abs(log_decay), *(() if beta is None else (jax.nn.sigmoid(beta),)))


CASES = {
    "softmax": (lambda x: jab.scaled_masked_softmax(x, scale=0.5, is_causal=True), [(2, 5, 5)]),
    "dense attention": (attend, [(2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)]),
    "dense attention in tiles": (attend, [(1, 1030, 2, 4)] * 3),
    "layer": (layer, [(2, 7, 6)]),
    "linear attention": (decayed, [(2, 70, 3, 8)] * 3 + [(2, 70, 3)]),
    "delta rule": (decayed, [(2, 70, 3, 8)] * 3 + [(2, 70, 3)] * 2),
    "deformable attention": (deformable, POINTS),
    "deformable attention to the border": (partial(deformable, padding_mode="border"), POINTS),
    "graph attention": (lambda x, a: jab.graph_attention(GRAPH, x, None, a, num_heads=2), [(4, 6), (12,)]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """Float32 and JAX's own promotion; what jax2onnx put in the place of jax.numpy leaves the caches."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
    jax.clear_caches()


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_we_do(name):
    function, shapes = CASES[name]
    arrays = [draw(*shape) for shape in shapes]
    expected = function(*map(jnp.asarray, arrays))
    jax.clear_caches()
    model = jax2onnx.to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, arrays, strict=True)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_a_batch_of_any_size():
    shapes = [("B", 12, 2, 8)] * 3
    model = jax2onnx.to_onnx(attend, shapes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        x = draw(batch, 12, 2, 8)
        (found,) = session.run(None, {argument.name: x for argument in session.get_inputs()})
        jax.clear_caches()
        np.testing.assert_allclose(found, attend(*map(jnp.asarray, (x, x, x))), atol=1e-5, rtol=0)
