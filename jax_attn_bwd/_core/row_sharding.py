"""Rows cut into parts that devices work through side by side, each with all that the rows share.

    results of rows = [f(part 0), f(part 1), ...],   results of what is shared = sum of the parts' shares

A loop over tiles of rows that lie on several devices would exchange something at every step. Over tiles of a
part it exchanges nothing: what the rows share is gathered once before, and its shares are summed once after.

* Axes of type Explicit: the type of an array tells how its rows lie, and each device takes its own.
* Axes of type Auto: a trace does not tell. The rows are cut into as many parts as the mesh has devices, and
  the parts are one more batch axis, which the partitioner splits as the rows are split, if they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn_bwd._core.sharding import explicit_spec, varying

AXIS = "jax_attn_bwd_parts"  # of parts that are a batch axis


@dataclass(frozen=True)
class Cut:
    """How rows are cut.

    Attributes:
      count: number of parts.
      axes: the Explicit mesh axes that the rows are sharded over; () = the parts are a batch axis.
    """

    count: int
    axes: tuple[str, ...] = ()

    @property
    def in_step(self) -> int:
        """How many parts one program computes, step by step alike."""
        return 1 if self.axes else self.count


def cut(x: jax.Array, axis: int, batch: int) -> Cut | None:
    """How the rows of `x`, its axis `axis`, are to be cut; None = they need not be.

    Args:
      batch: product of the batch axes. One that fills an Auto mesh leaves no device to the rows.
    """
    if (names := explicit_spec(x)[axis]) is not None:
        names = (names,) if isinstance(names, str) else tuple(names)
        shape = jax.typeof(x).sharding.mesh.shape
        return Cut(math.prod(shape[name] for name in names), names)
    devices, rows = auto_devices(x), x.shape[axis]
    if not isinstance(rows, int) or rows == 0 or not isinstance(batch, int) or batch % devices == 0:
        return None
    count = math.gcd(rows, devices)
    return Cut(count) if count > 1 else None


def auto_devices(x: jax.Array) -> int:
    """Over how many devices Auto axes of the mesh that is set may shard `x`; 1 in `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if mesh.empty or AxisType.Manual in mesh.axis_types or (known and len(x.sharding.device_set) == 1):
        return 1
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(n for n, kind in sizes if kind == AxisType.Auto)


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """`x` with all of `axis` on every device of an Auto mesh, its other axes as they lie; under `jax.jit`."""
    spec = [PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in explicit_spec(x)]
    spec[axis] = None
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


def all_gathered(tree: Any) -> Any:
    """Every array of `tree` with all of its first axis on every device of an Auto mesh; under `jax.jit`."""
    return jax.tree.map(lambda x: gathered(x, 0) if x.ndim else x, tree)


class Place(NamedTuple):
    """How a result lies: like an array of the call."""

    axis: int | None  # of rows; None = what rows share: the parts' shares are summed
    spec: tuple  # its mesh axes on an Explicit mesh


def place(x: jax.Array, axis: int | None) -> Place:
    """That of a result that lies like `x`."""
    return Place(axis, explicit_spec(x))


EVERYWHERE = Place(None, ())  # of a tree of what rows share, whole on every device


def over(
    cut: Cut,
    function: Callable[..., dict[str, jax.Array]],
    rows: dict[str, jax.Array],
    shared: Any,
    axes: dict[str, int],
    results: dict[str, Place],
) -> dict[str, jax.Array]:
    """The results, by name, of `function(index of the part, rows, shared)` over all parts.

    Args:
      function: gives those of one part. On Explicit axes it runs on each device's shards, of all axes.
      rows: arrays with an axis of rows, of which a part has its own.
      shared: arrays that every part reads as they are; rows are not among their axes.
      axes: which axis of each of `rows` it is.
      results: how each of them lies.
    """
    run = _on_shards if cut.axes else _as_batch
    return run(cut, function, rows, shared, axes, results)


def _on_shards(cut, function, rows, shared, axes, results):
    mesh = next(m for x in rows.values() for m in [jax.typeof(x).sharding.mesh] if not m.empty)
    manual = {
        n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    }

    def of_rows(spec, axis):
        return PartitionSpec(*(cut.axes if i == axis else entry for i, entry in enumerate(spec)))

    specs = {name: of_rows(explicit_spec(x), axes[name]) for name, x in rows.items()}
    rows = {name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in rows.items()}
    out_specs = {name: of_rows(x.spec, x.axis) for name, x in results.items()}

    def of_device(rows, shared):
        found = function(lax.axis_index(cut.axes), rows, shared)
        summed = lambda name: partial(_summed, spec=out_specs[name])
        return {name: jax.tree.map(summed(name), x) for name, x in found.items()}

    in_specs = specs, jax.tree.map(lambda x: PartitionSpec(*explicit_spec(x)), shared)
    run = jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual)
    return run(rows, shared)


def _summed(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The sum of `x` over the mesh axes along which it varies and `spec` does not shard it."""
    sharded = {n for entry in spec if entry for n in ((entry,) if isinstance(entry, str) else entry)}
    surplus = varying(x) - sharded
    return lax.psum(x, tuple(sorted(surplus))) if surplus else x


def _as_batch(cut, function, rows, shared, axes, results):
    def split(x, axis):
        return x.reshape(*x.shape[:axis], cut.count, x.shape[axis] // cut.count, *x.shape[axis + 1 :])

    def join(x, axis):
        if axis is None:
            return jax.tree.map(lambda share: share.sum(0), x)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    index = jnp.arange(cut.count, dtype=jnp.int32)
    out_axes = {name: x.axis or 0 for name, x in results.items()}
    mapped = jax.vmap(function, in_axes=(0, axes, None), out_axes=out_axes, axis_name=AXIS)
    found = mapped(index, {name: split(x, axes[name]) for name, x in rows.items()}, shared)
    return {name: join(x, results[name].axis) for name, x in found.items()}
