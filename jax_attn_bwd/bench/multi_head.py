"""The multi-head attention layer: self-attention, all gradients, in float32 on a CPU."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention
from jax_attn_bwd.bench import peers
from jax_attn_bwd.bench.measure import TOLERANCES, Contender, Workload, compiled_contender, inputs, tag
from jax_attn_bwd.ops.multi_head import cases

_PIECES = ("query", "key", "value", "out")
_COMPARED = tuple(  # the gradient of key_bias is 0 but for rounding: no softmax sees a shift of its row
    f"{piece}_{part}" for piece in _PIECES for part in ("kernel", "bias") if (piece, part) != ("key", "bias")
)


def workloads(quick: bool, scaling: bool = False) -> Iterator[Workload]:
    """What is measured, built one at a time; `quick` keeps it small, `scaling` is one case at many sizes."""
    (operator,) = cases.OPERATORS
    for case in operator.tagged(tag(quick, scaling)):
        arrays, dout = inputs(operator, case)
        x = arrays.pop("query")
        args = (x, dout, MultiHeadAttentionParams(**arrays))
        found, refused = peers.gather(
            case.name,
            {
                module: partial(peer, *args)
                for module, peer in (("torch", _torch), ("flax", _nnx), ("equinox", _equinox))
                if peers.installed(module) and (module != "torch" or peers.torch_device())
            },
            4.0 * x.shape[0] * arrays["query_bias"].shape[0] * x.shape[1] ** 2,
        )
        contenders = [*_ours(*args), *_ours(*args, save="qkv"), *found]
        tolerance = TOLERANCES[str(x.dtype)]
        yield Workload(case.name, contenders, tolerance=tolerance, refused=refused)


def _step(layer: Callable, params: Any, x: jax.Array, dout: jax.Array) -> tuple:
    """(out, dx, the parameters' gradients)."""
    out, pullback = jax.vjp(layer, params, x)
    gradients, dx = pullback(dout)
    return out, dx, gradients


def _ours(x, dout, params, save: str = "inputs") -> list[Contender]:
    layer = partial(multi_head_attention, save=save)
    saved = _saved_bytes(layer, params, x)
    B, T, E = x.shape
    N = params.query_bias.shape[0]
    planes = 4 * (4 * B * T * E + 2 * B * N * T * T)  # q, k, v, z; probabilities, also after dropout
    beside = f"{saved / 2**20:.1f} MiB (MegEngine {planes / 2**20:.0f})"
    notes: dict[str, Any] = {"saved beside the inputs": beside}
    make = lambda layer: lambda params, x, dout: _flat(*_step(layer, params, x, dout))
    suffix = f", save={save!r}" if save != "inputs" else ""
    made = peers.ours(layer, make, params, x, dout, **notes)
    return [replace(contender, name=contender.name + suffix) for contender in made]


def _saved_bytes(layer: Callable, params: Any, x: jax.Array) -> int:
    """Bytes kept between forward and backward beside the arguments; counted by shape, nothing is computed."""
    pullback = jax.eval_shape(lambda *arguments: jax.vjp(layer, *arguments)[1], params, x)

    def count(tree):
        return Counter((a.shape, a.dtype) for a in jax.tree.leaves(tree))

    kept = count(pullback) - count((params, x))
    return sum(n * math.prod(shape) * dtype.itemsize for (shape, dtype), n in kept.items())


def _flat(out, dx, gradients: MultiHeadAttentionParams) -> tuple:
    return out, dx, *(getattr(gradients, name) for name in _COMPARED)


def _torch(x, dout, params) -> Contender:
    import torch

    E, N = x.shape[-1], params.query_bias.shape[0]
    layer = torch.nn.MultiheadAttention(E, N, batch_first=True)
    tensor = peers.tensor
    layer = layer.to(tensor(x))
    kernels = [tensor(getattr(params, f"{p}_kernel")).reshape(E, E).T for p in _PIECES[:3]]
    biases = [tensor(getattr(params, f"{p}_bias")).ravel() for p in _PIECES[:3]]
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat(kernels))
        layer.in_proj_bias.copy_(torch.cat(biases))
        layer.out_proj.weight.copy_(tensor(params.out_kernel).reshape(E, E).T)
        layer.out_proj.bias.copy_(tensor(params.out_bias))
    x, dout = tensor(x).requires_grad_(), tensor(dout)
    inputs = [x, *layer.parameters()]

    def run():
        out, _ = layer(x, x, x, need_weights=False)
        return (out, *torch.autograd.grad(out, inputs, dout))

    def read(out, dx, weight, bias, out_weight, out_bias):
        found = {"out_kernel": out_weight.T.reshape(N, -1, E), "out_bias": out_bias}
        for piece, *parts in zip(_PIECES, weight.chunk(3), bias.chunk(3), strict=False):
            found[f"{piece}_kernel"] = parts[0].T.reshape(E, N, -1)
            found[f"{piece}_bias"] = parts[1].reshape(N, -1)
        return [out, dx, *(found[name] for name in _COMPARED)]

    return peers.torch_contender("MultiheadAttention", run, read)


def _nnx(x, dout, params) -> Contender:
    from flax import nnx

    N, E = params.query_bias.shape[0], x.shape[-1]
    layer = nnx.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    for piece in _PIECES:
        projection = getattr(layer, piece)
        projection.kernel.set_value(getattr(params, f"{piece}_kernel"))
        projection.bias.set_value(getattr(params, f"{piece}_bias"))
    graph, state = nnx.split(layer)

    def step(state, x, dout):
        out, dx, d = _step(lambda state, x: nnx.merge(graph, state)(x), state, x, dout)
        parts = (name.split("_") for name in _COMPARED)
        return out, dx, *(d[piece][part].get_value() for piece, part in parts)

    return compiled_contender("flax.nnx MultiHeadAttention", step, state, x, dout)


def _equinox(x, dout, params) -> Contender:
    import equinox as eqx

    E, N = x.shape[-1], params.query_bias.shape[0]
    use = {f"use_{piece}_bias": True for piece in ("query", "key", "value", "output")}
    layer = eqx.nn.MultiheadAttention(N, E, **use, key=jax.random.key(0))

    def put(layer):
        for piece in _PIECES:
            name = f"{'output' if piece == 'out' else piece}_proj"
            kernel, bias = (getattr(params, f"{piece}_{part}") for part in ("kernel", "bias"))
            at = lambda m, name=name: (getattr(m, name).weight, getattr(m, name).bias)
            layer = eqx.tree_at(at, layer, (kernel.reshape(E, E).T, bias.ravel()))
        return layer

    arrays, rest = eqx.partition(put(layer), eqx.is_array)

    def step(arrays, x, dout):
        def attend(arrays, x):
            return jax.vmap(lambda x: eqx.combine(arrays, rest)(x, x, x))(x)

        out, dx, d = _step(attend, arrays, x, dout)
        found = []
        for name in _COMPARED:
            piece, part = name.split("_")
            projection = getattr(d, f"{'output' if piece == 'out' else piece}_proj")
            gradient = projection.weight.T if part == "kernel" else projection.bias
            found.append(gradient.reshape(getattr(params, name).shape))
        return out, dx, *found

    return compiled_contender("equinox MultiheadAttention", step, arrays, x, dout)
