"""A training step on a million tokens, compiled for pods that are not here: `results/scale.md`.

The model is that of `examples/train_language_model.py`, pre-norm blocks with rotary positions over bytes, at
the widths of a model of 8B parameters: key heads are grouped, activations are bfloat16, all layers are one
scanned program, recomputed in the backward from their inputs and from what attention saved. One sequence lies
along all devices of a pod. Weights and the optimizer's moments are float32, split over the same devices; each
layer's kernels are gathered when it runs and their gradients scattered. So with T tokens and n devices, of
the t = T / n tokens of a device (N query heads, K key heads, head size H, in bytes per device and layer):

    kernels      3 * 2 W (n - 1) / n          W of them: gathered forward and backward, gradients scattered
    ring         (2 n - 1) 2 v + n (4 v + 4 t)          v = 2 t K H numbers of keys and values; their float32
    all_gather   2 (n - 1) 2 v + (n - 1) (4 v + 4 t)    gradients; positions, forward once for all layers
    ulysses      3 * 2 (2 t N H + v) (n - 1) / n        forward, again, backward: query, key, value and out

A device holds 12 bytes for each of its n-th of the weights, and for each layer its input and attention's
output, 2 t (E + N H) bytes.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench import report
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compile_only import devices, pages, schedule
from jax_attn_bwd import parallel
from jax_attn_bwd._core import console

AXIS = "sequence"
TOKENS_AT_ONCE = 16_384  # tokens of a device that go through the wide layer of a block together
ATTENTION: dict[str, Callable[..., Any]] = {
    "ring": parallel.ring_attention,
    "all_gather": parallel.all_gather_attention,
    "ulysses": parallel.ulysses_attention,
}
GIB, GB = 2**30, 10**9
Weights = dict[str, Any]


class Model(NamedTuple):
    """Sizes; by default those of Llama 3 8B, whose gated `hidden` of 14,336 has as many weights as this."""

    tokens: int = 2**20
    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    head: int = 128
    hidden: int = 21_504
    vocabulary: int = 256
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of the kernels of a layer."""
        E, queries, keys = self.width, self.heads * self.head, self.key_heads * self.head
        attention = {"query": (E, queries), "key": (E, keys), "value": (E, keys), "out": (queries, E)}
        return attention | {"up": (E, self.hidden), "down": (self.hidden, E)}

    def weights(self) -> Weights:
        """The types of all weights; axis -2 of each is split over the devices."""
        f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        layers = {name: f32((self.layers, *shape)) for name, shape in self.shapes().items()}
        ends = {"embed": (self.vocabulary, self.width), "logits": (self.width, self.vocabulary)}
        return layers | {name: f32(shape) for name, shape in ends.items()}


LLAMA = Model()


class Pod(NamedTuple):
    """What is compiled for: a chip, how many of them, and what a device holds."""

    target: str
    slice: dict[str, Any]
    memory: float  # bytes
    implementation: str
    options: dict[str, Any] | None = None  # for the compiler


_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
PODS = {
    "8 H200": Pod("H200", {"gpus": 8}, 141 * GB, "mosaic_gpu"),
    "8 H200, 5 at once": Pod("H200", {"gpus": 8}, 141 * GB, "mosaic_gpu", {_AT_ONCE: 5}),
    "8 TPU7x, 16 cores": Pod("tpu7x", {"topology": "2x2x2"}, 94.75 * GIB, "mosaic_tpu"),
    "256 v6e": Pod("v6e", {"topology": "16x16"}, 31.25 * GIB, "mosaic_tpu"),
    "256 v5e": Pod("v5e", {"topology": "16x16"}, 15.75 * GIB, "mosaic_tpu"),
}


@dataclass(frozen=True)
class Row:
    """A pod with one kind of exchange; bytes are of one device, `kept` and `predicted` by the formulas."""

    pod: str
    kind: str
    memory: int = 0
    kept: float = 0
    predicted: float = 0
    transfers: Sequence[schedule.Transfer] = ()
    error: str | None = None

    def sent(self, kind: str | None = None, hidden: bool | None = None) -> float:
        """Bytes, of all transfers or of some."""
        return sum(
            x.sent * x.times for x in self.transfers if kind in (None, x.kind) and hidden in (None, x.hidden)
        )


_ABOUT = """A training step of the model of `examples/train_language_model.py` on one sequence of 1,048,576
tokens, compiled in full with no such pod at hand: written again inside one `jax.shard_map`, with grouped key
heads, bfloat16 activations and norms without a scale. Sizes are those of Llama 3 8B: 32 layers of width
4,096, 32 heads of 128 over 8 key heads; over bytes, so without its vocabulary. Layers are scanned, and
recomputed in the backward from their inputs and what attention saved; weights and Adam's moments, float32,
are split over all devices. Attention runs this package's kernels; tokens are laid out by `zigzag`, but in
order with Ulysses.

All figures are of one device and in GiB. `memory`: arguments, results and temporaries as the compiler counts
them, of what the device has. `kept`: 12 bytes for each of its weights, and the saved arrays. `sent`: what
the collectives of a step send, read from the compiled program, loops counted; `predicted`: by the formulas
at the head of `tests/compile_only/scale.py`. `hidden`: the share of `sent` that is under way while a kernel
or a product of matrices runs, by the schedule: nothing was timed. `5 at once`: compiled with
`xla_gpu_experimental_parallel_collective_overlap_limit=5`. Rewritten by
`PYTHONPATH=tests python -m compile_only --table scale`."""
_DIFFERENCES = """Where found is not predicted: compilers round gradients to bfloat16 before the last hop of a
ring, which sends less; those for TPUs make all-reduces of the reduce-scatters, which sends twice as much, and
sum the all-gather's gradients of keys and values in bfloat16. A sum above the memory of a device stands as it
is: the compilers refuse by a count of their own."""
_WHICH = """## Which to take

* **Ulysses** where the devices along the sequence divide the key heads, here up to 8: it sends least, less
  the more devices there are, and needs no layout.
* **A ring** everywhere else. It sends about as much as an all-gather, holds no more than a device's own
  tokens, and travels while it computes: on v6e by itself, on GPUs with several transfers at once.
* **An all-gather** where the keys and values of the whole sequence, and their float32 gradients, are small
  beside the memory (here 12 GiB for a layer, on every device): two collectives in the place of n. So, too,
  for v5e beyond the 8 chips of a host, where the compiler waits for every hop of a ring."""


def training_step(model: Model, kind: str, implementation: str | None = None) -> Callable[..., Any]:
    """`((weights, moments, count), tokens, targets, positions) -> (the same, loss)`, inside `jax.shard_map`.

    All are a device's parts, tokens, targets and positions `[t]`. But with "ulysses", which needs no other
    order than theirs, tokens are laid out by `parallel.zigzag`.
    """

    def attend(q, k, v, positions):
        told = dict.fromkeys(("query_positions", "key_value_positions"), positions)
        attention = partial(ATTENTION[kind], axis_name=AXIS, is_causal=True, implementation=implementation)
        return attention(q, k, v, **({} if kind == "ulysses" else told))

    def layer(x, kernels, positions):
        gathered = {name: _gathered(x.astype(model.dtype)) for name, x in kernels.items()}
        h = _normalised(x)
        q, k, v = (_heads(h @ gathered[name], model.head) for name in ("query", "key", "value"))
        out = attend(_rotated(q, positions), _rotated(k, positions), v, positions)
        x = x + out.reshape(*x.shape[:-1], -1) @ gathered["out"]
        mlp = lambda x: x + jax.nn.gelu(_normalised(x) @ gathered["up"]) @ gathered["down"]
        few = x.reshape(-1, min(len(x), TOKENS_AT_ONCE), model.width)
        return lax.map(jax.checkpoint(mlp), few).reshape(x.shape)

    saved = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def loss(weights, tokens, targets, positions):
        ends = {name: _gathered(weights[name].astype(model.dtype)) for name in ("embed", "logits")}
        layers = {name: weights[name] for name in model.shapes()}
        again = jax.checkpoint(partial(layer, positions=positions), policy=saved)
        x, _ = lax.scan(lambda x, kernels: (again(x, kernels), None), ends["embed"][tokens], layers)
        logits = (_normalised(x) @ ends["logits"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).sum() / model.tokens

    def step(state, tokens, targets, positions):
        weights, moments, count = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens, targets, positions)
        count = count + 1
        updated = {name: _adam(x, *moments[name], gradients[name], count) for name, x in weights.items()}
        weights = {name: x for name, (x, *_) in updated.items()}
        moments = {name: (m, v) for name, (_, m, v) in updated.items()}
        return (weights, moments, count), lax.psum(value, AXIS)

    return step


def _gathered(kernel: jax.Array) -> jax.Array:
    return lax.all_gather(kernel, AXIS, axis=kernel.ndim - 2, tiled=True)


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _heads(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, size)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """The rotation of the example, by positions that are told."""
    rates = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, dtype=jnp.float32)
    angle = jnp.outer(positions.astype(jnp.float32), rates)[:, None]
    cos, sin = (f(angle).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _adam(x, m, v, gradient, count, rate=3e-4, decay=0.1):
    m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
    step = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
    return x - rate * (step + decay * x), m, v


def sharded(model: Model, kind: str, mesh: Mesh, implementation: str | None = None) -> tuple[Any, tuple]:
    """(the step over `mesh`, jitted; the types of its arguments)."""
    specs = {name: P(*(None,) * (x.ndim - 2), AXIS) for name, x in model.weights().items()}
    state_specs = (specs, {name: (spec, spec) for name, spec in specs.items()}, P())
    in_specs = (state_specs, *(P(AXIS),) * 3)
    step = training_step(model, kind, implementation)
    step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(state_specs, P()))
    weights, tokens = model.weights(), jax.ShapeDtypeStruct((model.tokens,), jnp.int32)
    moments = {name: (x, x) for name, x in weights.items()}
    types = ((weights, moments, jax.ShapeDtypeStruct((), jnp.float32)), *(tokens,) * 3)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.jit(step, donate_argnums=0), jax.tree.map(place, types, in_specs)


def predicted(model: Model, kind: str, n: int) -> tuple[float, float]:
    """(bytes that a device sends, bytes that it holds from one step or layer to the next), as said above."""
    t, share, narrow = model.tokens // n, (n - 1) / n, jnp.dtype(model.dtype).itemsize
    kernels = sum(rows * columns for rows, columns in model.shapes().values())
    ends = 2 * model.vocabulary * model.width
    v, q = 2 * t * model.key_heads * model.head, 2 * t * model.heads * model.head
    exchange = {
        "ring": (2 * n - 1) * narrow * v + n * 4 * (v + t),
        "all_gather": (n - 1) * (2 * narrow * v + 4 * (v + t)),
        "ulysses": 3 * narrow * (q + v) * share,
    }[kind]
    once = 2 * narrow * ends * share + (0 if kind == "ulysses" else (n - 1) * 4 * t)
    sent = model.layers * (3 * narrow * kernels * share + exchange) + once
    weights = model.layers * kernels + ends
    saved = narrow * t * (model.width + model.heads * model.head)
    return sent, 12 * weights / n + model.layers * saved


def compile_one(pod: str, kind: str, model: Model = LLAMA) -> Row:
    """A row, or a row with the reason why not."""
    about = PODS[pod]
    found = devices.devices(about.target, **about.slice)
    mesh = Mesh(np.array(found), (AXIS,))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            step, types = sharded(model, kind, mesh, about.implementation)
            platform = "tpu" if about.target in devices.TPU else "cuda"
            lowered = step.trace(*types).lower(lowering_platforms=(platform,))
            compiled = lowered.compile(about.options)
    except Exception as error:  # whatever the compiler raises is this row's answer
        return Row(pod, kind, error=report.sentence(error).splitlines()[0])
    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    size += memory.output_size_in_bytes - memory.alias_size_in_bytes
    sent, kept = predicted(model, kind, len(found))
    return Row(pod, kind, size, kept, sent, schedule.Program(compiled.as_text()).transfers)


def compiled_apart(pod: str, kind: str) -> Row:
    """`compile_one` in a process of its own: a compiler that fails a check of its own ends the process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(compile_one, pod, kind).result()
        except BrokenProcessPool:
            return Row(pod, kind, error="the compiler ended the process")


def table(path: Path, pods: Sequence[str] = tuple(PODS)) -> int:
    """Compiles all and writes the page; 1 if a pod ran none of its rows."""
    jobs = [(pod, kind) for pod in pods for kind in ATTENTION]
    rows = [compiled_apart(*job) for job in console.progress(jobs, len(jobs), "compile")]
    path.write_text(markdown(rows))
    print(f"wrote {path}: {len(rows)} programs")
    return int(not all(any(row.pod == pod and row.error is None for row in rows) for pod in pods))


def markdown(rows: Sequence[Row]) -> str:
    """The page."""
    cells = [
        (
            row.pod,
            row.kind,
            f"{row.memory / GIB:.1f} of {PODS[row.pod].memory / GIB:.1f}",
            f"{row.kept / GIB:.1f}",
            f"{row.sent() / GIB:.1f}",
            f"{row.predicted / GIB:.1f}",
            f"{100 * row.sent(hidden=True) / row.sent():.0f}",
            ", ".join(f"{x} {row.sent(x) / GIB:.1f}" for x in dict.fromkeys(x.kind for x in row.transfers)),
        )
        for row in rows
        if row.error is None
    ]
    columns = ("pod", "attention", "memory", "kept", "sent", "predicted", "hidden %", "sent by")
    failed = [f"* {row.pod}, {row.kind}: {row.error}" for row in rows if row.error]
    pieces = ["# Pods on paper", _ABOUT, pages.table(columns, cells)]
    pieces += [_DIFFERENCES, _WHICH]
    return pages.page(*pieces, *(["## Did not compile", "\n".join(failed)] if failed else []))
