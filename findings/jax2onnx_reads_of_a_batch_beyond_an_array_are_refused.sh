#!/usr/bin/env bash
# Guess first: x.at[index].get(mode="fill", fill_value=0) reads 0 where an index lies beyond the array. jax2onnx exports it,
# and onnxruntime computes the same. The read is mapped over a batch by jax.vmap: each entry reads its own row. Does the export
# of that give 0 beyond the array, too?
#
# Seen with jax2onnx 0.17.1, jax 0.10.2 and onnxruntime 1.32.0 on a CPU: no. The export succeeds, and without the batch the
# result is right. With it onnxruntime stops with "invalid index found": of a gather with batch axes the mode is left out, and
# the index goes to GatherND as it is. With mode="clip" it is the same. Indices that are cut off before the read
# (jnp.minimum), and a jnp.where behind it, give the right result.
# Needs Python 3.11: python3.11, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2" "jax2onnx==0.17.1" "onnxruntime==1.32.0"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
import jax2onnx
import numpy as np
import onnxruntime

onnxruntime.set_default_logger_severity(4)
x = np.arange(1, 9, dtype="float32").reshape(2, 4)
index = np.array([[0, 3, 4], [5, 2, 1]], "int32")


def filled(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


def clipped(x, index):
    return x.at[index].get(mode="clip")


def guarded(x, index):
    return jnp.where(index < 4, x.at[jnp.minimum(index, 3)].get(mode="promise_in_bounds"), 0)


def exported(function, *arrays):
    expected = np.asarray(function(*map(jnp.asarray, arrays)))
    jax.clear_caches()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    model = jax2onnx.to_onnx(function, shapes)
    jax.clear_caches()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    try:
        (found,) = session.run(None, dict(zip(names, arrays)))
    except Exception as error:
        return "invalid index found" if "invalid index found" in str(error) else str(error)
    return "as in JAX" if (found == expected).all() else f"{found} for {expected}"


said = {f"{f.__name__}, one row": exported(f, x[0], index[0]) for f in (filled, clipped, guarded)}
said |= {f"{f.__name__}, a batch": exported(jax.vmap(f), x, index) for f in (filled, clipped, guarded)}
packages = ("jax2onnx", "jax", "onnxruntime")
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), said)
refused = {"filled, a batch", "clipped, a batch"}
assert said == {name: "invalid index found" if name in refused else "as in JAX" for name in said}, said
PYTHON
