"""The portable path where queries may lie on several devices: part of the queries by part.

A part of the queries samples the whole value. Its rows of the output and of the points' gradients are those
of the whole, and the gradient of the value, equation (8) of `backward.py`, is the sum over the parts: it is
taken once, after the loop over the points. `_core/row_sharding.py` tells how parts lie on devices.
"""

from functools import partial
from typing import Any

import jax

from jax_attn_bwd._core import row_sharding
from jax_attn_bwd._core.row_sharding import Cut
from jax_attn_bwd._core.sharding import match_type, unsharded
from jax_attn_bwd.ops.deformable import backward as portable_backward
from jax_attn_bwd.ops.deformable import forward as portable_forward
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionGrads, Operands, Options, Residuals

_QUERIES = {"sampling_locations": 1, "attention_weights": 1}  # the axis Q


def forward(options: Options, operands: Operands) -> jax.Array:
    """As `forward.forward`, wherever queries and pixels lie."""
    cut, operands = _cut(operands), operands._replace(value=unsharded(operands.value, 1))
    return portable_forward.forward(options, operands) if cut is None else _forward(options, cut, operands)


def backward(options: Options, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """As `backward.backward`, wherever queries and pixels lie."""
    given, wanted = residuals
    cut, residuals = _cut(given), Residuals(given._replace(value=unsharded(given.value, 1)), wanted)
    if cut is None:
        grads = portable_backward.backward(options, residuals, dout)._asdict()
    else:
        grads = _backward(options, cut, residuals, dout)
    return MultiScaleDeformableAttentionGrads(
        **{name: match_type(grads[name], getattr(given, name)) for name in wanted.names}
    )


def _cut(operands: Operands) -> Cut | None:
    weights = operands.attention_weights
    return row_sharding.cut(weights, 1, weights.shape[0])


def _value(cut: Cut, operands: Operands) -> jax.Array:
    """All pixels, on every device."""
    return operands.value if cut.axes else row_sharding.gathered(operands.value, 1)


def _rows(operands: Operands) -> dict[str, jax.Array]:
    return {name: getattr(operands, name) for name in _QUERIES}


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options: Options, cut: Cut, operands: Operands) -> jax.Array:
    def of_part(_, rows, value):
        return {"out": portable_forward.forward(options, Operands(value, **rows))}

    value, place = _value(cut, operands), row_sharding.place(operands.attention_weights, 1)
    if not cut.axes:  # what one query reads is not summed over them: XLA may cut it as it likes
        return portable_forward.forward(options, operands._replace(value=value))
    results = {"out": place._replace(spec=place.spec[:3])}
    return row_sharding.over(cut, of_part, _rows(operands), value, _QUERIES, results)["out"]


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, cut: Cut, residuals: Residuals, dout: Any) -> dict[str, jax.Array]:
    """The gradients by name, accumulated in float32 or wider."""
    operands, wanted = residuals

    def of_part(_, rows, value):
        part = Operands(value, **{name: rows[name] for name in _QUERIES})
        return portable_backward.gradients(options, Residuals(part, wanted), rows["dout"])

    results = {name: row_sharding.place(getattr(operands, name), _QUERIES.get(name)) for name in wanted.names}
    rows, axes = _rows(operands) | {"dout": dout}, _QUERIES | {"dout": 1}
    return row_sharding.over(cut, of_part, rows, _value(cut, operands), axes, results)
