"""Operators that are differentiable in both modes, by a written backward and a written tangent rule.

A `jax.custom_vjp` refuses forward mode, and a `jax.custom_jvp` has no backward of its own. An operation of
`jax.experimental.hijax` holds both rules: reverse mode runs the written forward and backward, with the
residuals of the custom_vjp. Forward mode runs two operations,

    outputs, residuals = forward(x)                  `_Forward`
    tangents of outputs = J(x) t                     `_Tangent`, from the residuals

so that JAX can tell what is known without tangents (`jax.checkpoint` differentiates forward mode and then
transposes it, which is where the written backward stands). Derivatives of derivatives need no further rules:
with a cotangent c, and since second derivatives commute, of J(x) t

    the cotangent of t is  J(x)^T c                                    the written backward
    the cotangent of x is  d/de J(x + e t)^T c  at e = 0               its derivative along t

which keeps as little as forward mode of the backward does. Residuals follow from x: they have no derivatives
of their own. What differs between versions of JAX stays in this file.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core.closed_rules import Closed
from jax_attn_bwd._core.mapped_rules import Arrays, Flags, Mapped, Rules, Static, note, noted

try:
    from jax.experimental import hijax
except ImportError:  # pragma: no cover
    hijax = None  # type: ignore[assignment]

_BASE: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
# Inside `jax.shard_map`; JAX 0.10.2 does not, and takes them as arguments.
_LOWERS_CONSTANTS = hasattr(hijax, "HiPrim")


@dataclass(frozen=True)
class Rule:
    """What is written for an operator; `static` and `operands` are those of its `jax.custom_vjp`.

    Attributes:
      primal: `(static, *operands) -> outputs`.
      forward, backward: as `defvjp(..., symbolic_zeros=True)` of the custom_vjp takes them.
      tangent: `(static, residuals, tangents) -> tangents of the outputs`; `tangents` is as the tuple of
        operands, with None in the place of what is zero.
    """

    primal: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    tangent: Callable[..., Any]


def both_modes(rule: Rule) -> Callable[..., Any]:
    """`(static, *operands) -> outputs`, differentiable in both modes by `rule`."""

    def call(static: Hashable, *operands: Any) -> Any:
        args, tree = jax.tree.flatten(operands)
        outputs = jax.eval_shape(lambda *operands: rule.primal(static, *operands), *operands)
        types = tuple(jax.typeof(x) for x in args)
        written = _Written(rule, static, tree, types, jax.tree.structure(outputs))
        return jax.tree.unflatten(written.out_tree, _run(written, args))

    return call


def require(operator: str) -> None:
    """Refuses where this JAX has no operations with both rules."""
    if _BASE is None:
        raise NotImplementedError(
            f"{operator}: forward_mode=True needs HiPrim or VJPHiPrimitive of jax.experimental.hijax, which"
            f" JAX {jax.__version__} does not have; use JAX 0.10.2 to 0.12, or leave forward_mode False"
        )


@dataclass(frozen=True)
class _Given:
    """An operand as `backend.perturbed` takes it."""

    value: Any
    perturbed: bool


@dataclass(frozen=True)
class _Written:
    """An operator, by its `Rule`."""

    rule: Rule
    static: Hashable
    tree: Any
    types: tuple[Any, ...]
    out_tree: Any

    def out(self, args):
        return jax.tree.leaves(self.rule.primal(self.static, *self.tree.unflatten(args)))

    def forward(self, moves, args):
        given = map(_Given, args, moves)
        outputs, residuals = self.rule.forward(self.static, *self.tree.unflatten(given))
        return jax.tree.leaves(outputs), residuals

    def backward(self, residuals, cotangents):
        if all(x is None for x in cotangents):
            return [None] * len(self.types)
        given = [SymbolicZero(None) if x is None else x for x in cotangents]
        found = self.rule.backward(self.static, residuals, self.out_tree.unflatten(given))
        whole = self.tree.unflatten(self.types)
        spread = lambda x, below: jax.tree.map(lambda _: x, below) if x is None else x
        return self.tree.flatten_up_to(jax.tree.map(spread, found, whole, is_leaf=lambda x: x is None))

    def tangent(self, residuals, tangents):
        return jax.tree.leaves(self.rule.tangent(self.static, residuals, self.tree.unflatten(tangents)))


@dataclass(frozen=True)
class _Forward:
    """`args -> (outputs, leaves of the residuals)`, for derivatives of `of` by the arguments that move."""

    of: Rules
    moves: Flags
    num_outputs: int

    def out(self, args):
        outputs, residuals = self.of.forward(self.moves, args)
        return [*outputs, *jax.tree.leaves(residuals)]

    def forward(self, moves, args):
        return self.out(args), self.of.forward(moves, args)[1]

    def backward(self, residuals, cotangents):
        return self.of.backward(residuals, cotangents[: self.num_outputs])

    def tangent(self, residuals, tangents):
        return self.of.tangent(residuals, tangents)  # the rest is zero


@dataclass(frozen=True)
class _Tangent:
    """`(args, leaves of the residuals, tangents that are not zero) -> tangents of the outputs`."""

    of: Rules
    moves: Flags
    tree: Any  # of the residuals

    def _split(self, given):
        """(args or what belongs to them, leaves of residuals, tangents with None for zero)."""
        n, m = len(self.moves), self.tree.num_leaves
        return given[:n], given[n : n + m], _filled(self.moves, given[n + m :])

    def out(self, args):
        _, leaves, tangents = self._split(args)
        return self.of.tangent(self.tree.unflatten(leaves), tangents)

    def forward(self, moves, args):
        return _run(self, args), (tuple(args), note(moves))

    def backward(self, residuals, cotangents):
        given, note = residuals
        args, leaves, tangents = self._split(given)
        by_args, by_leaves, by_tangents = self._split(noted(note, len(given)))
        if any(by_args):
            asked = tuple(bool(x or y) for x, y in zip(by_args, by_tangents, strict=True))
            transposed = lambda args: self.of.backward(self.of.forward(asked, args)[1], cotangents)
            value, derivative = _along(transposed, args, tangents)
            value = [x for x, moving in zip(value, self.moves, strict=True) if moving]
        else:
            derivative, seen = [None] * len(args), tuple(x is not None for x in cotangents)
            there = [x for x in cotangents if x is not None]
            value = _run(_Transposed(self.of, self.moves, self.tree, seen), [*args, *leaves, *there])
        return [*derivative, *(None for _ in by_leaves), *value]

    def tangent(self, residuals, tangents):
        args, _, along = self._split(residuals[0])
        args_move, _, along_move = self._split(tangents)
        first = lambda along: lambda args: self.of.tangent(self.of.forward(self.moves, args)[1], along)
        return _sum_of_derivatives(first, args, args_move, along, along_move)


@dataclass(frozen=True)
class _Transposed:
    """`(args, leaves of the residuals, cotangents that are not zero) -> those of args`: J(x)^T c."""

    of: Rules
    moves: Flags
    tree: Any  # of the residuals
    seen: Flags

    def _split(self, given):
        """(args or what belongs to them, leaves of residuals, cotangents with None for zero)."""
        n, m = len(self.moves), self.tree.num_leaves
        return given[:n], given[n : n + m], _filled(self.seen, given[n + m :])

    def _moving(self, args, found):
        filled = [_zero(jax.typeof(arg)) if x is None else x for x, arg in zip(found, args, strict=True)]
        return [x for x, moving in zip(filled, self.moves, strict=True) if moving]

    def out(self, args):
        args, leaves, cotangents = self._split(args)
        return self._moving(args, self.of.backward(self.tree.unflatten(leaves), cotangents))

    def forward(self, moves, args):
        return _run(self, args), (tuple(args), note(moves))

    def backward(self, residuals, cotangents):
        given, note = residuals
        args, leaves, seen = self._split(given)
        by_args, by_leaves, by_cotangents = self._split(noted(note, len(given)))
        directions = _filled(self.moves, cotangents)
        moves = tuple(x is not None for x in directions)
        found, along = [None] * len(args), [None] * sum(self.seen)
        if any(by_cotangents):
            there = [x for x in directions if x is not None]
            along = _run(_Tangent(self.of, moves, self.tree), [*args, *leaves, *there])
            along = [x for x, here in zip(along, self.seen, strict=True) if here]
        if any(by_args):
            transposed = lambda args: self.of.backward(self.of.forward(tuple(by_args), args)[1], seen)
            found = _along(transposed, args, directions)[1]
        return [*found, *(None for _ in by_leaves), *along]

    def tangent(self, residuals, tangents):
        args, _, seen = self._split(residuals[0])
        args_move, _, seen_move = self._split(tangents)
        back = lambda seen: (
            lambda args: self._moving(args, self.of.backward(self.of.forward(self.moves, args)[1], seen))
        )
        return _sum_of_derivatives(back, args, args_move, seen, seen_move)


def _filled(which: Flags, given: Arrays) -> list[Any]:
    """The next of `given` in each place that is set, None elsewhere."""
    rest = iter(given)
    return [next(rest) if here else None for here in which]


def _along(f: Callable[[list], list], args: Arrays, tangents: Arrays) -> tuple[list[Any], list[Any]]:
    """`f(args)`, a list that may hold None, and its derivative along the tangents, by JAX."""
    moves = tuple(t is not None for t in tangents)
    pick = lambda xs: tuple(x for x, moving in zip(xs, moves, strict=True) if moving)

    def run(*moving):
        filled = _filled(moves, moving)
        return f([x if t is None else t for x, t in zip(args, filled, strict=True)])

    return jax.jvp(run, pick(args), pick(tangents))


def _sum_of_derivatives(f: Any, args: Arrays, args_move: Arrays, rest: Arrays, rest_move: Arrays) -> list:
    """The derivative of `f(rest)(args)`, which is linear in `rest`, along tangents of both."""
    found = []
    if any(x is not None for x in rest_move):
        found.append(f(rest_move)(args))
    if any(x is not None for x in args_move):
        found.append(_along(f(rest), args, args_move)[1])
    return [sum(terms[1:], start=terms[0]) for terms in zip(*found, strict=True)]


def _run(rules: Rules, args: Arrays) -> list[Any]:
    """The outputs of an operation with these rules."""
    program = jax.make_jaxpr(lambda *args: rules.out(args))(*args)
    if program.consts and not _LOWERS_CONSTANTS:
        rules, args = Closed(rules, len(args)), [*args, *program.consts]
    return list(_Operation(rules, tuple(jax.typeof(x) for x in args), tuple(program.out_avals))(*args))


def _zero(kind: Any) -> jax.Array:
    """Zeros of the type of tangents of `kind`."""
    return hijax.instantiate_zeros(hijax.Zero(kind.to_tangent_aval()))


def _zeros_as_none(xs: Sequence[Any]) -> list[Any]:
    return [None if isinstance(x, hijax.Zero) else x for x in xs]


class _Operation(_BASE or object):  # type: ignore[misc]
    """One application of `rules`, as JAX sees it."""

    skip_linearization_on_zero_tangents = True

    def __init__(self, rules: Rules, types: tuple[Any, ...], out_types: tuple[Any, ...]):
        self.in_avals, self.out_aval = types, out_types
        self.params = {"rules": rules, "types": types, "out_types": out_types}
        super().__init__()

    def expand(self, *args):
        return tuple(self.rules.out(args))

    def vjp_fwd(self, moves, /, *args):
        outputs, residuals = self.rules.forward(tuple(moves), args)
        return tuple(outputs), residuals

    def vjp_bwd_retval(self, residuals, cotangents, /):
        found = self.rules.backward(residuals, _zeros_as_none(cotangents))
        zero = lambda x, kind: hijax.Zero(kind.to_ct_aval()) if x is None else x
        return tuple(map(zero, found, self.in_avals))

    def _linearized(self, moves, args):
        """(outputs, `tangents -> those of the outputs`, with None for zeros)."""
        n, found = len(self.out_aval), {}

        def forward(*args):
            outputs, residuals = self.rules.forward(moves, args)
            found["tree"] = jax.tree.structure(residuals)
            return outputs

        jax.eval_shape(forward, *args)
        outputs = _run(_Forward(self.rules, moves, n), args)
        return outputs[:n], (outputs[n:], found["tree"])

    def jvp(self, primals, tangents):
        moves = tuple(not isinstance(t, hijax.Zero) for t in tangents)
        outputs, (leaves, tree) = self._linearized(moves, primals)
        return tuple(outputs), self.linearized((primals, leaves, Static((moves, tree))), *tangents)

    def lin(self, moves, *args):
        moves = tuple(moves)
        outputs, (leaves, tree) = self._linearized(moves, args)
        return tuple(outputs), (args, leaves, Static((moves, tree)))

    def linearized(self, residuals, *tangents):
        args, leaves, static = residuals
        moves, tree = static.value
        along = []
        if any(moves):
            moving = [hijax.instantiate_zeros(t) for t, m in zip(tangents, moves, strict=True) if m]
            along = _run(_Tangent(self.rules, moves, tree), [*args, *leaves, *moving])
        rest = self.out_aval[len(along) :]
        return (*along, *(hijax.Zero(kind.to_tangent_aval()) for kind in rest))

    def transpose(self, cotangents, *args):
        moves = tuple(hasattr(x, "accum") for x in args)
        filled = [_zero(kind) if m else x for x, m, kind in zip(args, moves, self.in_avals, strict=True)]
        residuals = self.rules.forward(moves, filled)[1]
        found = self.rules.backward(residuals, _zeros_as_none(cotangents))
        for x, moving, ct in zip(args, moves, found, strict=True):
            if moving and ct is not None:
                x.accum(ct)

    def batch(self, axis, args, dims):
        if all(dim is None for dim in dims):
            return self(*args), tuple(None for _ in self.out_aval)
        names = (axis.name, axis.spmd_name or axis.explicit_mesh_axis)
        mapped = Mapped(self.rules, tuple(dims), axis.size, *names)
        return tuple(_run(mapped, args)), mapped.out_dims(args)
