"""Runs a function piece by piece of its arrays, puts the results together and sums what the pieces share.

    results = [f(piece 0), f(piece 1), ...] joined,   sums = share of piece 0 + share of piece 1 + ...

An operator says which axis of each array is cut; every piece reads the other arrays whole. One
mechanism serves three reasons to cut, which differ only in who runs the pieces:

* In turn (`scan_of_slices`): what one slice of a batch computes stays in the cache. `lax.scan` carries the
  sums.
* On devices, where an Explicit mesh tells how the rows lie: each device takes its own (`jax.shard_map`). A
  loop over tiles of rows on several devices would exchange something at every step. Over the tiles of a piece
  it exchanges nothing: what the rows share is gathered once before, and its shares are summed once after.
* Side by side, where an Auto mesh does not tell how the rows lie: there are as many pieces as devices, and
  they are one more batch axis (`jax.vmap`), which the partitioner splits as the rows are split, if they are.

`over_entries` maps a function that knows no batch over the entries of one; its caller sums what they share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, reshard

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import moved
from jax_attn_bwd._core.sharding import (
    auto_devices,
    explicit_axes,
    explicit_spec,
    names_of,
    on_shards,
    reshard_like,
)

AXIS = "jax_attn_bwd_pieces"  # names the batch axis of pieces side by side


@dataclass(frozen=True)
class Pieces:
    """How many pieces there are, and who runs them.

    Folded, a piece of those on devices is two stretches of the axis: of 2n, piece i has 2i and 2n - 1 - 2i,
    of which it gives one away for the other.
    """

    count: int  # divides the axes that are cut
    mesh_axes: tuple[str, ...] = ()  # Explicit, over which devices hold a piece each; () = side by side
    mesh: AbstractMesh | None = None  # that of these axes
    folded: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The axes over which collectives of the pieces go."""
        return self.mesh_axes or (AXIS,)

    def index(self) -> jax.Array:
        """Returns the index of the piece that runs, int32."""
        return lax.axis_index(self.names)

    def origins(self, index: Any, length: int) -> Any:
        """Returns where the stretches of piece `index` begin: int32 `[1]`, or `[2]` if folded.

        Of 8 rows, pieces 0 to 3 of length 2 begin at 0, 2, 4, 6; folded at (0, 7), (2, 5), (4, 3), (6, 1).
        """
        xp = np if isinstance(index, int) else jnp
        if not self.folded:
            return xp.asarray([index * length], xp.int32)
        half = length // 2
        return xp.asarray([index * length, (2 * self.count - 1 - 2 * index) * half], xp.int32)


def pieces_for_rows(x: jax.Array, axis: int, batch: int) -> Pieces | None:
    """Returns the pieces into which devices cut the rows of `x`, its axis `axis`; None if they are not cut.

    A `batch`, the product of its axes, that fills an Auto mesh leaves no device to the rows.
    """
    if names := names_of(explicit_spec(x)[axis]):
        mesh = jax.typeof(x).sharding.mesh
        return Pieces(math.prod(mesh.shape[name] for name in names), names, mesh)
    devices, rows = auto_devices(x), x.shape[axis]
    if not isinstance(rows, int) or rows == 0 or not isinstance(batch, int) or batch % devices == 0:
        return None
    count = math.gcd(rows, devices)
    return Pieces(count) if count > 1 else None


class OutSpec(NamedTuple):
    """Where a result of the pieces goes."""

    axis: int | None  # along which the pieces' results are joined; None: they are shares of a sum
    spec: tuple = ()  # the mesh axes of the whole on an Explicit mesh
    alike: bool = False  # whether it is no share, but what all pieces agreed on
    like: jax.Array | None = None  # whose axes it has, and lies along


def out_spec(x: jax.Array, axis: int | None) -> OutSpec:
    """Returns where a result goes that is sharded like `x`."""
    return OutSpec(axis, explicit_spec(x), like=x)


SUM = OutSpec(None)  # every device holds the whole sum
ALIKE = OutSpec(None, alike=True)


def map_specs(f: Callable[..., Any], specs: Any, *results: Any) -> Any:
    """Maps `f(spec, result, ...)` over a tree of `OutSpec`; one may stand for a branch of results."""
    return jax.tree.map(f, specs, *results, is_leaf=lambda x: isinstance(x, OutSpec))


def over(
    pieces: Pieces, function: Callable[..., Any], arrays: tuple[Any, ...], axes: tuple[Any, ...], results: Any
) -> Callable[[], Any]:
    """Returns the call that computes the results of `function(*arrays of a piece)` over all pieces.

    Of `arrays`, a tree for each argument, `axes` tells which axis of each is cut (None: it is shared), and
    `results`, a tree of `OutSpec`, where each result goes. On devices the function sees the shards of all
    axes.
    """
    if pieces.mesh is None:
        return partial(_side_by_side, pieces, function, arrays, axes, results)

    # arrays are cut along the axes of the pieces, and lie along their other axes as before
    mesh, mesh_axes = pieces.mesh, pieces.mesh_axes

    def spec_of(axis, spec):
        return PartitionSpec(*(mesh_axes if i == axis else entry for i, entry in enumerate(spec)))

    def laid(axis, x):
        return x if axis is None else reshard(x, NamedSharding(mesh, spec_of(axis, explicit_spec(x))))

    # folded, devices exchange their late halves before, and those of the results after
    def fold(axis, x):
        pairs = [(device, pieces.count - 1 - device) for device in range(pieces.count)]
        exchanged = lambda late: lax.ppermute(late, mesh_axes, pairs)
        return x if axis is None else _folded(x, axis, exchanged)

    def of_stretches(*arrays):
        joined = map_specs(lambda spec: spec.axis, results)
        return _map(fold, joined, function(*_map(fold, axes, arrays)))

    in_specs = _map(lambda axis, x: spec_of(axis, explicit_spec(x)), axes, arrays)
    out_specs = map_specs(lambda spec: spec_of(spec.axis, spec.spec), results)
    of_piece = of_stretches if pieces.folded else function
    run = on_shards(of_piece, mesh, in_specs, out_specs, explicit_axes(mesh))
    return partial(run, *_map(laid, axes, arrays))


def scan_of_slices(count: int, function: Callable[..., Any], arrays: Any, axes: Any) -> tuple[Any, Any]:
    """Returns what `lax.scan` takes to compute `function(*arrays)` piece by piece: a step, and indices.

    What is scanned with, zeros by name, are the sums of what the function gives by these names. Its other
    results come out one piece after the other: `joined` puts them together. `arrays` and `axes` are as in
    `over`; `count`, the number of pieces, divides the axes that are cut.
    """
    in_front = lambda axis, x: x if axis is None else moved(_cut(x, axis, count), axis, 0)
    pieces = _map(in_front, axes, arrays)

    # by index: `jax.vmap` would transpose every array that is scanned over
    def own_or_shared(index, axis, x):
        return x if axis is None else lax.dynamic_index_in_dim(x, index, keepdims=False)

    def step(sums, index):
        found = function(*_map(partial(own_or_shared, index), axes, pieces))
        if sums:
            found = dict(found)
            sums = jax.tree.map(jnp.add, sums, {name: found.pop(name) for name in sums})
        return sums, found

    return step, np.arange(count, dtype=np.uint32)


def joined(found: Any) -> Any:
    """Puts the results of pieces in turn together, along the first axis of each piece."""
    return jax.tree.map(lambda x: join(x, 0), found)


def _side_by_side(pieces, function, arrays, axes, results):
    """Does what `over` does, of pieces along a new batch axis: [.., n, ..] is [.., count, n / count, ..]."""
    fold = lambda axis, x: _folded(x, axis + 1, partial(jnp.flip, axis=axis)) if pieces.folded else x
    cut = lambda axis, x: x if axis is None else fold(axis, _cut(x, axis, pieces.count))
    out_axes = map_specs(lambda spec: None if spec.alike else spec.axis or 0, results)
    run = jax.vmap(function, in_axes=axes, out_axes=out_axes, axis_size=pieces.count, axis_name=AXIS)
    found = run(*_map(cut, axes, arrays))

    def whole(spec, x):
        if spec.alike:
            return x
        return x.sum(0) if spec.axis is None else join(fold(spec.axis, x), spec.axis)

    return map_specs(lambda spec, branch: jax.tree.map(partial(whole, spec), branch), results, found)


def _map(f: Callable[..., Any], axes: Any, *trees: Any) -> Any:
    """Maps `f(axis, leaf, ...)` over the leaves of the trees; one axis may stand for a whole branch."""
    branch = lambda axis, *branches: jax.tree.map(partial(f, axis), *branches)
    return jax.tree.map(branch, axes, *trees, is_leaf=lambda axis: axis is None)


def _folded(x: jax.Array, axis: int, exchanged: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Exchanges the second half of `axis` for that of another piece; done twice, it is `x`."""
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, exchanged(late)], axis)


def _cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Cuts `[..., n, ...]` into `[..., count, n / count, ...]`."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


def join(x: jax.Array, axis: int) -> jax.Array:
    """Joins `[..., count, n / count, ...]` to `[..., n, ...]`."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def over_entries(
    function: Callable[..., Any], batch_rank: int, arrays: Any, axes: Any, in_turn: bool
) -> Callable[[], Any]:
    """Returns the call that maps `function(*arrays of one entry)`, which knows no batch, over a batch.

    Its `batch_rank` axes are mapped one inside the other, never merged: each may be sharded. `axes` is 0 for
    each array that has all of them, in front; entries share those of None. `in_turn` one follows the other.
    """
    if not (in_turn and batch_rank):
        for _ in range(batch_rank):
            function = jax.vmap(function, in_axes=axes)
        return partial(function, *arrays)
    own_or_shared = lambda axis, x, own: x if axis is None else own
    of_entry = lambda own: function(*_map(own_or_shared, axes, arrays, own))
    for _ in range(batch_rank):
        of_entry = partial(lax.map, of_entry)
    return partial(of_entry, _map(lambda axis, x: None if axis is None else x, axes, arrays))


def dropout_indices(
    offset: dropout.Offset | None,
    like: jax.Array,
    batch_rank: int,
    head: int | None = None,
    row: int | None = None,
) -> dropout.Offset:
    """Returns `dropout_offset` as index arrays: a piece takes its part, and so draws the bits of the whole.

    `like` has `batch_rank` batch axes in front, and counts heads and rows along its axes `head` and `row`:
    None leaves the scalar as it is. In the result `batch` is `[...]` of all batch axes, `head` `[N]`, `row`
    `[T]`; batch and heads are sharded like `like`.
    """
    offset, batch = dropout.or_origin(offset), like.shape[:batch_rank]
    number = _indices(math.prod(batch), offset.batch).reshape(batch)
    offset = offset._replace(batch=reshard_like(number, like, tuple(range(batch_rank))))
    if head is not None:
        offset = offset._replace(head=reshard_like(_indices(like.shape[head], offset.head), like, (head,)))
    return offset if row is None else offset._replace(row=_indices(like.shape[row], offset.row))


def _indices(n: int, start: jax.Array) -> jax.Array:
    """Returns the n indices from `start` on; `start` itself where it holds them already."""
    return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)
