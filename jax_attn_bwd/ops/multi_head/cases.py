"""Named inputs of the multi-head attention layer; the fields of its parameters are arguments of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import cases as draw
from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd.ops.dot_product import cases as dense
from jax_attn_bwd.ops.multi_head import api, projections, reference
from jax_attn_bwd.ops.multi_head.arguments import SHAPES
from jax_attn_bwd.ops.multi_head.spec import PARAMS, MultiHeadAttentionParams

_SIZES = dict(B=(2,), T=5, S=7, N=4, K=2, H=3, Hv=5, Eq=6, Ek=7, Ev=8, Eo=9)
_SHAPES = SHAPES | {"query": ("B", "T", "Eq"), "key": ("B", "S", "Ek"), "value": ("B", "S", "Ev")}
KERNELS = ("query_kernel", "key_kernel", "value_kernel", "out_kernel")
BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")
INPUTS = ("query", "key", "value")
ROWS = ("bias_k", "bias_v")
_BIG = {"sink": 10.0}  # near 0 it would hide errors


def case(
    name: str,
    given: tuple[str, ...] = (*INPUTS, *KERNELS, *BIASES),
    *,
    extra: Callable | None = None,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Returns a case of these options, and of `case_of`.

    `given` names the arrays, `extra(rng, sizes) -> {argument: array}` adds others.
    """
    n = {**_SIZES, **(sizes or {})}

    def build(rng):
        arrays = {}
        for argument in given:
            shape = []
            for letter in _SHAPES[argument]:
                size = n[letter]
                shape += size if isinstance(size, tuple) else [size]
            # Kernels as at initialisation: heads near 1, so that the softmax is not saturated.
            spread = shape[0] ** -0.5 if argument in KERNELS[:3] else _BIG.get(argument, 1.0)
            arrays[argument] = rng.normal(0, spread, shape)
        return arrays | (extra(rng, n) if extra else {})

    return draw.case_of(name, build, **options)


KEY = draw.dropout_key(3, 5)
LENGTHS = draw.lengths((0, 2), (3, None))  # an entry without keys
_PLANES = draw.both(draw.mask(2, 1, 5, 7), draw.bias(4, 5, 7, spread=3.0), KEY)
ALL = (*INPUTS, *KERNELS, *BIASES, *ROWS, "sink")
DROPS: dict[str, Any] = dict(dropout_rate=0.4, out_dropout_rate=0.3)


# Queries, keys and values are rounded between the projections and attention. Of the error of the gradient of
# "key" in bfloat16, 1.3e-2, that alone makes 1.1e-2, all else in float64; rounding once makes 1.4e-3.
_OF_HEADS = {"key": 10, "key_kernel": 4, "key_bias": 5, "query_kernel": 4, "value": 4}

CASES = (
    case(
        "tiles", (*INPUTS, *KERNELS, *ROWS), sizes=dict(B=(1,), T=300, S=600, N=2, K=1),
        is_causal=True, tags=("ci", "check", "compile"),
    ),
    case(
        "everything_but_weights", ALL, extra=_PLANES,
        add_zero_attn=True, tags=("edge", "check", "compile"), **DROPS,
    ),
    case(
        "everything", ALL, extra=_PLANES, is_causal=True,
        add_zero_attn=True, add_residual=True, return_weights=True, sizes=dict(Eo=6),
        tags=("ci", "check"), **DROPS,
    ),
    case(
        "packed", ALL, extra=draw.both(draw.segments(), LENGTHS, draw.bias(4, 5, 7, spread=3.0), KEY),
        add_zero_attn=True, logits_soft_cap=5.0, tags=("edge", "check"), **DROPS,
    ),
    case(
        "rotary", ALL, extra=draw.positions, sizes=dict(H=6), rotary=Rotary(base=100.0, size=4),
        is_causal=True, tags=("edge", "check"),
    ),
    case(
        "means", (*INPUTS, *KERNELS, *BIASES, *ROWS), sizes=dict(T=70, S=90, H=8, Hv=8), is_causal=True,
        means={"value_bias": 3.0}, tags=("means",), times=_OF_HEADS,
    ),
)  # fmt: skip


def with_params(arguments: dict) -> dict:
    params = {n: arguments.pop(n) for n in PARAMS if n in arguments}
    return {"params": MultiHeadAttentionParams(**params), **dense.with_mod_args(arguments)}


def _call(**arguments):
    outputs = api.multi_head_attention(**with_params(arguments))
    return outputs if isinstance(outputs, tuple) else (outputs, jnp.zeros(0, outputs.dtype))


def _reference(**arguments):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return_weights = arguments.pop("return_weights", False)
        for name in ("save", "precision", "deterministic_sums"):
            arguments.pop(name, None)
        out, weights = reference.multi_head_attention(**with_params(_with_factors(**arguments)))
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
    sizes = jax.eval_shape(lambda: reference.multi_head_attention(**with_params(dict(arguments))))
    out, weights = (x.shape for x in sizes)
    N = arguments.get("num_heads") or arguments["query_kernel"].shape[1]
    batch, (T, S) = out[:-2], weights[-2:]
    offset = dropout_offset or (0, 0, 0, 0)
    words = dropout.key_words(dropout_key)

    def factors(words, rate, sizes, offset):
        keep = draw.keep_mask(words, rate, batch, sizes, offset, broadcast_dropout)
        return jnp.where(keep, dropout.survivor_factor(rate), 0.0).astype(arguments["query"].dtype)

    # of the probabilities [*batch, N, T, S]; of the output [*batch, T, Eo], from a key of its own
    found = {"factors": factors(words, dropout_rate, (N, T, S), offset)}
    if out_dropout_rate:
        constant = tuple(jnp.uint32(x) for x in projections.OUT)
        words = jnp.stack(dropout.threefry((words[0], words[1]), constant))
        plane = factors(words, out_dropout_rate, (1, T, out[-1]), (offset[0], 0, offset[2], 0))
        found["out_factors"] = plane[..., 0, :, :]
    return arguments | found


OPERATORS = (
    Operator(
        name="multi_head_attention",
        outputs=("out", "weights"),
        differentiable=(*(name for name in api.DIFFERENTIABLE if name != "mod_args"), *dense.MOD_ARGS),
        implementations=api.IMPLEMENTATIONS,
        call=_call,
        reference=_reference,
        cases=CASES,
    ),
)
