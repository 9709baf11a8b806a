"""A process of `test_training.py`: (the example, number of processes, own number, port, its arguments)."""

import runpy
import sys

import jax

if __name__ == "__main__":
    script, count, number, port, *arguments = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number), heartbeat_timeout_seconds=10)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
