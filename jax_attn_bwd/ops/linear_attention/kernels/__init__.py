"""Kernels of linear attention: those of each chip, and what XLA prepares for all of them."""
