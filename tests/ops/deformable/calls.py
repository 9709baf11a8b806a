"""Calls of any shape and their programs, for the tests beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import OPERATORS, QUICK, assert_trees_close

from jax_attn_bwd.ops.deformable.cases import locations

operator = next(o for o in OPERATORS if o.name == "multi_scale_deformable_attention")
LEVELS = ((6, 4), (3, 2))


def sample(levels=LEVELS, *, B=1, Q=3, M=2, D=2, P=2, seed=0, spread=1.5, method="bilinear"):
    """Arrays of a call, ragged if P is a tuple; no sample nearer than 0.05 pixels to a kink."""
    rng = np.random.default_rng(seed)
    counts, split = (P, (sum(P),)) if isinstance(P, tuple) else ((P,) * len(levels), (len(levels), P))
    at = locations(rng, (B, Q, M), levels, counts, spread, method)
    return {
        "value": jnp.asarray(rng.standard_normal((B, sum(h * w for h, w in levels), M, D))),
        "sampling_locations": jnp.asarray(at.reshape(B, Q, M, *split, 2)),
        "attention_weights": jnp.asarray(rng.standard_normal((B, Q, M, *split))),
    }


def program(function, options, compiler_options=None):
    """`(arrays, dout) -> output and gradients by name`; without dout, under a random one."""

    def run(arrays, dout=None):
        (out,), pullback = jax.vjp(lambda arrays: function(**arrays, **options), arrays)
        if dout is None:
            dout = np.random.default_rng(9).standard_normal(out.shape)
        return {"out": out} | pullback((jnp.asarray(dout, out.dtype),))[0]

    return jax.jit(run, compiler_options=compiler_options)


def evaluate(function, arrays, options, dout=None):
    """Output and gradients by name."""
    return program(function, options, QUICK)(arrays, dout)


def assert_as_defined(arrays, rtol=1e-12, **options):
    got = evaluate(operator.call, arrays, options)
    assert_trees_close(got, evaluate(operator.reference, arrays, options), rtol)
