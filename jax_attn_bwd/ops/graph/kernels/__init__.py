"""Pallas kernels of graph attention: `gpu_*` for any NVIDIA GPU from compute capability 8.0 on."""
