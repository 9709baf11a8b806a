"""Trains two small language models: one with softmax attention alone, one with a quarter of it.

    python examples/train_hybrid_model.py --steps 300 --context 1024 --out out

Both have four blocks, and the data, the optimizer and the batches of `train_language_model.py`. The hybrid is
built as Qwen3-Next and Kimi Linear are: three of its blocks mix tokens by the gated delta rule, whose memory
does not grow with the context, and the last one by softmax attention.

Ends with the losses side by side, the loss curves (`hybrid.png` in `--out`), and the step time and peak
temporary memory of both. Needs flax, optax, matplotlib, rich.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from train_language_model import (
    HEADS,
    WIDTH,
    Attention,
    Mixer,
    Transformer,
    checked,
    compare,
    load_text,
    parser_of,
    plot,
    train,
    unigram_entropy,
    with_optimizer,
)

from jax_attn_bwd import dot_product_attention, gated_delta_rule

TAPS = 4  # of the convolution


class GatedDeltaNet(nnx.Module):
    """A short convolution, the gated delta rule, and a gate behind it, of `[B, T, WIDTH]`."""

    def __init__(self, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.query_key_value, self.gate = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.taps = nnx.Param(jax.random.normal(rngs.params(), (TAPS, 3 * WIDTH)) / TAPS)
        self.step, self.decay = (nnx.Linear(WIDTH, HEADS, rngs=rngs) for _ in range(2))
        self.rate = nnx.Param(jnp.log(jnp.linspace(1.0, 16.0, HEADS)))  # of forgetting, a head each
        self.norm, self.out = nnx.RMSNorm(WIDTH // HEADS, rngs=rngs), linear(WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = self.query_key_value(x)
        past = jnp.pad(mixed, ((0, 0), (TAPS - 1, 0), (0, 0)))  # a token sees itself and three before it
        mixed = nnx.silu(sum(past[:, i : i + x.shape[1]] * tap for i, tap in enumerate(self.taps[...])))
        query, key, value = jnp.split(mixed.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        log_decay = -jnp.exp(self.rate[...]) * nnx.softplus(self.decay(x) - 4)
        y = gated_delta_rule(query, key, value, log_decay, nnx.sigmoid(self.step(x)), l2_norm_epsilon=1e-6)
        return self.out(self.norm(y).reshape(x.shape) * nnx.silu(self.gate(x)))


SOFTMAX: Mixer = partial(Attention, dot_product_attention, False)
MODELS: dict[str, list[Mixer]] = {
    "hybrid": [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, SOFTMAX],
    "softmax": [SOFTMAX] * 4,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains both, plots, compares."""
    parser = parser_of(
        "Trains a language model of three linear layers to one of softmax, and one of softmax alone."
    )
    parser.set_defaults(steps=300)
    args = checked(parser, parser.parse_args(argv))
    console = Console(highlight=False)
    text, held_out = load_text()
    entropy = unigram_entropy(held_out)

    runs = {}
    for name, mixers in MODELS.items():
        model, optimizer = with_optimizer(Transformer(mixers, args), args)
        count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        console.print(f"{name}: {count:,} parameters")
        runs[name] = train(model, optimizer, args, text, held_out, console)
    losses = ", ".join(f"{name} {validation[args.steps]:.2f}" for name, (_, validation) in runs.items())
    console.print(f"held-out text: {losses}, unigram entropy {entropy:.2f} bits per byte")

    title = f"Byte-level models of four blocks, context {args.context}"
    plot(args.out / "hybrid.png", title, runs, entropy)
    console.print(f"loss curves: {args.out / 'hybrid.png'}")
    fresh = {name: with_optimizer(Transformer(mixers, args), args) for name, mixers in MODELS.items()}
    console.print(compare(fresh, args, text))


if __name__ == "__main__":
    main()
