"""The only dispatch: which implementation of an operator runs, and why the others do not.

A name is an order. Where there is none, an implementation must take the call (`supports`), and a kernel must
be picked by `records.why_not_picked`: by the environment, else by the record of `check --enable` there,
else by what `targets.GENERATIONS` says to have passed. The portable path is what is left.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from jax_attn_bwd._core import choices, console, pallas, records, targets

P = TypeVar("P")
NAMES = ("xla", "mosaic_tpu", "mosaic_gpu", "cudnn")


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator; any forward may be paired with any backward."""

    name: str  # what the caller writes in `implementation=`
    forward: Callable[..., Any]  # see the operator's `api.py`
    backward: Callable[..., Any]
    platform: str | None = None  # "tpu" or "gpu" for a kernel, None for the portable path
    supports: Callable[[Any, Any], str | None] = lambda options, operands: None  # or why it cannot run a call
    family: str = ""  # the folder of `ops` under which the record of `check --enable` knows a kernel
    ran: Callable[[], str] = lambda: ""  # when it passed its tests on the generation aimed at, "" if never
    any_order: bool = False  # of sums: bits may differ, which `deterministic_sums=True` does not allow
    files: Callable[[], str] = lambda: ""  # the kernel files that it runs, for `explain`


def kernel(
    name: str,
    package: str,
    portable: Implementation,
    generations: tuple[str, ...],
    forward: bool = True,
    any_order: bool = False,
    in_one_file: bool = False,
    has_run: bool = True,
) -> Implementation:
    """Returns the implementation `name` of the operator in `package` by kernels: Pallas's, or a library's.

    Each of `generations` has its files in `package.kernels`: `<generation>_forward.py` (`forward`,
    `supports`) and `<generation>_backward.py` (`backward`), or all of it in `<generation>.py`
    (`in_one_file`), imported when such a device is first aimed at.
    Without `has_run` they have not passed on a chip, whatever other kernels of the generation have.
    `portable` gives the derivatives of the kernels' results. Where it has no kernel of the forward, which is
    then the portable one, `supports` stands beside `backward`.
    """

    # the generation that is aimed at, or why there is none; interpreted, the first has to do
    def found():
        if pallas.is_interpreted(name):
            return next(g for g in targets.GENERATIONS[name] if g.files == generations[0])
        return targets.generation(name, generations)

    # a function of its file, which is imported when it is first called
    def load(direction, function):
        def call(*args):
            file = found().files if in_one_file else f"{found().files}_{direction}"
            return getattr(importlib.import_module(f"{package}.kernels.{file}"), function)(*args)

        return call

    def supports(options, operands):
        device = found()
        if isinstance(device, str):
            return device
        return load("forward" if forward else "backward", "supports")(options, operands)

    def ran():
        device = found()
        passed = (
            has_run and isinstance(device, targets.Generation) and jax.__version_info__ >= device.oldest_jax
        )
        return device.ran if passed else ""

    def files():
        name = getattr(found(), "files", "")
        if in_one_file:
            return f"kernels/{name}.py"
        return f"kernels/{name}_forward.py, {name}_backward.py" if forward else f"kernels/{name}_backward.py"

    opaque = pallas.with_portable_jvp(load("forward", "forward"), portable.forward)
    return Implementation(
        name,
        opaque if forward else portable.forward,
        pallas.with_portable_jvp(load("backward", "backward"), portable.backward),
        platform="tpu" if name == "mosaic_tpu" else "gpu",
        supports=supports,
        family=package.rpartition(".")[2],
        ran=ran,
        any_order=any_order,
        files=files,
    )


def _refusal(implementation: Implementation, options: Any, operands: Any) -> str | None:
    """Tells why `implementation` cannot run this call here; None if it can."""
    if implementation.platform is None or pallas.is_interpreted(implementation.name):
        return implementation.supports(options, operands)
    if implementation.platform != (target := targets.platform()):
        return f"it is a {implementation.platform} kernel and the target platform is {target}"
    meshes = [jax.typeof(operand).sharding.mesh for operand in jax.tree.leaves(operands)]
    if any(AxisType.Auto in mesh.axis_types for mesh in (jax.sharding.get_abstract_mesh(), *meshes)):
        return (
            "a kernel cannot be partitioned over mesh axes of type Auto; wrap the call in "
            "jax.shard_map, or use a mesh with Explicit axes"
        )
    return implementation.supports(options, operands)


def _why_not_picked(
    operator: str, implementations: Sequence[Implementation], options: Any, operands: Any, tell: bool
) -> dict[str, str]:
    """Tells why `implementation=None` picks none of these kernels but one; all of them can run the call."""
    kernels = [i for i in implementations if i.platform is not None and not pallas.is_interpreted(i.name)]
    if not kernels:
        return {}
    size, name = partial(records.size_of, operands), operator.removesuffix("_bwd")
    candidates = [records.Candidate(i.name, i.family, name, i.ran(), size, i.any_order) for i in kernels]
    return records.why_not_picked(candidates, NAMES, getattr(options, "deterministic_sums", None), tell)


class Reasons(dict[str, str]):
    """`{implementation: "ok" | why it is not picked}`; printed, it is a table.

    Attributes:
      refused: those that cannot run the call, not even by name, with the reason.
      choices: how each of the others computes it, a `Choice(implementation, way, rules)`.
      size: by which the records of `check --enable` are looked up.
    """

    def __init__(
        self,
        reasons: Mapping[str, str],
        refused: Mapping[str, str],
        ways: Sequence[choices.Choice],
        size: records.Size,
        title: str,
    ):
        super().__init__(reasons)
        self.refused, self.choices, self.size, self._title = dict(refused), tuple(ways), size, title

    def __repr__(self) -> str:
        picked = next(name for name, reason in self.items() if reason == "ok")
        word = lambda name: "picked" if name == picked else "can run" if self[name] == "ok" else "by name"
        ways = {choice.implementation: str(choice) for choice in self.choices}
        told = lambda name: [*([] if self[name] == "ok" else [self[name]]), *filter(None, [ways.get(name)])]
        rows = [
            (name, "cannot run" if name in self.refused else word(name), "; ".join(told(name)))
            for name in self
        ]
        return console.columns(self._title, rows)


class _Explained(Exception):
    def __init__(self, reasons: Reasons):
        self.reasons = reasons


_explaining = contextvars.ContextVar("explaining", default=False)


def select(
    operator: str,
    implementations: tuple[Implementation, ...],
    requested: str | None,
    options: Any,
    operands: Any,
    plan: Callable[[str, Any, Any], Any] | None = None,
) -> Implementation:
    """Returns the implementation to run: the one asked for, else the proven kernel or the portable path.

    `plan(name, options, operands)` is what `planned` makes of it, whose `way` `explain` tells.

    Raises:
      ValueError: `requested` is not the name of an implementation.
      NotImplementedError: the one asked for cannot run this call; the message says why.
    """
    if requested is not None and requested not in NAMES:
        known = tuple(i.name for i in implementations)
        raise ValueError(f"{operator}: implementation must be None or one of {known}, got {requested!r}")
    # what each says of the call
    reasons = {i.name: _refusal(i, options, operands) for i in implementations}
    able = [i for i in implementations if reasons[i.name] is None]
    # `explain` asks for the reasons alone
    if _explaining.get():
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        others = refused | _why_not_picked(operator, able, options, operands, tell=False)
        found = {i.name: others.get(i.name, "ok") for i in implementations}
        ways = [_way(i, options, operands, plan) for i in able]
        size, title = records.size_of(operands), f"{operator} on {targets.device_kind()}"
        raise _Explained(Reasons(found, refused, ways, size, title))
    # the first that can, or the one that is named
    if requested is None:
        others = _why_not_picked(operator, able, options, operands, tell=True)
        return next(i for i in able if i.name not in others)
    for i in able:
        if i.name == requested:
            return i
    reason = reasons.get(requested, "this operator has no such implementation")
    raise NotImplementedError(
        f"{operator}: implementation={requested!r} cannot run this call: {reason}; "
        f"implementation=None picks one that can"
    )


def planned(
    operator: str,
    implementations: tuple[Implementation, ...],
    requested: str | None,
    options: Any,
    operands: Any,
    plan: Callable[[str, Any, Any], P],
) -> P:
    """Returns `plan(name, options, operands)` with the name of the implementation that `select` picks."""
    chosen = select(operator, implementations, requested, options, operands, plan)
    return plan(chosen.name, options, operands)


def _way(implementation: Implementation, options: Any, operands: Any, plan: Any) -> choices.Choice:
    """Tells how an implementation computes a call; kernels have no rules but their portable derivatives'."""
    if implementation.platform is not None or plan is None:
        order = ", sums in any order" if implementation.any_order else ""
        return choices.Choice(implementation.name, implementation.files() + order, ())
    with choices.noted() as rules:
        way = plan(implementation.name, options, operands).way
    return choices.Choice(implementation.name, way, tuple(rules))


def named(implementations: tuple[Implementation, ...], name: str) -> Implementation:
    """Returns the implementation of that name."""
    return next(i for i in implementations if i.name == name)


def _is_data(x: Any) -> bool:
    """Tells whether `explain` may trace it: a known array of integers may have to be known at trace time."""
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if known and jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def explain(f: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Reasons:
    """For each implementation of operator `f`: "ok", or why `implementation=None` does not pick it.

    Args:
      f: an operator of this package, or a function that calls one.
      *args, **kwargs: its arguments; arrays may be `jax.ShapeDtypeStruct`s. Nothing is computed.
      platform: a chip that need not be here, "cpu", "A100", "H100", "H200", "B200", "v5e", "v5p", "v6e",
        "tpu7x" or a kind of device as its maker calls it; None = the one that a call here runs on.

    Returns:
      `{implementation: "ok" | reason}`; `implementation=None` picks the first that is ok. Printed, it is a
      table, which also tells apart what cannot run the call and what runs when it is asked for by name, and
      names the way of computing of each and the rules that chose it; `.choices` has these as data, one
      `Choice(implementation, way, rules)` each. `.refused` has the reasons of what cannot run alone.

    Raises:
      ValueError: `f` calls no operator of this package; no such platform is known.

    Example:
      >>> import jax, jax_attn_bwd
      >>> x = jax.ShapeDtypeStruct((2, 128, 8, 64), "float32")
      >>> reasons = jax_attn_bwd.explain(jax_attn_bwd.dot_product_attention, x, x, x)
      >>> list(reasons), reasons["xla"]
      (['mosaic_tpu', 'mosaic_gpu', 'cudnn', 'xla'], 'ok')
      >>> x = jax.ShapeDtypeStruct((128, 1024), "bfloat16")
      >>> jax_attn_bwd.explain(jax_attn_bwd.scaled_masked_softmax, x, platform="A100")
      scaled_masked_softmax on NVIDIA A100-SXM4-80GB
        mosaic_tpu  cannot run  it is a tpu kernel and the target platform is gpu
        mosaic_gpu  cannot run  it needs a Hopper GPU (compute capability 9.0), not NVIDIA A100-SXM4-80GB
        xla         picked      whole rows
    """
    if not callable(f):
        remedy = "explain(f, *args, **kwargs) takes the function, and after it what it would be called with"
        raise TypeError(f"explain: f must be a function, got {type(f).__name__}; {remedy}")
    # arrays are traced, all else is handed over as it is
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [i for i, x in enumerate(leaves) if _is_data(x)]

    def call(*arrays):
        filled = list(leaves)
        for i, array in zip(traced, arrays, strict=True):
            filled[i] = array
        call_args, call_kwargs = jax.tree.unflatten(treedef, filled)
        try:
            f(*call_args, **call_kwargs)
        except _Explained:
            raise
        except Exception as error:
            module = getattr(f, "__module__", None) or ""
            if module.partition(".")[0] in ("jax", "jaxlib", "numpy"):
                raise ValueError(f"explain: {f!r} calls no operator of jax_attn_bwd") from error
            raise

    # the first `select` that is come by ends the trace
    aimed = contextlib.nullcontext() if platform is None else targets.aimed_at(platform)
    explaining = choices.during(_explaining, True)
    try:
        with aimed, explaining, jax.disable_jit():  # a cached trace would not come by `select` again
            jax.eval_shape(call, *(_on_ambient_mesh(leaves[i]) for i in traced))
    except _Explained as explained:
        return explained.reasons
    raise ValueError(f"explain: {f!r} calls no operator of jax_attn_bwd")


def _on_ambient_mesh(x: Any) -> Any:
    """Returns the type of an array, on the ambient mesh where that has its axes but another device."""
    mesh, own = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding
    if own.mesh.empty or own.mesh == mesh or own.mesh.axis_names != mesh.axis_names:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, own.spec))
