"""The only dispatch: which implementation of an operator runs, and why the others do not."""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_attn_bwd._core import pallas, targets

NAMES = ("xla", "mosaic_tpu", "mosaic_gpu", "cudnn")


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator; any forward may be paired with any backward.

    Attributes:
      name: what the caller writes in `implementation=`.
      forward, backward: see the operator's `api.py`.
      platform: "tpu" or "gpu" for a kernel, None for the portable path.
      supports: `(options, operands) -> None | reason`; None means that the kernel can run the call.
      waits: `() -> None | reason` why it runs only where it is asked for by name; None = it does not wait.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    platform: str | None = None
    supports: Callable[[Any, Any], str | None] = lambda options, operands: None
    waits: Callable[[], str | None] = lambda: None


def kernel(
    name: str, package: str, portable: Implementation, generations: tuple[str, ...], forward: bool = True
) -> Implementation:
    """The implementation `name` of the operator in `package` by kernels: Pallas's, or a library's.

    Each of `generations` has its files in `package.kernels`: `<generation>_forward.py` (`forward`,
    `supports`) and `<generation>_backward.py` (`backward`), imported when such a device is first aimed at.
    `portable` gives the derivatives of the kernels' results. Where it has no kernel of the forward, which is
    then the portable one, `supports` stands beside `backward`.
    """

    def found():
        if pallas.is_interpreted(name):
            return next(g for g in targets.GENERATIONS[name] if g.files == generations[0])
        return targets.generation(name, generations)

    def load(direction, function):
        def call(*args):
            file = f"{package}.kernels.{found().files}_{direction}"
            return getattr(importlib.import_module(file), function)(*args)

        return call

    def supports(options, operands):
        device = found()
        if isinstance(device, str):
            return device
        return load("forward" if forward else "backward", "supports")(options, operands)

    def waits():
        return None if pallas.is_interpreted(name) else targets.not_picked(found())

    opaque = pallas.with_portable_jvp(load("forward", "forward"), portable.forward)
    return Implementation(
        name,
        opaque if forward else portable.forward,
        pallas.with_portable_jvp(load("backward", "backward"), portable.backward),
        platform="tpu" if name == "mosaic_tpu" else "gpu",
        supports=supports,
        waits=waits,
    )


def _meshes(operands: Any) -> Iterator[jax.sharding.AbstractMesh]:
    yield jax.sharding.get_abstract_mesh()
    for operand in jax.tree.leaves(operands):
        yield jax.typeof(operand).sharding.mesh


def _refusal(implementation: Implementation, options: Any, operands: Any) -> str | None:
    """Why `implementation` cannot run this call here; None if it can."""
    if implementation.platform is None:
        return implementation.supports(options, operands)
    if pallas.is_interpreted(implementation.name):
        return implementation.supports(options, operands)
    if implementation.platform != (target := targets.platform()):
        return f"it is a {implementation.platform} kernel and the target platform is {target}"
    if any(AxisType.Auto in mesh.axis_types for mesh in _meshes(operands)):
        return (
            "a kernel cannot be partitioned over mesh axes of type Auto; wrap the call in "
            "jax.shard_map, or use a mesh with Explicit axes"
        )
    return implementation.supports(options, operands)


class _Explained(Exception):
    def __init__(self, reasons: dict[str, str]):
        self.reasons = reasons


_explaining = contextvars.ContextVar("explaining", default=False)


def select(
    operator: str,
    implementations: tuple[Implementation, ...],
    requested: str | None,
    options: Any,
    operands: Any,
) -> Implementation:
    """The implementation to run: the one asked for, or the first of the list that can.

    Raises:
      ValueError: `requested` is not the name of an implementation.
      NotImplementedError: the one asked for cannot run this call; the message says why.
    """
    if requested is not None and requested not in NAMES:
        known = tuple(i.name for i in implementations)
        raise ValueError(f"{operator}: implementation must be None or one of {known}, got {requested!r}")
    reasons = {i.name: _refusal(i, options, operands) for i in implementations}
    waiting = {i.name: reasons[i.name] or i.waits() for i in implementations}
    if _explaining.get():
        raise _Explained({name: reason or "ok" for name, reason in waiting.items()})
    if requested is None:
        return next(i for i in implementations if waiting[i.name] is None)
    for i in implementations:
        if i.name == requested and reasons[i.name] is None:
            return i
    reason = reasons.get(requested, "this operator has no such implementation")
    raise NotImplementedError(
        f"{operator}: implementation={requested!r} cannot run this call: {reason}; "
        f"implementation=None picks one that can"
    )


def named(implementations: tuple[Implementation, ...], name: str) -> Implementation:
    """The implementation of that name."""
    return next(i for i in implementations if i.name == name)


def perturbed(operands: Any, names: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """(which of `names` are differentiated, the operands themselves).

    For the forward rule of a `custom_vjp` with `symbolic_zeros=True`, which is handed wrapped leaves.
    """
    is_wrapped = lambda x: hasattr(x, "perturbed")
    moves = lambda x: is_wrapped(x) and x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
    leaves = lambda n: jax.tree.leaves(getattr(operands, n), is_leaf=is_wrapped)
    found = tuple(n for n in names if any(map(moves, leaves(n))))
    return found, jax.tree.map(lambda x: x.value, operands, is_leaf=is_wrapped)


def note(asked: Collection[str], names: Sequence[str]) -> jax.Array:
    """Which of `names` are `asked` for, as the shape of an array without elements, for a rule's residuals.

    JAX keeps one tree structure of residuals for each call in a jitted function, that of the last forward it
    traced. A structure that tells what is differentiated is then that of another derivative: where the first
    was of all operands and the last of one, gradients of the others come out as 0, silently.
    """
    return jnp.zeros((sum(1 << i for i, name in enumerate(names) if name in asked), 0), jnp.int8)


def noted(note: jax.Array, names: Sequence[str]) -> frozenset[str]:
    """What `note` was told."""
    return frozenset(name for i, name in enumerate(names) if note.shape[0] >> i & 1)


@contextlib.contextmanager
def _explain_mode() -> Iterator[None]:
    token = _explaining.set(True)
    try:
        yield
    finally:
        _explaining.reset(token)


def _is_data(x: Any) -> bool:
    """Whether `explain` may trace it: a known array of integers may have to be known at trace time."""
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if known and jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """For each implementation of operator `f`: "ok", or the reason why it cannot run this call.

    Args:
      f: an operator of this package, or a function that calls one.
      *args, **kwargs: its arguments; arrays may be `jax.ShapeDtypeStruct`s. Nothing is computed.

    Returns:
      `{implementation: "ok" | reason}`, in the order in which `implementation=None` tries them.

    Raises:
      ValueError: `f` calls no operator of this package.

    Example:
      >>> import jax, jax_attn_bwd
      >>> x = jax.ShapeDtypeStruct((2, 128, 8, 64), "float32")
      >>> reasons = jax_attn_bwd.explain(jax_attn_bwd.dot_product_attention, x, x, x)
      >>> list(reasons), reasons["xla"]
      (['mosaic_tpu', 'mosaic_gpu', 'xla'], 'ok')
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [i for i, x in enumerate(leaves) if _is_data(x)]

    def call(*arrays):
        filled = list(leaves)
        for i, array in zip(traced, arrays, strict=True):
            filled[i] = array
        call_args, call_kwargs = jax.tree.unflatten(treedef, filled)
        f(*call_args, **call_kwargs)

    with _explain_mode(), jax.disable_jit():  # a cached trace would not come by `select` again
        try:
            jax.eval_shape(call, *(leaves[i] for i in traced))
        except _Explained as explained:
            return explained.reasons
    raise ValueError(f"explain: {f!r} calls no operator of jax_attn_bwd")
