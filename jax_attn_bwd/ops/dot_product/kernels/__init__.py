"""Kernels of dense attention: `hopper_*`, `tpu_*`, what XLA prepares for both, and cuDNN's."""
