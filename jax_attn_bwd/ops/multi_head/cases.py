"""Named inputs of the multi-head attention layer; the fields of its parameters are arguments of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import (
    Operator,
    bias,
    both,
    dropout_key,
    infinite_bias,
    mask,
    positions,
    segments,
)
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd.ops.dot_product import cases as dense
from jax_attn_bwd.ops.multi_head import api, dropping, reference
from jax_attn_bwd.ops.multi_head.spec import ARRAYS, PARAMS, MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head.workloads import (
    BIASES,
    INPUTS,
    KERNELS,
    ROWS,
    case,
    lengths,
    shared_segments,
)

_KEY = dropout_key(3, 5)
_ALL = (*INPUTS, *KERNELS, *BIASES, *ROWS, "sink")
_SELF = ("query", *KERNELS, *BIASES)
_SELF_SIZES = dict(S=5, Ek=6, Ev=6)
_SECOND = dict(B=(1,), T=2, S=3, N=2, K=1, H=2, Hv=1, Eq=2, Ek=2, Ev=2, Eo=2)
_SHARD = dict(B=(4,), N=8, K=4)
_DROPS: dict[str, Any] = dict(dropout_rate=0.4, out_dropout_rate=0.3)

_EDGE: dict[str, Any] = dict(tags=("edge",))


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


_MASK = mods.sliding_window(3) | mods.global_tokens(1)


def _slopes(rng, n):
    return {"mod_args_0": rng.random(n["N"])}


CASES = (
    case("plain"),
    case("self_residual", _SELF, sizes={**_SELF_SIZES, "Eo": 6}, is_causal=True, add_residual=True),
    case("weights", return_weights=True),
    case(
        "tiles", (*INPUTS, *KERNELS, *ROWS), sizes=dict(B=(1,), T=300, S=600, N=2, K=1),
        is_causal=True, tags=("ci", "check", "compile"),
    ),
    case("key_is_value", ("query", "key", *KERNELS), sizes=dict(Ev=7), local_window_size=2, **_EDGE),
    case(
        "everything_but_weights", _ALL, extra=both(mask(2, 1, 5, 7), bias(4, 5, 7, spread=3.0), _KEY),
        add_zero_attn=True, tags=("edge", "check", "compile"), **_DROPS,
    ),
    case(
        "everything", _ALL, extra=both(mask(2, 1, 5, 7), bias(4, 5, 7, spread=3.0), _KEY), is_causal=True,
        add_zero_attn=True, add_residual=True, return_weights=True, sizes=dict(Eo=6),
        tags=("ci", "check"), **_DROPS,
    ),
    case(
        "everything_qkv", _ALL, extra=both(mask(2, 1, 5, 7), bias(1, 5, 7, spread=3.0), _KEY),
        add_zero_attn=True, return_weights=True, save="qkv", **_EDGE, **_DROPS,
    ),
    case(
        "everything_probs", _ALL, extra=both(mask(2, 1, 5, 7), bias(4, 1, 7, spread=3.0), _KEY),
        add_zero_attn=True, return_weights=True, save="probs", **_EDGE, **_DROPS,
    ),
    case("probs", _ALL, add_zero_attn=True, is_causal=True, save="probs", **_EDGE),
    case(
        "average_weights", (*INPUTS, *KERNELS, "sink"), return_weights=True, average_weights=True,
        extra=mask(2, 1, 1, 7, keep=0.3), **_EDGE,
    ),
    case(
        "average_weights_dropout", (*INPUTS, *KERNELS, *ROWS), extra=_KEY, return_weights=True,
        average_weights=True, **_EDGE, **_DROPS,
    ),
    case("appended_rows", (*INPUTS, *KERNELS, *ROWS), extra=mask(2, 4, 5, 7, keep=0.1), **_EDGE),
    case("zero_row", add_zero_attn=True, extra=mask(2, 1, 5, 1), **_EDGE),
    case("bias_key", extra=bias(1, 4, 1, 7, spread=3.0), **_EDGE),
    case("bias_minus_inf", extra=infinite_bias, **_EDGE),
    case("sink", (*INPUTS, *KERNELS, "sink"), extra=mask(2, 1, 5, 7, keep=0.1), **_EDGE),
    case("dropout_broadcast", extra=_KEY, dropout_rate=0.4, broadcast_dropout=True, **_EDGE),
    case(
        "dropout_offset", (*INPUTS, *KERNELS, *ROWS), extra=_KEY, dropout_offset=(3, 1, 5, 2),
        **_EDGE, **_DROPS,
    ),
    case("dropout_all", extra=_KEY, dropout_rate=1.0, **_EDGE),
    case(
        "packed", _ALL, extra=both(segments, lengths, bias(4, 5, 7, spread=3.0), _KEY), add_zero_attn=True,
        logits_soft_cap=5.0, tags=("edge", "check"), **_DROPS,
    ),
    case("packed_alone", extra=both(segments, lengths), is_causal=True, **_EDGE),
    case("positions", extra=positions, is_causal=True, local_window_size=3, **_EDGE),
    case(
        "rotary", _ALL, extra=positions, sizes=dict(H=6), rotary=Rotary(base=100.0, size=4),
        is_causal=True, tags=("edge", "check"),
    ),
    case(
        "rotary_saved", ("query", *KERNELS[1:], *ROWS), sizes=_SELF_SIZES | dict(H=6), save="qkv",
        rotary=Rotary(interleaved=True, frequencies=(1.0, 0.3, 0.05)), add_zero_attn=True, **_EDGE,
    ),
    case(
        "packed_probs", _ALL, extra=both(segments, lengths), return_weights=True, save="probs",
        logits_soft_cap=1.5, **_EDGE,
    ),
    case(
        "capped_weights", _ALL, extra=both(segments, bias(4, 5, 7, spread=3.0)), add_zero_attn=True,
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
    case("two_batch_axes", _ALL, sizes=dict(B=(2, 3)), extra=bias(3, 1, 1, 7, spread=3.0), **_EDGE),
    *(
        case(f"T{T}_S{S}", _ALL, sizes=dict(T=T, S=S), return_weights=True, **_EDGE)
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
        sizes=_SECOND | dict(S=2), extra=both(bias(2, 1, 2, spread=3.0), _KEY), add_residual=True,
        tags=("second",), **_DROPS,
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
        return_weights=True, extra=_slopes, tags=("hidden",),
    ),
    case(
        "mod_saved", ("query", *KERNELS), sizes=_SELF_SIZES, mask_mod=_MASK, score_mod=mods.alibi,
        save="probs", extra=_slopes,
    ),
    case(
        "shard", (*INPUTS, *KERNELS, *BIASES), sizes=_SHARD, is_causal=True, extra=_KEY,
        tags=("shard",), **_DROPS,
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
    *_measured(),
)  # fmt: skip


_DIFFERENTIABLE = (*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *dense.MOD_ARGS)


def _with_params(arguments: dict) -> dict:
    params = {n: arguments.pop(n) for n in PARAMS if n in arguments}
    return {"params": MultiHeadAttentionParams(**params), **dense.with_mod_args(arguments)}


def _call(**arguments):
    outputs = api.multi_head_attention(**_with_params(arguments))
    return outputs if isinstance(outputs, tuple) else (outputs, jnp.zeros(0, outputs.dtype))


def _reference(**arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return_weights = arguments.pop("return_weights", False)
        for name in ("save", "precision", "deterministic_sums"):
            arguments.pop(name, None)
        out, weights = reference.multi_head_attention(**_with_params(_with_factors(**arguments)))
        return (out, weights) if return_weights else (out, jnp.zeros(0, out.dtype))


def _with_factors(
    dropout_key=None,
    dropout_rate=0.0,
    out_dropout_rate=0.0,
    broadcast_dropout=False,
    dropout_offset=None,
    **arguments,
):
    """The arguments of the definition, which is handed the dropout factors of the whole planes."""
    if dropout_key is None:
        return arguments
    sizes = jax.eval_shape(lambda: reference.multi_head_attention(**_with_params(dict(arguments))))
    out, weights = (x.shape for x in sizes)
    N = arguments.get("num_heads") or arguments["query_kernel"].shape[1]
    batch, (T, S) = out[:-2], weights[-2:]
    b, h, r, c = dropout_offset or (0, 0, 0, 0)
    words, u32 = dropout.key_words(dropout_key), jnp.uint32
    batches = jnp.arange(b, b + int(np.prod(batch)), dtype=u32).reshape(*batch, 1, 1)
    rows = jnp.arange(r, r + T, dtype=u32)[:, None]

    def factors(words, heads, columns, rate):
        entries = (batches[..., None], heads)
        entries = tuple(0 * x for x in entries) if broadcast_dropout else entries
        keys = dropout.head_keys(words, *entries)
        keep = dropout.keep(keys, rows, columns, rate)
        return jnp.where(keep, dropout.survivor_factor(rate), 0.0).astype(arguments["query"].dtype)

    heads = jnp.arange(h, h + N, dtype=u32)[:, None, None]
    found = {"factors": factors(words, heads, jnp.arange(c, c + S, dtype=u32), dropout_rate)}
    if out_dropout_rate:
        constant = tuple(u32(x) for x in dropping.OUT)
        words = jnp.stack(dropout.threefry((words[0], words[1]), constant))
        columns = jnp.arange(out[-1], dtype=u32)
        plane = factors(words, jnp.zeros((1, 1, 1), u32), columns, out_dropout_rate)
        found["out_factors"] = plane[..., 0, :, :]
    return arguments | found


def _hidden(arrays, options):
    """Tokens that no head reads; rows appended to the keys are read by every query."""
    sizes = jax.eval_shape(
        lambda: _call(**arrays, **{**options, "return_weights": True, "average_weights": False})
    )
    weights = sizes[1].shape
    S = arrays.get("key", arrays["query"]).shape[-2]
    whole, found = dense.with_bias(dense.seen(arrays, options, (*weights[:-1], S)), arrays)
    unseen = ~whole.any((-3, -2))  # [..., S]
    blind = ~whole.any((-3, -1)) & (weights[-1] == S) & (not options.get("add_residual"))  # [..., T]
    if "key" in arrays:
        return found | {"query": blind, "key": unseen} | ({"value": unseen} if "value" in arrays else {})
    return found | {"query": blind & unseen}


def _backward(cotangents, outputs, arrays, options, wrt):
    options = dict(options)
    dweights = cotangents[1] if options.pop("return_weights", False) else None
    arguments = _with_params({**arrays, **options})
    wrt = tuple(dict.fromkeys("mod_args" if name in dense.MOD_ARGS else name for name in wrt))
    grads = api.multi_head_attention_bwd(cotangents[0], **arguments, dweights=dweights, wrt=wrt)
    found = {**grads.params._asdict(), **{name: getattr(grads, name) for name in ARRAYS}}
    found |= dict(zip(dense.MOD_ARGS, found.pop("mod_args") or (), strict=False))
    return {name: x for name, x in found.items() if x is not None}


OPERATORS = (
    Operator(
        name="multi_head_attention",
        outputs=("out", "weights"),
        differentiable=_DIFFERENTIABLE,
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        backward=_backward,
        cases=CASES,
        axes={
            **dict.fromkeys(INPUTS, "BTE"),
            "query_kernel": "ENH", "key_kernel": "ENH", "value_kernel": "ENH", "out_kernel": "NHE",
            "query_bias": "NH", "key_bias": "NH", "value_bias": "NH", "out_bias": "E",
            "bias_k": "NH", "bias_v": "NH", "sink": "N",
            "bias": "BNTS", "mask": "BNTS", "query_seq_lengths": "B", "key_value_seq_lengths": "B",
            "query_segment_ids": "BT", "key_value_segment_ids": "BS",
            "query_positions": "BT", "key_value_positions": "BS", "out": "BTE", "weights": "BNTS",
            "mod_args_0": "N", "mod_args_1": "B",
        },
        backward_wrt=_DIFFERENTIABLE,
        sums_over_heads=("out",),
        hidden=_hidden,
        whole=dense.MOD_ARGS,
    ),
)  # fmt: skip
