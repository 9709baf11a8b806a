"""Gradients in bfloat16 and float16, where what a node sums has a mean.

The error of a rounded output is one error for all edges of a node, and a mean makes it large. The plain
formula that these gradients are held against is accumulated in float32 and rounded at the end: in the narrow
dtype it rounds as we do. Forward and backward are two programs, as in a model under `jax.checkpoint`: in one,
XLA may hand on what was not rounded yet.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, quick_jit, thorough

from jax_attn_bwd import check
from jax_attn_bwd._core.cases import cast, cotangents

MESSAGE = {"graph_attention": "src", "graph_attention_v2": "src", "graph_transformer_attention": "value"}
MEAN, TIMES = 3, 3  # of the messages; as large as the plain formula's error an error may be
CALLS = [
    pytest.param(o, case, dtype, id=f"{o.name}-{case.name}-{dtype}", marks=marks)
    for o in OPERATORS
    if o.name in MESSAGE
    for case in o.tagged("large")
    for dtype in ("bfloat16", "float16")
    if case.name in ("narrow hub", "wide hub")
    for marks in [[] if (case.name, dtype) == ("narrow hub", "bfloat16") else [thorough]]
]


@pytest.mark.parametrize(("operator", "case", "dtype"), CALLS)
def test_every_error_is_that_of_rounding_at_the_end(operator, case, dtype):
    """Of the gradients of all operands through out, returned weights and lse; of the outputs' tangents."""
    arrays = case.arrays(dtype)
    message = MESSAGE[operator.name]
    arrays[message] = cast(np.asarray(arrays[message], np.float32) + MEAN, dtype)
    moved = {name: arrays[name] for name in operator.differentiated(arrays)}

    def outputs(function, **options):
        return lambda moved: function(**{**arrays, **moved}, **case.options, **options)

    def derivatives(call, along, compiled, moved, tangents, cts):
        """The gradients and tangents by name, of a forward and a backward that are two programs."""
        _, pullback = compiled(lambda moved: jax.vjp(call, moved))(moved)
        found = compiled(lambda *given: jax.jvp(along, *((x,) for x in given))[1])(moved, tangents)
        return compiled(pullback)(cts)[0] | dict(zip(operator.outputs, found, strict=True))

    ours, plain = outputs(operator.call), outputs(operator.reference)
    rng = np.random.default_rng(2)
    tangents = {name: cast(rng.standard_normal(x.shape), dtype) for name, x in moved.items()}
    with jax.numpy_dtype_promotion("standard"):
        cts = cotangents(operator, jax.eval_shape(ours, moved))
        got = derivatives(ours, outputs(operator.call, forward_mode=True), jax.jit, moved, tangents, cts)
        wide = lambda to: jax.tree.map(lambda x: cast(np.asarray(x, np.float32), to), (moved, tangents, cts))
        exact = derivatives(plain, plain, quick_jit, *wide("float64"))
        rounded = derivatives(plain, plain, quick_jit, *wide("float32"))
    for name, x in got.items():
        limit = TIMES * check.relative_error(rounded[name].astype(x.dtype), exact[name])
        assert check.relative_error(x, exact[name]) <= limit + 4 * jnp.finfo(jnp.float32).eps, name
