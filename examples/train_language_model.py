"""Trains a small causal byte-level transformer on the language reference that comes with Python.

    python examples/train_language_model.py
    python examples/train_language_model.py --steps 400 --context 2048 --attention jax.nn --out run

Ends with a sample of generated text, a loss curve (`loss.png` in `--out`), and the step time and peak
temporary memory of the same model with each attention. Needs `pip install jax_attn_bwd[examples]`.
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
from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from jax_attn_bwd import dot_product_attention

# Both take query, key, value [B, T, N, H] and `is_causal`: changing one for the other is all it takes.
ATTENTION = {"jax_attn_bwd": dot_product_attention, "jax.nn": jax.nn.dot_product_attention}

VOCABULARY = 256  # bytes
WIDTH, HEADS, LAYERS = 128, 4, 4
BYTES_PER_STEP = 2048  # the batch shrinks as the context grows
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of `[B, T, N, H]`."""
    T, H = x.shape[1], x.shape[3]
    angle = jnp.outer(jnp.arange(T), 10_000.0 ** -jnp.linspace(0, 1, H // 2))[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: Callable[..., jax.Array], *, rngs: nnx.Rngs):
        self.attention = attention
        heads = (HEADS, WIDTH // HEADS)
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = nnx.LinearGeneral(WIDTH, heads, use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, heads, use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, heads, use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, WIDTH]` to the same."""
        h = self.attention_norm(x)
        query, key, value = rotate(self.query(h)), rotate(self.key(h)), self.value(h)
        x = x + self.out(self.attention(query, key, value, is_causal=True))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Bytes `[B, T]` to the logits of the byte that follows each, `[B, T, VOCABULARY]`."""

    def __init__(self, attention: Callable[..., jax.Array], *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the next byte."""
        x = self.embed(x)
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


evaluate = nnx.jit(bits_per_byte)


def create(attention: str, steps: int, seed: int) -> tuple[Transformer, nnx.Optimizer]:
    """A fresh model and its optimizer; the same weights for every attention."""
    model = Transformer(ATTENTION[attention], rngs=nnx.Rngs(seed))
    warmup = min(WARMUP_STEPS, steps)
    rate = optax.warmup_cosine_decay_schedule(
        LEARNING_RATE / warmup, LEARNING_RATE, warmup, decay_steps=steps + 1
    )
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    return model, nnx.Optimizer(model, chain, wrt=nnx.Param)


def unigram_entropy(text: np.ndarray) -> float:
    """Bits per byte of the best code that knows how often each byte occurs and nothing more."""
    counts = np.bincount(text)
    p = counts[counts > 0] / len(text)
    return float(-(p * np.log2(p)).sum())


@partial(nnx.jit, static_argnames="length")
def generate(model: Transformer, prompt: jax.Array, key: jax.Array, length: int) -> jax.Array:
    """Samples `length` bytes after `prompt [T]`; each is drawn given the T bytes before it."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / 0.7)  # a temperature < 1: fewer odd bytes
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(step, prompt, jax.random.split(key, length))[1]


def printable(text: np.ndarray) -> str:
    """`text` with every byte that a terminal might not show, or might obey, as '?'."""
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else "?" for b in text)
