"""The arrays that a source's backward writes its gradients into: here they tell what is asked for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_attn_bwd._core import checks


def is_asked(operator: str, argument: str, slot: Any) -> bool:
    """Whether a gradient is asked for: True, or an array to write it into; None or False refuses it."""
    if slot is None or isinstance(slot, bool | np.bool_):
        return bool(slot)
    if not checks.is_array(slot):
        expected = "be None or False to refuse the gradient, True, or an array of its shape"
        raise TypeError(checks.message(operator, argument, expected, type(slot).__name__))
    return True


def check(operator: str, argument: str, slot: Any, like: Any, dtypes: Sequence[Any]) -> None:
    """An array in a slot has the shape of `like`, whose gradient it asks for, and one of `dtypes`."""
    if not checks.is_array(slot):
        return
    checks.shape(operator, argument, slot, "that of the gradient", like.shape)
    if slot.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(np.dtype(dtype)) for dtype in dtypes))
        raise TypeError(checks.message(operator, argument, f"have dtype {names}", slot.dtype))
