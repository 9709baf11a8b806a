"""What the tests of errors share: calls whose arguments are right but for those that a test changes."""

import re

import numpy as np
import pytest

import jax_attn_bwd
from jax_attn_bwd.compat import cann

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 4, 8
int32 = np.int32
STATIC = "under jax.jit name it in static_argnames"
FLOAT_MASK = r"mask must be boolean \(True = attend\), got dtype float32; pass additive .* as bias"
INTEGER_MASK = r"mask must be boolean .*, got dtype int32; write mask != 0"


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def attention(**changes):
    arguments = {"query": ones(B, T, N, H), "key": ones(B, S, K, H), "value": ones(B, S, K, HV)} | changes
    return jax_attn_bwd.dot_product_attention(**arguments)


def softmax(**changes):
    return jax_attn_bwd.scaled_masked_softmax(**({"x": ones(2, 3, 5, 7)} | changes))


def cann_forward(**changes):
    return cann.scaled_masked_softmax(**({"x": ones(2, 3, 5, 7), "mask": None} | changes))


def cann_backward(**changes):
    arguments = {"grad_output": ones(2, 3, 5, 7), "y": ones(2, 3, 5, 7), "mask": None} | changes
    return cann.scaled_masked_softmax_backward(**arguments)


def graph_attention(**options):
    graph = jax_attn_bwd.BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
    return jax_attn_bwd.graph_attention(graph, ones(3, 4), None, ones(8), **options)


def graph_transformer_attention(**options):
    graph = jax_attn_bwd.BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
    nodes = {"query": ones(2, 4), "key": ones(3, 4), "value": ones(3, 4)}
    return jax_attn_bwd.graph_transformer_attention(graph, **nodes, **options)


def multi_head_attention(**options):
    params = jax_attn_bwd.MultiHeadAttentionParams()
    return jax_attn_bwd.multi_head_attention(params, ones(B, T, H), **options)


def check(call, operator, exception, words, arguments):
    """The message starts with the operator's name and holds `words` in their order.

    `exception` is a pair where "wrong kind" and "out of range" fit equally well.
    """
    allowed = exception if isinstance(exception, tuple) else (exception,)
    with pytest.raises(allowed) as caught:
        call(**{name: x() if callable(x) else x for name, x in arguments.items()})
    assert type(caught.value) in allowed  # not a subclass from deep inside JAX
    text = str(caught.value)
    assert re.match(rf"{re.escape(operator)}: ", text), text
    assert re.search(words, text), text
    assert "\n" not in text


def rows(*entries):
    """(id, exception, words, arguments) as parameters; ids are unique."""
    names = [entry[0] for entry in entries]
    assert len(set(names)) == len(names)
    return [pytest.param(*entry[1:], id=entry[0]) for entry in entries]
