#!/usr/bin/env bash
# Guess first: jax2onnx exports a function that calls a jitted one. Afterwards, in the same process, the jitted function is called
# with arrays of the same shape. Does it run as if nothing had been exported?
#
# Seen with jax2onnx 0.17.1 and jax 0.10.2 on a CPU: no. It raises NotImplementedError, "MLIR translation rule for primitive
# 'jax.numpy.maximum' not found". While it exports, jax2onnx puts primitives of its own in the place of functions of jax.numpy;
# what jax.jit traced then stays in its cache, and the later call of these shapes finds it. jax.clear_caches() helps.
# Needs Python 3.11: python3.11, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "jax2onnx==0.17.1"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
import jax2onnx


@jax.jit
def clipped(x):
    return jnp.maximum(x, 0.5)


x = jnp.ones((2, 3), "float32")
jax2onnx.to_onnx(lambda x: clipped(x), [x])
try:
    said = str(clipped(x).sum())
except NotImplementedError as error:
    said = str(error)
jax.clear_caches()
print(f"jax2onnx {importlib.metadata.version('jax2onnx')}, jax {jax.__version__}: {said!r}, then {clipped(x).sum()}")
assert "primitive 'jax.numpy.maximum' not found" in said, said
assert clipped(x).sum() == 6
PYTHON
