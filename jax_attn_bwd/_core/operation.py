"""Makes an operator of its written rules, the same way for all: in reverse mode, in both, and in `shard_map`.

An operator writes four functions of what is static of a call (options, a plan) and of its operands, one
NamedTuple of arrays; `Operation` is their record. From it come the `jax.custom_vjp`, which tells the rules
what is differentiated, and the operation of both modes (`forward_mode`).
"""

from collections.abc import Callable, Hashable
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import checks, forward_mode
from jax_attn_bwd._core.forward_mode import decode_flags, encode_flags

Names = frozenset[str]


@dataclass(frozen=True)
class Operation:
    """Holds what is written for an operator; a cotangent or tangent of None is zero.

    `wanted` names what is differentiated, and `saved` is what backward and tangent read: of one structure,
    whatever is wanted (see `encode_flags`).
    """

    differentiable: tuple[str, ...]  # operands that the rules tell apart; () if they do the same for any
    primal: Callable[[Any, Any], Any]  # (static, operands) -> outputs, where nothing is differentiated
    forward: Callable[[Any, Any, Names], tuple[Any, Any]]  # (static, operands, wanted) -> (outputs, saved)
    backward: Callable[[Any, Any, Names, Any], Any]  # (static, saved, wanted, cotangents) -> of the operands
    tangent: Callable[[Any, Any, Any], Any]  # (static, saved, tangents) -> those of the outputs

    def runner(self, operator: str, both_modes: Any) -> Callable[[Hashable, Any], Any]:
        """Returns `(static, operands) -> outputs`, differentiable in reverse mode or in both.

        Raises:
          TypeError: `both_modes`, the call's argument `forward_mode`, is no bool.
          NotImplementedError: this JAX has no operations with both rules.
        """
        both_modes = checks.flag(operator, "forward_mode", both_modes)
        if both_modes:
            forward_mode.require(operator)
        run = self._run_in_both_modes if both_modes else self._run
        # Inside `jax.shard_map` JAX refuses rules with symbolic zeros unless a `jax.jit` is around them.
        if self.differentiable and jax.sharding.get_abstract_mesh().manual_axes:
            run = self._compiled[both_modes]
        return run if both_modes else _Remedy(operator)(run)

    @cached_property
    def _run(self) -> Any:
        run = jax.custom_vjp(self.primal, nondiff_argnums=(0,))
        run.defvjp(self._fwd, self._bwd, symbolic_zeros=bool(self.differentiable))
        return run

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        runs = self._run, self._run_in_both_modes
        return tuple(jax.jit(run, static_argnums=0, inline=True) for run in runs)  # type: ignore[return-value]

    def _fwd(self, static: Any, given: Any) -> tuple[Any, Any]:
        """Runs the forward rule; with symbolic zeros, each leaf of the operands says if it is perturbed."""
        is_wrapped = lambda x: hasattr(x, "perturbed")
        moves = lambda x: is_wrapped(x) and x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
        leaves = lambda name: jax.tree.leaves(getattr(given, name), is_leaf=is_wrapped)
        wanted = frozenset(name for name in self.differentiable if any(map(moves, leaves(name))))
        operands = jax.tree.map(lambda x: x.value if is_wrapped(x) else x, given, is_leaf=is_wrapped)
        outputs, saved = self.forward(static, operands, wanted)
        flags = [name in wanted for name in self.differentiable]
        return outputs, (saved, encode_flags(flags) if flags else None)

    def _bwd(self, static: Any, residuals: Any, cotangents: Any) -> tuple[Any]:
        """Runs the backward rule."""
        saved, flags = residuals
        found = () if flags is None else decode_flags(flags, len(self.differentiable))
        wanted = frozenset(compress(self.differentiable, found))
        cotangents = jax.tree.map(lambda x: None if isinstance(x, SymbolicZero) else x, cotangents)
        return (self.backward(static, saved, wanted, cotangents),)

    def _run_in_both_modes(self, static: Hashable, operands: Any) -> Any:
        args, tree = jax.tree.flatten(operands)
        outputs = jax.eval_shape(lambda operands: self.primal(static, operands), operands)
        types = tuple(jax.typeof(x) for x in args)
        rules = _FlatRules(self, static, tree, types, jax.tree.structure(outputs))
        # `checkify` does not look into an operation, but for NaN in such a power, which compiles to nothing.
        found = [
            lax.integer_pow(x, 1) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in forward_mode.run(rules, args)
        ]
        return jax.tree.unflatten(rules.out_tree, found)


class _Remedy(ContextDecorator):
    """Tells the remedy in the error of JAX, or of a package, that cannot take a `custom_vjp`."""

    def __init__(self, operator: str):
        self.operator = operator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind in (TypeError, NotImplementedError) and "custom_vjp" in str(error):
            remedy = "with forward_mode=True the call has a rule for forward mode, too"
            if remedy not in str(error):
                raise kind(f"{error}\n{self.operator}: {remedy}") from error


@dataclass(frozen=True)
class _Given:
    """An operand as JAX hands it to the forward rule of a `custom_vjp` with symbolic zeros."""

    value: Any
    perturbed: bool


@dataclass(frozen=True)
class _FlatRules:
    """The rules of an operation on the flat list of its arrays, as `forward_mode` takes them."""

    operation: Operation
    static: Hashable
    tree: Any
    types: tuple[Any, ...]
    out_tree: Any

    def out(self, args):
        return jax.tree.leaves(self.operation.primal(self.static, self.tree.unflatten(args)))

    def forward(self, moves, args):
        given = self.tree.unflatten(map(_Given, args, moves))
        outputs, residuals = self.operation._fwd(self.static, given)
        return jax.tree.leaves(outputs), residuals

    def backward(self, residuals, cotangents):
        if all(x is None for x in cotangents):
            return [None] * len(self.types)
        (found,) = self.operation._bwd(self.static, residuals, self.out_tree.unflatten(cotangents))
        # None in the place of a subtree is None for each of its leaves
        whole = self.tree.unflatten(self.types)
        spread = lambda x, below: jax.tree.map(lambda _: x, below) if x is None else x
        return self.tree.flatten_up_to(jax.tree.map(spread, found, whole, is_leaf=lambda x: x is None))

    def tangent(self, residuals, tangents):
        saved, _ = residuals
        found = self.operation.tangent(self.static, saved, self.tree.unflatten(tangents))
        return jax.tree.leaves(found)
