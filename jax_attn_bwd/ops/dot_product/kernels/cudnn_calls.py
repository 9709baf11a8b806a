"""cuDNN's fused attention, forward and backward, as JAX's private primitives call it.

`jax.nn.dot_product_attention(implementation="cudnn")` binds the same two. With P = exp(logits - stat):

    forward     out = P v,   stat = log sum_s exp(logits_s)
    backward    delta = rowsum(dout * out),   dlogits = P * (dout v^T - delta)
                dq = scale dlogits k,   dk = scale dlogits^T q,   dv = P^T dout,   dbias = dlogits

so P comes from the `stat` and delta from the `out` that the backward is handed: they may be of more keys
than these. The functions are private to JAX: `KNOWN` has the arguments of those that are known, and
`unknown()` says why others are not called.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.dot_product.kernels import cudnn_twin
from jax_attn_bwd.ops.dot_product.kernels.cudnn_spec import Arrays, Call

NAME = "cudnn"

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


def forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """(out `[B, T, N, H]`, stat float32 `[B, N, T]`); rows that see nothing hold anything."""
    return _over_batch(partial(_forward, call))(arrays)


def backward(
    call: Call, arrays: Arrays, stat: jax.Array, out: jax.Array, dout: jax.Array, with_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dbias); what lies beyond the ends holds anything."""
    if arrays.bias is None:
        with_bias = False
    run = _over_batch(partial(_backward, call, with_bias), sums_bias=with_bias)
    return run(arrays, stat, out, dout)


class _Private(NamedTuple):
    """What is taken from JAX's module."""

    forward: Any  # primitives, without rules for vmap and partitioning
    backward: Any
    mask_types: dict[tuple[bool, bool], Any]  # (causal, with ends) -> `MaskType`
    layout: int  # BTNH
    more: dict[str, Any]  # options beyond `_OPTIONS`


def unknown() -> str | None:
    """Why the primitives of the JAX that is installed cannot be called; None if they can."""
    found = _private()
    if isinstance(found, _Private):
        return None
    return (
        f"JAX {jax.__version__} is not known: its private functions are not those of "
        f"{' or '.join(KNOWN)} ({found})"
    )


def _expected() -> _Private:
    """JAX's primitives, for a call that `unknown` has let pass."""
    found = _private()
    assert isinstance(found, _Private)
    return found


@cache
def _private() -> _Private | str:
    """JAX's primitives, or what is not as expected."""
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
    for options, more in KNOWN.values():
        if forms == [options | {"is_training"}, options]:
            return _Private(*found, layout, more)
    return f"they take {sorted(forms[0] | forms[1])}"


def _form(lowering: Callable[..., Any], arrays: tuple[str, ...]) -> frozenset[str]:
    """The options of a primitive, which its lowering takes by name or after the arrays."""
    parameters = inspect.signature(lowering).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    expected = ("ctx", *arrays)
    if tuple(names[: len(expected)]) != expected:
        raise TypeError(f"arrays {names[1 : len(expected)]}")
    return frozenset(names[len(expected) :])


def _options(call: Call, arrays: Arrays, with_bias: bool) -> dict[str, Any]:
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
    """The ten arrays that both primitives take; what is not used has no elements."""
    given = [*arrays, None, None, None, None]
    return [jnp.zeros(0, arrays.q.dtype) if x is None else x for x in given]


def _forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    if call.interpret:
        return cudnn_twin.forward(call, arrays)
    options = _options(call, arrays, with_bias=arrays.bias is not None)
    out, stat = _expected().forward.bind(*_bound(arrays), **options, is_training=True)
    return out, stat


def _backward(
    call: Call, with_bias: bool, arrays: Arrays, stat: jax.Array, out: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    if call.interpret:
        dq, dk, dv, dbias = cudnn_twin.backward(call, arrays, stat, out, dout)
        return dq, dk, dv, dbias if with_bias else None
    given = (*_bound(arrays), stat, out, dout)
    dq, dk, dv, *dbias = _expected().backward.bind(*given, **_options(call, arrays, with_bias))
    return dq, dk, dv, dbias[0] if dbias else None


def _over_batch(f: Callable[..., Any], sums_bias: bool = False) -> Callable[..., Any]:
    """`f(arrays, *more)`; under `jax.vmap` the new axis is merged with the batch axis, which all share.

    With `sums_bias` the last of the results is the gradient of the bias, summed over the batch if that
    broadcasts.
    """
    call = jax.custom_batching.custom_vmap(f)

    @call.def_vmap
    def rule(size, in_batched, arrays, *more):
        B = arrays.q.shape[1 if in_batched[0].q else 0]

        def merged(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, B, *x.shape[2:]))
            return x.reshape(size * B, *x.shape[2:])

        one = sums_bias and arrays.bias.shape[1 if in_batched[0].bias else 0] == 1
        shared = not sums_bias and arrays.bias is not None and not in_batched[0].bias
        if shared and arrays.bias.shape[0] == 1:  # one for all
            given = arrays._replace(bias=None)
            given = jax.tree.map(merged, given, in_batched[0]._replace(bias=None))._replace(bias=arrays.bias)
        else:
            given = jax.tree.map(merged, arrays, in_batched[0])
        results = call(given, *jax.tree.map(merged, more, tuple(in_batched[1:])))
        parted = jax.tree.map(lambda x: x.reshape(size, B, *x.shape[1:]), results)
        if one:
            parted = (*parted[:-1], parted[-1].sum(1, keepdims=True, dtype=parted[-1].dtype))
        return parted, jax.tree.map(lambda _: True, parted)

    return call
