"""Other libraries beside ours: how they are asked for, and what becomes of one that cannot run here."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_attn_bwd.bench.measure import Contender, compiled_contender
from jax_attn_bwd.bench.report import Row, sentence

PLANES = 2**29  # bytes of the largest array that a peer may be asked for


def installed(*modules: str) -> bool:
    """Whether all of `modules` can be imported."""
    return all(importlib.util.find_spec(name) for name in modules)


def torch_device() -> str | None:
    """Where torch computes beside JAX: "cpu" or "cuda"; None if it is not installed, or cannot."""
    if not installed("torch"):
        return None
    import torch

    if jax.default_backend() == "cpu":
        return "cpu"
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else None


def tensor(x: Any) -> Any:
    """A JAX array as a tensor of torch, beside JAX."""
    import torch

    made = torch.tensor(np.asarray(x, np.float32 if x.dtype == "bfloat16" else None))
    return made.to(torch_device(), torch.bfloat16 if x.dtype == "bfloat16" else None)


def torch_contender(what: str, run: Callable[[], Sequence[Any]], read: Callable = lambda *x: x) -> Contender:
    """A contender of torch: `run` returns tensors, `read` turns them to our layout."""
    import torch

    def wait(result):
        if torch_device() == "cuda":
            torch.cuda.synchronize()

    def results():
        return [np.asarray(x.detach().float().cpu().numpy()) for x in read(*run())]

    return Contender(f"torch {torch.__version__.split('+')[0]} {what}", run, wait, results)


def ours(
    call: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable], *args: Any, **rest: Any
) -> list[Contender]:
    """Our contenders, one for each implementation that can run here, the kernels first.

    `make` turns a call, `call(..., implementation=)` of ours, into the function of `args` that is measured.
    """
    found = []
    for name in ("mosaic_gpu", "mosaic_tpu", "xla"):
        function = make(partial(call, implementation=name))
        try:
            jax.eval_shape(function, *args)
        except NotImplementedError:
            continue
        found.append((name, function))
    label = lambda name: "jax_attn_bwd" if len(found) == 1 else f"jax_attn_bwd[{name}]"
    return [compiled_contender(label(name), function, *args, **rest) for name, function in found]


def gather(
    case: str, makers: Mapping[str, Callable[[], Contender]], needs: float = 0, linear: Sequence[str] = ()
) -> tuple[list[Contender], list[Row]]:
    """(the peers that could be made, rows that say why the others could not).

    `needs`: the bytes of the planes that all peers but those in `linear` hold, several at a time; too many
    for a machine that others use are not asked for.
    """
    made, refused = [], []
    for name, make in makers.items():
        if needs > PLANES and name not in linear:
            refused.append(
                Row(case, name, notes={"refused": f"holds planes of {needs / 2**30:.1f} GiB each"})
            )
            continue
        try:
            contender = make()
            if jax.default_backend() != "cpu":
                contender.wait(contender.run())  # it may not fit the memory
            made.append(contender)
        except Exception as error:  # one peer's failure is its own
            refused.append(Row(case, name, notes={"refused": sentence(error)[:200]}))
    return made, refused
