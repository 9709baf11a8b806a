"""Finetunes a plain Flax linen transformer, and the same with this package's attention: one line differs.

    python examples/finetune_flax_linen.py --steps 40 --context 512 --out out

A byte-level language model is trained on the documentation that comes with Python, with Flax's own
attention. From its parameters, as from a checkpoint, it is then finetuned on Python source code three times,
on the same batches: with Flax's own attention, with `attention_fn=jax_attn_bwd.attention_fn` in Flax's own
layer, and with the layer of `jax_attn_bwd.layers.flax_linen`.

Ends with the losses side by side, their largest difference, time and temporary memory of a step, and a plot
(`finetune.png` in `--out`). Needs flax, optax, matplotlib, rich.
"""

import argparse
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_attn_bwd
from jax_attn_bwd.layers import flax_linen

# What makes the attention layer of a block; the parameters have the same names in all of them.
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Flax's own": nn.MultiHeadDotProductAttention,
    "attention_fn=": partial(nn.MultiHeadDotProductAttention, attention_fn=jax_attn_bwd.attention_fn),
    "our layer": flax_linen.MultiHeadDotProductAttention,
}
OWN = "Flax's own"
MODULES = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "textwrap", "typing")

VOCABULARY = 256  # bytes
WIDTH, HEADS, BLOCKS = 128, 4, 2
BYTES_PER_STEP = 2048


class Block(nn.Module):
    """One pre-norm transformer layer."""

    attention: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`[B, T, WIDTH]` and a mask `[B, 1, T, T]`, True = attend."""
        x = x + self.attention(num_heads=HEADS)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class LanguageModel(nn.Module):
    """Bytes `[B, T]` to the logits of the byte that follows each."""

    attention: Callable[..., nn.Module] = nn.MultiHeadDotProductAttention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T, VOCABULARY]`."""
        T = tokens.shape[1]
        positions = self.param("positions", nn.initializers.normal(0.02), (T, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + positions
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(BLOCKS):
            x = Block(self.attention)(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def bits_per_byte(model: LanguageModel, params: Any, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of each byte of `windows [B, T + 1]` given those before it, in bits."""
    logits: Any = model.apply(params, windows[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats.mean() / math.log(2)


def training_step(attention: Callable[..., nn.Module], rate: float) -> Callable[..., Any]:
    """`(params, optimizer state, windows) -> (params, optimizer state, loss before the update)`."""
    model = LanguageModel(attention)
    optimizer = optax.adamw(rate)

    def step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(partial(bits_per_byte, model))(params, windows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step)


def batches(text: str, steps: int, context: int, seed: int) -> list[jax.Array]:
    """Random windows `[B, context + 1]` of the bytes of `text`, one batch for each step."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(data, context + 1)
    rng = np.random.default_rng(seed)
    size = max(1, BYTES_PER_STEP // context)
    return [jnp.asarray(windows[rng.integers(len(windows), size=size)]) for _ in range(steps)]


def pretrain(args: argparse.Namespace, console: Console) -> Any:
    """The parameters after as many steps on documentation, with Flax's own attention."""
    text = batches("\n\n".join(topics.values()), args.steps, args.context, args.seed)
    params: Any = LanguageModel().init(jax.random.key(args.seed), text[0][:, :-1])
    rate = 3e-3
    step, state = training_step(LAYERS[OWN], rate), optax.adamw(rate).init(params)
    for windows in track(text, "training on documentation", console=console):
        params, state, loss = step(params, state, windows)
    console.print(f"after {args.steps} steps on documentation: loss {float(loss):.2f} bits per byte")
    return params


def finetune(
    args: argparse.Namespace, start: Any, console: Console
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """({layer: loss of each step}, {layer: median seconds of a step}, {layer: temporary MiB})."""
    source = "\n\n".join(inspect.getsource(import_module(name)) for name in MODULES)
    text = batches(source, args.steps, args.context, args.seed + 1)
    rate = 1e-3
    state = optax.adamw(rate).init(start)
    steps = {
        name: training_step(layer, rate).lower(start, state, text[0]).compile()  # type: ignore[attr-defined]
        for name, layer in LAYERS.items()
    }
    states = dict.fromkeys(LAYERS, (start, state))
    losses: dict[str, list[float]] = {name: [] for name in LAYERS}
    seconds: dict[str, list[float]] = {name: [] for name in LAYERS}
    for windows in track(text, "finetuning on source code", console=console):
        for name in LAYERS:  # in turns: other work on the machine then slows all alike
            begin = time.perf_counter()
            params, new, loss = jax.block_until_ready(steps[name](*states[name], windows))
            seconds[name].append(time.perf_counter() - begin)
            states[name] = params, new
            losses[name].append(float(loss))
    memory = {name: step.memory_analysis() for name, step in steps.items()}
    mib = {name: m.temp_size_in_bytes / 2**20 if m else math.nan for name, m in memory.items()}
    return losses, {name: statistics.median(s) for name, s in seconds.items()}, mib


def differences(losses: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """{layer: how far its loss lies from that of Flax's own, at each step}."""
    own = np.array(losses[OWN])
    return {name: np.abs(np.array(x) - own) for name, x in losses.items() if name != OWN}


def tables(
    args: argparse.Namespace, losses: dict[str, list[float]], seconds: dict[str, float], mib: dict[str, float]
) -> list[Table]:
    """The loss curves, and what a step costs."""
    curves = Table(title="Finetuning: loss in bits per byte, from the same start on the same batches")
    cost = Table(title=f"One training step, context {args.context}")
    curves.add_column("step", justify="right")
    for name in LAYERS:
        curves.add_column(name, justify="right")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 8)), args.steps - 1}):
        curves.add_row(str(step + 1), *(f"{losses[name][step]:.5f}" for name in LAYERS))
    cost.add_column("attention layer")
    for header in ("time (ms)", "temporary memory (MiB)"):
        cost.add_column(header, justify="right")
    for name in LAYERS:
        cost.add_row(name, f"{1e3 * seconds[name]:.0f}", f"{mib[name]:.1f}")
    return [curves, cost]


def plot(path: Path, losses: dict[str, list[float]]) -> None:
    """Writes the loss curves, one upon the other, and their differences as PNG."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    curves, difference = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(losses[OWN]) + 1)
    for (name, loss), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        curves.plot(steps, loss, style, lw=4 if style == "-" else 2, label=name)
    curves.set(ylabel="loss (bits per byte)", title="Finetuning on source code, one start, one line changed")
    curves.legend()
    for i, (name, gap) in enumerate(differences(losses).items()):
        difference.plot(steps, gap, ".-", lw=0.8, color=f"C{i + 1}", label=name)
    difference.set(xlabel="training step", ylabel="difference to\nFlax's own (bits)")
    difference.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    difference.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, difference):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, and the output directory, created."""
    parser = argparse.ArgumentParser(
        description="Finetunes a Flax linen transformer with three attentions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each training")
    parser.add_argument("--context", type=int, default=512, help="length in bytes")
    parser.add_argument("--out", type=Path, default="out", help="directory for finetune.png")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "context": (1, 4096), "seed": (0, 2**31 - 2)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, finetunes three times, compares."""
    args = parse_arguments(argv)
    console = Console(highlight=False)
    losses, seconds, mib = finetune(args, pretrain(args, console), console)
    for table in tables(args, losses, seconds, mib):
        console.print(table)
    largest = max(float(gap.max()) for gap in differences(losses).values())
    console.print(f"largest difference of a loss: {largest:.1e} bits per byte")
    plot(args.out / "finetune.png", losses)
    console.print(f"loss curves: {args.out / 'finetune.png'}")


if __name__ == "__main__":
    main()
