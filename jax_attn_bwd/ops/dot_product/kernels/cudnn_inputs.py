"""What cuDNN reads of a call of dense attention, and which calls it is asked for.

It takes causality, windows to the left of it and lengths by index, and skips what they hide. All else that
hides, masks, biases, segments, positions, is handed to it as one bias that spans T x S, in the dtype of the
query; so are lengths and windows where there is such a bias. Head sizes are padded to a multiple of 8, both
the same, and with a bias T and S to even numbers.
"""

import math
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import pallas, sharding, targets
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import cudnn_calls
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.cudnn_spec import Arrays, Call
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

HEAD = 8  # head sizes are padded to a multiple
# What hides, as in `jax.nn`: cuDNN subtracts larger numbers wrongly, -inf among them.
HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
HUGE = 2.0**10  # a row whose largest bias is beyond is shifted to 0, so that nothing of it is below HIDDEN
ELEMENTS = 2**31  # of query on a device; from there on dq and dk are silently wrong
KEYS_WITH_BIAS = 2**15  # with more the backward reads beyond its memory
_DETERMINISTIC = re.compile(r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(?!=(false|0)\b)\b")


class Prepared(NamedTuple):
    """What is handed over, and what it leaves to be mended."""

    arrays: Arrays
    shift: jax.Array | None  # float32 [B|1, T, N|1]: what was taken off the bias of each row; None = 0


def unsupported(call: Options, operands: Operands) -> str | None:
    """Why cuDNN cannot run this call; None if it can."""
    options = KernelOptions.of(call, operands.mask)
    for reason in (_of_installation, _of_options, _of_operands):
        if (found := reason(options, operands)) is not None:
            return found
    return kernel_inputs.sharded_sequence(operands)


def _of_installation(options: KernelOptions, operands: Operands) -> str | None:
    if (reason := cudnn_calls.unknown()) is not None:
        return reason
    if found := _DETERMINISTIC.search(os.environ.get("XLA_FLAGS", "")):
        return f"XLA crashes where two calls of cuDNN's backward are alike, under {found[0]}"
    return None


def _of_options(options: KernelOptions, operands: Operands) -> str | None:
    if options.mask_mod is not None or options.score_mod is not None:
        return "it takes no functions; give what mask_mod hides as a mask, and what score_mod adds as a bias"
    if options.logits_soft_cap is not None:
        return "it has no soft cap"
    if options.dropout_rate:
        return "its dropout has other random bits than dropout_key gives everywhere else"
    if not options.scale > 0:
        return f"it takes a positive scale, got {options.scale}"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    window = options.window
    if window is not None and not (options.is_causal or window[1] == 0):
        return f"its windows are to the left of causal attention, got {window}; give a mask"
    return None


def _of_operands(options: KernelOptions, operands: Operands) -> str | None:
    q, v, bias = operands.query, operands.value, operands.bias
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if str(q.dtype) not in HIDDEN:
        return f"it multiplies bfloat16 and float16, not {q.dtype}"
    if bias is not None and bias.dtype != q.dtype:
        return f"its bias has the dtype of query, {q.dtype}, not {bias.dtype}; cast it if that will do"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    largest = 256 if pallas.is_interpreted(cudnn_calls.NAME) or _is_hopper() else 128
    if max(q.shape[-1], v.shape[-1]) > largest:
        return f"head sizes go up to 128, on Hopper to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    (T, N), S = q.shape[-3:-1], operands.key.shape[-3]
    plane = spans_plane(operands)
    if T == S == 1 and not plane:
        return "it has no backward for one query and one key"
    if call_of(options, operands).window is not None and T > S:
        return f"its windows need as many keys as queries, or more, got T = {T} and S = {S}; give a mask"
    if plane and S > KEYS_WITH_BIAS:
        return f"with a bias, mask, segments or positions it takes up to {KEYS_WITH_BIAS} keys, got {S}"
    spec = sharding.explicit_spec(q)
    shards = math.prod(sharding.axis_size(q, names) for names in spec if names is not None)
    if math.prod(q.shape[:-3]) * T * N * _head(operands) // shards >= ELEMENTS:
        return f"its dq and dk are wrong for {ELEMENTS} elements of query on a device and more"
    return None


def _is_hopper() -> bool:
    return isinstance(targets.generation("mosaic_gpu", ("hopper",)), targets.Generation)


def _head(operands: Operands) -> int:
    """Both head sizes, padded."""
    return kernel_inputs.whole(max(operands.query.shape[-1], operands.value.shape[-1]), HEAD)


def spans_plane(operands: Operands) -> bool:
    """Whether something hides, or adds, that cuDNN takes as a bias of T x S alone."""
    hides = operands.mask.has("elements", "query_segment_ids")
    return operands.bias is not None or hides or _by_position(operands)


def _by_position(operands: Operands) -> bool:
    return operands.mask.is_banded and operands.mask.has_positions


def call_of(options: KernelOptions, operands: Operands, interpret: bool = False) -> Call:
    """What cuDNN is told at trace time."""
    T, window = operands.query.shape[-3], options.window
    # a supported window that is not causal has nothing to its right
    is_causal = (options.is_causal or window is not None) and not _by_position(operands)
    reach = None if window is None or window[0] >= T - 1 or spans_plane(operands) else window[0] + 1
    return Call(options.scale, is_causal, reach, interpret)


def prepare(options: KernelOptions, operands: Operands) -> Prepared:
    """The arrays that cuDNN reads; what no query sees of keys and values is 0."""
    plane = spans_plane(operands)
    length = 2 if plane else 1
    refs = kernel_inputs.inputs(options, operands, None, kernel_inputs.Padding(length, length, HEAD))
    q, k, v = (kernel_inputs.pad(x, {-1: _head(operands)}) for x in (refs.q, refs.k, refs.v))
    arrays = Arrays(q, k, v)
    if not plane:
        return Prepared(_with_ends(arrays, refs.rows_end, refs.columns_end), None)
    bias, shift = _plane(operands)
    return Prepared(arrays._replace(bias=bias), shift)


def _with_ends(arrays: Arrays, rows_end: Any, columns_end: Any) -> Arrays:
    """A length of 0 is told as 1: what cuDNN makes of none, it does not say. These rows are mended later."""
    if rows_end is None and columns_end is None:
        return arrays
    B = arrays.q.shape[0]

    def ends(x, n):
        return jnp.broadcast_to(jnp.full((1,), n, jnp.int32) if x is None else jnp.maximum(x, 1), (B,))

    return arrays._replace(
        rows_end=ends(rows_end, arrays.q.shape[1]), columns_end=ends(columns_end, arrays.k.shape[1])
    )


def _plane(operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """(all that hides or adds, as a bias `[B|1, N|1, T, S]`; `Prepared.shift`)."""
    (batch, T, S, _, G), dtype = operands.sizes, operands.query.dtype
    hidden, shift = jnp.asarray(HIDDEN[str(dtype)], jnp.float32), None
    sees = _by_head(visibility.of_plane(operands.mask, operands.bias, T, S, len(batch), G), operands)
    if operands.bias is None:
        bias = jnp.where(sees, 0, hidden)
    else:
        bias = _in_batch(operands.bias.astype(jnp.float32), operands)
        top = jnp.where(sees, bias, -jnp.inf).max(-1, keepdims=True)
        is_huge = (jnp.abs(top) > HUGE) & jnp.isfinite(top)
        top = jnp.where(is_huge, top, 0)
        bias = jnp.where(sees, jnp.maximum(bias - top, hidden), hidden)
        shift = jnp.swapaxes(top[..., 0], -1, -2)
    widths = [(0, 0), (0, 0), (0, T % 2), (0, S % 2)]
    return jnp.pad(bias, widths, constant_values=HIDDEN[str(dtype)]).astype(dtype), shift


def _by_head(x: Any, operands: Operands) -> jax.Array:
    """`[..., K|1, G|1, T|1, S|1]` as `[B|1, N|1, T, S]`."""
    (T, N), (S, K) = operands.query.shape[-3:-1], operands.key.shape[-3:-1]
    *batch, k, g, _, _ = x.shape
    heads = (1, 1) if k == g == 1 else (K, N // K)
    x = jnp.broadcast_to(x, (*batch, *heads, T, S))
    return _in_batch(x.reshape(*batch, math.prod(heads), T, S), operands)


def _in_batch(x: jax.Array, operands: Operands) -> jax.Array:
    """`[..., N|1, T|1, S|1]` with its batch axes merged into one, of size 1 if it broadcasts over all."""
    batch = operands.query.shape[:-3]
    x = to_rank(x, len(batch) + 3)
    if any(n != 1 for n in x.shape[: len(batch)]):
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    return kernel_inputs.merged(x, 3)
