"""The linear maps of the layer: inputs to heads, heads to output, its dropout, and rows not to be read."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank, total
from jax_attn_bwd._core.products import accumulated
from jax_attn_bwd._core.rotary import rotate
from jax_attn_bwd._core.sharding import axis_size, explicit_spec, reshard_like
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.multi_head.spec import INPUTS, Heads, Operands, Options

OUT = (0x6F757470, 0x75740000)  # tells the output's draws from those of the probabilities


def matmul_over_rows(
    left: str, right: str, out: str, x: jax.Array, y: jax.Array, precision: Any
) -> jax.Array:
    """Computes `accumulated` of axes `left` and `right`, contracted over the batch axes in front, too."""
    batch = "uvwxyzabcd"[: x.ndim - len(left)]
    return accumulated(f"{batch}{left},{batch}{right}->{out}", x, y, precision)


@partial(jax.jit, static_argnums=(0,))
def project(options: Options, operands: Operands) -> Heads:
    """Returns queries, keys and values: `x W + b`, or without a kernel `x` itself for every head; turned."""
    heads = []
    for name, x in zip(INPUTS, operands.inputs, strict=True):
        kernel, bias = (getattr(operands, f"{name}_{kind}") for kind in ("kernel", "bias"))
        heads.append(_turned(options, operands, name, _mapped(options, x, kernel, bias)).astype(x.dtype))

    # one of no kernel has one head for all, [..., T, 1, H]
    query, key, value = heads
    K = max(key.shape[-2], value.shape[-2], *(len(x) for x in (operands.bias_k,) if x is not None))
    return _placed_alike(Heads(_to_heads(query, options.num_heads), _to_heads(key, K), _to_heads(value, K)))


def project_tangents(
    options: Options, operands: Operands, heads: Heads, moved: tuple[Any, Any, Any], along: Operands
) -> list[Any]:
    """Returns the tangents of the `heads` by (14) of `tangent.py`, of inputs that move by `moved`."""
    found: list[Any] = []
    for name, x, dx, y in zip(INPUTS, operands.inputs, moved, heads, strict=True):
        # a product for each factor that moves
        kernel = getattr(operands, f"{name}_kernel")
        dkernel, dbias = (getattr(along, f"{name}_{kind}") for kind in ("kernel", "bias"))
        terms = [] if dx is None else [_mapped(options, dx, kernel, None)]
        if dkernel is not None:
            terms.append(_mapped(options, x, dkernel, None))
        if dbias is not None:
            zero = jnp.zeros_like(y, dtype=accumulator_dtype(x.dtype))
            terms.append(zero + to_rank(reshard_like(dbias, y, (-2, None)).astype(zero.dtype), y.ndim))

        # turned, and laid out as the heads are, [..., T, N, H]
        if not terms:
            found.append(None)
            continue
        dy = _turned(options, operands, name, total(*terms)).astype(x.dtype)
        found.append(reshard_like(_to_heads(dy, y.shape[-2]), y, tuple(range(y.ndim))))
    return found


def _mapped(options: Options, x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
    """Maps `x [..., T, E]` to heads `[..., T, N, H]`; without a kernel to one head."""
    if kernel is None:
        return x[..., None, :]
    y = accumulated("...te,enh->...tnh", x, kernel, options.precision)
    return y if bias is None else y + to_rank(bias.astype(y.dtype), y.ndim)


def _turned(options: Options, operands: Operands, name: str, y: jax.Array) -> jax.Array:
    """Turns queries and keys by their positions, where the layer has a rotary embedding."""
    if options.rotary is None or name == "value":
        return y
    return rotate(options.rotary, y, operands.positions(name))


def _placed_alike(heads: Heads) -> Heads:
    """Shards, on an Explicit mesh, the heads of all three alike, as those of the first that are."""
    K, axes = heads.key.shape[-2], (explicit_spec(x)[-2] for x in heads)
    axis = next((a for a in axes if a is not None and K % axis_size(heads.key, a) == 0), None)
    if all(explicit_spec(x)[-2] == axis for x in heads):
        return heads
    mesh = jax.typeof(heads.query).sharding.mesh
    specs = ((*explicit_spec(x)[:-2], axis, None) for x in heads)
    placed = zip(heads, specs, strict=True)
    return Heads(*(jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec))) for x, spec in placed))


def _to_heads(x: jax.Array, n: int) -> jax.Array:
    """Repeats one head n times."""
    return x if x.shape[-2] == n else jnp.broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))


def attention_operands(operands: Operands, heads: Heads) -> dot_product.Operands:
    """Returns the operands of dense attention over the projected keys, without the appended rows."""
    # what has heads is sharded as the queries are
    batch = range(heads.query.ndim - 3)
    q, offset = heads.query, operands.dropout_offset
    bias, elements = (
        None if x is None else reshard_like(x, q, (*batch, -2, -3, None))
        for x in (operands.bias, operands.mask.elements)
    )
    sink = None if operands.sink is None else reshard_like(operands.sink, q, (-2,))

    # columns of the appended rows are not the tiles' to draw
    if offset is not None and offset.column.ndim:
        offset = offset._replace(column=offset.column[: heads.key.shape[-3]])
    mask = operands.mask.replace(elements=elements)
    return dot_product.Operands(*heads, bias, sink, mask, operands.dropout_words, offset)


def output(options: Options, operands: Operands, z: jax.Array) -> jax.Array:
    """Returns the layer's output `[..., T, Eo]` from that of the attention."""
    out = _joined(options, z, operands.out_kernel)
    if operands.out_bias is not None:
        out = out + to_rank(operands.out_bias.astype(out.dtype), out.ndim)
    return _finished(options, operands, out, operands.query).astype(z.dtype)


def output_tangent(
    options: Options, operands: Operands, z: jax.Array, along: Operands, dz: jax.Array | None
) -> jax.Array:
    """Returns the tangent of the output by (20) of `tangent.py`, from `z` and its tangent; None is zero."""
    terms = [] if dz is None else [_joined(options, dz, operands.out_kernel)]
    if along.out_kernel is not None:
        terms.append(_joined(options, z, along.out_kernel))
    if not terms:
        terms.append(jnp.zeros_like(jax.eval_shape(partial(_joined, options), z, operands.out_kernel)))
    out = total(*terms)
    if along.out_bias is not None:
        out = out + to_rank(along.out_bias.astype(out.dtype), out.ndim)
    return _finished(options, operands, out, along.query).astype(z.dtype)


def _joined(options: Options, z: jax.Array, kernel: Any) -> jax.Array:
    """Joins the heads `[..., T, N, Hv]` in one vector of each query, float32 or wider."""
    if kernel is None:
        out = z.reshape(*z.shape[:-2], z.shape[-2] * z.shape[-1])
        return out.astype(accumulator_dtype(z.dtype))
    return accumulated("...tnh,nho->...to", z, kernel, options.precision)


def _finished(options: Options, operands: Operands, out: jax.Array, query: Any) -> jax.Array:
    """Drops elements of `out`, and adds the `query` where the layer does."""
    drawn = options.out_dropout_rate, operands.dropout_words, operands.dropout_offset
    factors = output_factors(*drawn, out)
    out = out if factors is None else out * factors
    if options.add_residual and query is not None:
        out = out + query.astype(out.dtype)
    return out


def output_factors(
    rate: float, words: Any, offset: dropout.Offset | None, out: jax.Array
) -> jax.Array | None:
    """Returns the dropout factors of `out [..., T, Eo]`, 0 or 1 / (1 - rate); None if `rate` is 0.

    They are drawn again wherever they are needed.
    """
    if rate == 0:
        return None

    # a key of its own, and where each element lies
    *batch, T, Eo = out.shape
    constant = (jnp.uint32(OUT[0]), jnp.uint32(OUT[1]))
    words = jnp.stack(dropout.threefry((words[0], words[1]), constant))
    offset = dropout.or_origin(offset)
    index = partial(jnp.arange, dtype=jnp.uint32)
    entry = index(math.prod(batch)).reshape(*batch, 1, 1) + offset.batch
    row = offset.row if offset.row.ndim else offset.row + index(T)
    row, column = to_rank(row[:, None], out.ndim), to_rank(index(Eo), out.ndim)
    return dropout.factors(dropout.head_keys(words, entry, jnp.uint32(0)), row, column, rate, out.dtype)


def without_poison(options: Options, operands: Operands) -> tuple[Operands, Any]:
    """Returns (operands, live): rows of query, key and value that see nothing, or nothing sees, are 0.

    live `[..., T]` tells the queries that see something, None if all do. A row of zeros in a cotangent does
    not make up for NaN in the row of the input that it is multiplied with.
    """
    # mostly shapes tell that there is no such row: no call of a compiled function then
    mask, T, S = operands.mask, operands.query.shape[-2], operands.inputs[1].shape[-2]
    by_shapes = operands.bias is None and mask.mask_mod is None and not jax.tree.leaves(mask)
    if by_shapes and (T == S or not (mask.is_banded or 0 in (T, S))):
        return operands, None
    return _without_poison(options, operands)


@partial(jax.jit, static_argnums=(0,))
def _without_poison(options: Options, operands: Operands) -> tuple[Operands, Any]:
    # which queries see something, and which keys are seen, in any head: [..., T], [..., S]
    (*batch, T, _), S = operands.query.shape, operands.inputs[1].shape[-2]
    sizes = dot_product.Sizes(tuple(batch), T, S, options.num_heads, 1)
    of_heads = visibility.used_queries_and_keys(operands.mask, operands.bias, sizes)
    live, seen = (
        None if x is None else x.any(axes) for x, axes in zip(of_heads, ((-3, -2), -2), strict=True)
    )
    if options.appended_rows(operands):  # every query sees them
        live = None

    # in the inputs
    query, key, value = (
        x if rows is None else jnp.where(to_rank(rows, x.ndim - 1)[..., None], x, 0)
        for x, rows in zip(operands.inputs, (live, seen, seen), strict=True)
    )
    return operands._replace(query=query, key=key, value=value), live
