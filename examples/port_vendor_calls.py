"""Ports one call of each source system: Apple BNNS, Ascend CANN, RAPIDS cugraph-ops, MegEngine.

    python examples/port_vendor_calls.py

Each function shows the vendor's call as it stands in a program (comment), then the same call of
`jax_attn_bwd.compat`, argument for argument, and then this package's own operator, to which a program may
move on. Forward and backward of the last two are compared, on the same random numbers; what is printed is
their largest difference, relative to the largest number. Where they differ in meaning (what True means in a
mask, the order of axes), the code says so.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

import jax_attn_bwd as jab
from jax_attn_bwd.compat import bnns, cann, cugraph, megengine

Pairs = Iterable[tuple[Any, Any]]  # (by the vendor's call, by the operator)
BATCH, LENGTH, WIDTH, HEADS, SIZE = 2, 16, 32, 4, 8


def normal(seed: int, *shape: int) -> jax.Array:
    """Random numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def apple_bnns() -> Pairs:
    """The layer, and its backward from the cache of the forward."""
    # BNNSApplyMultiheadAttention(F, batch_size, query, q_stride, key, k_stride, &key_mask, mask_stride,
    #     value, v_stride, output, o_stride, &add_to_attention, &cache_size, cache, ...)
    x, dout = normal(0, BATCH, LENGTH, WIDTH), normal(1, BATCH, LENGTH, WIDTH)
    wq, wk, wv = (normal(i, WIDTH, SIZE, HEADS) / 6 for i in (2, 3, 4))  # head sizes before heads
    wo = normal(5, HEADS * SIZE, WIDTH) / 6
    padding = jnp.arange(LENGTH)[None] >= jnp.array([[LENGTH], [9]])  # True = ignored
    part = bnns.BNNSMHAProjectionParameters
    layer = bnns.BNNSLayerParametersMultiheadAttention(
        part(None, wq), part(None, wk), part(None, wv), output=part(None, wo)
    )
    out, cache = bnns.apply_multihead_attention(layer, BATCH, x, x, padding, x, backprop_cache=True)
    asked = part(target_desc=True, weights=True)
    # BNNSApplyMultiheadAttentionBackward(F, batch_size, query, ..., &query_param_delta, key, ..., cache, ...)
    deltas = bnns.apply_multihead_attention_backward(
        layer, BATCH, x, asked, x, padding, asked, x, asked, None, None, None, out,
        part(dout, weights=True), cache,
    )  # fmt: skip

    params = jab.MultiHeadAttentionParams(
        query_kernel=wq.mT, key_kernel=wk.mT, value_kernel=wv.mT, out_kernel=wo.reshape(HEADS, SIZE, WIDTH)
    )
    mask = ~padding[:, None, None]  # True = attend
    yield out, jab.multi_head_attention(params, x, mask=mask)
    grads: Any = jab.multi_head_attention_bwd(dout, params, x, x, x, mask=mask)
    yield deltas.query_param_delta.target_desc, grads.query
    yield deltas.key_param_delta.weights, grads.params.key_kernel.mT


def ascend_cann_softmax() -> Pairs:
    """The masked softmax."""
    # aclnnScaledMaskedSoftmaxGetWorkspaceSize(x, mask, scale, fixTriuMask, y, &size, &executor);
    # aclnnScaledMaskedSoftmax(workspace, size, executor, stream);
    x, dy = normal(0, BATCH, HEADS, LENGTH, LENGTH), normal(1, BATCH, HEADS, LENGTH, LENGTH)
    masked = normal(2, BATCH, 1, LENGTH, LENGTH) > 1  # True = masked, with -10000
    y = cann.scaled_masked_softmax(x, masked, scale=0.125)
    yield y, jab.scaled_masked_softmax(x, ~masked, scale=0.125)  # True = attend
    # aclnnScaledMaskedSoftmaxBackward(gradOutput, y, mask, scale, fixTriuMask, out, ...)
    dx = cann.scaled_masked_softmax_backward(dy, y, masked, scale=0.125)
    yield dx, jab.scaled_masked_softmax_bwd(dy, y, ~masked, scale=0.125)


def ascend_cann_deformable() -> Pairs:
    """The deformable sampling."""
    # aclnnMultiScaleDeformableAttnFunction(value, spatialShape, levelStartIndex, location, attnWeight, ...)
    levels, starts, points = ((8, 6), (4, 3)), (0, 48), (BATCH, 5, HEADS, 2, 4)
    value, dout = normal(0, BATCH, 60, HEADS, SIZE), normal(1, BATCH, 5, HEADS, SIZE)
    location = jax.random.uniform(jax.random.key(2), (*points, 2))  # (x, y); levels are (height, width)
    weight = normal(3, *points)
    out = cann.multi_scale_deformable_attention(value, levels, starts, location, weight)
    yield out, jab.multi_scale_deformable_attention(value, levels, location, weight)
    # aclnnMultiScaleDeformableAttentionGrad(value, ..., gradOutput, gradValue, gradLocation, ...)
    by_cann = cann.multi_scale_deformable_attention_grad(value, levels, starts, location, weight, dout)
    dout = dout.reshape(out.shape)  # heads and channels on one axis, as the forward returns them
    grads: Any = jab.multi_scale_deformable_attention_bwd(dout, value, levels, location, weight)
    yield by_cann.grad_value, grads.value
    yield by_cann.grad_location, grads.sampling_locations


def rapids_cugraph() -> Pairs:
    """Graph attention from node to node."""
    # graph = pylibcugraphops.make_bipartite_csc(offsets, indices, n_src)
    # mha_gat_n2n_fwd(output, scores, src, dst, weights, graph, params)
    offsets, indices = [0, 2, 3, 3, 6], [0, 3, 1, 2, 3, 0]  # edges into 4 nodes; the third has none
    graph = cugraph.make_bipartite_csc(offsets, indices, 4)
    params = cugraph.mha_params(num_heads=HEADS, activation="LeakyReLU", alpha=0.2)
    src, dst, weights = normal(0, 4, WIDTH), normal(1, 4, WIDTH), normal(2, 2 * WIDTH)
    out, scores = cugraph.mha_gat_n2n_fwd(src, dst, weights, graph, params, return_softmax_scores=True)
    own = jab.BipartiteCSC.from_csc(offsets, indices, 4)
    yield out, jab.graph_attention(own, src, dst, weights, num_heads=HEADS)
    # mha_gat_n2n_bwd(grad_src, grad_dst, grad_weights, grad_output, src, dst, weights, scores, graph, params)
    dout = normal(3, 4, WIDTH)
    by_cugraph = cugraph.mha_gat_n2n_bwd(dout, src, dst, weights, scores, graph, params)
    grads: Any = jab.graph_attention_bwd(dout, own, src, dst, weights, num_heads=HEADS)
    yield by_cugraph.grad_src_node_embedding, grads.src
    yield by_cugraph.grad_attention_weights, grads.attention_weights


def megengine_layer() -> Pairs:
    """The layer with its weights in one array, as a checkpoint holds them."""
    # F.nn.multi_head_attention(x, x, x, 32, 4, 0.0, 0.0, module.io_weight_bias, obias=True, is_causal=True)
    x, dout = normal(0, BATCH, LENGTH, WIDTH), normal(1, BATCH, LENGTH, WIDTH)
    packed = normal(2, 1, 4 * WIDTH * WIDTH + WIDTH) / 6
    call = (x, x, x, WIDTH, HEADS, 0.0, 0.0, packed)
    out, _ = megengine.multi_head_attention(*call, obias=True, is_causal=True)
    parts = megengine.unpack_io_weight_bias(packed, WIDTH, HEADS, obias=True)
    wq, wk, wv = (w.reshape(WIDTH, HEADS, SIZE) for w in parts[:3])
    params = jab.MultiHeadAttentionParams(
        query_kernel=wq, key_kernel=wk, value_kernel=wv,
        out_kernel=parts.out_weight.reshape(HEADS, SIZE, WIDTH), out_bias=parts.out_bias,
    )  # fmt: skip
    yield out, jab.multi_head_attention(params, x, is_causal=True)
    by_megengine: Any = megengine.multi_head_attention_backward(
        dout, *call, obias=True, is_causal=True, wrt=("query", "io_weight_bias")
    )
    grads: Any = jab.multi_head_attention_bwd(dout, params, x, x, x, is_causal=True)
    yield by_megengine.query, grads.query
    rest = megengine.unpack_io_weight_bias(by_megengine.io_weight_bias, WIDTH, HEADS, obias=True)
    yield rest.value_weight, grads.params.value_kernel.reshape(WIDTH, WIDTH)


SYSTEMS: dict[str, Callable[[], Pairs]] = {
    "Apple BNNS, multi-head attention": apple_bnns,
    "Ascend CANN, masked softmax": ascend_cann_softmax,
    "Ascend CANN, deformable attention": ascend_cann_deformable,
    "RAPIDS cugraph-ops, graph attention": rapids_cugraph,
    "MegEngine, multi-head attention": megengine_layer,
}


def main() -> None:
    """Runs all of them."""
    formatter = argparse.RawDescriptionHelpFormatter
    description = "Ports one call of each source system and compares it with this package's own operator."
    argparse.ArgumentParser(description=description, formatter_class=formatter).parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    for name, port in SYSTEMS.items():
        differences = [float(abs(x - y).max() / abs(y).max()) for x, y in port()]
        output, gradients = differences[0], max(differences[1:])
        print(f"{name:36} differs by {output:.0e} in the output, by {gradients:.0e} in the gradients")


if __name__ == "__main__":
    main()
