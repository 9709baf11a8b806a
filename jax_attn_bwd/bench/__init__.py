"""`python -m jax_attn_bwd.bench <operator>`: correctness first, then time and memory beside the peers.

`operators` says how the cases of each operator are measured, and beside what; `compiling`, `mods` and
`programs` have workloads of their own, and `race` draws programs by lot. `results/` of the repository keeps
dated measurements with device, versions and commit.
"""
