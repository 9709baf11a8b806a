"""Trains a graph attention network (GAT) on sampled neighbourhoods: one compiled step for all batches.

    python examples/train_minibatches.py --batch 64 --fanout 5 --out out

The nodes are the 1,797 digits that come with scikit-learn, as they are and shifted by one pixel in eight
directions; the edges lead to each from the 10 most alike. For a step, some labelled nodes are drawn, at most
`--fanout` of the edges into each, and as many of the edges into what these come from. The two graphs that
the two layers need are never of one size; `num_src`, `num_dst` and `capacity` give them one, with nodes and
edges of padding, which change no number: the training step is traced once. The network is tested on the
whole graph, and a step is measured beside one on the whole graph: what a batch needs does not grow with it.
Writes loss and test accuracy to `minibatches.png` in `--out`. `--quick` leaves out the shifted digits and
stops after 5 steps. Needs optax, matplotlib, rich, scikit-learn.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import kneighbors_graph

from jax_attn_bwd import BipartiteCSC, graph_attention

HEADS, HEAD_SIZE, CLASSES, NEIGHBOURS, LABELS = 4, 16, 10, 10, 10
OPTIMIZER = optax.adamw(5e-3, weight_decay=0.01)


class Data(NamedTuple):
    """The whole graph, its nodes, and who is labelled."""

    offsets: np.ndarray  # [N + 1], the edges into node i are offsets[i] to offsets[i + 1]
    sources: np.ndarray  # [E]
    features: np.ndarray  # float32 [N, 64]
    labels: np.ndarray  # int32 [N]
    known: np.ndarray  # numbers of the labelled nodes
    tested: np.ndarray  # numbers of the nodes to test on: digits as they are


class Batch(NamedTuple):
    """What a training step is given: arrays of one shape, whatever was sampled."""

    graphs: tuple[BipartiteCSC, BipartiteCSC]  # one for each of the two layers
    x: np.ndarray  # float32 [rows, 64], of the first layer's sources, 0 in the padding
    labels: np.ndarray  # int32 [batch]
    real: np.ndarray  # bool [batch]


# The network -----------------------------------------------------------------------------------------


def initial_params(key: jax.Array, features: int) -> list[dict[str, jax.Array]]:
    """Two layers, each with a projection for all heads and the vector that scores edges."""
    found = []
    sizes = ((features, HEAD_SIZE), (HEADS * HEAD_SIZE, CLASSES))
    for own, (inputs, head_size) in zip(jax.random.split(key), sizes, strict=True):
        one, two = jax.random.split(own)
        kernel = (2 / inputs) ** 0.5 * jax.random.normal(one, (inputs, HEADS * head_size))
        found.append({"kernel": kernel, "attention": 0.1 * jax.random.normal(two, (2 * HEADS * head_size,))})
    return found


def gat(params, graphs, x):
    """Logits `[num_dst of the last graph, classes]`; a graph's destinations are its first sources."""
    first, second = params
    h = graph_attention(graphs[0], x @ first["kernel"], None, first["attention"], num_heads=HEADS)
    h = jax.nn.elu(h) @ second["kernel"]
    return graph_attention(graphs[1], h, None, second["attention"], num_heads=HEADS, concat_heads=False)


traces: list[tuple[int, ...]] = []  # one entry for each time that `train_step` is traced


@jax.jit
def train_step(params, state, batch):
    """(params, state, loss before the update)."""
    traces.append(batch.x.shape)

    def loss(params):
        logits = gat(params, batch.graphs, batch.x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(where=batch.real)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@jax.jit
def predict(params, graph, x):
    """The likeliest class of every node of the whole graph."""
    return gat(params, (graph, graph), x).argmax(-1)


# Sampling --------------------------------------------------------------------------------------------


def sample(data: Data, nodes: np.ndarray, fanout: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """(sources, places in `nodes`) of at most `fanout` edges into each node, drawn alike; -1 is no node."""
    first, end = (np.where(nodes >= 0, data.offsets[nodes + k], 0) for k in (0, 1))
    degree = end - first
    place = np.repeat(np.arange(len(nodes)), degree)
    start = np.cumsum(degree) - degree
    edge = first[place] + np.arange(len(place)) - start[place]
    order = np.lexsort((rng.random(len(edge)), place))  # by node, and at random within
    kept = order[np.arange(len(edge)) - start[place] < fanout]
    return data.sources[edge[kept]], place[kept]


def neighbourhood(
    data: Data, nodes: np.ndarray, fanout: int, rng: np.random.Generator
) -> tuple[BipartiteCSC, np.ndarray]:
    """A graph with destinations `nodes`, and its sources: these, then others; -1 is no node.

    Its shapes are those of `len(nodes)` and `fanout`. Each node has an edge to itself, too.
    """
    room = len(nodes)
    size = room * (1 + fanout)
    sources, place = sample(data, nodes, fanout, rng)
    here, others = np.flatnonzero(nodes >= 0), np.setdiff1d(sources, nodes)
    row = np.zeros(len(data.labels), np.int64)
    row[nodes[here]], row[others] = here, room + np.arange(len(others))
    edges = np.concatenate([row[sources], here]), np.concatenate([place, here])
    graph = BipartiteCSC.from_coo(*edges, num_src=size, num_dst=room, capacity=size)
    padding = np.full(size - room - len(others), -1)
    return graph, np.concatenate([nodes, others, padding])


def draw(data: Data, size: int, fanout: int, rng: np.random.Generator) -> Batch:
    """A batch of at most `size` labelled nodes: the last layer's graph first, then that before it."""
    seeds = np.full(size, -1)
    count = min(int(rng.integers(size // 2, size, endpoint=True)), len(data.known))
    seeds[:count] = rng.choice(data.known, count, replace=False)
    second, nodes = neighbourhood(data, seeds, fanout, rng)
    first, nodes = neighbourhood(data, nodes, fanout, rng)
    real = lambda nodes, x: np.where((nodes >= 0).reshape(-1, *(1,) * (x.ndim - 1)), x[nodes], 0)
    return Batch((first, second), real(nodes, data.features), real(seeds, data.labels), seeds >= 0)


# Data ------------------------------------------------------------------------------------------------


def load(quick: bool, seed: int) -> Data:
    """The digits on their neighbour graph."""
    digits = load_digits()
    images = digits.images.astype(np.float32) / 16
    shifts = [(0, 0)] if quick else [(0, 0), *((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)]
    features = np.concatenate([np.roll(images, shift, (1, 2)) for shift in shifts]).reshape(-1, 64)
    labels = np.tile(digits.target, len(shifts)).astype(np.int32)
    rows = kneighbors_graph(features, NEIGHBOURS, n_jobs=-1)  # row i: the nodes most like node i
    rng, known = np.random.default_rng(seed), np.zeros(len(images), bool)
    for k in range(CLASSES):
        known[rng.choice(np.flatnonzero(digits.target == k), LABELS, replace=False)] = True
    everywhere = np.flatnonzero(np.tile(known, len(shifts)))
    return Data(rows.indptr, rows.indices, features, labels, everywhere, np.flatnonzero(~known))


def whole_graph(data: Data) -> BipartiteCSC:
    """All nodes and edges, and an edge from each node to itself."""
    return BipartiteCSC.from_csc(data.offsets, data.sources, len(data.labels)).with_self_loops()


# Training --------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, data: Data, console: Console) -> tuple[Any, dict[str, list]]:
    """The parameters, and what was seen on the way."""
    rng, graph = np.random.default_rng(args.seed), whole_graph(data)
    params = initial_params(jax.random.key(args.seed), data.features.shape[1])
    state = OPTIMIZER.init(params)
    seen: dict[str, list] = {
        "loss": [],
        "edges": [],
        "sampling": [],
        "step": [],
        "tested": [],
        "accuracy": [],
    }
    every = max(args.steps // 10, 1)
    for number in range(1, args.steps + 1):
        start = time.perf_counter()
        batch = draw(data, args.batch, args.fanout, rng)
        drawn = time.perf_counter()
        params, state, loss = jax.block_until_ready(train_step(params, state, batch))
        seen["sampling"].append(drawn - start)
        seen["step"].append(time.perf_counter() - drawn)
        seen["edges"].append(sum(g.num_edges for g in batch.graphs))
        seen["loss"].append(float(loss))
        if number % every == 0 or number == args.steps:
            right = np.asarray(predict(params, graph, data.features)) == data.labels
            seen["tested"].append(number)
            seen["accuracy"].append(float(right[data.tested].mean()))
            console.print(f"step {number}: loss {float(loss):.3f}, test accuracy {seen['accuracy'][-1]:.1%}")
    fewest, most = min(seen["edges"]), max(seen["edges"])
    times = "once" if len(traces) == 1 else f"{len(traces)} times"
    console.print(f"{args.steps} batches of {fewest:,} to {most:,} edges; the step was traced {times}")
    return params, seen


def compare(data: Data, args: argparse.Namespace, params: Any, seen: dict[str, list]) -> Table:
    """A step on a batch beside one on the whole graph: time, and peak temporary memory."""
    graph, N = whole_graph(data), len(data.labels)
    labelled = np.isin(np.arange(N), data.known)
    whole = Batch((graph, graph), data.features, data.labels, labelled)
    batch = draw(data, args.batch, args.fanout, np.random.default_rng(args.seed))
    state = OPTIMIZER.init(params)
    table = Table(title="One training step (median)")
    for name in ("step on", "sources of the first layer", "edges", "time (ms)", "temporary memory (MiB)"):
        table.add_column(name, justify="right" if name != "step on" else "left")
    for name, given in (("a batch", batch), ("the whole graph", whole)):
        compiled = train_step.lower(params, state, given).compile()
        memory, seconds = compiled.memory_analysis(), []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, state, given))
            seconds.append(time.perf_counter() - start)
        mib = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
        edges = sum(graph.capacity for graph in given.graphs)
        numbers = (f"{1e3 * statistics.median(seconds[1:]):.1f}", f"{mib:.1f}")
        table.add_row(name, f"{len(given.x):,}", f"{edges:,}", *numbers)
    table.caption = f"sampling a batch on the host takes {1e3 * statistics.median(seen['sampling']):.1f} ms"
    return table


def plot(path: Path, seen: dict[str, list], baseline: float) -> None:
    """Writes loss and test accuracy, as PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    axes[0].plot(np.arange(1, len(seen["loss"]) + 1), seen["loss"], color="#0072b2", lw=1)
    axes[0].set(title="Loss of each batch", xlabel="training step", ylabel="cross-entropy")
    axes[1].plot(seen["tested"], seen["accuracy"], "o-", ms=4, color="#0072b2", label="on the whole graph")
    axes[1].axhline(baseline, color="black", ls="--", lw=1, label=f"logistic regression {baseline:.1%}")
    axes[1].set(title="Test accuracy", xlabel="training step", ylabel="of digits as they are")
    axes[1].yaxis.set_major_formatter("{x:.0%}")
    axes[1].legend()
    for one in axes:
        one.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the output directory created."""
    parser = argparse.ArgumentParser(
        description="Trains a graph attention network on sampled neighbourhoods of one shape.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="labelled nodes of a step, at most")
    parser.add_argument("--fanout", type=int, default=5, help="edges into a node that are drawn, at most")
    parser.add_argument("--quick", action="store_true", help="without the shifted digits, 5 steps")
    parser.add_argument("--out", type=Path, default="out", help="directory for minibatches.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of labels, weights and batches")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "batch": (1, 1000), "fanout": (1, NEIGHBOURS), "seed": (0, 2**30)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    args.steps = min(args.steps, 5) if args.quick else args.steps
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, compares, plots."""
    args = parse_arguments(argv)
    console = Console(highlight=False)
    data = load(args.quick, args.seed)
    console.print(f"{len(data.labels):,} nodes, {len(data.sources):,} edges, {len(data.known):,} labels")
    params, seen = train(args, data, console)
    model = LogisticRegression(max_iter=2000).fit(data.features[data.known], data.labels[data.known])
    baseline = float(model.score(data.features[data.tested], data.labels[data.tested]))
    console.print(f"logistic regression on the same labels, without a graph: {baseline:.1%}")
    path = args.out / "minibatches.png"
    plot(path, seen, baseline)
    console.print(f"loss and accuracy: {path}")
    console.print(compare(data, args, params, seen))


if __name__ == "__main__":
    main()
