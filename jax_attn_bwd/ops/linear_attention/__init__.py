"""Linear attention: the gated delta rule, gated linear attention, and erase keys apart from those written."""

from jax_attn_bwd.ops.linear_attention.api import (
    dplr_linear_attention,
    dplr_linear_attention_bwd,
    gated_delta_rule,
    gated_delta_rule_bwd,
    gated_linear_attention,
    gated_linear_attention_bwd,
)
from jax_attn_bwd.ops.linear_attention.spec import (
    DplrLinearAttentionGrads,
    GatedDeltaRuleGrads,
    GatedLinearAttentionGrads,
)

__all__ = [
    "DplrLinearAttentionGrads",
    "GatedDeltaRuleGrads",
    "GatedLinearAttentionGrads",
    "dplr_linear_attention",
    "dplr_linear_attention_bwd",
    "gated_delta_rule",
    "gated_delta_rule_bwd",
    "gated_linear_attention",
    "gated_linear_attention_bwd",
]
