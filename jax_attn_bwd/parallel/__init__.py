"""Operators over several devices: what one device cannot hold, sharded over the axes of a mesh.

Sequences: `ring_attention`, `all_gather_attention` and `ulysses_attention` are `dot_product_attention` with
the sequence sharded; `zigzag` and `striped` lay it out so that causal work is shared evenly. `attention_fn`
is any of them for the layers of Flax. `tensor_parallel_multi_head_attention` is the layer with its heads
sharded.

`gated_delta_rule`, `gated_linear_attention` and `dplr_linear_attention` are the operators of these names with
the sequence sharded, at one exchange.

Graphs: `partition_graph` cuts one into parts, which `sharded_graph_attention` runs. Pictures:
`sharded_multi_scale_deformable_attention` shards the queries.

All but what takes a `mesh` is called inside `jax.shard_map(check_vma=True)`.
"""

from jax_attn_bwd.parallel.attention_fn import attention_fn
from jax_attn_bwd.parallel.deformable import sharded_multi_scale_deformable_attention
from jax_attn_bwd.parallel.graph import sharded_graph_attention
from jax_attn_bwd.parallel.layouts import striped, unstriped, unzigzag, zigzag
from jax_attn_bwd.parallel.linear import dplr_linear_attention, gated_delta_rule, gated_linear_attention
from jax_attn_bwd.parallel.partition import Layout, PartitionedGraph, Traffic, partition_graph
from jax_attn_bwd.parallel.sequence import all_gather_attention, ring_attention, ulysses_attention
from jax_attn_bwd.parallel.tensor import tensor_parallel_multi_head_attention

__all__ = [
    "Layout",
    "PartitionedGraph",
    "Traffic",
    "all_gather_attention",
    "attention_fn",
    "dplr_linear_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "partition_graph",
    "ring_attention",
    "sharded_graph_attention",
    "sharded_multi_scale_deformable_attention",
    "striped",
    "tensor_parallel_multi_head_attention",
    "ulysses_attention",
    "unstriped",
    "unzigzag",
    "zigzag",
]
