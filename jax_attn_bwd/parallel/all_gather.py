"""All-gather attention: every device gathers all keys and values, in the forward and again in the backward.

One block per device, so one collective each way: keys and values are gathered, dk and dv are summed and
scattered. Forward mode gathers the tangents of keys and values likewise. Memory for keys and values is that
of the whole sequence.

References:
  Grattafiori et al., The Llama 3 herd of models, 2024, arXiv:2407.21783, section 3.3.2 (context parallelism).
"""

from typing import Any

import jax
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product.spec import Operands, Residuals, Result
from jax_attn_bwd.parallel.arguments import Exchange
from jax_attn_bwd.parallel.ring import of_keys, sequence_axis, with_keys


def example(exchange: Exchange, operands: Operands) -> Operands:
    """Returns the block of a device, from which an implementation is chosen."""
    gathered = {
        name: lax.all_gather(x, exchange.axis_name, axis=x.ndim + sequence_axis(name), tiled=True)
        for name, x in of_keys(exchange, operands).items()
    }
    return with_keys(operands, gathered)._replace(sink=operands.sink)


def forward(exchange: Exchange, plan: blockwise.Plan, operands: Operands) -> Result:
    """Attends to all keys, on operands that all vary over the same axes."""
    return blockwise.forward(plan, example(exchange, operands))


def tangent(
    exchange: Exchange, plan: blockwise.Plan, operands: Operands, result: Result, tangents: Operands
) -> tuple[jax.Array, jax.Array]:
    """Returns the two sums over all keys, of the tangents that are not None."""
    whole, of_whole = (example(exchange, given) for given in (operands, tangents))
    return blockwise.tangent_sums(plan, whole, result, of_whole)


def backward(
    exchange: Exchange, plan: blockwise.Plan, residuals: Residuals, dout: jax.Array, dlse: Any
) -> dict[str, jax.Array]:
    """Returns the gradients of those of query, key, value and bias that are wanted."""
    # keys and values are gathered again, and one block gives all gradients
    operands, result, wanted = residuals
    mine = of_keys(exchange, operands)
    whole = example(exchange, fusion.barrier(operands))  # else XLA keeps what the forward gathered
    parts = blockwise.backward(plan, whole, result, wanted.names, dout, dlse, alone=True)
    dtype = accumulator_dtype(operands.query.dtype)

    # what belongs to the keys is summed over the devices, each of which keeps its own part
    def scattered(name, x):
        if name not in mine:
            return x
        axis = x.ndim + sequence_axis(name)
        return lax.psum_scatter(x.astype(dtype), exchange.axis_name, scatter_dimension=axis, tiled=True)

    return {name: scattered(name, getattr(parts, name)) for name in sorted(wanted.names)}
