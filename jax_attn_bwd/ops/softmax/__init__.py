"""Scaled masked softmax."""

from jax_attn_bwd.ops.softmax.api import scaled_masked_softmax, scaled_masked_softmax_bwd

__all__ = ["scaled_masked_softmax", "scaled_masked_softmax_bwd"]
