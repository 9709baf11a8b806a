"""`python -m jax_attn_bwd.bench <operator>`: correctness first, then time and memory beside the peers.

A module of this package that is named like an operator's folder describes what to measure; `results/`
keeps dated measurements with device, versions and commit.
"""
