"""Trains a small causal byte-level transformer on the documentation that comes with Python.

    python examples/train_language_model.py --steps 500 --context 1024 --out out

With `--layer` each block's projections and attention are one rule, `multi_head_attention`; positions are then
learned, as nothing can stand between the two to rotate queries and keys.

Ends with a sample of generated text, a loss curve (`loss.png` in `--out`), and the step time and
peak temporary memory of the same model with each attention. Needs flax, optax, matplotlib, rich.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, multi_head_attention

# Both take (query, key, value), each [B, T, N, H], and `is_causal`.
ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "jax_attn_bwd": dot_product_attention,
    "jax.nn": jax.nn.dot_product_attention,
}

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS = 128, 4, 2
BYTES_PER_STEP = 2048  # the batch shrinks as the context grows
LEARNING_RATE = 5e-3


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of `[B, T, N, H]`."""
    T, H = x.shape[1], x.shape[3]
    angle = jnp.outer(jnp.arange(T), 10_000.0 ** -jnp.linspace(0, 1, H // 2))[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: Callable[..., jax.Array], layer: bool, *, rngs: nnx.Rngs):
        self.attention, self.layer = attention, layer
        heads = (HEADS, WIDTH // HEADS)
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value = (linear(WIDTH, heads) for _ in range(3))
        self.out = linear(heads, WIDTH, axis=(-2, -1))
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))

    def attend(self, h: jax.Array) -> jax.Array:
        """Projections and attention of `[B, T, WIDTH]`."""
        if self.layer and self.attention is dot_product_attention:
            params = MultiHeadAttentionParams(
                query_kernel=self.query.kernel[...],
                key_kernel=self.key.kernel[...],
                value_kernel=self.value.kernel[...],
                out_kernel=self.out.kernel[...],
            )
            return multi_head_attention(params, h, is_causal=True)
        query, key, value = self.query(h), self.key(h), self.value(h)
        if not self.layer:
            query, key = rotate(query), rotate(key)
        return self.out(self.attention(query, key, value, is_causal=True))


class Transformer(nnx.Module):
    """Bytes `[B, T]` to the logits of the byte that follows each, `[B, T, VOCABULARY]`."""

    def __init__(self, attention: Callable[..., jax.Array], args: argparse.Namespace):
        rngs = nnx.Rngs(args.seed)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(args.context, WIDTH, rngs=rngs) if args.layer else None
        self.blocks = nnx.List([Block(attention, args.layer, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def bits_per_byte(model: Transformer, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of each byte of `windows [B, T + 1]` given those before it, in bits."""
    logits = model(windows[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats.mean() / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Updates the model in place and returns the loss before the update."""
    loss, gradients = nnx.value_and_grad(bits_per_byte)(model, windows)
    optimizer.update(model, gradients)
    return loss


def create(attention: str, args: argparse.Namespace) -> tuple[Transformer, nnx.Optimizer]:
    """A fresh model and its optimizer; the same weights for every attention."""
    model = Transformer(ATTENTION[attention], args)
    warmup = min(20, args.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup, args.steps + 1)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return model, nnx.Optimizer(model, clipped, wrt=nnx.Param)


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and every twentieth part of the text, held out for validation."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    # Some topics repeat parts of others: without this, held-out text would also be trained on.
    unique = "\n\n".join(dict.fromkeys(paragraphs))
    parts = np.array_split(np.frombuffer(unique.encode(), np.uint8).astype(np.int32), 100)
    train_on = np.concatenate([part for i, part in enumerate(parts) if i % 20])
    return train_on, np.concatenate(parts[::20])


def unigram_entropy(text: np.ndarray) -> float:
    """Bits per byte of the best code that knows how often each byte occurs and nothing more."""
    counts = np.bincount(text)
    p = counts[counts > 0] / len(text)
    return float(-(p * np.log2(p)).sum())


def train(
    args: argparse.Namespace, text: np.ndarray, held_out: np.ndarray, console: Console
) -> tuple[Transformer, list[float], dict[int, float]]:
    """Returns the trained model, the loss of each step, and {step: validation loss}."""
    model, optimizer = create(args.attention, args)
    batch = max(1, BYTES_PER_STEP // args.context)
    windows = sliding_window_view(text, args.context + 1)
    validation = jnp.asarray(sliding_window_view(held_out, args.context + 1)[:: args.context])
    evaluate = nnx.jit(bits_per_byte)
    rng = np.random.default_rng(args.seed)
    losses, validation_losses = [], {}

    bar = Progress(
        *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.2f}"), console=console
    )
    with bar as progress:
        task = progress.add_task("training", total=args.steps, loss=math.nan)
        for step in range(1, args.steps + 1):
            starts = rng.integers(len(windows), size=batch)
            losses.append(float(train_step(model, optimizer, jnp.asarray(windows[starts]))))
            progress.update(task, advance=1, loss=losses[-1])
            if step % -(-args.steps // 8) == 0 or step == args.steps:
                validation_losses[step] = loss = float(evaluate(model, validation))
                console.print(f"step {step}: held-out loss {loss:.2f} bits per byte")
    return model, losses, validation_losses


@nnx.jit
def generate(model: Transformer, prompt: jax.Array, keys: jax.Array) -> jax.Array:
    """Samples a byte per random key after `prompt [T]`, each given the T bytes before it."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / 0.7)  # a temperature < 1: fewer odd bytes
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(step, prompt, keys)[1]


def printable(text: np.ndarray) -> str:
    """`text` with '?' for every byte that a terminal might not show, or might obey."""
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else "?" for b in text)


def plot(path: Path, title: str, losses: list, validation: dict, entropy: float) -> None:
    """Writes the loss curve as PNG."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, lw=0.8, label="training, one batch")
    axes.plot(list(validation), list(validation.values()), "o-", label="held-out text")
    axes.axhline(entropy, color="black", ls="--", lw=1, label="unigram entropy of held-out text")
    axes.set(xlabel="training step", ylabel="loss (bits per byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def compare(args: argparse.Namespace, text: np.ndarray, repeats: int = 8) -> Table:
    """Step time and peak temporary memory of one training step with each attention."""
    batch = max(1, BYTES_PER_STEP // args.context)
    windows = jnp.asarray(text[: batch * (args.context + 1)].reshape(batch, -1))
    states = {name: create(name, args) for name in ATTENTION}
    steps = {name: train_step.lower(*states[name], windows).compile() for name in ATTENTION}
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTION}
    loss = {}
    for _ in range(repeats):
        for name in ATTENTION:  # in turns: other work on the machine then slows both alike
            start = time.perf_counter()
            loss[name] = float(steps[name](*states[name], windows))
            seconds[name].append(time.perf_counter() - start)

    table = Table(title=f"One training step (median), context {args.context}, batch {batch}")
    table.add_column("attention")
    for header in ("time (ms)", "temporary memory (MiB)", f"loss at step {repeats}"):
        table.add_column(header, justify="right")
    ms = {name: 1e3 * statistics.median(s[1:]) for name, s in seconds.items()}
    memory = {name: step.memory_analysis() for name, step in steps.items()}
    mib = {name: m.temp_size_in_bytes / 2**20 if m else math.nan for name, m in memory.items()}
    for name in ATTENTION:
        table.add_row(name, f"{ms[name]:.0f}", f"{mib[name]:.1f}", f"{loss[name]:.4f}")
    table.add_row("jax.nn / jax_attn_bwd", *(f"{x['jax.nn'] / x['jax_attn_bwd']:.2f}" for x in (ms, mib)))
    return table


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, and the output directory, created."""
    parser = argparse.ArgumentParser(
        description="Trains a small byte-level transformer on the documentation of Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--context", type=int, default=1024, help="length in bytes")
    parser.add_argument("--attention", choices=ATTENTION, default="jax_attn_bwd", help="trains with it")
    parser.add_argument("--layer", action="store_true", help="one rule for projections and attention")
    parser.add_argument("--out", type=Path, default="out", help="directory for loss.png")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    args = parser.parse_args(argv)
    limits = {"steps": (1, 10**6), "context": (1, 4096), "seed": (0, 2**31 - 1)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {low} to {high}")
    if args.layer and args.attention != "jax_attn_bwd":
        parser.error(f"argument --layer: it is a rule of jax_attn_bwd, not of {args.attention}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, samples, plots, compares."""
    args = parse_arguments(argv)
    console = Console(highlight=False)
    text, held_out = load_text()
    entropy = unigram_entropy(held_out)
    model, losses, validation = train(args, text, held_out, console)
    loss = f"held-out text: loss {validation[args.steps]:.2f}, unigram entropy {entropy:.2f}"
    console.print(f"{loss} bits per byte")

    prompt = held_out[: min(args.context, 256)]
    keys = jax.random.split(jax.random.key(args.seed), 400)
    sample = generate(model, jnp.asarray(prompt), keys)
    shown = Text.assemble((printable(prompt[-80:]), "dim"), printable(np.asarray(sample)))
    console.print(Panel(shown, title="Held-out text (dim), continued by the model"))

    layer = ", whole layer" if args.layer else ""
    title = f"Byte-level transformer, context {args.context}, {args.attention}{layer}"
    plot(args.out / "loss.png", title, losses, validation, entropy)
    console.print(f"loss curve: {args.out / 'loss.png'}")
    console.print(compare(args, text))


if __name__ == "__main__":
    main()
