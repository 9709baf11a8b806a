"""A published module runs twice, as it is and with our call in one place; output and gradients are compared.

The call is the text that stands in the row of the page "Models", evaluated among the public names of this
package, what the page's own blocks of Python define, and the arrays that the place was handed.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_attn_bwd

PAGE = Path(__file__).parents[2] / ".docs" / "pages" / "models.md"
# a module, the inputs that have gradients, and other arguments
Made = tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """Where our call goes in a published module."""

    make: Callable[[], Made]
    place: str  # the function or method that gives way, as it is imported
    adapt: Callable[..., Any]  # (our call, what stood there, *its arguments) -> what it returns
    is_layer: bool = False  # our layer holds the weights, so that inputs alone have gradients


class Errors(NamedTuple):
    """The largest difference, as a share of the largest number."""

    output: float
    gradients: float


class _Ours(torch.autograd.Function):
    """A function of JAX, and its derivative, among torch's."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., jax.Array], *inputs: torch.Tensor) -> torch.Tensor:
        out, ctx.pullback = jax.vjp(function, *map(as_array, inputs))
        return torch.from_numpy(np.array(out))

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> Any:
        return None, *(torch.from_numpy(np.array(x)) for x in ctx.pullback(as_array(douts[0])))


def as_array(x: torch.Tensor) -> jax.Array:
    """The numbers of a tensor."""
    return jnp.asarray(x.detach().contiguous().numpy())


def call_of(code: str, known: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """The text of a call as a function of named tensors and others; floating tensors get gradients."""
    compiled = compile(code, "the page", "eval")

    def ours(**given: Any) -> torch.Tensor:
        is_input = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
        inputs = {name: x for name, x in given.items() if is_input(x)}
        others = {n: as_array(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}

        def function(*arrays: jax.Array) -> jax.Array:
            return eval(compiled, {**known, **others, **dict(zip(inputs, arrays, strict=True))})

        return _Ours.apply(function, *inputs.values())

    return ours


@contextmanager
def replaced(place: str, function: Callable[..., Any]) -> Iterator[list[int]]:
    """`function(what stood there, *arguments)` in a place; it holds how often that was called."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *owners, name = path.split(".")
    for step in owners:
        owner = getattr(owner, step)
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return function(original, *arguments, **named)

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


def values(make: Callable[[], Made]) -> dict[str, np.ndarray]:
    """The output of a module with random weights, and the gradients of inputs and weights."""
    torch.manual_seed(0)
    module, inputs, options = make()
    for x in inputs.values():
        x.requires_grad_(x.is_floating_point())
    out = module(**inputs, **options)
    while not isinstance(out, torch.Tensor):  # of several outputs, the first
        out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    found = {"output": out, **{name: x.grad for name, x in inputs.items()}}
    found |= {name: x.grad for name, x in module.named_parameters()}
    return {name: x.detach().numpy() for name, x in found.items() if x is not None}


def compare(model: Model, code: str, known: Mapping[str, Any]) -> Errors:
    """How far a module with our call is from the same module as it is."""
    theirs = values(model.make)
    ours = call_of(code, known)
    place = lambda original, *arguments, **named: model.adapt(ours, original, *arguments, **named)
    with replaced(model.place, place) as calls:
        found = values(model.make)
    if not calls:
        raise AssertionError(f"nothing is called at {model.place}")
    # a number that theirs gives no gradient must have none here
    found = {name: x for name, x in found.items() if name in theirs or x.any()}
    if model.is_layer:
        theirs = {name: x for name, x in theirs.items() if name in found}
    if found.keys() != theirs.keys() or len(found) < 2:
        raise AssertionError(f"gradients of {found.keys() ^ theirs.keys()}")
    # a gradient that is next to nothing beside the others has no digits to compare
    largest = max(np.abs(x).max() for name, x in theirs.items() if name != "output")
    error = lambda name, least: (
        np.abs(found[name] - theirs[name]).max() / max(np.abs(theirs[name]).max(), least)
    )
    gradients = [error(name, 0.03 * largest) for name in theirs if name != "output"]
    return Errors(float(error("output", 0)), float(np.max(gradients)))  # of any that is NaN, NaN


class Row(NamedTuple):
    """A row of the page."""

    model: str
    call: str
    version: str
    errors: Errors


def rows() -> list[Row]:
    """The rows of the page's table."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and re.match(r"\d", cells[4]):
            errors = Errors(float(cells[4]), float(cells[5]))
            found.append(Row(cells[0], cells[2].strip("`"), cells[3], errors))
    return found


def known() -> dict[str, Any]:
    """What a call on the page may name: our names, jnp, and what the page's own code defines."""
    names: dict[str, Any] = {name: getattr(jax_attn_bwd, name) for name in jax_attn_bwd.__all__}
    names |= {"jax": jax, "jnp": jnp}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names
