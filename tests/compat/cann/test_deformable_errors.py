"""Errors of `compat.cann`'s deformable attention, in the names of the source: the caller knows no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import check, ones, rows

from jax_attn_bwd.compat import cann

LEVELS = ((3, 4), (2, 1))
B, Q, M, D, POINTS = 2, 5, 3, 4, 2
VALUE, AT, WEIGHTS = ones(B, 14, M, D), ones(B, Q, M, 2, POINTS, 2), ones(B, Q, M, 2, POINTS)


def cann_forward(**changes):
    arguments = {"value": VALUE, "spatial_shape": LEVELS, "level_start_index": [0, 12]}
    return cann.multi_scale_deformable_attention(
        **(arguments | {"location": AT, "attn_weight": WEIGHTS} | changes)
    )


def cann_grad(**changes):
    arguments = {"value": VALUE, "spatial_shape": LEVELS, "level_start_index": [0, 12]}
    arguments |= {"location": AT, "attn_weight": WEIGHTS, "grad_output": ones(B, Q, M, D)}
    return cann.multi_scale_deformable_attention_grad(**(arguments | changes))


# The names are those of the source: the caller knows no others.
CANN = rows(
    ("value_integer", TypeError, "value must be a floating-point array, got dtype int32",
     {"value": ones(B, 14, M, D, dtype=np.int32)}),
    ("value_size", ValueError,
     r"value must have shape \[bs, spatial_size, num_heads, channels\] = \(2, 14, 3, 4\), got \(2, 9",
     {"value": ones(B, 9, M, D)}),
    ("value_rank", ValueError, r"value must have shape \[bs, .*\], got \(14, 3, 4\)",
     {"value": ones(14, M, D)}),
    ("shape_flat", ValueError, r"spatial_shape must hold one \(H, W\) for each level",
     {"spatial_shape": (3, 4)}),
    ("starts", ValueError, r"level_start_index must be the running sum \[0, 12\].*, got \[0, 2\]",
     {"level_start_index": [0, 2]}),
    ("location_integer", TypeError, "location must be a floating-point array, got dtype int32",
     {"location": ones(B, Q, M, 2, POINTS, 2, dtype=np.int32)}),
    ("location_shape", ValueError, r"location must have shape \[bs, .*, 2\] = .*, got \(2, 5, 3, 2, 2,",
     {"location": ones(B, Q, M, 2, POINTS, 3)}),
    ("weight_shape", ValueError, r"attn_weight must have shape .* = \(2, 5, 3, 2, 2\), got \(2, 5, 3, 1",
     {"attn_weight": ones(B, Q, M, 1, POINTS)}),
    ("weight_rank", ValueError, r"attn_weight must have shape \[bs, .*\], got \(2, 5, 3, 4\)",
     {"attn_weight": ones(B, Q, M, 4)}),
    ("batch", ValueError, r"attn_weight must have shape .* = \(1, 5, .*, got \(2, 5,",
     {"value": ones(1, 14, M, D)}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), CANN)
def test_cann_forward_and_gradient(exception, words, arguments):
    check(cann_forward, "cann.multi_scale_deformable_attention", exception, words, arguments)
    check(cann_grad, "cann.multi_scale_deformable_attention_grad", exception, words, arguments)


@pytest.mark.parametrize(
    ("exception", "words", "grad_output"),
    [
        (
            ValueError,
            r"grad_output must have shape \[bs, num_queries, num_heads, channels\] = "
            r"\(2, 5, 3, 4\), got \(2, 5, 4, 3\)",
            ones(B, Q, D, M),
        ),
        (TypeError, "value, grad_output must have one dtype", ones(B, Q, M, D, dtype=np.float16)),
        (TypeError, "grad_output must be a floating-point array", ones(B, Q, M, D, dtype=np.int32)),
    ],
    ids=["shape", "dtype", "integer"],
)
def test_cann_grad_output(exception, words, grad_output):
    operator = "cann.multi_scale_deformable_attention_grad"
    check(cann_grad, operator, exception, words, {"grad_output": grad_output})


def test_traced_table():
    words = (
        r"spatial_shape must be concrete, got a traced array; pass \(\(H, W\), \.\.\.\), known at trace time"
    )
    traced = jax.jit(lambda x: cann_forward(spatial_shape=x))
    call = lambda: traced(jnp.asarray(LEVELS))
    check(call, "cann.multi_scale_deformable_attention", TypeError, words, {})
