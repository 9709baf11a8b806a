"""Which device holds which tokens: orders that share causal work evenly.

With n devices and the tokens in order, device 0 sees one n-th of the keys and device n - 1 all of them, and
each step of a ring takes as long as its slowest device. Here every device holds early tokens and late ones.
`layout="zigzag"` of the exchanges tells attention where its tokens lie.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, keywords


@keywords.known
def zigzag(x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """`x` in an order whose n-th parts hold two stretches each: of 2n stretches, part i has i and 2n - 1 - i.

    Tiles stay whole: for causal attention this is the layout to take.

    Args:
      x: any array, jax or NumPy; the whole sequence, outside `jax.shard_map`.
      n: number of devices along the sequence.
      axis: axis of the sequence, which 2n divides.

    Returns:
      An array like `x`; `unzigzag` undoes it.

    Gradients:
      The cotangent, permuted back.

    Raises:
      ValueError: 2n does not divide the axis, or there is no such axis.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd.parallel import zigzag
      >>> zigzag(np.arange(8), 2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]

    References:
      Zhu, ring-flash-attention, zigzag_ring_flash_attn, github.com/zhuzilin/ring-flash-attention.
    """
    x, axis, n = _checked("zigzag", x, n, axis, 2)
    return _reordered(x, axis, _stretches(n))


@keywords.known
def unzigzag(x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """The inverse of `zigzag`: the same arguments, gradients and errors."""
    x, axis, n = _checked("unzigzag", x, n, axis, 2)
    return _reordered(x, axis, np.argsort(_stretches(n)))


@keywords.known
def striped(x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """`x` in an order whose n-th parts hold every n-th token: part i has i, i + n, i + 2n and so on.

    The parts' causal work differs by one key per query, but every tile of it is cut by the diagonal.

    Args:
      x: any array, jax or NumPy; the whole sequence, outside `jax.shard_map`.
      n: number of devices along the sequence.
      axis: axis of the sequence, which n divides.

    Returns:
      An array like `x`; `unstriped` undoes it.

    Gradients:
      The cotangent, permuted back.

    Raises:
      ValueError: n does not divide the axis, or there is no such axis.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd.parallel import striped
      >>> striped(np.arange(6), 2).tolist()
      [0, 2, 4, 1, 3, 5]

    References:
      Brandon et al., Striped attention, 2023, arXiv:2311.09431.
    """
    x, axis, n = _checked("striped", x, n, axis, 1)
    return _transposed(x, axis, (x.shape[axis] // n, n))


@keywords.known
def unstriped(x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """The inverse of `striped`: the same arguments, gradients and errors."""
    x, axis, n = _checked("unstriped", x, n, axis, 1)
    return _transposed(x, axis, (n, x.shape[axis] // n))


def positions(operator: str, layout: str, n: int, device: Any, length: int) -> jax.Array:
    """Returns the places in the whole sequence, int32 `[length]`, of the tokens that one of n devices holds.

    What `zigzag(jnp.arange(n * length), n)`, or `striped`, gives the device of that (traced) number.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if layout == "striped":
        return index * n + device
    if length % 2:
        expected = "have a multiple of 2n tokens in the zigzag layout, two stretches for each device"
        raise ValueError(checks.message(operator, "the sequence", expected, n * length, "pad it"))
    half = length // 2
    late = (2 * n - 1 - device) * half + index - half
    return jnp.where(index < half, device * half + index, late)


def _checked(operator: str, x: Any, n: Any, axis: Any, stretches: int) -> tuple[Any, int, int]:
    x = x if checks.is_array(x) else jnp.asarray(x)
    n, axis = checks.integer(operator, "n", n, least=1), checks.integer(operator, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(checks.message(operator, "axis", f"be one of the {x.ndim} axes of x", axis))
    if x.shape[axis] % (stretches * n):
        expected = (
            f"have a multiple of {'2n' if stretches == 2 else 'n'} = {stretches * n} tokens along axis {axis}"
        )
        raise ValueError(checks.message(operator, "x", expected, x.shape, "pad the sequence"))
    return x, axis % x.ndim, n


def _stretches(n: int) -> np.ndarray:
    """Returns the order in which `zigzag` puts 2n stretches."""
    early = np.arange(n)
    return np.stack([early, 2 * n - 1 - early], 1).ravel()


def _reordered(x: Any, axis: int, order: np.ndarray) -> Any:
    """Puts the stretches of `x` along `axis`, as many as `order` has, in that order."""
    length = x.shape[axis] // len(order)
    cut = x.reshape(*x.shape[:axis], len(order), length, *x.shape[axis + 1 :])
    return cut.take(order, axis).reshape(x.shape)


def _transposed(x: Any, axis: int, plane: tuple[int, int]) -> Any:
    """Writes the tokens of `x` along `axis` as the rows of a plane, and reads it column by column."""
    cut = x.reshape(*x.shape[:axis], *plane, *x.shape[axis + 1 :])
    return cut.swapaxes(axis, axis + 1).reshape(x.shape)
