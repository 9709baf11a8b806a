"""Our operators inside jitted programs, each beside the plain formula that JAX differentiates, on one device.

Alone an operator may win and still cost the program it stands in: fused with its neighbours, under a remat
policy, vmapped, small, in minibatches. Each case is a program; the notes hold the lines of its StableHLO and
the seconds of tracing, lowering and compiling it here, with no compilation cache but after other programs of
ours, whose inner traces are kept: `compiling` measures them apart.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measure import Part, Workload, compiled_contender
from bench.plain import Edges, gather_form, segment_ops
from jax_attn_bwd import (
    BipartiteCSC,
    MultiHeadAttentionParams,
    dot_product_attention,
    edge_softmax,
    graph_attention,
    multi_head_attention,
    multi_scale_deformable_attention,
    scaled_masked_softmax,
)

Program = tuple[Callable[..., Any], Callable[..., Any], tuple]  # (with our operator, plain, arguments)
_ATTENTIONS = (dot_product_attention, jax.nn.dot_product_attention)  # ours, plain
LEVELS = ((64, 48), (32, 24), (16, 12), (8, 6))


def parts(quick: bool, only: str = "") -> list[Part]:
    """Lists those whose names contain `only`; `quick`: the small ones."""
    names = [name for name in PROGRAMS if only in name and (name in QUICK or not quick)]
    return [(name, partial(_of_program, name)) for name in names]


def _of_program(name: str) -> Iterator[Workload]:
    ours, plain, args = PROGRAMS[name]()
    contenders = [
        compiled_contender(label, program, *args, costs=True)
        for label, program in (("jax_attn_bwd", ours), ("plain", plain))
    ]
    yield Workload(name, contenders)


def _draw(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def _both(ours: Callable, plain: Callable, args: tuple, make: Callable | None = None) -> Program:
    """Makes programs of the two functions by `make`; by default the gradients of a random form."""
    make = make or partial(_gradients, args=args)
    return make(ours), make(plain), args


def _between_sines(function: Callable) -> Callable:
    """Puts a sine in front of each argument and behind the result: XLA may fuse them with it."""
    return lambda *args: jnp.sin(function(*map(jnp.sin, args)))


def _gradients(function: Callable, args: tuple) -> Callable:
    out = jax.eval_shape(function, *args)
    (weights,) = _draw(out.shape)

    def loss(*args):  # terms of one sign: a sum that cancels agrees with none
        return (function(*args) ** 2 * abs(weights)).sum()

    return jax.value_and_grad(loss, tuple(range(len(args))))


def _softmax(*shape: int, masked: bool = False, wrap: Callable = lambda function: function) -> Program:
    (x,) = _draw(shape)
    mask = jnp.asarray(np.random.default_rng(1).random((1, *shape[1:])) < 0.8) if masked else None
    where = None if mask is None else jnp.broadcast_to(mask, shape)
    ours, plain = (lambda x: scaled_masked_softmax(x, mask), lambda x: jax.nn.softmax(x, where=where))
    return _both(wrap(ours), wrap(plain), (x,))


def _between_products(*shape: int) -> Program:
    def attention(softmax):
        return lambda q, k, v: softmax(q @ jnp.swapaxes(k, -1, -2)) @ v

    return _both(attention(scaled_masked_softmax), attention(jax.nn.softmax), _draw(*(shape,) * 3))


def _heads(B: int, T: int, S: int, N: int, H: int) -> tuple[jax.Array, ...]:
    return _draw((B, T, N, H), (B, S, N, H), (B, S, N, H))


def _dense(*sizes: int, wrap: Callable = lambda function: function, **options: Any) -> Program:
    ours, plain = (wrap(partial(attention, **options)) for attention in _ATTENTIONS)
    return _both(ours, plain, _heads(*sizes))


def _biased(
    B: int, T: int, N: int, H: int, masked: bool = False, wrap: Callable = lambda function: function
) -> Program:
    """Adds a bias that all batches share; as in triangle attention each may have a mask of columns, too."""
    mask = jnp.asarray(np.random.default_rng(1).random((B, 1, 1, T)) < 0.9) if masked else None
    attend = lambda attention: wrap(lambda q, k, v, bias: attention(q, k, v, bias=bias, mask=mask))
    ours, plain = map(attend, _ATTENTIONS)
    return _both(ours, plain, (*_heads(B, T, T, N, H), *_draw((1, N, T, T))))


def _with_lengths(*sizes: int) -> Program:
    lengths = jnp.asarray(np.random.default_rng(1).integers(1, sizes[2] + 1, sizes[0]), jnp.int32)
    return _dense(*sizes, key_value_seq_lengths=lengths)


def _hessian(*sizes: int) -> Program:
    def hessian(attention):
        return jax.hessian(lambda *args: (attention(*args) ** 2).sum(), (0, 1, 2))

    ours, plain = _ATTENTIONS
    return _both(ours, plain, _heads(*sizes), hessian)


def _layers(count: int, *sizes: int) -> Program:
    """Unrolls `count` attentions, one after the other."""

    def stack(attention):
        def run(q, k, v):
            for _ in range(count):
                q = q + attention(q, k, v, is_causal=True)
            return q

        return run

    ours, plain = map(stack, _ATTENTIONS)
    return _both(ours, plain, _heads(*sizes))


def _layer(B: int, T: int, E: int, N: int, wrap: Callable = lambda function: function) -> Program:
    """Runs self-attention: projections, attention, projection."""
    kernels = _draw((E, N, E // N), (E, N, E // N), (E, N, E // N), (N, E // N, E))
    kernels = tuple(0.05 * kernel for kernel in kernels)

    def ours(x, *kernels):
        q, k, v, o = kernels
        params = MultiHeadAttentionParams(query_kernel=q, key_kernel=k, value_kernel=v, out_kernel=o)
        return multi_head_attention(params, x)

    def plain(x, *kernels):
        *heads, o = kernels
        q, k, v = (jnp.einsum("bte,enh->btnh", x, kernel) for kernel in heads)
        return jnp.einsum("btnh,nhe->bte", jax.nn.dot_product_attention(q, k, v), o)

    return _both(wrap(ours), wrap(plain), (*_draw((B, T, E)), *kernels))


def _graph(
    nodes: int, edges: int, heads: int, width: int, forward: bool = False, capacity: int = 0,
    wrap: Callable = lambda function: function,
) -> Program:  # fmt: skip
    """Draws a random graph without isolated nodes; `forward` alone, or a step.

    With `capacity`, padded to it; the plain formula as is usual, by edges between the nodes of one more row.
    """
    rng = np.random.default_rng(0)
    rest = max(edges - nodes, 0)
    dst = np.sort(np.concatenate([np.arange(nodes), rng.integers(0, nodes, rest)])[:edges])
    src = rng.integers(0, nodes, len(dst))
    count = nodes + bool(capacity)
    graph = BipartiteCSC.from_coo(src, dst, count, count, **({"capacity": capacity} if capacity else {}))
    src, dst = (np.pad(x, (0, graph.capacity - len(x)), constant_values=nodes) for x in (src, dst))
    attend = segment_ops(Edges(src, dst, count, heads, width), "graph_attention")
    args = _draw((count, heads * width), (count, heads * width), (2 * heads * width,))
    ours = lambda *args: graph_attention(graph, *args, num_heads=heads)[:nodes]
    plain = lambda *args: attend(*args)[:nodes]
    return _both(wrap(ours), wrap(plain), args, (lambda function: function) if forward else None)


def _edge_softmax(nodes: int, edges: int, heads: int) -> Program:
    """Draws scores of the edges of a random graph, sorted by destination, between sines."""
    rng = np.random.default_rng(0)
    dst = np.sort(np.concatenate([np.arange(nodes), rng.integers(0, nodes, edges - nodes)]))
    graph = BipartiteCSC.from_coo(rng.integers(0, nodes, edges), dst, nodes, nodes)
    plain = segment_ops(Edges(np.asarray(graph.indices), dst, nodes, heads, 1), "edge_softmax")
    ours = partial(edge_softmax, graph)
    return _both(_between_sines(ours), _between_sines(plain), _draw((edges, heads)))


def _deformable(queries: int, wrap: Callable = lambda function: function) -> Program:
    rng = np.random.default_rng(0)
    heads, width, points = 8, 32, 4
    (value,) = _draw((1, sum(h * w for h, w in LEVELS), heads, width))
    shape = (1, queries, heads, len(LEVELS), points)
    locations = jnp.asarray(rng.random((*shape, 2)), jnp.float32)
    weights = jax.nn.softmax(_draw((*shape[:3], len(LEVELS) * points))[0]).reshape(shape)
    ours = lambda value, *rest: multi_scale_deformable_attention(value, LEVELS, *rest)
    return _both(wrap(ours), wrap(partial(gather_form, LEVELS)), (value, locations, weights))


_remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

PROGRAMS: dict[str, Callable[[], Program]] = {
    "softmax [4,8,512,512]": partial(_softmax, 4, 8, 512, 512),
    "softmax [8,8,256,256]": partial(_softmax, 8, 8, 256, 256),
    "softmax [32,128,128]": partial(_softmax, 32, 128, 128),
    "softmax [4,8,512,512], masked": partial(_softmax, 4, 8, 512, 512, masked=True),
    "softmax between products [8,128,64]": partial(_between_products, 8, 128, 64),
    "dense B2 T4096 N2 H64, causal, dots_saveable": partial(
        _dense, 2, 4096, 4096, 2, 64, is_causal=True, wrap=_remat
    ),
    "dense B32 T16 N4 H32, causal": partial(_dense, 32, 16, 16, 4, 32, is_causal=True),
    "dense B16 T64 N8 H64, causal": partial(_dense, 16, 64, 64, 8, 64, is_causal=True),
    "dense B8 T197 N6 H64": partial(_dense, 8, 197, 197, 6, 64),
    "dense B4 T512 N8 H64, causal": partial(_dense, 4, 512, 512, 8, 64, is_causal=True),
    "dense B8 T1 S256 N8 H64": partial(_dense, 8, 1, 256, 8, 64),
    "dense B8 T128 N8 H64, lengths": partial(_with_lengths, 8, 128, 128, 8, 64),
    "dense vmap B16 T256 N4 H64, causal": partial(_dense, 16, 256, 256, 4, 64, is_causal=True, wrap=jax.vmap),
    "dense B2 T2048 N8 H64, causal": partial(_dense, 2, 2048, 2048, 8, 64, is_causal=True),
    "dense B2 T2048 N8 H64, window 256": partial(_dense, 2, 2048, 2048, 8, 64, local_window_size=256),
    "triangle B8 T256 N4 H32, bias and mask": partial(_biased, 8, 256, 4, 32, masked=True),
    "triangle B4 T384 N4 H32, bias and mask": partial(_biased, 4, 384, 4, 32, masked=True),
    "dense 12 layers B2 T256 N4 H32": partial(_layers, 12, 2, 256, 256, 4, 32),
    "dense hessian B1 T3 N2 H4": partial(_hessian, 1, 3, 3, 2, 4),
    "multi-head B4 T512 E512 N8": partial(_layer, 4, 512, 512, 8),
    **{
        f"gat {name}, {what}": partial(_graph, *sizes, forward=what == "forward", capacity=capacity)
        for name, sizes, capacity in (
            ("2.7k/13k 8x8", (2700, 13000, 8, 8), 0),
            ("10k/25k 64x1", (10_000, 25_000, 64, 1), 0),
            ("10k/100k 8x8", (10_000, 100_000, 8, 8), 0),
            ("100k/500k 8x8", (100_000, 500_000, 8, 8), 0),
            ("384/1.6k 8x8, capacity 2k", (384, 1600, 8, 8), 2048),
            ("2.7k/13k 8x8, capacity 16k", (2700, 13000, 8, 8), 16384),
        )
        for what in ("forward", "step")
    },
    "deformable decoder, 300 queries": partial(_deformable, 300),
    # no row of the page Speed counts these: their names begin otherwise than those of the operators alone
    "between sines: softmax [512,257]": partial(_softmax, 512, 257, wrap=_between_sines),
    "between sines: dense B8 T128 N8 H64, bias": partial(_biased, 8, 128, 8, 64, wrap=_between_sines),
    "between sines: multi-head B4 T128 E256 N8": partial(_layer, 4, 128, 256, 8, wrap=_between_sines),
    "between sines: edge softmax 10k/100k 8": partial(_edge_softmax, 10_000, 100_000, 8),
    "between sines: gat 2.7k/13k 8x8": partial(_graph, 2700, 13000, 8, 8, wrap=_between_sines),
    "between sines: deformable, 100 queries": partial(_deformable, 100, wrap=_between_sines),
}
QUICK = ("softmax [32,128,128]", "dense B32 T16 N4 H32, causal")
