"""Dense (flash) attention."""

from jax_attn_bwd.ops.dot_product.api import dot_product_attention, dot_product_attention_bwd
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads

__all__ = ["DotProductAttentionGrads", "dot_product_attention", "dot_product_attention_bwd"]
