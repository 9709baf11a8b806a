"""How the cases of each operator are measured, and beside what: one runner, and a table of operators.

Dense attention: float32 on a CPU, bfloat16 on a GPU. The softmax: with a padding mask on a CPU. The layer:
self-attention with all gradients, float32 on a CPU. Deformable attention: float32, 8 heads of 32; the encoder
asks once for every pixel, around its own place, the decoder 300 times anywhere. Graphs: float32, the graph
built beforehand. Linear attention: float32, a decay of each head, beside its form in chunks by `jax.grad`.
And graphs, if the environment variable JAX_ATTN_BWD_TOLOKERS names the file `tolokers.npz` of
yandex-research/heterophilous-graphs, that graph with each edge in both directions (11,758 nodes, 1,038,000
edges, the highest degree 2,138), 4 heads of 16.
"""

import importlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import discover
from cases.graph import gat, gatv2, transformer

from bench import peers, plain
from bench.measure import TOLERANCES, Contender, Part, Workload, compiled_contender, inputs, step, tag
from jax_attn_bwd import (
    BipartiteCSC,
    MultiHeadAttentionParams,
    dot_product_attention,
    gated_delta_rule,
    gated_linear_attention,
    graph_attention,
    graph_attention_v2,
    graph_transformer_attention,
    multi_head_attention,
    multi_scale_deformable_attention,
    scaled_masked_softmax,
)
from jax_attn_bwd._core.cases import Case
from jax_attn_bwd._core.checks import complete
from jax_attn_bwd.ops.dot_product import blockwise, visibility
from jax_attn_bwd.ops.dot_product.arguments import prepare
from jax_attn_bwd.ops.dot_product.plan import Materialized, Planes, count
from jax_attn_bwd.ops.dot_product.portable import tiles
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionKeywords


def parts(name: str, quick: bool, scaling: bool = False) -> list[Part]:
    """Lists what is measured of an operator, a part for each case; `scaling` is one case at many sizes."""
    found: list[Part] = []
    for operator in discover():
        make = MEASURED.get(operator.name)
        if make is None or name != operator.folder:
            continue
        for case in (*operator.tagged(tag(quick, scaling)), *_tolokers(operator.name, quick or scaling)):
            found.append((case.name, partial(_of_case, make, operator, case)))
    return found


def _of_case(make: Callable[..., Iterator[Workload]], operator: Any, case: Case) -> Iterator[Workload]:
    yield from make(case, *inputs(operator, case))


def _softmax_step(function: Callable, x: jax.Array, mask: Any, dy: jax.Array) -> tuple:
    y, pullback = jax.vjp(lambda x: function(x, mask), x)
    return y, pullback(dy)[0]


def _residual_bytes(function: Callable, x: jax.Array, mask: Any) -> int:
    """Counts what the forward leaves for the backward, beyond the mask."""
    _, pullback = jax.vjp(lambda x: function(x, mask), x)
    leaves = {id(a): a for a in jax.tree.leaves(pullback) if a is not mask}
    return sum(a.nbytes for a in leaves.values())


def _softmax(case: Case, arrays: dict[str, Any], dy: jax.Array) -> Iterator[Workload]:
    x, mask, scale = arrays["x"], arrays.get("mask"), case.options.get("scale", 1.0)
    name = "saved for the backward / y"
    share = lambda function: {name: round(_residual_bytes(function, x, mask) / x.nbytes, 2)}
    call = partial(scaled_masked_softmax, scale=scale)
    peer = lambda x, mask: jax.nn.softmax(x * jnp.asarray(scale, x.dtype), axis=-1, where=mask)
    make = lambda function: partial(_softmax_step, function)
    contenders = [
        *peers.ours(call, make, x, mask, dy, **share(call)),
        compiled_contender("jax.nn", make(peer), x, mask, dy, **share(peer)),
        compiled_contender("copy of two such arrays", lambda x, dy: (x + 1, dy + 1), x, dy, compare=False),
    ]
    rates = {"GB/s": 5 * x.nbytes / 1e9} if jax.default_backend() != "cpu" else {}  # x, y; y, dy, dx
    tolerance = 8 * float(jnp.finfo(x.dtype).eps)
    yield Workload(case.name, contenders, tolerance=tolerance, rates=rates)


def _dense(case: Case, arrays: dict[str, Any], dout: jax.Array) -> Iterator[Workload]:
    args = (dout, arrays["query"], arrays["key"], arrays["value"])
    B, T, N, H = args[1].shape
    name = case.name if _is_scaling(case) else f"{case.name}, B{B} N{N} H{H}"
    if jax.default_backend() != "cpu":
        yield _on_gpu(case, "forward", args)
        yield _on_gpu(case, "forward + backward", args)
    elif "memory only" in case.name:
        yield Workload(name, _our_dense(case, args), timed=False)
    elif "local_window_size" in case.options and not _is_scaling(case):
        yield _window(name, case, args)
    else:
        found, refused = peers.gather(
            name, _dense_peers(case, step, args), 4.0 * B * N * T * T, linear=("torch",)
        )
        yield Workload(name, [*_our_dense(case, args), *found], refused=refused)


def _is_scaling(case: Case) -> bool:
    return bool(case.tags & {"scaling", "quick_scaling"})


def visited(case: Case, query: jax.Array) -> str:
    """Tells how many tiles the portable path visits, of all, where keys and values are as the query."""
    given = complete("bench", dot_product_attention, DotProductAttentionKeywords, case.options)
    del given["implementation"]
    options, operands = prepare("bench", query, query, query, None, None, **given)
    schedule, T = blockwise.planned("xla", options, operands).schedule, query.shape[1]
    if isinstance(schedule, Planes):
        return schedule.way
    if isinstance(schedule, Materialized):
        return f"{schedule.batch_slices} batch slices of whole planes"
    laid = visibility.tile_mask(operands.mask, None, operands.sizes)
    full, mixed, _ = tiles.static_pairs(laid, *schedule.blocks)
    total = count(T, schedule.block_q) * count(T, schedule.block_k)
    return f"{len(full) + len(mixed)} of {total} tiles of {schedule.block_q} x {schedule.block_k}"


def _our_dense(case: Case, args: tuple) -> list[Contender]:
    return peers.ours(
        partial(dot_product_attention, **case.options), step, *args, tiles=visited(case, args[1])
    )


def _window(name: str, case: Case, args: tuple) -> Workload:
    """Measures a window beside none, and beside jax.nn for its results."""
    window, causal = case.options["local_window_size"], {"is_causal": True}
    windowed, full = (
        compiled_contender(label, step(partial(dot_product_attention, **options)), *args, compare=compare)
        for label, options, compare in (
            (f"causal, window {window[0]}", case.options, True),
            ("causal", causal, False),
        )
    )
    windowed.notes["tiles"] = visited(case, args[1])
    contenders = [windowed, full]
    if args[1].shape[1] <= 4096:  # it holds several arrays of T x S
        peer = step(partial(jax.nn.dot_product_attention, **case.options))
        contenders.append(compiled_contender(f"jax.nn, window {window[0]}", peer, *args, timed=False))
    return Workload(name, contenders)


def _on_gpu(case: Case, direction: str, args: tuple) -> Workload:
    """Measures ours by kernel and by XLA, beside jax.nn by XLA and cuDNN, tokamax and torch."""
    make = {"forward": _forward, "forward + backward": step}[direction]
    name = f"{case.name}, {direction}"
    found, refused = peers.gather(name, _dense_peers(case, make, args))
    contenders = [*peers.ours(partial(dot_product_attention, **case.options), make, *args), *found]
    rates = {"TFLOP/s": operations(case, args[1]) * (3.5 if make is step else 1) / 1e12}
    return Workload(name, contenders, tolerance=TOLERANCES["bfloat16"], rates=rates, refused=refused)


def operations(case: Case, query: jax.Array) -> float:
    """Counts the operations of a forward as usual: causal is half; a backward is 2.5 forwards."""
    B, T, N, H = query.shape
    pairs = T * T / (2 if case.options.get("is_causal") else 1)
    if (window := case.options.get("local_window_size")) is not None:
        pairs = sum(min(t, window[0]) + 1 for t in range(T))
    return 4.0 * B * N * H * pairs


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda dout, *arrays: function(*arrays)


def _dense_peers(case: Case, make: Callable, args: tuple) -> dict[str, Callable[[], Contender]]:
    """Returns {peer: what makes the contender}; `make` turns its attention into what is measured."""
    options = {name: x for name, x in case.options.items() if name != "deterministic_sums"}

    def jax_peer(name, load, **more):
        return lambda: compiled_contender(name, make(partial(load(), **options, **more)), *args)

    found = {"jax.nn": jax_peer("jax.nn", lambda: jax.nn.dot_product_attention, implementation="xla")}
    if jax.default_backend() == "gpu":
        for name, function in (
            ("jax_attn_bwd[cudnn]", dot_product_attention),
            ("jax.nn[cudnn]", jax.nn.dot_product_attention),
        ):
            found[name] = jax_peer(name, lambda function=function: function, implementation="cudnn")
    if jax.default_backend() != "cpu" and peers.installed("tokamax"):
        load = lambda: importlib.import_module("tokamax").dot_product_attention
        found["tokamax"] = jax_peer("tokamax", load)
    if peers.torch_device() and "local_window_size" not in options:  # it takes a window as a mask alone
        found["torch"] = partial(peers.sdpa, bool(options.get("is_causal")), make is step, args)
    return found


def _layer(case: Case, arrays: dict[str, Any], dout: jax.Array) -> Iterator[Workload]:
    x = arrays.pop("query")
    args = (x, dout, MultiHeadAttentionParams(**arrays))
    beside = (("torch", peers.torch_layer), ("flax", peers.nnx_layer), ("equinox", peers.equinox_layer))
    makers = {
        module: partial(peer, *args)
        for module, peer in beside
        if peers.installed(module) and (module != "torch" or peers.torch_device())
    }
    planes = 4.0 * x.shape[0] * arrays["query_bias"].shape[0] * x.shape[1] ** 2
    found, refused = peers.gather(case.name, makers, planes)
    contenders = [*our_layer(*args), *our_layer(*args, save="qkv"), *found]
    yield Workload(case.name, contenders, tolerance=TOLERANCES[str(x.dtype)], refused=refused)


def our_layer(x, dout, params, save: str = "inputs") -> list[Contender]:
    """Makes our contenders of the layer, which tell what they save."""
    layer = partial(multi_head_attention, save=save)
    saved = _saved_bytes(layer, params, x)
    B, T, E = x.shape
    N = params.query_bias.shape[0]
    planes = 4 * (4 * B * T * E + 2 * B * N * T * T)  # q, k, v, z; probabilities, also after dropout
    beside = f"{saved / 2**20:.1f} MiB (MegEngine {planes / 2**20:.0f})"
    notes: dict[str, Any] = {"saved beside the inputs": beside}
    make = lambda layer: lambda params, x, dout: peers.compared(*peers.layer_step(layer, params, x, dout))
    suffix = f", save={save!r}" if save != "inputs" else ""
    made = peers.ours(layer, make, params, x, dout, **notes)
    return [replace(contender, name=contender.name + suffix) for contender in made]


def _saved_bytes(layer: Callable, params: Any, x: jax.Array) -> int:
    """Counts the bytes kept between forward and backward beside the arguments, by shape; nothing is run."""
    pullback = jax.eval_shape(lambda *arguments: jax.vjp(layer, *arguments)[1], params, x)

    def count(tree):
        return Counter((a.shape, a.dtype) for a in jax.tree.leaves(tree))

    kept = count(pullback) - count((params, x))
    return sum(n * math.prod(shape) * dtype.itemsize for (shape, dtype), n in kept.items())


def _deformable(case: Case, arrays: dict[str, Any], dout: jax.Array) -> Iterator[Workload]:
    value, levels = arrays["value"], case.options["spatial_shapes"]
    args = (dout, value, arrays["sampling_locations"], arrays["attention_weights"])
    name = case.name if _is_scaling(case) else f"{case.name}, {value.shape[2]} x {value.shape[3]}"
    call = lambda value, *rest, **options: multi_scale_deformable_attention(value, levels, *rest, **options)
    contenders = peers.ours(call, step, *args)
    if dout.shape[0] > 1:  # whole arrays of a gather would be of gigabytes
        over = round((contenders[0].temporary_bytes or 0) / sum(x.nbytes for x in args[1:]), 2)
        contenders[0].notes["temporary memory / inputs"] = over
        yield Workload(name, contenders)
        return
    gather = step(partial(plain.gather_form, levels))
    makers: dict[str, Callable[[], Contender]] = {
        "gather form": partial(compiled_contender, "gather form, jax.grad", gather, *args)
    }
    if peers.torch_device():
        makers["torch"] = partial(peers.grid_sample, levels, args)
    found, refused = peers.gather(name, makers, 4.0 * args[3].size * value.shape[-1])
    yield Workload(name, [*contenders, *found], refused=refused)


def _linear(
    function: Callable[..., Any], case: Case, arrays: dict[str, Any], dout: jax.Array
) -> Iterator[Workload]:
    names = ("query", "key", "value", "log_decay", *(["beta"] if "beta" in arrays else []))
    args, epsilon = (dout, *(arrays[name] for name in names)), case.options.get("l2_norm_epsilon")
    call = partial(function, l2_norm_epsilon=epsilon)
    workload, name = f"{function.__name__}, {case.name}", "chunk form, jax.grad"
    make = partial(peers.chunks, name, epsilon, "beta" in arrays, args)
    found, refused = peers.gather(workload, {name: make})
    yield Workload(workload, [*peers.ours(call, step, *args), *found], refused=refused)


_GRAPHS = {"graph_attention": gat, "graph_attention_v2": gatv2, "graph_transformer_attention": transformer}


def _tolokers(operator: str, left_out: bool) -> tuple[Case, ...]:
    """Returns the graph of the file, where one is named, as a case of a graph operator."""
    path, make = os.environ.get("JAX_ATTN_BWD_TOLOKERS"), _GRAPHS.get(operator)
    if left_out or not path or make is None:
        return ()
    with np.load(path) as file:
        pairs, nodes = file["edges"], len(file["node_features"])
    src, dst = np.concatenate([pairs, pairs[:, ::-1]]).T
    graph = partial(BipartiteCSC.from_coo, src, dst, nodes, nodes)
    return (make(f"tolokers, {len(src)} edges, 4 x 16", graph=graph, H=4, D=16, dtype="float32"),)


def _graph(
    kind: str, function: Callable[..., Any], case: Case, arrays: dict[str, Any], dout: jax.Array
) -> Iterator[Workload]:
    args, name, width = (dout, *arrays.values()), f"{kind}, {case.name}", case.options["head_size"]
    edges = plain.edges_of(case.options["graph"], dout.shape[1], width)
    start = time.perf_counter()
    graph = BipartiteCSC.from_coo(edges.src, edges.dst, edges.nodes, edges.nodes)
    notes: dict[str, Any] = {"graph built in": f"{time.perf_counter() - start:.2f} s"}
    call = partial(function, graph, num_heads=edges.heads)
    segments = step(plain.segment_ops(edges, function.__name__))
    makers = {"JAX segment ops": partial(compiled_contender, "JAX segment ops", segments, *args)}
    if kind == "gat" and peers.torch_device() and peers.installed("torch_geometric"):
        makers["PyTorch Geometric"] = partial(peers.geometric, edges, args)
    found, refused = peers.gather(name, makers)
    yield Workload(name, [*peers.ours(call, step, *args, **notes), *found], refused=refused)


MEASURED: dict[str, Callable[..., Iterator[Workload]]] = {
    "scaled_masked_softmax": _softmax,
    "dot_product_attention": _dense,
    "multi_head_attention": _layer,
    "multi_scale_deformable_attention": _deformable,
    "gated_delta_rule": partial(_linear, gated_delta_rule),
    "gated_linear_attention": partial(_linear, gated_linear_attention),
    "graph_attention": partial(_graph, "gat", graph_attention),
    "graph_attention_v2": partial(_graph, "gatv2", graph_attention_v2),
    "graph_transformer_attention": partial(_graph, "transformer", graph_transformer_attention),
}
