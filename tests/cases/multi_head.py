"""Cases of the multi-head attention layer that tests and benchmarks alone read."""

from typing import Any

import jax

from cases import infinite_bias
from jax_attn_bwd import mods, multi_head_attention_bwd
from jax_attn_bwd._core.cases import bias, both, mask, positions, seen_with_bias, segments, shared_segments
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd.ops.dot_product.cases import MOD_ARGS, args, seen, slopes
from jax_attn_bwd.ops.multi_head.cases import (
    ALL,
    BIASES,
    DROPS,
    INPUTS,
    KERNELS,
    KEY,
    LENGTHS,
    OPERATORS,
    ROWS,
    case,
    with_params,
)
from jax_attn_bwd.ops.multi_head.spec import ARRAYS

_SELF = ("query", *KERNELS, *BIASES)
_SELF_SIZES = dict(S=5, Ek=6, Ev=6)
_SECOND = dict(B=(1,), T=2, S=3, N=2, K=1, H=2, Hv=1, Eq=2, Ek=2, Ev=2, Eo=2)
_SHARD = dict(B=(4,), N=8, K=4)

_EDGE: dict[str, Any] = dict(tags=("edge",))
_MASK = mods.sliding_window(3) | mods.global_tokens(1)


def _measured():
    """Self-attention; B, T, width, heads."""
    for B, T, E, N, tag, dtype in (
        (2, 32, 32, 4, "quick", "float32"),
        (4, 512, 512, 8, "bench", "float32"),
        (1, 2048, 512, 8, "bench", "float32"),
        (4, 4096, 2048, 16, "bench_gpu", "bfloat16"),
    ):
        widths = dict.fromkeys(("Eq", "Ek", "Ev", "Eo"), E) | {"H": E // N, "Hv": E // N}
        sizes = {"B": (B,), "T": T, "S": T, "N": N, "K": N, **widths}
        yield case(f"B={B} T={T} E={E} N={N}", _SELF, sizes=sizes, tags=(tag,), dtype=dtype)
    for T in (64, 128, 512, 1024, 2048, 4096, 8192, 16384):
        sizes = dict(B=(1,), T=T, S=T, N=4, K=4, H=64, Hv=64, Eq=256, Ek=256, Ev=256, Eo=256)
        tags = ("scaling",) if T >= 512 else ("quick_scaling",)
        yield case(f"E=256, N=4: T={T}", _SELF, sizes=sizes, tags=tags, dtype="float32")


_LAYER = (
    case("plain"),
    case("self_residual", _SELF, sizes={**_SELF_SIZES, "Eo": 6}, is_causal=True, add_residual=True),
    case("weights", return_weights=True),
    case("key_is_value", ("query", "key", *KERNELS), sizes=dict(Ev=7), local_window_size=2, **_EDGE),
    case(
        "everything_qkv", ALL, extra=both(mask(2, 1, 5, 7), bias(1, 5, 7, spread=3.0), KEY),
        add_zero_attn=True, return_weights=True, save="qkv", **_EDGE, **DROPS,
    ),
    case(
        "everything_probs", ALL, extra=both(mask(2, 1, 5, 7), bias(4, 1, 7, spread=3.0), KEY),
        add_zero_attn=True, return_weights=True, save="probs", **_EDGE, **DROPS,
    ),
    case("probs", ALL, add_zero_attn=True, is_causal=True, save="probs", **_EDGE),
    case(
        "average_weights", (*INPUTS, *KERNELS, "sink"), return_weights=True, average_weights=True,
        extra=mask(2, 1, 1, 7, keep=0.3), **_EDGE,
    ),
    case(
        "average_weights_dropout", (*INPUTS, *KERNELS, *ROWS), extra=KEY, return_weights=True,
        average_weights=True, **_EDGE, **DROPS,
    ),
    case("appended_rows", (*INPUTS, *KERNELS, *ROWS), extra=mask(2, 4, 5, 7, keep=0.1), **_EDGE),
    case("zero_row", add_zero_attn=True, extra=mask(2, 1, 5, 1), **_EDGE),
    case("bias_key", extra=bias(1, 4, 1, 7, spread=3.0), **_EDGE),
    case("bias_minus_inf", extra=infinite_bias, **_EDGE),
    case("sink", (*INPUTS, *KERNELS, "sink"), extra=mask(2, 1, 5, 7, keep=0.1), **_EDGE),
    case("dropout_broadcast", extra=KEY, dropout_rate=0.4, broadcast_dropout=True, **_EDGE),
    case(
        "dropout_offset", (*INPUTS, *KERNELS, *ROWS), extra=KEY, dropout_offset=(3, 1, 5, 2),
        **_EDGE, **DROPS,
    ),
    case("dropout_all", extra=KEY, dropout_rate=1.0, **_EDGE),
    case("packed_alone", extra=both(segments(), LENGTHS), is_causal=True, **_EDGE),
    case("positions", extra=positions, is_causal=True, local_window_size=3, **_EDGE),
    case(
        "rotary_saved", ("query", *KERNELS[1:], *ROWS), sizes=_SELF_SIZES | dict(H=6), save="qkv",
        rotary=Rotary(interleaved=True, frequencies=(1.0, 0.3, 0.05)), add_zero_attn=True, **_EDGE,
    ),
    case(
        "packed_probs", ALL, extra=both(segments(), LENGTHS), return_weights=True, save="probs",
        logits_soft_cap=1.5, **_EDGE,
    ),
    case(
        "capped_weights", ALL, extra=both(segments(), bias(4, 5, 7, spread=3.0)), add_zero_attn=True,
        return_weights=True, logits_soft_cap=1.5, **_EDGE,
    ),
    case("no_query_kernel", (*INPUTS, *KERNELS[1:]), sizes=dict(Eq=3), **_EDGE),
    case("no_key_kernel", (*INPUTS, "query_kernel", "value_kernel"), sizes=dict(Ek=3), **_EDGE),
    case(
        "no_value_kernel", (*INPUTS, "query_kernel", "key_kernel", "out_kernel"), sizes=dict(Hv=8),
        **_EDGE,
    ),
    case(
        "no_kernels", (*INPUTS, *ROWS), num_heads=4, return_weights=True,
        sizes=dict(Ek=6, H=6, Hv=8), **_EDGE,
    ),
    case("no_kernels_at_all", ("query",), num_heads=3, is_causal=True, scale=0.7, **_EDGE),
    case("no_batch", sizes=dict(B=()), **_EDGE),
    case("two_batch_axes", ALL, sizes=dict(B=(2, 3)), extra=bias(3, 1, 1, 7, spread=3.0), **_EDGE),
    *(
        case(f"T{T}_S{S}", ALL, sizes=dict(T=T, S=S), return_weights=True, **_EDGE)
        for T, S in ((0, 3), (3, 0), (1, 1))
    ),
    case("T3_S0_no_rows", sizes=dict(T=3, S=0), **_EDGE),
    case(
        "second", ("query", "query_kernel", "key_kernel", "value_kernel", "out_kernel"),
        sizes={**_SECOND, "S": 2}, is_causal=True, tags=("second",),
    ),
    case(
        "second_weights", (*INPUTS, "query_kernel", *ROWS), return_weights=True,
        sizes=_SECOND | dict(Ev=1), extra=mask(1, 1, 2, 3), tags=("second",),
    ),
    case(
        "second_probs", ("query", "value_kernel", "out_kernel", "sink"), save="probs", num_heads=2,
        sizes=_SECOND | dict(S=2), extra=both(bias(2, 1, 2, spread=3.0), KEY), add_residual=True,
        tags=("second",), **DROPS,
    ),
    case(
        "second_packed", (*INPUTS, "query_kernel", *ROWS), logits_soft_cap=5.0,
        sizes=_SECOND | dict(Ev=1, S=2), extra=shared_segments, tags=("second",),
    ),
    case(
        "second_rotary", (*INPUTS, "query_kernel", "key_kernel"), sizes=_SECOND | dict(Ev=1),
        rotary=Rotary(interleaved=True, frequencies=(0.3,)), tags=("second",),
    ),
    case(
        "mod", (*INPUTS, *KERNELS, *ROWS), mask_mod=_MASK, score_mod=mods.alibi, add_zero_attn=True,
        return_weights=True, extra=args(slopes), tags=("hidden",),
    ),
    case(
        "mod_saved", ("query", *KERNELS), sizes=_SELF_SIZES, mask_mod=_MASK, score_mod=mods.alibi,
        save="probs", extra=args(slopes),
    ),
    case(
        "shard", (*INPUTS, *KERNELS, *BIASES), sizes=_SHARD, is_causal=True, extra=KEY,
        tags=("shard",), **DROPS,
    ),
    case(
        "shard_rows", (*INPUTS, *KERNELS, *ROWS, "sink"), sizes=_SHARD, add_zero_attn=True,
        return_weights=True, extra=both(mask(4, 1, 5, 7), bias(1, 8, 1, 7, spread=3.0)), tags=("shard",),
    ),
    case(
        "shard_packed", ("query", *KERNELS, *ROWS), sizes={**_SHARD, **_SELF_SIZES}, logits_soft_cap=1.5,
        extra=shared_segments, is_causal=True, tags=("shard", "bounds"),
    ),
    case(
        "shard_rotary", ("query", *KERNELS, *BIASES), sizes={**_SHARD, **_SELF_SIZES, "H": 4},
        rotary=Rotary(base=100.0), tags=("shard", "bounds"), save="qkv",
    ),
)  # fmt: skip

CASES = {"multi_head_attention": (*_LAYER, *_measured())}


def _hidden(arrays, options):
    """Tokens that no head reads; rows appended to the keys are read by every query."""
    sizes = jax.eval_shape(
        lambda: OPERATORS[0].call(**arrays, **{**options, "return_weights": True, "average_weights": False})
    )
    weights = sizes[1].shape
    S = arrays.get("key", arrays["query"]).shape[-2]
    whole, found = seen_with_bias(seen(arrays, options, (*weights[:-1], S)), arrays)
    unseen = ~whole.any((-3, -2))  # [..., S]
    blind = ~whole.any((-3, -1)) & (weights[-1] == S) & (not options.get("add_residual"))  # [..., T]
    if "key" in arrays:
        return found | {"query": blind, "key": unseen} | ({"value": unseen} if "value" in arrays else {})
    return found | {"query": blind & unseen}


def _backward(cotangents, outputs, arrays, options, wrt):
    options = dict(options)
    dweights = cotangents[1] if options.pop("return_weights", False) else None
    arguments = with_params({**arrays, **options})
    wrt = tuple(dict.fromkeys("mod_args" if name in MOD_ARGS else name for name in wrt))
    grads = multi_head_attention_bwd(cotangents[0], **arguments, dweights=dweights, wrt=wrt)
    found = {**grads.params._asdict(), **{name: getattr(grads, name) for name in ARRAYS}}
    found |= dict(zip(MOD_ARGS, found.pop("mod_args") or (), strict=False))
    return {name: x for name, x in found.items() if x is not None}


TRAITS = {
    "multi_head_attention": {
        "backward": _backward,
        "backward_wrt": OPERATORS[0].differentiable,
        "axes": {
            **dict.fromkeys(INPUTS, "BTE"),
            "query_kernel": "ENH", "key_kernel": "ENH", "value_kernel": "ENH", "out_kernel": "NHE",
            "query_bias": "NH", "key_bias": "NH", "value_bias": "NH", "out_bias": "E",
            "bias_k": "NH", "bias_v": "NH", "sink": "N",
            "bias": "BNTS", "mask": "BNTS", "query_seq_lengths": "B", "key_value_seq_lengths": "B",
            "query_segment_ids": "BT", "key_value_segment_ids": "BS",
            "query_positions": "BT", "key_value_positions": "BS", "out": "BTE", "weights": "BNTS",
            "mod_args_0": "N", "mod_args_1": "B",
        },
        "whole": MOD_ARGS,
        "hidden": _hidden,
        "sums_over_heads": ("out",),
    }
}  # fmt: skip
