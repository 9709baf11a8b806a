"""The scaled masked softmax: forward and backward, with a padding mask on a CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd import scaled_masked_softmax
from jax_attn_bwd._core.cases import Case
from jax_attn_bwd.bench import peers
from jax_attn_bwd.bench.measure import Workload, compiled_contender, inputs, tag
from jax_attn_bwd.ops.softmax import cases


def workloads(quick: bool, scaling: bool = False) -> Iterator[Workload]:
    """What is measured, built one at a time; `quick` keeps it small, `scaling` is one case at many sizes."""
    (operator,) = cases.OPERATORS
    for case in operator.tagged(tag(quick, scaling)):
        yield _workload(case, *inputs(operator, case))


def _jax_nn(x, mask, scale=1.0):
    return jax.nn.softmax(x * jnp.asarray(scale, x.dtype), axis=-1, where=mask)


def _step(function: Callable, x: jax.Array, mask: Any, dy: jax.Array) -> tuple:
    y, pullback = jax.vjp(lambda x: function(x, mask), x)
    return y, pullback(dy)[0]


def _residual_bytes(function: Callable, x: jax.Array, mask: Any) -> int:
    """What the forward leaves for the backward, beyond the mask."""
    _, pullback = jax.vjp(lambda x: function(x, mask), x)
    leaves = {id(a): a for a in jax.tree.leaves(pullback) if a is not mask}
    return sum(a.nbytes for a in leaves.values())


def _workload(case: Case, arrays: dict[str, Any], dy: jax.Array) -> Workload:
    x, mask, scale = arrays["x"], arrays.get("mask"), case.options.get("scale", 1.0)
    name = "saved for the backward / y"
    share = lambda function: {name: round(_residual_bytes(function, x, mask) / x.nbytes, 2)}
    call, peer = (partial(f, scale=scale) for f in (scaled_masked_softmax, _jax_nn))
    make = lambda function: partial(_step, function)
    contenders = [
        *peers.ours(call, make, x, mask, dy, **share(call)),
        compiled_contender("jax.nn", make(peer), x, mask, dy, **share(peer)),
        compiled_contender("copy of two such arrays", lambda x, dy: (x + 1, dy + 1), x, dy, compare=False),
    ]
    rates = {"GB/s": 5 * x.nbytes / 1e9} if jax.default_backend() != "cpu" else {}  # x, y; y, dy, dx
    tolerance = 8 * float(jnp.finfo(x.dtype).eps)
    return Workload(case.name, contenders, tolerance=tolerance, rates=rates)
