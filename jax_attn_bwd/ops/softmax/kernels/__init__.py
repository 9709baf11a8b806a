"""Pallas kernels of the softmax, by chip, and the rules that all of them follow."""
