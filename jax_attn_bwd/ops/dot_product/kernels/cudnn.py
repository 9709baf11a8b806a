"""cuDNN's fused attention: the calls it is asked for, what it reads of them, its primitives, the rules.

It takes causality, windows to the left of it and lengths by index, and skips what they hide. All else that
hides, masks, biases, segments, positions, is handed to it as one bias that spans T x S, in the dtype of the
query; so are lengths and windows where there is such a bias. Head sizes are padded to a multiple of 8, both
the same, and with a bias T and S to even numbers.

`jax.nn.dot_product_attention(implementation="cudnn")` binds the same two primitives of JAX. With
P = exp(logits - stat):

    forward     out = P v,   stat = log sum_s exp(logits_s)
    backward    delta = rowsum(dout * out),   dlogits = P * (dout v^T - delta)
                dq = scale dlogits k,   dk = scale dlogits^T q,   dv = P^T dout,   dbias = dlogits

so P comes from the `stat` and delta from the `out` that the backward is handed: they may be of more keys
than these. `stat` is float32. A row whose bias was shifted by c has lse = c + stat. With a sink
(base r = max(c, sink)) the row sum has one more term:

    log l = log(exp(c - r + stat) + exp(sink - r)),   lse = r + log l,   out exp(c - r + stat - log l)

What else delta holds, c = delta - rowsum(dout * out), the cotangent of lse and what rounding took from the
output, is of a second call of the backward. It differs in its values, which are 0, and in

    dout = (w_1, w_2, w_3, 0, ...),   out = (c_1, c_2, c_3, 0, ...),   c = sum_i w_i c_i        of each row

so that its dlogits are P (0 - c): gradients are linear in them, and the two add up. Three numbers of 8 or 11
bits hold a float32.

The functions are private to JAX: `KNOWN` has the arguments of those that are known, and `unknown()` says why
others are not called.

Tests have a twin of both in jnp, the same algebra rounded where cuDNN rounds.
"""

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import fusion, pallas, sharding, targets
from jax_attn_bwd._core.numerics import fast_two_sum, to_rank
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product import mask as mask_fields
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import (
    AXES,
    DotProductAttentionGrads,
    KernelOptions,
    Operands,
    Options,
    Residuals,
    Result,
)

NAME = "cudnn"
TWIN: Any = None  # has `forward` and `backward`, where tests ask for calls to be interpreted

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_ARRAYS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
    "page_table_k", "page_table_v",
)  # fmt: skip
_SAVED = ("activation", "fwd_output", "grad_output")
_OPTIONS = frozenset(
    ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
)
# The options of the two primitives beside the forward's `is_training`, and what those beyond `_OPTIONS` are.
KNOWN = {
    "JAX 0.10": (_OPTIONS, {}),
    "JAX 0.12": (
        _OPTIONS | {"score_mod_name", "score_mod_jaxpr"},
        {"score_mod_name": None, "score_mod_jaxpr": None},
    ),
}

HEAD = 8  # head sizes are padded to a multiple
# What hides, as in `jax.nn`: cuDNN subtracts larger numbers wrongly, -inf among them.
HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
HUGE = 2.0**10  # a row whose largest bias is beyond is shifted to 0, so that nothing of it is below HIDDEN
ELEMENTS = 2**31  # of query on a device; from there on dq and dk are silently wrong
KEYS_WITH_BIAS = 2**15  # with more the backward reads beyond its memory
MOST_FORMED = 2**31  # bytes of a bias that the caller did not give; the portable path forms none
NOTHING = 2.0**100  # the lse of rows that see nothing: their P is 0
# of the parts of c in the second call of the backward: float16 has few exponents
WEIGHTS = {"bfloat16": (1.0, 1.0, 1.0), "float16": (2.0**12, 1.0, 2.0**-12)}
_DETERMINISTIC = re.compile(r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(?!=(false|0)\b)\b")


class _Known(NamedTuple):
    """What the versions up to `last` lack, or have wrong, as their makers and users say."""

    last: int  # 91002 is 9.10.2
    where: Callable[[KernelOptions, Operands], bool]
    words: str
    first: int = 0


def _is_card(*majors_and_minors: tuple[int, int]) -> Callable[..., bool]:
    return lambda options, operands: targets.compute_capability() in majors_and_minors


def _has_ends(operands: Operands) -> bool:
    """Tells whether ends are handed over, as `_with_ends` does."""
    has_lengths = operands.mask.has("query_seq_lengths", "key_value_seq_lengths")
    return (has_lengths or operands.query.shape[-3] == 1) and not spans_plane(operands)


_FAULTS = (
    _Known(90699, _is_card((10, 0), (12, 0)), "it does not know this GPU"),
    _Known(91099, _is_card((10, 3)), "it does not know this GPU"),
    _Known(92499, _is_card((10, 7)), "it does not know this GPU"),
    _Known(91001, lambda options, operands: True, "its results are wrong", first=91000),
    _Known(
        91400,
        lambda options, operands: (
            options.window is not None and _has_ends(operands) and operands.key.shape[-3] > 1024
        ),
        "it fails with windows and lengths over 1,024 keys",
        first=91400,
    ),
    _Known(
        91500,
        lambda options, operands: operands.key.shape[-3] % 128 > 0 and not _has_ends(operands),
        "its backward reads beyond keys whose number 128 does not divide",
    ),
)


class Call(NamedTuple):
    """The arguments of a call that are known at trace time.

    Attributes:
      scale: multiplies the products; positive.
      is_causal: a row sees the columns up to its own index.
      window: with `is_causal`, how many columns a row sees, its own included; None = all.
      interpret: compute it in jnp, by `TWIN`.
    """

    scale: float
    is_causal: bool
    window: int | None
    interpret: bool


class Arrays(NamedTuple):
    """The arrays that both directions read; bfloat16 or float16 but for the ends."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    bias: jax.Array | None = None  # [B|1, N|1, T, S]
    rows_end: jax.Array | None = None  # int32 [B], at least 1: rows from here on see nothing; give both ends
    columns_end: jax.Array | None = None  # int32 [B], at least 1: columns from here on are not seen


class Prepared(NamedTuple):
    """The arrays that are handed over, and what their bias left out."""

    arrays: Arrays
    shift: jax.Array | None  # float32 [B|1, T, N|1]: what was taken off the bias of each row; None = 0


def supports(call: Options, operands: Operands) -> str | None:
    """Returns why cuDNN cannot run this call; None if it can."""
    options = KernelOptions.of(call, operands.mask)
    reason = unknown() or _of_options(options) or _of_operands(options, operands)
    return reason or _of_library(options, operands) or kernel_inputs.sharded_sequence(operands)


def _of_library(options: KernelOptions, operands: Operands) -> str | None:
    """Returns the reason that lies in the library, of the GPU that is here; others have the newest."""
    if pallas.is_interpreted(NAME) or not targets.is_here():
        return None
    if isinstance(found := version(), str):
        return found
    for fault in _FAULTS:
        if fault.first <= found <= fault.last and fault.where(options, operands):
            dotted = f"{found // 10_000}.{found // 100 % 100}.{found % 100}"
            return f"cuDNN is {dotted}: {fault.words}; `pip install -U nvidia-cudnn-cu13` brings a newer one"
    return None


@cache
def version() -> int | str:
    """Returns the version of cuDNN that JAX finds, 91002 for 9.10.2, or why it finds none."""
    try:
        return int(importlib.import_module("jax._src.lib").cuda_versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return f"JAX finds no cuDNN here ({error}); `pip install -U 'jax[cuda13]'` brings one"


def _of_options(options: KernelOptions) -> str | None:
    """Returns the reason that lies in flags, and in what is asked for."""
    if found := _DETERMINISTIC.search(os.environ.get("XLA_FLAGS", "")):
        return f"XLA crashes where two calls of cuDNN's backward are alike, under {found[0]}"
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
    """Returns the reason that lies in shapes and dtypes."""
    # shapes and dtypes
    q, v, bias = operands.query, operands.value, operands.bias
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if str(q.dtype) not in HIDDEN:
        return f"it multiplies bfloat16 and float16, not {q.dtype}"
    if bias is not None and bias.dtype != q.dtype:
        return f"its bias has the dtype of query, {q.dtype}, not {bias.dtype}; cast it if that will do"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    is_hopper = isinstance(targets.generation("mosaic_gpu", ("hopper",)), targets.Generation)
    largest = 256 if pallas.is_interpreted(NAME) or is_hopper else 128
    if max(q.shape[-1], v.shape[-1]) > largest:
        return f"head sizes go up to 128, on Hopper to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    # where it is known to be wrong, or to fail
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
    if plane and (formed := _formed(operands) // shards) > MOST_FORMED:
        return f"a bias of {formed / 2**30:.1f} GiB would be formed of what hides and adds, 2 are allowed"
    if math.prod(q.shape[:-3]) * T * N * _head(operands) // shards >= ELEMENTS:
        return f"its dq and dk are wrong for {ELEMENTS} elements of query on a device and more"
    return None


def _head(operands: Operands) -> int:
    """Returns both head sizes, padded."""
    return kernel_inputs.whole(max(operands.query.shape[-1], operands.value.shape[-1]), HEAD)


def spans_plane(operands: Operands) -> bool:
    """Tells whether something hides, or adds, that cuDNN takes as a bias of T x S alone."""
    hides = operands.mask.has("elements", "query_segment_ids")
    return operands.bias is not None or hides or _by_position(operands)


def _formed(operands: Operands) -> int:
    """Counts the bytes of the bias that is formed; 0 where the caller gave as large an array."""
    (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
    hides = {name: operands.array(name) for name in ("bias", *mask_fields.AXES)}
    given = {name: x for name, x in hides.items() if x is not None}
    of_batch = any(math.prod(x.shape[: x.ndim - len(AXES[name])]) > 1 for name, x in given.items())
    of_heads = {"bias", "elements"} & operands.arrays_with("n").keys()
    elements = (math.prod(batch) if of_batch else 1) * (N if of_heads else 1) * T * S
    is_given = any(given[name].size >= elements for name in {"bias", "elements"} & given.keys())
    return 0 if is_given else elements * operands.query.dtype.itemsize


def _by_position(operands: Operands) -> bool:
    """Tells whether causality or a window goes by positions, not by indices."""
    return operands.mask.is_banded and operands.mask.has_positions


def call_of(options: KernelOptions, operands: Operands, interpret: bool = False) -> Call:
    """Returns the arguments of a call that are known at trace time."""
    T, window = operands.query.shape[-3], options.window
    # a supported window that is not causal has nothing to its right
    is_causal = (options.is_causal or window is not None) and not _by_position(operands)
    reach = None if window is None or window[0] >= T - 1 or spans_plane(operands) else window[0] + 1
    return Call(options.scale, is_causal, reach, interpret)


def prepare(options: KernelOptions, operands: Operands) -> Prepared:
    """Prepares the arrays that cuDNN reads; what no query sees of keys and values is 0."""
    # q [B, T, N, H], k and v [B, S, K, H]
    plane, S = spans_plane(operands), operands.key.shape[-3]
    length = 2 if plane else 1
    # Where half of the last 128 keys is left, rows whose stat is below -88 get NaN for dq beside a bias.
    of_keys = 128 if plane and S % 128 == 64 else length
    refs = kernel_inputs.inputs(options, operands, None, kernel_inputs.Padding(length, of_keys, HEAD))
    q, k, v = (kernel_inputs.pad(x, {-1: _head(operands)}) for x in (refs.q, refs.k, refs.v))
    arrays = Arrays(q, k, v)
    # what hides: by index alone, or all of it in one bias
    if not plane:
        return Prepared(_with_ends(arrays, refs.rows_end, refs.columns_end), None)
    bias, shift = _plane(operands, k.shape[1] - S)
    return Prepared(arrays._replace(bias=bias), shift)


def _with_ends(arrays: Arrays, rows_end: Any, columns_end: Any) -> Arrays:
    """Adds where rows and columns end, at 1 where a length is 0: cuDNN does not say what it makes of that.

    These rows are mended later. One query alone has ends, too: without them its dk and dv are NaN where its
    stat is far below 0.
    """
    if rows_end is None and columns_end is None and arrays.q.shape[1] > 1:
        return arrays
    B = arrays.q.shape[0]

    def ends(x, n):
        return jnp.broadcast_to(jnp.full((1,), n, jnp.int32) if x is None else jnp.maximum(x, 1), (B,))

    return arrays._replace(
        rows_end=ends(rows_end, arrays.q.shape[1]), columns_end=ends(columns_end, arrays.k.shape[1])
    )


def _plane(operands: Operands, more_keys: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns (all that hides or adds, as a bias `[B|1, N|1, T, S]` of padded sizes; `Prepared.shift`)."""
    # who sees whom, [B|1, N|1, T, S]
    T, dtype = operands.query.shape[-3], operands.query.dtype
    hidden, shift = jnp.asarray(HIDDEN[str(dtype)], jnp.float32), None
    sees = _by_head(visibility.of_plane(operands.mask, operands.bias, operands.sizes), operands)
    # a bias far from 0 is shifted, row by row: what hides must stay far below what is seen
    if operands.bias is None:
        bias = jnp.where(sees, 0, hidden)
    else:
        bias = kernel_inputs.merge_batch(operands, operands.bias.astype(jnp.float32), 3)
        top = jnp.where(sees, bias, -jnp.inf).max(-1, keepdims=True)
        is_huge = (jnp.abs(top) > HUGE) & jnp.isfinite(top)
        top = jnp.where(is_huge, top, 0)
        bias = jnp.where(sees, jnp.maximum(bias - top, hidden), hidden)
        shift = jnp.swapaxes(top[..., 0], -1, -2)
    widths = [(0, 0), (0, 0), (0, T % 2), (0, more_keys)]
    return jnp.pad(bias, widths, constant_values=HIDDEN[str(dtype)]).astype(dtype), shift


def _by_head(x: Any, operands: Operands) -> jax.Array:
    """Lays `[..., K|1, G|1, T|1, S|1]` as `[B|1, N|1, T, S]`."""
    (T, N), (S, K) = operands.query.shape[-3:-1], operands.key.shape[-3:-1]
    *batch, k, g, _, _ = x.shape
    heads = (1, 1) if k == g == 1 else (K, N // K)
    x = jnp.broadcast_to(x, (*batch, *heads, T, S))
    return kernel_inputs.merge_batch(operands, x.reshape(*batch, math.prod(heads), T, S), 3)


def run_forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes (out `[B, T, N, H]`, stat float32 `[B, N, T]`); rows that see nothing hold anything."""
    return _over_batch(partial(_bound_forward, call))(arrays)


def run_backward(
    call: Call, arrays: Arrays, stat: jax.Array, out: jax.Array, dout: jax.Array, with_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes (dq, dk, dv, dbias); what lies beyond the ends holds anything."""
    if arrays.bias is None:
        with_bias = False
    run = _over_batch(partial(_bound_backward, call, with_bias), sums_bias=with_bias)
    return run(arrays, stat, out, dout)


class _Private(NamedTuple):
    """The parts of JAX's module that are used."""

    forward: Any  # primitives, without rules for vmap and partitioning
    backward: Any
    mask_types: dict[tuple[bool, bool], Any]  # (causal, with ends) -> `MaskType`
    layout: int  # BTNH
    more: dict[str, Any]  # options beyond `_OPTIONS`


def unknown() -> str | None:
    """Returns why the primitives of the JAX that is installed cannot be called; None if they can."""
    found = _private()
    if isinstance(found, _Private):
        return None
    return (
        f"JAX {jax.__version__} is not known: its private functions are not those of "
        f"{' or '.join(KNOWN)} ({found})"
    )


def _expected() -> _Private:
    """Returns JAX's primitives, for a call that `unknown` has let pass."""
    found = _private()
    assert isinstance(found, _Private)
    return found


@cache
def _private() -> _Private | str:
    """Returns JAX's primitives, or what is not as expected."""
    # the options of both primitives, and the names of what else is used
    try:
        module: Any = importlib.import_module(_MODULE)
        forms = [
            _form(getattr(module, f"_dot_product_attention_{name}_cuda_lowering"), arrays)
            for name, arrays in (("fwd", _ARRAYS), ("bwd", (*_ARRAYS, *_SAVED)))
        ]
        of_type = {
            (False, False): module.MaskType.NO_MASK,
            (True, False): module.MaskType.CAUSAL,
            (False, True): module.MaskType.PADDING,
            (True, True): module.MaskType.PADDING_CAUSAL,
        }
        found = module._dot_product_attention_fwd_p, module._dot_product_attention_bwd_p, of_type
        layout = module.AttentionLayout.BTNH.value
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    # those of a JAX that is known
    for options, more in KNOWN.values():
        if forms == [options | {"is_training"}, options]:
            return _Private(*found, layout, more)
    return f"they take {sorted(forms[0] | forms[1])}"


def _form(lowering: Callable[..., Any], arrays: tuple[str, ...]) -> frozenset[str]:
    """Returns the options of a primitive, which its lowering takes by name or after the arrays."""
    parameters = inspect.signature(lowering).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    expected = ("ctx", *arrays)
    if tuple(names[: len(expected)]) != expected:
        raise TypeError(f"arrays {names[1 : len(expected)]}")
    return frozenset(names[len(expected) :])


def _options(call: Call, arrays: Arrays, with_bias: bool) -> dict[str, Any]:
    """Returns the options that both primitives take."""
    private = _expected()
    return {
        "scale": call.scale,
        "seed": 42,  # of a dropout that does not take place
        "dropout_rate": 0.0,
        "variadic_args": (arrays.bias is not None, with_bias),
        "mask_type": private.mask_types[call.is_causal, arrays.rows_end is not None],
        "layout": private.layout,
        "sliding_window_length": call.window,
        **private.more,
    }


def _bound(arrays: Arrays) -> list[jax.Array]:
    """Lists the ten arrays that both primitives take; what is not used has no elements."""
    given = [*arrays, None, None, None, None]
    return [jnp.zeros(0, arrays.q.dtype) if x is None else x for x in given]


def _bound_forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    if call.interpret:
        return TWIN.forward(call, arrays)
    options = _options(call, arrays, with_bias=arrays.bias is not None)
    out, stat = _expected().forward.bind(*_bound(arrays), **options, is_training=True)
    return out, stat


def _bound_backward(
    call: Call, with_bias: bool, arrays: Arrays, stat: jax.Array, out: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    if call.interpret:
        dq, dk, dv, dbias = TWIN.backward(call, arrays, stat, out, dout)
        return dq, dk, dv, dbias if with_bias else None
    given = (*_bound(arrays), stat, out, dout)
    dq, dk, dv, *dbias = _expected().backward.bind(*given, **_options(call, arrays, with_bias))
    return dq, dk, dv, dbias[0] if dbias else None


def _over_batch(f: Callable[..., Any], sums_bias: bool = False) -> Callable[..., Any]:
    """Returns `f(arrays, *more)`; under `jax.vmap` it merges the new axis with the batch axis of all arrays.

    With `sums_bias` the last of the results is the gradient of the bias, summed over the batch if that
    broadcasts.
    """
    call = jax.custom_batching.custom_vmap(f)

    @call.def_vmap
    def rule(size, in_batched, arrays, *more):
        B = arrays.q.shape[1 if in_batched[0].q else 0]

        # [size, B, ...] -> [size B, ...] of everything, whether it was batched or not
        def merged(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, B, *x.shape[2:]))
            return x.reshape(size * B, *x.shape[2:])

        # but a bias that is one for all stays so, where its gradient is not asked for
        one = sums_bias and arrays.bias.shape[1 if in_batched[0].bias else 0] == 1
        shared = not sums_bias and arrays.bias is not None and not in_batched[0].bias
        if shared and arrays.bias.shape[0] == 1:  # one for all
            given = arrays._replace(bias=None)
            given = jax.tree.map(merged, given, in_batched[0]._replace(bias=None))._replace(bias=arrays.bias)
        else:
            given = jax.tree.map(merged, arrays, in_batched[0])
        results = call(given, *jax.tree.map(merged, more, tuple(in_batched[1:])))
        # and back; the gradient of a bias with one batch entry is summed over the batch
        parted = jax.tree.map(lambda x: x.reshape(size, B, *x.shape[1:]), results)
        if one:
            parted = (*parted[:-1], parted[-1].sum(1, keepdims=True, dtype=parted[-1].dtype))
        return parted, jax.tree.map(lambda _: True, parted)

    return call


# ---- under the contract of `blockwise.py`


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    options = KernelOptions.of(plan.options, operands.mask)
    run = partial(_forward, options, pallas.is_interpreted(NAME))
    specs = partial(kernel_inputs.result_specs, options, False)
    return tie(pallas.on_local_shards(run, specs, (operands,)), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options: KernelOptions, interpret: bool, operands: Operands) -> Result:
    # out [..., T, N, Hv], stat and the shift of the bias [..., T, N]
    *batch, T, N, _ = operands.query.shape
    arrays, shift = pallas.vary_alike(prepare(options, operands))
    out, stat = run_forward(call_of(options, operands, interpret), arrays)
    out = out[:, :T, :, : operands.value.shape[-1]].reshape(*batch, T, N, -1)
    stat = jnp.swapaxes(stat, -1, -2)[:, :T]
    shift = None if shift is None else jnp.broadcast_to(shift, stat.shape).reshape(*batch, T, N)
    stat = stat.reshape(*batch, T, N)
    # cuDNN promises nothing of rows that see nothing
    if (empty := kernel_inputs.empty_rows(options, operands, stat)) is not None:
        out, stat = jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, stat)
    if shift is None and operands.sink is None:
        return Result(out, stat, None)
    # lse = base + log l, the base being the shift, or the sink where that is greater
    base = jnp.zeros_like(stat) if shift is None else shift
    log_l = stat
    if operands.sink is not None:
        sink = to_rank(operands.sink.astype(stat.dtype), stat.ndim)
        base, shift = jnp.maximum(base, sink), base
        stat = (shift - base) + stat
        log_l = jnp.logaddexp(stat, sink - base)
        factor = jnp.where(stat == -jnp.inf, 0, jnp.exp(stat - log_l))
        out = (out.astype(stat.dtype) * factor[..., None]).astype(out.dtype)
    lse, rounding = fast_two_sum(base, log_l)
    rounding = jnp.where(lse == -jnp.inf, 0, rounding)
    return Result(out, lse, rounding if kernel_inputs.has_rounding(options, operands) else None)


def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    options = KernelOptions.of(plan.options, residuals.operands.mask)
    run = partial(_backward, options, pallas.is_interpreted(NAME))
    return pallas.on_local_shards(run, kernel_inputs.out_specs(residuals), (residuals, dout, dlse))


@partial(jax.jit, static_argnums=(0, 1))
def _backward(
    options: KernelOptions, interpret: bool, residuals: Residuals, dout: Any, dlse: Any
) -> DotProductAttentionGrads:
    # delta, lse and dout of each query; inf where a query sees nothing here
    operands, wanted = residuals.operands, residuals.wanted.names
    values = kernel_inputs.row_values(options, residuals, dout, dlse)
    empty = kernel_inputs.empty_rows(options, operands, values.lse)
    out, lse = residuals.result.out, values.lse
    if empty is not None:  # here; elsewhere the row may see keys
        lse = jnp.where(empty, jnp.inf, lse)

    # the arrays that the forward read, and the stat that P is taken from, float32 [B, N, T]
    call = call_of(options, operands, interpret)
    arrays, shift = prepare(options, operands._replace(query=values.query))
    _, T, _, H = arrays.q.shape
    rows = lambda x: kernel_inputs.pad(kernel_inputs.merged(x, 2), {1: T})
    heads = lambda x: kernel_inputs.pad(kernel_inputs.merged(x, 3), {1: T, -1: H})
    stat = rows(lse)
    if shift is not None:
        stat = (stat - kernel_inputs.pad(shift, {1: T})) + rows(values.rounding)
    stat = jnp.swapaxes(jnp.where(stat == jnp.inf, NOTHING, stat), -1, -2)

    made: dict[str, Any] = {}

    def add(arrays, out, dout, names):
        given = pallas.vary_alike((arrays, stat, out, dout))
        found = zip(
            ("query", "key", "value", "bias"), run_backward(call, *given, "bias" in wanted), strict=True
        )
        for name, x in found:
            if name in names and x is not None:
                made[name] = made.get(name, 0) + x.astype(lse.dtype)

    # the call whose delta is that of the output, and one for the rest c of delta
    has_rest = dlse is not None or residuals.result.wide_out is not None
    if dout is not None or not has_rest:
        add(arrays, heads(out), heads(values.dout), wanted)
    if has_rest and (names := wanted & {"query", "key", "bias"}):
        product = (values.dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
        add(*_rest_of_delta(arrays, rows(values.delta - product)), names)
    # in the shapes of the operands, 0 where nothing looks
    grads = _to_operands(operands, wanted, made, empty)
    if "sink" in wanted:
        grads["sink"] = values.dsink
    return kernel_inputs.matched(operands, grads)


def _rest_of_delta(arrays: Arrays, rest: jax.Array) -> tuple[Arrays, jax.Array, jax.Array]:
    """Returns (arrays, out, dout) of the second call, for c `[B, T, N]`."""
    # c in three numbers, each what rounding the ones before took: out = (c_1, c_2, c_3, 0, ...)
    q, weights = arrays.q, WEIGHTS[str(arrays.q.dtype)]
    out, dout = jnp.zeros_like(q, shape=(*rest.shape, q.shape[-1])), jnp.zeros_like(q)
    for i, weight in enumerate(weights):
        part = fusion.rounded(rest / weight, q.dtype)
        rest = rest - weight * part.astype(rest.dtype)
        out, dout = out.at[..., i].set(part), dout.at[..., i].set(weight)
    return arrays._replace(v=jnp.zeros_like(arrays.v)), out, dout


def _to_operands(
    operands: Operands, wanted: frozenset[str], made: dict[str, Any], empty: Any
) -> dict[str, Any]:
    """Cuts gradients to the shapes of the operands, and sets them to 0 where nothing looks."""
    # [..., T, N, H], [..., S, K, H], [..., S, K, Hv]: padding is cut off
    (*batch, T, N, H), (S, K, Hv) = operands.query.shape, operands.value.shape[-3:]
    _, seen = visibility.used_queries_and_keys(operands.mask, operands.bias, operands.sizes)
    grads: dict[str, Any] = {}
    for name, n, heads, h in (("query", T, N, H), ("key", S, K, H), ("value", S, K, Hv)):
        if name not in wanted:
            continue
        if name not in made:  # the output has no cotangent
            grads[name] = jnp.zeros((*batch, n, heads, h), operands.query.dtype)
            continue
        x = made[name][:, :n, :, :h].reshape(*batch, n, heads, h)
        # rows that see nothing, and keys that nobody sees
        if name == "query":
            grads[name] = x if empty is None else jnp.where(empty[..., None], 0, x)
        else:
            grads[name] = x if seen is None else jnp.where(jnp.swapaxes(seen, -1, -2)[..., None], x, 0)
    if "bias" in wanted:
        grads["bias"] = kernel_inputs.bias_gradient(made["bias"][..., :T, :S], operands)
    return grads
