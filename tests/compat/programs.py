"""What the tests of `compat`'s multi-head calls share."""

import jax
import jax.numpy as jnp
from helpers import QUICK as QUICK


def outputs_and_gradients(function, moving, cotangents):
    """`function(moving)` and its gradients at `cotangents(outputs)`, as one quickly compiled program."""

    def run(moving, cotangents):
        outputs, pullback = jax.vjp(function, moving)
        return outputs, *pullback(cotangents)

    shapes = jax.eval_shape(function, moving)
    cotangents = jax.tree.map(jnp.asarray, cotangents(shapes))
    return jax.jit(run, compiler_options=QUICK)(moving, cotangents)
