"""Arguments of the functions that wrap themselves in `jax.shard_map`."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks

Axes = str | tuple[str, ...]


def check_axis(operator: str, mesh: Any, axis: Any) -> int:
    """Returns the number of devices of `mesh` along `axis`, a name or several."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        remedy = "jax.make_mesh makes one"
        raise TypeError(
            checks.message(operator, "mesh", "be a jax.sharding.Mesh", type(mesh).__name__, remedy)
        )
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not names or not set(names) <= set(mesh.axis_names):
        expected = f"name axes of the mesh, {mesh.axis_names}"
        raise ValueError(checks.message(operator, "axis", expected, repr(axis)))
    return math.prod(mesh.shape[name] for name in names)


def run_on_parts(
    function: Any, mesh: Mesh, axis: Axes, specs: tuple, out_specs: Any, arguments: tuple
) -> Any:
    """Runs `jax.shard_map` of `function` over `axis`; specs name no other axis of the mesh.

    Other Auto axes stay with the partitioner. On an Explicit mesh they hold copies (JAX 0.12 cannot lower a
    reduce-scatter where some axes are Explicit and some Manual), and arguments are brought to their specs.
    """
    # an Explicit mesh is taken whole
    names = {axis} if isinstance(axis, str) else set(axis)
    if AxisType.Explicit in mesh.axis_types:
        names = set(mesh.axis_names)
        arguments = jax.tree.map(
            lambda spec, part: jax.sharding.reshard(part, NamedSharding(mesh, spec)),
            specs, arguments, is_leaf=lambda x: isinstance(x, PartitionSpec),
        )  # fmt: skip
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=names, check_vma=True
    )
    return jax.jit(mapped, inline=True)(*arguments)  # shard_map alone does not run rules with symbolic zeros
