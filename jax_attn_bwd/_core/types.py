"""Names for annotations of public arguments."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, cast

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
Scale: TypeAlias = float | np.number[Any] | Array  # what `head_scale` takes
Integers: TypeAlias = Array | int | Sequence[int] | Sequence[Sequence[int]]  # what `checks.integers` takes

Pair: TypeAlias = tuple[jax.Array, jax.Array]  # what calls return whose flags ask for more
Triple: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]

F = TypeVar("F", bound=Callable[..., Any])


def typed_like(model: F) -> Callable[[Callable[..., Any]], F]:
    """Tells type checkers that a function has the overloads of `model`; it runs as it is written."""
    return lambda function: cast(F, function)


# what options that are words may be
Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu", "cudnn"]
FullyMasked = Literal["zero", "uniform", "nan"]
Save = Literal["inputs", "qkv", "probs"]
PaddingMode = Literal["zeros", "border"]
SamplingMethod = Literal["bilinear", "discrete"]
Normalize = Literal["softmax"]
Activation = Literal["linear", "relu", "sigmoid", "tanh", "elu", "scalar", "leaky_relu"]
Fill = Literal["mean", "add", "min", "max"]
GraphKind = Literal["gat", "gatv2", "transformer"]
GraphMode = Literal["halo", "all_gather"]
ExchangeKind = Literal["ring", "all_gather", "ulysses"]
SequenceLayout = Literal["contiguous", "zigzag", "striped"]
Reduce = Literal["psum_scatter", "psum"]


class DropoutKeywords(TypedDict, total=False):
    """Keywords of attentions that drop some of their weights."""

    dropout_rate: float
    dropout_key: jax.Array | None
    dropout_offset: Sequence[Any] | None
