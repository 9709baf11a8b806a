"""Operators over several devices: what one device cannot hold, sharded over the axes of a mesh.

Sequences: `ring_attention`, `all_gather_attention` and `ulysses_attention` are `dot_product_attention` with
the sequence sharded; `zigzag` and `striped` lay it out so that causal work is shared evenly. `attention_fn`
is any of them for the layers of Flax. `tensor_parallel_multi_head_attention` is the layer with its heads
sharded.

Graphs: `partition_graph` cuts one into parts, which `sharded_graph_attention` runs. Pictures:
`sharded_multi_scale_deformable_attention` shards the queries.

All but what takes a `mesh` is called inside `jax.shard_map(check_vma=True)`.
"""

from jax_attn_bwd.parallel.attention_fn import attention_fn as attention_fn
from jax_attn_bwd.parallel.deformable import (
    sharded_multi_scale_deformable_attention as sharded_multi_scale_deformable_attention,
)
from jax_attn_bwd.parallel.graph import sharded_graph_attention as sharded_graph_attention
from jax_attn_bwd.parallel.layouts import striped as striped
from jax_attn_bwd.parallel.layouts import unstriped as unstriped
from jax_attn_bwd.parallel.layouts import unzigzag as unzigzag
from jax_attn_bwd.parallel.layouts import zigzag as zigzag
from jax_attn_bwd.parallel.partition import partition_graph as partition_graph
from jax_attn_bwd.parallel.partitioned_graph import Layout as Layout
from jax_attn_bwd.parallel.partitioned_graph import PartitionedGraph as PartitionedGraph
from jax_attn_bwd.parallel.partitioned_graph import Traffic as Traffic
from jax_attn_bwd.parallel.sequence import all_gather_attention as all_gather_attention
from jax_attn_bwd.parallel.sequence import ring_attention as ring_attention
from jax_attn_bwd.parallel.sequence import ulysses_attention as ulysses_attention
from jax_attn_bwd.parallel.tensor import (
    tensor_parallel_multi_head_attention as tensor_parallel_multi_head_attention,
)
