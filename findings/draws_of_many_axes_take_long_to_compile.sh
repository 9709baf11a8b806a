#!/usr/bin/env bash
# Guess first: jax.random.bits of 3,072 numbers is one program over so many counters. Does the time to compile it on a CPU
# depend on how they are laid out, (3072,) or (3, 2, 16, 4, 8)?
#
# Seen with jax 0.10.2, 0.11.2 and 0.12.0.1: 0.2 to 0.4 seconds for one axis, 2 to 3 for four axes, 3 to 8 for five. Keys are
# partitionable by default: each number's counter is a sum over the axes in 64 bits, which XLA:CPU puts into the loops of
# Threefry. With jax_threefry_partitionable=False, or drawn along one axis and reshaped, any shape takes as long as one axis;
# reshaped, the numbers are the same.
# Needs Python 3.11 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import math
import time

import jax

key, shape = jax.random.key(0), (3, 2, 16, 4, 8)
flat = math.prod(shape)


def seconds(draw):
    lowered = jax.jit(draw).lower(key)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


seconds(lambda key: jax.random.bits(key, (5,)))  # what the first compilation of a process does
five = seconds(lambda key: jax.random.bits(key, shape))
one = seconds(lambda key: jax.random.bits(key, flat))
reshaped = seconds(lambda key: jax.random.bits(key, flat).reshape(shape))
print(f"jax {jax.__version__}, CPU seconds to compile: five axes {five:.1f}, one {one:.2f}, reshaped {reshaped:.2f}")
assert (jax.random.bits(key, shape) == jax.random.bits(key, flat).reshape(shape)).all()
assert five > 8 * max(one, reshaped)
PYTHON
