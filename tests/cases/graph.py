"""Cases of the graph operators that tests, benchmarks and full compilation alone read."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import (
    edge_max_bwd,
    edge_mean_bwd,
    edge_softmax_bwd,
    edge_sum_bwd,
    graph_attention_bwd,
    graph_attention_v2_bwd,
    graph_transformer_attention_bwd,
)
from jax_attn_bwd._core.cases import Case
from jax_attn_bwd.ops.graph import cases
from jax_attn_bwd.ops.graph.cases import OPERATORS, PADDED, data, graph_of, hub, with_heads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

WHOLE = ("attention_weights", "dropout_key")  # the entries of a batch share these


def in_batches(make: Callable[..., Case]) -> Callable[..., Case]:
    """Makes cases whose arrays have the axes `batch` in front, but for those that entries share."""

    def case(name, *, batch=(), shared=(), **arguments):
        made = make(name, **arguments)

        def build(rng):
            found = made.build(rng)
            entries = [made.build(rng) for _ in np.ndindex(batch)]
            for name in set(found) - {*WHOLE, *shared}:
                found[name] = np.stack([e[name] for e in entries]).reshape(*batch, *found[name].shape)
            return found

        return replace(made, build=build) if batch else made

    return case


gat, gatv2, transformer, scores = map(in_batches, (cases.gat, cases.gatv2, cases.transformer, cases.scores))
EMPTY = {
    "no_edges": partial(graph_of, nnz=0),
    "only_padding": partial(graph_of, nnz=0, capacity=4),
    "no_destination": partial(BipartiteCSC.from_coo, [], [], 3, 0, capacity=2),
    "no_source": partial(BipartiteCSC.from_coo, [], [], 0, 3),
    "one_edge": partial(graph_of, 1, 1, 1),
}
SMALL = {"graph": partial(graph_of, 3, 2, 5), "H": 2, "D": 2, "tags": ("second",)}
SHARD = {"H": 8, "D": 4, "tags": ("shard",)}


def _compiled(make: Callable[..., Case], *extra: str) -> Iterator[Case]:
    """Cases for which the kernels are compiled; the graph is small, since no kernel depends on its size."""
    compiled = partial(make, graph=hub, dtype="float32")
    for H, D in ((1, 8), (8, 8), (1, 256), (4, 64), (16, 8), (16, 64)):
        yield compiled(f"compiled {H} x {D}", H=H, D=D, tags=("mosaic_gpu", "table"))
    yield compiled("compiled 4 x 64 bfloat16", H=4, D=64, dtype="bfloat16", tags=("mosaic_gpu",))
    yield compiled("compiled 8 x 8, a batch", H=8, D=8, batch=(2,), tags=("mosaic_gpu",))
    everything = {"extra": ("edge", "dropout_key", *extra), "concat_heads": False, "dropout_rate": 0.4}
    for H, D, more in ((4, 16, ("table",)), (8, 64, ())):
        tags = ("mosaic_gpu", "A100", "B200", *more)
        yield compiled(f"compiled {H} x {D} everything", H=H, D=D, tags=tags, **everything)


def _measured(make: Callable[..., Case]) -> Iterator[Case]:
    measured = partial(make, H=8, D=16, dtype="float32")
    graph = partial(graph_of, 400, 400, 3000)
    yield measured("random 400 nodes, 3000 edges, 8 x 16", graph=graph, tags=("quick",))
    for edges in (1000, 2000, 2**14, 2**16, 2**18, 2**20):
        graph = partial(graph_of, edges // 16, edges // 16, edges)
        tags = ("scaling",) if edges > 2000 else ("quick_scaling",)
        yield measured(f"16 edges a node, 8 x 16: E={edges}", graph=graph, tags=tags)


_REDUCTION = (
    data("further_axes_padded", rest=(2, 3), graph=PADDED),
    data("no_further_axis", rest=(), tags=("edge",)),
    data("hub", graph=hub, tags=("edge",)),
    *(data(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
    data("second", **SMALL),
    data("shard", **SHARD),
)
CASES = {
    "graph_attention": (
        gat("mean_elu_padded", graph=PADDED, concat_heads=False, activation="elu", extra=("edge",)),
        *(gat(name, graph=graph, extra=("edge",), tags=("edge",)) for name, graph in EMPTY.items()),
        gat(
            "batch_edge_dropout",
            batch=(3,),
            extra=("edge", "dropout_key"),
            dropout_rate=0.4,
            concat_heads=False,
            graph=PADDED,
        ),
        gat("batches_shared_dst", batch=(2, 3), shared=("dst",), extra=("dropout_mask",), tags=("edge",)),
        gat("second_edge", **SMALL, extra=("edge",), activation="tanh"),
        gat("second_dropout", **SMALL, extra=("dropout_mask",), concat_heads=False),
        *_measured(gat),
        *_compiled(gat),
    ),
    "graph_attention_v2": (
        gatv2("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4),
        *(gatv2(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
        gatv2("second_edge", **SMALL, extra=("edge",), activation="tanh"),
        gatv2("batch_shared_edge", batch=(3,), shared=("edge",), extra=("edge",), tags=("edge",)),
        gatv2("shard_batch", batch=(4,), **SHARD),
        gatv2("shard", **SHARD),
        *_measured(gatv2),
        *_compiled(gatv2),
    ),
    "graph_transformer_attention": (
        transformer("mean_padded", graph=PADDED, concat_heads=False, scale=0.3, extra=("edge",)),
        transformer("hub", graph=hub),
        *(
            transformer(name, graph=graph, extra=("score_bias",), tags=("edge",))
            for name, graph in EMPTY.items()
        ),
        transformer("grouped_edge_padded", H=4, K=2, graph=PADDED, extra=("edge", "score_bias")),
        transformer("value_width_hub", Dv=1, graph=hub, tags=("edge",)),
        transformer("second_edge_bias", **SMALL, extra=("edge", "score_bias")),
        transformer("second_grouped", **SMALL, K=1, Dv=3),
        transformer(
            "batches_edge_bias",
            batch=(2, 1),
            shared=("query",),
            extra=("edge", "score_bias", "dropout_key"),
            dropout_rate=0.4,
            tags=("edge",),
        ),
        transformer(
            "batch_shared_value",
            batch=(2,),
            shared=("key", "score_bias"),
            extra=("score_bias",),
            tags=("edge",),
        ),
        transformer("shard_batch", batch=(4,), **SHARD),
        transformer("shard", **SHARD),
        transformer("shard_grouped", H=16, K=8, D=4, Dv=2, tags=("shard",)),
        *_measured(transformer),
        *_compiled(transformer, "score_bias"),
    ),
    "edge_softmax": (
        scores("large_padded", graph=PADDED, spread=1e3),
        scores("hub", graph=hub),
        *(scores(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
        scores("second", **SMALL),
        scores("batches_padded", batch=(2, 3), graph=PADDED, tags=("edge",)),
        scores("shard_batch", batch=(4,), **SHARD),
        scores("shard", **SHARD),
    ),
    **dict.fromkeys(("edge_sum", "edge_mean", "edge_max"), _REDUCTION),
}


def _of_attention(function):
    def call(cotangents, outputs, arrays, options, wrt):
        dout, dweights, dlse = cotangents
        out, _, lse = outputs
        out = out if options.get("concat_heads", True) else None
        saved = {"out": out, "lse": lse, "dweights": dweights, "dlse": dlse}
        grads = function(dout, **with_heads({**arrays, **options}), **saved, wrt=wrt)
        return {name: x for name, x in grads._asdict().items() if x is not None}

    return call


def _of_softmax(cotangents, outputs, arrays, options, wrt):
    return {"scores": edge_softmax_bwd(cotangents[0], options["graph"], outputs[0])}


def _of_reduction(function):
    def call(cotangents, outputs, arrays, options, wrt):
        saved = (arrays["edge"], *outputs) if function is edge_max_bwd else ()
        return {"edge": function(*cotangents, options["graph"], *saved)}

    return call


def batch_of(arrays) -> tuple[int, ...]:
    """Returns the batch axes of a call, by its arrays."""
    given = (x.shape[:-2] for name, x in arrays.items() if name not in ("graph", *WHOLE))
    return max(given, key=len, default=())


def entries_of(arrays) -> list[dict[str, Any]]:
    """Returns the arrays of each entry of the batch."""
    batch = batch_of(arrays)

    def at(index, name, x):
        return x[index] if name not in WHOLE and x.ndim == len(batch) + 2 else x

    return [{name: at(index, name, x) for name, x in arrays.items()} for index in np.ndindex(batch)]


def _definition(reference):
    """Takes a definition, which knows no batch, over the entries of one."""

    @functools.wraps(reference)
    def call(**arguments):
        arrays = {name: arguments.pop(name) for name, x in list(arguments.items()) if hasattr(x, "ndim")}
        if not (batch := batch_of(arrays)):
            return reference(**arrays, **arguments)
        found = [reference(entry=i, **one, **arguments) for i, one in enumerate(entries_of(arrays))]
        return tuple(jnp.stack(x).reshape(*batch, *x[0].shape) for x in zip(*found, strict=True))

    return call


def _hidden(arrays, options):
    """What is hidden in every entry of those that share it."""
    if not (batch := batch_of(arrays)):
        return cases.hidden(arrays, options)
    found = [cases.hidden(one, options) for one in entries_of(arrays)]
    stacked = {name: np.stack([one[name] for one in found]) for name in found[0]}
    own = {name for name, x in arrays.items() if x.ndim < len(batch) + 2}
    return {name: x.all(0) if name in own else x.reshape(*batch, *x.shape[1:]) for name, x in stacked.items()}


# columns are heads, one after the other
_NODES = {"src": "BSN", "dst": "BTN", "edge": "BSN"}
_QUERIES = {"query": "BTN", "key": "BSN", "value": "BSN", "edge": "BSN", "score_bias": "BSN"}
_OUTPUTS = {"out": "BTN", "weights": "BSN", "lse": "BTN"}
_BACKWARD = {
    "graph_attention": (_of_attention(graph_attention_bwd), _OUTPUTS | _NODES),
    "graph_attention_v2": (
        _of_attention(graph_attention_v2_bwd), _OUTPUTS | _NODES | {"attention_weights": "N"},
    ),
    "graph_transformer_attention": (_of_attention(graph_transformer_attention_bwd), _OUTPUTS | _QUERIES),
    "edge_softmax": (_of_softmax, {"scores": "BSN", "weights": "BSN"}),
    "edge_sum": (_of_reduction(edge_sum_bwd), {"edge": "SN", "out": "TN"}),
    "edge_mean": (_of_reduction(edge_mean_bwd), {"edge": "SN", "out": "TN"}),
    "edge_max": (_of_reduction(edge_max_bwd), {"edge": "SN", "out": "TN"}),
}  # fmt: skip
TRAITS: dict[str, dict[str, Any]] = {
    o.name: {"backward": run, "backward_wrt": o.differentiable, "axes": axes}
    for o in OPERATORS
    for run, axes in [_BACKWARD[o.name]]
}
for operator in OPERATORS:
    if "lse" in operator.outputs:
        TRAITS[operator.name]["reference"] = _definition(operator.reference)
    if "weights" in operator.outputs:  # the others have further axes behind, and none in front
        TRAITS[operator.name]["hidden"] = _hidden
