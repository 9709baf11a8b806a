"""Forward of the multi-head attention layer, (1) to (4) of `backward.py`: project, attend, append, project.

Dense attention's own forward, portable or kernel, attends tile by tile; `appended.py` joins its rows to that.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import appended
from jax_attn_bwd.ops.multi_head.plan import Plan
from jax_attn_bwd.ops.multi_head.projections import attention_operands, output, project, without_poison
from jax_attn_bwd.ops.multi_head.spec import Heads, MultiHeadAttentionResidual, Operands, Options, Result


def forward(plan: Plan, operands: Operands) -> Result:
    """Returns the output, the weights if they are asked for, and what the backward needs."""
    heads = project(plan.options, without_poison(plan.options, operands)[0])
    inner = attention_operands(operands, heads)
    return _finish(plan.options, operands, inner, blockwise.forward(plan.attention, inner))


@partial(jax.jit, static_argnums=(0,))
def _finish(
    options: Options, operands: Operands, inner: dot_product.Operands, result: dot_product.Result
) -> Result:
    """Finishes the call from the `result` of dense attention over the S keys."""
    # the appended rows join the keys
    rows = appended.rows(options, operands, inner)
    if rows is not None:
        result = appended.attend(options, inner, rows, result)

    # whole planes, only where they are returned or saved: P of the S' keys
    weights = probs = None
    if options.return_weights or options.save == "probs":
        p = blockwise.probabilities(blockwise.plane(options.attention, inner), result)
        if options.return_weights:
            p_rows = None if rows is None else appended.probabilities(options, rows, result)
            weights = weights_of(options, p, p_rows).astype(operands.query.dtype)
        if options.save == "probs":
            probs = p.astype(operands.query.dtype)

    # the output, and what is kept for the backward
    heads = None if options.save == "inputs" else Heads(inner.query, inner.key, inner.value)
    residual = MultiHeadAttentionResidual(heads=heads, probs=probs, **result._asdict())
    out = output(options, operands, result.out)
    return tie(Result(out, weights, residual), operands)


def weights_of(options: Options, p: jax.Array, p_rows: Any) -> jax.Array:
    """Joins the probabilities of keys and rows to `[..., N, T, S']`, or takes their mean over N."""
    if p_rows is not None:
        p = jnp.concatenate([p, p_rows], -1)
    *batch, K, G, T, S = p.shape
    p = p.reshape(*batch, K * G, T, S)
    return p.mean(-3) if options.average_weights else p
