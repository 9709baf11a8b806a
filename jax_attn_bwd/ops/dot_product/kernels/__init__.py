"""Pallas kernels of dense attention, by chip: `hopper_*`, `tpu_*`, and what XLA prepares for all of them."""
