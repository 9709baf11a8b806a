"""The kinds of graph attention in registers: the equations of `kinds/`, for a block of heads.

Arrays are `[R, H]` or `[R, H, D]`, of an edge of each of R segments, float32. tanh is made of exp, whose
approximation by the hardware is good to the last bits; that of tanh itself is not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.numerics import total
from jax_attn_bwd.ops.graph.kernels.gpu_body import Registers, spread
from jax_attn_bwd.ops.graph.spec import Options


class Ends(NamedTuple):
    """The parts of an edge's score: numbers for gat, else rows."""

    src: jax.Array
    dst: jax.Array
    edge: jax.Array | None

    @classmethod
    def of(cls, read: Registers, seen: jax.Array | None) -> "Ends":
        """Picks the ends of an edge from what was read; 0 where the bias hides it."""
        return cls(*(shown(read.get(name), seen) for name in cls._fields))

    @property
    def total(self) -> jax.Array:
        """Z of gat, u of gatv2."""
        return total(*self)

    @property
    def key(self) -> jax.Array:
        """The key of the transformer, with the edge's features."""
        return total(self.src, self.edge)


class Pulled(NamedTuple):
    """The shares of an edge in the operands' gradients through its score, for ds of that score."""

    src: jax.Array
    dst: jax.Array
    edge: jax.Array
    handed: jax.Array  # [R, H]
    a: Any  # [R, H, D], gatv2


def shown(x: Any, seen: jax.Array | None) -> Any:
    """Returns `x`, 0 for heads that do not see the edge; None stays None."""
    if x is None or seen is None:
        return x
    return jnp.where(spread(seen, x), x, 0.0)


def seen_by(read: Registers) -> jax.Array | None:
    """Tells from which heads the bias does not hide the edge; None = from none."""
    return read["bias"] != -jnp.inf if "bias" in read else None


def score(options: Options, ends: Ends, a: Any, read: Registers, seen: jax.Array | None) -> jax.Array:
    """Computes the score of an edge, `[R, H]`, with its bias."""
    if options.kind == "gat":
        s = _activate(options, ends.total)
    elif options.kind == "gatv2":
        s = jnp.sum(a * _activate(options, ends.total), axis=-1)
    else:
        s = options.scale * jnp.sum(ends.dst * ends.key, axis=-1)
    return s if seen is None else jnp.where(seen, s + read["bias"], -jnp.inf)


def message(options: Options, ends: Ends, read: Registers, seen: jax.Array | None) -> jax.Array:
    """Returns x of an edge, `[R, H, D]`; `read` has the source's, where that is not what the score reads."""
    if options.kind == "gatv2":
        return ends.src
    x = shown(read["message"], seen)
    return total(x, ends.edge) if options.kind == "transformer" else x


def pull(options: Options, ends: Ends, a: Any, ds: jax.Array) -> Pulled:
    """Pulls ds back to the ends: (7), (9) with (10), or (11) without the share of the message."""
    if options.kind == "gat":
        dz = ds * _slope(options, ends.total)
        return Pulled(dz, dz, dz, dz, None)
    if options.kind == "gatv2":
        ds_row = spread(ds, ends.src)
        du = ds_row * a * _slope(options, ends.total)
        return Pulled(du, du, du, ds, ds_row * _activate(options, ends.total))
    scaled = spread(options.scale * ds, ends.src)
    return Pulled(scaled * ends.dst, scaled * ends.key, scaled * ends.dst, ds, None)


def _activate(options: Options, z: jax.Array) -> jax.Array:
    alpha = options.alpha
    match options.activation:
        case "relu":
            return jnp.maximum(z, 0.0)
        case "sigmoid":
            return 1.0 / (1.0 + jnp.exp(-z))
        case "tanh":
            return 1.0 - 2.0 / (1.0 + jnp.exp(2.0 * z))
        case "elu":
            return jnp.where(z > 0, z, jnp.exp(jnp.minimum(z, 0.0)) - 1.0)
        case "scalar":
            return alpha * z
        case "leaky_relu":
            return jnp.where(z > 0, z, alpha * z)
    return z


def _slope(options: Options, z: jax.Array) -> Any:
    one, zero, alpha = (np.float32(x) for x in (1.0, 0.0, options.alpha))
    match options.activation:
        case "relu":
            return jnp.where(z > 0, one, zero)
        case "sigmoid":
            y = _activate(options, z)
            return y * (1.0 - y)
        case "tanh":
            y = _activate(options, z)
            return 1.0 - y * y
        case "elu":
            return jnp.where(z > 0, one, jnp.exp(jnp.minimum(z, 0.0)))
        case "scalar":
            return alpha
        case "leaky_relu":
            return jnp.where(z >= 0, one, alpha)
    return one
