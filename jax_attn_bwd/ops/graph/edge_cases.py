"""Named inputs of the operators on edges alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.graph import edge_reductions, reference
from jax_attn_bwd.ops.graph.edge_softmax import IMPLEMENTATIONS, edge_softmax, edge_softmax_bwd
from jax_attn_bwd.ops.graph.workloads import (
    COMPILED,
    EMPTY,
    PADDED,
    SHARD,
    SMALL,
    case,
    hidden,
    hidden_in_entry,
    hub,
)


def _scores(name, *, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {"scores": spread * rng.standard_normal((graph.capacity, H))}

    return case(build, name, **arguments)


def _data(name, *, rest=None, **arguments) -> Case:
    """Makes a case of edge data with the axes `rest`, or an axis of heads; some of its numbers tie."""

    def build(rng, graph, H, D, extra):
        x = rng.standard_normal((graph.capacity, *((H,) if rest is None else rest)))
        some = np.arange(graph.capacity) % 3 == 0
        return {"edge": np.where(np.expand_dims(some, tuple(range(1, x.ndim))), np.round(x), x)}

    return case(build, name, **arguments)


SOFTMAX_CASES = (
    _scores("plain", tags=COMPILED),
    _scores("large_padded", graph=PADDED, spread=1e3),
    _scores("hub", graph=hub),
    *(_scores(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
    _scores("second", **SMALL),
    _scores("batches_padded", batch=(2, 3), graph=PADDED, tags=("edge",)),
    _scores("shard_batch", batch=(4,), **SHARD),
    _scores("shard", **SHARD),
)


REDUCTION_CASES = (
    _data("plain", tags=COMPILED),
    _data("further_axes_padded", rest=(2, 3), graph=PADDED),
    _data("no_further_axis", rest=(), tags=("edge",)),
    _data("hub", graph=hub, tags=("edge",)),
    *(_data(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
    _data("second", **SMALL),
    _data("shard", **SHARD),
)


def _softmax_call(head_size, **arguments):
    return (edge_softmax(**arguments),)


def _softmax_reference(head_size, graph, scores):
    each = jnp.vectorize(lambda x: reference.edge_softmax(graph, x)[0], signature="(e,h)->(e,h)")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (each(scores),)


def _softmax_backward(cotangents, outputs, arrays, options, wrt):
    return {"scores": edge_softmax_bwd(cotangents[0], options["graph"], outputs[0])}


def _reduction(name: str, backward) -> Operator:
    def call(head_size, **arguments):
        return (getattr(edge_reductions, name)(**arguments),)

    def definition(head_size, graph, edge):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return (reference.edge_reduction(name, graph, edge).astype(edge.dtype),)

    return Operator(
        name=name,
        outputs=("out",),
        differentiable=("edge",),
        implementations=edge_reductions.IMPLEMENTATIONS[name],
        call=call,
        reference=definition,
        backward=partial(_reduction_backward, backward),
        cases=REDUCTION_CASES,
        axes={"edge": "SN", "out": "TN"},
        backward_wrt=("edge",),
        hidden=hidden_in_entry,  # edges have their further axes behind
    )


def _reduction_backward(backward, cotangents, outputs, arrays, options, wrt):
    saved = (arrays["edge"], *outputs) if backward is edge_reductions.edge_max_bwd else ()
    return {"edge": backward(*cotangents, options["graph"], *saved)}


OPERATORS = (
    _reduction("edge_sum", edge_reductions.edge_sum_bwd),
    _reduction("edge_mean", edge_reductions.edge_mean_bwd),
    _reduction("edge_max", edge_reductions.edge_max_bwd),
    Operator(
        name="edge_softmax",
        outputs=("weights",),
        differentiable=("scores",),
        implementations=IMPLEMENTATIONS,
        call=_softmax_call,
        reference=_softmax_reference,
        backward=_softmax_backward,
        cases=SOFTMAX_CASES,
        axes={"scores": "BSN", "weights": "BSN"},
        backward_wrt=("scores",),
        hidden=hidden,
    ),
)
