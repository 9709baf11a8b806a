"""Takes matrix products of two arrays."""

import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, PartitionSpec

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.choices import Rule
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import explicit_mesh, explicit_spec

NARROW_AS_A_CALL = Rule(
    "narrow_product_as_a_call",
    "CPU, a product of narrow matrices in a wider dtype: a call of its own, else they are widened",
    "XLA:CPU merges transpositions into a dot of narrow factors, and then refuses to run it.",
    "crash",
)
WIDE_DERIVATIVES = Rule(
    "wide_derivatives",
    "CPU, narrow queries: derivatives of logits stay wide as factors",
    "Terms cancel where keys or values have a mean: rounded, the error in bfloat16 was 3 times `jax.nn`'s.",
    "accuracy",
)
AXES_OF_ONE = Rule(
    "sums_without_axes_of_one",
    "one CPU, an axis of length 1 beside the summed one",
    "Up to 50 times as slow otherwise.",
    until="0.11",
)
ROUNDED_BY_KERNELS = Rule(
    "rounded_by_kernels",
    "GPU, strips, no precision asked for: a wide factor is rounded by the product that reads it",
    "Saves one pass over the probabilities: 6 bytes an element.",
    "memory",
)
NARROW_PRODUCTS = Rule(
    "narrow_products",
    "a device that multiplies bfloat16; on a CPU heads of 64 or more, several rows: factors stay narrow",
    "A step takes 0.5 to 1 of the time (c5ed7f4).",
)
RULES = (NARROW_AS_A_CALL, WIDE_DERIVATIVES, AXES_OF_ONE, ROUNDED_BY_KERNELS, NARROW_PRODUCTS)
_ROUNDED = {  # products whose kernels round wide factors as they read them; TF32 has the mantissa of float16
    "bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": lax.DotAlgorithmPreset.TF32_TF32_F32,
}
_DOT_GENERAL, _CODE = lax.dot_general, lax.dot_general.__code__


def are_replaced() -> bool:
    """Tells whether a tool has put another function, or other code, in the place of `lax.dot_general`.

    So does qwix, which quantises layers and gives them LoRA parameters.
    """
    return lax.dot_general is not _DOT_GENERAL or lax.dot_general.__code__ is not _CODE


def factor_dtype(wide: Any, narrow: Any) -> Any:
    """Returns the dtype of derivatives of logits as factors of a product whose other factor is `narrow`."""
    return wide if WIDE_DERIVATIVES.holds(wide != narrow and targets.platform() == "cpu") else narrow


def rounded_product(subscripts: str, wide: jax.Array, narrow: jax.Array, precision: Any) -> jax.Array:
    """Multiplies with `wide` rounded to the dtype of `narrow`, on a GPU by the kernel that reads it."""
    dtype, algorithm = wide.dtype, _ROUNDED.get(str(narrow.dtype))
    may_round = precision is None and algorithm is not None and targets.platform() == "gpu"
    if ROUNDED_BY_KERNELS.holds(may_round):
        narrow, precision = narrow.astype(dtype), algorithm
    else:
        wide = wide.astype(narrow.dtype)
    return product(subscripts, wide, narrow, precision=precision, preferred_element_type=dtype)


def product(
    subscripts: str, x: jax.Array, y: jax.Array, *, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """Computes the `jnp.einsum` of two arrays that is one matrix product, and traces that alone.

    `...` stands for the same axes in front of the first term and of others; each letter is in two terms or in
    all. Axes are summed in the order in which the second factor has them, so that XLA merges those that lie
    side by side: `jnp.einsum` sums them in the order of their letters, and factors are turned for it.
    """
    own = len(subscripts.partition(",")[0].removeprefix("..."))
    lead = (string.digits + string.ascii_uppercase)[: x.ndim - own]
    *terms, out = subscripts.replace("...", lead).replace("->", ",").split(",")
    kept = [n for n in out if n in terms[0] and n in terms[1]]
    summed = [n for n in terms[1] if n in terms[0] and n not in out]

    # the order of the factors that leaves least to be turned, as `jnp.einsum` chooses it
    rest = ["".join(n for n in term if n not in kept + summed) for term in terms]
    if out != (order := "".join([*kept, *rest])):
        x, y, terms, order = y, x, terms[::-1], "".join([*kept, *rest[::-1]])
    axes: Any = tuple(tuple(tuple(map(term.index, names)) for term in terms) for names in (summed, kept))
    multiply = _narrow_product if _are_narrow(x, y, preferred_element_type) else lax.dot_general
    found = multiply(x, y, axes, precision, preferred_element_type=preferred_element_type)
    return lax.transpose(found, [order.index(n) for n in out])


def einsum(subscripts: str, x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """Computes `product`; on an Explicit mesh each axis of the result is sharded as in an operand.

    Contracted axes may be sharded: the devices' shares are summed. `...` stands in front of a term.
    """
    if (mesh := explicit_mesh((x, y))) is None:
        return product(subscripts, x, y, **options)

    *inputs, output = subscripts.replace("->", ",").split(",")
    sharded: dict[str, Any] = {}
    for term, a in zip(inputs, (x, y), strict=True):
        for axis, mesh_axis in zip(_axes(term, a.ndim), explicit_spec(a), strict=True):
            sharded[axis] = sharded.get(axis) or mesh_axis
    batch = sum(axis.startswith("batch") for axis in sharded) if "..." in output else 0
    rank = batch + len(output.removeprefix("..."))
    spec = PartitionSpec(*(sharded[axis] for axis in _axes(output, rank)))
    dtype = options.get("preferred_element_type")
    if _are_narrow(x, y, dtype):
        x, y = x.astype(dtype), y.astype(dtype)
    return jnp.einsum(subscripts, x, y, out_sharding=NamedSharding(mesh, spec), **options)


def accumulated(subscripts: str, x: jax.Array, y: jax.Array, precision: Any = None) -> jax.Array:
    """Computes `einsum`, accumulated and returned in float32 or wider."""
    dtype = accumulator_dtype(x.dtype)
    if dtype != x.dtype and not NARROW_PRODUCTS.holds(targets.multiplies(x.dtype)):
        x, y = x.astype(dtype), y.astype(dtype)
    return einsum(subscripts, x, y, precision=precision, preferred_element_type=dtype)


def sum_of_products(x: jax.Array, y: jax.Array, axis: int = -1, keepdims: bool = False) -> jax.Array:
    """Returns the sums of `x * y`, two arrays of one rank, over an axis."""
    axis %= x.ndim
    lengths = enumerate(zip(x.shape, y.shape, strict=True))
    ones = tuple(i for i, both in lengths if both == (1, 1) and i != axis)
    is_slow = jax.__version_info__ < (0, 11) and bool(ones) and explicit_mesh((x, y)) is None
    if not AXES_OF_ONE.holds(is_slow and targets.is_one_cpu()):
        return (x * y).sum(axis, keepdims=keepdims)
    found = (lax.squeeze(x, ones) * lax.squeeze(y, ones)).sum(axis - sum(i < axis for i in ones))
    found = lax.expand_dims(found, sorted((*ones, axis)))
    return found if keepdims else lax.squeeze(found, (axis,))


def _axes(term: str, rank: int) -> list[str]:
    """Names each of the `rank` axes of an einsum's term; `...` is counted from its end."""
    letters = term.removeprefix("...")
    batch = rank - len(letters)
    return [f"batch {i - batch}" for i in range(batch)] + list(letters)


def _are_narrow(x: jax.Array, y: jax.Array, dtype: Any) -> bool:
    """Tells whether these are factors, on a CPU, of a product of a wider `dtype`."""
    return dtype is not None and x.dtype == y.dtype != dtype and targets.platform() == "cpu"


def _narrow_product(
    x: jax.Array, y: jax.Array, axes: Any, precision: Any, *, preferred_element_type: Any
) -> jax.Array:
    """Computes `lax.dot_general` of narrow factors in the one form that XLA:CPU is sure to take.

    It decides early whether it multiplies them as they are, by a dot whose first factor has the summed axis
    last. Later it merges transpositions, of a factor or of the result, into the dot, and refuses to run one
    whose first factor came to be turned. So the factors are turned here, and the dot is a call of its own,
    which is not inlined. Vectors it widens itself, in the loop that sums: that must not be a call.
    """
    (summed_x, summed_y), (kept_x, kept_y) = axes
    dtype = preferred_element_type
    own_x, own_y = _own_axes(x, kept_x, summed_x), _own_axes(y, kept_y, summed_y)
    sizes_x, sizes_y = [x.shape[axis] for axis in own_x], [y.shape[axis] for axis in own_y]
    is_vector, is_placed = 1 in (math.prod(sizes_x), math.prod(sizes_y)), explicit_mesh((x, y)) is not None
    if not NARROW_AS_A_CALL.holds(not (is_vector or is_placed)):
        return lax.dot_general(x.astype(dtype), y.astype(dtype), axes, precision)

    y_is_turned = y.ndim - 1 in summed_y
    x = _as_matrices(x, kept_x, own_x, summed_x)
    y = _as_matrices(y, kept_y, *((own_y, summed_y) if y_is_turned else (summed_y, own_y)))
    with set_xla_metadata(inlineable="false"):
        found = _of_matrices(y_is_turned, precision, dtype, x, y)
    return found.reshape(*found.shape[:-2], *sizes_x, *sizes_y)


def _own_axes(x: jax.Array, kept: Sequence[int], summed: Sequence[int]) -> list[int]:
    return [axis for axis in range(x.ndim) if axis not in (*kept, *summed)]


def _as_matrices(x: jax.Array, kept: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """Returns `x` as `[*kept, rows, columns]`, each of the last two merged from several axes.

    The transposition is bound even where it moves nothing: `jax.vmap` puts its own axis in front there.
    """
    turned = lax.transpose_p.bind(x, permutation=(*kept, *rows, *columns))
    merged = (math.prod(x.shape[axis] for axis in group) for group in (rows, columns))
    return turned.reshape(*(x.shape[axis] for axis in kept), *merged)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _of_matrices(y_is_turned: bool, precision: Any, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes the products of matrices `x [..., m, k]` and `y [..., k, n]`, or `[..., n, k]`."""
    kept = tuple(range(x.ndim - 2))
    axes = ((x.ndim - 1,), (y.ndim - (1 if y_is_turned else 2),)), (kept, kept)
    return lax.dot_general(x, y, axes, precision, dtype)
