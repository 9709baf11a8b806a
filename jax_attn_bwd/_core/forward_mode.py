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
from typing import Any, Protocol

import jax
import jax.numpy as jnp

try:
    from jax.experimental import hijax
except ImportError:  # pragma: no cover
    hijax = None  # type: ignore[assignment]

_BASE: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
# Inside `jax.shard_map`; JAX 0.10.2 does not, and takes them as arguments.
_LOWERS_CONSTANTS = hasattr(hijax, "HiPrim")


Flags = tuple[bool, ...]
Arrays = Sequence[Any]  # in those of tangents and cotangents None is zero


class Rules(Protocol):
    """An operation on a flat list of arrays. `jax.vmap` maps each of its rules."""

    def out(self, args: Arrays) -> list[Any]:
        """Returns the outputs."""

    def forward(self, moves: Flags, args: Arrays) -> tuple[list[Any], Any]:
        """Returns (outputs, residuals) for derivatives by the arguments that move."""

    def backward(self, residuals: Any, cotangents: Arrays) -> list[Any]:
        """Returns the cotangents of the arguments; None for those that have none."""

    def tangent(self, residuals: Any, tangents: Arrays) -> list[Any]:
        """Returns the tangents of the outputs."""


def require(operator: str) -> None:
    """Refuses where this JAX has no operations with both rules."""
    if _BASE is None:
        raise NotImplementedError(
            f"{operator}: forward_mode=True needs HiPrim or VJPHiPrimitive of jax.experimental.hijax, which"
            f" JAX {jax.__version__} does not have; use JAX 0.10.2 to 0.12, or leave forward_mode False"
        )


def encode_flags(flags: Sequence[bool]) -> jax.Array:
    """Returns flags as the shape of an array without elements, for a rule's residuals.

    JAX keeps one tree structure of residuals for each call in a jitted function, that of the last forward it
    traced. A structure that tells what is differentiated is then that of another derivative: where the first
    was of all operands and the last of one, gradients of the others come out as 0, silently.
    """
    return jnp.zeros((sum(1 << i for i, is_set in enumerate(flags) if is_set), 0), jnp.int8)


def decode_flags(encoded: jax.Array, n: int) -> Flags:
    """Returns the n flags that `encode_flags` was given."""
    return tuple(bool(encoded.shape[0] >> i & 1) for i in range(n))


def run(rules: Rules, args: Arrays) -> list[Any]:
    """Returns the outputs of an operation with these rules."""
    program = jax.make_jaxpr(lambda *args: rules.out(args))(*args)
    if program.consts and not _LOWERS_CONSTANTS:
        rules, args = _Closed(rules, len(args)), [*args, *program.consts]
    return list(_Application(rules, tuple(jax.typeof(x) for x in args), tuple(program.out_avals))(*args))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    value: Hashable


def _zero(kind: Any) -> jax.Array:
    """Returns zeros of the type of tangents of `kind`."""
    return hijax.instantiate_zeros(hijax.Zero(kind.to_tangent_aval()))


def _zeros_as_none(xs: Sequence[Any]) -> list[Any]:
    return [None if isinstance(x, hijax.Zero) else x for x in xs]


class _Application(_BASE or object):  # type: ignore[misc]
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

    def jvp(self, primals, tangents):
        moves = tuple(not isinstance(t, hijax.Zero) for t in tangents)
        outputs, residuals = self.lin(moves, *primals)
        return outputs, self.linearized(residuals, *tangents)

    def lin(self, moves, *args):
        moves, n, trees = tuple(moves), len(self.out_aval), []

        def forward(*args):
            outputs, residuals = self.rules.forward(moves, args)
            trees.append(jax.tree.structure(residuals))
            return outputs

        jax.eval_shape(forward, *args)
        outputs = run(_Forward(self.rules, moves, n), args)
        return tuple(outputs[:n]), (args, outputs[n:], _Static((moves, trees[0])))

    def linearized(self, residuals, *tangents):
        args, leaves, static = residuals
        moves, tree = static.value
        found = []
        if any(moves):
            moving = [hijax.instantiate_zeros(t) for t, m in zip(tangents, moves, strict=True) if m]
            found = run(_Tangent(self.rules, moves, tree), [*args, *leaves, *moving])
        rest = self.out_aval[len(found) :]  # the leaves of residuals, where `rules` are those of `_Forward`
        return (*found, *(hijax.Zero(kind.to_tangent_aval()) for kind in rest))

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
        mapped = _Mapped(self.rules, tuple(dims), axis.size, *names)
        return tuple(run(mapped, args)), mapped.out_dims(args)


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
class _Linear:
    """An operation `(args, leaves of the residuals, numbers) -> ...` that is linear in the numbers."""

    of: Rules
    moves: Flags  # which args have tangents
    tree: Any  # of the residuals

    @property
    def given(self) -> Flags:
        """Tells which of the numbers are handed over; the others are zero."""
        return self.moves

    def _split(self, given):
        """Returns (args or what belongs to them, leaves of residuals, numbers with None for zero)."""
        n, m = len(self.moves), self.tree.num_leaves
        return given[:n], given[n : n + m], _filled(self.given, given[n + m :])

    def out(self, args):
        args, leaves, numbers = self._split(args)
        return self.product(args, self.tree.unflatten(leaves), numbers)

    def forward(self, moves, args):
        return run(self, args), (tuple(args), encode_flags(moves))

    def tangent(self, residuals, tangents):
        args, _, numbers = self._split(residuals[0])
        args_move, _, numbers_move = self._split(tangents)
        at = lambda numbers: lambda args: self.product(args, self.of.forward(self.moves, args)[1], numbers)
        # the product is linear in the numbers, and differentiated by JAX along args
        found = []
        if any(x is not None for x in numbers_move):
            found.append(at(numbers_move)(args))
        if any(x is not None for x in args_move):
            found.append(_value_and_tangent(at(numbers), args, args_move)[1])
        return [sum(terms[1:], start=terms[0]) for terms in zip(*found, strict=True)]


@dataclass(frozen=True)
class _Tangent(_Linear):
    """`(args, leaves of the residuals, tangents that are not zero) -> tangents of the outputs`: J(x) t."""

    def product(self, args, residuals, tangents):
        return self.of.tangent(residuals, tangents)

    def backward(self, residuals, cotangents):
        given, flags = residuals
        args, leaves, tangents = self._split(given)
        by_args, by_leaves, by_tangents = self._split(decode_flags(flags, len(given)))
        if any(by_args):
            # of args: the derivative of J(x)^T c along the tangents; the value beside it is that of tangents
            asked = tuple(bool(x or y) for x, y in zip(by_args, by_tangents, strict=True))
            transposed = lambda args: self.of.backward(self.of.forward(asked, args)[1], cotangents)
            value, derivative = _value_and_tangent(transposed, args, tangents)
            value = [x for x, moving in zip(value, self.moves, strict=True) if moving]
        else:
            derivative, seen = [None] * len(args), tuple(x is not None for x in cotangents)
            there = [x for x in cotangents if x is not None]
            value = run(_Transposed(self.of, self.moves, self.tree, seen), [*args, *leaves, *there])
        return [*derivative, *(None for _ in by_leaves), *value]


@dataclass(frozen=True)
class _Transposed(_Linear):
    """`(args, leaves of the residuals, cotangents that are not zero) -> those of args`: J(x)^T c."""

    seen: Flags  # which outputs have cotangents

    @property
    def given(self):
        return self.seen

    def product(self, args, residuals, cotangents):
        found = zip(self.of.backward(residuals, cotangents), args, self.moves, strict=True)
        return [_zero(jax.typeof(arg)) if x is None else x for x, arg, moving in found if moving]

    def backward(self, residuals, cotangents):
        given, flags = residuals
        args, leaves, seen = self._split(given)
        by_args, by_leaves, by_seen = self._split(decode_flags(flags, len(given)))
        directions = _filled(self.moves, cotangents)
        of_args, of_seen = [None] * len(args), [None] * sum(self.seen)
        # of the cotangents c: J(x) times what comes back
        if any(by_seen):
            moves = tuple(x is not None for x in directions)
            there = [x for x in directions if x is not None]
            tangents = run(_Tangent(self.of, moves, self.tree), [*args, *leaves, *there])
            of_seen = [x for x, here in zip(tangents, self.seen, strict=True) if here]
        # of args: the derivative of J(x)^T c along what comes back
        if any(by_args):
            transposed = lambda args: self.of.backward(self.of.forward(tuple(by_args), args)[1], seen)
            of_args = _value_and_tangent(transposed, args, directions)[1]
        return [*of_args, *(None for _ in by_leaves), *of_seen]


def _filled(which: Flags, given: Arrays) -> list[Any]:
    """Returns the next of `given` in each place that is set, None elsewhere."""
    return _merged(which, given, [None] * len(which))


def _value_and_tangent(
    f: Callable[[list], list], args: Arrays, tangents: Arrays
) -> tuple[list[Any], list[Any]]:
    """Returns `f(args)`, a list that may hold None, and its derivative along the tangents, by JAX."""
    moves = tuple(t is not None for t in tangents)
    pick = lambda xs: tuple(x for x, moving in zip(xs, moves, strict=True) if moving)

    def run(*moving):
        filled = _filled(moves, moving)
        return f([x if t is None else t for x, t in zip(args, filled, strict=True)])

    return jax.jvp(run, pick(args), pick(tangents))


@dataclass(frozen=True)
class _Closed:
    """`of`, with the array constants of its program behind its `n` arguments; they have no derivatives."""

    of: Rules
    n: int

    def out(self, args):
        given, constants = args[: self.n], args[self.n :]
        program = jax.make_jaxpr(lambda *args: self.of.out(args))(*given)
        return jax.core.eval_jaxpr(program.jaxpr, constants, *given)

    def forward(self, moves, args):
        outputs, residuals = self.of.forward(moves[: self.n], args[: self.n])
        return outputs, (residuals, [None] * (len(args) - self.n))

    def backward(self, residuals, cotangents):
        residuals, nothing = residuals
        return [*self.of.backward(residuals, cotangents), *nothing]

    def tangent(self, residuals, tangents):
        return self.of.tangent(residuals[0], tangents[: self.n])


@dataclass(frozen=True)
class _Mapped:
    """`of`, mapped over the axes `dims` of its arguments (None: shared); that of outputs is the first.

    Residuals that are arguments which all entries share, or have no elements, are shared in turn.
    """

    of: Rules
    dims: tuple[int | None, ...]
    size: int
    name: Any
    spmd_name: Any

    def _map(self, f, in_axes):
        options = {"axis_size": self.size, "axis_name": self.name, "spmd_axis_name": self.spmd_name}
        return jax.vmap(f, in_axes=in_axes, **options)

    def _over_args(self, f, args):
        """Returns `f(args)` of each entry; what they share is the same object in each."""
        which = [dim is not None for dim in self.dims]
        own = lambda xs: [x for x, here in zip(xs, which, strict=True) if here]
        one = lambda given: f(_merged(which, given, self._shared(args)))
        return self._map(one, (own(self.dims),))(own(args))

    def _shared(self, args):
        return [x for x, dim in zip(args, self.dims, strict=True) if dim is None]

    @property
    def num_outputs(self):
        """Returns the number of outputs before those that are residuals."""
        return getattr(self.of, "num_outputs", None)

    def out_dims(self, args):
        """Returns the axis of each output."""
        found: list[Any] = []

        def one(args):
            found[:] = self._apart(self.of.out(args), args, self.num_outputs)[0]
            return []

        jax.eval_shape(lambda *args: self._over_args(one, args), *args)
        return tuple(0 if own else None for own in found)

    def _apart(self, found, args, n):
        """Returns (which of `found` are an entry's own, as the first n are, those, the others)."""
        own, rest = [True] * len(found[:n]), [] if n is None else found[n:]
        shared = self._shared(args)
        own += [not (_is_empty(x) or any(x is y for y in shared)) for x in rest]
        others = [jnp.zeros(x.shape, x.dtype) if _is_empty(x) else x for x in found]
        pick = lambda xs, mine: [x for x, is_own in zip(xs, own, strict=True) if is_own == mine]
        return own, pick(found, True), pick(others, False)

    def out(self, args):
        found: list[Any] = []

        def one(args):
            own, mine, others = self._apart(self.of.out(args), args, self.num_outputs)
            found[:] = own, others
            return mine

        mine = self._over_args(one, args)
        own, others = found
        return _merged(own, mine, others)

    def forward(self, moves, args):
        found: list[Any] = []

        def one(args):
            outputs, residuals = self.of.forward(moves, args)
            own, mine, others = self._apart(outputs, args, self.num_outputs)
            leaves, tree = jax.tree.flatten(residuals)
            mapped, own_leaves, shared = self._apart(leaves, args, 0)
            found[:] = own, others, shared, _Static((tree, tuple(mapped)))
            return mine, own_leaves

        mine, own_leaves = self._over_args(one, args)
        own, others, shared, static = found
        return _merged(own, mine, others), (own_leaves, shared, static, encode_flags(moves))

    def _with_residuals(self, f, residuals, numbers, axes):
        """Returns `f(residuals, numbers)` of each entry."""
        own, shared, static, _ = residuals
        tree, mapped = static.value
        one = lambda own, numbers: f(tree.unflatten(_merged(mapped, own, shared)), numbers)
        return self._map(one, (0, axes))(own, list(numbers))

    def backward(self, residuals, cotangents):
        moves = decode_flags(residuals[-1], len(self.dims))

        def one(residuals, cotangents):
            found = self.of.backward(residuals, cotangents)
            return [x if moving else None for x, moving in zip(found, moves, strict=True)]

        found = self._with_residuals(one, residuals, cotangents[: self.num_outputs], 0)
        back = lambda x, dim: x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)
        return [None if x is None else back(x, dim) for x, dim in zip(found, self.dims, strict=True)]

    def tangent(self, residuals, tangents):
        return self._with_residuals(self.of.tangent, residuals, tangents, list(self.dims))


def _is_empty(x: jax.Array) -> bool:
    """Tells whether an array has no elements: it is its shape that tells something."""
    return any(isinstance(n, int) and n == 0 for n in x.shape)


def _merged(which: Sequence[bool], these: Arrays, others: Arrays) -> list[Any]:
    """Returns the next of `these` in each place that is set, of `others` elsewhere."""
    own, rest = iter(these), iter(others)
    return [next(own) if here else next(rest) for here in which]
