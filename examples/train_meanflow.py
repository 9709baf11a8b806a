"""Trains a MeanFlow model that draws handwritten digits in one step of the network.

    python examples/train_meanflow.py --steps 2000 --out out

With noise e and a digit x, the flow z = (1 - t) x + t e has the velocity v = e - x. The network u(z, r, t)
learns the mean velocity from r to t, which satisfies u = v - (t - r) du/dt along the flow (Geng et al., Mean
flows for one-step generative modeling, 2025, arXiv:2505.13447). Each training step takes du/dt by `jax.jvp`
of the whole network, a small diffusion transformer, and then the gradient: attention is called with
`forward_mode=True`. A sample is e - u(e, 0, 1). The images are the 1,797 digits of 8 x 8 pixels that come
with scikit-learn. The same step with `jax.nn.dot_product_attention` is measured beside it; with
`--large` also on images of 256 patches. Writes samples of each digit and the loss to `meanflow.png` in
`--out`. Needs optax, matplotlib, rich, scikit-learn.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from jax_attn_bwd import dot_product_attention

CLASSES, FREQUENCIES, PATCH = 10, 2.0 ** np.arange(-2, 4), 2
OPTIMIZER = optax.adamw(1e-3, b2=0.99)
ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "jax_attn_bwd": partial(dot_product_attention, forward_mode=True),
    "jax.nn": jax.nn.dot_product_attention,
}


class Sizes(NamedTuple):
    """Of the network, and of the images it draws."""

    side: int = 8
    width: int = 64
    heads: int = 4
    blocks: int = 3


DIGITS, LARGE = Sizes(), Sizes(side=32, width=256, heads=4, blocks=4)


# The network -----------------------------------------------------------------------------------------


def initial_params(key: jax.Array, sizes: Sizes) -> dict[str, Any]:
    """Every block begins as the identity: what it adds is multiplied by 0."""
    keys, W = iter(jax.random.split(key, 8 + 4 * sizes.blocks)), sizes.width
    tokens = (sizes.side // PATCH) ** 2

    def dense(inputs, outputs):
        return jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5

    return {
        "embed": dense(PATCH**2, W),
        "position": 0.1 * jax.random.normal(next(keys), (tokens, W)),
        "label": 0.5 * jax.random.normal(next(keys), (CLASSES, W)),
        "time": [dense(4 * len(FREQUENCIES), W), dense(W, W)],
        "blocks": [
            {
                "modulate": jnp.zeros((W, 6 * W)),
                "qkv": dense(W, 3 * W),
                "out": dense(W, W),
                "up": dense(W, 4 * W),
                "down": dense(4 * W, W),
            }
            for _ in range(sizes.blocks)
        ],
        "modulate": jnp.zeros((W, 2 * W)),
        "unembed": jnp.zeros((W, PATCH**2)),
    }


def normalized(x, shift, scale):
    """Layer normalization, whose shift and scale come from time and label."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * (1 + scale) + shift


def velocity(attend, heads, params, z, r, t, label):
    """The mean velocity u, `[B, side, side]` like z, from time r to time t, `[B]` each."""
    B, side, _ = z.shape
    grid = side // PATCH
    patches = z.reshape(B, grid, PATCH, grid, PATCH).swapaxes(2, 3).reshape(B, grid**2, PATCH**2)
    x = patches @ params["embed"] + params["position"]

    angles = jnp.stack([t, t - r], -1)[..., None] * (jnp.pi * FREQUENCIES.astype(z.dtype))
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).reshape(B, -1)
    first, second = params["time"]
    given = jax.nn.silu(jax.nn.silu(waves @ first) @ second + params["label"][label])[:, None]  # [B, 1, W]

    for block in params["blocks"]:
        shift, scale, gate, *of_mlp = jnp.split(given @ block["modulate"], 6, -1)
        qkv = (normalized(x, shift, scale) @ block["qkv"]).reshape(B, grid**2, 3, heads, -1)
        out = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + gate * (out.reshape(x.shape) @ block["out"])
        shift, scale, gate = of_mlp
        x = x + gate * (jax.nn.gelu(normalized(x, shift, scale) @ block["up"]) @ block["down"])

    shift, scale = jnp.split(given @ params["modulate"], 2, -1)
    patches = normalized(x, shift, scale) @ params["unembed"]
    return patches.reshape(B, grid, grid, PATCH, PATCH).swapaxes(2, 3).reshape(z.shape)


# Training --------------------------------------------------------------------------------------------


def loss(params, attend, heads, images, labels, key):
    """The squared distance of u from v - (t - r) du/dt, which counts as a constant."""
    of_noise, of_times, of_equal = jax.random.split(key, 3)
    noise = jax.random.normal(of_noise, images.shape)
    times = jax.nn.sigmoid(jax.random.normal(of_times, (2, len(images))) - 0.4)
    r, t = times.min(0), times.max(0)
    r = jnp.where(jax.random.bernoulli(of_equal, 0.5, r.shape), r, t)  # half of them learn v itself
    at = lambda x: x[:, None, None]
    z, v = (1 - at(t)) * images + at(t) * noise, noise - images

    u_of = lambda z, r, t: velocity(attend, heads, params, z, r, t, labels)
    u, du_dt = jax.jvp(u_of, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
    target = jax.lax.stop_gradient(v - at(t - r) * du_dt)
    distances = ((u - target) ** 2).mean((1, 2))
    weights = jax.lax.stop_gradient(1 / (distances + 0.01))  # few of them are large
    return (weights * distances).mean(), distances.mean()


def training_step(attend, heads, params, state, images, labels, key):
    """(params, state, mean squared distance before the update)."""
    grads, distance = jax.grad(loss, has_aux=True)(params, attend, heads, images, labels, key)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, distance


def load() -> tuple[np.ndarray, np.ndarray]:
    """(images from -1 to 1, `[1797, 8, 8]`, and their labels)."""
    digits = load_digits()
    return digits.images.astype(np.float32) / 8 - 1, digits.target.astype(np.int32)


def train(args: argparse.Namespace, console: Console) -> tuple[Any, list[float]]:
    """Averaged parameters, and the distance of each step."""
    images, labels = load()
    params = initial_params(jax.random.key(args.seed), DIGITS)
    average, state, seen = params, OPTIMIZER.init(params), []
    step = jax.jit(partial(training_step, ATTENTIONS["jax_attn_bwd"], DIGITS.heads))
    rng, start = np.random.default_rng(args.seed), time.perf_counter()
    blend = jax.jit(lambda average, params: jax.tree.map(lambda a, p: 0.995 * a + 0.005 * p, average, params))
    for i in range(args.steps):
        drawn = rng.integers(0, len(images), args.batch)
        key = jax.random.fold_in(jax.random.key(args.seed + 1), i)
        params, state, distance = step(params, state, images[drawn], labels[drawn], key)
        average = blend(average, params) if i > 100 else params
        seen.append(float(distance))
        if i + 1 == args.steps or (i + 1) % 500 == 0:
            took = time.perf_counter() - start
            console.print(f"step {i + 1}: loss {np.mean(seen[-100:]):.4f}, {took:.0f} s")
    return average, seen


@partial(jax.jit, static_argnums=1)
def draw(params, columns: int, key):
    """Images `[10, columns, 8, 8]`, a row of each digit, by one call of the network."""
    labels = jnp.repeat(jnp.arange(CLASSES), columns)
    noise = jax.random.normal(key, (len(labels), DIGITS.side, DIGITS.side))
    zeros = jnp.zeros(len(labels))
    u = velocity(ATTENTIONS["jax_attn_bwd"], DIGITS.heads, params, noise, zeros, zeros + 1, labels)
    return (noise - u).reshape(CLASSES, columns, DIGITS.side, DIGITS.side)


# Beside jax.nn ---------------------------------------------------------------------------------------


def compare(repeats: int, large: bool) -> Table:
    """Time and temporary memory of a training step, with either attention."""
    columns = ("images", "attention", "ms a step", "temporaries, MiB", "loss")
    table = Table(*columns, title="One training step: jvp and gradient of the whole network, batch 16")
    for sizes in (DIGITS, LARGE) if large else (DIGITS,):
        params = initial_params(jax.random.key(0), sizes)
        params["unembed"] = params["position"][:1].T * jnp.ones(PATCH**2)  # at 0 nothing would move
        rng = np.random.default_rng(0)
        images = rng.standard_normal((16, sizes.side, sizes.side)).astype(np.float32)
        args = (params, OPTIMIZER.init(params), images, np.arange(16) % CLASSES, jax.random.key(1))
        for name, attend in ATTENTIONS.items():
            step = jax.jit(partial(training_step, attend, sizes.heads)).lower(*args).compile()
            distance, times = float(step(*args)[2]), []
            for _ in range(repeats):
                start = time.perf_counter()
                jax.block_until_ready(step(*args))
                times.append(time.perf_counter() - start)
            memory = step.memory_analysis()
            mib = np.nan if memory is None else memory.temp_size_in_bytes / 2**20
            patches = f"{(sizes.side // PATCH) ** 2} patches"
            table.add_row(patches, name, f"{1e3 * np.median(times):.1f}", f"{mib:.0f}", f"{distance:.5f}")
    return table


def plot(path: Path, samples: np.ndarray, seen: list[float]) -> None:
    """Writes the samples and the loss, as PNG."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    samples = np.pad(samples, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)  # apart from one another
    rows, columns, side, _ = samples.shape
    sheet = samples.swapaxes(1, 2).reshape(rows * side, columns * side)
    axes[0].imshow(sheet, cmap="gray_r", vmin=-1, vmax=1)
    axes[0].set(title="Drawn in one step", xticks=[], yticks=np.arange(rows) * side + side / 2 - 0.5)
    axes[0].set_yticklabels(range(rows))
    window = min(50, len(seen))
    axes[1].plot(np.convolve(seen, np.ones(window) / window, "valid"), color="#0072b2", lw=1)
    axes[1].set(title=f"Loss, mean over {window} steps", xlabel="training step", ylabel="squared distance")
    axes[1].grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the output directory created."""
    parser = argparse.ArgumentParser(
        description="Trains a MeanFlow model that draws handwritten digits in one step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="digits of a step")
    parser.add_argument("--repeats", type=int, default=5, help="times that each step is measured")
    parser.add_argument("--large", action="store_true", help="measure images of 256 patches, too")
    parser.add_argument("--out", type=Path, default="out", help="directory for meanflow.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, noise and batches")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "batch": (1, 1797), "repeats": (1, 100), "seed": (0, 2**30)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, draws, compares."""
    args = parse_arguments(argv)
    console = Console(highlight=False)
    params, seen = train(args, console)
    path = args.out / "meanflow.png"
    plot(path, np.asarray(draw(params, 12, jax.random.key(args.seed + 2))), seen)
    console.print(f"samples and loss: {path}")
    console.print(compare(args.repeats, args.large))


if __name__ == "__main__":
    main()
