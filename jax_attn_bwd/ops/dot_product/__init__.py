"""Dense (flash) attention."""

from jax_attn_bwd.ops.dot_product.api import dot_product_attention as dot_product_attention
from jax_attn_bwd.ops.dot_product.api import dot_product_attention_bwd as dot_product_attention_bwd
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads as DotProductAttentionGrads
