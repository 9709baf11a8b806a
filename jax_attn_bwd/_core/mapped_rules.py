"""Rules of an operation in both modes of differentiation, and the same rules mapped over an axis."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Flags = tuple[bool, ...]
Arrays = Sequence[Any]  # in those of tangents and cotangents None is zero


class Rules(Protocol):
    """An operation on a flat list of arrays. `jax.vmap` maps each of its rules."""

    def out(self, args: Arrays) -> list[Any]:
        """The outputs."""

    def forward(self, moves: Flags, args: Arrays) -> tuple[list[Any], Any]:
        """(outputs, residuals) for derivatives by the arguments that move."""

    def backward(self, residuals: Any, cotangents: Arrays) -> list[Any]:
        """The cotangents of the arguments; None for those that have none."""

    def tangent(self, residuals: Any, tangents: Arrays) -> list[Any]:
        """The tangents of the outputs."""


@dataclass(frozen=True)
class Mapped:
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

    def _own(self, args):
        return [x for x, dim in zip(args, self.dims, strict=True) if dim is not None]

    def _over_args(self, f, args):
        """`f(args)` of each entry; what they share is the same object in each."""
        shared = [x for x, dim in zip(args, self.dims, strict=True) if dim is None]
        which = [dim is not None for dim in self.dims]
        one = lambda own: f(merged(which, own, shared))
        return self._map(one, (self._own(self.dims),))(self._own(args))

    @property
    def num_outputs(self):
        """The number of outputs before those that are residuals."""
        return getattr(self.of, "num_outputs", None)

    def out_dims(self, args):
        """The axis of each output."""
        found: list[Any] = []

        def one(args):
            found[:] = self._apart(self.of.out(args), args)[0]
            return []

        jax.eval_shape(lambda *args: self._over_args(one, args), *args)
        return tuple(0 if own else None for own in found)

    def _apart(self, outputs, args):
        """(whether each of the outputs is an entry's own, those that are, the others)."""
        n = self.num_outputs
        own, rest = [True] * len(outputs[:n]), [] if n is None else outputs[n:]
        shared = [x for x, dim in zip(args, self.dims, strict=True) if dim is None]
        own += [not (_is_note(x) or any(x is y for y in shared)) for x in rest]
        others = [jnp.zeros(x.shape, x.dtype) if _is_note(x) else x for x in outputs]
        pick = lambda xs, mine: [x for x, is_own in zip(xs, own, strict=True) if is_own == mine]
        return own, pick(outputs, True), pick(others, False)

    def out(self, args):
        found: list[Any] = []

        def one(args):
            own, mine, others = self._apart(self.of.out(args), args)
            found[:] = own, others
            return mine

        mine = self._over_args(one, args)
        own, others = found
        return merged(own, mine, others)

    def forward(self, moves, args):
        shared = [x for x, dim in zip(args, self.dims, strict=True) if dim is None]
        found: dict[str, Any] = {}

        def one(args):
            outputs, residuals = self.of.forward(moves, args)
            own, mine, found["outputs"] = self._apart(outputs, args)
            leaves, tree = jax.tree.flatten(residuals)
            leaves = [jnp.zeros(x.shape, x.dtype) if _is_note(x) else x for x in leaves]
            mapped = tuple(not _is_note(x) and not any(x is y for y in shared) for x in leaves)
            found["static"] = own, Static((tree, mapped))
            found["shared"] = [x for x, here in zip(leaves, mapped, strict=True) if not here]
            return mine, [x for x, here in zip(leaves, mapped, strict=True) if here]

        mine, own_leaves = self._over_args(one, args)
        own, static = found["static"]
        outputs = merged(own, mine, found["outputs"])
        return outputs, (own_leaves, found["shared"], static, note(moves))

    def _with_residuals(self, f, residuals, numbers, axes):
        """`f(residuals, numbers)` of each entry."""
        own, shared, static, _ = residuals
        tree, mapped = static.value
        one = lambda own, numbers: f(tree.unflatten(merged(mapped, own, shared)), numbers)
        return self._map(one, (0, axes))(own, list(numbers))

    def backward(self, residuals, cotangents):
        moves = noted(residuals[-1], len(self.dims))

        def one(residuals, cotangents):
            found = self.of.backward(residuals, cotangents)
            return [x if moving else None for x, moving in zip(found, moves, strict=True)]

        found = self._with_residuals(one, residuals, cotangents[: self.num_outputs], 0)
        back = lambda x, dim: x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)
        return [None if x is None else back(x, dim) for x, dim in zip(found, self.dims, strict=True)]

    def tangent(self, residuals, tangents):
        return self._with_residuals(self.of.tangent, residuals, tangents, list(self.dims))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    value: Hashable


def note(moves: Sequence[bool]) -> jax.Array:
    """Flags as the shape of an array; `backend.note` says why."""
    return jnp.zeros((sum(1 << i for i, moving in enumerate(moves) if moving), 0), jnp.int8)


def _is_note(x: jax.Array) -> bool:
    """Whether an array has no elements: it is its shape that tells something."""
    return any(isinstance(n, int) and n == 0 for n in x.shape)


def noted(note: jax.Array, n: int) -> Flags:
    return tuple(bool(note.shape[0] >> i & 1) for i in range(n))


def merged(which: Sequence[bool], these: Arrays, others: Arrays) -> list[Any]:
    """The next of `these` in each place that is set, of `others` elsewhere."""
    own, rest = iter(these), iter(others)
    return [next(own) if here else next(rest) for here in which]
