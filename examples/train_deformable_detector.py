"""Trains a small Deformable-DETR detector on scenes composed of real handwritten digits.

    python examples/train_deformable_detector.py --steps 2000 --out out

Ends with average precision on held-out digits, a picture of what was found and where one query looked
(`detections.png` in `--out`), and the time of the operator beside the gather form that JAX
differentiates. Needs flax, optax, scikit-learn, matplotlib, rich.
"""

import argparse
import math
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.progress import Progress, TextColumn
from scipy.ndimage import zoom
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits

from jax_attn_bwd import dot_product_attention, multi_scale_deformable_attention
from jax_attn_bwd.layers.flax_linen import MultiScaleDeformableAttention
from jax_attn_bwd.ops.deformable.reference import multi_scale_deformable_attention as gather_form

HEIGHT, WIDTH = 48, 64  # pixels of a picture
CLASSES, MOST = 10, 6  # kinds of digits, and the most of them in one picture
LEVELS = ((12, 16), (6, 8), (3, 4))  # (height, width) of the feature maps
CHANNELS, HEADS, POINTS, DECODER_LAYERS = 64, 4, 4, 3
GRID = (4, 5)  # rows and columns of the boxes that the queries begin with
BATCH, HELD_OUT, LEARNING_RATE = 16, 200, 1e-3
COMPILED = 10  # steps after which nothing is compiled any more

# A box is (x, y of its centre, width, height), all from 0 to 1 across the picture. Shapes: B pictures,
# T = MOST digits, Q queries, S pixels of all levels, N decoder layers (all learn, the last one counts).


class Scenes(NamedTuple):
    """Pictures and the digits in them."""

    pictures: np.ndarray  # [B, HEIGHT, WIDTH, 1]
    boxes: np.ndarray  # [B, T, 4]
    labels: np.ndarray  # [B, T], -1 after the last digit


def compose(rng: np.random.Generator, digits: np.ndarray, labels: np.ndarray, count: int) -> Scenes:
    """`count` scenes: digits of many sizes and shapes, none over another, on a noisy slope."""
    y, x = np.mgrid[-0.3 : 0.3 : 1j * HEIGHT, -0.3 : 0.3 : 1j * WIDTH]
    along, across = rng.uniform(-1, 1, (2, count, 1, 1))
    pictures = along * x + across * y + rng.normal(0, 0.12, (count, HEIGHT, WIDTH))
    boxes, kinds = np.full((count, MOST, 4), 0.5, "f4"), np.full((count, MOST), -1, "i4")
    free = np.ones(pictures.shape, bool)
    for b in range(count):
        for i in rng.integers(len(digits), size=rng.integers(3, MOST + 1)):
            digit = zoom(digits[i] / 16, rng.uniform(1.3, 3.0, 2), order=1)
            digit = digit[tuple(slice(ink.min(), ink.max() + 1) for ink in np.nonzero(digit > 0.2))]
            h, w = digit.shape
            top, left = rng.integers(HEIGHT - h + 1), rng.integers(WIDTH - w + 1)
            place = np.s_[b, top : top + h, left : left + w]
            if free[place].all():
                free[place], n = False, np.count_nonzero(kinds[b] >= 0)
                pictures[place] += rng.uniform(0.6, 1.2) * digit
                boxes[b, n] = (left + w / 2) / WIDTH, (top + h / 2) / HEIGHT, w / WIDTH, h / HEIGHT
                kinds[b, n] = labels[i]
    return Scenes(pictures[..., None].astype("f4"), boxes, kinds)


def centres(H: int, W: int) -> jax.Array:
    """`[H * W, 2]`: (x, y) of the centre of every pixel of a feature map, from 0 to 1."""
    x, y = ((jnp.arange(n, dtype=jnp.float32) + 0.5) / n for n in (W, H))
    return jnp.stack(jnp.meshgrid(x, y), axis=-1).reshape(-1, 2)


def mlp(x: jax.Array, hidden: int) -> jax.Array:
    """Two linear layers of the module that calls it."""
    return nn.Dense(CHANNELS)(nn.relu(nn.Dense(hidden)(x)))


class Backbone(nn.Module):
    """Pictures to feature maps, one level after the other, `[B, S, CHANNELS]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def convolve(x: jax.Array, features: int, stride: int) -> jax.Array:
            return nn.GroupNorm(8)(nn.Conv(features, (3, 3), stride, use_bias=False)(x))

        x, levels = nn.relu(convolve(x, CHANNELS // 2, 2)), []
        for _ in LEVELS:
            x = nn.relu(convolve(x, CHANNELS, 2))
            x = nn.relu(x + convolve(x, CHANNELS, 1))
            levels.append(nn.Dense(CHANNELS)(x).reshape(len(x), -1, CHANNELS))
        return jnp.concatenate(levels, axis=1)


class EncoderLayer(nn.Module):
    """Each pixel of each level looks at a few points around it, on all levels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        points = jnp.concatenate([centres(*level) for level in LEVELS])  # [S, 2]
        points = jnp.tile(points, (len(x), 1, 1))
        h = nn.LayerNorm()(x)
        attention = MultiScaleDeformableAttention(HEADS, CHANNELS, len(LEVELS), POINTS)
        x = x + attention(h + nn.Dense(CHANNELS)(points), points, h, LEVELS)
        return x + mlp(nn.LayerNorm()(x), 2 * CHANNELS)


class DecoderLayer(nn.Module):
    """The queries look at one another, then each at a few points in and around its box."""

    @nn.compact
    def __call__(self, x: jax.Array, boxes: jax.Array, memory: jax.Array) -> jax.Array:
        position = mlp(boxes, CHANNELS)
        heads = partial(nn.DenseGeneral, (HEADS, CHANNELS // HEADS))
        h = nn.LayerNorm()(x)
        out = dot_product_attention(heads()(h + position), heads()(h + position), heads()(h))
        x = x + nn.DenseGeneral(CHANNELS, axis=(-2, -1))(out)
        query = nn.LayerNorm()(x) + position
        attention = MultiScaleDeformableAttention(HEADS, CHANNELS, len(LEVELS), POINTS)
        x = x + attention(query, boxes, memory, LEVELS)
        # For the figure; XLA drops it unless "intermediates" are asked for.
        locations = attention.sampling_locations(query, boxes, LEVELS)
        logits = attention.attention_weights(query).reshape(locations.shape[:-1])
        self.sow("intermediates", "sampling", (locations, nn.softmax(logits)))
        return x + mlp(nn.LayerNorm()(x), 2 * CHANNELS)


class Detector(nn.Module):
    """Each decoder layer corrects the boxes of the one before, and looks where they are.

    Its loss does not train the boxes that it was given: learning would be several times slower.
    Returns logits `[N, B, Q, CLASSES]` of independent sigmoids (all low: nothing), boxes `[N, B, Q, 4]`.
    """

    @nn.compact
    def __call__(self, pictures: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory = nn.LayerNorm()(EncoderLayer()(Backbone()(pictures)))
        grid = jnp.concatenate([centres(*GRID), jnp.full((math.prod(GRID), 2), 0.3)], axis=-1)
        start = self.param("boxes", lambda key: jax.scipy.special.logit(grid))
        content = self.param("queries", nn.initializers.normal(0.5), (len(grid), CHANNELS))
        x, at = (jnp.tile(w, (len(pictures), 1, 1)) for w in (content, start))
        logits, boxes = [], []
        for layer in range(DECODER_LAYERS):
            at = jax.lax.stop_gradient(at) if layer else at
            x = DecoderLayer()(x, nn.sigmoid(at), memory)
            h = nn.LayerNorm()(x)
            at = at + nn.Dense(4, kernel_init=nn.initializers.zeros)(h)
            boxes.append(nn.sigmoid(at))
            logits.append(nn.Dense(CLASSES, bias_init=nn.initializers.constant(-3.0))(h))
        return jnp.stack(logits), jnp.stack(boxes)


def overlap(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """IoU and generalised IoU (arXiv:1902.09630) of boxes `[..., 4]`."""
    a0, a1, b0, b1 = (x[..., :2] + s * x[..., 2:] / 2 for x in (a, b) for s in (-1, 1))
    both = jnp.prod(jnp.maximum(jnp.minimum(a1, b1) - jnp.maximum(a0, b0), 0), axis=-1)
    hull = jnp.prod(jnp.maximum(a1, b1) - jnp.minimum(a0, b0), axis=-1)
    union = jnp.prod(a[..., 2:], axis=-1) + jnp.prod(b[..., 2:], axis=-1) - both
    return both / union, both / union - (hull - union) / hull


def box_loss(found: Any, true: Any) -> jax.Array:
    """L1 distance and generalised IoU, weighted as in DETR."""
    return 5 * jnp.abs(found - true).sum(-1) + 2 * (1 - overlap(found, true)[1])


def match(costs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The query of each digit, `[N, B, T]`: one to one, at the least total of `costs [N, B, Q, T]`."""
    queries = np.zeros(costs.shape[:2] + costs.shape[3:], np.int32)
    for n, b in np.ndindex(queries.shape[:2]):
        chosen, digits = linear_sum_assignment(costs[n, b][:, labels[b] >= 0])
        queries[n, b, digits] = chosen
    return queries


def loss_function(found: tuple, scenes: Scenes, queries: jax.Array) -> jax.Array:
    """The loss of classes (focal, arXiv:1708.02002) and boxes, per digit, summed over the layers."""
    logits, boxes = found
    real = scenes.labels >= 0
    chosen = jax.nn.one_hot(queries, math.prod(GRID)) * real[..., None]  # [N, B, T, Q]
    kinds = jnp.einsum("nbtq,btc->nbqc", chosen, jax.nn.one_hot(scenes.labels, CLASSES))
    focal = optax.sigmoid_focal_loss(logits, kinds, alpha=0.25, gamma=2.0)
    boxes = jnp.take_along_axis(boxes, queries[..., None], axis=2)  # [N, B, T, 4]
    return (2 * focal.sum() + (box_loss(boxes, scenes.boxes) * real).sum()) / real.sum()


# Digits are matched to queries on the host, between `forward` and `backward`. The pullback of `jax.vjp`
# is a pytree: it can leave one compiled function and enter the next, so no forward runs twice.


@jax.jit
def forward(state: TrainState, scenes: Scenes) -> tuple[tuple, jax.Array, Any]:
    """What was found, the cost of each query as the answer to each digit, and the pullback."""
    found, pullback = jax.vjp(lambda p: state.apply_fn(p, scenes.pictures), state.params)
    logits, boxes = found
    p = jnp.take_along_axis(nn.sigmoid(logits), scenes.labels[None, :, None], axis=3)
    return found, box_loss(boxes[..., None, :], scenes.boxes[:, None]) - 2 * p, pullback


@jax.jit
def backward(state: TrainState, found: tuple, pullback: Any, scenes: Scenes, queries: Any) -> tuple:
    """The updated state, and the loss before the update."""
    loss, dfound = jax.value_and_grad(loss_function)(found, scenes, queries)
    return state.apply_gradients(grads=pullback(dfound)[0]), loss


@jax.jit
def detect(state: TrainState, pictures: jax.Array) -> tuple[jax.Array, ...]:
    """Score, class and box of each query; where it looked, with which weights `[B, Q, HEADS, L * P]`."""
    (logits, boxes), sown = state.apply_fn(state.params, pictures, mutable="intermediates")
    last = sown["intermediates"][f"DecoderLayer_{DECODER_LAYERS - 1}"]
    ((locations, weights),) = last["sampling"]
    scores = nn.sigmoid(logits[-1])
    return scores.max(-1), scores.argmax(-1), boxes[-1], locations, weights


def average_precision(state: TrainState, truth: Scenes) -> np.ndarray:
    """AP at IoU 0.5, 0.55 ... 0.95, mean over classes: the area under monotone precision over recall.

    A detection is right if it overlaps so far with a digit of its class that no surer one has claimed.
    """
    scores, kinds, boxes, *_ = map(np.asarray, detect(state, truth.pictures))
    iou = np.asarray(overlap(boxes[:, :, None], truth.boxes[:, None])[0])  # [B, Q, T]
    table = np.zeros((10, CLASSES))
    for row, kind in np.ndindex(table.shape):
        free = truth.labels == kind
        digits, (b, q) = free.sum(), np.nonzero(kinds == kind)
        order = np.argsort(-scores[b, q], kind="stable")
        right = np.zeros(len(order), bool)
        for i, k in enumerate(order):
            overlaps = iou[b[k], q[k]] * free[b[k]]
            right[i] = overlaps.max() >= 0.5 + 0.05 * row
            free[b[k], overlaps.argmax()] &= not right[i]
        precision = np.cumsum(right) / np.arange(1, len(right) + 1)
        table[row, kind] = np.maximum.accumulate(precision[::-1])[::-1][right].sum() / digits
    return table.mean(axis=1)


def plot(path: Path, state: TrainState, truth: Scenes) -> None:
    """Six held-out pictures with what was found in them, and where one query looked."""
    scores, kinds, boxes, locations, weights = map(np.asarray, detect(state, truth.pictures))
    figure, size = Figure(figsize=(15, 7.4), layout="constrained"), np.array([WIDTH, HEIGHT] * 2)
    left, right = figure.subfigures(1, 2, squeeze=False, facecolor="0.2").flat
    left.suptitle("Held-out digits. Dashed: true. Yellow: found, with scores", color="w")
    right.suptitle("Where the yellow box's query looked. Area: attention weight", color="w")
    axes = [*left.subplots(3, 2).flat, right.subplots()]
    b, q = np.unravel_index(scores[:6].argmax(), scores[:6].shape)
    drawn = [(i, np.flatnonzero(scores[i] > 0.3)) for i in range(6)] + [(int(b), np.array([q]))]
    for ax, (i, queries) in zip(axes, drawn, strict=True):
        ax.imshow(truth.pictures[i, ..., 0], "gray", extent=(0, WIDTH, HEIGHT, 0))
        ax.set_axis_off()
        real = np.flatnonzero(truth.labels[i] >= 0)
        true = [(truth.boxes[i, t], f"{truth.labels[i, t]}", "w", "--") for t in real]
        found = [(boxes[i, q], f"{kinds[i, q]} ({scores[i, q]:.2f})", "gold", "-") for q in queries]
        for box, text, color, style in true + found:
            x, y, w, h = (box - [*box[2:] / 2, 0, 0]) * size
            ax.add_patch(Rectangle((x, y), w, h, fill=False, ec=color, ls=style))
            edge, va = (y - 0.5, "bottom") if color == "gold" else (y + h + 0.5, "top")
            ax.text(x, edge, text, color=color, va=va, weight="bold")
    areas = 5 + 800 * weights[b, q].reshape(HEADS, len(LEVELS), POINTS)
    x, y = np.moveaxis((locations[b, q] * size[:2]).reshape(*areas.shape, 2), -1, 0)
    for i, (H, W) in enumerate(LEVELS):
        axes[-1].scatter(x[:, i], y[:, i], areas[:, i], label=f"on the {H} x {W} level", alpha=0.8)
    axes[-1].legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3)
    figure.savefig(path, dpi=120)


def milliseconds(attend: Callable[..., jax.Array]) -> float:
    """Median time of forward and backward of `attend(value, locations, weights)` in the encoder."""
    rng, S = np.random.default_rng(0), sum(H * W for H, W in LEVELS)
    samples = (BATCH, S, HEADS, len(LEVELS), POINTS)
    shapes = ((BATCH, S, HEADS, CHANNELS // HEADS), (*samples, 2), samples)
    arrays = [jnp.asarray(rng.random(shape), jnp.float32) for shape in shapes]
    step = jax.jit(jax.grad(lambda *x: jnp.square(attend(*x)).sum(), argnums=(0, 1, 2)))
    times = timeit.repeat(lambda: jax.block_until_ready(step(*arrays)), number=1, repeat=11)
    return 1e3 * float(np.median(times[1:]))  # the first one compiles


def main(argv: Sequence[str] | None = None) -> None:
    """Composes scenes, trains, draws, measures."""
    parser = argparse.ArgumentParser(
        description="Trains a deformable transformer to find digits in pictures.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--out", type=Path, default="out", help="directory for detections.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and scenes")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.seed < 0:
        parser.error("--steps must be positive, --seed must not be negative")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    data, rng = load_digits(), np.random.default_rng(args.seed)
    chosen = np.split(rng.permutation(len(data.target)), [400])
    held_out, digits = ((data.images[x], data.target[x]) for x in chosen)
    truth = compose(rng, *held_out, HELD_OUT)

    model, key = Detector(), jax.random.key(args.seed, impl="rbg")  # it compiles faster
    params = jax.jit(model.init)(key, truth.pictures[:1])
    rate = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, min(50, args.steps), args.steps + 1)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=adamw)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.2f}"))
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=args.steps, loss=math.nan)
        for step in range(args.steps + 1):
            if step % -(-args.steps // 8) == 0 or step == args.steps:
                ap = average_precision(state, truth)
                bar.console.print(f"step {step}: held-out AP50 {ap[0]:.3f}, AP {ap.mean():.3f}")
            if step < args.steps:
                scenes = compose(rng, *digits, BATCH)
                found, costs, pullback = forward(state, scenes)
                queries = match(np.asarray(costs), scenes.labels)
                state, loss = backward(state, found, pullback, scenes, queries)
                bar.update(task, advance=1, loss=float(loss))
                if step == COMPILED:
                    begin = timeit.default_timer()
                elif step == 2 * COMPILED:
                    each = (timeit.default_timer() - begin) / COMPILED
                    bar.console.print(f"about {each * (args.steps - step) / 60:.1f} minutes to go")

    plot(args.out / "detections.png", state, truth)
    print(f"detections: {args.out / 'detections.png'}")
    ours = milliseconds(lambda v, *rest: multi_scale_deformable_attention(v, LEVELS, *rest))
    by_jax = milliseconds(partial(gather_form, spatial_shapes=LEVELS))
    print(f"operator, forward and backward: {ours:.1f} ms; gather form, by JAX: {by_jax:.1f} ms")


if __name__ == "__main__":
    main()
