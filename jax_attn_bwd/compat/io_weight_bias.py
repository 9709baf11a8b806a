"""`io_weight_bias` of MegEngine: every weight and bias of the layer in one array."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.calls import arrays, heads

PROJECTIONS = ("qproj_size", "kproj_size", "vproj_size", "oproj_size")
BIASES = ("qbias", "kbias", "vbias", "obias")


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


class SourceSizes(NamedTuple):
    """Holds the source's sizes, None replaced; widths of the inputs, totals over heads of the projections."""

    embed_dim: int
    k_size: int
    v_size: int
    num_heads: int
    qproj_size: int
    kproj_size: int
    vproj_size: int
    oproj_size: int


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
    return unpack(name, arguments, layer_sizes(name, arguments, *widths))


def layer_sizes(operator: str, arguments: Mapping[str, Any], k_size: Any, v_size: Any) -> SourceSizes:
    """Returns the sizes of a call from its arguments by name; raises where they do not fit."""
    E = checks.integer(operator, "embed_dim", arguments["embed_dim"], least=1)
    found = {}
    for name in PROJECTIONS:
        n = arguments[name]
        found[name] = E if n is None else checks.integer(operator, name, n, least=0)
    # The heads divide the projections; keys are as wide as queries.
    H = heads(operator, arguments["num_heads"], **{name: found[name] for name in PROJECTIONS[:3]})
    sizes = SourceSizes(E, k_size, v_size, H, **found)
    of_query, of_key = (
        size // H if size else width
        for size, width in ((sizes.qproj_size, E), (sizes.kproj_size, sizes.k_size))
    )
    if of_query != of_key:
        left = f"a size of 0 leaves k_size = {sizes.k_size}"
        expected = f"make key heads as wide as query heads, {of_query} ({left})"
        raise ValueError(checks.message(operator, "kproj_size", expected, sizes.kproj_size))
    return sizes


def unpack(operator: str, arguments: Mapping[str, Any], sizes: SourceSizes) -> IOWeightBias:
    """Returns the parts of the argument `io_weight_bias`; None where a part takes no room."""
    E, k, v, H, q, kp, vp, o = sizes
    matrices = ((E, q), (k, kp), (v, vp), (vp or H * v, o))
    # Shapes of the four weights, then of their biases.
    shapes: list[tuple[int, ...] | None] = [m if m[1] else None for m in matrices]
    for flag, (_, width) in zip(BIASES, matrices, strict=True):
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
