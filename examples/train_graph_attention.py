"""Trains a two-layer graph attention network (GAT) to read handwritten digits from few labels.

    python examples/train_graph_attention.py --labels 5 --out out

The nodes are the 1,797 digits that come with scikit-learn, the edges join each to the 10 most alike, and
5 digits of every class are labelled. The network learns from those labels and from the graph, and is
tested on all other digits, for several draws of the labels, beside methods that see the same labels but
no graph. (Label spreading on the same graph, which learns nothing, gets up to 95 % of these digits right:
the example shows the operator, not the best method.) Ends with a picture of what digits attend to
(`attention.png` in `--out`), and the time and memory of a training step beside those of segment
operations differentiated by JAX.

    python examples/train_graph_attention.py --graph FILE.npz --undirected --steps 200

trains on any other graph. FILE.npz holds, for N nodes and E edges, the arrays

    edges          integers [E, 2]: source and destination; information flows from the first to the second
    node_features  numbers [N, F]
    node_labels    integers [N], the class of each node
    train_masks    optional, bool [S, N]: the labelled nodes of each of S splits
    val_masks      optional, like it: the test accuracy is that of the step which is best on these
    test_masks     optional, like it; default: all nodes that are in neither of the others

which is the form of the graphs of github.com/yandex-research/heterophilous-graphs. Without train_masks,
labels are drawn as for the digits. Needs optax, matplotlib, rich, scikit-learn.
"""

import argparse
import statistics
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, kneighbors_graph

from jax_attn_bwd import BipartiteCSC, graph_attention

HEADS, HEAD_SIZE = 4, 16
DROPOUT = 0.3  # rate, for features and for attention weights
OPTIMIZER = optax.adamw(5e-3, weight_decay=0.01)
SAME, OTHER = "#0072b2", "#d55e00"  # edges between digits of one class, and of two


class Data(NamedTuple):
    """A graph, its nodes, and who is labelled."""

    edges: np.ndarray  # int [E, 2], (source, destination) by destination, with all self-loops
    similarity: np.ndarray  # float32 [E], of the features at both ends
    features: np.ndarray  # float32 [N, F]
    labels: np.ndarray  # int32 [N], from 0 on
    splits: list[dict[str, np.ndarray]]  # bool [N] each: "train", "test", perhaps "val"
    images: np.ndarray | None  # [N, 8, 8]


# The network -----------------------------------------------------------------------------------------


def segment_attention(graph, src, dst, attention_weights, *, num_heads, edge, concat_heads=True):
    """`graph_attention` in segment operations, for comparison; `graph` = (sources, destinations)."""
    (source, destination), N = graph, len(src)
    sums = partial(jax.ops.segment_sum, num_segments=N, indices_are_sorted=True)
    h = src.reshape(N, num_heads, -1)
    a_src, a_dst = attention_weights[:-num_heads].reshape(2, num_heads, -1)
    z = (h * a_src).sum(-1)[source] + (h * a_dst).sum(-1)[destination]  # [E, H]
    s = jax.nn.leaky_relu(z + edge * attention_weights[-num_heads:], 0.2)
    top = jax.ops.segment_max(s, destination, num_segments=N, indices_are_sorted=True)
    p = jnp.exp(s - jax.lax.stop_gradient(top)[destination])
    p = p / sums(p, destination)[destination]
    out = sums(p[..., None] * h[source], destination)  # [N, H, D]
    return out.reshape(N, -1) if concat_heads else out.mean(1)


ATTENTION: dict[str, Callable[..., Any]] = {
    "jax_attn_bwd": graph_attention,
    "segment operations": segment_attention,
}


def initial_params(key: jax.Array, features: int, classes: int) -> dict[str, Any]:
    """Two layers, each with a projection for all heads and the vector that scores edges."""

    def initial(key: jax.Array, inputs: int, head_size: int, outputs: int) -> dict[str, jax.Array]:
        width, (key, other) = HEADS * head_size, jax.random.split(key)
        nodes = 0.1 * jax.random.normal(other, (2 * width,))
        return {
            "kernel": (2 / (inputs + width)) ** 0.5 * jax.random.normal(key, (inputs, width)),
            # [source | destination | edge]; at first like attends to like
            "attention": jnp.concatenate([nodes, jnp.ones(HEADS)]),
            "bias": jnp.zeros(outputs),
        }

    first, second = jax.random.split(key)
    width = HEADS * HEAD_SIZE
    return {
        "hidden": initial(first, features, HEAD_SIZE, width),  # heads side by side
        "output": initial(second, width, classes, classes),  # mean over heads
    }


def layer(attention, graph, params, x, edge, key, **options):
    """Projects the nodes and lets each attend to its neighbours: `[N, inputs]` to `[N, outputs]`."""
    if key is not None:
        key, noise = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(noise, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)
        options |= {"dropout_rate": DROPOUT, "dropout_key": key}
    h = x @ params["kernel"]  # [N, H * D]
    attend = ATTENTION[attention]
    return attend(graph, h, None, params["attention"], num_heads=HEADS, edge=edge, **options)


def gat(attention, graph, params, x, similarity, key=None, **options):
    """Logits of the classes, `[N, C]`, then what `options` ask for; with dropout if there is a key."""
    first, second = (None, None) if key is None else jax.random.split(key)
    hidden, output = params["hidden"], params["output"]
    edge = jnp.repeat(similarity[:, None], HEADS, axis=1)  # one edge feature for each head
    h = jax.nn.elu(layer(attention, graph, hidden, x, edge, first) + hidden["bias"])
    result = layer(attention, graph, output, h, edge, second, concat_heads=False, **options)
    logits, *rest = result if options else (result,)
    return logits + output["bias"], *rest


@partial(jax.jit, static_argnums=0)
def train_step(attention, graph, params, state, x, similarity, labels, labelled, key):
    """(params, state, loss before the update); `labelled [N]` says whose labels are known."""

    def loss(params):
        (logits,) = gat(attention, graph, params, x, similarity, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(where=labelled)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@jax.jit
def predict(graph, params, x, similarity):
    """The likeliest class of every node, and the second layer's attention, mean over heads, `[E]`."""
    options = {"return_attention_weights": True}
    logits, weights = gat("jax_attn_bwd", graph, params, x, similarity, **options)
    return logits.argmax(-1), weights.mean(1)


# Data ------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> Data:
    """The digits on their nearest-neighbour graph, or what is in `--graph`; every node gets a self-loop."""
    images = None
    masks: dict[str, np.ndarray] = {}
    if args.graph is None:
        digits = load_digits()
        features, labels, images = digits.data / 16, digits.target, digits.images
        nearest = kneighbors_graph(features, args.neighbours).tocoo()
        edges = np.stack([nearest.col, nearest.row], axis=1)
    else:
        edges, features, labels, masks = load_file(args.graph)
        features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    if args.undirected or args.graph is None:
        edges = np.concatenate([edges, edges[:, ::-1]])
    # The operator adds none: what a node should see of itself is an edge like all others.
    loops = np.repeat(np.arange(len(labels))[:, None], 2, axis=1)
    edges = np.unique(np.concatenate([edges, loops])[:, ::-1], axis=0)[:, ::-1]
    features = features.astype(np.float32)
    labels = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    if masks:
        count = min(args.draws, len(masks["train"]))
        splits = [{name: x[i] for name, x in masks.items()} for i in range(count)]
    else:
        splits = [draw_labels(labels, args.labels, args.seed + i) for i in range(args.draws)]
    return Data(edges, similarities(features, edges), features, labels, splits, images)


def similarities(features: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Minus the distance of the features at both ends, mean 0, variance 1; 0 for self-loops, `[E]`."""
    chunks = np.array_split(edges, 1 + len(edges) * features.shape[1] // 2**24)  # chunks of 64 MiB
    distance = np.concatenate(
        [np.linalg.norm(features[i] - features[j], axis=1) for i, j in (c.T for c in chunks)]
    )
    between = edges[:, 0] != edges[:, 1]
    mean, deviation = (f(distance, where=between) for f in (np.mean, np.std))
    return np.where(between, (mean - distance) / (deviation + 1e-6), 0).astype(np.float32)


def draw_labels(labels: np.ndarray, count: int, seed: int) -> dict[str, np.ndarray]:
    """A split that knows the labels of `count` nodes of each class."""
    rng, train = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for k in np.unique(labels):
        nodes = np.flatnonzero(labels == k)
        train[rng.choice(nodes, min(count, len(nodes) - 1), replace=False)] = True
    return {"train": train, "test": ~train}


def load_file(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(edges, features, labels, masks by name) of a file in the form above; ValueError for another."""

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"argument --graph: {path}: {what}")

    require(path.is_file(), "there is no such file")
    require(zipfile.is_zipfile(path), "is not a NumPy .npz file")
    with np.load(path) as file:
        names = {"edges", "node_features", "node_labels"}
        require(names <= set(file), f"lacks {', '.join(sorted(names - set(file)))}")
        edges, features, labels = file["edges"], file["node_features"], file["node_labels"]
        wanted = {name: f"{name}_masks" for name in ("train", "val", "test")}
        masks = {name: file[key] for name, key in wanted.items() if key in file}
    N = len(features)
    require(features.ndim == 2, f"node_features must be [N, F], got {features.shape}")
    require(labels.shape == (N,), f"node_labels must be [{N}], got {labels.shape}")
    for name, x in (("edges", edges), ("node_labels", labels)):
        require(np.issubdtype(x.dtype, np.integer), f"{name} must be integers, got {x.dtype}")
    require(edges.shape[1:] == (2,), f"edges must be [E, 2], got {edges.shape}")
    require(len(np.unique(labels)) > 1, "node_labels must hold two classes or more")
    inside = not edges.size or (edges.min() >= 0 and edges.max() < N)
    require(inside, f"edges must join nodes from 0 to {N - 1}")
    if "train" not in masks:
        return edges, features, labels, {}
    masks = {name: np.atleast_2d(x).astype(bool) for name, x in masks.items()}
    masks.setdefault("test", ~(masks["train"] | masks.get("val", masks["train"])))
    for name, x in masks.items():
        expected = (*masks["train"].shape[:1], N)
        require(x.shape == expected, f"{name}_masks must be {expected}, got {x.shape}")
        require(bool(x.any(1).all()), f"{name}_masks must hold a node in each split")
    return edges, features, labels, masks


def baselines(data: Data) -> dict[str, list[float]]:
    """Test accuracies, one of each split, of methods that see the labelled nodes' features alone."""
    methods = {
        "most frequent class": DummyClassifier(),
        "logistic regression": LogisticRegression(max_iter=2000),
        "1-nearest neighbour": KNeighborsClassifier(1),
    }
    accuracies: dict[str, list[float]] = {name: [] for name in methods}
    for split in data.splits:
        known, unknown = split["train"], split["test"]
        for name, method in methods.items():
            method.fit(data.features[known], data.labels[known])
            score = method.score(data.features[unknown], data.labels[unknown])
            accuracies[name].append(float(score))
    return accuracies


# Training --------------------------------------------------------------------------------------------


def train(
    args: argparse.Namespace, data: Data, graph: BipartiteCSC, console: Console
) -> tuple[Any, list[dict[int, float]], list[float]]:
    """The last split's parameters, {step: test accuracy} of each split, and each split's result."""
    x, similarity, labels = map(jnp.asarray, (data.features, data.similarity, data.labels))
    every = -(-args.steps // 20)
    curves: list[dict[int, float]] = []
    results = []
    bar = Progress(*Progress.get_default_columns(), TextColumn("{task.fields[state]}"), console=console)
    with bar as progress:
        task = progress.add_task("training", total=args.steps * len(data.splits), state="")
        for number, split in enumerate(data.splits):
            start, noise = jax.random.split(jax.random.key(args.seed + number))
            params = initial_params(start, x.shape[1], int(labels.max()) + 1)
            state, labelled = OPTIMIZER.init(params), jnp.asarray(split["train"])
            curve, best = {}, (-1.0, 0.0)
            for step in range(1, args.steps + 1):
                key = jax.random.fold_in(noise, step)
                params, state, loss = train_step(
                    "jax_attn_bwd", graph, params, state, x, similarity, labels, labelled, key
                )
                progress.update(task, advance=1, state=f"loss {float(loss):.2f}")
                if step % every == 0 or step == args.steps:
                    right = np.asarray(predict(graph, params, x, similarity)[0]) == data.labels
                    curve[step] = float(right[split["test"]].mean())
                    # Without validation nodes there is nothing to choose by: the last step counts.
                    score = float(right[split["val"]].mean()) if "val" in split else step
                    best = max(best, (score, curve[step]), key=lambda pair: pair[0])
            curves.append(curve)
            results.append(best[1])
            known = int(split["train"].sum())
            console.print(f"split {number}: {known} labels, test accuracy {best[1]:.1%}")
    return params, curves, results


def accuracy_table(accuracies: dict[str, list[float]]) -> Table:
    """Mean and range over the splits."""
    count = len(next(iter(accuracies.values())))
    table = Table(title=f"Test accuracy, splits: {count}")
    table.add_column("method")
    table.add_column("mean", justify="right")
    table.add_column("lowest to highest", justify="right")
    for name, values in accuracies.items():
        table.add_row(name, f"{statistics.mean(values):.1%}", f"{min(values):.1%} to {max(values):.1%}")
    return table


def connect(data: Data) -> BipartiteCSC:
    """The graph as the operator takes it: built once, for all steps."""
    (source, destination), N = data.edges.T, len(data.labels)
    return BipartiteCSC.from_coo(source, destination, N, N)


def compare(data: Data, repeats: int = 8) -> Table:
    """Time and peak temporary memory of a training step with each attention, without dropout."""
    x, similarity, labels = map(jnp.asarray, (data.features, data.similarity, data.labels))
    params = initial_params(jax.random.key(0), x.shape[1], int(labels.max()) + 1)
    labelled = jnp.asarray(data.splits[0]["train"])
    source, destination = jnp.asarray(data.edges.T.astype(np.int32))
    graphs = {"jax_attn_bwd": connect(data), "segment operations": (source, destination)}
    states = {name: (params, OPTIMIZER.init(params)) for name in ATTENTION}
    fixed = (x, similarity, labels, labelled, None)
    steps = {
        name: train_step.lower(name, graphs[name], *states[name], *fixed).compile() for name in ATTENTION
    }
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTION}
    losses: dict[str, float] = {}
    for _ in range(repeats):
        for name in ATTENTION:  # in turns: other work on the machine then slows both alike
            start = time.perf_counter()
            *new, loss = jax.block_until_ready(steps[name](graphs[name], *states[name], *fixed))
            seconds[name].append(time.perf_counter() - start)
            states[name], losses[name] = (new[0], new[1]), float(loss)

    table = Table(title=f"One training step (median), {len(data.edges):,} edges, {HEADS} heads")
    table.add_column("attention")
    for header in ("time (ms)", "temporary memory (MiB)", f"loss at step {repeats}"):
        table.add_column(header, justify="right")
    ms = {name: 1e3 * statistics.median(s[1:]) for name, s in seconds.items()}
    memory = {name: step.memory_analysis() for name, step in steps.items()}
    mib = {name: m.temp_size_in_bytes / 2**20 if m else float("nan") for name, m in memory.items()}
    for name in ATTENTION:
        table.add_row(name, f"{ms[name]:.1f}", f"{mib[name]:.1f}", f"{losses[name]:.4f}")
    ours, theirs = ATTENTION
    ratios = (f"{x[theirs] / x[ours]:.2f}" for x in (ms, mib))
    table.add_row(f"{theirs} / {ours}", *ratios)
    return table


# The picture -----------------------------------------------------------------------------------------


def plot(
    path: Path,
    data: Data,
    weights: np.ndarray,
    predicted: np.ndarray,
    curves: list[dict[int, float]],
    accuracies: dict[str, list[float]],
) -> None:
    """Writes what nodes attend to, and the accuracy, as PNG."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    above, below = parts
    nodes = mixed_nodes(data)
    if nodes:
        for axes, node in zip(np.ravel(above.subplots(1, len(nodes))), nodes, strict=True):
            draw_node(axes, data, weights, predicted, node)
    above.suptitle(
        "Test nodes with the most mixed neighbours. The thicker the line, the more attention it gets",
        fontweight="bold",
    )
    entries = {"neighbour of the same class": SAME, "neighbour of another class": OTHER}
    lines = [Line2D([], [], color=c, lw=3, label=name) for name, c in entries.items()]
    above.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False)
    left, right = below.subplots(1, 2)
    draw_shares(left, data, weights)
    draw_accuracy(right, curves, accuracies)
    figure.savefig(path, dpi=130)


def mixed_nodes(data: Data, count: int = 3) -> list[int]:
    """Test nodes, each of another class, among whose 6 to 14 neighbours classes mix the most evenly."""
    source, destination = data.edges.T
    neighbours = np.bincount(destination[source != destination], minlength=len(data.labels))
    other = data.labels[source] != data.labels[destination]
    share = np.bincount(destination[other], minlength=len(data.labels)) / np.maximum(neighbours, 1)
    eligible = data.splits[-1]["test"] & (neighbours >= 6) & (neighbours <= 14) & (share > 0)
    order = np.flatnonzero(eligible)[np.argsort(abs(share - 0.5)[eligible], kind="stable")]
    first = {data.labels[i]: int(i) for i in order[::-1]}  # the best of each class
    return sorted(first.values(), key=list(order).index)[:count]


def draw_node(axes: Any, data: Data, weights: np.ndarray, predicted: np.ndarray, node: int) -> None:
    """A node in the middle, its neighbours around it, the same class side by side."""
    source, destination = data.edges.T
    into = np.flatnonzero((destination == node) & (source != node))
    into = into[np.lexsort((-weights[into], data.labels[source[into]] != data.labels[node]))]
    angles = np.pi / 2 + 2 * np.pi * np.arange(len(into)) / len(into)
    top = weights[into].max()
    for edge, x, y in zip(into, np.cos(angles), np.sin(angles), strict=True):
        colour = SAME if data.labels[source[edge]] == data.labels[node] else OTHER
        axes.plot([0, x], [0, y], color=colour, lw=10 * weights[edge] / top, solid_capstyle="butt")
        share, middle = f"{weights[edge]:.0%}", {"ha": "center", "va": "center"}
        axes.text(1.38 * x, 1.38 * y, share, color=colour, **middle)
        draw_picture(axes, data, source[edge], (x, y), colour, 3.2)
    draw_picture(axes, data, node, (0, 0), "black", 4.5)
    itself = 1 - weights[into].sum()
    seen = f"a {data.labels[node]}, taken for a {predicted[node]}"
    axes.set_title(f"{seen}; attention to itself {itself:.0%}", fontsize=11)
    axes.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
    axes.axis("off")


def draw_picture(axes: Any, data: Data, node: int, at: Any, colour: str, zoom: float) -> None:
    """The node's image, or without images its class, framed in `colour`."""
    if data.images is None:
        box = {"boxstyle": "circle", "facecolor": "white", "edgecolor": colour, "lw": 2}
        axes.text(*at, str(data.labels[node]), ha="center", va="center", bbox=box)
        return
    image = OffsetImage(data.images[node], cmap="gray_r", zoom=zoom)
    frame = {"edgecolor": colour, "lw": 2}
    axes.add_artist(AnnotationBbox(image, at, pad=0.1, bboxprops=frame))


def draw_shares(axes: Any, data: Data, weights: np.ndarray) -> None:
    """How much more, or less, each neighbour gets than the mean of a node's neighbours."""
    source, destination = data.edges.T
    same, between = data.labels[source] == data.labels[destination], source != destination
    total, count = (np.bincount(destination, x) for x in (weights * between, between))
    several = between & (count > 1)[destination]
    ratio = weights[several] * (count / np.maximum(total, 1e-30))[destination[several]]
    for name, colour, chosen in (("the same", SAME, same), ("another", OTHER, ~same)):
        x = ratio[chosen[several]]
        if len(x):
            label = f"{name} class: {len(x):,} edges, mean {x.mean():.2f}"
            bins = np.linspace(0, 2.5, 51)
            axes.hist(x, bins, density=True, color=colour, alpha=0.6, label=label)
            axes.axvline(x.mean(), color=colour, lw=2)
    axes.set(xlabel="attention to a neighbour / mean attention to the neighbours")
    axes.set(title="All edges: whom a node attends to", ylabel="density", yticks=[])
    axes.margins(y=0.5)
    axes.legend(title="neighbour of")


def draw_accuracy(axes: Any, curves: list[dict[int, float]], accuracies: dict[str, list]) -> None:
    """Test accuracy by step, mean and range over the splits, and that of the best two other methods."""
    *others, (mean, name) = ((statistics.mean(x), name) for name, x in accuracies.items())
    steps, values = list(curves[0]), np.array([list(curve.values()) for curve in curves])
    axes.plot(steps, values.mean(0), "o-", ms=4, color=SAME, label=f"{name} {mean:.1%}")
    axes.fill_between(steps, values.min(0), values.max(0), color=SAME, alpha=0.2)
    for (mean, name), style in zip(sorted(others)[-2:], (":", "--"), strict=True):
        axes.axhline(mean, color="black", ls=style, lw=1, label=f"{name} {mean:.1%}")
    axes.set(xlabel="training step", ylabel="test accuracy", ylim=(None, 1))
    axes.set(title=f"Test accuracy, mean and range over the splits ({len(curves)})")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Data]:
    """The options, checked, with the output directory created, and the data that they name."""
    parser = argparse.ArgumentParser(
        description="Trains a graph attention network on digits, or on any graph.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps of each split")
    parser.add_argument("--labels", type=int, default=5, help="labelled nodes of each class")
    parser.add_argument("--neighbours", type=int, default=10, help="edges of each digit")
    parser.add_argument("--draws", type=int, default=5, help="splits to train on, one by one")
    parser.add_argument("--graph", type=Path, help="train on this .npz file instead of digits")
    parser.add_argument("--undirected", action="store_true", help="add each edge's reverse")
    parser.add_argument("--out", type=Path, default="out", help="directory for attention.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of labels, weights and dropout")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "labels": (1, 100), "neighbours": (1, 100), "draws": (1, 100)}
    for name, (low, high) in (limits | {"seed": (0, 2**30)}).items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    try:
        return args, load(args)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, tabulates, plots, compares."""
    args, data = parse_arguments(argv)
    console = Console(highlight=False)
    graph = connect(data)
    console.print(f"{graph.num_dst:,} nodes, {graph.capacity:,} edges with a self-loop at each node")
    params, curves, results = train(args, data, graph, console)
    accuracies = baselines(data) | {"graph attention network": results}
    console.print(accuracy_table(accuracies))

    predicted, weights = map(np.asarray, predict(graph, params, data.features, data.similarity))
    path = args.out / "attention.png"
    plot(path, data, weights, predicted, curves, accuracies)
    console.print(f"attention and accuracy: {path}")
    console.print(compare(data))
    if args.graph is None:
        # So few edges fit into the caches, whatever is made of them: see five times as many, too.
        args.neighbours *= 5
        console.print(compare(load(args)))


if __name__ == "__main__":
    main()
