"""Multi-scale deformable attention."""

from jax_attn_bwd.ops.deformable.api import (
    multi_scale_deformable_attention as multi_scale_deformable_attention,
)
from jax_attn_bwd.ops.deformable.api import (
    multi_scale_deformable_attention_bwd as multi_scale_deformable_attention_bwd,
)
from jax_attn_bwd.ops.deformable.spec import (
    MultiScaleDeformableAttentionGrads as MultiScaleDeformableAttentionGrads,
)
