"""A layer with every piece, and its inputs, for the tests beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close

from jax_attn_bwd import MultiHeadAttentionParams

B, T, S, N, K, H, HV, EQ, EK, EV, EO = 2, 5, 7, 4, 2, 3, 5, 6, 7, 8, 9


SHAPES = {
    "query_kernel": (EQ, N, H),
    "query_bias": (N, H),
    "key_kernel": (EK, K, H),
    "key_bias": (K, H),
    "value_kernel": (EV, K, HV),
    "value_bias": (K, HV),
    "out_kernel": (N, HV, EO),
    "out_bias": (EO,),
    "bias_k": (K, H),
    "bias_v": (K, HV),
    "sink": (N,),
}

QUICK = {"xla_backend_optimization_level": 0}  # for what runs once: compiling it takes longer


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def layer(*without, **replaced):
    """Parameters with every piece but those in `without`."""
    params = MultiHeadAttentionParams(**{n: draw(*s, seed=1) for n, s in SHAPES.items()})
    return params._replace(**dict.fromkeys(without), **replaced)


def inputs():
    return draw(B, T, EQ), draw(B, S, EK), draw(B, S, EV)


def vjp(function, *args):
    """The output and the gradients at a random cotangent, as one quickly compiled program."""

    def run(*args):
        out, pullback = jax.vjp(function, *args)
        return out, pullback(draw(*out.shape, seed=9))

    return jax.jit(run, compiler_options=QUICK)(*args)


def leaves_close(got, expected, rtol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, rtol)
