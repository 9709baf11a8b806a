"""Pallas kernels of deformable attention, by chip: `gpu_*`, any NVIDIA GPU from Ampere on."""
