"""Trains two small language models: one with softmax attention alone, one with a quarter of it.

    python examples/train_hybrid_model.py --steps 300 --context 1024 --out out

Both have four blocks, and the data, the optimizer and the batches of `train_language_model.py`. The hybrid is
built as Qwen3-Next and Kimi Linear are: three of its blocks mix tokens by `GatedDeltaNet`, whose memory
does not grow with the context, and the last one by softmax attention.

Ends with the losses side by side, the loss curves (`hybrid.png` in `--out`), and the step time and peak
temporary memory of both. Needs flax, optax, matplotlib, rich.
"""

from collections.abc import Sequence
from functools import partial

import jax
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

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.layers.flax_nnx import GatedDeltaNet

LINEAR: Mixer = partial(GatedDeltaNet, WIDTH, HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
SOFTMAX: Mixer = partial(Attention, dot_product_attention, False)
MODELS: dict[str, list[Mixer]] = {"hybrid": [LINEAR, LINEAR, LINEAR, SOFTMAX], "softmax": [SOFTMAX] * 4}


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
