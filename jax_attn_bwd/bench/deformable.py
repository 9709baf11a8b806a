"""Multi-scale deformable attention: forward and backward, float32, 8 heads of 32.

The encoder asks once for every pixel, around its own place; the decoder asks 300 times anywhere.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.bench import peers
from jax_attn_bwd.bench.measure import Contender, Workload, compiled_contender, inputs, step, tag
from jax_attn_bwd.ops.deformable import cases
from jax_attn_bwd.ops.deformable.reference import multi_scale_deformable_attention as definition

Levels = tuple[tuple[int, int], ...]


def workloads(quick: bool, scaling: bool = False) -> Iterator[Workload]:
    """What is measured, built one at a time; `quick` keeps it small, `scaling` is one case at many sizes."""
    (operator,) = cases.OPERATORS
    for case in operator.tagged(tag(quick, scaling)):
        arrays, dout = inputs(operator, case)
        args = (dout, *(arrays[name] for name in ("value", "sampling_locations", "attention_weights")))
        name = case.name if scaling else f"{case.name}, {args[1].shape[2]} x {args[1].shape[3]}"
        yield _workload(name, case.options["spatial_shapes"], args)


def _workload(name: str, levels: Levels, args: tuple) -> Workload:
    call = lambda value, *rest, **options: multi_scale_deformable_attention(value, levels, *rest, **options)
    contenders = peers.ours(call, step, *args)
    if args[0].shape[0] > 1:  # whole arrays of a gather would be of gigabytes
        over = round((contenders[0].temporary_bytes or 0) / sum(x.nbytes for x in args[1:]), 2)
        contenders[0].notes["temporary memory / inputs"] = over
        return Workload(name, contenders)
    gather = partial(compiled_contender, "gather form, jax.grad", step(partial(gather_form, levels)), *args)
    makers: dict[str, Callable[[], Contender]] = {"gather form": gather}
    if peers.torch_device():
        makers["torch"] = partial(_torch, levels, args)
    weights, channels = args[3].size, args[1].shape[-1]
    found, refused = peers.gather(name, makers, 4.0 * weights * channels)
    return Workload(name, [*contenders, *found], refused=refused)


def gather_form(levels, value, locations, weights):
    """The definition, as one would write it: gathers of whole arrays, left to JAX to differentiate."""
    with jax.numpy_rank_promotion("allow"):
        return definition(value, locations, weights, spatial_shapes=levels)


def _torch(levels: Levels, args: tuple) -> Contender:
    """`grid_sample` for each level: the form that every DETR falls back to without its CUDA kernel."""
    import torch
    from torch.nn.functional import grid_sample

    dout, *tensors = (peers.tensor(x) for x in args)
    inputs_ = [x.requires_grad_() for x in tensors]

    def attend(value, locations, weights) -> Any:
        (B, _, M, D), Q = value.shape, locations.shape[1]
        grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)  # [B * M, Q, L, P, 2]
        sampled = []
        for level, part in enumerate(value.split([h * w for h, w in levels], 1)):
            image = part.permute(0, 2, 3, 1).reshape(B * M, D, *levels[level])
            sampled.append(grid_sample(image, grids[:, :, level], align_corners=False))
        scale = weights.transpose(1, 2).reshape(B * M, 1, Q, -1)
        out = (torch.stack(sampled, -2).flatten(-2) * scale).sum(-1)
        return out.view(B, M * D, Q).transpose(1, 2).contiguous()

    def run():
        out = attend(*inputs_)
        return (out, *torch.autograd.grad(out, inputs_, dout))

    return peers.torch_contender("grid_sample", run)
