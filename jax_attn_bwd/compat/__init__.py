"""Calls of other systems, argument for argument, with their polarity and quirks documented."""

from jax_attn_bwd.compat import bnns, cann, cugraph, megengine, torch

__all__ = ["bnns", "cann", "cugraph", "megengine", "torch"]
