"""Records of the kernels that are proven on a device, and so picked by themselves.

A kernel is proven where `python -m jax_attn_bwd.check --enable` ran it on such a device and kept a record of
it, or by the line of `targets.py` that says that its tests passed on that generation. A user's word in the
environment goes before both.
"""

import functools
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

from jax_attn_bwd._core import targets

KERNELS = "JAX_ATTN_BWD_KERNELS"  # environment variable: "none", or names in order of preference
GPU_KERNELS = "JAX_ATTN_BWD_GPU_KERNELS"  # environment variable, of GPUs alone: 1 is mosaic_gpu, 0 nothing
CACHE = "JAX_ATTN_BWD_CACHE"  # environment variable: the folder of the records
COMMAND = "python -m jax_attn_bwd.check --enable"
SAME_BITS = ", the same bits"  # ends the name of a timed case with `deterministic_sums=True`
_PACKAGE = Path(__file__).parents[1]
_log = logging.getLogger("jax_attn_bwd")


class Size(NamedTuple):
    """How large a call is: by its operands."""

    elements: int  # of all of them
    longest: int  # axis of any of them

    def distance(self, other: "Size") -> float:
        """Counts how many times the other is doubled or halved, in both respects."""
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(self, other, strict=True))


def size_of(operands: Any) -> Size:
    """Returns the size of a call with these operands."""
    shapes = [x.shape for x in jax.tree.leaves(operands) if hasattr(x, "shape")]
    known = [[d for d in shape if isinstance(d, int)] for shape in shapes]  # a symbolic axis counts as 1
    return Size(sum(map(math.prod, known)), max((d for shape in known for d in shape), default=1))


class Kernel(NamedTuple):
    """Holds what a record knows of one implementation: why it failed, or None; milliseconds by case."""

    failed: str | None
    times: Mapping[str, float]


class Record(NamedTuple):
    """Holds what a chip said of the kernels of one folder of `ops`; a case is named "<operator>: <case>"."""

    written: str
    kernels: Mapping[str, Kernel]
    sizes: Mapping[str, Size]


class Candidate(NamedTuple):
    """A kernel that can run a call."""

    name: str
    family: str  # the folder of `ops` that it belongs to
    operator: str  # that is called
    ran: str  # what `targets.py` says of its generation
    size: Callable[[], Size]
    any_order: bool = False  # of sums: bits may differ from run to run


def environment_order(names: Sequence[str], candidates: Sequence[str]) -> tuple[tuple[str, ...], str] | None:
    """Returns (implementations in the order that the environment prefers, where it says so), or None.

    Raises:
      ValueError: it says what is neither `none` nor one of `names`.
    """
    for variable in (KERNELS, GPU_KERNELS):
        value = os.environ.get(variable, "").strip()
        if not value or (variable == GPU_KERNELS and (value == "0" or "mosaic_tpu" in candidates)):
            continue
        order = tuple(name.strip() for name in value.split(","))
        if value == "none":
            return (), f"{variable}=none"
        if value == "1" and variable == GPU_KERNELS:
            return ("mosaic_gpu",), f"{variable}=1"
        if unknown := [name for name in order if name not in names]:
            raise ValueError(f"{variable} must be none, or some of {tuple(names)}, got {unknown[0]!r}")
        return order, f"{variable}={value}"
    return None


def folder() -> Path:
    """Returns the folder where the records are kept.

    Raises:
      RuntimeError: this user has no home, and the environment names no folder.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jax_attn_bwd"


def path(kind: str, family: str) -> Path:
    """Returns the file of the record of the kernels of a folder of `ops` on a kind of device."""
    return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', kind)}_{family}.json"


@functools.cache
def versions(family: str) -> dict[str, str]:
    """Tells what a record holds for: JAX, and the files of this package that make the kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for part in ("_core", f"ops/{family}"):
        for file in sorted((_PACKAGE / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jax_attn_bwd": digest.hexdigest()}


def record(kind: str, family: str) -> Record | str:
    """Returns the record of these kernels on such a device, or why there is none; a process reads it once."""
    return read_once(kind, family, *map(os.environ.get, (CACHE, "XDG_CACHE_HOME")))


@functools.cache
def read_once(kind: str, family: str, *where: str | None) -> Record | str:
    """Reads the file of a record; `where` is what its folder follows from."""
    # a file that is JSON
    try:
        held = json.loads((file := path(kind, family)).read_text())
    except RuntimeError:
        return f"this user has no home folder, and {CACHE} is not set"
    except OSError:
        return "there is no record"
    except ValueError:
        return _damaged(file, "it is not JSON")
    # of this device and these versions, with a time of each case that it names
    try:
        if held["device"] != kind:
            return f"the record is of {held['device']}"
        for name, now in versions(family).items():
            if (then := held["versions"][name]) != now:
                which = "other files of jax_attn_bwd" if name == "jax_attn_bwd" else f"{name} {then}"
                return f"the record is of {which}"
        sizes = {case: Size(*map(int, size)) for case, size in held["sizes"].items()}
        kernels = {}
        for name, kernel in held["kernels"].items():
            times = {case: float(ms) for case, ms in kernel["times"].items() if sizes[case] and float(ms) > 0}
            kernels[name] = Kernel(None if kernel["failed"] is None else str(kernel["failed"]), times)
        return Record(str(held["written"]), kernels, sizes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return _damaged(file, f"{type(error).__name__}: {error}")


def _damaged(file: Path, why: str) -> str:
    _log.warning("jax_attn_bwd: %s is damaged (%s) and is ignored; `%s` writes it anew", file, why, COMMAND)
    return "the record is damaged"


def why_not_picked(
    candidates: Sequence[Candidate], names: Sequence[str], deterministic_sums: bool | None, tell: bool
) -> dict[str, str]:
    """Tells why each of these kernels is not picked; the one that is picked is left out, if one is.

    `candidates`: all that can run the call, in order. `names`: of all implementations. `deterministic_sums`:
    True leaves out what adds in any order, None does where another kernel is proven. With `tell` the first
    call of a process that passes over kernels which could be proven says how.
    """
    # by the environment
    own = [candidate.name for candidate in candidates]
    if (said := environment_order(names, own)) is not None:
        order, where = said
        picked = next((name for name in order if name == "xla" or name in own), None)
        prefers = f"{where} prefers {picked}"
        return {n: prefers if n in order else f"{where} does not name it" for n in own if n != picked}
    # by the records: those that are not proven, or are slower than "xla", and why
    kind = targets.device_kind()
    reasons: dict[str, str] = {}
    rates: dict[str, tuple[float, str]] = {}
    for candidate in candidates:
        found = _judged(candidate, kind, bool(deterministic_sums))
        if deterministic_sums and candidate.any_order and not isinstance(found, str):
            found = "it adds in any order; deterministic_sums=None lets it be picked"
        if isinstance(found, str):
            reasons[candidate.name] = found
        else:
            rates[candidate.name] = found
    # those that add in any order only where it is all the same, or there is no other
    varying = {c.name for c in candidates if c.any_order}
    if deterministic_sums is None and rates.keys() - varying:
        for name in rates.keys() & varying:
            del rates[name]
            reasons[name] = "it adds in any order; deterministic_sums=False picks it where it is faster"
    # the fastest of the others is picked; where there is none, a process says how to prove one
    if rates:
        picked = min(rates, key=lambda name: rates[name][0])
        reasons |= {n: f"it is proven, but {picked} is faster: {rates[n][1]}" for n in rates if n != picked}
    elif tell and targets.is_here():
        _tell(kind, [c for c in candidates if not c.ran])
    return reasons


def _judged(candidate: Candidate, kind: str, same_bits: bool) -> tuple[float, str] | str:
    """Returns (its time beside that of "xla" at the nearest size, in words), or why it is not picked.

    `same_bits`: as "xla" computes what must repeat bit for bit, where that was timed by itself.
    """
    # refuted
    known, name = record(kind, candidate.family), candidate.name
    if isinstance(known, Record) and name in known.kernels and (why := known.kernels[name].failed):
        return f"it failed on {kind} ({known.written}): {why}"
    # no record of it: the word of the generation counts
    if isinstance(known, str) or name not in known.kernels:
        if candidate.ran:
            return 1.0, "it was not timed here"
        why = known if isinstance(known, str) else "the record does not know it"
        return (
            f"it is not proven on {kind}: {why}; `{COMMAND} {candidate.family}` proves it there, "
            f"{KERNELS}={name} picks it unproven"
        )
    # proven: its time beside that of "xla", of the operator's own case that is nearest in size
    kernel, portable = known.kernels[name], known.kernels.get("xla", Kernel(None, {})).times
    if not (timed := kernel.times.keys() & portable.keys()):
        return f"it is proven on {kind}, but was not timed beside xla; `{COMMAND} {candidate.family}` does it"
    size, own = candidate.size(), {case for case in timed if case.startswith(f"{candidate.operator}: ")}
    alike = {case for case in own or timed if case.endswith(SAME_BITS) == same_bits}
    case = min(sorted(alike or own or timed), key=lambda case: size.distance(known.sizes[case]))
    rate = kernel.times[case] / portable[case]
    words = f"{kernel.times[case]:.3g} ms to {portable[case]:.3g} ms of xla at the nearest size, {case}"
    return (rate, words) if rate < 1 else f"it is proven on {kind}, but slower than xla: {words}"


_told: set[str] = set()  # the kinds of device of which this process has spoken


def _tell(kind: str, candidates: Sequence[Candidate]) -> None:
    unknown = [why for c in candidates if isinstance(why := record(kind, c.family), str)]
    if not unknown or kind in _told:
        return
    _told.add(kind)
    _log.warning(
        "jax_attn_bwd: calls take the portable path on this %s, for its kernels are not proven there (%s). "
        "`%s` proves them, in 5 minutes at most, and from then on they are picked where they are faster; "
        "%s=none leaves it at that, and says no more.",
        kind,
        unknown[0],
        COMMAND,
        KERNELS,
    )
