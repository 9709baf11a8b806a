"""How long a jitted program of ours takes to trace, lower and compile, beside the plain formula.

Each is compiled in a process of its own, in turns, with no compilation cache: what an earlier program left,
as traces of functions that both call, would count for the one that comes second.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench import ROOT
from bench.measure import Contender, Part, Workload, step
from jax_attn_bwd import dot_product_attention

ATTENTIONS = {"jax_attn_bwd": dot_product_attention, "jax.nn": jax.nn.dot_product_attention}
WIDTH, HEADS = 512, 8
Function = Callable[..., Any]


def parts(quick: bool, only: str = "") -> list[Part]:
    """Lists those whose names contain `only`; `quick`: the smallest."""
    names = [name for name in PROGRAMS if only in name and (name in QUICK or not quick)]
    return [(name, partial(_of_program, name)) for name in names]


def _of_program(name: str) -> Iterator[Workload]:
    make = lambda label: Contender(label, run=partial(_in_a_process, name, label), tells_seconds=True)
    yield Workload(name, [make(label) for label in ATTENTIONS])


def _in_a_process(name: str, label: str) -> float:
    """Returns the seconds that a new process takes for the program, of which starting it is no part."""
    command = [sys.executable, "-m", "tests.bench.compiling", name, label]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def _call(B: int, T: int, attention: Function, **options: Any) -> tuple[Function, tuple]:
    """A call, forward and backward, and its arguments."""
    x = jax.ShapeDtypeStruct((B, T, HEADS, WIDTH // HEADS), jnp.float32)

    return step(partial(attention, **options)), (x, x, x, x)


def _model(layers: int, B: int, T: int, attention: Function) -> tuple[Function, tuple]:
    """A training step of a transformer whose layers are written out one after the other."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    layer = {
        "qkv": shape(WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": shape(HEADS, WIDTH // HEADS, WIDTH),
        "up": shape(WIDTH, 4 * WIDTH),
        "down": shape(4 * WIDTH, WIDTH),
    }

    def normal(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def apply(layer, x):
        q, k, v = jnp.moveaxis(jnp.einsum("bte,ecnh->btcnh", normal(x), layer["qkv"]), 2, 0)
        x = x + jnp.einsum("btnh,nhe->bte", attention(q, k, v, is_causal=True), layer["out"])
        return x + jax.nn.gelu(normal(x) @ layer["up"]) @ layer["down"]

    def loss(model, x, target):
        for layer in model:
            x = apply(layer, x)
        return ((x - target) ** 2).mean()

    def train(model, x, target):
        value, gradients = jax.value_and_grad(loss)(model, x, target)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)

    return train, ([layer] * layers, shape(B, T, WIDTH), shape(B, T, WIDTH))


PROGRAMS: dict[str, Callable[..., tuple[Function, tuple]]] = {
    "call, B2 T2048 N8 H64, causal": partial(_call, 2, 2048, is_causal=True),
    "call, B2 T2048 N8 H64, window 256": partial(_call, 2, 2048, local_window_size=256),
    "call, B4 T128 N8 H64, causal": partial(_call, 4, 128, is_causal=True),
    "model of 12 layers, B2 T1024": partial(_model, 12, 2, 1024),
    "model of 12 layers, B2 T128": partial(_model, 12, 2, 128),
}
QUICK = ("call, B4 T128 N8 H64, causal",)


def main(name: str, label: str) -> None:
    """Prints the seconds that the program takes with one attention."""
    program, args = PROGRAMS[name](attention=ATTENTIONS[label])
    start = time.perf_counter()
    jax.jit(program).lower(*args).compile()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
