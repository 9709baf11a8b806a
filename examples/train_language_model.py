"""Trains a small causal byte-level transformer on the documentation that comes with Python.

    python examples/train_language_model.py --steps 500 --context 1024 --out out

With `--layer` each block's projections and attention are one rule, `multi_head_attention`; positions are then
learned (it could rotate queries and keys, too: `rotary=`).

Over several devices, here eight virtual ones, batch and sequence are sharded:

    JAX_NUM_CPU_DEVICES=8 python examples/train_language_model.py --mesh data=2,sequence=4

On a cluster the same command with `--distributed` runs on every host, over all their devices. With
`--checkpoints DIR` the state is written there as training goes on, and `--resume` goes on from the last one,
on the same mesh or another: a run that was killed loses the steps since then, nothing else.

Ends with a sample of generated text, a loss curve (`loss.png` in `--out`), and the step time and
peak temporary memory of the same model with each attention. Needs flax, optax, matplotlib, rich.
"""

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, multi_head_attention, parallel

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


class Attention(nnx.Module):
    """Projections and causal attention of `[B, T, WIDTH]`."""

    def __init__(self, attention: Callable[..., jax.Array], layer: bool, *, rngs: nnx.Rngs):
        self.attention, self.layer = attention, layer
        heads = (HEADS, WIDTH // HEADS)
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query, self.key, self.value = (linear(WIDTH, heads) for _ in range(3))
        self.out = linear(heads, WIDTH, axis=(-2, -1))

    def __call__(self, h: jax.Array) -> jax.Array:
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


Mixer = Callable[..., Any]  # makes, of `rngs=`, a layer that mixes tokens: [B, T, WIDTH] to the same


class Block(nnx.Module):
    """One pre-norm transformer layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, mixer: Mixer, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.mixer_norm, self.mlp_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.mixer = mixer(rngs=rngs)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


def sharded(args: argparse.Namespace, *names: str | None) -> NamedSharding | None:
    """How an array lies on the mesh whose axes are named by `names`; None without a mesh."""
    return None if args.mesh is None else NamedSharding(args.mesh, P(*names))


class Transformer(nnx.Module):
    """Bytes `[B, T]` to the logits of the byte that follows each, `[B, T, VOCABULARY]`."""

    def __init__(self, mixers: Sequence[Mixer], args: argparse.Namespace):
        rngs = nnx.Rngs(args.seed)
        self.tokens = sharded(args, "data", "sequence")
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(args.context, WIDTH, rngs=rngs) if args.layer else None
        self.blocks = nnx.List([Block(mixer, rngs=rngs) for mixer in mixers])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.tokens is not None:
            x = jax.lax.with_sharding_constraint(x, self.tokens)
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def bits_per_byte(model: Transformer, windows: Any) -> jax.Array:
    """Mean cross-entropy of each byte of `windows [B, T + 1]` given those before it, in bits."""
    logits = model(windows[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats.mean() / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, windows: Any) -> jax.Array:
    """Updates the model in place and returns the loss before the update."""
    loss, gradients = nnx.value_and_grad(bits_per_byte)(model, windows)
    optimizer.update(model, gradients)
    return loss


def create(attention: str, args: argparse.Namespace) -> tuple[Transformer, nnx.Optimizer]:
    """A fresh model and its optimizer; the same weights for every attention."""
    attend = ATTENTION[attention]
    if args.mesh is not None and attention == "jax_attn_bwd":
        attend = parallel.attention_fn(args.mesh, batch="data", sequence="sequence", kind=args.kind)
    return with_optimizer(Transformer([partial(Attention, attend, args.layer)] * LAYERS, args), args)


def with_optimizer(model: Transformer, args: argparse.Namespace) -> tuple[Transformer, nnx.Optimizer]:
    """The model and what trains it, on the mesh if there is one."""
    warmup = min(20, args.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup, args.steps + 1)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
    if args.mesh is not None:  # every device holds all weights
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.device_put(state, sharded(args)))
    return model, optimizer


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


def parts(args: argparse.Namespace, axis: str) -> int:
    """Into how many parts an axis of the mesh cuts the batch or the sequence."""
    return 1 if args.mesh is None else args.mesh.shape[axis]


def batch_of(args: argparse.Namespace) -> int:
    """Windows a step."""
    return max(1, BYTES_PER_STEP // args.context)


class Checkpoints:
    """The state of a run on disk, written while it goes on; what is half written does not count."""

    def __init__(self, args: argparse.Namespace):
        import orbax.checkpoint as ocp  # takes seconds

        self.ocp = ocp
        options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=2)
        self.manager = ocp.CheckpointManager(args.checkpoints.absolute(), options=options)
        names = ("attention", "context", "layer", "seed", "steps")
        self.run = {name: getattr(args, name) for name in names}

    def save(self, step: int, model, optimizer, losses: list[float], validation: dict[int, float]) -> None:
        """Starts to write, where it is time to."""
        if not self.manager.should_save(step) and step != self.run["steps"]:
            return
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        history = {"run": self.run, "losses": losses, "validation": list(validation.items())}
        saved = self.ocp.args.Composite(
            state=self.ocp.args.StandardSave(state), history=self.ocp.args.JsonSave(history)
        )
        self.manager.save(step, args=saved, force=True)

    def restore(self, model: Transformer, optimizer: nnx.Optimizer) -> tuple[list[float], dict[int, float]]:
        """Updates both in place, on the mesh that they are on; the losses so far."""
        step = self.manager.latest_step()
        if step is None:
            raise SystemExit(f"argument --resume: there is no checkpoint in {self.manager.directory}")
        read = self.ocp.args.JsonRestore()
        history = self.manager.restore(step, args=self.ocp.args.Composite(history=read))["history"]
        if history["run"] != self.run:
            found, directory = history["run"], self.manager.directory
            raise SystemExit(f"argument --resume: {directory} holds a run with {found}, got {self.run}")
        state = nnx.state((model, optimizer))
        like = jax.tree.map(self.ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        read = self.ocp.args.StandardRestore(like)
        saved = self.manager.restore(step, args=self.ocp.args.Composite(state=read))["state"]
        nnx.replace_by_pure_dict(state, saved)
        nnx.update((model, optimizer), state)
        return history["losses"], dict(history["validation"])


History = tuple[list[float], dict[int, float]]  # the loss of each step, and {step: held-out loss}


def train(
    model: Transformer,
    optimizer: nnx.Optimizer,
    args: argparse.Namespace,
    text: np.ndarray,
    held_out: np.ndarray,
    console: Console,
) -> History:
    """Trains the model in place."""
    windows = sliding_window_view(text, args.context + 1)
    validation = sliding_window_view(held_out, args.context + 1)[:: args.context]
    validation = np.array(validation[: len(validation) // parts(args, "data") * parts(args, "data")])
    evaluate = nnx.jit(bits_per_byte)
    checkpoints = None if args.checkpoints is None else Checkpoints(args)
    losses: list[float] = []
    validation_losses: dict[int, float] = {}
    if checkpoints is not None and args.resume:
        losses, validation_losses = checkpoints.restore(model, optimizer)
        console.print(f"resumed after step {len(losses)}")

    bar = Progress(
        *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.2f}"), console=console
    )
    with bar as progress:
        task = progress.add_task("training", total=args.steps, loss=math.nan, completed=len(losses))
        for step in range(len(losses) + 1, args.steps + 1):
            rng = np.random.default_rng(
                (args.seed, step)
            )  # the seed depends on the step alone: it is the same after a restart
            starts = rng.integers(len(windows), size=batch_of(args))
            losses.append(float(train_step(model, optimizer, windows[starts])))
            progress.update(task, advance=1, loss=losses[-1])
            if len(losses) == min(10, args.steps) and not console.is_terminal:  # a file shows no bar
                console.print(f"step {step} of {args.steps}: training loss {losses[-1]:.2f} bits per byte")
            if step % -(-args.steps // 8) == 0 or step == args.steps:
                validation_losses[step] = loss = float(evaluate(model, validation))
                console.print(f"step {step}: held-out loss {loss:.2f} bits per byte")
            if checkpoints is not None:
                checkpoints.save(step, model, optimizer, losses, validation_losses)
    if checkpoints is not None:
        checkpoints.manager.wait_until_finished()
    return losses, validation_losses


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


def plot(path: Path, title: str, runs: dict[str, History], entropy: float) -> None:
    """Writes the loss curves of named runs as PNG."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, (losses, validation)) in enumerate(runs.items()):
        steps, color = range(1, len(losses) + 1), f"C{number}"
        axes.plot(steps, losses, color=color, lw=0.8, alpha=0.5, label=f"{name}, each batch")
        held_out = list(validation), list(validation.values())
        axes.plot(*held_out, "o-", color=color, label=f"{name}, held-out text")
    axes.axhline(entropy, color="black", ls="--", lw=1, label="unigram entropy of held-out text")
    axes.set(xlabel="training step", ylabel="loss (bits per byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def compare(
    states: dict[str, tuple[Transformer, nnx.Optimizer]],
    args: argparse.Namespace,
    text: np.ndarray,
    repeats: int = 8,
) -> Table:
    """Step time and peak temporary memory of one training step of two models with their optimizers."""
    ours, peer = states
    batch = batch_of(args)
    windows = text[: batch * (args.context + 1)].reshape(batch, -1)
    steps = {name: train_step.lower(*state, windows).compile() for name, state in states.items()}
    seconds: dict[str, list[float]] = {name: [] for name in states}
    loss = {}
    for _ in range(repeats):
        for name in states:  # in turns: other work on the machine then slows both alike
            start = time.perf_counter()
            loss[name] = float(steps[name](*states[name], windows))
            seconds[name].append(time.perf_counter() - start)

    table = Table(title=f"One training step (median), context {args.context}, batch {batch}")
    table.add_column("model")
    for header in ("time (ms)", "temporary memory (MiB)", f"loss at step {repeats}"):
        table.add_column(header, justify="right")
    ms = {name: 1e3 * statistics.median(s[1:]) for name, s in seconds.items()}
    memory = {name: step.memory_analysis() for name, step in steps.items()}
    mib = {name: m.temp_size_in_bytes / 2**20 if m else math.nan for name, m in memory.items()}
    for name in states:
        table.add_row(name, f"{ms[name]:.0f}", f"{mib[name]:.1f}", f"{loss[name]:.4f}")
    table.add_row(f"{peer} / {ours}", *(f"{x[peer] / x[ours]:.2f}" for x in (ms, mib)))
    return table


def parser_of(description: str) -> argparse.ArgumentParser:
    """Takes the options of a run."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--context", type=int, default=1024, help="length in bytes")
    parser.add_argument("--out", type=Path, default="out", help="directory for the loss curve")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and sample")
    parser.set_defaults(mesh=None, layer=False, checkpoints=None)
    return parser


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The options of a run, within their limits, and the output directory, created."""
    limits = {"steps": (1, 10**6), "context": (1, 4096), "seed": (0, 2**31 - 1), "save_every": (1, 10**6)}
    for name, (low, high) in limits.items():
        if not low <= (value := getattr(args, name, low)) <= high:
            parser.error(f"argument --{name.replace('_', '-')}: {value} is not from {low} to {high}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot create {args.out}: {error.strerror}")
    return args


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, and the output directory, created."""
    parser = parser_of("Trains a small byte-level transformer on the documentation of Python.")
    parser.add_argument(
        "--attention", choices=ATTENTION, default="jax_attn_bwd", help="attention to train with"
    )
    parser.add_argument("--layer", action="store_true", help="run projections and attention under one rule")
    parser.add_argument("--mesh", metavar="data=D,sequence=S", help="devices along batch and sequence")
    kinds = ("ring", "all_gather", "ulysses")
    parser.add_argument("--kind", choices=kinds, default="ring", help="exchange along the sequence")
    parser.add_argument("--distributed", action="store_true", help="one of several processes of a cluster")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="where the state is written")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    args = checked(parser, parser.parse_args(argv))
    if args.layer and args.attention != "jax_attn_bwd":
        parser.error(f"argument --layer: it is a rule of jax_attn_bwd, not of {args.attention}")
    if args.resume and args.checkpoints is None:
        parser.error("argument --resume: needs --checkpoints, where the state was written")
    if args.distributed:
        jax.distributed.initialize()
    if args.mesh is not None:
        args.mesh = mesh_of(parser, args)
    return args


def mesh_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Mesh:
    """The mesh that `--mesh` asks for, checked."""
    found = re.fullmatch(r"data=(\d+),sequence=(\d+)", args.mesh)
    sizes = tuple(map(int, found.groups())) if found else (0, 0)
    if 0 in sizes:
        parser.error(f"argument --mesh: {args.mesh!r} is not of the form data=2,sequence=4")
    if args.layer:
        parser.error("argument --mesh: the attention of --layer is not sharded; leave one of them out")
    if (asked := math.prod(sizes)) != (here := jax.device_count()):
        remedy = "JAX_NUM_CPU_DEVICES makes virtual ones"
        parser.error(f"argument --mesh: {args.mesh} has {asked} devices, and here are {here}; {remedy}")
    for name, size, count in (("batch", batch_of(args), sizes[0]), ("context", args.context, sizes[1])):
        if size % count:
            parser.error(f"argument --mesh: the {name} of {size} cannot be cut into {count} equal parts")
    return jax.make_mesh(sizes, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, samples, plots, compares."""
    args = parse_arguments(argv)
    console = Console(highlight=False, quiet=jax.process_index() > 0)
    text, held_out = load_text()
    entropy = unigram_entropy(held_out)
    model, optimizer = create(args.attention, args)
    losses, validation = train(model, optimizer, args, text, held_out, console)
    loss = f"held-out text: loss {validation[args.steps]:.2f}, unigram entropy {entropy:.2f}"
    console.print(f"{loss} bits per byte")

    if args.mesh is not None:  # one sequence is generated by one device
        weights, own = nnx.state(model), argparse.Namespace(**vars(args) | {"mesh": None})
        model, _ = create(args.attention, own)
        nnx.update(model, jax.tree.map(np.asarray, weights))
    prompt = held_out[: min(args.context, 256)]
    keys = jax.random.split(jax.random.key(args.seed), 400)
    sample = generate(model, jnp.asarray(prompt), keys)
    before, after = printable(prompt[-80:]), printable(np.asarray(sample))
    console.print(Panel(Text(before), title="Held-out text"))
    console.print(Panel(Text(after), title="continued by the model"))

    layer = ", whole layer" if args.layer else ""
    title = f"Byte-level transformer, context {args.context}, {args.attention}{layer}"
    if jax.process_index() == 0:
        plot(args.out / "loss.png", title, {args.attention: (losses, validation)}, entropy)
    console.print(f"loss curve: {args.out / 'loss.png'}")
    console.print(compare({name: create(name, args) for name in ATTENTION}, args, text))


if __name__ == "__main__":
    main()
