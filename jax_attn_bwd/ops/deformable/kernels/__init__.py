"""Pallas kernels of deformable attention: `gpu_*` for any NVIDIA GPU from Ampere on, `tpu_*`."""
