"""Trains a transformer on a mesh of the sphere to advect a field by one step.

    python examples/train_mesh_transformer.py --steps 300 --out out

The mesh is an icosahedron whose triangles are refined. Each node attends to those within a few hops, as in
weather models on such meshes (Price et al., Probabilistic weather forecasting with machine learning, 2024,
arXiv:2312.15796). Nodes are numbered so that neighbours stand near each other (reverse Cuthill-McKee), and
`mods.packed` tells attention who sees whom in one bit or less a pair: tiles of the plane in which nobody sees
anybody are skipped, forward and backward. The wind blows along the parallels, at a speed that depends on the
latitude; the model sees the field at the nodes, and learns the field one step later. Trained on single steps,
it is run for several.

A table compares, forward and backward, the attention of the packed mask, of a mask array, of the graph and of
`jax.nn.dot_product_attention` with the form that such models use where no kernel skips tiles: blocks as
wide as the band of the numbered mesh, each of which attends to itself, the one before and the one behind.
`--large` compares on 10,242 nodes and 8 hops, too. Writes the field, its error and the tiles that are visited
to `mesh.png` in `--out`. Needs optax, matplotlib, rich, scipy.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse as sp
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy.sparse.csgraph import reverse_cuthill_mckee

from jax_attn_bwd import BipartiteCSC, dot_product_attention, graph_transformer_attention, mods

WIDTH, HEADS, BLOCKS = 64, 4, 2
FREQUENCIES = np.pi * 2.0 ** np.arange(4)  # of the waves that tell a node where it is
BUMPS, SHARPNESS = 8, 20.0  # of a field
ROLLED = 5  # steps that the trained model is run for
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


# The mesh --------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """Points on the unit sphere, `[nodes, 3]`, and which are within the hops of which, `[nodes, nodes]`."""

    points: np.ndarray
    near: sp.csr_array


def icosphere(refinements: int) -> tuple[np.ndarray, np.ndarray]:
    """(points, edges) of an icosahedron, each of whose triangles is cut into four, again and again."""
    corners = [(0, a, b * (1 + 5**0.5) / 2) for a in (-1, 1) for b in (-1, 1)]
    points = np.array([np.roll(corner, turn) for turn in range(3) for corner in corners])
    joined = np.linalg.norm(points[:, None] - points, axis=-1) < 2.1  # edges have length 2
    triples = combinations(range(12), 3)
    faces = np.array([(a, b, c) for a, b, c in triples if joined[a, b] and joined[b, c] and joined[c, a]])
    sides = lambda faces: np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), -1)
    for _ in range(refinements):
        edges, middle = np.unique(sides(faces), axis=0, return_inverse=True)
        (a, b, c), (ab, bc, ca) = faces.T, len(points) + middle.reshape(-1, 3).T
        points = np.concatenate([points, points[edges].mean(1)])
        quarters = (a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca)
        faces = np.concatenate([np.stack(quarter, -1) for quarter in quarters])
        points /= np.linalg.norm(points, axis=-1, keepdims=True)
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    return points, np.unique(sides(faces), axis=0)


def make_mesh(refinements: int, hops: int) -> Mesh:
    """Numbered so that neighbours are close: what a row sees is a narrow band."""
    points, edges = icosphere(refinements)
    count = len(points)
    once = sp.coo_array((np.ones(len(edges), bool), tuple(edges.T)), (count, count))
    once = sp.csr_array(once + once.T + sp.eye_array(count, dtype=bool))
    near = once
    for _ in range(hops - 1):
        near = near @ once
    order = reverse_cuthill_mckee(sp.csr_matrix(near), symmetric_mode=True)
    return Mesh(points[order], sp.csr_array(near)[order][:, order])


# Attention to the neighbours, in several forms -------------------------------------------------------


def of_packed_mask(near: sp.csr_array) -> Attend:
    """One bit a pair of nodes, in cells of 32 x 32 that are not empty."""
    mask_mod, mod_args = mods.packed(near)
    return partial(dot_product_attention, mask_mod=mask_mod, mod_args=mod_args)


def of_mask_array(near: sp.csr_array) -> Attend:
    """One byte a pair of nodes."""
    return partial(dot_product_attention, mask=jnp.asarray(near.toarray()))


def of_graph(near: sp.csr_array) -> Attend:
    """An edge for each pair of neighbours."""
    rows, columns = near.nonzero()
    graph = BipartiteCSC.from_coo(columns, rows, *near.shape)

    def attend(q, k, v):
        flat = (x.reshape(len(x), -1) for x in (q, k, v))
        return graph_transformer_attention(graph, *flat, num_heads=q.shape[1]).reshape(q.shape)

    return jax.vmap(attend)


def of_plain_mask(near: sp.csr_array) -> Attend:
    """All pairs, of which most are then masked."""
    return partial(jax.nn.dot_product_attention, mask=jnp.asarray(near.toarray())[None, None])


def of_three_blocks(near: sp.csr_array) -> Attend:
    """Blocks as wide as the band; the keys of a block are its own and those of its two neighbours."""
    count, pairs = near.shape[0], near.tocoo()
    band = int(abs(pairs.row - pairs.col).max())
    blocks = -(-count // band)
    seen = np.zeros((blocks, band, 3 * band), bool)
    seen[pairs.row // band, pairs.row % band, pairs.col - (pairs.row // band - 1) * band] = True
    mask = jnp.asarray(seen)

    def attend(q, k, v):
        def cut(x, before):
            behind = blocks * band - count + before
            x = jnp.pad(x, ((0, 0), (before, behind), (0, 0), (0, 0)))
            return x.reshape(len(x), -1, band, *x.shape[2:])

        beside = lambda x: jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], 2)
        q, k, v = cut(q, 0), beside(cut(k, band)), beside(cut(v, band))
        logits = jnp.einsum("zbtnh,zbsnh->zbnts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], logits, jnp.finfo(logits.dtype).min))
        out = jnp.einsum("zbnts,zbsnh->zbtnh", weights, v)
        return out.reshape(len(out), -1, *out.shape[3:])[:, :count]

    return attend


FORMS: dict[str, Callable[[sp.csr_array], Attend]] = {
    "mods.packed": of_packed_mask,
    "mask array": of_mask_array,
    "graph": of_graph,
    "three blocks": of_three_blocks,
    "jax.nn": of_plain_mask,
}


# The field and its step ------------------------------------------------------------------------------


def draw_fields(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(centres, heights) of the bumps of fields."""
    centres = rng.standard_normal((count, BUMPS, 3))
    return centres / np.linalg.norm(centres, axis=-1, keepdims=True), rng.standard_normal((count, BUMPS))


def field_at(points: np.ndarray, fields: tuple[np.ndarray, np.ndarray], steps: int) -> np.ndarray:
    """The fields `[count, nodes, 1]` after some steps: what was where the wind comes from."""
    centres, heights = fields
    x, y, z = points.T
    turned = -steps * 0.12 * np.sin(3 * np.arcsin(np.clip(z, -1, 1)) + 0.5)  # east here, west there
    along, across = x * np.cos(turned) - y * np.sin(turned), x * np.sin(turned) + y * np.cos(turned)
    origin = np.stack([along, across, z], -1)
    bumps = np.exp(SHARPNESS * (origin @ centres.swapaxes(-1, -2) - 1))
    return (bumps @ heights[..., None]).astype(np.float32)


# The network -----------------------------------------------------------------------------------------


def initial_params(key: jax.Array) -> dict[str, Any]:
    """At first the network predicts that nothing moves."""
    keys = iter(jax.random.split(key, 2 + 5 * BLOCKS))
    dense = lambda n, m: jax.random.normal(next(keys), (n, m)) * n**-0.5
    block = lambda: {
        "query_key": dense(WIDTH, 2 * WIDTH),
        "value": dense(WIDTH, WIDTH),
        "out": dense(WIDTH, WIDTH),
        "up": dense(WIDTH, 2 * WIDTH),
        "down": dense(2 * WIDTH, WIDTH),
    }
    return {
        "field": dense(1, WIDTH),
        "place": dense(3 + 6 * len(FREQUENCIES), WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "unembed": jnp.zeros((WIDTH, 1)),
    }


def predict(attend: Attend, points: jax.Array, params, field):
    """The fields `[batch, nodes, 1]` one step later.

    Where a node stands tells what it looks at; what is found there is the field.
    """
    waves = (points[:, :, None] * FREQUENCIES.astype(np.float32)).reshape(len(points), -1)
    place = jnp.concatenate([points, jnp.sin(waves), jnp.cos(waves)], -1) @ params["place"]
    place = place * jax.lax.rsqrt((place**2).mean(-1, keepdims=True))
    x, heads = field @ params["field"], (len(field), len(points), HEADS, WIDTH // HEADS)
    for block in params["blocks"]:
        q, k = (jnp.broadcast_to(y, x.shape) for y in jnp.split(place @ block["query_key"], 2, -1))
        out = attend(*(y.reshape(heads) for y in (q, k, x @ block["value"])))
        x = x + out.reshape(x.shape) @ block["out"]
        x = x + 0.1 * jax.nn.gelu((x + place) @ block["up"]) @ block["down"]
    return field + x @ params["unembed"]


def train(args: argparse.Namespace, mesh: Mesh, console: Console) -> tuple[Any, Callable]:
    """(parameters, the function that predicts with them)."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, args.steps))
    model = partial(predict, of_packed_mask(mesh.near), jnp.asarray(mesh.points, jnp.float32))

    @jax.jit
    def step(params, state, field, target):
        loss = lambda params: ((model(params, field) - target) ** 2).mean()
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    rng, start, seen = np.random.default_rng(args.seed), time.perf_counter(), []
    params = initial_params(jax.random.key(args.seed))
    state = optimizer.init(params)
    for i in range(args.steps):
        fields = draw_fields(rng, args.batch)
        field, target = (field_at(mesh.points, fields, steps) for steps in (0, 1))
        params, state, value = step(params, state, field, target)
        seen.append(float(value) / ((field - target) ** 2).mean())
        if i + 1 == args.steps or (i + 1) % 50 == 0:
            took = time.perf_counter() - start
            error = np.mean(seen[-20:])
            console.print(f"step {i + 1}: squared error {error:.4f} of that of no change, {took:.0f} s")
    return params, jax.jit(model)


# Comparison and picture ------------------------------------------------------------------------------


def measured(mesh: Mesh, width: int, repeats: int) -> Iterator[tuple[str, float, float, float]]:
    """(form, ms, MiB of temporaries, largest difference of a gradient from the first form's) of each."""
    rng, first = np.random.default_rng(0), None
    arrays = rng.standard_normal((4, 1, len(mesh.points), HEADS, width)).astype(np.float32)
    for name, make in FORMS.items():
        attend = make(mesh.near)
        gradients = lambda dout, *qkv, attend=attend: jax.vjp(attend, *qkv)[1](dout)
        both = jax.jit(gradients).lower(*arrays).compile()
        grads, times = jax.block_until_ready(both(*arrays)), []
        first = first or grads
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(both(*arrays))
            times.append(time.perf_counter() - start)
        apart = max(float(abs(a - b).max()) for a, b in zip(grads, first, strict=True))
        memory = both.memory_analysis()
        mib = np.nan if memory is None else memory.temp_size_in_bytes / 2**20
        yield name, 1e3 * np.median(times), mib, apart


def compare(meshes: Sequence[tuple[Mesh, int]], repeats: int) -> Table:
    """Time and temporary memory of each form on each mesh, whose heads have a width."""
    columns = ("mesh", "attention", "ms", "temporaries, MiB", "difference")
    table = Table(*columns, title="Attention to the neighbours, forward and backward, float32")
    for mesh, width in meshes:
        sizes = f"{len(mesh.points):,} x {HEADS} x {width}"
        for name, ms, mib, apart in measured(mesh, width, repeats):
            table.add_row(sizes, name, f"{ms:.1f}", f"{mib:.1f}", f"{apart:.0e}")
    return table


def plot(path: Path, mesh: Mesh, truth: np.ndarray, error: np.ndarray) -> None:
    """Writes the field after the last step, the error there and the tiles that are visited, as PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    x, y, z = mesh.points.T
    at = np.arctan2(y, x), np.arcsin(np.clip(z, -1, 1))
    style = {"s": 30_000 / len(x), "cmap": "RdBu_r", "linewidths": 0}
    drawn = {f"Field after {ROLLED} steps": (truth, abs(truth).max()), "Error": (error, abs(error).max())}
    for i, (title, (values, top)) in enumerate(drawn.items()):
        axes: Any = figure.add_subplot(1, 3, i + 1, projection="mollweide")
        dots = axes.scatter(*at, c=values, vmin=-top, vmax=top, **style)
        axes.set(title=title, xticks=[], yticks=[])
        figure.colorbar(dots, ax=axes, shrink=0.6, orientation="horizontal")
    mask_mod, mod_args = mods.packed(mesh.near)
    count, block = len(x), 8 * max(1, len(x) // 512)
    kinds = mods.tiles(mask_mod, count, count, mod_args, block=block)
    axes = figure.add_subplot(1, 3, 3)
    axes.imshow(kinds, cmap=ListedColormap(["white", "#9ecae1", "#2171b5"]), vmin=0, vmax=2)
    axes.set_title(f"Tiles of {block} x {block} that are visited: {(kinds > 0).mean():.0%}")
    axes.set(xlabel="node that is seen", ylabel="node that sees", xticks=[], yticks=[])
    figure.savefig(path, dpi=130)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the output directory created."""
    parser = argparse.ArgumentParser(
        description="Trains a transformer on a mesh of the sphere to advect a field by one step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch", type=int, default=4, help="fields of a step")
    parser.add_argument(
        "--refinements", type=int, default=3, help="refinements n of the icosahedron: 10 * 4^n + 2 nodes"
    )
    parser.add_argument("--hops", type=int, default=3, help="hops within which a node sees others")
    parser.add_argument("--repeats", type=int, default=5, help="times that each form is measured")
    parser.add_argument("--large", action="store_true", help="compare on 10,242 nodes and 8 hops, too")
    parser.add_argument("--out", type=Path, default="out", help="directory for mesh.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and fields")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "batch": (1, 1000), "refinements": (1, 6), "hops": (1, 16)}
    limits |= {"repeats": (1, 100), "seed": (0, 2**30)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, runs the model for several steps, compares."""
    args = parse_arguments(argv)
    console = Console(highlight=False)
    mesh = make_mesh(args.refinements, args.hops)
    console.print(f"{len(mesh.points):,} nodes, {mesh.near.nnz:,} pairs within {args.hops} hops")
    params, model = train(args, mesh, console)
    fields = draw_fields(np.random.default_rng(args.seed + 1), 1)
    field = start = field_at(mesh.points, fields, 0)
    for _ in range(ROLLED):
        field = model(params, field)
    truth = field_at(mesh.points, fields, ROLLED)
    error, moved = np.asarray(field) - truth, start - truth
    share = (error**2).mean() / (moved**2).mean()
    console.print(f"after {ROLLED} steps: squared error {share:.4f} of that of no change")
    path = args.out / "mesh.png"
    plot(path, mesh, truth[0, :, 0], error[0, :, 0])
    console.print(f"field, error and tiles: {path}")
    meshes = [(mesh, WIDTH)] + ([(make_mesh(5, 8), 2 * WIDTH)] if args.large else [])
    console.print(compare(meshes, args.repeats))


if __name__ == "__main__":
    main()
