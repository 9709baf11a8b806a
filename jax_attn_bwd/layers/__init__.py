"""Layers for Flax (linen and NNX), Haiku and Equinox: `from jax_attn_bwd.layers.<framework> import ...`.

A framework is imported with its own folder only.
"""
