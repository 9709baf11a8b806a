"""Arguments of the source for which there is no use here: a call that names one is told what to do."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jax_attn_bwd._core import checks

F = TypeVar("F", bound=Callable[..., Any])
_INSTEAD = {
    "output_embedding": "the output is returned",
    "softmax_scores": "they are returned with return_softmax_scores=True",
    "activation_scores": "the backward does without them",
    "grad_softmax_scores": "it was workspace",
    "grad_attention_weights_workspace": "it made a gradient deterministic that always is here",
    "stream_id": "XLA orders its own work",
}


def source_call(function: F) -> F:
    """`function`, a call of the source; naming what is left out of it raises a TypeError with the remedy."""
    left_out = _INSTEAD.keys() - inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() & left_out:
            operator = f"cugraph.{function.__name__}"
            raise TypeError(checks.message(operator, name, "be left out", "one", _INSTEAD[name]))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
