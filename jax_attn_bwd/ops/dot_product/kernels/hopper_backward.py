"""Hopper backward of dense attention (Pallas Mosaic GPU); the equations are those of `backward.py`.

XLA computes delta (7) and the gradient of the sink (9); the rest are kernels:

    hopper_query.py   dq; sums over keys; the gradient of a full bias
    hopper_key.py     dk and dv; sums over queries; the fused kernel

The pair dq; dk, dv needs seven products a tile and no workspace beyond two row values, adds in one order,
and gives the same bits every time. With `deterministic_sums=False` the fused kernel needs five; under
`jax.vmap` the pair runs all the same. A bias gradient is summed in the kernels over what the bias
broadcasts: never more than the gradient itself is stored. The gradient of what `score_mod` reads of arrays,
by row or by column, is summed beside dq or dk, and XLA pulls it back to the arrays.

References:
  Shah et al., FlashAttention-3, 2024, arXiv:2407.08608.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import hopper_gradients as gradients
from jax_attn_bwd.ops.dot_product.kernels import hopper_key as by_key
from jax_attn_bwd.ops.dot_product.kernels import hopper_query as by_query
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.hopper_gradients import Saved
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, KernelOptions, Operands, Residuals


def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    options = KernelOptions.of(plan.options, residuals.operands.mask)
    interpret = pallas.is_interpreted(mosaic_gpu.NAME)
    keys = kernel_inputs.dropout_keys(options, residuals.operands)
    residuals = residuals._replace(operands=functions.with_numbers(residuals.operands))

    def call(options, *given):
        out_specs = kernel_inputs.out_specs(residuals)
        return pallas.on_local_shards(partial(_backward, options, interpret), out_specs, given)

    pair = partial(call, dataclasses.replace(options, deterministic_sums=True))
    run = pair if options.deterministic_sums else _batched_as(pair, partial(call, options))
    return run(residuals, dout, dlse, keys)


def _batched_as(batched: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` that under `jax.vmap` is `batched`: JAX cannot batch references, which `f` adds to."""
    call = jax.custom_batching.custom_vmap(f)

    @call.def_vmap
    def rule(size, in_batched, *given):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(in_batched))
        results = jax.vmap(batched, axes, axis_size=size)(*given)
        return results, jax.tree.map(lambda _: True, results)

    return call


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout, dlse, keys):
    # the arrays that all kernels read; which sides of values a score's gradient is summed over
    operands, wanted = residuals.operands, residuals.wanted.names
    (*batch, T, N, H), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    Hv = operands.value.shape[-1]
    saved, dsink = _prepare(options, residuals, dout, dlse, keys)
    given, options = options, functions.on_values(options, operands)
    made = {}
    qkv = wanted & {"query", "key", "value"}
    sides = gradients.value_sides(saved.refs) if "mod_args" in wanted else []
    # by the fused kernel, or in one order: by tiles of queries, and by tiles of keys
    if not options.deterministic_sums and len(qkv) == 3 and by_key.can_fuse(options, saved):
        made = by_key.key_gradients(options, interpret, saved, qkv)
    else:
        if names := wanted & {"query"} | ({"rows"} if 0 in sides else set()):
            made |= by_query.query_gradients(options, interpret, saved, names)
        for names in _kernels_by_key(options, wanted & {"key", "value"}, saved, 1 in sides):
            made |= by_key.key_gradients(options, interpret, saved, names)

    # without padding, with the batch axes of the call
    grads: dict[str, Any] = {}
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv)}
    for name in sorted(qkv):
        n, heads, h = shapes[name]
        grads[name] = made[name][:, :n, :, :h].reshape(*batch, n, heads, h)
    # the others: a bias has a kernel of its own, values of a score go back to the arrays they were read of
    if "bias" in wanted:
        grads["bias"] = _bias_gradient(options, interpret, saved, operands)
    if "sink" in wanted:
        grads["sink"] = dsink
    if "mod_args" in wanted:
        dvalues = _value_gradients(sides, made)
        grads["mod_args"] = kernel_inputs.mod_args_gradient(given, operands, tiles.PADDING, dvalues)
    return kernel_inputs.matched(operands, grads)


def _kernels_by_key(
    options: KernelOptions, names: frozenset[str], saved: Saved, with_columns: bool
) -> list[frozenset[str]]:
    """Lists what each kernel by tiles of keys makes: of `names`, dk and dv, and of sums over queries."""
    # the accumulators of dk and dv fit the registers together up to H = 128
    crowded = options.dropout_rate and options.score_mod is not None  # whose terms take some of them
    together = saved.head <= (64 if crowded else 128)
    parts = [names] if together else [frozenset({name}) for name in sorted(names)]
    if with_columns:
        # beside dk the query heads of a group are added up; what differs from head to head is not to be
        values = [x for x in saved.refs.score_values if x.dtype == jnp.float32 and x.shape[-1] != 1]
        shared = saved.refs.q.shape[2] == saved.refs.k.shape[2] or all(x.shape[1] == 1 for x in values)
        beside = "key" if shared else None
        parts = [part | {"columns"} if beside in part else part for part in parts]
        if not any("columns" in part for part in parts):
            parts.append(frozenset({"columns"}))
    return [part for part in parts if part]


def _value_gradients(sides: list[int], made: dict[str, Any]) -> list[jax.Array]:
    """Lists the gradient of each float that the score is handed, `[B, N, T|1, S|1]`, from sums of kernels."""
    lines = lambda name: iter(
        [made[name][:, :, i] for i in range(made[name].shape[2])] if name in made else []
    )
    rows, columns = lines("rows"), lines("columns")
    return [next(columns)[..., None, :] if side else next(rows)[..., None] for side in sides]


def _prepare(options, residuals, dout, dlse, keys) -> tuple[Saved, jax.Array | None]:
    """Prepares the inputs of the kernels, and computes the gradient of the sink."""
    values = kernel_inputs.row_values(options, residuals, dout, dlse)
    refs = tiles.inputs(options, residuals.operands._replace(query=values.query), keys)
    rows, dout = kernel_inputs.saved_rows(options, refs, values, tiles.PADDING)
    return Saved(refs, dout, jnp.stack(rows, -2)), values.dsink


def _bias_gradient(options, interpret, saved: Saved, operands: Operands) -> jax.Array:
    """Sums dlogits to the shape of the bias, float32: never more than that is stored."""
    assert operands.bias is not None  # its gradient is asked for
    (*batch, T, _, _), S = operands.query.shape, operands.key.shape[-3]
    shape = (1,) * (len(batch) + 3 - operands.bias.ndim) + operands.bias.shape
    if shape[-2] != 1 and shape[-1] != 1:
        dbias = by_query.bias_gradient(options, interpret, saved)[..., :T, :S]
    elif shape[-1] != 1:
        dbias = by_key.key_gradients(options, interpret, saved, frozenset({"bias"}))["bias"][..., :S]
    else:
        sums = by_query.query_gradients(options, interpret, saved, frozenset({"bias"}))["bias"]
        dbias = sums[:, :, 0, :T, None]
    return kernel_inputs.bias_gradient(dbias, operands)
