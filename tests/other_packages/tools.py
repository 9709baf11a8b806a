"""What a tool is, and the calls that it is tried on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn_bwd

X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 2)), "float32")


def plain(x):
    logits = jnp.einsum("btnh,bsnh->bnts", x, x) * 2**-0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), x)


def ours(x, **options):
    return jax_attn_bwd.dot_product_attention(x, x, x, **options)


def softmax(x, **options):
    return jax_attn_bwd.scaled_masked_softmax(x, **options)


def flax_layer():
    from flax import nnx

    return nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=nnx.Rngs(0))


def our_layer(**options):
    from flax import nnx

    from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention

    return MultiHeadAttention(2, 8, 8, decode=False, rngs=nnx.Rngs(0), **options)


OF = {"attention": (plain, ours), "softmax": (jax.nn.softmax, softmax), "layer": (flax_layer, our_layer)}


class Tool(NamedTuple):
    """What is run on what, and what is expected."""

    package: str  # what it imports
    of: str
    expected: str
    run: Callable[[Any], Any]


TOOLS: dict[str, Tool] = {}


def tool(name: str, package: str = "jax", *, of: str = "attention", expected: str = "right"):
    def kept(run):
        TOOLS[name] = Tool(package, of, expected, run)
        return run

    return kept
