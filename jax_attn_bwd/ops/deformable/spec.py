"""Shapes, options and residuals of multi-scale deformable attention.

Shape letters: B batch, Q queries, M heads, D channels of a head, L levels, H_l x W_l pixels of level l,
S = sum of H_l * W_l, P_l sampling points of a query and head on level l, K = sum of P_l.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import jax
import numpy as np

from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd._core.types import Array, Implementation, Normalize, PaddingMode, SamplingMethod

DIFFERENTIABLE = ("value", "sampling_locations", "attention_weights")


@dataclass(frozen=True)
class Options:
    """Everything that changes the answer and is known at trace time."""

    spatial_shapes: tuple[tuple[int, int], ...]  # (H_l, W_l)
    num_points: tuple[int, ...]  # P_l
    padding_mode: PaddingMode = "zeros"
    method: SamplingMethod = "bilinear"
    normalize: Normalize | None = None
    deterministic_sums: bool | None = None

    def levels(self) -> "Level":
        """Returns the level of each of the K sampling points."""
        height, width = np.array(self.spatial_shapes, np.int32).T
        start = np.cumsum(height * width, dtype=np.int32) - height * width
        return Level(*(np.repeat(x, self.num_points) for x in (height, width, start)))


class Level(NamedTuple):
    """A feature map: its pixel (y, x) has index start + y * width + x on the axis S."""

    height: np.ndarray | jax.Array  # int32
    width: np.ndarray | jax.Array
    start: np.ndarray | jax.Array


class Operands(NamedTuple):
    """Every array of a call."""

    value: jax.Array  # [B, S, M, D]
    sampling_locations: jax.Array  # [B, Q, M, K, 2], (x, y), 0 to 1 from edge to edge of the level
    attention_weights: jax.Array  # [B, Q, M, K]; logits with normalize="softmax"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """The operands whose gradients are asked for."""

    names: frozenset[str]

    @property
    def in_order(self) -> list[str]:
        """The names in the order of the operands, the same in each process."""
        return [name for name in DIFFERENTIABLE if name in self.names]


@exportable_tuple
class MultiScaleDeformableAttentionGrads(NamedTuple):
    """Gradients, each with its argument's shape and dtype; None = not asked."""

    value: jax.Array | tuple[jax.Array, ...] | None = None
    sampling_locations: jax.Array | None = None
    attention_weights: jax.Array | None = None


class Residuals(NamedTuple):
    """The arrays that the forward leaves for the backward: its inputs alone."""

    operands: Operands
    wanted: Wanted

    def gradients(self, found: dict[str, jax.Array]) -> MultiScaleDeformableAttentionGrads:
        """Returns gradients by name in the types of their operands."""
        like = self.operands._asdict()
        return MultiScaleDeformableAttentionGrads(
            **{name: match_type(found[name], like[name]) for name in self.wanted.in_order}
        )


class MultiScaleDeformableAttentionKeywords(TypedDict, total=False):
    """Keywords of `multi_scale_deformable_attention`."""

    level_start_index: Sequence[int] | Array | None
    num_points: Sequence[int] | None
    padding_mode: PaddingMode
    method: SamplingMethod
    normalize: Normalize | None
    deterministic_sums: bool | None
    implementation: Implementation | None
    deterministic: bool | None
