"""Calls as users write them: type checkers accept all of them and know what comes back. It is never run."""

from typing import Any, assert_type

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import jax_attn_bwd as jab
from jax_attn_bwd.compat import bnns, cugraph
from jax_attn_bwd.layers.flax_nnx import GATConv, GatedDeltaNet, KimiDeltaAttention, MultiHeadAttention

Pair = tuple[jax.Array, jax.Array]
Three = tuple[jax.Array, jax.Array, jax.Array]


def dense_attention(q: jax.Array, numbers: np.ndarray, residual: bool) -> None:
    assert_type(jab.dot_product_attention(q, q, q, is_causal=True), jax.Array)
    assert_type(jab.dot_product_attention(q, key=q, value=q, return_residual=False), jax.Array)
    out, lse = assert_type(jab.dot_product_attention(q, q, q, return_residual=True), Pair)
    assert_type(jab.dot_product_attention(q, q, q, return_residual=residual), jax.Array | Pair)
    assert_type(
        jab.dot_product_attention(numbers, numbers, numbers, mask=numbers > 0, bias=numbers), jax.Array
    )
    jab.dot_product_attention(q, q, q, query_seq_lengths=[3, 4], key_value_seq_lengths=numbers)
    jab.dot_product_attention(q, q, q, query_positions=[[0, 1], [2, 3]], local_window_size=(2, 0))
    jab.dot_product_attention(q, q, q, mask_mod=jab.mods.causal, score_mod=jab.mods.alibi, mod_args=(q,))
    jab.dot_product_attention(jab.dot_product_attention(q, q, q, scale=np.float32(0.5)), q, q, scale=q.sum())
    chosen = jab.mods.blocks_from_indices([[0, 1]], 2)
    jab.dot_product_attention(q, q, q, mask_mod=jab.mods.blocks(8) & jab.mods.causal, mod_args=(chosen,))
    packed, bits = jab.mods.packed(np.ones((4, 4), bool))
    jab.dot_product_attention(q, q, q, mask_mod=packed, mod_args=bits)
    grads = jab.dot_product_attention_bwd(out, q, q, q, out=out, lse=lse, wrt=["key", "bias"])
    assert_type(grads, jab.DotProductAttentionGrads)
    assert_type(grads.key, jax.Array | None)


def layer(x: jax.Array, w: jax.Array, numbers: np.ndarray, weights: bool) -> None:
    params = jab.MultiHeadAttentionParams(query_kernel=w, key_kernel=w, out_bias=None)
    assert_type(params, jab.MultiHeadAttentionParams[jax.Array])
    assert_type(params.query_kernel, jax.Array | None)
    jab.MultiHeadAttentionParams(query_kernel=PartitionSpec("heads"))
    assert_type(jab.multi_head_attention(params, x, num_heads=4), jax.Array)
    assert_type(jab.multi_head_attention(params, x, return_weights=True, average_weights=True), Pair)
    either: jax.Array | Pair | tuple[Any, ...] = jab.multi_head_attention(params, x, return_weights=weights)
    assert either
    out, probs, residual = jab.multi_head_attention(params, x, return_weights=True, return_residual=True)
    assert_type(probs, jax.Array)
    out, residual = jab.multi_head_attention(params, x, return_residual=True)
    assert_type(jab.multi_head_attention(params, x, return_weights=True, forward_mode=True), Pair)
    grads = jab.multi_head_attention_bwd(out, params, x, residual=residual)
    assert_type(grads.params.query_kernel, jax.Array | None)
    from_numpy = jab.MultiHeadAttentionParams(query_kernel=numbers)
    assert_type(jab.multi_head_attention(from_numpy, numbers, key_value_seq_lengths=[3]), jax.Array)
    ours = MultiHeadAttention(4, 8, decode=False, forward_mode=True, rngs=nnx.Rngs(0))
    assert_type(ours(x, is_causal=True, query_positions=x, mod_args=(x,)), jax.Array)


def graphs(x: jax.Array, a: jax.Array, edge: np.ndarray, weights: bool) -> None:
    graph = jab.BipartiteCSC.from_coo(src=[0, 1], dst=[1, 0], num_src=2, num_dst=2)
    assert_type(graph, jab.BipartiteCSC)
    assert_type(graph.with_self_loops(), jab.BipartiteCSC)
    assert_type(graph.with_self_loops(edge, fill_value=1.0), tuple[jab.BipartiteCSC, jax.Array])
    assert_type(jab.graph_attention(graph, x, None, a, num_heads=2, forward_mode=True), jax.Array)
    assert_type(jab.graph_attention(graph, x, None, a, num_heads=2, return_attention_weights=True), Pair)
    assert_type(jab.graph_attention_v2(graph, x, x, a, num_heads=2, return_residual=True), Pair)
    out, probs, lse = jab.graph_attention(
        graph, x, None, a, num_heads=2, edge=edge, return_attention_weights=True, return_residual=True
    )
    some: jax.Array | Pair | Three
    some = jab.graph_transformer_attention(graph, x, x, x, num_heads=2, return_attention_weights=weights)
    assert some
    grads = jab.graph_attention_bwd(out, graph, x, None, a, num_heads=2, out=out, lse=lse, dweights=probs)
    assert_type(grads.src, jax.Array | None)
    jab.graph_attention_v2_bwd(out, graph, x, None, a, num_heads=2, alpha=0.1, activation="elu", wrt="src")
    jab.graph_transformer_attention_bwd(out, graph, x, x, x, num_heads=2, scale=1.0, score_bias=edge)
    assert_type(jab.edge_softmax(graph, edge), jax.Array)
    assert_type(jab.edge_max_bwd(x, graph, x, x, implementation="xla"), jax.Array)
    conv = GATConv(8, 4, heads=2, dropout=0.1, fill_value="max", dtype="float32", rngs=nnx.Rngs(0))
    assert_type(conv(x, graph), jax.Array)
    assert_type(conv(x, graph, return_attention_weights=True), Pair)


def frameworks(x: jax.Array, mesh: jax.sharding.Mesh) -> None:
    causal = jab.configured_attention_fn(is_causal=True, local_window_size=(8, 0))
    assert_type(causal(x, x, x, mask=None), jax.Array)
    nnx.MultiHeadAttention(2, 8, attention_fn=causal, rngs=nnx.Rngs(0))(x)
    linear = GatedDeltaNet(8, 2, 4, 4, 4, conv_kernel_dim=2, dtype="float32", rngs=nnx.Rngs(0))
    assert_type(linear(x, seq_lengths=[3], segment_ids=np.zeros(5, int), decode=True), jax.Array)
    assert_type(KimiDeltaAttention(8, 2, 4, rms_norm_eps=1e-6, rngs=nnx.Rngs(0))(x), jax.Array)
    on_mesh = jab.parallel.attention_fn(mesh, sequence="sequence")
    assert_type(jab.configured_attention_fn(on_mesh, is_causal=True)(x, x, x), jax.Array)


def others(x: jax.Array, value: np.ndarray, locations: jax.Array) -> None:
    assert_type(jab.scaled_masked_softmax(value, value > 0, scale=x), jax.Array)
    sample = jab.multi_scale_deformable_attention
    assert_type(sample(value, [(4, 4)], locations, x, normalize="softmax"), jax.Array)
    assert_type(sample([x, x], np.array([[4, 4], [2, 2]]), locations, x), jax.Array)
    grads = jab.multi_scale_deformable_attention_bwd(x, value, ((4, 4),), locations, x, wrt=("value",))
    assert_type(grads.sampling_locations, jax.Array | None)
    assert_type(jab.gated_delta_rule(x, value, x, None, x, return_final_state=True), Pair)
    assert_type(jab.gated_linear_attention(x, x, x, l2_norm_epsilon=1e-6, forward_mode=True), jax.Array)
    assert_type(jab.gated_delta_rule_bwd(x, x, x, x, None, x, seq_lengths=[3]).beta, jax.Array | None)


def over_devices(
    x: jax.Array,
    params: jab.MultiHeadAttentionParams,
    parts: jab.parallel.PartitionedGraph,
    mesh: jax.sharding.Mesh,
) -> None:
    assert_type(jab.parallel.ring_attention(x, x, x, axis_name="sequence", is_causal=True), jax.Array)
    assert_type(jab.parallel.ulysses_attention(x, x, x, axis_name="s", return_residual=True), Pair)
    rule = jab.parallel.gated_delta_rule
    assert_type(rule(x, x, x, None, x, axis_name="sequence", return_final_state=True), Pair)
    split = jab.parallel.tensor_parallel_multi_head_attention
    assert_type(split(params, x, axis_name="heads", return_weights=True, forward_mode=True), Pair)
    out = jab.parallel.sharded_graph_attention(parts, x, mesh=mesh, axis="graph", num_heads=2, kind="gatv2")
    assert_type(out, jax.Array)


def source_systems(x: jax.Array, F: bnns.BNNSLayerParametersMultiheadAttention) -> None:
    assert_type(bnns.apply_multihead_attention(F, None, x, x, None, x), jax.Array)
    out, cache = bnns.apply_multihead_attention(F, None, x, x, None, x, backprop_cache=True)
    out, cache = bnns.apply_multihead_attention(F, None, x, x, None, x, None, True)
    graph = cugraph.make_bipartite_csc([0, 1], [0], 1)
    params = cugraph.mha_params(num_heads=2, activation="ReLU")
    assert_type(cugraph.mha_gat_n2n_fwd(x, None, x, graph, params, return_softmax_scores=True), Pair)
    assert_type(cugraph.mha_gat_v2_n2n_fwd(x, None, x, graph, params), jax.Array)
    both = cugraph.mha_gat_v2_n2n_efeat_fwd(x, None, x, x, graph, params, return_softmax_scores=True)
    assert_type(both, Pair)
    asked = cugraph.mha_gat_v2_n2n_bwd(x, x, None, x, None, graph, params, grad_src_node_embedding=False)
    assert_type(asked, cugraph.MhaGatGrads)
