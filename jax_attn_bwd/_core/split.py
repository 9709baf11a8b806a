"""Runs a function piece by piece of its arrays, puts the results together and sums what the pieces share.

    results = [f(piece 0), f(piece 1), ...] joined,   sums = share of piece 0 + share of piece 1 + ...

An operator says by name which axis of each array is cut; every piece reads the other arrays whole. One
mechanism serves three reasons to cut, which differ only in who runs the pieces:

* In turn (`in_turn`): what one slice of a batch computes stays in the cache. `lax.scan` carries the sums.
* On devices, where an Explicit mesh tells how the rows lie: each device takes its own (`jax.shard_map`). A
  loop over tiles of rows on several devices would exchange something at every step. Over the tiles of a piece
  it exchanges nothing: what the rows share is gathered once before, and its shares are summed once after.
* Side by side, where an Auto mesh does not tell how the rows lie: there are as many pieces as devices, and
  they are one more batch axis (`jax.vmap`), which the partitioner splits as the rows are split, if they are.

`over_entries` maps a function that knows no batch over the entries of one; its caller sums what they share.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.sharding import (
    auto_devices,
    explicit_mesh,
    explicit_spec,
    mesh_axes_of,
    reshard_like,
    varying,
)

AXIS = "jax_attn_bwd_pieces"  # names the batch axis of pieces side by side

Arrays = dict[str, Any]  # name -> an array, a tree of arrays, or None
Axes = Mapping[str, Any]  # name -> the axis that is cut, or a tree of them; None, or no entry: it is shared


@dataclass(frozen=True)
class Pieces:
    """How many pieces there are, and who runs them.

    Attributes:
      count: number of pieces; divides the axes that are cut.
      mesh_axes: the Explicit mesh axes over which devices hold a piece each; without, they run side by side.
      folded: whether a piece, of those on devices, is two stretches of the axis: of 2n, piece i has 2i and
        2n - 1 - 2i, of which it gives one away for the other.
    """

    count: int
    mesh_axes: tuple[str, ...] = ()
    folded: bool = False

    def origins(self, index: Any, length: int) -> Any:
        """Returns where the stretches of piece `index` begin: int32 `[1]`, or `[2]` if folded."""
        xp = np if isinstance(index, int) else jnp
        if not self.folded:
            return xp.asarray([index * length], xp.int32)
        half = length // 2
        return xp.asarray([index * length, (2 * self.count - 1 - 2 * index) * half], xp.int32)


def pieces_for_rows(x: jax.Array, axis: int, batch: int) -> Pieces | None:
    """Returns the pieces into which devices cut the rows of `x`, its axis `axis`; None if they are not cut.

    Args:
      batch: product of the batch axes. A batch that fills an Auto mesh leaves no device to the rows.
    """
    if (names := explicit_spec(x)[axis]) is not None:
        names = (names,) if isinstance(names, str) else tuple(names)
        shape = jax.typeof(x).sharding.mesh.shape
        return Pieces(math.prod(shape[name] for name in names), names)
    devices, rows = auto_devices(x), x.shape[axis]
    if not isinstance(rows, int) or rows == 0 or not isinstance(batch, int) or batch % devices == 0:
        return None
    count = math.gcd(rows, devices)
    return Pieces(count) if count > 1 else None


class Place(NamedTuple):
    """Where a result of the pieces goes.

    Attributes:
      axis: the axis along which the pieces' results are joined; None: they are shares of a sum.
      spec: the mesh axes of the whole on an Explicit mesh.
    """

    axis: int | None
    spec: tuple = ()


def place(x: jax.Array, axis: int | None) -> Place:
    """Returns the place of a result that is sharded like `x`."""
    return Place(axis, explicit_spec(x))


SUM = Place(None)  # every device holds the whole sum


def over(
    pieces: Pieces,
    function: Callable[[jax.Array, Arrays], Arrays],
    arrays: Arrays,
    axes: Axes,
    results: dict[str, Place],
) -> Arrays:
    """Returns the results, by name, of `function(index of the piece, its arrays)` over all pieces.

    Args:
      pieces: how many there are, and who runs them.
      function: computes the results of one piece; on devices it sees the shards of all axes.
      arrays: what the function reads.
      axes: which axis of each array is cut.
      results: where each result goes.
    """
    axes = {name: axes.get(name) for name in arrays}
    if pieces.mesh_axes:
        return _on_devices(pieces, function, arrays, axes, results)
    index = jnp.arange(pieces.count, dtype=jnp.int32)
    return _side_by_side(pieces.folded, index, function, arrays, axes, results)


def in_turn(count: int, function: Callable[..., Any], arrays: Any, axes: Any) -> tuple[Any, Any]:
    """Returns what `lax.scan` takes to compute `function(*arrays)` piece by piece: a step, and the pieces.

    What is scanned with, zeros by name, are the sums of what the function gives by these names. Its other
    results come out one piece after the other: `joined` puts them together.

    Args:
      count: number of pieces; divides the axes that are cut.
      function: computes the results of one piece.
      arrays: what the function reads, a tree for each argument.
      axes: which axis of each array is cut; None: it is shared.
    """
    in_front = lambda axis, x: None if axis is None else jnp.moveaxis(_cut(x, axis, count), axis, 0)

    def step(sums, own):
        found = function(*_map(_own_or_shared, axes, arrays, own))
        if sums:
            found = dict(found)
            sums = jax.tree.map(jnp.add, sums, {name: found.pop(name) for name in sums})
        return sums, found

    return step, _map(in_front, axes, arrays)


def joined(found: Any) -> Any:
    """Puts the results of pieces in turn together, along the first axis of each piece."""
    return jax.tree.map(lambda x: _join(x, 0), found)


def _side_by_side(folded, index, function, arrays, axes, results):
    fold = lambda x, axis: _folded(x, axis + 1, partial(jnp.flip, axis=axis)) if folded else x
    in_pieces = lambda x, axis: fold(_cut(x, axis, index.shape[0]), axis)
    cut = _map(lambda axis, x: x if axis is None else in_pieces(x, axis), axes, arrays)
    out_axes = {name: place.axis or 0 for name, place in results.items()}
    found = jax.vmap(function, in_axes=(0, axes), out_axes=out_axes, axis_name=AXIS)(index, cut)
    whole = lambda axis, x: x.sum(0) if axis is None else _join(fold(x, axis), axis)
    return _map(whole, {name: results[name].axis for name in found}, found)


def _on_devices(pieces, function, arrays, axes, results):
    # arrays are cut along the axes of the pieces, and lie along their other axes as before
    mesh_axes, last = pieces.mesh_axes, pieces.count - 1
    mesh = explicit_mesh(arrays)
    assert mesh is not None  # it has the axes of the pieces
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}

    def spec_of(axis, spec):
        return PartitionSpec(*(mesh_axes if i == axis else entry for i, entry in enumerate(spec)))

    def laid(axis, x):
        return (
            x
            if axis is None
            else jax.sharding.reshard(x, NamedSharding(mesh, spec_of(axis, explicit_spec(x))))
        )

    in_specs = _map(lambda axis, x: spec_of(axis, explicit_spec(x)), axes, arrays)
    out_specs = {name: spec_of(place.axis, place.spec) for name, place in results.items()}

    # folded, devices exchange their late halves before, and those of the results after
    def fold(axis, x):
        if axis is None or not pieces.folded:
            return x
        pairs = [(device, last - device) for device in range(pieces.count)]
        return _folded(x, axis, lambda late: lax.ppermute(late, mesh_axes, pairs))

    # each device runs its piece; what varies where a result is not sharded is summed
    def of_device(arrays):
        found = function(lax.axis_index(mesh_axes), _map(fold, axes, arrays))
        found = _map(fold, {name: results[name].axis for name in found}, dict(found))
        return {name: jax.tree.map(partial(_summed, out_specs[name]), x) for name, x in found.items()}

    run = jax.shard_map(of_device, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names=explicit)
    return run(_map(laid, axes, arrays))


def _summed(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """Sums `x` over the mesh axes along which it varies and `spec` does not shard it."""
    surplus = varying(x) - mesh_axes_of(*spec)
    return lax.psum(x, tuple(sorted(surplus))) if surplus else x


def _map(f: Callable[..., Any], axes: Any, *trees: Any) -> Any:
    """Maps `f(axis, leaf, ...)` over the leaves of the trees; one axis may stand for a whole branch."""
    branch = lambda axis, *branches: jax.tree.map(partial(f, axis), *branches)
    return jax.tree.map(branch, axes, *trees, is_leaf=lambda axis: axis is None)


def _folded(x: jax.Array, axis: int, exchanged: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Exchanges the second half of `axis` for that of another piece; done twice, it is `x`."""
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, exchanged(late)], axis)


def _own_or_shared(axis: int | None, shared: jax.Array, own: jax.Array | None) -> jax.Array | None:
    return shared if axis is None else own


def _cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Cuts `[..., n, ...]` into `[..., count, n / count, ...]`."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


def _join(x: jax.Array, axis: int) -> jax.Array:
    """Joins `[..., count, n / count, ...]` to `[..., n, ...]`."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def over_entries(
    function: Callable[[Arrays], Any], batch_rank: int, arrays: Arrays, axes: Axes, in_turn: bool
) -> Any:
    """Maps `function(arrays of one entry)` over a batch; the results have the batch axes in front.

    The batch axes are mapped one inside the other, never merged: each may be sharded.

    Args:
      function: knows no batch.
      batch_rank: the number of batch axes.
      arrays: what the function reads.
      axes: 0 for each array that has all batch axes, in front; entries share the others.
      in_turn: whether one entry follows the other.
    """
    if batch_rank == 0:
        return function(arrays)
    axes = {name: axes.get(name) for name in arrays}
    inner = lambda arrays: over_entries(function, batch_rank - 1, arrays, axes, in_turn)
    if not in_turn:
        return jax.vmap(inner, in_axes=(axes,))(arrays)
    own = _map(lambda axis, x: None if axis is None else x, axes, arrays)
    return lax.map(lambda own: inner(_map(_own_or_shared, axes, arrays, own)), own)


def dropout_indices(
    offset: dropout.Offset | None,
    like: jax.Array,
    batch_rank: int,
    head: int | None = None,
    row: int | None = None,
) -> dropout.Offset:
    """Returns `dropout_offset` as index arrays: a piece takes its part, and so draws the bits of the whole.

    Args:
      offset: where the call's block begins; None: at 0.
      like: an array of the call with `batch_rank` batch axes in front.
      head, row: the axes of `like` that count heads and rows; None leaves the scalar as it is.

    Returns:
      The offset, with `batch` `[...]` of all batch axes, `head` `[N]` and `row` `[T]`; batch and heads are
      sharded like `like`.
    """
    zero = jnp.uint32(0)
    offset = offset or dropout.Offset(zero, zero, zero, zero)
    batch = like.shape[:batch_rank]
    number = _indices(math.prod(batch), offset.batch).reshape(batch)
    offset = offset._replace(batch=reshard_like(number, like, tuple(range(batch_rank))))
    if head is not None:
        heads = reshard_like(_indices(like.shape[head], offset.head), like, (head,))
        offset = offset._replace(head=heads)
    return offset if row is None else offset._replace(row=_indices(like.shape[row], offset.row))


def _indices(n: int, start: jax.Array) -> jax.Array:
    """Returns the n indices from `start` on; `start` itself where it holds them already."""
    return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)
