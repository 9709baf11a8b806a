"""Keeps what every operator does so that sharded programs trace, run and keep their shardings.

Three rules: loop carries take their type from the operands (`full_like_operands`), outputs depend on
all operands (`tie`), and a cotangent has the type of its primal (`match_type`).
"""

import math
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_attn_bwd._core.trees import floats


def _type(x: Any) -> jax.core.ShapedArray:
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def varying(arrays: Any) -> frozenset[str]:
    """Returns the mesh axes over which one of the arrays (or types) varies, inside `jax.shard_map`."""
    return frozenset().union(*(_type(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def vary_over(x: jax.Array, axes: Set[str]) -> jax.Array:
    """Makes `x` vary over these mesh axes, too."""
    missing = axes - varying(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def full_like_operands(
    like: jax.Array, shape: Sequence[int], fill: float, dtype: Any, operands: Any
) -> jax.Array:
    """Returns `fill`, sharded like `like` and varying over every mesh axis an operand varies over.

    `like` has as many axes as `shape`; where their sizes differ, the axis is not sharded.
    """
    differ = tuple(i for i, n in enumerate(shape) if like.shape[i] != n)
    seed = lax.full_like(like.sum(differ, keepdims=True) if differ else like, fill, dtype)
    return vary_over(jnp.broadcast_to(seed, shape), varying(operands))


def tie(outputs: Any, operands: Any) -> Any:
    """Returns `outputs` unchanged, each formally depending on every operand.

    Under `vmap` over some operands only, an output that does not depend on them is not batched, and
    `custom_vjp` then mixes up its cotangents (silently in JAX 0.10, an error in 0.12). XLA folds the
    select away.
    """
    never, total = jnp.zeros((), bool), jnp.zeros((), jnp.float32)
    for operand in jax.tree.leaves(operands):
        total = total + operand.sum().astype(jnp.float32)
    return jax.tree.map(lambda x: lax.select(never, lax.full_like(x, total), x), outputs)


def match_type(cotangent: jax.Array, primal: Any) -> jax.Array:
    """Returns `cotangent` with dtype, manual axes and explicit sharding of `primal` (array or type).

    Inside `shard_map` a primal that is replicated over an axis gets the sum of the devices' shares.
    """
    surplus = varying(cotangent) - varying(primal)
    if surplus:
        cotangent = lax.psum(cotangent, tuple(sorted(surplus)))
    cotangent = vary_over(cotangent, varying(primal))
    sharding = _type(primal).sharding
    if jax.typeof(cotangent).sharding != sharding and not sharding.mesh.empty:
        cotangent = jax.sharding.reshard(cotangent, sharding)
    return cotangent.astype(primal.dtype)


def match_types(cotangents: dict[str, Any], operands: Any) -> dict[str, Any]:
    """Returns `cotangents`, by name, with the types of the floats in these `operands`."""
    like = lambda name: floats(getattr(operands, name))
    return {name: jax.tree.map(match_type, x, like(name)) for name, x in cotangents.items()}


def explicit_spec(x: jax.Array) -> tuple:
    """Returns the mesh axes each axis of `x` is sharded over on an Explicit mesh; None = not sharded."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def mesh_axes_of(*entries: Any) -> frozenset[str]:
    """Returns the mesh axes that entries of a spec name."""
    return frozenset(name for entry in entries for name in names_of(entry))


def unsharded(x: jax.Array, axis: int) -> jax.Array:
    """Brings all of `axis` of `x` to every device of an Explicit mesh; its other axes stay where they are."""
    spec = list(explicit_spec(x))
    spec[axis] = None
    return resharded(x, x, spec)


def mesh_of(*arrays: jax.Array) -> AbstractMesh:
    """Returns the mesh of arrays: the ambient one, else that of the first whose type has one; maybe empty.

    Of arrays that `jax.device_put` brought onto a mesh types know it, and those of what is computed of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh if mesh.empty else mesh
    return mesh


def explicit_mesh(arrays: Any) -> AbstractMesh | None:
    """Returns the first mesh with Explicit axes that one of the arrays lies on; None if none does."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    return next((m for m in meshes if not m.empty and AxisType.Explicit in m.axis_types), None)


def explicit_axes(mesh: AbstractMesh) -> frozenset[str]:
    """Returns the Explicit axes of a mesh."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def on_shards(
    function: Callable[..., Any], mesh: AbstractMesh, in_specs: Any, out_specs: Any, axes: Collection[str]
) -> Callable[..., Any]:
    """Returns `function(*arrays)` as every device runs it, on its own shards: [t, n] of [T, N].

    Args:
      mesh: on which the arrays lie.
      in_specs, out_specs: the mesh axes over which each axis of the arrays and of the results lies; a spec
        may stand for a branch. A result is summed over what it varies over and its spec does not name.
      axes: the mesh axes that shards are along; over others the partitioner goes on to cut.
    """

    def summed(spec, x):
        surplus = varying(x) & frozenset(axes) - mesh_axes_of(*spec)
        return lax.psum(x, tuple(sorted(surplus))) if surplus else x

    def of_device(*arrays):
        found = function(*arrays)
        return jax.tree.map(lambda spec, x: jax.tree.map(partial(summed, spec), x), out_specs, found)

    return jax.shard_map(
        of_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(axes)
    )


def types_of(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns the types of the results of `function(*operands)`, which is not run.

    On a mesh of Auto axes they tell that mesh, as arrays do; those of `jax.eval_shape` have forgotten it.
    """
    traced = jax.jit(function).trace(*operands)
    leaves, tree = jax.tree.flatten(traced.out_info)
    known = (aval.sharding for aval in traced.jaxpr.out_avals)
    told = (
        x.update(sharding=sharding) if set(sharding.mesh.axis_types) == {AxisType.Auto} else x
        for x, sharding in zip(leaves, known, strict=True)
    )
    return jax.tree.unflatten(tree, told)


def auto_devices(x: jax.Array) -> int:
    """Counts the devices over which Auto axes of the mesh may shard `x`; 1 inside `jax.shard_map`."""
    mesh = mesh_of(x)
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if mesh.empty or AxisType.Manual in mesh.axis_types or (known and len(x.sharding.device_set) == 1):
        return 1
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(n for n, kind in sizes if kind == AxisType.Auto)


def gathered(x: jax.Array, axis: int, others: Any = ()) -> jax.Array:
    """Brings all of `axis` of `x` to every device of an Auto mesh; its other axes stay; under `jax.jit`.

    The mesh is that of `x`, or else of `others`, arrays that are computed with it; without one `x` is whole.
    """
    mesh = mesh_of(x, *jax.tree.leaves(others))
    if mesh.empty:
        return x
    spec = [PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in explicit_spec(x)]
    spec[axis] = None
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def all_gathered(tree: Any) -> Any:
    """Brings all of the first axis of each array of `tree` to every device; see `gathered`."""
    return jax.tree.map(lambda x: gathered(x, 0, tree) if x.ndim else x, tree)


def reshard_like(x: jax.Array, other: jax.Array, axes: Sequence[int | None]) -> jax.Array:
    """Shards `x` as `other`, on an Explicit mesh: axis i of `x` as axis `axes[i]` of `other`.

    `axes` is right-aligned with `x`; None, and axes of size 1, are not split.
    """
    spec = explicit_spec(other)
    names = (None if axis is None else spec[axis] for axis in tuple(axes)[len(axes) - x.ndim :])
    return resharded(x, other, tuple(names))


def resharded(x: jax.Array, other: jax.Array, spec: Sequence[Any]) -> jax.Array:
    """Shards `x` by `spec` on the mesh of `other`, if it is Explicit; axes of size 1 are not split."""
    mesh = jax.typeof(other).sharding.mesh  # that of `x` is empty where `x` was made before the mesh was set
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return x
    wanted = tuple(None if n == 1 else name for name, n in zip(spec, x.shape, strict=True))
    if wanted == explicit_spec(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*wanted)))


def without_ones(x: jax.Array) -> jax.Array:
    """Unshards axes of size 1 of `x` on an Explicit mesh: not every operation keeps such a sharding."""
    return reshard_like(x, x, range(x.ndim))


def axis_size(x: jax.Array, names: str | tuple[str, ...]) -> int:
    """Counts the shards along the mesh axes `names` of the mesh that `x` lives on."""
    shape = jax.typeof(x).sharding.mesh.shape
    return math.prod(shape[n] for n in names_of(names))
