"""Named inputs of the graph operators; `edge_cases.py` has the operators on edges alone."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.graph import api, derivatives, edge_cases, reference, rule
from jax_attn_bwd.ops.graph.workloads import (
    COMPILED,
    EMPTY,
    MORE_NODES,
    PADDED,
    SHARD,
    SMALL,
    batch_of,
    case,
    entries_of,
    graph_of,
    hidden,
    hub,
)


def _extra(rng, graph, H, widths, names) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "edge" in names:
        found["edge"] = rng.standard_normal((graph.capacity, widths["edge"]))
    if "score_bias" in names:
        found["score_bias"] = rng.standard_normal((graph.capacity, H))
        found["score_bias"][rng.random(found["score_bias"].shape) < 0.3] = -np.inf
    if "dropout_mask" in names:
        found["dropout_mask"] = (rng.random((H, graph.capacity)) < 0.6) / 0.6
    if "dropout_key" in names:
        found["dropout_key"] = np.array([7, 11], np.uint32)
    return found


def _additive(rng, graph, width, spread, size) -> dict[str, Any]:
    """Draws nodes of that width, and `size` attention weights of standard deviation `spread`."""
    return {
        "src": rng.standard_normal((graph.num_src, width)),
        "dst": rng.standard_normal((graph.num_dst, width)),
        "attention_weights": spread * rng.standard_normal(size),
    }


def _gat(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        found = _extra(rng, graph, H, {"edge": 2 * H}, extra)
        size = 2 * H * D + (2 * H if "edge" in found else 0)
        return _additive(rng, graph, H * D, spread, size) | found

    return case(build, name, **arguments)


def _gatv2(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return _additive(rng, graph, H * D, spread, H * D) | _extra(rng, graph, H, {"edge": H * D}, extra)

    return case(build, name, **arguments)


def _transformer(name, *, K=None, Dv=None, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        shared, width = K or H, Dv or D
        return {
            "query": rng.standard_normal((graph.num_dst, H * D)),
            "key": rng.standard_normal((graph.num_src, shared * D)),
            "value": rng.standard_normal((graph.num_src, shared * width)),
        } | _extra(rng, graph, H, {"edge": shared * D}, extra)

    return case(build, name, **arguments)


def _of_kernels(
    make: Callable[..., Case], *extra: str, heads: dict[tuple[int, int], dict[str, Any]], narrow: str = "wide"
) -> Iterator[Case]:
    """Yields heads that GPU kernels take, `heads` with options; `extra`: arrays beside "edge" and dropout."""
    # scores of the size that layers begin with
    make = make if "score_bias" in extra else partial(make, spread=0.1)
    everything = {"extra": ("edge", "dropout_mask", *extra)}
    for name, H, D, tag in (("wide", 4, 32, "kernel"), ("narrow", 8, 8, narrow)):
        yield make(name, H=H, D=D, graph=PADDED, tags=(tag, "repeat", "poison"), **everything)
        yield make(f"{name} hub", H=H, D=D, graph=hub, tags=("large", "repeat"), **everything)
    for (H, D), options in heads.items():
        yield make(f"{H} x {D}", H=H, D=D, tags=("wide", "large"), **options)


def _compiled(make: Callable[..., Case], *extra: str) -> Iterator[Case]:
    """Yields cases for which kernels are compiled; of a small graph, since no kernel depends on its size."""
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
    for nodes, edges, tags in ((400, 3000, ("quick",)), (40_000, 500_000, ("bench", "bench_gpu", "timed"))):
        name = f"random {nodes} nodes, {edges} edges, 8 x 16"
        graph = partial(graph_of, nodes, nodes, edges)
        yield make(name, graph=graph, H=8, D=16, tags=tags, dtype="float32")
    for edges in (1000, 2000, 2**14, 2**16, 2**18, 2**20):
        graph = partial(graph_of, edges // 16, edges // 16, edges)
        scaling = "scaling" if edges > 2000 else "quick_scaling"
        timed = (scaling, "timed") if edges == 2**14 else (scaling,)
        yield make(f"16 edges a node, 8 x 16: E={edges}", graph=graph, H=8, D=16, tags=timed, dtype="float32")


GAT_CASES = (
    _gat("plain", tags=COMPILED),
    _gat("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4, tags=COMPILED),
    _gat("mean_elu_padded", graph=PADDED, concat_heads=False, activation="elu", extra=("edge",)),
    _gat("hub", graph=hub, extra=("dropout_mask",), activation="relu", tags=("ci", "check")),
    *(_gat(name, graph=graph, extra=("edge",), tags=("edge",)) for name, graph in EMPTY.items()),
    _gat(
        "batch_edge_dropout",
        batch=(3,),
        extra=("edge", "dropout_key"),
        dropout_rate=0.4,
        concat_heads=False,
        graph=PADDED,
    ),
    _gat("batches_shared_dst", batch=(2, 3), shared=("dst",), extra=("dropout_mask",), tags=("edge",)),
    _gat("second_edge", **SMALL, extra=("edge",), activation="tanh"),
    _gat("second_dropout", **SMALL, extra=("dropout_mask",), concat_heads=False),
    *_of_kernels(
        _gat,
        heads={
            (1, 8): {"activation": "scalar"},
            (1, 128): {"activation": "tanh"},
            (8, 16): {"extra": ("edge", "dropout_key"), "dropout_rate": 0.4, "activation": "elu"},
            (16, 8): {"graph": PADDED, "activation": "relu"},
        },
        narrow="kernel",
    ),
    *_compiled(_gat),
    *_measured(_gat),
)
GATV2_CASES = (
    _gatv2("plain", tags=COMPILED),
    _gatv2("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4),
    _gatv2(
        "mean_sigmoid_padded",
        graph=PADDED,
        concat_heads=False,
        activation="sigmoid",
        extra=("edge",),
        tags=COMPILED,
    ),
    *(_gatv2(name, graph=graph, tags=("edge",)) for name, graph in EMPTY.items()),
    _gatv2("second_edge", **SMALL, extra=("edge",), activation="tanh"),
    _gatv2("batch_shared_edge", batch=(3,), shared=("edge",), extra=("edge",), tags=("edge",)),
    _gatv2("shard_batch", batch=(4,), **SHARD),
    _gatv2("shard", **SHARD),
    *_of_kernels(
        _gatv2,
        heads={
            (4, 8): {"graph": MORE_NODES, "activation": "relu"},
            (6, 16): {"concat_heads": False, "activation": "tanh", "extra": ("edge",)},
            (2, 64): {"concat_heads": False, "activation": "elu", "extra": ("edge",)},
            (6, 64): {"activation": "scalar"},
            (16, 8): {"activation": "sigmoid"},
        },
    ),
    *_compiled(_gatv2),
    *_measured(_gatv2),
)
TRANSFORMER_CASES = (
    _transformer("plain", tags=COMPILED),
    _transformer("edge_bias", extra=("edge", "score_bias", "dropout_key"), dropout_rate=0.4, tags=COMPILED),
    _transformer("mean_padded", graph=PADDED, concat_heads=False, scale=0.3, extra=("edge",)),
    _transformer("hub", graph=hub),
    *(
        _transformer(name, graph=graph, extra=("score_bias",), tags=("edge",))
        for name, graph in EMPTY.items()
    ),
    _transformer("grouped_edge_padded", H=4, K=2, graph=PADDED, extra=("edge", "score_bias")),
    _transformer(
        "grouped_value_width",
        H=4,
        K=1,
        Dv=5,
        extra=("dropout_key",),
        dropout_rate=0.4,
        concat_heads=False,
        tags=("ci", "check"),
    ),
    _transformer("value_width_hub", Dv=1, graph=hub, tags=("edge",)),
    _transformer("second_edge_bias", **SMALL, extra=("edge", "score_bias")),
    _transformer("second_grouped", **SMALL, K=1, Dv=3),
    _transformer(
        "batches_edge_bias",
        batch=(2, 1),
        shared=("query",),
        extra=("edge", "score_bias", "dropout_key"),
        dropout_rate=0.4,
        tags=("edge",),
    ),
    _transformer(
        "batch_shared_value", batch=(2,), shared=("key", "score_bias"), extra=("score_bias",), tags=("edge",)
    ),
    _transformer("shard_batch", batch=(4,), **SHARD),
    _transformer("shard", **SHARD),
    _transformer("shard_grouped", H=16, K=8, D=4, Dv=2, tags=("shard",)),
    *_of_kernels(
        _transformer,
        "score_bias",
        heads={
            (2, 8): {"graph": MORE_NODES, "extra": ("edge", "score_bias")},
            (1, 128): {"graph": PADDED},
            (8, 64): {"extra": ("edge", "score_bias", "dropout_key"), "dropout_rate": 0.4},
        },
    ),
    *_compiled(_transformer, "score_bias"),
    *_measured(_transformer),
)
MAKERS = {"graph_attention": _gat, "graph_attention_v2": _gatv2, "graph_transformer_attention": _transformer}


def _with_heads(arguments):
    """Puts the number of heads in place of their size, which shards of the columns share."""
    arguments = dict(arguments)
    D = arguments.pop("head_size")
    if "query" not in arguments:
        return arguments | {"num_heads": arguments["src"].shape[-1] // D}
    return arguments | {
        "num_heads": arguments["query"].shape[-1] // D,
        "num_kv_heads": arguments["key"].shape[-1] // D,
    }


def _call(function):
    def call(**arguments):
        arguments = _with_heads(arguments)
        return function(return_attention_weights=True, return_residual=True, **arguments)

    return call


def _reference(function):
    def of_entry(number, dropout_rate=0.0, dropout_key=None, dropout_mask=None, **arguments):
        factor = None if dropout_mask is None else dropout_mask.T
        if dropout_key is not None:
            E, H = arguments["graph"].capacity, arguments["num_heads"]
            words, u32 = dropout.key_words(dropout_key), jnp.uint32
            keys = dropout.head_keys(words, u32(number), jnp.arange(H, dtype=u32)[None])
            rows = jnp.arange(E, dtype=u32)[:, None]
            keep = dropout.keep(keys, rows, u32(0), dropout_rate)
            factor = jnp.where(keep, dropout.survivor_factor(dropout_rate), 0.0)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            dtype = arguments["query" if "query" in arguments else "src"].dtype
            factor = None if factor is None else factor.astype(dtype)
            return function(factor=factor, **arguments)

    def call(**arguments):
        arguments = _with_heads(arguments)
        arrays = {name: arguments.pop(name) for name, x in list(arguments.items()) if hasattr(x, "ndim")}
        found = [of_entry(i, **one, **arguments) for i, one in enumerate(entries_of(arrays))]
        if not (batch := batch_of(arrays)):
            return found[0]
        return tuple(jnp.stack(x).reshape(*batch, *x[0].shape) for x in zip(*found, strict=True))

    return call


def _backward(function):
    def call(cotangents, outputs, arrays, options, wrt):
        dout, dweights, dlse = cotangents
        out, _, lse = outputs
        out = out if options.get("concat_heads", True) else None
        grads = function(
            dout,
            **_with_heads({**arrays, **options}),
            out=out,
            lse=lse,
            dweights=dweights,
            dlse=dlse,
            wrt=wrt,
        )
        return {name: x for name, x in grads._asdict().items() if x is not None}

    return call


def _attention(name, function, backward, definition, differentiable, cases, axes) -> Operator:
    return Operator(
        name=name,
        outputs=("out", "weights", "lse"),
        differentiable=differentiable,
        implementations=rule.IMPLEMENTATIONS,
        call=_call(function),
        reference=_reference(definition),
        backward=_backward(backward),
        cases=cases,
        axes={"out": "BTN", "weights": "BSN", "lse": "BTN", **axes},
        backward_wrt=differentiable,
        hidden=hidden,
    )


_NODES = {"src": "BSN", "dst": "BTN", "edge": "BSN"}  # columns are heads, one after the other

OPERATORS = (
    _attention(
        "graph_attention",
        api.graph_attention,
        derivatives.graph_attention_bwd,
        reference.graph_attention,
        ("src", "dst", "attention_weights", "edge"),
        GAT_CASES,
        _NODES,
    ),
    _attention(
        "graph_attention_v2",
        api.graph_attention_v2,
        derivatives.graph_attention_v2_bwd,
        reference.graph_attention_v2,
        ("src", "dst", "attention_weights", "edge"),
        GATV2_CASES,
        {**_NODES, "attention_weights": "N"},
    ),
    _attention(
        "graph_transformer_attention",
        api.graph_transformer_attention,
        derivatives.graph_transformer_attention_bwd,
        reference.graph_transformer_attention,
        ("query", "key", "value", "edge", "score_bias"),
        TRANSFORMER_CASES,
        {"query": "BTN", "key": "BSN", "value": "BSN", "edge": "BSN", "score_bias": "BSN"},
    ),
    *edge_cases.OPERATORS,
)
