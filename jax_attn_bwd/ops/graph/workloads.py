"""Graphs of the cases, and their builder. The graph is an option: tests batch and shard arrays alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core.cases import Case
from jax_attn_bwd.ops.graph import reference
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_WHOLE = ("attention_weights", "dropout_key")  # the entries of a batch share these


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
    build,
    name,
    *,
    H=2,
    D=3,
    tags=("ci",),
    dtype="bfloat16",
    graph=graph_of,
    extra=(),
    batch=(),
    shared=(),
    **options,
) -> Case:
    """Makes a case whose graph `graph` builds, and whose arrays `build` draws.

    `extra` names further arrays: "edge", "score_bias", "dropout_mask", "dropout_key". Arrays that are not
    `shared` have the axes `batch` in front.
    """
    shared = {*_WHOLE, *shared}

    @cache
    def built() -> BipartiteCSC:
        with jax.ensure_compile_time_eval():  # whoever asks first may be tracing
            return graph()

    def arrays(rng):
        found = build(rng, built(), H, D, extra)
        entries = [build(rng, built(), H, D, extra) for _ in np.ndindex(batch)] if batch else []
        for name in set(found) - shared if batch else ():
            found[name] = np.stack([e[name] for e in entries]).reshape(*batch, *found[name].shape)
        return found

    with_graph = _Options(built, {"head_size": D, **options})
    return Case(name, arrays, with_graph, frozenset(tags), dtype)


PADDED = partial(graph_of, capacity=32)
MORE_NODES = partial(graph_of, 45, 40, 90)
EMPTY = {
    "no_edges": partial(graph_of, nnz=0),
    "only_padding": partial(graph_of, nnz=0, capacity=4),
    "no_destination": partial(BipartiteCSC.from_coo, [], [], 3, 0, capacity=2),
    "no_source": partial(BipartiteCSC.from_coo, [], [], 0, 3),
    "one_edge": partial(graph_of, 1, 1, 1),
}
SMALL = {"graph": partial(graph_of, 3, 2, 5), "H": 2, "D": 2, "tags": ("second",)}
SHARD = {"H": 8, "D": 4, "tags": ("shard",)}
COMPILED = ("ci", "check", "xla")


def batch_of(arrays) -> tuple[int, ...]:
    """Returns the batch axes of a call, by its arrays."""
    given = (x.shape[:-2] for name, x in arrays.items() if name not in ("graph", *_WHOLE))
    return max(given, key=len, default=())


def entries_of(arrays) -> list[dict[str, Any]]:
    """Returns the arrays of each entry of the batch."""
    batch = batch_of(arrays)

    def at(index, name, x):
        return x[index] if name not in _WHOLE and x.ndim == len(batch) + 2 else x

    return [{name: at(index, name, x) for name, x in arrays.items()} for index in np.ndindex(batch)]


def hidden(arrays, options):
    """Marks nodes that no live edge touches, and edges in the padding or behind a bias of -inf."""
    if not (batch := batch_of(arrays)):
        return hidden_in_entry(arrays, options)
    found = [hidden_in_entry(one, options) for one in entries_of(arrays)]
    stacked = {name: np.stack([one[name] for one in found]) for name in found[0]}
    own = {name for name, x in arrays.items() if x.ndim < len(batch) + 2}
    return {name: x.all(0) if name in own else x.reshape(*batch, *x.shape[1:]) for name, x in stacked.items()}


def hidden_in_entry(arrays, options):
    """Does what `hidden` does for a call without batch axes."""
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
