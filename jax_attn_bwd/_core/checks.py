"""Checks of arguments, all with one style of message: operator, argument, expected, got, remedy."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import keywords
from jax_attn_bwd._core.numerics import accumulator_dtype

T = TypeVar("T")
_PACKAGE = __name__.partition(".")[0]


def message(operator: str, argument: str, expected: str, got: Any, remedy: str = "") -> str:
    """Returns `operator: argument must expected, got got; remedy`."""
    return f"{operator}: {argument} must {expected}, got {got}" + (f"; {remedy}" if remedy else "")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line outside this package that made the call; Python shows it once for each line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def static(x: Any, remedy: str = "") -> str:
    """Returns `remedy`, and for an option that is traced how to keep it static."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        return remedy
    return f"{remedy}{', or ' if remedy else ''}under jax.jit name it in static_argnames"


def _kind(x: Any) -> str:
    return "a traced array" if isinstance(x, jax.core.Tracer) else type(x).__name__


def is_array(x: Any) -> bool:
    """Tells whether `x` is an array or tracer (not a Python or NumPy scalar)."""
    return isinstance(x, jax.Array | np.ndarray)


def known(x: Any) -> np.ndarray | None:
    """Returns the values of `x` on the host; None if traced, or if a transfer guard forbids to fetch them."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    guards = (getattr(jax.config, f"jax_transfer_guard{to}") for to in ("", "_device_to_host"))
    is_guarded = any(guard in ("disallow", "disallow_explicit") for guard in guards)
    if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable or is_guarded:
        return None
    return jax.device_get(x)


def _of_torch(argument: str, x: Any, remedy: str = "") -> str:
    """Tells how a tensor of torch is handed over; `remedy` for anything else."""
    is_tensor = type(x).__module__.partition(".")[0] == "torch"
    return f"pass {argument}.detach().cpu().numpy()" if is_tensor else remedy


def floating(operator: str, argument: str, x: Any) -> jax.Array:
    """Returns `x` as an array of a floating dtype."""
    x = np.asarray(x) if isinstance(x, np.generic) else x
    if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        got = f"dtype {x.dtype}" if is_array(x) else type(x).__name__
        remedy = f"what is True or False goes in mask={argument}" if got == "dtype bool" else ""
        remedy = remedy if argument == "bias" else ""
        remedy = f"write jnp.asarray({argument})" if isinstance(x, list | tuple) else remedy
        remedy = _of_torch(argument, x, remedy)
        raise TypeError(message(operator, argument, "be a floating-point array", got, remedy))
    if x.dtype.itemsize < 2:
        expected = "be of dtype bfloat16, float16, float32 or float64"
        raise TypeError(message(operator, argument, expected, x.dtype, "cast it"))
    return jnp.asarray(x)


def floating_rows(operator: str, argument: str, x: Any) -> jax.Array:
    """Returns `x` as an array of a floating dtype that has an axis to normalise over."""
    x = floating(operator, argument, x)
    if x.ndim == 0:
        raise ValueError(message(operator, argument, "have at least one axis", x.shape))
    return x


def same_dtype(operator: str, **arrays: jax.Array) -> None:
    """Raises unless all arrays share one dtype."""
    if len({x.dtype for x in arrays.values()}) > 1:
        got = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        names = ", ".join(arrays)
        raise TypeError(message(operator, names, "have one dtype", got, "cast them to the dtype you want"))


def boolean_mask(
    operator: str, mask: Any, meaning: str = "attend", additive: str = "pass additive values as bias"
) -> jax.Array:
    """Returns `mask` as a boolean array; `meaning` says what True is, `additive` where numbers may go."""
    mask = np.asarray(mask) if isinstance(mask, np.generic) else mask
    if is_array(mask) and mask.dtype == np.bool_:
        return jnp.asarray(mask)
    got = f"dtype {mask.dtype}" if is_array(mask) else f"{type(mask).__name__}, not an array"
    remedy = "a number is given by name: scale=" if isinstance(mask, int | float) else additive
    remedy = _of_torch("mask", mask, remedy)
    if is_array(mask) and jnp.issubdtype(mask.dtype, jnp.integer):
        remedy = f"write mask != 0 if non-zero means {meaning}"
    raise TypeError(message(operator, "mask", f"be boolean (True = {meaning})", got, remedy))


def integers(
    operator: str, argument: str, x: Any, least: int = -(2**31), greatest: int = 2**31 - 1
) -> jax.Array:
    """Makes `x` (array, list or int) an array of an integer dtype; known values must lie in that range."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    array = x if isinstance(x, jax.Array) else jnp.asarray(x) if traced else np.asarray(x)
    if array.size == 0 and not is_array(x):
        array = array.astype(np.int32)  # an empty list
    if not jnp.issubdtype(array.dtype, jnp.integer):
        is_mask = array.dtype == np.bool_ and argument.endswith("seq_lengths")
        remedy = f"of a mask of tokens write {argument}.sum(-1)" if is_mask else ""
        raise TypeError(message(operator, argument, "be integers", f"dtype {array.dtype}", remedy))
    info = jnp.iinfo(array.dtype)
    is_checked = array.size and (info.min < least or info.max > greatest)
    if is_checked and (values := known(array)) is not None:
        low, high = int(values.min()), int(values.max())
        if low < least or high > greatest:
            expected = f"lie in [{least}, {greatest}]"
            raise ValueError(message(operator, argument, expected, f"{low} to {high}"))
    return jnp.asarray(array)


def integer(operator: str, argument: str, x: Any, least: int | None = None) -> int:
    """Returns `x`, a Python or NumPy int, `least` or more; no bool, array or tracer."""
    expected = {None: "be an int", 1: "be a positive int"}.get(least, f"be an int, {least} or more")
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(message(operator, argument, expected, _kind(x), static(x)))
    if least is not None and x < least:
        raise ValueError(message(operator, argument, expected, x))
    return int(x)


def scale(operator: str, x: Any, dtype: Any, remedy: str = "") -> float:
    """Returns the factor of logits of arrays of `dtype`, finite where they are accumulated."""
    return python_float(operator, "scale", x, remedy, accumulator_dtype(dtype))


def instance(operator: str, argument: str, x: Any, kind: type[T], remedy: str = "", expected: str = "") -> T:
    """Returns `x`, which must be a `kind`."""
    if not isinstance(x, kind):
        expected = expected or f"be a {kind.__name__}"
        raise TypeError(message(operator, argument, expected, type(x).__name__, remedy))
    return x


def rank(
    operator: str, argument: str, x: jax.Array, names: str, *ranks: int, least: int = 0, remedy: str = ""
) -> None:
    """Raises unless `x` has one of `ranks`, or `least` axes; `names` spells its shape in shape letters."""
    if x.ndim < least or (ranks and x.ndim not in ranks):
        raise ValueError(message(operator, argument, f"have shape {names}", x.shape, remedy))


def shape(operator: str, argument: str, x: jax.Array, names: str, expected: tuple, remedy: str = "") -> None:
    """Raises unless `x.shape == expected`; `names` spells the expected shape in shape letters."""
    if x.shape != expected:
        raise ValueError(message(operator, argument, f"have shape {names} = {expected}", x.shape, remedy))


def broadcasts(
    operator: str, argument: str, x: jax.Array, names: str, target: tuple, swapped: tuple = ()
) -> None:
    """Raises unless `x` broadcasts to `target`; what fits `swapped` tells that heads stand before tokens."""
    if not _fits(x.shape, target):
        remedy = ""
        if swapped and _fits(x.shape, swapped):
            remedy = "the layout is [..., T, N, H]; from [..., N, T, H] write x.swapaxes(-3, -2)"
        elif len(target) == 4 and x.shape == (target[0], target[-1]):  # of keys alone: [B, S]
            remedy = f"write {argument}[:, None, None, :]"
        elif len(target) == 4 and x.shape == (target[0], *target[-2:]):  # of all heads: [B, T, S]
            remedy = f"write {argument}[:, None]"
        elif len(target) == 4 and x.shape in ((*target[2:], target[1]), (target[0], *target[2:], target[1])):
            remedy = f"heads stand before tokens: write jnp.moveaxis({argument}, -1, -3)"
        elif len(target) == x.ndim == 1 and x.shape[0] == target[0] + 1:
            remedy = (
                f"from a running sum, cu_seqlens, write jnp.diff({argument}) where each row is a sequence"
            )
            remedy += " of its own, segment ids where sequences are packed one after another"
        elif argument.endswith("seq_lengths") and x.shape[:-1] == target:  # of tokens: [B, S]
            remedy = f"of a mask of tokens write {argument}.sum(-1), with the padding at the end"
        expected = f"broadcast to {names} = {tuple(target)}"
        raise ValueError(message(operator, argument, expected, x.shape, remedy))


def _fits(shape: tuple, target: tuple) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a == b or a == 1 for a, b in sizes)


def python_float(operator: str, argument: str, x: Any, remedy: str = "", dtype: Any = np.float64) -> float:
    """Returns `x`, a Python or NumPy scalar, as a float that is finite in `dtype`; no array or tracer."""
    x = x.item() if isinstance(x, np.floating | np.integer) else x
    if is_array(x) or isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(message(operator, argument, "be a Python float", _kind(x), static(x, remedy)))
    if not abs(x) <= float(jnp.finfo(dtype).max):
        expected = "be finite" if x in (math.inf, -math.inf) or x != x else f"be finite in {dtype}"
        got = x if isinstance(x, float) else f"an int of {x.bit_length()} bits"
        raise ValueError(message(operator, argument, expected, got, remedy))
    return float(x)


def rate(operator: str, argument: str, x: Any) -> float:
    """Returns a probability as a Python float."""
    known = is_array(x) and not isinstance(x, jax.core.Tracer)
    x = python_float(operator, argument, x, f"pass float({argument})" if known else "")
    if not 0.0 <= x <= 1.0:
        raise ValueError(message(operator, argument, "lie in [0, 1]", x))
    return x


def flag(operator: str, argument: str, x: Any) -> bool:
    """Returns a Python bool: options change the compiled program and cannot be traced."""
    if not isinstance(x, bool | np.bool_):
        is_mask = argument == "is_causal" and getattr(x, "ndim", 0) > 1
        remedy = "an array of who attends goes in mask" if is_mask else static(x)
        raise TypeError(message(operator, argument, "be a Python bool", _kind(x), remedy))
    return bool(x)


def repeatable_sums(operator: str, deterministic_sums: Any, deterministic: Any = None) -> bool | None:
    """Returns `deterministic_sums`, also by the name that it had, which is deprecated."""
    if deterministic_sums is not None and not isinstance(deterministic_sums, bool | np.bool_):
        got = _kind(deterministic_sums), static(deterministic_sums)
        raise TypeError(message(operator, "deterministic_sums", "be None or a Python bool", *got))
    deterministic_sums = None if deterministic_sums is None else bool(deterministic_sums)
    if deterministic is None:
        return deterministic_sums
    deterministic = flag(operator, "deterministic", deterministic)
    if deterministic_sums not in (None, deterministic):
        expected = f"say what deterministic={deterministic}, its former name, says"
        raise ValueError(message(operator, "deterministic_sums", expected, repr(deterministic_sums)))
    warn(
        f"{operator}: deterministic is deprecated: here it says that sums repeat bit for bit, in layers that"
        f" nothing is dropped; write deterministic_sums={deterministic} for the sums, dropout_rate=0.0 for no"
        " dropout, attention_fn=jax_attn_bwd.attention_fn for a layer of Flax",
        DeprecationWarning,
    )
    return deterministic


def choice(operator: str, argument: str, x: Any, choices: Sequence[Any]) -> Any:
    """Returns `x`, one of `choices`."""
    if not isinstance(x, str) or x not in choices:
        raise ValueError(message(operator, argument, f"be one of {tuple(choices)}", repr(x)))
    return x


def wanted(operator: str, wrt: Any, fields: Sequence[str], present: Sequence[str]) -> tuple:
    """Returns `wrt` as a tuple of known names of arguments that were given."""
    if not isinstance(wrt, str | Sequence | set | frozenset):
        raise TypeError(message(operator, "wrt", f"name some of {tuple(fields)}", repr(wrt)))
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in fields:
            raise ValueError(message(operator, "wrt", f"name some of {tuple(fields)}", repr(name)))
        if name not in present:
            expected = "name arguments that were given"
            raise ValueError(message(operator, "wrt", expected, f"{name!r}, which is None"))
    return names


def precision(operator: str, value: Any) -> Any:
    """Returns a hashable precision: None, `lax.Precision`, a pair of them, or a dot algorithm."""
    if value is None or isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return value
    if isinstance(value, str) and value in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[value]
    try:
        if isinstance(value, tuple | list):
            first, second = value
            return lax.Precision(first), lax.Precision(second)
        return lax.Precision(value)
    except (ValueError, TypeError):
        expected = "be None, a jax.lax.Precision or its name, a pair of them, or a dot algorithm"
        raise ValueError(message(operator, "precision", expected, repr(value))) from None


def complete(
    operator: str, like: Callable[..., Any], allowed: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options that a call was given, and the defaults of the others that it may be given.

    So a secondary call spells only arguments of its own. A TypedDict lists the options of `<operator>_bwd`
    and of what is built on it, which an editor shows, and the call beneath has their defaults:

        def f_bwd(dout, x, *, wrt=None, **options: Unpack[FKeywords]):
            given = checks.complete("f_bwd", f, FKeywords, options)

    Args:
      operator: the call, as errors name it.
      like: the function whose signature has the defaults.
      allowed: the TypedDict of the options that the call may be given.
      given: the options that it was given.

    Raises:
      TypeError: an option is unknown or missing, in the words that Python has for it.
    """
    known = allowed.__required_keys__ | allowed.__optional_keys__
    if wrong := [name for name in given if name not in known]:
        raise keywords.unexpected(operator, wrong[0], known)
    for name in allowed.__required_keys__ - given.keys():
        raise TypeError(f"{operator}() missing 1 required keyword-only argument: {name!r}")
    return {**_defaults(like, allowed), **given}


@cache
def _defaults(like: Callable[..., Any], allowed: Any) -> dict[str, Any]:
    parameters = inspect.signature(like).parameters
    return {name: x.default for name, x in parameters.items() if name in allowed.__optional_keys__}
