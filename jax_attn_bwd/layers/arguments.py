"""What the layers of several operators check and convert alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks


def positive(kind: str, argument: str, x: Any) -> int:
    """`x`, a positive int."""
    return checks.integer(kind, argument, x, least=1)


def as_array(x: Any) -> jax.Array:
    """`x`, a NumPy array or a tensor of PyTorch, which may require a gradient or be of bfloat16."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        # NumPy has no bfloat16; float32 holds all its numbers
        if str(x.dtype) == "torch.bfloat16":
            return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    return jnp.asarray(np.asarray(x))
