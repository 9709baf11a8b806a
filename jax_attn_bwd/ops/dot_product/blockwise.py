"""The one door into dense attention for what is built on it: the multi-head layer, attention over shards.

A block is the attention of T queries to S keys, which may be some of the keys that the queries attend to.
What follows holds for every implementation, and for each pair of a forward with a backward:

* `forward` gives `Result(out, lse, lse_rounding, wide_out)` over the keys of the block alone, lse with its
  rounding where that counts. A query that sees none of them has out = 0 and lse = -inf. So blocks 1 and 2 of
  disjoint keys make up

      lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

* `backward` takes the row values of **all** keys that a query attends to, be they in the block or not, and
  gives what this block adds to each gradient: blocks of disjoint queries or keys add up to the whole. `out`
  and dout enter it through delta alone (equation (7) of `backward.py`), lse through the probabilities.
* A block sees what `visibility.py` says of its operands. Where it lies in the whole is told by positions
  (causality, windows), segment ids, its own mask and bias, and `dropout_offset` (which probabilities are
  dropped); lengths count from the beginning of the block.
* A sink belongs to a row, not to a block: hand it to one block of a row, in the forward and in the backward.
  There its gradient is that of the whole row.
* Gradients have the dtype of their operands: sums over many blocks in a narrow dtype round once a block.
* `tangent_sums` takes the same row values and gives what this block adds to the two sums of forward mode;
  `through_softmax` makes the output's tangent of whole sums; the whole mu is the tangent of lse. This is the
  portable pass, whatever ran the forward. The tangent of a sink goes with the block that has the sink.
* Memory is linear in T and S but for what a `plane` gives, `probabilities` and `gradients`: the same
  equations, for those who ask for the probabilities themselves.
* All are differentiable, to any order and in either mode: a kernel's derivatives are the portable path's.
* The operands are checked, int32 where they are integers, and sharded alike: `arguments.prepare` does it.

Heads in the layout of tiles are `[..., K, G, T, H]`: `split_heads` and `merge_heads` go there and back.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_attn_bwd._core import backend
from jax_attn_bwd.ops.dot_product import backward as portable_backward
from jax_attn_bwd.ops.dot_product import forward as portable_forward
from jax_attn_bwd.ops.dot_product.block import dropout_factors as dropout_factors
from jax_attn_bwd.ops.dot_product.layout import merge_heads as merge_heads
from jax_attn_bwd.ops.dot_product.layout import merge_rows as merge_rows
from jax_attn_bwd.ops.dot_product.layout import split_heads as split_heads
from jax_attn_bwd.ops.dot_product.layout import split_rows as split_rows
from jax_attn_bwd.ops.dot_product.plan import Plan as Plan
from jax_attn_bwd.ops.dot_product.plan import plan as planned
from jax_attn_bwd.ops.dot_product.plan import rounding_matters as rounding_matters
from jax_attn_bwd.ops.dot_product.portable.plane import gradients as gradients
from jax_attn_bwd.ops.dot_product.portable.plane import plane as plane
from jax_attn_bwd.ops.dot_product.portable.plane import probabilities as probabilities
from jax_attn_bwd.ops.dot_product.portable.plane import tangent_of_logits as tangent_of_logits
from jax_attn_bwd.ops.dot_product.row_terms import delta as delta
from jax_attn_bwd.ops.dot_product.row_terms import gradient_of_sink as gradient_of_sink
from jax_attn_bwd.ops.dot_product.row_terms import sees_nothing as sees_nothing
from jax_attn_bwd.ops.dot_product.row_terms import tangent_of_sink as tangent_of_sink
from jax_attn_bwd.ops.dot_product.spec import (
    DotProductAttentionGrads,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)
from jax_attn_bwd.ops.dot_product.tangent import tangent_sums as tangent_sums
from jax_attn_bwd.ops.dot_product.tangent import through_softmax as through_softmax

_PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (
    backend.kernel("mosaic_tpu", __package__, _PORTABLE, ("tpu",)),
    backend.kernel("mosaic_gpu", __package__, _PORTABLE, ("hopper",)),
    backend.kernel("cudnn", __package__, _PORTABLE, ("cudnn",), any_order=True, in_one_file=True),
    _PORTABLE,
)


def plan(operator: str, implementation: str | None, options: Options, operands: Operands) -> Plan:
    """Plans this block: by the implementation asked for, or with None by the best that can.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it cannot run this block; the message begins with `operator` and says why.
    """
    return backend.planned(operator, IMPLEMENTATIONS, implementation, options, operands, planned)


def implementation(plan: Plan) -> backend.Implementation:
    """Returns what runs the plan: `forward(plan, operands)`, `backward(plan, residuals, dout, dlse)`."""
    return backend.named(IMPLEMENTATIONS, plan.implementation)


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes attention to the keys of the block, with its row values."""
    return implementation(plan).forward(plan, operands)


def differentiated(plan: Plan, wanted: Iterable[str]) -> Plan:
    """Returns the plan of a rule's forward: its kernel keeps what rounding takes if the gradients need it.

    The portable path computes it whatever is asked: XLA drops what no one keeps.
    """
    is_asked = _sum_rows(wanted) and plan.rounding_matters
    return replace(plan, keeps_rounding=True) if is_asked and plan.implementation != _PORTABLE.name else plan


def _sum_rows(wanted: Iterable[str]) -> bool:
    return not {"bias", "mod_args"}.isdisjoint(wanted)


def pack_residuals(plan: Plan, result: Result, wanted: Iterable[str]) -> Result:
    """Returns what a rule keeps of a forward, under the names by which checkpoint policies know it.

    `wide_out` is kept by a plan that says so, else for the gradients that need it. Without them it has no
    elements, rather than not to be: JAX keeps one structure of residuals for all derivatives of a jitted
    function.
    """
    is_kept = plan.keeps_wide or (result.wide_out is not None and _sum_rows(wanted))
    if plan.has_wide_out and not is_kept:
        result = result._replace(wide_out=jnp.zeros((0,), result.lse.dtype))
    name = lambda field: "attention_out" if field.endswith("out") else "attention_lse"
    return Result(**{field: checkpoint_name(x, name(field)) for field, x in result._asdict().items()})


def unpack_residuals(result: Result) -> Result:
    """Returns the result that `pack_residuals` kept, for the backward."""
    wide = result.wide_out
    return result._replace(wide_out=None) if wide is not None and wide.ndim == 1 else result


def backward(
    plan: Plan,
    operands: Operands,
    result: Result,
    wanted: Iterable[str],
    dout: jax.Array | None,
    dlse: Any = None,
    *,
    alone: bool = False,
) -> DotProductAttentionGrads:
    """Computes what the block adds to the gradients of those operands that are `wanted`.

    Args:
      result: the row values over all keys that the queries attend to.
      dout, dlse: cotangents of `result.out` and `result.lse`; None = 0.
      alone: these are all the keys that the queries attend to. Small planes are faster for knowing it.
    """
    residuals = Residuals(operands, result, Wanted(frozenset(wanted), alone))
    return implementation(plan).backward(plan, residuals, dout, dlse)
