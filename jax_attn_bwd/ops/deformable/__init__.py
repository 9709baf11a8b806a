"""Multi-scale deformable attention."""

from jax_attn_bwd.ops.deformable.api import (
    multi_scale_deformable_attention,
    multi_scale_deformable_attention_bwd,
)
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionGrads

__all__ = [
    "MultiScaleDeformableAttentionGrads",
    "multi_scale_deformable_attention",
    "multi_scale_deformable_attention_bwd",
]
