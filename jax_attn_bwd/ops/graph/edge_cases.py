"""Named inputs of the operators of edges alone."""

import jax

from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.graph import reference
from jax_attn_bwd.ops.graph.edge_softmax import IMPLEMENTATIONS, edge_softmax, edge_softmax_bwd
from jax_attn_bwd.ops.graph.workloads import COMPILED, EMPTY, PADDED, SHARD, SMALL, case, hidden, hub


def _scores(name, *, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {"scores": spread * rng.standard_normal((graph.capacity, H))}

    return case(build, name, **arguments)


SOFTMAX_CASES = (
    _scores("plain", tags=COMPILED),
    _scores("large_padded", graph=PADDED, spread=1e3),
    _scores("hub", graph=hub),
    *(_scores(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
    _scores("second", **SMALL),
    _scores("shard", **SHARD),
)


def _softmax_call(head_size, **arguments):
    return (edge_softmax(**arguments),)


def _softmax_reference(head_size, graph, scores):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (reference.edge_softmax(graph, scores)[0],)


def _softmax_backward(cotangents, outputs, arrays, options, wrt):
    return {"scores": edge_softmax_bwd(cotangents[0], options["graph"], outputs[0])}


OPERATORS = (
    Operator(
        name="edge_softmax",
        outputs=("weights",),
        differentiable=("scores",),
        implementations=IMPLEMENTATIONS,
        call=_softmax_call,
        reference=_softmax_reference,
        backward=_softmax_backward,
        cases=SOFTMAX_CASES,
        axes={"scores": "SN", "weights": "SN"},
        backward_wrt=("scores",),
        hidden=hidden,
    ),
)
