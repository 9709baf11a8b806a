"""Other libraries beside ours: how each is called, and what becomes of one that cannot run here."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.measure import Contender, compiled_contender, step
from bench.plain import Edges, chunk_form, solves_end
from bench.report import Row, sentence
from jax_attn_bwd import MultiHeadAttentionParams

PLANES = 2**29  # bytes of the largest array that a peer may be asked for


def installed(*modules: str) -> bool:
    """Tells whether all of `modules` can be imported."""
    return all(importlib.util.find_spec(name) for name in modules)


def torch_device() -> str | None:
    """Tells where torch computes beside JAX: "cpu" or "cuda"; None if it is not installed, or cannot."""
    if not installed("torch"):
        return None
    import torch

    if jax.default_backend() == "cpu":
        return "cpu"
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else None


def tensor(x: Any) -> Any:
    """Copies a JAX array into a tensor of torch, beside JAX."""
    import torch

    made = torch.tensor(np.asarray(x, np.float32 if x.dtype == "bfloat16" else None))
    return made.to(torch_device(), torch.bfloat16 if x.dtype == "bfloat16" else None)


def torch_contender(what: str, run: Callable[[], Sequence[Any]], read: Callable = lambda *x: x) -> Contender:
    """Makes a contender of torch: `run` returns tensors, `read` turns them to our layout."""
    import torch

    def wait(result):
        if torch_device() == "cuda":
            torch.cuda.synchronize()

    def results():
        return [np.asarray(x.detach().float().cpu().numpy()) for x in read(*run())]

    return Contender(f"torch {torch.__version__.split('+')[0]} {what}", run, wait, results)


def ours(
    call: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable], *args: Any, **rest: Any
) -> list[Contender]:
    """Makes our contenders, one for each implementation that can run here, the kernels first.

    `make` turns a call, `call(..., implementation=)` of ours, into the function of `args` that is measured.
    """
    found = []
    for name in ("mosaic_gpu", "mosaic_tpu", "xla"):
        function = make(partial(call, implementation=name))
        try:
            jax.eval_shape(function, *args)
        except NotImplementedError:
            continue
        found.append((name, function))
    label = lambda name: "jax_attn_bwd" if len(found) == 1 else f"jax_attn_bwd[{name}]"
    return [compiled_contender(label(name), function, *args, **rest) for name, function in found]


def gather(
    case: str, makers: Mapping[str, Callable[[], Contender]], needs: float = 0, linear: Sequence[str] = ()
) -> tuple[list[Contender], list[Row]]:
    """Returns (the peers that could be made, rows that say why the others could not).

    `needs`: the bytes of the planes that all peers but those in `linear` hold, several at a time; too many
    for a machine that others use are not asked for.
    """
    made, refused = [], []
    for name, make in makers.items():
        if needs > PLANES and name not in linear:
            refused.append(
                Row(case, name, notes={"refused": f"holds planes of {needs / 2**30:.1f} GiB each"})
            )
            continue
        try:
            contender = make()
            if jax.default_backend() != "cpu":
                contender.wait(contender.run())  # it may not fit the memory
            made.append(contender)
        except Exception as error:  # one peer's failure is its own
            refused.append(Row(case, name, notes={"refused": sentence(error)[:200]}))
    return made, refused


# ---- dense attention


def sdpa(is_causal: bool, with_backward: bool, args: tuple) -> Contender:
    """Makes a contender of torch's `scaled_dot_product_attention`."""
    import torch

    dout, *inputs_ = (
        tensor(x).transpose(1, 2).contiguous() for x in args
    )  # its own layout, [B, N, T, H]: the transposes are ours alone to pay
    tensors = [x.requires_grad_() for x in inputs_]

    def run():
        with torch.set_grad_enabled(with_backward):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        return (out, *torch.autograd.grad(out, tensors, dout)) if with_backward else (out,)

    return torch_contender("SDPA", run, lambda *found: [x.transpose(1, 2) for x in found])


# ---- the multi-head layer


_PIECES = ("query", "key", "value", "out")
_COMPARED = tuple(  # the gradient of key_bias is 0 but for rounding: no softmax sees a shift of its row
    f"{piece}_{part}" for piece in _PIECES for part in ("kernel", "bias") if (piece, part) != ("key", "bias")
)


def layer_step(layer: Callable, params: Any, x: jax.Array, dout: jax.Array) -> tuple:
    """Returns (out, dx, the parameters' gradients)."""
    out, pullback = jax.vjp(layer, params, x)
    gradients, dx = pullback(dout)
    return out, dx, gradients


def compared(out, dx, gradients: MultiHeadAttentionParams) -> tuple:
    """Returns what the layers are compared by, in one order."""
    return out, dx, *(getattr(gradients, name) for name in _COMPARED)


def torch_layer(x, dout, params) -> Contender:
    """Makes a contender of torch's `MultiheadAttention` with these parameters."""
    import torch

    # its three projections are one: [3 * E, E]
    E, N = x.shape[-1], params.query_bias.shape[0]
    layer = torch.nn.MultiheadAttention(E, N, batch_first=True)
    layer = layer.to(tensor(x))
    kernels = [tensor(getattr(params, f"{p}_kernel")).reshape(E, E).T for p in _PIECES[:3]]
    biases = [tensor(getattr(params, f"{p}_bias")).ravel() for p in _PIECES[:3]]
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat(kernels))
        layer.in_proj_bias.copy_(torch.cat(biases))
        layer.out_proj.weight.copy_(tensor(params.out_kernel).reshape(E, E).T)
        layer.out_proj.bias.copy_(tensor(params.out_bias))
    # all gradients, then in the order of ours
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

    return torch_contender("MultiheadAttention", run, read)


def nnx_layer(x, dout, params) -> Contender:
    """Makes a contender of Flax NNX's `MultiHeadAttention` with these parameters."""
    from flax import nnx

    N, E = params.query_bias.shape[0], x.shape[-1]
    layer = nnx.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    for piece in _PIECES:
        projection = getattr(layer, piece)
        projection.kernel.set_value(getattr(params, f"{piece}_kernel"))
        projection.bias.set_value(getattr(params, f"{piece}_bias"))
    graph, state = nnx.split(layer)

    def step(state, x, dout):
        out, dx, d = layer_step(lambda state, x: nnx.merge(graph, state)(x), state, x, dout)
        parts = (name.split("_") for name in _COMPARED)
        return out, dx, *(d[piece][part].get_value() for piece, part in parts)

    return compiled_contender("flax.nnx MultiHeadAttention", step, state, x, dout)


def equinox_layer(x, dout, params) -> Contender:
    """Makes a contender of Equinox's `MultiheadAttention` with these parameters."""
    import equinox as eqx

    E, N = x.shape[-1], params.query_bias.shape[0]
    # our parameters take the place of its own
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

    # gradients in the shapes of ours
    def step(arrays, x, dout):
        def attend(arrays, x):
            return jax.vmap(lambda x: eqx.combine(arrays, rest)(x, x, x))(x)

        out, dx, d = layer_step(attend, arrays, x, dout)
        found = []
        for name in _COMPARED:
            piece, part = name.split("_")
            projection = getattr(d, f"{'output' if piece == 'out' else piece}_proj")
            gradient = projection.weight.T if part == "kernel" else projection.bias
            found.append(gradient.reshape(getattr(params, name).shape))
        return out, dx, *found

    return compiled_contender("equinox MultiheadAttention", step, arrays, x, dout)


# ---- linear attention


def chunks(name: str, epsilon: float | None, solves: bool, args: tuple) -> Contender:
    """Makes a contender of the step of `chunk_form`, as JAX derives it; `solves`: by a delta rule."""
    if solves and not solves_end():
        raise NotImplementedError(
            "before JAX 0.11 the gradient of many triangular solves may never end on a CPU"
        )
    return compiled_contender(name, step(partial(chunk_form, epsilon)), *args)


# ---- deformable attention


def grid_sample(levels: Sequence[tuple[int, int]], args: tuple) -> Contender:
    """Samples each level with `grid_sample`: what every DETR falls back to without its CUDA kernel."""
    import torch
    from torch.nn import functional

    dout, *tensors = (tensor(x) for x in args)
    inputs = [x.requires_grad_() for x in tensors]

    def attend(value, locations, weights) -> Any:
        (B, _, M, D), Q = value.shape, locations.shape[1]
        grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)  # [B * M, Q, L, P, 2]
        sampled = []
        for level, part in enumerate(value.split([h * w for h, w in levels], 1)):
            image = part.permute(0, 2, 3, 1).reshape(B * M, D, *levels[level])
            sampled.append(functional.grid_sample(image, grids[:, :, level], align_corners=False))
        scale = weights.transpose(1, 2).reshape(B * M, 1, Q, -1)
        out = (torch.stack(sampled, -2).flatten(-2) * scale).sum(-1)
        return out.view(B, M * D, Q).transpose(1, 2).contiguous()

    def run():
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, dout))

    return torch_contender("grid_sample", run)


# ---- graphs


def geometric(edges: Edges, args: tuple) -> Contender:
    """Runs GATConv of PyTorch Geometric behind its projection: edge update and propagation."""
    import torch
    import torch_geometric
    from torch_geometric.nn import GATConv

    H, D = edges.heads, edges.width
    layer = GATConv((H * D, H * D), D, heads=H, add_self_loops=False, bias=False)
    ct, *inputs = (tensor(x) for x in args)
    inputs = [x.requires_grad_() for x in inputs]
    index = torch.tensor(np.stack([edges.src, edges.dst])).to(ct.device)

    def run() -> Any:
        x, y, a = inputs
        x, y, (a_src, a_dst) = x.view(-1, H, D), y.view(-1, H, D), a.view(2, H, D)
        alpha = ((x * a_src).sum(-1), (y * a_dst).sum(-1))
        size = (edges.nodes, edges.nodes)
        alpha = layer.edge_updater(index, alpha=alpha, edge_attr=None, size=size)
        out = layer.propagate(index, x=(x, y), alpha=alpha, size=size).reshape(edges.nodes, H * D)
        return (out, *torch.autograd.grad(out, inputs, ct))

    return torch_contender(f"PyTorch Geometric {torch_geometric.__version__} GATConv", run)
