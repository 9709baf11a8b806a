"""Other libraries' attention, where they are installed."""

import importlib
import importlib.util
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jax_attn_bwd.bench.gate import progress

JAX_PEERS = ("jax.nn[cudnn]", "jax.nn[xla]", "tokamax")


class Absent(Exception):
    """The peer is not installed, or cannot run here."""


def attention(work: Any, peer: str) -> tuple[Callable[[], Any], str]:
    """(the compiled call, how its backward is had) of a peer that runs on JAX."""
    function = _function(work, peer)
    q, k, v, dout = work.arrays()
    if work.direction == "forward":
        compiled = _fitting(jax.jit(function), q, k, v)
        return lambda: compiled(q, k, v), ""
    saving = _fitting(jax.jit(partial(jax.vjp, function)), q, k, v)
    _, pullback = saving(q, k, v)
    backward = _fitting(jax.jit(lambda pullback, dout: pullback(dout)), pullback, dout)
    return lambda: backward(pullback, dout), "backward: the compiled pullback of jax.vjp"


def _function(work: Any, peer: str) -> Callable[..., Any]:
    if peer == "tokamax":
        if importlib.util.find_spec("tokamax") is None:
            raise Absent("tokamax is not installed")
        return partial(importlib.import_module("tokamax").dot_product_attention, **work.options)
    name = peer.removeprefix("jax.nn[").removesuffix("]")
    if name == "cudnn" and jax.default_backend() != "gpu":
        raise Absent("cuDNN needs an NVIDIA GPU")
    return partial(jax.nn.dot_product_attention, implementation=name, **work.options)


def _fitting(function: Any, *args: Any) -> Any:
    """`function` compiled, if the device has the memory for it."""
    compiled = progress.compiled(function, *args)
    needed, available = compiled.memory_analysis(), _available_bytes(jax.devices()[0])
    if needed is not None and available is not None:
        total = needed.temp_size_in_bytes + needed.output_size_in_bytes
        if total > available:
            raise Absent(f"it needs {total / 2**30:.1f} GiB of {available / 2**30:.1f} GiB free")
    return compiled


def _available_bytes(device: Any) -> int | None:
    """What this process can still allocate: of its own limit, and of what the GPU has free."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    own, free = stats["bytes_limit"] - stats["bytes_in_use"], _free_bytes(device.local_hardware_id)
    if free is None:
        return own
    held = max(
        stats.get("pool_bytes", 0), stats["bytes_in_use"]
    )  # from the driver, by this process
    return min(own, free + held - stats["bytes_in_use"])


def _free_bytes(gpu: int | None) -> int | None:
    """What the driver says is free, whoever took the rest; None where it cannot be asked."""
    command = ["nvidia-smi", f"--id={gpu or 0}", "--query-gpu=memory.free"]
    try:
        said = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=20,
        ).stdout  # fmt: skip
        return int(said.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def torch_seconds(work: Any, rounds: int) -> float:
    """Seconds of torch's attention, between two events on the GPU; the median over `rounds`."""
    if importlib.util.find_spec("torch") is None:
        raise Absent("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    shape = (work.B, work.N, work.T, work.H)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward():
        with torch.no_grad():
            return attend(q, k, v, is_causal=work.is_causal)

    call: Callable[[], Any] = forward
    if work.direction == "backward":
        out = attend(q, k, v, is_causal=work.is_causal)
        call = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    for _ in range(3):
        call()
    calls, times = 10, []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(times)
