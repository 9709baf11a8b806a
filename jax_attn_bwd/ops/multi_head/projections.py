"""The linear maps of the layer: inputs to heads, heads to output, and what rows they must not read."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.rotary import rotate
from jax_attn_bwd._core.sharding import axis_size, einsum, explicit_spec, reshard_like
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.multi_head import dropping
from jax_attn_bwd.ops.multi_head.spec import Heads, Operands, Options


def matmul(subscripts: str, x: jax.Array, y: jax.Array, precision: Any = None) -> jax.Array:
    """`einsum` accumulated in float32 or wider, in which it is returned."""
    dtype = accumulator_dtype(x.dtype)
    if targets.platform() == "cpu":  # which computes narrow products in float32 anyway, or refuses
        x, y = x.astype(dtype), y.astype(dtype)
    return einsum(subscripts, x, y, precision=precision, preferred_element_type=dtype)


def matmul_over_rows(
    left: str, right: str, out: str, x: jax.Array, y: jax.Array, precision: Any
) -> jax.Array:
    """`matmul` of axes `left` and `right`, contracted over the batch axes in front of them too."""
    batch = "uvwxyzabcd"[: x.ndim - len(left)]
    return matmul(f"{batch}{left},{batch}{right}->{out}", x, y, precision)


NAMES = ("query", "key", "value")


@partial(jax.jit, static_argnums=(0,))
def project(options: Options, operands: Operands) -> Heads:
    """Queries, keys and values: `x W + b`, or where there is no kernel `x` itself for every head; turned."""
    heads = []
    for name, x in zip(NAMES, operands.inputs, strict=True):
        kernel, bias = (getattr(operands, f"{name}_{piece}") for piece in ("kernel", "bias"))
        heads.append(_turned(options, operands, name, _mapped(options, x, kernel, bias)).astype(x.dtype))
    query, key, value = heads
    K = max(key.shape[-2], value.shape[-2], *(len(x) for x in (operands.bias_k,) if x is not None))
    return _placed_alike(Heads(_to_heads(query, options.num_heads), _to_heads(key, K), _to_heads(value, K)))


def project_tangents(
    options: Options, operands: Operands, heads: Heads, moved: tuple[Any, Any, Any], along: Operands
) -> list[Any]:
    """(14) of `tangent.py`: what each of the `heads` moves by, as the inputs do by `moved`; None is zero."""
    found: list[Any] = []
    for name, x, dx, y in zip(NAMES, operands.inputs, moved, heads, strict=True):
        kernel = getattr(operands, f"{name}_kernel")
        dkernel, dbias = (getattr(along, f"{name}_{piece}") for piece in ("kernel", "bias"))
        terms = [] if dx is None else [_mapped(options, dx, kernel, None)]
        if dkernel is not None:
            terms.append(_mapped(options, x, dkernel, None))
        if dbias is not None:
            zero = jnp.zeros_like(y, dtype=accumulator_dtype(x.dtype))
            terms.append(zero + to_rank(reshard_like(dbias, y, (-2, None)).astype(zero.dtype), y.ndim))
        if not terms:
            found.append(None)
            continue
        dy = _turned(options, operands, name, sum(terms[1:], start=terms[0])).astype(x.dtype)
        found.append(reshard_like(_to_heads(dy, y.shape[-2]), y, tuple(range(y.ndim))))
    return found


def _mapped(options: Options, x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
    if kernel is None:
        return x[..., None, :]
    y = matmul("...te,enh->...tnh", x, kernel, options.precision)
    return y if bias is None else y + to_rank(bias.astype(y.dtype), y.ndim)


def _turned(options: Options, operands: Operands, name: str, y: jax.Array) -> jax.Array:
    if options.rotary is None or name == "value":
        return y
    return rotate(options.rotary, y, operands.positions(name))


def _placed_alike(heads: Heads) -> Heads:
    """On an Explicit mesh: the heads of all three sharded alike, as those of the first that are."""
    K, axes = heads.key.shape[-2], (explicit_spec(x)[-2] for x in heads)
    axis = next((a for a in axes if a is not None and K % axis_size(heads.key, a) == 0), None)
    if all(explicit_spec(x)[-2] == axis for x in heads):
        return heads
    mesh = jax.typeof(heads.query).sharding.mesh
    specs = ((*explicit_spec(x)[:-2], axis, None) for x in heads)
    placed = zip(heads, specs, strict=True)
    return Heads(*(jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec))) for x, spec in placed))


def _to_heads(x: jax.Array, n: int) -> jax.Array:
    return x if x.shape[-2] == n else jnp.broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))


def attention_operands(operands: Operands, heads: Heads) -> dot_product.Operands:
    """What dense attention over the projected keys, without the appended rows, is handed."""
    batch = range(heads.query.ndim - 3)
    q, offset = heads.query, operands.dropout_offset
    bias, elements = (
        None if x is None else reshard_like(x, q, (*batch, -2, -3, None))
        for x in (operands.bias, operands.mask.elements)
    )
    sink = None if operands.sink is None else reshard_like(operands.sink, q, (-2,))
    if offset is not None and offset.column.ndim:
        offset = offset._replace(column=offset.column[: heads.key.shape[-3]])
    mask = operands.mask.replace(elements=elements)
    return dot_product.Operands(*heads, bias, sink, mask, operands.dropout_words, offset)


def output(options: Options, operands: Operands, z: jax.Array) -> jax.Array:
    """The layer's output `[..., T, Eo]` from that of the attention."""
    out = _joined(options, z, operands.out_kernel)
    if operands.out_bias is not None:
        out = out + to_rank(operands.out_bias.astype(out.dtype), out.ndim)
    return _finished(options, operands, out, operands.query).astype(z.dtype)


def output_tangent(
    options: Options, operands: Operands, z: jax.Array, along: Operands, dz: jax.Array | None
) -> jax.Array:
    """(20) of `tangent.py`, from the attention's output and its tangent; None is zero."""
    terms = [] if dz is None else [_joined(options, dz, operands.out_kernel)]
    if along.out_kernel is not None:
        terms.append(_joined(options, z, along.out_kernel))
    if not terms:
        terms.append(jnp.zeros_like(jax.eval_shape(partial(_joined, options), z, operands.out_kernel)))
    out = sum(terms[1:], start=terms[0])
    if along.out_bias is not None:
        out = out + to_rank(along.out_bias.astype(out.dtype), out.ndim)
    return _finished(options, operands, out, along.query).astype(z.dtype)


def _joined(options: Options, z: jax.Array, kernel: Any) -> jax.Array:
    """The heads `[..., T, N, Hv]` in one vector of each query, float32 or wider."""
    if kernel is None:
        out = z.reshape(*z.shape[:-2], z.shape[-2] * z.shape[-1])
        return out.astype(accumulator_dtype(z.dtype))
    return matmul("...tnh,nho->...to", z, kernel, options.precision)


def _finished(options: Options, operands: Operands, out: jax.Array, query: Any) -> jax.Array:
    """`out` after its dropout, with the `query` that the layer adds."""
    drawn = options.out_dropout_rate, operands.dropout_words, operands.dropout_offset
    factors = dropping.of_output(*drawn, out)
    out = out if factors is None else out * factors
    if options.add_residual and query is not None:
        out = out + query.astype(out.dtype)
    return out


@partial(jax.jit, static_argnums=(0,))
def without_poison(options: Options, operands: Operands) -> tuple[Operands, Any]:
    """(operands, live): rows of query, key and value that see nothing, or that nothing sees, are 0.

    live `[..., T]` tells the queries that see something, None if all do. A row of zeros in a cotangent does
    not make up for NaN in the row of the input that it is multiplied with.
    """
    (*batch, T, _), S = operands.query.shape, operands.inputs[1].shape[-2]
    sizes = dot_product.Sizes(tuple(batch), T, S, options.num_heads, 1)
    of_heads = visibility.used_queries_and_keys(operands.mask, operands.bias, sizes)
    live, seen = (
        None if x is None else x.any(axes) for x, axes in zip(of_heads, ((-3, -2), -2), strict=True)
    )
    if options.add_zero_attn or operands.bias_k is not None:  # rows that every query sees
        live = None
    query, key, value = (
        x if rows is None else jnp.where(to_rank(rows, x.ndim - 1)[..., None], x, 0)
        for x, rows in zip(operands.inputs, (live, seen, seen), strict=True)
    )
    return operands._replace(query=query, key=key, value=value), live
