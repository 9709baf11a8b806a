"""`Mask`: who may see whom. It holds every condition of a call but the bias, which is an operand of its own.

A query t sees a key s if every condition that is given holds:

    elements_ts,   t < its length,   s < its length,   segment_t = segment_s,
    -right <= position_t - position_s <= left,   position_s <= position_t (causal),
    mask_mod(batch, head, position_t, position_s, *mod_args)

A bias of -inf hides, too. `AXES` is the one table of which array has which axes: slices of a batch, parts of
the queries, the keys that travel around a ring, shardings and tiles follow from it. `visibility.py`
reads the conditions: by element, by tile, by row and by column. It also lists what a further one takes.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.masks import Window
from jax_attn_bwd._core.numerics import to_rank

# The axes that stand behind those of the batch: n query heads, t queries, s keys. Size 1 broadcasts.
AXES = {
    "elements": "nts",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "query_segment_ids": "t",
    "key_value_segment_ids": "s",
    "query_positions": "t",
    "key_value_positions": "s",
    "batch_number": "",
    "head_number": "n",
}
RULES = ("is_causal", "window", "mask_mod")


@partial(jax.tree_util.register_dataclass, data_fields=[*AXES, "query_origin", "mod_args"], meta_fields=RULES)
@dataclass(frozen=True)
class Mask:
    """The conditions of a call; None = not given. The first three are static, the others arrays."""

    is_causal: bool = False
    window: Window | None = None  # (left, right)
    mask_mod: Callable[..., Any] | None = None
    elements: Any = None  # bool, broadcasts to [..., N, T, S]: the argument `mask`, True attends
    query_seq_lengths: Any = None  # int32, broadcasts to [...]
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None  # int32, broadcasts to [..., T]
    key_value_segment_ids: Any = None  # int32, broadcasts to [..., S]
    query_positions: Any = None  # None = the index
    key_value_positions: Any = None
    batch_number: Any = None  # int32 [...]: the number of each batch entry, which functions are handed
    head_number: Any = None  # int32 [N]: the number of each query head, likewise
    query_origin: Any = None  # int32 [n]: where n equal stretches of queries begin in the whole; None = at 0
    mod_args: tuple[Any, ...] | None = None  # what `mask_mod` and `score_mod` read; None without them

    def replace(self, **fields: Any) -> "Mask":
        """Returns the mask with other values of some fields."""
        return dataclasses.replace(self, **fields)

    @property
    def rules(self) -> "Mask":
        """The static conditions alone: hashable, without an array."""
        return Mask(self.is_causal, self.window, self.mask_mod)

    @property
    def is_banded(self) -> bool:
        """Tells whether causality or a window compares positions."""
        return self.is_causal or self.window is not None

    @property
    def has_positions(self) -> bool:
        """Tells whether positions are given of queries or of keys."""
        return self.query_positions is not None or self.key_value_positions is not None

    @property
    def hides_keys_alone(self) -> bool:
        """Tells whether the array of elements has no axis of heads or queries, and no segments are given."""
        x = self.elements
        return x is not None and set(x.shape[-3:-1]) <= {1} and not self.has("query_segment_ids")

    def with_segments_of_keys(self) -> "Mask":
        """Turns an array that `hides_keys_alone` into segments: keys that it hides are of another one."""
        if not self.hides_keys_alone:
            return self
        keys = to_rank(self.elements, 3)[..., 0, 0, :]
        ids = jnp.zeros((1,), jnp.int32), jnp.where(keys, 0, 1).astype(jnp.int32)
        return self.replace(elements=None, query_segment_ids=ids[0], key_value_segment_ids=ids[1])

    def has(self, *names: str) -> bool:
        """Tells whether any of these fields is given."""
        return any(getattr(self, name) is not None for name in names)
