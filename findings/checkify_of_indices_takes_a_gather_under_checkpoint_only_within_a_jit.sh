#!/usr/bin/env bash
# Guess first: a function reads rows of a table by indices that are all in bounds. jax.checkpoint(f) and
# jax.checkpoint(jax.jit(f)) compute the same. Does jax.experimental.checkify take both, when it checks indices?
#
# Seen with jax 0.12.0.1: no. The first is a ValueError, "too many values to unpack (expected 0)": the check of a gather makes
# constants, and the rule of checkify for jax.checkpoint refuses a body with constants. The rule for jax.jit takes them, so a
# jit inside of the checkpoint helps.
# Needs Python 3.12 or newer: what PYTHON names, or one that is found.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for python in ${PYTHON:-python3 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[23].*/bin/python}; do
  "$python" -c 'import sys; assert sys.version_info >= (3, 12)' 2>/dev/null && break
done
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "jax==0.12.0.1" "jaxlib==0.12.0.1"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import checkify

table, rows = jnp.arange(12.0).reshape(4, 3), jnp.array([1, 2])
read = lambda table, rows: table[rows].sum()


def checked(function):
    try:
        error, out = checkify.checkify(function, errors=checkify.index_checks)(table, rows)
    except ValueError as error:
        return str(error)
    return error.get(), float(out)


found = {"checkpoint": checked(jax.checkpoint(read)), "with jit": checked(jax.checkpoint(jax.jit(read)))}
print(f"jax {jax.__version__}: {found}")
assert found["checkpoint"].startswith("too many values to unpack"), found
assert found["with jit"] == (None, 33.0), found
PYTHON
