"""What the tests of `compat`'s multi-head calls share."""

import jax
import jax.numpy as jnp

QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False


def outputs_and_gradients(function, moving, cotangents):
    """`function(moving)` and its gradients at `cotangents(outputs)`, as one quickly compiled program."""

    def run(moving, cotangents):
        outputs, pullback = jax.vjp(function, moving)
        return outputs, *pullback(cotangents)

    shapes = jax.eval_shape(function, moving)
    cotangents = jax.tree.map(jnp.asarray, cotangents(shapes))
    return jax.jit(run, compiler_options=QUICK)(moving, cotangents)
