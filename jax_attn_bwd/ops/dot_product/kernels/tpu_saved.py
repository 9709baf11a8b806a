"""What the TPU backward kernels read, and what they compute of a part; equations as in `backward.py`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.inputs import LOG2_E, Inputs, is_plain
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.kernels.tpu_part import Part
from jax_attn_bwd.ops.dot_product.kernels.tpu_tiles import PlaneSides, Tiling
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands


class Saved(NamedTuple):
    """What the backward kernels read, in kernel layout."""

    refs: Inputs
    dout: Any  # [B, N, T, Hv]
    rows: Any  # float32 [B, N, 2|3, T]: lse in units of the exponent, delta, low where it is kept


def saved_of(options: KernelOptions, operands: Operands, keys: Any, values: Any, tiling: Tiling):
    """(the options of kernels, `Saved`, its `Flags`, `PlaneSides`); `values`: of `kernel_rows`."""
    refs = kernel_inputs.inputs(options, operands, keys, tiling.padding)
    options = functions.on_values(options, operands)
    flags = tile_flags(options, refs, tiling.block_q, tiling.block_k)
    sides = PlaneSides.of(refs)
    pad = {-1: tiling.block_q}

    def row(x, fill=0.0):
        x = jnp.swapaxes(kernel_inputs.merged(x, 2), -1, -2)
        return kernel_inputs.pad(x, pad, constant_values=fill)

    lse = values.lse * LOG2_E if is_plain(options, refs) else values.lse
    rows = [row(lse, jnp.inf), row(values.delta)]
    rows += [row(values.low)] if kernel_inputs.has_low(options, refs) else []
    dout = kernel_inputs.pad(kernel_inputs.merged(values.dout, 3), {-3: tiling.block_q, -1: tiles.HEAD})
    dout = jnp.swapaxes(dout, 1, 2)
    refs = tiles.kernel_inputs_of(options, refs, tiling)
    return options, Saved(refs, dout, jnp.stack(rows, -2)), flags, sides


def cut(saved: Saved, sides: PlaneSides, where: slice, tiling: Tiling) -> Saved:
    """The chunk of queries that lies in the tiles `where`."""
    rows = slice(where.start * tiling.block_q, where.stop * tiling.block_q)
    refs, fields = saved.refs, {"q": saved.refs.q[:, :, rows]}
    for name in ("row_position", "row_segment", "row_counter"):
        if (x := getattr(refs, name)) is not None:
            fields[name] = x[..., rows]
    for name, side in (("bias", sides.bias), ("mask", sides.mask)):
        if (x := getattr(refs, name)) is not None and side != 1:
            fields[name] = x[:, :, rows] if side is None else x[..., rows]
    for name in tiles.VALUES:
        pairs = zip(getattr(refs, name), getattr(sides, name), strict=True)
        fields[name] = tuple(_cut_value(x, side, where, tiling, refs.q.shape[2]) for x, side in pairs)
    return Saved(refs._replace(**fields), saved.dout[:, :, rows], saved.rows[..., rows])


def _cut_value(x: Any, side: int | None, where: slice, tiling: Tiling, T: int) -> Any:
    if side == distances.SIDE:
        return distances.cut(x, where, tiling, T)
    if side == blocks.SIDE:
        return x.cut(slice(where.start * tiling.block_q, where.stop * tiling.block_q))
    return x[..., where.start * tiling.block_q : where.stop * tiling.block_q] if side == 0 else x


def arithmetic(part: Part, rows, products, dp, mixed: bool, to_values: bool = False):
    """(p with dropout applied (5), dlogits (8a), dx (10), dvalues) of a part; of p alone if `dp` is None.

    `rows` is the block `[2|3, n]` of `Saved.rows`; dvalues has, with `to_values`, what each element adds to
    the gradients of the floats that the score is handed (8a), else nothing.
    """
    options = part.options
    lse, delta, *low = (part.vector(rows[i : i + 1, :], 0) for i in range(rows.shape[0]))
    logits = part.logits(products, mixed)
    p = logits.exp(lse, (lambda: low[0]) if low else None)  # (2)
    if logits.before is not None:  # a score may be NaN in rows of padding
        p = jnp.where(lse == jnp.inf, 0.0, p)
    kept, z_p = part.keep(), p
    if kept is not None:
        survivors = dropout.survivor_factor(options.dropout_rate)
        z_p = jnp.where(kept, p * survivors, 0.0)
    if dp is None:
        return z_p, None, None, []
    if kept is not None:
        dp = jnp.where(kept, dp * survivors, 0.0)  # (6)
    dlogits, dvalues = p * (dp - delta), []  # (8)
    if logits.before is not None:  # (8a)
        values = part.values("score_values")
        if to_values:  # one for each element
            values = tuple(jnp.broadcast_to(x, part.shape) for x in values)
        given = (options, logits.before, part.place(), values, dlogits, to_values)
        # what is hidden may have no derivative
        dlogits, dvalues = jax.tree.map(
            lambda x: jnp.where(p == 0.0, 0.0, x), functions.on_tile(mod_functions.pulled_back, *given)
        )
    dx = dlogits if logits.tanh is None else dlogits * logits.slope
    return z_p, dlogits, dx, jax.tree.leaves(dvalues)
