#!/usr/bin/env bash
# Guess first: jax2tf converts `lambda x: x + 1`, and TensorFlow 2.21 calls what it gives. Does TensorFlow call it as well if
# jax2tf is told that a size of x may be any (polymorphic_shapes)?
#
# Seen with jax 0.12.0.1 and tensorflow-cpu 2.21.0: no, for no function. A size that may be any brings a check of sizes with it,
# a custom call, and jax 0.12 writes that in a form (vhlo.custom_call_v2) which TensorFlow's older StableHLO cannot read:
# InvalidArgumentError at the call, no word at the conversion. With jax 0.10.2 TensorFlow calls both.
# Needs Python 3.12 or newer: what PYTHON names, or one that is found.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for python in ${PYTHON:-python3 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[23].*/bin/python}; do
  "$python" -c 'import sys; assert sys.version_info >= (3, 12)' 2>/dev/null && break
done
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.12.0.1" "jaxlib==0.12.0.1" "tensorflow-cpu==2.21.0"
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$work/venv/bin/python" - <<'PYTHON'
import jax
import numpy as np
import tensorflow
from jax.experimental import jax2tf


def called(**options):
    function = jax2tf.convert(lambda x: x + 1, **options)
    try:
        return function(tensorflow.constant(np.ones((3, 2), np.float32))).numpy().sum()
    except tensorflow.errors.OpError as error:
        return type(error).__name__


found = {"fixed sizes": called(), "any size": called(polymorphic_shapes=["(n, 2)"])}
print(f"jax {jax.__version__}, tensorflow {tensorflow.__version__}: {found}")
assert found["fixed sizes"] == 12.0, found
assert str(found["any size"]).endswith("Error"), found
PYTHON
