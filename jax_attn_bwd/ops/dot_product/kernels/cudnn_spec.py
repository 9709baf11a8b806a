"""What cuDNN is told, and what it reads."""

from typing import NamedTuple

import jax


class Call(NamedTuple):
    """What a call is told at trace time.

    Attributes:
      scale: multiplies the products; positive.
      is_causal: a row sees the columns up to its own index.
      window: with `is_causal`, how many columns a row sees, its own included; None = all.
      interpret: compute it in jnp, `cudnn_twin.py`.
    """

    scale: float
    is_causal: bool
    window: int | None
    interpret: bool


class Arrays(NamedTuple):
    """What both directions read; bfloat16 or float16 but for the ends."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    bias: jax.Array | None = None  # [B|1, N|1, T, S]
    rows_end: jax.Array | None = None  # int32 [B], at least 1: rows from here on see nothing; give both ends
    columns_end: jax.Array | None = None  # int32 [B], at least 1: columns from here on are not seen
