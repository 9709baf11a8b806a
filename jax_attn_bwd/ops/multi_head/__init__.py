"""The multi-head attention layer."""

from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd.ops.multi_head.api import multi_head_attention, multi_head_attention_bwd
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionGrads, MultiHeadAttentionParams

__all__ = [
    "MultiHeadAttentionGrads",
    "MultiHeadAttentionParams",
    "Rotary",
    "multi_head_attention",
    "multi_head_attention_bwd",
]
