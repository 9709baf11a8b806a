"""Attention-family operators for JAX with hand-written backward rules."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jax_attn_bwd import layers
from jax_attn_bwd._core.backend import explain
from jax_attn_bwd.layers.attention_fn import attention_fn, configured_attention_fn
from jax_attn_bwd.ops.deformable import (
    MultiScaleDeformableAttentionGrads,
    multi_scale_deformable_attention,
    multi_scale_deformable_attention_bwd,
)
from jax_attn_bwd.ops.dot_product import (
    DotProductAttentionGrads,
    dot_product_attention,
    dot_product_attention_bwd,
)
from jax_attn_bwd.ops.graph import (
    BatchLayout,
    BipartiteCSC,
    GraphAttentionGrads,
    GraphBatch,
    GraphTransformerAttentionGrads,
    batch_graphs,
    edge_max,
    edge_max_bwd,
    edge_mean,
    edge_mean_bwd,
    edge_softmax,
    edge_softmax_bwd,
    edge_sum,
    edge_sum_bwd,
    graph_attention,
    graph_attention_bwd,
    graph_attention_v2,
    graph_attention_v2_bwd,
    graph_transformer_attention,
    graph_transformer_attention_bwd,
)
from jax_attn_bwd.ops.linear_attention import (
    DplrLinearAttentionGrads,
    GatedDeltaRuleGrads,
    GatedLinearAttentionGrads,
    dplr_linear_attention,
    dplr_linear_attention_bwd,
    gated_delta_rule,
    gated_delta_rule_bwd,
    gated_linear_attention,
    gated_linear_attention_bwd,
)
from jax_attn_bwd.ops.multi_head import (
    MultiHeadAttentionGrads,
    MultiHeadAttentionParams,
    Rotary,
    multi_head_attention,
    multi_head_attention_bwd,
)
from jax_attn_bwd.ops.softmax import scaled_masked_softmax, scaled_masked_softmax_bwd

__all__ = [
    "BatchLayout",
    "BipartiteCSC",
    "DotProductAttentionGrads",
    "DplrLinearAttentionGrads",
    "GatedDeltaRuleGrads",
    "GatedLinearAttentionGrads",
    "GraphAttentionGrads",
    "GraphBatch",
    "GraphTransformerAttentionGrads",
    "MultiHeadAttentionGrads",
    "MultiHeadAttentionParams",
    "MultiScaleDeformableAttentionGrads",
    "Rotary",
    "attention_fn",
    "batch_graphs",
    "compat",
    "configured_attention_fn",
    "dot_product_attention",
    "dot_product_attention_bwd",
    "dplr_linear_attention",
    "dplr_linear_attention_bwd",
    "edge_max",
    "edge_max_bwd",
    "edge_mean",
    "edge_mean_bwd",
    "edge_softmax",
    "edge_softmax_bwd",
    "edge_sum",
    "edge_sum_bwd",
    "explain",
    "gated_delta_rule",
    "gated_delta_rule_bwd",
    "gated_linear_attention",
    "gated_linear_attention_bwd",
    "graph_attention",
    "graph_attention_bwd",
    "graph_attention_v2",
    "graph_attention_v2_bwd",
    "graph_transformer_attention",
    "graph_transformer_attention_bwd",
    "layers",
    "mods",
    "multi_head_attention",
    "multi_head_attention_bwd",
    "multi_scale_deformable_attention",
    "multi_scale_deformable_attention_bwd",
    "parallel",
    "scaled_masked_softmax",
    "scaled_masked_softmax_bwd",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jax_attn_bwd import compat, mods, parallel
else:  # a third of the time of importing this package
    _WHEN_NAMED = ("compat", "mods", "parallel")

    def __getattr__(name: str) -> ModuleType:
        if name not in _WHEN_NAMED:
            keywords = importlib.import_module(f"{__name__}._core.keywords")
            remedy = keywords.ours_for(name)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
        return importlib.import_module(f"{__name__}.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_WHEN_NAMED})
