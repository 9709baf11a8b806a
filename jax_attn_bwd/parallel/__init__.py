"""Attention over several devices."""

from jax_attn_bwd.parallel.deformable import (
    sharded_multi_scale_deformable_attention as sharded_multi_scale_deformable_attention,
)
from jax_attn_bwd.parallel.graph import sharded_graph_attention as sharded_graph_attention
from jax_attn_bwd.parallel.partition import partition_graph as partition_graph
from jax_attn_bwd.parallel.partitioned_graph import Layout as Layout
from jax_attn_bwd.parallel.partitioned_graph import PartitionedGraph as PartitionedGraph
from jax_attn_bwd.parallel.partitioned_graph import Traffic as Traffic
