"""Calls of other systems, argument for argument, with their polarity and quirks documented."""

from jax_attn_bwd.compat import bnns as bnns
from jax_attn_bwd.compat import cann as cann
from jax_attn_bwd.compat import cugraph as cugraph
from jax_attn_bwd.compat import megengine as megengine
from jax_attn_bwd.compat import torch as torch
