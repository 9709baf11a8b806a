#!/usr/bin/env bash
# Guess first: a linear layer with weights W is written as a jax.custom_vjp whose backward is the textbook's, dW = x^T dy.
# It is mapped over 64 members by jax.vmap, and the gradient of the sum of all outputs is taken with respect to the shared
# W. XLA sees 64 small products and a sum over them, which is one product over 64 times as many rows. Does the compiled
# program need about as much memory as that of x @ W without a rule, whose gradient is that one product?
#
# Seen with jax 0.12.0.1 on a CPU (16 rows a member, W of 512 x 512 in float32, 1 MiB): no. Without a rule the program has
# no array of all members' gradients. With the rule it holds all 64 of them, 64 MiB, and adds them up in a second pass.
# jax.vmap maps the backward, so each member gives a W-sized gradient of its own, and JAX sums behind the rule; XLA does not
# merge that sum into the product. The rule itself cannot give the sum: it does not see whether it is mapped inside or
# outside the derivative.
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

MEMBERS, ROWS, WIDTH = 64, 16, 512


def plain(x, w):
    return x @ w


@jax.custom_vjp
def written(x, w):
    return x @ w


written.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy))


def step(layer):
    loss = lambda w, x, c: (jax.vmap(layer, (0, None))(x, w) * c).sum()
    x = jnp.ones((MEMBERS, ROWS, WIDTH))
    return jax.jit(jax.grad(loss)).lower(jnp.ones((WIDTH, WIDTH)), x, x).compile()


gradient = WIDTH * WIDTH * 4
held = {f.__name__: step(f).memory_analysis().temp_size_in_bytes / gradient for f in (plain, written)}
print(f"jax {jax.__version__}: temporary memory, in gradients of W: {held}")
assert held["plain"] < 4, held
assert held["written"] >= MEMBERS, held
PYTHON
