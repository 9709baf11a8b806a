"""MegEngine's `megengine.functional.nn.multi_head_attention` and the layer around it, in JAX terms.

Kept from the source:
  * names, order and defaults of the arguments; batch first, `(N, L, embed_dim)`;
  * one array of weights, `io_weight_bias`: query, key, value and output weight, then their biases, flat,
    row by row, of any shape with the right number of elements (the module has `(1, length)`); `y = x W + b`;
    what a size of 0 or a flag turns off takes no room. Projection sizes are totals over the heads, head h
    owns columns h * d to (h + 1) * d; None means `embed_dim`;
  * a projection of size 0 hands the tensor itself to every head, whose gradient is the sum over heads; a
    head is then as wide as the tensor, and the sizes must fit: embed_dim = k_size if neither query nor key
    is projected, kproj_size = embed_dim * num_heads or qproj_size = k_size * num_heads if one is, equal
    sizes if both are. Without an output projection the heads' outputs lie side by side;
  * the logits are divided by the square root of `embed_dim // num_heads`, or of `embed_dim` if
    `qproj_size == 0`; it is the heads' real width only if `qproj_size` is `embed_dim` or 0;
  * a boolean mask is True where masked, a floating one is added to the logits; both kinds may meet. What is
    masked is decided in this order: `is_causal` without masks is causal, from the top left; `is_causal` with
    `attn_mask` alone is a hint, the mask counts; cudnn-style masks; `attn_mask`, `key_padding_mask`, or both
    added up; beside a `key_padding_mask`, `is_causal` is ignored. Entry n * num_heads + h of a 3-D
    `attn_mask` is that of head h of batch entry n;
  * cudnn-style masks are integers and both must be given: `attn_mask (2, L)`, the first key that each query
    sees and the one after its last; `key_padding_mask (2, N)`, how many queries and how many keys count;
  * in training the weights are returned after dropout; `(N * num_heads, L, S)`, or `(N, L, S)` averaged. Of
    `average_attn_weights` the source says "Default: False (i.e. average weights across heads)", which
    contradicts itself: False, the default, is by head here, as its code has it;
  * `out_drop` drops elements of the output after its bias; dropout needs `training`.

Changed:
  * what the source refuses works: `bias_k` and `bias_v` `(1, 1, kproj_size or k_size)` and
    `(1, 1, vproj_size or v_size)`, one row after the projected keys and values; `add_zero_attn`, a row of
    zeros after it; no mask reaches these rows. `reslink` adds the query to the output, after `out_drop`.
    So do causality without a mask and gradients outside training, on which the source's CPU path fails, and
    cudnn-style masks, which that path ignores;
  * a query that sees nothing gets 0 from the attention (the output is its bias), weights 0 and gradient 0,
    where the source gives NaN;
  * unbatched input, which the source documents and fails on: `query (L, embed_dim)` gives an output
    `(L, oproj_size)` and weights `(num_heads, L, S)` or `(L, S)`; `attn_mask` is `(L, S)` or
    `(num_heads, L, S)`, `key_padding_mask` `(S,)`, in cudnn style `(2, 1)`;
  * returned weights and floating masks are differentiable, which they are not in the source;
  * `io_weight_bias` may be None where nothing is projected; dropout draws from `dropout_key`; the two
    reserve spaces do not exist; errors are `ValueError` and `TypeError`.

Added: `multi_head_attention_backward`, whose place the source's automatic differentiation takes, with the
gradients to choose. A checkpoint goes over as arrays::

    np.savez("layer.npz", **module.state_dict())  # there
    params = dict(np.load("layer.npz"))  # here
    out, _ = megengine.MultiHeadAttn(embed_dim, num_heads)(params, x, x, x)

and `unpack_io_weight_bias` gives the matrices to a layer of another kind.

References:
  MegEngine 1.13, megengine.functional.nn.multi_head_attention, megengine.module.MultiHeadAttention.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, numerics
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd.compat.calls import after_dropout, arrays, both, drops, heads, mask_planes, merged
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as _layer
from jax_attn_bwd.ops.multi_head import multi_head_attention_bwd as _layer_bwd

__all__ = [
    "IOWeightBias",
    "MultiHeadAttn",
    "MultiHeadAttnGrads",
    "multi_head_attention",
    "multi_head_attention_backward",
    "pack_io_weight_bias",
    "unpack_io_weight_bias",
]

_NAME, _BACKWARD = "megengine.multi_head_attention", "megengine.multi_head_attention_backward"
_MODULE = "megengine.MultiHeadAttn"
_MASKS = ("key_padding_mask", "attn_mask")
_STYLE = "maybe_cudnn_style_mask=True"
_PROJECTIONS = ("qproj_size", "kproj_size", "vproj_size", "oproj_size")
_BIASES = ("qbias", "kbias", "vbias", "obias")


def multi_head_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim: int,
    num_heads: int,
    attn_drop: float,
    out_drop: float,
    io_weight_bias: jax.Array | None,
    qproj_size: int | None = None,
    kproj_size: int | None = None,
    vproj_size: int | None = None,
    oproj_size: int | None = None,
    qbias: bool = False,
    kbias: bool = False,
    vbias: bool = False,
    obias: bool = False,
    bias_k: jax.Array | None = None,
    bias_v: jax.Array | None = None,
    add_zero_attn: bool = False,
    key_padding_mask: jax.Array | None = None,
    attn_mask: jax.Array | None = None,
    need_weights: bool = False,
    average_attn_weights: bool = False,
    is_causal: bool = False,
    maybe_cudnn_style_mask: bool = False,
    reslink: bool = False,
    training: bool = True,
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The multi-head attention layer of MegEngine, its weights in one array.

    Args:
      query: `(N, L, embed_dim)` or `(L, embed_dim)`, floating; the other arrays but
        masks have its dtype.
      key: `(N, S, k_size)` or `(S, k_size)`.
      value: `(N, S, v_size)` or `(S, v_size)`.
      embed_dim: width of query.
      num_heads: divides the projection sizes of query, key and value.
      attn_drop: probability in [0, 1] of dropping a weight, in training.
      out_drop: probability in [0, 1] of dropping an element of the output, in training.
      io_weight_bias: weights and biases; see `unpack_io_weight_bias`.
      qproj_size, kproj_size, vproj_size, oproj_size: widths after projection, over all heads; 0 = not
        projected, None = embed_dim.
      qbias, kbias, vbias, obias: whether `io_weight_bias` has that bias; needs the projection.
      bias_k, bias_v: `(1, 1, kproj_size or k_size)`, `(1, 1, vproj_size or v_size)`, both or neither.
      add_zero_attn: append a key and a value of zeros.
      key_padding_mask: `(N, S)`, unbatched `(S,)`; bool, True = ignored, or floating, added. In cudnn style
        `(2, N)` integers.
      attn_mask: `(L, S)` or `(N * num_heads, L, S)`; bool, True = not allowed, or floating, added. In cudnn
        style `(2, L)` integers.
      need_weights: whether to return the weights.
      average_attn_weights: whether they are averaged over heads.
      is_causal: causal where no mask is given; a hint beside `attn_mask`.
      maybe_cudnn_style_mask: both masks are in cudnn style.
      reslink: add `query` to the output, which must be as wide.
      training: whether dropout counts.
      dropout_key: a JAX random key.

    Returns:
      attn_output: `(N, L, oproj_size)`; without an output projection its last axis is vproj_size, or
        num_heads * v_size. Without N if unbatched.
      attn_output_weights: `(N * num_heads, L, S')`, or `(N, L, S')` averaged, unbatched `(num_heads, L, S')`
        or `(L, S')`; S' = S and the appended rows. None without `need_weights`.

    Gradients:
      Every array of both results, to any order; of the masks the floating ones.

    Raises:
      ValueError: shapes disagree, arguments contradict one another. TypeError: one is of the wrong kind.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import megengine
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (1, 264))
      >>> out, weights = megengine.multi_head_attention(
      ...     x, x, x, 8, 4, 0.0, 0.0, w, obias=True, need_weights=True)
      >>> out.shape, weights.shape
      ((2, 5, 8), (8, 5, 5))
    """
    call = _checked(_NAME, locals())
    q, k, v = call.inputs
    # One array for two inputs is projected, and differentiated, as one.
    given = q, None if key is query else k, None if value is key else v
    result: Any = _layer(call.params, *given, return_weights=need_weights, **call.options)
    out, weights = result if need_weights else (result, None)
    # The source returns weights after dropout, (N * H, L, S) or averaged (N, L, S).
    if weights is not None:
        weights = after_dropout(weights, call.options["dropout_rate"], dropout_key)
        N, H, L, S = weights.shape
        weights = weights.mean(1) if average_attn_weights else weights.reshape(N * H, L, S)
        weights = weights[0] if average_attn_weights and not call.batched else weights
    return out if call.batched else out[0], weights


@exportable_tuple
class MultiHeadAttnGrads(NamedTuple):
    """Gradients, each with its argument's shape and dtype; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    io_weight_bias: jax.Array | None = None
    bias_k: jax.Array | None = None
    bias_v: jax.Array | None = None
    key_padding_mask: jax.Array | None = None
    attn_mask: jax.Array | None = None


def multi_head_attention_backward(
    grad_output: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array, embed_dim: int,
    num_heads: int, attn_drop: float, out_drop: float, io_weight_bias: jax.Array | None,
    qproj_size: int | None = None, kproj_size: int | None = None, vproj_size: int | None = None,
    oproj_size: int | None = None, qbias: bool = False, kbias: bool = False, vbias: bool = False,
    obias: bool = False, bias_k: jax.Array | None = None, bias_v: jax.Array | None = None,
    add_zero_attn: bool = False, key_padding_mask: jax.Array | None = None,
    attn_mask: jax.Array | None = None, need_weights: bool = False, average_attn_weights: bool = False,
    is_causal: bool = False, maybe_cudnn_style_mask: bool = False, reslink: bool = False,
    training: bool = True, *, grad_weights: jax.Array | None = None, wrt: Sequence[str] | None = None,
    dropout_key: jax.Array | None = None,
) -> MultiHeadAttnGrads:  # fmt: skip
    """The gradients of `multi_head_attention`, those that are asked for.

    Args:
      grad_output: cotangent of `attn_output`, its shape and dtype; None = 0.
      grad_weights: cotangent of `attn_output_weights`; None = 0. The source has none.
      wrt: which of "query", "key", "value", "io_weight_bias", "bias_k", "bias_v" and the floating ones of
        "key_padding_mask" and "attn_mask" to compute; None = all that are given but the masks.
      query, key, value and the others: as in the forward call; `need_weights` only tells whether
        `grad_weights` may be given.

    Returns:
      MultiHeadAttnGrads, each with its argument's shape and dtype; None where not asked for. Where one
      array is given as several inputs, its gradient is the sum of theirs.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      ValueError, TypeError: under the conditions of the forward. ValueError: `wrt` names what has no
        gradient; `grad_weights` without `need_weights`.

    Example:
      >>> import jax, numpy as np
      >>> from jax_attn_bwd.compat import megengine
      >>> x, dy = np.random.default_rng(0).standard_normal((2, 2, 5, 8))
      >>> w = jax.random.normal(jax.random.key(1), (1, 264))
      >>> grads = megengine.multi_head_attention_backward(
      ...     dy, x, x, x, 8, 4, 0.0, 0.0, w, obias=True, wrt=("query", "io_weight_bias"))
      >>> grads.query.shape, grads.io_weight_bias.shape, grads.key
      ((2, 5, 8), (1, 264), None)
    """
    arguments = locals()
    call = _checked(_BACKWARD, arguments)
    given: dict[str, Any] = {name: arguments[name] for name in MultiHeadAttnGrads._fields}
    present = [n for n, x in given.items() if checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)]
    wrt = [n for n in present if n not in _MASKS] if wrt is None else wrt
    wanted = checks.wanted(_BACKWARD, wrt, tuple(given), present)
    if grad_weights is not None and not need_weights:
        expected = "be None without need_weights=True: there are no weights"
        got = f"shape {np.shape(grad_weights)}"
        raise ValueError(checks.message(_BACKWARD, "grad_weights", expected, got))
    # `io_weight_bias` asks for every kernel and bias, a mask that is added for the bias of the logits.
    kernels = [n for n, x in call.params._asdict().items() if x is not None and n not in ("bias_k", "bias_v")]
    asked = [n for n in wanted if n != "io_weight_bias" and n not in _MASKS]
    asked += kernels if "io_weight_bias" in wanted else []
    asked += ["bias"] if set(wanted) & set(_MASKS) else []
    dout = grad_output if grad_output is None or call.batched else jnp.asarray(grad_output)[None]
    dweights = _of_weights(call, grad_weights, average_attn_weights)
    grads: Any = _layer_bwd(dout, call.params, *call.inputs, dweights=dweights, wrt=asked, **call.options)
    # Gradients are packed as the source packs the parameters, and reduced to the shapes of its masks.
    found: dict[str, Any] = {n: getattr(grads, n) for n in ("query", "key", "value")}
    found |= {n: getattr(grads.params, n) for n in ("bias_k", "bias_v")}
    if "io_weight_bias" in wanted:
        found["io_weight_bias"] = _packed(grads.params) if kernels else jnp.zeros(0)
    for name in set(wanted) & set(_MASKS):
        found[name] = numerics.reduce_to(grads.bias, _plane(call, name, given[name]))
    shaped = {
        n: x.reshape(np.shape(given[n])).astype(given[n].dtype) for n, x in found.items() if n in wanted
    }
    return MultiHeadAttnGrads(**shaped)


class IOWeightBias(NamedTuple):
    """Tells what `io_weight_bias` holds, in its order; None = takes no room."""

    query_weight: Any = None  # (embed_dim, qproj_size)
    key_weight: Any = None  # (k_size, kproj_size)
    value_weight: Any = None  # (v_size, vproj_size)
    out_weight: Any = None  # (vproj_size, oproj_size), or (num_heads * v_size, oproj_size)
    query_bias: Any = None  # (qproj_size,)
    key_bias: Any = None  # (kproj_size,)
    value_bias: Any = None  # (vproj_size,)
    out_bias: Any = None  # (oproj_size,)


def pack_io_weight_bias(
    query_weight: jax.Array | None = None,
    key_weight: jax.Array | None = None,
    value_weight: jax.Array | None = None,
    out_weight: jax.Array | None = None,
    query_bias: jax.Array | None = None,
    key_bias: jax.Array | None = None,
    value_bias: jax.Array | None = None,
    out_bias: jax.Array | None = None,
) -> jax.Array:
    """The arrays of `IOWeightBias` in one, `(1, length)`.

    Raises:
      ValueError: nothing is given, a bias without its weight, or of another width. TypeError: not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import megengine
      >>> megengine.pack_io_weight_bias(jnp.ones((8, 8)), jnp.ones((6, 8)), query_bias=jnp.ones(8)).shape
      (1, 120)
    """
    parts, name = locals(), "megengine.pack_io_weight_bias"
    given = {k: x for k, x in arrays(name, (), **parts).items() if x is not None}
    if not given:
        raise ValueError(checks.message(name, "at least one weight", "be given", None))
    for argument, x in given.items():
        weight: Any = given.get(argument.replace("bias", "weight"))
        if x is weight:
            checks.rank(name, argument, x, "(in, out)", 2)
        if weight is None:
            expected = f"be None without {argument.replace('bias', 'weight')}"
            raise ValueError(checks.message(name, argument, expected, f"shape {x.shape}"))
        if x is not weight:
            checks.shape(name, argument, x, "(out,) of its weight", weight.shape[1:])
    return jnp.concatenate([x.ravel() for x in given.values()])[None]


def unpack_io_weight_bias(
    io_weight_bias: jax.Array | None, embed_dim: int, num_heads: int, qproj_size: int | None = None,
    kproj_size: int | None = None, vproj_size: int | None = None, oproj_size: int | None = None,
    qbias: bool = False, kbias: bool = False, vbias: bool = False, obias: bool = False, *,
    k_size: int | None = None, v_size: int | None = None,
) -> IOWeightBias:  # fmt: skip
    """The weights and biases in `io_weight_bias`.

    Args:
      io_weight_bias: any shape, floating; None where nothing is projected.
      embed_dim, num_heads, sizes and flags: as in `multi_head_attention`.
      k_size, v_size: widths of key and value; None = embed_dim.

    Returns:
      IOWeightBias, whose fields `pack_io_weight_bias` takes.

    Raises:
      ValueError: another length than the sizes and flags make, sizes that the heads do not divide, a flag
        without its projection. TypeError: not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import megengine
      >>> parts = megengine.unpack_io_weight_bias(jnp.ones((1, 264)), 8, 2, obias=True)
      >>> parts.out_weight.shape, parts.out_bias.shape, parts.query_bias
      ((8, 8), (8,), None)
    """
    arguments, name = locals(), "megengine.unpack_io_weight_bias"
    widths = (embed_dim if k_size is None else k_size, embed_dim if v_size is None else v_size)
    return _unpacked(name, arguments, _layer_sizes(name, arguments, *widths))


@dataclass(frozen=True)
class MultiHeadAttn:
    """MegEngine's layer around `multi_head_attention`: its arguments, and parameters in a dictionary.

    The dictionary has the names of the source's state dictionary, so one that it saved, as NumPy arrays, may
    be handed over as it is: "io_weight_bias" `(1, length)` and, with `add_bias_kv`, "bias_k" and "bias_v".

    Differs from the source's in that the dropout rates count (its `reset_parameters` sets both to 0), that
    what it refuses works (`add_bias_kv`, `add_zero_attn`, `reslink`), and that `training` is given at the
    call, False where it is not.

    Args:
      embed_dim: width of query and output, and of each projection over all heads.
      num_heads: divides embed_dim.
      attn_dropout, out_dropout: rates of the weights and of the output, in training.
      bias: whether all four projections have one.
      add_bias_kv: one learned row after the projected keys and values, `(1, 1, embed_dim)` each.
      add_zero_attn: a row of zeros after it.
      reslink: add the query to the output.
      kdim, vdim: widths of key and value; None = embed_dim.

    Example:
      >>> import jax
      >>> from jax_attn_bwd.compat import megengine
      >>> layer = megengine.MultiHeadAttn(8, 2)
      >>> params = layer.init(jax.random.key(0))
      >>> x = jax.random.normal(jax.random.key(1), (2, 5, 8), "float32")
      >>> out, _ = layer(params, x, x, x, is_causal=True)
      >>> parts = megengine.unpack_io_weight_bias(
      ...     params["io_weight_bias"], 8, 2, qbias=True, kbias=True, vbias=True, obias=True)
      >>> out.shape, parts.query_weight.shape, parts.out_bias.shape
      ((2, 5, 8), (8, 8), (8,))
    """

    embed_dim: int
    num_heads: int
    attn_dropout: float = 0.0
    out_dropout: float = 0.0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    reslink: bool = False
    kdim: int | None = None
    vdim: int | None = None

    def __post_init__(self) -> None:
        """Raises where the sizes do not fit."""
        embed_dim = checks.integer(_MODULE, "embed_dim", self.embed_dim, least=1)
        heads(_MODULE, self.num_heads, embed_dim=embed_dim)
        for name in ("kdim", "vdim"):
            if getattr(self, name) is not None:
                checks.integer(_MODULE, name, getattr(self, name), least=1)
        for name in ("bias", "add_bias_kv", "add_zero_attn", "reslink"):
            checks.flag(_MODULE, name, getattr(self, name))

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """Initial parameters: weights as the source draws them (Xavier, of the packed array), biases 0."""
        E = self.embed_dim
        length = (2 * E + (self.kdim or E) + (self.vdim or E)) * E
        of_weights, of_rows = jax.random.split(key)
        biases = 4 * E if self.bias else 0
        bound = math.sqrt(6 / (1 + length + biases))
        weights = jax.random.uniform(of_weights, (1, length), dtype, -bound, bound)
        params = {"io_weight_bias": jnp.pad(weights, ((0, 0), (0, biases)))}
        if self.add_bias_kv:
            bound = math.sqrt(6 / (1 + E))
            rows = jax.random.uniform(of_rows, (2, 1, 1, E), dtype, -bound, bound)
            params |= {"bias_k": rows[0], "bias_v": rows[1]}
        return params

    def __call__(
        self, params: Mapping[str, jax.Array], query: jax.Array, key: jax.Array, value: jax.Array,
        key_padding_mask: jax.Array | None = None, attn_mask: jax.Array | None = None,
        need_weights: bool = False, average_attn_weights: bool = False, is_causal: bool = False,
        maybe_cudnn_style_mask: bool = False, *, training: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """(output, weights or None): `multi_head_attention` of these parameters, whose arguments these are.

        Raises:
          ValueError: `params` holds other names; as `multi_head_attention`. TypeError: as that.
        """
        names = ("io_weight_bias", *(("bias_k", "bias_v") if self.add_bias_kv else ()))
        if not isinstance(params, Mapping) or set(params) != set(names):
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(checks.message(_MODULE, "params", f"be a dictionary of {list(names)}", got))
        # All projections are as wide as the query.
        E = self.embed_dim
        weights: Any = {"bias_k": None, "bias_v": None, **params}
        sizes: Any = dict.fromkeys(_PROJECTIONS, E) | dict.fromkeys(_BIASES, self.bias)
        return multi_head_attention(
            query, key, value, E, self.num_heads, self.attn_dropout, self.out_dropout, **weights, **sizes,
            add_zero_attn=self.add_zero_attn, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal,
            maybe_cudnn_style_mask=maybe_cudnn_style_mask, reslink=self.reslink, training=training,
            dropout_key=dropout_key,
        )  # fmt: skip


class _SourceSizes(NamedTuple):
    """Holds the source's sizes, None replaced; widths of the inputs, totals over heads of the projections."""

    embed_dim: int
    k_size: int
    v_size: int
    num_heads: int
    qproj_size: int
    kproj_size: int
    vproj_size: int
    oproj_size: int


class _Call(NamedTuple):
    """Holds a call of the source in the layer's terms."""

    params: MultiHeadAttentionParams
    inputs: tuple[jax.Array, jax.Array, jax.Array]  # (N, L or S, width), with an N of 1 if unbatched
    options: dict[str, Any]  # what the layer is called with
    sizes: _SourceSizes
    batched: bool


def _checked(operator: str, arguments: Mapping[str, Any]) -> _Call:
    """Checks the arguments of a call, by name, as `multi_head_attention` says."""
    a = SimpleNamespace(**arguments)
    for name in ("add_zero_attn", "need_weights", "average_attn_weights", "reslink"):
        checks.flag(operator, name, arguments[name])
    needed = ("query", "key", "value")
    names = (*needed, "io_weight_bias", "bias_k", "bias_v")
    given = arrays(operator, needed, **{name: arguments[name] for name in names})
    # Sizes follow from the inputs; `io_weight_bias` is cut into kernels and biases.
    batched = given["query"].ndim == 3
    _check_inputs(operator, given, a.embed_dim)
    sizes = _layer_sizes(operator, arguments, given["key"].shape[-1], given["value"].shape[-1])
    params = _params(operator, sizes, _unpacked(operator, arguments, sizes), given)
    scale = _scale(operator, sizes, a.reslink)
    rates = {"attn_drop": a.attn_drop, "out_drop": a.out_drop}
    attn_rate, out_rate = drops(operator, rates, a.training, a.dropout_key)
    # Masks are merged by the source's rules.
    q, k, v = (given[x] if batched else given[x][None] for x in needed)
    shape = (*q.shape[:2], k.shape[1], sizes.num_heads)
    options: dict[str, Any] = _masks(operator, batched, shape, a)
    options |= dict(num_heads=sizes.num_heads, scale=scale, add_zero_attn=a.add_zero_attn)
    options |= dict(dropout_rate=attn_rate, out_dropout_rate=out_rate, dropout_key=a.dropout_key)
    options["add_residual"] = a.reslink
    return _Call(params, (q, k, v), options, sizes, batched)


def _check_inputs(operator: str, given: dict[str, Any], embed_dim: Any) -> None:
    """Raises unless query, key and value are all batched or none, and agree on their sizes."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    names = "(N, L, embed_dim) or, without a batch, (L, embed_dim)"
    checks.rank(operator, "query", query, names, 2, 3)
    batch = query.shape[:-2]
    letters = "({}, {}, {})" if batch else "({1}, {2})"
    expected = letters.format("N", "L", "embed_dim")
    checks.shape(operator, "query", query, expected, (*batch, query.shape[-2], embed_dim))
    for name, x, width in (("key", key, "k_size"), ("value", value, "v_size")):
        expected = letters.format("N", "S", width)
        checks.rank(operator, name, x, expected, query.ndim)
        checks.shape(operator, name, x, expected, (*batch, key.shape[-2], x.shape[-1]))


def _params(
    operator: str, sizes: _SourceSizes, parts: IOWeightBias, given: dict[str, Any]
) -> MultiHeadAttentionParams:
    """Returns the layer's parameters; totals over heads become (heads, head size)."""
    E, k, v, H, q, kp, vp, o = sizes

    def split(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(*x.shape[:-1], H, x.shape[-1] // H)

    # The output kernel [H, width of a head, o]; kernels and biases of the inputs.
    out = parts.out_weight
    out = None if out is None else out.reshape(H, (vp or H * v) // H, o)
    both(operator, bias_k=given["bias_k"], bias_v=given["bias_v"])
    found: dict[str, Any] = {"out_kernel": out, "out_bias": parts.out_bias}
    for name in ("query", "key", "value"):
        found[f"{name}_kernel"] = split(getattr(parts, f"{name}_weight"))
        found[f"{name}_bias"] = split(getattr(parts, f"{name}_bias"))
    # The appended row (K, width of a head), one for all heads where nothing is projected.
    for name, size, width in (("bias_k", kp, k), ("bias_v", vp, v)):
        row = given[name]
        if row is not None:
            letters = f"(1, 1, {name[-1]}proj_size or {name[-1]}_size)"
            checks.shape(operator, name, row, letters, (1, 1, size or width))
            K = H if kp or vp else 1
            row = row.reshape(K, size // H) if size else jnp.broadcast_to(row[0], (K, width))
        found[name] = row
    return MultiHeadAttentionParams(**found)


def _layer_sizes(operator: str, arguments: Mapping[str, Any], k_size: Any, v_size: Any) -> _SourceSizes:
    """Returns the sizes of a call from its arguments by name; raises where they do not fit."""
    E = checks.integer(operator, "embed_dim", arguments["embed_dim"], least=1)
    found = {}
    for name in _PROJECTIONS:
        n = arguments[name]
        found[name] = E if n is None else checks.integer(operator, name, n, least=0)
    # The heads divide the projections; keys are as wide as queries.
    H = heads(operator, arguments["num_heads"], **{name: found[name] for name in _PROJECTIONS[:3]})
    sizes = _SourceSizes(E, k_size, v_size, H, **found)
    of_query, of_key = (
        size // H if size else width
        for size, width in ((sizes.qproj_size, E), (sizes.kproj_size, sizes.k_size))
    )
    if of_query != of_key:
        left = f"a size of 0 leaves k_size = {sizes.k_size}"
        expected = f"make key heads as wide as query heads, {of_query} ({left})"
        raise ValueError(checks.message(operator, "kproj_size", expected, sizes.kproj_size))
    return sizes


def _unpacked(operator: str, arguments: Mapping[str, Any], sizes: _SourceSizes) -> IOWeightBias:
    """Returns the parts of the argument `io_weight_bias`; None where a part takes no room."""
    E, k, v, H, q, kp, vp, o = sizes
    matrices = ((E, q), (k, kp), (v, vp), (vp or H * v, o))
    # Shapes of the four weights, then of their biases.
    shapes: list[tuple[int, ...] | None] = [m if m[1] else None for m in matrices]
    for flag, (_, width) in zip(_BIASES, matrices, strict=True):
        has_bias = checks.flag(operator, flag, arguments[flag])
        if has_bias and not width:
            expected = f"be False where {flag[0]}proj_size is 0: a bias needs its projection"
            raise ValueError(checks.message(operator, flag, expected, True))
        shapes.append((width,) if has_bias else None)
    lengths = [0 if shape is None else math.prod(shape) for shape in shapes]
    if arguments["io_weight_bias"] is None and sum(lengths) == 0:
        return IOWeightBias()
    # The packed array is cut, one part after the other.
    packed = checks.floating(operator, "io_weight_bias", arguments["io_weight_bias"])
    if packed.size != sum(lengths):
        pieces = zip(IOWeightBias._fields, shapes, strict=True)
        remedy = "it holds " + ", ".join(f"{n} {s}" for n, s in pieces if s is not None)
        expected = f"have {sum(lengths)} elements"
        raise ValueError(checks.message(operator, "io_weight_bias", expected, packed.size, remedy))
    flat, parts, start = packed.ravel(), [], 0
    for shape, length in zip(shapes, lengths, strict=True):
        parts.append(None if shape is None else flat[start : start + length].reshape(shape))
        start += length
    return IOWeightBias(*parts)


def _scale(operator: str, sizes: _SourceSizes, reslink: bool) -> float:
    """Returns the factor of the logits."""
    E, _, v, H, q, _, vp, o = sizes
    if q and E < H:
        expected = f"be num_heads = {H} or more: logits are divided by sqrt(embed_dim // num_heads)"
        raise ValueError(checks.message(operator, "embed_dim", expected, E))
    width = o or vp or H * v
    if reslink and width != E:
        expected = f"be False for an output of width {width} and a query of width {E}"
        raise ValueError(checks.message(operator, "reslink", expected, True))
    return float((E // H if q else E) ** -0.5)


def _masks(operator: str, batched: bool, shape: tuple[int, int, int, int], a: Any) -> dict[str, Any]:
    """Merges the masks among the arguments `a`: the layer's `mask`, `bias`, `is_causal`; shape (N, L, S, H).

    The rules stand in their order.
    """
    is_causal = checks.flag(operator, "is_causal", a.is_causal)
    if checks.flag(operator, "maybe_cudnn_style_mask", a.maybe_cudnn_style_mask):
        seen = _cudnn_style(operator, shape, a.key_padding_mask, a.attn_mask)
        return {"mask": seen, "bias": None, "is_causal": False}
    if a.attn_mask is None and a.key_padding_mask is None:
        return {"mask": None, "bias": None, "is_causal": is_causal}
    remedy, by_head = f"a mask in cudnn style needs {_STYLE}", "" if batched else "(num_heads, L, S)"
    planes = mask_planes(operator, batched, shape, a.key_padding_mask, a.attn_mask, by_head, remedy)
    return {**merged(*planes), "is_causal": False}


def _cudnn_style(
    operator: str, shape: tuple[int, int, int, int], key_padding_mask: Any, attn_mask: Any
) -> jax.Array:
    """Returns `(N, 1, L, S)`: key s counts in the window of query l, and both lie within their lengths."""
    N, L, S, _ = shape
    given = {"attn_mask": ("(2, L)", (2, L)), "key_padding_mask": ("(2, N)", (2, N))}
    # Both tables must be given: windows (2, L) of the queries, lengths (2, N) of the sequences.
    tables = []
    for (argument, (letters, expected)), x in zip(given.items(), (attn_mask, key_padding_mask), strict=True):
        if x is None:
            raise ValueError(checks.message(operator, argument, f"be given with {_STYLE}", None))
        x = checks.integers(operator, argument, x)
        checks.shape(operator, argument, x, f"{letters}, with {_STYLE},", expected)
        tables.append(numerics.saturated(x))  # a narrow one cannot hold every index
    (first, last), (queries, keys) = tables
    row, column = jnp.arange(L, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    window = (first[:, None] <= column[None]) & (column[None] < last[:, None])  # (L, S)
    live = row[None] < queries[:, None]  # (N, L)
    seen = column[None] < keys[:, None]  # (N, S)
    return (window[None] & live[:, :, None] & seen[:, None])[:, None]


def _of_weights(call: _Call, grad: Any, average: bool) -> jax.Array | None:
    """Returns the cotangent of the layer's weights, by head and before dropout."""
    if grad is None:
        return None
    (N, L, _), S, H = call.inputs[0].shape, call.inputs[1].shape[1], call.sizes.num_heads
    S += (call.params.bias_k is not None) + call.options["add_zero_attn"]
    grad = checks.floating(_BACKWARD, "grad_weights", grad)
    batch = (N,) if call.batched else ()
    expected = (*batch, L, S) if average else (N * H, L, S)
    checks.shape(_BACKWARD, "grad_weights", grad, "of the weights", expected)
    if average:
        grad = jnp.broadcast_to((grad / H).reshape(N, 1, L, S), (N, H, L, S))
    return after_dropout(grad.reshape(N, H, L, S), call.options["dropout_rate"], call.options["dropout_key"])


def _packed(params: MultiHeadAttentionParams) -> jax.Array:
    """Packs the gradient of `io_weight_bias`: heads and head sizes on one axis again."""
    parts: dict[str, Any] = {}
    for name in ("query", "key", "value"):
        kernel, bias = getattr(params, f"{name}_kernel"), getattr(params, f"{name}_bias")
        parts[f"{name}_weight"] = None if kernel is None else kernel.reshape(kernel.shape[0], -1)
        parts[f"{name}_bias"] = None if bias is None else bias.ravel()
    out = params.out_kernel
    parts["out_weight"] = None if out is None else out.reshape(-1, out.shape[-1])
    return pack_io_weight_bias(**parts, out_bias=params.out_bias)


def _plane(call: _Call, name: str, mask: Any) -> tuple[int, ...]:
    """Returns the shape in which `mask` is added to the logits."""
    (N, L, _), S, H = call.inputs[0].shape, call.inputs[1].shape[1], call.sizes.num_heads
    if name == "key_padding_mask":
        return (N, 1, 1, S)
    return (N, H, L, S) if mask.ndim == 3 else (1, 1, L, S)
