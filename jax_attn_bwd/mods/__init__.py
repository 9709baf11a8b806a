"""Named masks and scores for `dot_product_attention(..., mask_mod=, score_mod=, mod_args=)`.

Masks are functions `(batch, head, row, column, *args) -> bool` (True attends), scores are functions
`(logits, batch, head, row, column, *args) -> logits`. What they read of `mod_args`, their docstrings say: a
mask the first ones, a score the last. `&`, `|` and `~` combine masks, and hand each its arguments in the
order in which the masks are written. Equal ones are one static argument: `sliding_window(64)` written twice
is compiled once.

`picture` draws which tiles a mask leaves to be visited: `#` all of a tile is seen, `+` some, `.` nothing, and
it is skipped.

Example:
  >>> import jax.numpy as jnp, numpy as np
  >>> from jax_attn_bwd import dot_product_attention, mods
  >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
  >>> ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4)  # four packed documents
  >>> out = dot_product_attention(q, k, v, mask_mod=mods.causal & mods.document, mod_args=(ids,))
  >>> out.shape
  (2, 16, 4, 8)
  >>> print(mods.picture(mods.causal & mods.document, 16, 16, (ids,), block=2))
  +.......
  #+......
  ..+.....
  ..#+....
  ....+...
  ....#+..
  ......+.
  ......#+

References:
  He et al., FlexAttention: a programming model for optimized attention kernels, 2024, arXiv:2412.05496.
"""

from jax_attn_bwd.mods.array_masks import blocks, blocks_from_indices, packed
from jax_attn_bwd.mods.masks import (
    Mask,
    causal,
    dilated,
    document,
    global_tokens,
    picture,
    prefix_lm,
    sliding_window,
    static_prefix_lm,
    tiles,
    tree,
    tree_intervals,
)
from jax_attn_bwd.mods.scores import Score, alibi, alibi_slopes, relative_bias, soft_cap, static_alibi

__all__ = [
    "Mask",
    "Score",
    "alibi",
    "alibi_slopes",
    "blocks",
    "blocks_from_indices",
    "causal",
    "dilated",
    "document",
    "global_tokens",
    "packed",
    "picture",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "soft_cap",
    "static_alibi",
    "static_prefix_lm",
    "tiles",
    "tree",
    "tree_intervals",
]
