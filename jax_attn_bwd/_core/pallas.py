"""Shared by all Pallas kernels of the package: second order, meshes, output types, the interpreter.

A kernel is opaque: JAX cannot differentiate or partition it. So each one, forward and backward, is wrapped
in `with_portable_jvp` (derivatives of a kernel are those of the portable path) and in `on_local_shards` (on
an Explicit mesh it runs on each device's own shard).
"""

import contextvars
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core.choices import during
from jax_attn_bwd._core.sharding import explicit_mesh, explicit_spec, on_shards, vary_over, varying

_interpreted: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "interpreted", default=frozenset()
)


def interpreting(*names: str) -> AbstractContextManager[Any]:
    """Interprets kernels of these implementations, whatever the platform; for tests."""
    return during(_interpreted, frozenset(names))


def is_interpreted(name: str) -> bool:
    """Tells whether kernels of implementation `name` are to be interpreted here.

    Read it outside `jax.jit` and hand it in as a static argument: jit does not see the context.
    """
    return name in _interpreted.get()


def with_portable_jvp(kernel: Callable[..., Any], portable: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel(options, *operands)`, differentiated as `portable(options, *operands)`.

    Where the kernel leaves a None in its result, what the portable path has there is dropped.
    """

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def call(options, *operands):
        return kernel(options, *operands)

    @call.defjvp
    def jvp(options, primals, tangents):
        wanted = jax.eval_shape(partial(kernel, options), *primals)
        results = jax.jvp(partial(portable, options), primals, tangents)
        drop = partial(jax.tree.map, lambda w, x: None if w is None else x, wanted)
        return tuple(drop(x, is_leaf=lambda w: w is None) for x in results)

    return call


def opaque(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f(static, *operands)` as one operation that no checkpoint policy looks into.

    Its derivative is that of `f`.
    """
    call = jax.custom_jvp(f, nondiff_argnums=(0,))

    @call.defjvp
    def jvp(static, primals, tangents):
        return jax.jvp(partial(f, static), primals, tangents)

    return call


def on_local_shards(f: Callable[..., Any], out_specs: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Runs `f(*operands)`; where they live on an Explicit mesh, on each device's shards.

    `out_specs` maps the PartitionSpecs of the operands to those of the outputs. Inside `jax.shard_map` the
    operands are local already.
    """
    mesh = explicit_mesh(operands)
    if mesh is None or math.prod(mesh.shape.values()) == 1:
        return f(*operands)
    specs = jax.tree.map(lambda x: PartitionSpec(*explicit_spec(x)), operands)
    return on_shards(f, mesh, specs, out_specs(*specs), mesh.axis_names)(*operands)


def out_type(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's output: it varies over every mesh axis that an operand varies over."""
    manual = jax.sharding.ManualAxisType(varying=varying(operands))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def of_type(x: jax.Array, kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns `x`, a kernel's output, of its `out_type`: JAX forgets over which mesh axes it varies.

    What varies and does not say so would be taken for the same on all devices, and not be summed over them.
    """
    wanted = kind.manual_axis_type.varying if kind.manual_axis_type is not None else frozenset()
    return vary_over(x, frozenset(wanted))


def vary_alike(operands: Any) -> Any:
    """Returns `operands`, each varying over every mesh axis that one of them varies over."""
    axes = varying(operands)
    return jax.tree.map(lambda x: vary_over(x, axes), operands)
