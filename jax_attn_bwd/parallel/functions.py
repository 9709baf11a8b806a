"""`mask_mod` and `score_mod` on a device whose batch entries and heads are not the first of the whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class _Moved:
    """A function that counts entries and heads from others than 0, which it reads of its arguments."""

    function: Callable[..., Any]
    leading: int  # arguments before batch, head, row and column

    def __call__(self, *given: Any) -> Any:
        first, (batch, head, row, column, begin, *args) = given[: self.leading], given[self.leading :]
        entry, number = begin
        return self.function(*first, batch + entry, head + number, row, column, *args)


def beginning_at(entry: Any, head: Any, mask_mod: Any, score_mod: Any, mod_args: Any) -> dict[str, Any]:
    """The three arguments where the first batch entry is number `entry`, and the first head number `head`."""
    if mask_mod is None and score_mod is None:
        return {}
    begin = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (entry, head))
    return {
        "mask_mod": None if mask_mod is None else _Moved(mask_mod, 0),
        "score_mod": None if score_mod is None else _Moved(score_mod, 1),
        "mod_args": (begin, *mod_args),
    }
