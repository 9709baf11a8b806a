"""JAX's own TPU attention kernels, for the same report: the peers of `results/tpu_static.md`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

NAMES = ("flash_attention", "splash_attention")
BACKWARD_TILE = (1024, 1024)
_SHAPE = (1, 8, 4096, 128)  # batch, heads, queries or keys, head size


def programs() -> Iterator[tuple[str, str, tuple[int, int], Callable[..., Any], tuple[Any, ...]]]:
    """(peer, case, tile of an inner step, function, types of its arguments)."""
    array = jax.ShapeDtypeStruct(_SHAPE, jnp.bfloat16)
    yield "flash_attention", "full", (1024, 1024), _flash(1024), (array,) * 4
    heads = jax.ShapeDtypeStruct(_SHAPE[1:], jnp.bfloat16)
    for case, tile in (("full", (1024, 1024)), ("full", (2048, 2048)), ("causal", (1024, 1024))):
        yield "splash_attention", case, tile, _splash(case, tile), (heads,) * 4


def _flash(block: int) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    compute = block // 2
    blocks = BlockSizes(
        block_q=block,
        block_k_major=block,
        block_k=compute,
        block_b=1,
        block_q_major_dkv=block,
        block_k_major_dkv=block,
        block_k_dkv=compute,
        block_q_dkv=compute,
        block_k_major_dq=block,
        block_k_dq=compute,
        block_q_dq=block,
    )
    return _gradients(lambda q, k, v: flash_attention(q, k, v, block_sizes=blocks))


def _splash(case: str, tile: tuple[int, int]) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, N, T, _), (block_q, block_kv) = _SHAPE, tile
    mask = {"full": masks.FullMask, "causal": masks.CausalMask}[case]((T, T))
    blocks = kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=512,
        block_q_dkv=1024,
        block_kv_dkv=1024,
        block_kv_dkv_compute=512,
        use_fused_bwd_kernel=True,
    )
    attention = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * N), head_shards=1, q_seq_shards=1, block_sizes=blocks
    )
    return _gradients(attention)


def _gradients(attention: Callable[..., Any]) -> Callable[..., Any]:
    def function(q, k, v, dout):
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(dout)

    return function
