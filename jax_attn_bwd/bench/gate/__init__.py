"""`python -m jax_attn_bwd.bench --gate gpu`: one command that proves and times the kernels on a GPU.

A probe of each kernel first, then correctness (every kernel case against float64, poison, repeated bits),
then times beside the peers installed, then whatever correctness is left. Each step runs in a child process,
so that a kernel that hangs or faults costs that step and no other; what needs a kernel that was lost twice
is skipped; results are written after every step; a deadline holds for all.

`steps` the records, `plan` the list of steps, `run` the parent, `worker` the child, `progress` what it tells
of a step under way, `correctness` and `timing` what steps do, `peers` what they are compared with, `report`
the files and tables.
"""
