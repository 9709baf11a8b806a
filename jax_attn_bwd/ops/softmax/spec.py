"""Options, operands and residuals of the scaled masked softmax.

Shapes: x and y have any shape; "a row" is what the softmax runs over, along `axis`; row values have the
shape of x with 1 at `axis`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_attn_bwd._core import masks
from jax_attn_bwd._core.types import FullyMasked

DIFFERENTIABLE = ("x", "scale", "bias", "sink")


@dataclass(frozen=True)
class Options:
    """Everything that changes the answer and is known at trace time."""

    scale: float | None = 1.0  # None: an operand
    axis: int = -1
    is_causal: bool = False
    window: masks.Window | None = None
    fully_masked: FullyMasked = "zero"

    @property
    def unit(self) -> float:
        """Returns a power of two: in this unit scale * x + bias does not overflow, up to a scale of 2^79.

        1 where no product can overflow. (XLA would pull the factor of both terms out of the sum at a scale of
        1.) In larger units than 2^80 a bias of common size would become 0.
        """
        if self.scale is None or abs(self.scale) <= 1:
            return 1.0
        return 2.0 ** min(math.frexp(self.scale)[1] + 1, 80)

    @property
    def hides(self) -> bool:
        """Tells whether causality or a window hide entries."""
        return self.is_causal or self.window is not None


class Operands(NamedTuple):
    """Every array of a call; None = not given."""

    x: jax.Array
    scale: jax.Array | None = None  # broadcasts to x
    mask: jax.Array | None = None  # bool, has the rank of x
    bias: jax.Array | None = None  # has the rank of x
    sink: jax.Array | None = None  # has the rank of x, 1 at `axis`


class Result(NamedTuple):
    """Everything that a forward computes; XLA drops what nobody reads."""

    y: jax.Array
    sink_prob: jax.Array | None  # row value: the probability that went to the sink
    live: jax.Array | None  # row value, bool: the row sees something; only for "uniform" and "nan"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Everything but arrays that the gradients which are asked for depend on."""

    types: tuple[tuple[str, Any], ...]  # of the differentiable operands that are wanted, by name
    hidden: bool = True  # entries may have been hidden: dy is not read where y is 0


class Residuals(NamedTuple):
    """The arrays that the forward leaves for the backward: y, and little else."""

    y: jax.Array  # shape and dtype of x
    wanted: Wanted
    scale: jax.Array | None = None  # if it is an operand
    x: jax.Array | None = None  # if the gradient of scale is wanted
    sink_prob: jax.Array | None = None  # with a sink
    live: jax.Array | None = None  # with fully_masked="uniform" or "nan"
