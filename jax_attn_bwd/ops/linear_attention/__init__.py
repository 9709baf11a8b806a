"""Linear attention: the gated delta rule, and gated linear attention."""

from jax_attn_bwd.ops.linear_attention.api import (
    gated_delta_rule,
    gated_delta_rule_bwd,
    gated_linear_attention,
    gated_linear_attention_bwd,
)
from jax_attn_bwd.ops.linear_attention.spec import GatedDeltaRuleGrads, GatedLinearAttentionGrads

__all__ = [
    "GatedDeltaRuleGrads",
    "GatedLinearAttentionGrads",
    "gated_delta_rule",
    "gated_delta_rule_bwd",
    "gated_linear_attention",
    "gated_linear_attention_bwd",
]
