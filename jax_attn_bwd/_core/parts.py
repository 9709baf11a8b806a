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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn_bwd._core.sharding import explicit_spec, unsharded

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
    devices, rows = auto_devices(), x.shape[axis]
    if not isinstance(rows, int) or rows == 0 or not isinstance(batch, int) or batch % devices == 0:
        return None
    count = math.gcd(rows, devices)
    return Cut(count) if count > 1 else None


def auto_devices() -> int:
    """Devices along the Auto axes of the mesh that is set; 1 where none is set, and in `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return 1
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(n for n, kind in sizes if kind == AxisType.Auto)


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """`x` with all of `axis` on every device; its other axes lie as they do."""
    x = unsharded(x, axis)
    if auto_devices() == 1:
        return x
    spec = [PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in explicit_spec(x)]
    spec[axis] = None
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


def over(
    cut: Cut,
    function: Callable[..., tuple[dict[str, Any], dict[str, Any]]],
    rows: dict[str, jax.Array],
    shared: Any,
    axes: dict[str, int],
    results: dict[str, int],
    sums: tuple[str, ...] = (),
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(results of the rows, sums of the parts' shares) of `function(index of the part, rows, shared)`.

    Args:
      function: gives both, of one part, as dicts by name.
      rows: arrays with an axis of rows.
      shared: arrays that every part reads as they are.
      axes: that axis of each of `rows`.
      results: that axis of each result of the rows.
      sums: the names of the shares.
    """
    if cut.axes:
        return _on_shards(cut, function, rows, shared, axes, results, sums)
    return _as_batch(cut, function, rows, shared, axes, results)


def _on_shards(cut, function, rows, shared, axes, results, sums):
    mesh = next(m for x in rows.values() for m in [jax.typeof(x).sharding.mesh] if not m.empty)
    specs = lambda axes: {name: PartitionSpec(*(None,) * axis, cut.axes) for name, axis in axes.items()}

    def placed(x, axis):
        spec = list(explicit_spec(x))
        spec[axis] = cut.axes
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def of_device(rows, shared):
        found, shares = function(lax.axis_index(cut.axes), rows, shared)
        return found, jax.tree.map(lambda x: lax.psum(x, cut.axes), shares)

    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(specs(axes), PartitionSpec()),
        out_specs=(specs(results), dict.fromkeys(sums, PartitionSpec())),
        axis_names=set(cut.axes),
    )({name: placed(x, axes[name]) for name, x in rows.items()}, shared)


def _as_batch(cut, function, rows, shared, axes, results):
    def split(x, axis):
        return x.reshape(*x.shape[:axis], cut.count, x.shape[axis] // cut.count, *x.shape[axis + 1 :])

    def join(x, axis):
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    index = jnp.arange(cut.count, dtype=jnp.int32)
    mapped = jax.vmap(function, in_axes=(0, axes, None), out_axes=(results, 0), axis_name=AXIS)
    found, shares = mapped(index, {name: split(x, axes[name]) for name, x in rows.items()}, shared)
    whole = {name: join(x, results[name]) for name, x in found.items()}
    return whole, {name: x.sum(0) for name, x in shares.items()}
