"""Leaves the gradients of the kernels to JAX, which takes them over all that `jax.vmap` maps at once.

Mapped over, the rule of a `jax.custom_vjp` has a gradient of each operand for each member, and JAX adds them
where the operand is not mapped. Of a kernel that all sequences share, as in Equinox, that is one [E, N, H]
for each sequence, where a single product over the rows of all will do. JAX takes that product where it
transposes x W itself. So the rule takes zeros beside x W, whose cotangent is that of x W, and returns the a
of a W_o; and these tangents lead on to the kernels:

    d(x W) = x dW,   d(a W_o) = a dW_o                                                                  (21)
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.products import einsum
from jax_attn_bwd._core.sharding import explicit_mesh, tie
from jax_attn_bwd.ops.multi_head.plan import Plan
from jax_attn_bwd.ops.multi_head.projections import output_factors, without_poison
from jax_attn_bwd.ops.multi_head.spec import INPUTS, Operands, Options

KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")


def may_move(operands: Operands) -> bool:
    """Tells whether a kernel may be differentiated: one that no transformation traces is not."""
    return any(isinstance(getattr(operands, name), jax.core.Tracer) for name in KERNELS)


def apart(plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
    """Returns the plan and the operands of a call whose rule leaves the kernels to (21)."""
    options = replace(plan.options, kernels_apart=True)
    return replace(plan, options=options), operands._replace(**zeros(options, operands))


def zeros(options: Options, operands: Operands) -> dict[str, Any]:
    """Returns zeros like each x W, by name, that move as it does with W."""
    kernels = {name: getattr(operands, f"{name}_kernel") for name in INPUTS}
    return {
        f"{name}_product": _zeros_like_product((options, name), operands, kernel)
        for name, kernel in kernels.items()
        if kernel is not None
    }


def moved_by_out_kernel(options: Options, operands: Operands, out: jax.Array, a: jax.Array) -> jax.Array:
    """Returns `out`, which moves as a W_o does with W_o."""
    if operands.out_kernel is None:
        return out
    _, live = without_poison(options, operands)
    return _moved(options, out, a, operands.out_kernel, live, operands.dropout_words, operands.dropout_offset)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _zeros_like_product(of: tuple[Options, str], operands: Operands, kernel: jax.Array) -> jax.Array:
    return _zeros(of, operands, kernel)


@partial(jax.jit, static_argnums=(0,))
def _zeros(of: tuple[Options, str], operands: Operands, kernel: jax.Array) -> jax.Array:
    found = jnp.zeros_like(jax.eval_shape(partial(_product_of, of), operands, kernel))
    return tie(found, (operands, kernel))


def _zeros_like_product_jvp(of, primals, tangents):
    (operands, kernel), (_, dkernel) = primals, tangents
    found = _zeros_like_product(of, operands, kernel)
    if isinstance(dkernel, SymbolicZero):
        return found, SymbolicZero(jax.typeof(found))
    # in the backward, as the rule does: the operands are saved, and nothing that is made of them
    return found, jax.checkpoint(partial(_product_of, of), prevent_cse=False)(operands, dkernel)


def _product_of(of: tuple[Options, str], operands: Operands, kernel: jax.Array) -> jax.Array:
    options, name = of
    clean, _ = without_poison(options, fusion.computed_once(operands, INPUTS))
    return _product(options.precision, clean.inputs[INPUTS.index(name)], kernel)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _moved(options: Options, out, a, kernel, live, words, offset) -> jax.Array:
    return out


def _moved_jvp(options, primals, tangents):
    (out, a, _, live, words, offset), (dout, _, dkernel, *_) = primals, tangents
    if isinstance(dkernel, SymbolicZero):
        return out, dout

    def moved(a, live, words, offset, kernel):
        own = einsum("...nh,nho->...o", a, kernel, precision=options.precision)
        wide = own.astype(accumulator_dtype(own.dtype))
        factors = output_factors(options.out_dropout_rate, words, offset, wide)
        own = own if factors is None else (wide * factors).astype(own.dtype)
        if live is not None:  # where a = 0 because nothing is seen, the cotangent may be anything
            own = fusion.kept_whole(own, may_be_gathered=True)  # so that a cotangent is selected, then turned
            own = jnp.where(to_rank(live, own.ndim - 1)[..., None], own, 0)
        return own

    own = jax.checkpoint(moved, prevent_cse=False)(a, live, words, offset, dkernel)  # draws factors anew
    return out, own if isinstance(dout, SymbolicZero) else dout + own


_zeros_like_product.defjvp(_zeros_like_product_jvp, symbolic_zeros=True)
_moved.defjvp(_moved_jvp, symbolic_zeros=True)


def _product(precision: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns x W. With few rows its gradient is the largest array: XLA turns none that is one matrix."""
    lead, (E, *heads) = x.shape[:-1], kernel.shape
    is_narrow, is_known = accumulator_dtype(x.dtype) != x.dtype, all(isinstance(n, int) for n in lead)
    if is_narrow or not is_known or math.prod(lead) > E or explicit_mesh((x, kernel)) is not None:
        return einsum("...e,enh->...nh", x, kernel, precision=precision)
    found = einsum("...e,en->...n", x, kernel.reshape(E, math.prod(heads)), precision=precision)
    return found.reshape(*lead, *heads)
