"""Computes a part of a loop again in its derivatives."""

from collections.abc import Callable
from typing import Any

import jax


def checkpoint(function: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `jax.checkpoint` of a function that is a call of its own in it, which XLA inlines.

    `jax.experimental.checkify` of indices makes constants where something is read or written by index, and
    refuses those of a checkpoint's body; a call within takes them.
    """
    return jax.checkpoint(jax.jit(function), prevent_cse=prevent_cse)
