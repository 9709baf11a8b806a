"""The portable path where queries may lie on several devices: piece by piece of the queries.

A piece of the queries samples the whole value. Its rows of the output and of the points' gradients are those
of the whole, and the gradient of the value, equation (8) of `backward.py`, is the sum over the pieces: it
is taken once, after the loop over the points. `_core/split.py` runs the pieces.
"""

from functools import partial
from typing import Any

import jax

from jax_attn_bwd._core import split
from jax_attn_bwd._core.sharding import gathered, match_type, unsharded
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.deformable import backward as portable_backward
from jax_attn_bwd.ops.deformable import forward as portable_forward
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionGrads, Operands, Options, Residuals

_QUERIES = {"sampling_locations": 1, "attention_weights": 1, "dout": 1}  # the axis Q


def sharded_forward(options: Options, operands: Operands) -> jax.Array:
    """Computes `forward.forward` wherever queries and pixels lie."""
    pieces, operands = _pieces(operands), operands._replace(value=unsharded(operands.value, 1))
    if pieces is None:
        return portable_forward.forward(options, operands)
    return _forward_in_pieces(options, pieces, operands)


def sharded_backward(
    options: Options, residuals: Residuals, dout: jax.Array
) -> MultiScaleDeformableAttentionGrads:
    """Computes `backward.backward` wherever queries and pixels lie."""
    given, wanted = residuals
    pieces, residuals = _pieces(given), Residuals(given._replace(value=unsharded(given.value, 1)), wanted)
    if pieces is None:
        grads = portable_backward.backward(options, residuals, dout)._asdict()
    else:
        grads = _gradients_in_pieces(options, pieces, residuals, dout)
    return MultiScaleDeformableAttentionGrads(
        **{name: match_type(grads[name], getattr(given, name)) for name in wanted.names}
    )


def _pieces(operands: Operands) -> Pieces | None:
    weights = operands.attention_weights
    return split.of_rows(weights, 1, weights.shape[0])


def _with_all_pixels(pieces: Pieces, operands: Operands) -> Operands:
    """`operands` whose value is whole on every device."""
    return operands if pieces.mesh_axes else operands._replace(value=gathered(operands.value, 1, operands))


@partial(jax.jit, static_argnums=(0, 1))
def _forward_in_pieces(options: Options, pieces: Pieces, operands: Operands) -> jax.Array:
    operands = _with_all_pixels(pieces, operands)
    if not pieces.mesh_axes:  # what one query reads is not summed over them: XLA may cut it as it likes
        return portable_forward.forward(options, operands)
    run = lambda _, arrays: {"out": portable_forward.forward(options, Operands(**arrays))}
    place = split.place(operands.attention_weights, 1)
    results = {"out": place._replace(spec=place.spec[:3])}
    return split.over(pieces, run, operands._asdict(), _QUERIES, results)["out"]


@partial(jax.jit, static_argnums=(0, 1))
def _gradients_in_pieces(
    options: Options, pieces: Pieces, residuals: Residuals, dout: Any
) -> dict[str, jax.Array]:
    """The gradients by name, accumulated in float32 or wider."""
    operands, wanted = residuals

    def of_piece(_, arrays):
        dout = arrays.pop("dout")
        return portable_backward.gradients(options, Residuals(Operands(**arrays), wanted), dout)

    results = {name: split.place(getattr(operands, name), _QUERIES.get(name)) for name in wanted.names}
    arrays = _with_all_pixels(pieces, operands)._asdict() | {"dout": dout}
    return split.over(pieces, of_piece, arrays, _QUERIES, results)
