"""Named inputs of the graph operators.

Graphs first, and what builds a case from one; then the cases of each operator; then the operators. The graph
is an option: tests batch and shard arrays alone.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.graph import api, edge_ops, reference
from jax_attn_bwd.ops.graph.spec import GraphAttentionGrads, GraphTransformerAttentionGrads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


def graph_of(num_src=7, num_dst=5, nnz=23, capacity=None, seed=0) -> BipartiteCSC:
    """Draws a multigraph in a random edge order; the last node of each side has no edge."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, max(num_src - 1, 1), nnz)
    dst = rng.integers(0, max(num_dst - 1, 1), nnz)
    return BipartiteCSC.from_coo(src, dst, num_src, num_dst, capacity=capacity)


def hub() -> BipartiteCSC:
    """Draws a graph of one destination with 700 edges, and one source with 350, among small ones."""
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


def case(
    build, name, *, H=2, D=3, tags=("ci",), dtype="bfloat16", graph=graph_of, extra=(), means=None, **options
) -> Case:
    """Makes a case whose graph `graph` builds, and whose arrays `build` draws.

    `extra` names further arrays: "edge", "score_bias", "dropout_mask", "dropout_key".
    """

    @cache  # built once, when it is first asked for
    def built() -> BipartiteCSC:
        with jax.ensure_compile_time_eval():  # whoever asks first may be tracing
            return graph()

    arrays = lambda rng: build(rng, built(), H, D, extra)
    with_graph = _Options(built, {"head_size": D, **options})
    return Case(name, arrays, with_graph, frozenset(tags), dtype, means=means or {})


PADDED = partial(graph_of, capacity=32)
MORE_NODES = partial(graph_of, 45, 40, 90)
COMPILED = ("ci", "check", "xla")
# of narrow dtypes, see `Case.means`
WITH_MEANS: dict[str, Any] = {
    "graph": partial(graph_of, 40, 30, 500), "H": 4, "D": 8, "extra": ("edge",), "tags": ("means",)
}  # fmt: skip


def hidden(arrays, options):
    """Marks nodes that no live edge touches, and edges in the padding or behind a bias of -inf."""
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


def gat(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        found = _extra(rng, graph, H, {"edge": 2 * H}, extra)
        size = 2 * H * D + (2 * H if "edge" in found else 0)
        return _additive(rng, graph, H * D, spread, size) | found

    return case(build, name, **arguments)


def gatv2(name, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return _additive(rng, graph, H * D, spread, H * D) | _extra(rng, graph, H, {"edge": H * D}, extra)

    return case(build, name, **arguments)


def transformer(name, *, K=None, Dv=None, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        shared, width = K or H, Dv or D
        return {
            "query": rng.standard_normal((graph.num_dst, H * D)),
            "key": rng.standard_normal((graph.num_src, shared * D)),
            "value": rng.standard_normal((graph.num_src, shared * width)),
        } | _extra(rng, graph, H, {"edge": shared * D}, extra)

    return case(build, name, **arguments)


def _of_kernels(
    make: Callable[..., Case], *extra: str, heads: dict[tuple[int, int], dict[str, Any]]
) -> Iterator[Case]:
    """Yields heads that GPU kernels take, `heads` with options; `extra`: arrays beside "edge" and dropout."""
    # scores of the size that layers begin with
    make = make if "score_bias" in extra else partial(make, spread=0.1)
    everything = {"extra": ("edge", "dropout_mask", *extra)}
    for name, H, D, tag in (("wide", 4, 32, "wide"), ("narrow", 8, 8, "kernel")):
        yield make(name, H=H, D=D, graph=PADDED, tags=(tag, "repeat", "poison"), **everything)
        yield make(f"{name} hub", H=H, D=D, graph=hub, tags=("large", "repeat"), **everything)
    for (H, D), options in heads.items():
        yield make(f"{H} x {D}", H=H, D=D, tags=("wide", "large"), **options)


def _timed(make: Callable[..., Case]) -> Iterator[Case]:
    sizes: dict[str, Any] = {"H": 8, "D": 16, "dtype": "float32"}
    graph, tags = partial(graph_of, 40_000, 40_000, 500_000), ("bench", "bench_gpu", "timed")
    yield make("random 40000 nodes, 500000 edges, 8 x 16", graph=graph, tags=tags, **sizes)
    graph = partial(graph_of, 1024, 1024, 2**14)
    yield make("16 edges a node, 8 x 16: E=16384", graph=graph, tags=("timed",), **sizes)


def scores(name, *, spread=1.0, **arguments) -> Case:
    def build(rng, graph, H, D, extra):
        return {"scores": spread * rng.standard_normal((graph.capacity, H))}

    return case(build, name, **arguments)


def data(name, *, rest=None, **arguments) -> Case:
    """Makes a case of edge data with the axes `rest`, or an axis of heads; some of its numbers tie."""

    def build(rng, graph, H, D, extra):
        x = rng.standard_normal((graph.capacity, *((H,) if rest is None else rest)))
        some = np.arange(graph.capacity) % 3 == 0
        return {"edge": np.where(np.expand_dims(some, tuple(range(1, x.ndim))), np.round(x), x)}

    return case(build, name, **arguments)


GAT_CASES = (
    gat("plain", tags=COMPILED),
    gat("edge_dropout", extra=("edge", "dropout_key"), dropout_rate=0.4, tags=COMPILED),
    gat("hub", graph=hub, extra=("dropout_mask",), activation="relu", tags=("ci", "check")),
    *_of_kernels(
        gat,
        heads={
            (1, 8): {"activation": "scalar"},
            (1, 128): {"activation": "tanh"},
            (8, 16): {"extra": ("edge", "dropout_key"), "dropout_rate": 0.4, "activation": "elu"},
            (16, 64): {"graph": PADDED, "activation": "relu"},
        },
    ),
    gat("means", means={"src": 3.0}, **WITH_MEANS),
    *_timed(gat),
)
GATV2_CASES = (
    gatv2("plain", tags=COMPILED),
    gatv2(
        "mean_sigmoid_padded",
        graph=PADDED,
        concat_heads=False,
        activation="sigmoid",
        extra=("edge",),
        tags=COMPILED,
    ),
    *_of_kernels(
        gatv2,
        heads={
            (4, 8): {"graph": MORE_NODES, "activation": "relu"},
            (6, 16): {"concat_heads": False, "activation": "tanh", "extra": ("edge",)},
            (2, 64): {"concat_heads": False, "activation": "elu", "extra": ("edge",)},
            (6, 64): {"activation": "scalar"},
            (16, 8): {"activation": "sigmoid"},
        },
    ),
    gatv2("means", means={"src": 3.0}, **WITH_MEANS),
    *_timed(gatv2),
)
TRANSFORMER_CASES = (
    transformer("plain", tags=COMPILED),
    transformer("edge_bias", extra=("edge", "score_bias", "dropout_key"), dropout_rate=0.4, tags=COMPILED),
    transformer(
        "grouped_value_width",
        H=4,
        K=1,
        Dv=5,
        extra=("dropout_key",),
        dropout_rate=0.4,
        concat_heads=False,
        tags=("ci", "check"),
    ),
    *_of_kernels(
        transformer,
        "score_bias",
        heads={
            (2, 8): {"graph": MORE_NODES, "extra": ("edge", "score_bias")},
            (1, 128): {"graph": PADDED},
            (8, 64): {"extra": ("edge", "score_bias", "dropout_key"), "dropout_rate": 0.4},
        },
    ),
    transformer("means", means={"value": 3.0}, **WITH_MEANS),
    *_timed(transformer),
)
SOFTMAX_CASES = (scores("plain", tags=COMPILED), scores("means", means={"weights": 3.0}, **WITH_MEANS))
REDUCTION_CASES = (data("plain", tags=COMPILED), data("means", means={"edge": 3.0}, **WITH_MEANS))


def with_heads(arguments):
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
        arguments = with_heads(arguments)
        return function(return_attention_weights=True, return_residual=True, **arguments)

    return call


def _reference(function):
    # the definition knows no key of dropout: it is given the factors [E, H]
    def call(entry=0, dropout_rate=0.0, dropout_key=None, dropout_mask=None, **arguments):
        arguments = with_heads(arguments)
        factor = None if dropout_mask is None else dropout_mask.T
        if dropout_key is not None:
            E, H = arguments["graph"].capacity, arguments["num_heads"]
            words, u32 = dropout.key_words(dropout_key), jnp.uint32
            keys = dropout.head_keys(words, u32(entry), jnp.arange(H, dtype=u32)[None])
            rows = jnp.arange(E, dtype=u32)[:, None]
            keep = dropout.keep(keys, rows, u32(0), dropout_rate)
            factor = jnp.where(keep, dropout.survivor_factor(dropout_rate), 0.0)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            dtype = arguments["query" if "query" in arguments else "src"].dtype
            factor = None if factor is None else factor.astype(dtype)
            return function(factor=factor, **arguments)

    return call


def _attention(function, grads, cases) -> Operator:
    return Operator(
        name=function.__name__,
        outputs=("out", "weights", "lse"),
        differentiable=grads._fields,
        implementations=api.IMPLEMENTATIONS,
        call=_call(function),
        reference=_reference(getattr(reference, function.__name__)),
        cases=cases,
        hidden=hidden,
    )


def _reduction(name, graph, edge):
    return reference.edge_reduction(name, graph, edge).astype(edge.dtype)


def _softmax(graph, scores):
    each = jnp.vectorize(lambda x: reference.edge_softmax(graph, x)[0], signature="(e,h)->(e,h)")
    return each(scores)


def _of_edges(name, argument, output, definition, cases) -> Operator:
    def call(head_size, **arguments):
        return (getattr(edge_ops, name)(**arguments),)

    def promoted(head_size, graph, **arguments):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return (definition(graph, arguments[argument]),)

    return Operator(
        name=name,
        outputs=(output,),
        differentiable=(argument,),
        implementations=edge_ops.IMPLEMENTATIONS,
        call=call,
        reference=promoted,
        cases=cases,
        hidden=hidden,
    )


OPERATORS = (
    _attention(api.graph_attention, GraphAttentionGrads, GAT_CASES),
    _attention(api.graph_attention_v2, GraphAttentionGrads, GATV2_CASES),
    _attention(api.graph_transformer_attention, GraphTransformerAttentionGrads, TRANSFORMER_CASES),
    *(
        _of_edges(name, "edge", "out", partial(_reduction, name), REDUCTION_CASES)
        for name in ("edge_sum", "edge_mean", "edge_max")
    ),
    _of_edges("edge_softmax", "scores", "weights", _softmax, SOFTMAX_CASES),
)
