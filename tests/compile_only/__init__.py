"""`PYTHONPATH=tests python -m compile_only --target H200`: full compilation for chips that are not here.

XLA's GPU and TPU compilers run to the end, so an instruction that the chip lacks, too much shared memory or
a spilled register shows without the chip. Nothing is executed: every figure is static, none is a time.
"""
