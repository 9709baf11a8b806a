"""Named inputs of the graph operators. The graph is an option: tests batch and shard arrays, not graphs."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.graph import api, gradients, reference
from jax_attn_bwd.ops.graph.edge_softmax import IMPLEMENTATIONS as SOFTMAX_IMPLEMENTATIONS
from jax_attn_bwd.ops.graph.edge_softmax import edge_softmax, edge_softmax_bwd
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


def _graph(num_src=7, num_dst=5, nnz=23, capacity=None, seed=0) -> BipartiteCSC:
    """A random multigraph in a random edge order; the last node of each side has no edge."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, max(num_src - 1, 1), nnz)
    dst = rng.integers(0, max(num_dst - 1, 1), nnz)
    return BipartiteCSC.from_coo(src, dst, num_src, num_dst, capacity=capacity)


def _hub() -> BipartiteCSC:
    """One destination with 700 edges, one source with 350, among small ones: many chunks of groups."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, 40, 900), rng.integers(0, 30, 900)
    src[:350], dst[200:] = 3, 7
    return BipartiteCSC.from_coo(src, dst, 40, 30)


class _Options(Mapping):
    """Options of a case; its graph, arrays on a device, is built when first asked for, not at import."""

    def __init__(self, graph: Callable[[], BipartiteCSC], rest: dict[str, Any]):
        self._graph, self._rest = graph, rest

    def __getitem__(self, name: str) -> Any:
        return self._graph() if name == "graph" else self._rest[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("graph", *self._rest))

    def __len__(self) -> int:
        return 1 + len(self._rest)


def _case(
    build, name, *, H=2, D=3, tags=("ci",), dtype="bfloat16", graph=_graph, extra=(), **options
) -> Case:
    """`graph` builds the graph.

    `extra` names further arrays: "edge", "score_bias", "dropout_mask", "dropout_key".
    """

    @cache
    def built() -> BipartiteCSC:
        with jax.ensure_compile_time_eval():  # whoever asks first may be tracing
            return graph()

    def arrays(rng):
        return build(rng, built(), H, D, extra)

    with_graph = _Options(built, {"head_size": D, **options})
    return Case(name, arrays, with_graph, frozenset(tags), dtype)


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


def _gat(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        found = _extra(rng, graph, H, {"edge": 2 * H}, extra)
        size = 2 * H * D + (2 * H if "edge" in found else 0)
        return {
            "src": rng.standard_normal((graph.num_src, H * D)),
            "dst": rng.standard_normal((graph.num_dst, H * D)),
            "attention_weights": spread * rng.standard_normal(size),
        } | found

    return _case(build, name, **arguments)


def _gatv2(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {
            "src": rng.standard_normal((graph.num_src, H * D)),
            "dst": rng.standard_normal((graph.num_dst, H * D)),
            "attention_weights": spread * rng.standard_normal(H * D),
        } | _extra(rng, graph, H, {"edge": H * D}, extra)

    return _case(build, name, **arguments)


def _transformer(name, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {
            "query": rng.standard_normal((graph.num_dst, H * D)),
            "key": rng.standard_normal((graph.num_src, H * D)),
            "value": rng.standard_normal((graph.num_src, H * D)),
        } | _extra(rng, graph, H, {"edge": H * D}, extra)

    return _case(build, name, **arguments)


def _scores(name, *, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {"scores": spread * rng.standard_normal((graph.capacity, H))}

    return _case(build, name, **arguments)


_PADDED = partial(_graph, capacity=32)
_MORE_NODES = partial(_graph, 45, 40, 90)
_EMPTY = {
    "no_edges": partial(_graph, nnz=0),
    "only_padding": partial(_graph, nnz=0, capacity=4),
    "no_destination": partial(BipartiteCSC.from_coo, [], [], 3, 0, capacity=2),
    "no_source": partial(BipartiteCSC.from_coo, [], [], 0, 3),
    "one_edge": partial(_graph, 1, 1, 1),
}
_SMALL = {"graph": partial(_graph, 3, 2, 5), "H": 2, "D": 2, "tags": ("second",)}
_SHARD = {"H": 8, "D": 4, "tags": ("shard",)}
_COMPILED = ("ci", "check", "xla")


def _of_kernels(
    make: Callable[..., Case], *extra: str, heads: dict[tuple[int, int], dict[str, Any]], narrow: str = "wide"
) -> Iterator[Case]:
    """Heads that the GPU kernels take, `heads` with options; `extra`: arrays beside "edge" and dropout."""
    # scores of the size that layers begin with
    make = make if "score_bias" in extra else partial(make, spread=0.1)
    everything = {"extra": ("edge", "dropout_mask", *extra)}
    for name, H, D, tag in (("wide", 4, 32, "kernel"), ("narrow", 8, 8, narrow)):
        yield make(name, H=H, D=D, graph=_PADDED, tags=(tag, "repeat", "poison"), **everything)
        yield make(f"{name} hub", H=H, D=D, graph=_hub, tags=("large", "repeat"), **everything)
    for (H, D), options in heads.items():
        yield make(f"{H} x {D}", H=H, D=D, tags=("wide", "large"), **options)


def _compiled(make: Callable[..., Case], *extra: str) -> Iterator[Case]:
    """What the kernels are compiled for; the graph is small: no kernel depends on its size."""
    compiled = partial(make, graph=_hub, dtype="float32", tags=("mosaic_gpu",))
    for H, D in ((1, 8), (8, 8), (1, 256), (4, 64), (16, 8), (16, 64)):
        yield compiled(f"compiled {H} x {D}", H=H, D=D)
    yield compiled("compiled 4 x 64 bfloat16", H=4, D=64, dtype="bfloat16")
    everything = {"extra": ("edge", "dropout_key", *extra), "concat_heads": False, "dropout_rate": 0.4}
    everything["tags"] = ("mosaic_gpu", "A100", "B200")
    for H, D in ((4, 16), (8, 64)):
        yield compiled(f"compiled {H} x {D} everything", H=H, D=D, **everything)


def _measured(make: Callable[..., Case]) -> Iterator[Case]:
    for nodes, edges, tags in ((400, 3000, ("quick",)), (40_000, 500_000, ("bench", "bench_gpu"))):
        name = f"random {nodes} nodes, {edges} edges, 8 x 16"
        graph = partial(_graph, nodes, nodes, edges)
        yield make(name, graph=graph, H=8, D=16, tags=tags, dtype="float32")


GAT_CASES = (
    _gat("plain", tags=_COMPILED),
    _gat("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4, tags=_COMPILED),
    _gat("mean_elu_padded", graph=_PADDED, concat_heads=False, activation="elu", extra=("edge",)),
    _gat("hub", graph=_hub, extra=("dropout_mask",), activation="relu", tags=("ci", "check")),
    *(_gat(name, graph=graph, extra=("edge",), tags=("edge",)) for name, graph in _EMPTY.items()),
    _gat("second_edge", **_SMALL, extra=("edge",), activation="tanh"),
    _gat("second_dropout", **_SMALL, extra=("dropout_mask",), concat_heads=False),
    *_of_kernels(
        _gat,
        heads={
            (1, 8): {"activation": "scalar"},
            (1, 128): {"activation": "tanh"},
            (8, 16): {"extra": ("edge", "dropout_key"), "dropout_rate": 0.4, "activation": "elu"},
            (16, 8): {"graph": _PADDED, "activation": "relu"},
        },
        narrow="kernel",
    ),
    *_compiled(_gat),
    *_measured(_gat),
)
GATV2_CASES = (
    _gatv2("plain", tags=_COMPILED),
    _gatv2("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4),
    _gatv2(
        "mean_sigmoid_padded",
        graph=_PADDED,
        concat_heads=False,
        activation="sigmoid",
        extra=("edge",),
        tags=_COMPILED,
    ),
    *(_gatv2(name, graph=graph, tags=("edge",)) for name, graph in _EMPTY.items()),
    _gatv2("second_edge", **_SMALL, extra=("edge",), activation="tanh"),
    _gatv2("shard", **_SHARD),
    *_of_kernels(
        _gatv2,
        heads={
            (4, 8): {"graph": _MORE_NODES, "activation": "relu"},
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
    _transformer("plain", tags=_COMPILED),
    _transformer("edge_bias", extra=("edge", "score_bias", "dropout_key"), dropout_rate=0.4, tags=_COMPILED),
    _transformer("mean_padded", graph=_PADDED, concat_heads=False, scale=0.3, extra=("edge",)),
    _transformer("hub", graph=_hub),
    *(
        _transformer(name, graph=graph, extra=("score_bias",), tags=("edge",))
        for name, graph in _EMPTY.items()
    ),
    _transformer("second_edge_bias", **_SMALL, extra=("edge", "score_bias")),
    _transformer("shard", **_SHARD),
    *_of_kernels(
        _transformer,
        "score_bias",
        heads={
            (2, 8): {"graph": _MORE_NODES, "extra": ("edge", "score_bias")},
            (1, 128): {"graph": _PADDED},
            (8, 64): {"extra": ("edge", "score_bias", "dropout_key"), "dropout_rate": 0.4},
        },
    ),
    *_compiled(_transformer, "score_bias"),
    *_measured(_transformer),
)
SOFTMAX_CASES = (
    _scores("plain", tags=_COMPILED),
    _scores("large_padded", graph=_PADDED, spread=1e3),
    _scores("hub", graph=_hub),
    *(_scores(name, graph=graph, tags=("edge",)) for name, graph in _EMPTY.items()),
    _scores("second", **_SMALL),
    _scores("shard", **_SHARD),
)
MAKERS = {"graph_attention": _gat, "graph_attention_v2": _gatv2, "graph_transformer_attention": _transformer}


def _with_heads(arguments):
    """The number of heads instead of their size, which a shard of the columns shares with the whole."""
    arguments = dict(arguments)
    width = arguments["query" if "query" in arguments else "src"].shape[1]
    return arguments | {"num_heads": width // arguments.pop("head_size")}


def _call(function):
    def call(**arguments):
        arguments = _with_heads(arguments)
        return function(return_attention_weights=True, return_residual=True, **arguments)

    return call


def _reference(function):
    def call(dropout_rate=0.0, dropout_key=None, dropout_mask=None, **arguments):
        arguments = _with_heads(arguments)
        factor = None if dropout_mask is None else dropout_mask.T
        if dropout_key is not None:
            E, H = arguments["graph"].capacity, arguments["num_heads"]
            words, u32 = dropout.key_words(dropout_key), jnp.uint32
            keys = dropout.head_keys(words, u32(0), jnp.arange(H, dtype=u32)[None])
            rows = jnp.arange(E, dtype=u32)[:, None]
            keep = dropout.keep(keys, rows, u32(0), dropout_rate)
            factor = jnp.where(keep, dropout.survivor_factor(dropout_rate), 0.0)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            dtype = arguments["query" if "query" in arguments else "src"].dtype
            factor = None if factor is None else factor.astype(dtype)
            return function(factor=factor, **arguments)

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


def _hidden(arrays, options):
    """Nodes that no live edge touches, and edges of the padding or behind a bias of -inf."""
    graph = options["graph"]
    source, destination = (np.asarray(x) for x in reference.ends(graph))
    real = (destination < graph.num_dst)[:, None]  # [E, 1], or [E, H] with a bias
    live = real & (np.asarray(arrays["score_bias"]) != -np.inf) if "score_bias" in arrays else real
    used = live.any(-1)
    sources, destinations = np.ones(graph.num_src, bool), np.ones((graph.num_dst, live.shape[1]), bool)
    sources[source[used]] = False
    for head in range(live.shape[1]):
        destinations[destination[live[:, head]], head] = False
    lonely = destinations.all(-1)
    of_nodes = {"src": sources, "key": sources, "value": sources, "dst": lonely, "query": lonely}
    of_edges = {"edge": ~used, "score_bias": ~real[:, 0], "scores": ~real[:, 0]}
    of_outputs = {"out": lonely, "lse": lonely, "weights": ~used}
    given = {name: x for name, x in {**of_nodes, **of_edges}.items() if name in arrays}
    return given | of_outputs


def _attention(name, function, backward, definition, differentiable, cases, axes) -> Operator:
    return Operator(
        name=name,
        outputs=("out", "weights", "lse"),
        differentiable=differentiable,
        implementations=api.IMPLEMENTATIONS,
        call=_call(function),
        reference=_reference(definition),
        backward=_backward(backward),
        cases=cases,
        axes={"out": "TN", "weights": "SN", "lse": "TN", **axes},
        backward_wrt=differentiable,
        hidden=_hidden,
    )


def _softmax_call(head_size, **arguments):
    return (edge_softmax(**arguments),)


def _softmax_reference(head_size, graph, scores):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (reference.edge_softmax(graph, scores)[0],)


def _softmax_backward(cotangents, outputs, arrays, options, wrt):
    return {"scores": edge_softmax_bwd(cotangents[0], options["graph"], outputs[0])}


_NODES = {"src": "SN", "dst": "TN", "edge": "SN"}  # columns are heads, one after the other

OPERATORS = (
    _attention(
        "graph_attention",
        api.graph_attention,
        gradients.graph_attention_bwd,
        reference.graph_attention,
        ("src", "dst", "attention_weights", "edge"),
        GAT_CASES,
        _NODES,
    ),
    _attention(
        "graph_attention_v2",
        api.graph_attention_v2,
        gradients.graph_attention_v2_bwd,
        reference.graph_attention_v2,
        ("src", "dst", "attention_weights", "edge"),
        GATV2_CASES,
        {**_NODES, "attention_weights": "N"},
    ),
    _attention(
        "graph_transformer_attention",
        api.graph_transformer_attention,
        gradients.graph_transformer_attention_bwd,
        reference.graph_transformer_attention,
        ("query", "key", "value", "edge", "score_bias"),
        TRANSFORMER_CASES,
        {"query": "TN", "key": "SN", "value": "SN", "edge": "SN", "score_bias": "SN"},
    ),
    Operator(
        name="edge_softmax",
        outputs=("weights",),
        differentiable=("scores",),
        implementations=SOFTMAX_IMPLEMENTATIONS,
        call=_softmax_call,
        reference=_softmax_reference,
        backward=_softmax_backward,
        cases=SOFTMAX_CASES,
        axes={"scores": "SN", "weights": "SN"},
        backward_wrt=("scores",),
        hidden=_hidden,
    ),
)
