"""Attention-family operators for JAX with hand-written backward rules."""

from jax_attn_bwd import compat as compat
from jax_attn_bwd._core.backend import explain as explain
from jax_attn_bwd.ops.dot_product import DotProductAttentionGrads as DotProductAttentionGrads
from jax_attn_bwd.ops.dot_product import dot_product_attention as dot_product_attention
from jax_attn_bwd.ops.dot_product import dot_product_attention_bwd as dot_product_attention_bwd
from jax_attn_bwd.ops.softmax import scaled_masked_softmax as scaled_masked_softmax
from jax_attn_bwd.ops.softmax import scaled_masked_softmax_bwd as scaled_masked_softmax_bwd

__version__ = "0.1.0"
