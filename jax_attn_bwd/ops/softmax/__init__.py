"""Scaled masked softmax."""

from jax_attn_bwd.ops.softmax.api import scaled_masked_softmax as scaled_masked_softmax
from jax_attn_bwd.ops.softmax.api import scaled_masked_softmax_bwd as scaled_masked_softmax_bwd
