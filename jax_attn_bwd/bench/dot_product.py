"""What is measured of dense attention: forward and backward, float32, one batch entry, 8 heads of 64."""

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.bench.measure import Case, Contender, compiled_contender
from jax_attn_bwd.ops.dot_product import tiles
from jax_attn_bwd.ops.dot_product.arguments import prepare
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count

HEADS, SIZE = 8, 64


def cases(quick: bool) -> Iterator[Case]:
    """The cases, built one at a time; `quick` keeps them small."""
    lengths = (256,) if quick else (2048, 4096)
    for T in lengths:
        for is_causal in (False, True):
            yield _against_peers(T, is_causal)
    for T in (512,) if quick else (4096, 8192):
        yield _window(T, 64 if quick else 256)
    if not quick:
        yield _memory(32768)


def _arrays(T: int) -> list[jax.Array]:
    """query, key, value, dout."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, T, HEADS, SIZE)), jnp.float32) for _ in range(4)]


def _step(function: Any, **options: Any) -> Any:
    """`(q, k, v, dout) -> (out, dq, dk, dv)`."""

    def step(q, k, v, dout):
        out, pullback = jax.vjp(partial(function, **options), q, k, v)
        return (out, *pullback(dout))

    return step


def visited(T: int, **options: Any) -> str:
    """Tiles visited, of all, by the portable path."""
    defaults = dict.fromkeys(
        ("scale", "query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "logits_soft_cap",
         "key_value_segment_ids", "query_positions", "key_value_positions", "sink", "dropout_key",
         "dropout_offset", "precision", "local_window_size")
    )  # fmt: skip
    flags = {
        "dropout_rate": 0.0,
        "broadcast_dropout": False,
        "deterministic": True,
        "is_causal": False,
    }
    x = jnp.zeros((1, T, HEADS, SIZE), jnp.float32)
    static, operands = prepare("bench", x, x, x, None, None, **{**defaults, **flags, **options})
    tiling = Tiling.default_for(static, operands)
    full, mixed = tiles.static_pairs(static, T, T, False, tiling)
    total = count(T, tiling.block_q) * count(T, tiling.block_k)
    return f"{len(full) + len(mixed)} of {total} tiles of {tiling.block_q} x {tiling.block_k}"


def _ours(T: int, compare: bool = True, name: str = "jax_attn_bwd", **options: Any) -> Contender:
    step = _step(dot_product_attention, **options)
    return compiled_contender(name, step, *_arrays(T), compare=compare, tiles=visited(T, **options))


def _against_peers(T: int, is_causal: bool) -> Case:
    contenders = [_ours(T, is_causal=is_causal)]
    step = _step(jax.nn.dot_product_attention, is_causal=is_causal)
    contenders.append(compiled_contender("jax.nn", step, *_arrays(T)))
    if importlib.util.find_spec("torch"):
        contenders.append(_torch(T, is_causal))
    return Case(f"T=S={T} {'causal' if is_causal else 'full'}", contenders)


def _torch(T: int, is_causal: bool) -> Contender:
    import torch

    q, k, v, dout = (
        torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in _arrays(T)
    )  # its own layout, [B, N, T, H]: the transposes are ours alone to pay
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run():
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        return (out, *torch.autograd.grad(out, inputs, dout))

    def results():
        return [x.detach().transpose(1, 2).numpy() for x in run()]

    return Contender(f"torch {torch.__version__.split('+')[0]} SDPA", run, results)


def _window(T: int, window: int) -> Case:
    options: dict[str, Any] = {"is_causal": True, "local_window_size": (window, 0)}
    contenders = [_ours(T, name=f"causal, window {window}", **options)]
    contenders.append(_ours(T, compare=False, name="causal", is_causal=True))
    if T <= 4096:  # it holds several arrays of T x S
        step = _step(jax.nn.dot_product_attention, **options)
        peer = compiled_contender(f"jax.nn, window {window}", step, *_arrays(T), timed=False)
        contenders.append(peer)
    return Case(f"T=S={T} window {window}", contenders)


def _memory(T: int) -> Case:
    return Case(f"T=S={T} causal, memory only", [_ours(T, is_causal=True)], timed=False)
