"""What is measured of the scaled masked softmax: forward and backward with a padding mask."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import scaled_masked_softmax
from jax_attn_bwd.bench.measure import Case, compiled_contender

SCALE = 0.125


def cases(quick: bool) -> Iterator[Case]:
    """The cases; `quick` keeps them small."""
    shape = (2, 2, 64, 64) if quick else (4, 8, 1024, 1024)
    yield _case(shape, jnp.float32)
    yield _case(shape, jnp.bfloat16)


def _ours(x, mask):
    return scaled_masked_softmax(x, mask, scale=SCALE)


def _jax_nn(x, mask):
    return jax.nn.softmax(x * jnp.asarray(SCALE, x.dtype), axis=-1, where=mask)


def _residual_bytes(function: Any, x: jax.Array, mask: jax.Array) -> int:
    """What the forward leaves for the backward, beyond the mask."""
    _, pullback = jax.vjp(lambda x: function(x, mask), x)
    leaves = {id(a): a for a in jax.tree.leaves(pullback) if a is not mask}
    return sum(a.nbytes for a in leaves.values())


def _case(shape: tuple[int, ...], dtype: Any) -> Case:
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    mask = jnp.asarray(rng.random((shape[0], 1, 1, shape[-1])) < 0.8)

    def contender(name, function):
        def step(x, mask, dy):
            y, pullback = jax.vjp(lambda x: function(x, mask), x)
            return y, pullback(dy)[0]

        saved = _residual_bytes(function, x, mask)
        notes = {"saved for the backward / y": round(saved / x.nbytes, 2)}
        return compiled_contender(name, step, x, mask, dy, **notes)

    copy = compiled_contender(
        "copy of two such arrays", lambda x, dy: (x + 1, dy + 1), x, dy, compare=False
    )
    name = f"{list(shape)} {jnp.dtype(dtype).name}"
    contenders = [contender("jax_attn_bwd", _ours), contender("jax.nn", _jax_nn), copy]
    return Case(name, contenders, tolerance=8 * float(jnp.finfo(dtype).eps))
