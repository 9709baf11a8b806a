"""Pallas kernels of the softmax, by chip: `hopper_*`, `tpu_*`, and the rules that all of them follow."""
