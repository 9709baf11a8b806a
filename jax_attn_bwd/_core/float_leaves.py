"""Trees of arrays of which only some are floating: the others have None in place of a gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def floats(args: Any) -> Any:
    """Returns `args` with None in the place of what is not floating: their gradients have this structure."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, args)


def over_floats(f: Callable[..., Any], numbers: Any, args: Any, otherwise: Any = lambda old: None) -> Any:
    """Maps `f(x, arg)` over the `numbers`, and `otherwise(arg)` over the arguments that have none."""
    pick = lambda x, arg: otherwise(arg) if x is None else f(x, arg)
    return jax.tree.map(pick, numbers, args, is_leaf=lambda x: x is None)


def filled(args: Any, numbers: Any) -> Any:
    """Returns `args` with `numbers`, which have the structure of `floats`, in place of their floats."""
    return over_floats(lambda new, old: new, numbers, args, otherwise=lambda old: old)


def in_dtypes_of(args: Any, gradients: Any) -> Any:
    """Returns the `gradients` of floats in `args`, in their dtypes; None stays None."""
    if gradients is None:
        return None
    return over_floats(lambda x, arg: x.astype(jnp.result_type(arg)), gradients, args)
