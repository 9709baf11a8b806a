"""Named inputs of the multi-head attention layer; the fields of its parameters are arguments of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import mods
from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd.ops.dot_product import cases as dense
from jax_attn_bwd.ops.multi_head import api, dropping, reference
from jax_attn_bwd.ops.multi_head.spec import ARRAYS, PARAMS, MultiHeadAttentionParams

_SIZES = dict(B=(2,), T=5, S=7, N=4, K=2, H=3, Hv=5, Eq=6, Ek=7, Ev=8, Eo=9)
_SHAPES = {
    "query_kernel": "Eq N H", "query_bias": "N H", "key_kernel": "Ek K H", "key_bias": "K H",
    "value_kernel": "Ev K Hv", "value_bias": "K Hv", "out_kernel": "N Hv Eo", "out_bias": "Eo",
    "bias_k": "K H", "bias_v": "K Hv", "sink": "N",
    "query": "B T Eq", "key": "B S Ek", "value": "B S Ev",
}  # fmt: skip
_KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")
_BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")
_INPUTS = ("query", "key", "value")
_ROWS = ("bias_k", "bias_v")
_BIG = {"sink": 10.0}  # near 0 it would hide errors


def _case(
    name: str,
    given: tuple[str, ...] = (*_INPUTS, *_KERNELS, *_BIASES),
    *,
    tags: tuple[str, ...] = ("ci",),
    extra: Callable | None = None,
    sizes: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> Case:
    """`given` names the arrays; `extra(rng, sizes) -> {argument: array}` adds others."""
    n = {**_SIZES, **(sizes or {})}

    def build(rng):
        arrays = {}
        for argument in given:
            shape = []
            for letter in _SHAPES[argument].split():
                size = n[letter]
                shape += size if isinstance(size, tuple) else [size]
            # Kernels as at initialisation: heads near 1, so that the softmax is not saturated.
            spread = shape[0] ** -0.5 if argument in _KERNELS[:3] else _BIG.get(argument, 1.0)
            arrays[argument] = rng.normal(0, spread, shape)
        return arrays | (extra(rng, n) if extra else {})

    return Case(name, build, options, frozenset(tags), dtype)


def _mask(*shape, keep=0.6):
    return lambda rng, n: {"mask": rng.random(shape) < keep}


def _bias(*shape):
    return lambda rng, n: {"bias": 3 * rng.standard_normal(shape)}


def _infinite_bias(rng, n):
    bias = rng.standard_normal((2, 1, 5, 7))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[1, 0, 2] = -np.inf  # a query that sees nothing
    return {"bias": bias}


def _key(rng, n):
    return {"dropout_key": np.array([3, 5], np.uint32)}


def _lengths(rng, n):
    return {
        "query_seq_lengths": np.array([n["T"], n["T"] - 2], np.int32),
        "key_value_seq_lengths": np.array([n["S"] - 3, 0], np.int32),
    }


def _segments(rng, n):
    """Some queries and keys are of segments that the others have none of."""
    return {
        "query_segment_ids": np.sort(rng.integers(0, 3, (*n["B"], n["T"])), -1).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(1, 4, (*n["B"], n["S"])), -1).astype(np.int32),
    }


def _shared_segments(rng, n):
    ids = np.sort(rng.integers(0, 3, (*n["B"], n["T"])), -1).astype(np.int32)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def _positions(rng, n):
    return {
        "query_positions": rng.permutation(n["S"])[: n["T"]].astype(np.int32),
        "key_value_positions": np.stack([rng.permutation(n["S"]) for _ in range(2)]).astype(np.int32),
    }


def _both(*extras):
    return lambda rng, n: {k: v for extra in extras for k, v in extra(rng, n).items()}


_ALL = (*_INPUTS, *_KERNELS, *_BIASES, *_ROWS, "sink")
_SELF = ("query", *_KERNELS, *_BIASES)
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
        yield _case(f"B={B} T={T} E={E} N={N}", _SELF, sizes=sizes, tags=(tag,), dtype=dtype)
    for T in (64, 128, 512, 1024, 2048, 4096, 8192, 16384):
        sizes = dict(B=(1,), T=T, S=T, N=4, K=4, H=64, Hv=64, Eq=256, Ek=256, Ev=256, Eo=256)
        tags = ("scaling",) if T >= 512 else ("quick_scaling",)
        yield _case(f"E=256, N=4: T={T}", _SELF, sizes=sizes, tags=tags, dtype="float32")


_MASK = mods.sliding_window(3) | mods.global_tokens(1)


def _slopes(rng, n):
    return {"mod_args_0": rng.random(n["N"])}


CASES = (
    _case("plain"),
    _case("self_residual", _SELF, sizes={**_SELF_SIZES, "Eo": 6}, is_causal=True, add_residual=True),
    _case("weights", return_weights=True),
    _case(
        "tiles", (*_INPUTS, *_KERNELS, *_ROWS), sizes=dict(B=(1,), T=300, S=600, N=2, K=1),
        is_causal=True, tags=("ci", "check", "compile"),
    ),
    _case("key_is_value", ("query", "key", *_KERNELS), sizes=dict(Ev=7), local_window_size=2, **_EDGE),
    _case(
        "everything_but_weights", _ALL, extra=_both(_mask(2, 1, 5, 7), _bias(4, 5, 7), _key),
        add_zero_attn=True, tags=("edge", "check", "compile"), **_DROPS,
    ),
    _case(
        "everything", _ALL, extra=_both(_mask(2, 1, 5, 7), _bias(4, 5, 7), _key), is_causal=True,
        add_zero_attn=True, add_residual=True, return_weights=True, sizes=dict(Eo=6),
        tags=("ci", "check"), **_DROPS,
    ),
    _case(
        "everything_qkv", _ALL, extra=_both(_mask(2, 1, 5, 7), _bias(1, 5, 7), _key),
        add_zero_attn=True, return_weights=True, save="qkv", **_EDGE, **_DROPS,
    ),
    _case(
        "everything_probs", _ALL, extra=_both(_mask(2, 1, 5, 7), _bias(4, 1, 7), _key),
        add_zero_attn=True, return_weights=True, save="probs", **_EDGE, **_DROPS,
    ),
    _case("probs", _ALL, add_zero_attn=True, is_causal=True, save="probs", **_EDGE),
    _case(
        "average_weights", (*_INPUTS, *_KERNELS, "sink"), return_weights=True, average_weights=True,
        extra=_mask(2, 1, 1, 7, keep=0.3), **_EDGE,
    ),
    _case(
        "average_weights_dropout", (*_INPUTS, *_KERNELS, *_ROWS), extra=_key, return_weights=True,
        average_weights=True, **_EDGE, **_DROPS,
    ),
    _case("appended_rows", (*_INPUTS, *_KERNELS, *_ROWS), extra=_mask(2, 4, 5, 7, keep=0.1), **_EDGE),
    _case("zero_row", add_zero_attn=True, extra=_mask(2, 1, 5, 1), **_EDGE),
    _case("bias_key", extra=_bias(1, 4, 1, 7), **_EDGE),
    _case("bias_minus_inf", extra=_infinite_bias, **_EDGE),
    _case("sink", (*_INPUTS, *_KERNELS, "sink"), extra=_mask(2, 1, 5, 7, keep=0.1), **_EDGE),
    _case("dropout_broadcast", extra=_key, dropout_rate=0.4, broadcast_dropout=True, **_EDGE),
    _case(
        "dropout_offset", (*_INPUTS, *_KERNELS, *_ROWS), extra=_key, dropout_offset=(3, 1, 5, 2),
        **_EDGE, **_DROPS,
    ),
    _case("dropout_all", extra=_key, dropout_rate=1.0, **_EDGE),
    _case(
        "packed", _ALL, extra=_both(_segments, _lengths, _bias(4, 5, 7), _key), add_zero_attn=True,
        logits_soft_cap=5.0, tags=("edge", "check"), **_DROPS,
    ),
    _case("packed_alone", extra=_both(_segments, _lengths), is_causal=True, **_EDGE),
    _case("positions", extra=_positions, is_causal=True, local_window_size=3, **_EDGE),
    _case(
        "rotary", _ALL, extra=_positions, sizes=dict(H=6), rotary=Rotary(base=100.0, size=4),
        is_causal=True, tags=("edge", "check"),
    ),
    _case(
        "rotary_saved", ("query", *_KERNELS[1:], *_ROWS), sizes=_SELF_SIZES | dict(H=6), save="qkv",
        rotary=Rotary(interleaved=True, frequencies=(1.0, 0.3, 0.05)), add_zero_attn=True, **_EDGE,
    ),
    _case(
        "packed_probs", _ALL, extra=_both(_segments, _lengths), return_weights=True, save="probs",
        logits_soft_cap=1.5, **_EDGE,
    ),
    _case(
        "capped_weights", _ALL, extra=_both(_segments, _bias(4, 5, 7)), add_zero_attn=True,
        return_weights=True, logits_soft_cap=1.5, **_EDGE,
    ),
    _case("no_query_kernel", (*_INPUTS, *_KERNELS[1:]), sizes=dict(Eq=3), **_EDGE),
    _case("no_key_kernel", (*_INPUTS, "query_kernel", "value_kernel"), sizes=dict(Ek=3), **_EDGE),
    _case(
        "no_value_kernel", (*_INPUTS, "query_kernel", "key_kernel", "out_kernel"), sizes=dict(Hv=8),
        **_EDGE,
    ),
    _case(
        "no_kernels", (*_INPUTS, *_ROWS), num_heads=4, return_weights=True,
        sizes=dict(Ek=6, H=6, Hv=8), **_EDGE,
    ),
    _case("no_kernels_at_all", ("query",), num_heads=3, is_causal=True, scale=0.7, **_EDGE),
    _case("no_batch", sizes=dict(B=()), **_EDGE),
    _case("two_batch_axes", _ALL, sizes=dict(B=(2, 3)), extra=_bias(3, 1, 1, 7), **_EDGE),
    *(
        _case(f"T{T}_S{S}", _ALL, sizes=dict(T=T, S=S), return_weights=True, **_EDGE)
        for T, S in ((0, 3), (3, 0), (1, 1))
    ),
    _case("T3_S0_no_rows", sizes=dict(T=3, S=0), **_EDGE),
    _case(
        "second", ("query", "query_kernel", "key_kernel", "value_kernel", "out_kernel"),
        sizes={**_SECOND, "S": 2}, is_causal=True, tags=("second",),
    ),
    _case(
        "second_weights", (*_INPUTS, "query_kernel", *_ROWS), return_weights=True,
        sizes=_SECOND | dict(Ev=1), extra=_mask(1, 1, 2, 3), tags=("second",),
    ),
    _case(
        "second_probs", ("query", "value_kernel", "out_kernel", "sink"), save="probs", num_heads=2,
        sizes=_SECOND | dict(S=2), extra=_both(_bias(2, 1, 2), _key), add_residual=True,
        tags=("second",), **_DROPS,
    ),
    _case(
        "second_packed", (*_INPUTS, "query_kernel", *_ROWS), logits_soft_cap=5.0,
        sizes=_SECOND | dict(Ev=1, S=2), extra=_shared_segments, tags=("second",),
    ),
    _case(
        "second_rotary", (*_INPUTS, "query_kernel", "key_kernel"), sizes=_SECOND | dict(Ev=1),
        rotary=Rotary(interleaved=True, frequencies=(0.3,)), tags=("second",),
    ),
    _case(
        "mod", (*_INPUTS, *_KERNELS, *_ROWS), mask_mod=_MASK, score_mod=mods.alibi, add_zero_attn=True,
        return_weights=True, extra=_slopes, tags=("hidden",),
    ),
    _case(
        "mod_saved", ("query", *_KERNELS), sizes=_SELF_SIZES, mask_mod=_MASK, score_mod=mods.alibi,
        save="probs", extra=_slopes,
    ),
    _case(
        "shard", (*_INPUTS, *_KERNELS, *_BIASES), sizes=_SHARD, is_causal=True, extra=_key,
        tags=("shard",), **_DROPS,
    ),
    _case(
        "shard_rows", (*_INPUTS, *_KERNELS, *_ROWS, "sink"), sizes=_SHARD, add_zero_attn=True,
        return_weights=True, extra=_both(_mask(4, 1, 5, 7), _bias(1, 8, 1, 7)), tags=("shard",),
    ),
    _case(
        "shard_packed", ("query", *_KERNELS, *_ROWS), sizes={**_SHARD, **_SELF_SIZES}, logits_soft_cap=1.5,
        extra=_shared_segments, is_causal=True, tags=("shard", "bounds"),
    ),
    _case(
        "shard_rotary", ("query", *_KERNELS, *_BIASES), sizes={**_SHARD, **_SELF_SIZES, "H": 4},
        rotary=Rotary(base=100.0), tags=("shard", "bounds"), save="qkv",
    ),
    *_measured(),
)  # fmt: skip


_DIFFERENTIABLE = (*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *dense.MOD_ARGS)


def _with_params(arguments: dict) -> dict:
    params = {n: arguments.pop(n) for n in PARAMS if n in arguments}
    return {"params": MultiHeadAttentionParams(**params), **dense.mod_cases.with_mod_args(arguments)}


def _call(**arguments):
    outputs = api.multi_head_attention(**_with_params(arguments))
    return outputs if isinstance(outputs, tuple) else (outputs, jnp.zeros(0, outputs.dtype))


def _reference(**arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return_weights = arguments.pop("return_weights", False)
        for name in ("save", "precision", "deterministic"):
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
            **dict.fromkeys(_INPUTS, "BTE"),
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
