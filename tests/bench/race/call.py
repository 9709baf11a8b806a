"""What is drawn of an operator: a call with its inputs, ours and the plain one beside it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")
Function = Callable[[Any, Mapping[str, Any]], jax.Array]  # (data, inputs by name) -> out
Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]  # (rng, shape) -> numbers


class Lot:
    """Draws by `random()` of Python, whose numbers are the same for the same words in every version."""

    def __init__(self, *words: Any) -> None:
        self._draw = random.Random(" ".join(map(str, words))).random

    def chance(self, probability: float) -> bool:
        """Tells whether it happens."""
        return self._draw() < probability

    def one_of(self, items: Sequence[T]) -> T:
        """Returns one of them, each as likely as another."""
        return items[int(self._draw() * len(items))]

    def size(self, low: int, high: int) -> int:
        """Returns a size between the two, every magnitude as likely."""
        return round(low * (high / low) ** self._draw())


class Budget(NamedTuple):
    """Holds what the plain formula of a call may need; what would need more is halved until it fits."""

    elements: float = 2**25  # of its largest array; it holds several
    operations: float = 4e10  # of the products of a step


class Input(NamedTuple):
    """Describes an array that a program reads.

    Attributes:
      shape: of one call.
      fill: draws its numbers.
      dtype: where it has one of its own.
      wanted: whether its gradient is.
      produced: whether a producer may stand in front of it.
      mapped: whether each member of a `vmap` has its own.
      layered: whether each layer of a scan has its own.
    """

    shape: tuple[int, ...]
    fill: Fill
    dtype: str | None = None
    wanted: bool = True
    produced: bool = False
    mapped: bool = True
    layered: bool = False


@dataclass(frozen=True)
class Call:
    """Holds a call of an operator, or a program around one.

    Attributes:
      name: sizes, options, and what stands around.
      inputs: by name; the first is what a layer hands to the next, if it has the shape of `out`.
      out: the shape of the result.
      ours, plain: the two to be measured.
      checked: what `ours` is compared with, where `plain` draws random numbers of its own.
      data: `rng -> (what ours reads, what the others read)`, made once outside: a graph.
    """

    name: str
    inputs: dict[str, Input]
    out: tuple[int, ...]
    ours: Function
    plain: Function
    checked: Function | None = None
    data: Callable[[np.random.Generator], tuple[Any, Any]] = lambda rng: (None, None)

    def inside(self, name: str, wrap: Callable[[Function], Function], **changed: Any) -> "Call":
        """Returns the program that `wrap` makes of each of its functions."""
        checked = None if self.checked is None else wrap(self.checked)
        functions: dict[str, Any] = {"ours": wrap(self.ours), "plain": wrap(self.plain), "checked": checked}
        return replace(self, name=f"{self.name}, {name}", **functions, **changed)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws normal numbers."""
    return rng.standard_normal(shape, np.float32)


def uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws numbers from 0 to 1."""
    return rng.random(shape, np.float32)


def seen(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a mask that hides a fifth, and of no row the first entry: formulas differ where all is hidden."""
    mask = rng.random(shape) < 0.8
    mask[..., 0] = True
    return mask


def activation(*shape: int) -> Input:
    """Describes what a layer computes."""
    return Input(shape, normal, produced=True)


def parameter(*shape: int, spread: float = 1.0, mean: float = 0.0) -> Input:
    """Describes what a layer has learned."""
    fill = lambda rng, shape: mean + np.float32(spread) * normal(rng, shape)
    return Input(shape, fill, mapped=False, layered=True)


def lengths(B: int, longest: int) -> Input:
    """Describes the lengths of `B` sequences, of which none is empty."""
    return given((B,), lambda rng, shape: rng.integers(1, longest + 1, shape, np.int32))


def random_key() -> Input:
    """Describes the two words of a random key."""
    return given((2,), lambda rng, shape: rng.integers(0, 2**32, shape, np.uint32))


def given(shape: tuple[int, ...], fill: Fill) -> Input:
    """Describes what has no gradient."""
    return Input(shape, fill, wanted=False)
