"""Dense attention: forward and backward, in float32 on a CPU and in bfloat16 on a GPU."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core.cases import Case
from jax_attn_bwd.bench import peers
from jax_attn_bwd.bench.measure import TOLERANCES, Contender, Workload, compiled_contender, inputs, step, tag
from jax_attn_bwd.ops.dot_product import cases, engine, tiles, visibility
from jax_attn_bwd.ops.dot_product.arguments import prepare
from jax_attn_bwd.ops.dot_product.plan import count


def workloads(quick: bool, scaling: bool = False) -> Iterator[Workload]:
    """What is measured, built one at a time; `quick` keeps it small, `scaling` is one case at many sizes."""
    (operator,) = cases.OPERATORS
    for case in operator.tagged(tag(quick, scaling)):
        arrays, dout = inputs(operator, case)
        args = (dout, arrays["query"], arrays["key"], arrays["value"])
        if jax.default_backend() != "cpu":
            yield _on_gpu(case, "forward", args)
            yield _on_gpu(case, "forward + backward", args)
        elif "memory only" in case.name:
            yield Workload(_named(case), _ours(case, args), timed=False)
        elif "local_window_size" in case.options and not scaling:
            yield _window(case, args)
        else:
            B, T, N, _ = args[1].shape
            peer = _peers(case, step, args)
            name = case.name if scaling else _named(case)
            found, refused = peers.gather(name, peer, 4.0 * B * N * T * T, linear=("torch",))
            yield Workload(name, [*_ours(case, args), *found], refused=refused)


def _named(case: Case) -> str:
    B, _, N, H = case.shapes()["query"].shape
    return f"{case.name}, B{B} N{N} H{H}"


def visited(case: Case) -> str:
    """Tiles visited, of all, by the portable path."""
    defaults = dict.fromkeys(
        ("scale", "query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "logits_soft_cap",
         "key_value_segment_ids", "query_positions", "key_value_positions", "sink", "dropout_key",
         "dropout_offset", "precision", "local_window_size")
    )  # fmt: skip
    flags = {"dropout_rate": 0.0, "broadcast_dropout": False, "deterministic_sums": True, "is_causal": False}
    x = jax.numpy.zeros(case.shapes()["query"].shape, case.dtype)
    options, operands = prepare("bench", x, x, x, None, None, **{**defaults, **flags, **case.options})
    tiling, T = engine.planned("xla", options, operands).tiling, x.shape[1]
    if tiling.is_materialized:
        return f"{tiling.batch_slices} batch slices of whole planes"
    full, mixed, _ = tiles.static_pairs(visibility.tile_mask(operands.mask, None, T, T, 1, 1), tiling)
    total = count(T, tiling.block_q) * count(T, tiling.block_k)
    return f"{len(full) + len(mixed)} of {total} tiles of {tiling.block_q} x {tiling.block_k}"


def _ours(case: Case, args: tuple) -> list[Contender]:
    return peers.ours(partial(dot_product_attention, **case.options), step, *args, tiles=visited(case))


def _window(case: Case, args: tuple) -> Workload:
    """Beside itself without the window, and beside jax.nn for its results."""
    window, causal = case.options["local_window_size"], {"is_causal": True}
    windowed, full = (
        compiled_contender(name, step(partial(dot_product_attention, **options)), *args, compare=compare)
        for name, options, compare in (
            (f"causal, window {window[0]}", case.options, True),
            ("causal", causal, False),
        )
    )
    windowed.notes["tiles"] = visited(case)
    contenders = [windowed, full]
    if args[1].shape[1] <= 4096:  # it holds several arrays of T x S
        peer = step(partial(jax.nn.dot_product_attention, **case.options))
        name = f"jax.nn, window {window[0]}"
        contenders.append(compiled_contender(name, peer, *args, timed=False))
    return Workload(_named(case), contenders)


def _on_gpu(case: Case, direction: str, args: tuple) -> Workload:
    """Ours by kernel and by XLA, beside jax.nn by XLA and cuDNN, tokamax and torch."""
    make = {"forward": _forward, "forward + backward": step}[direction]
    name = f"{case.name}, {direction}"
    found, refused = peers.gather(name, _peers(case, make, args))
    contenders = [*peers.ours(partial(dot_product_attention, **case.options), make, *args), *found]
    rates = {"TFLOP/s": operations(case) * (3.5 if make is step else 1) / 1e12}
    return Workload(name, contenders, tolerance=TOLERANCES["bfloat16"], rates=rates, refused=refused)


def operations(case: Case) -> float:
    """Floating-point operations of a forward, as one counts: causal is half; a backward is 2.5 forwards."""
    B, T, N, H = case.shapes()["query"].shape
    pairs = T * T / (2 if case.options.get("is_causal") else 1)
    if (window := case.options.get("local_window_size")) is not None:
        pairs = sum(min(t, window[0]) + 1 for t in range(T))
    return 4.0 * B * N * H * pairs


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda dout, *arrays: function(*arrays)


def _peers(case: Case, make: Callable, args: tuple) -> dict[str, Callable[[], Contender]]:
    """{peer: what makes the contender}; `make` turns its attention into what is measured."""
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
        found["torch"] = partial(_torch, bool(options.get("is_causal")), make is step, args)
    return found


def _torch(is_causal: bool, with_backward: bool, args: tuple) -> Contender:
    import torch

    dout, *inputs_ = (
        peers.tensor(x).transpose(1, 2).contiguous() for x in args
    )  # its own layout, [B, N, T, H]: the transposes are ours alone to pay
    tensors = [x.requires_grad_() for x in inputs_]

    def run():
        with torch.set_grad_enabled(with_backward):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        return (out, *torch.autograd.grad(out, tensors, dout)) if with_backward else (out,)

    return peers.torch_contender("SDPA", run, lambda *found: [x.transpose(1, 2) for x in found])
