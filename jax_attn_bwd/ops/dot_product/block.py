"""The equations of a block of the plane, be it a tile, a strip or the whole: each stands here once.

What a block's elements are made of, (1) of `backward.py`, is one chain: the product of queries and keys, the
soft cap, the bias, the score, what is seen, and after the softmax dropout. The gradients go back through it,
(5), (6), (8) to (11), and tangents through it, (13) and (14) of `tangent.py`. A layout has letters: queries
are `[..., rows, h]`, keys and values `[..., s, h]`, elements the axes of `elements`. What lies around a block
is the caller's: the product of queries and keys, which each layout takes its own way, and the softmax.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, moved, to_rank
from jax_attn_bwd._core.products import factor_dtype, product
from jax_attn_bwd.ops.dot_product import layout, mod_functions
from jax_attn_bwd.ops.dot_product.spec import Operands, Options


@dataclass(eq=False)
class Block:
    """Queries, keys and values of a block, and what its elements read, in one order of axes with them."""

    options: Options
    q: jax.Array  # [..., rows, H]
    k: jax.Array  # [..., s, H]
    v: jax.Array  # [..., s, Hv]
    bias: jax.Array | None = None  # of the elements, or of size 1
    seen: Any = None  # likewise: an array, or several whose conjunction would be larger; None = all
    places: mod_functions.Elements | None = None  # where the elements stand, with a `score_mod`
    args: tuple[Any, ...] = ()  # what it reads
    draw: Callable[[], jax.Array | None] | None = None  # draws the dropout factors; None = no dropout
    rows: str = "gt"  # the axes of queries
    elements: str = "gts"
    einsum: Callable[..., jax.Array] = field(default_factory=lambda: product)

    @property
    def dtype(self) -> Any:
        """The accumulator's dtype."""
        return accumulator_dtype(self.q.dtype)

    @property
    def dlogits_dtype(self) -> Any:
        """The dtype of derivatives of logits as factors of a product."""
        return factor_dtype(self.dtype, self.q.dtype)

    @property
    def product(self) -> dict[str, Any]:
        """Keywords by which products are taken."""
        return {"precision": self.options.precision, "preferred_element_type": self.dtype}

    @cached_property
    def z(self) -> jax.Array | None:
        """The dropout factors, drawn when first asked for; None = no dropout."""
        return None if self.draw is None else self.draw()

    def transposed(self) -> "Block":
        """Turns elements `[..., g, t, s]` into `[..., s, g, t]`."""
        turn = lambda x: moved(x, -1, -3)
        bias, seen, places = jax.tree.map(turn, (self.bias, self.seen, self.places))
        draw = None if (given := self.draw) is None else lambda: jax.tree.map(turn, given())
        return replace(self, bias=bias, seen=seen, places=places, draw=draw, elements="sgt")

    def before_score(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Computes (c of (1); tanh of the soft cap) from scale * q k^T."""
        cap, tanh = self.options.logits_soft_cap, None
        if cap is not None:
            tanh = jnp.tanh(logits / cap)
            logits = cap * tanh
        return logits if self.bias is None else logits + self.bias.astype(self.dtype), tanh

    def logits(self, product: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        """Computes ((1), -inf where unseen; what `before_score` gives) from scale * q k^T."""
        logits, _ = of = self.before_score(product)
        if self.places is not None:
            logits = mod_functions.scored(self.options, logits, self.places, self.args)
        return self.where_seen(logits, -jnp.inf), of

    def where_seen(self, x: jax.Array, otherwise: float = 0) -> jax.Array:
        """Returns `x` of the elements, and another number where a query does not see a key."""
        for seen in jax.tree.leaves(self.seen):
            x = jnp.where(seen, x, otherwise)
        return x

    def pushed_forward(
        self, logits: jax.Array, dlogits: jax.Array, dbias: jax.Array | None, dargs: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Computes ((1), (14)) from scale * q k^T and its tangent (12); any number where unseen."""
        logits, tanh = self.before_score(logits)
        if tanh is not None:
            dlogits = dlogits * (1 - tanh * tanh)
        if dbias is not None:
            dlogits = dlogits + dbias.astype(self.dtype)  # (13)
        if self.places is None:
            return logits, dlogits
        return mod_functions.pushed_forward(self.options, logits, self.places, self.args, dlogits, dargs)

    def dropped(self, x: jax.Array) -> jax.Array:
        """Multiplies `x` of the elements with the dropout factors."""
        return x if self.z is None else self.z * x

    def through_values(self, dout: jax.Array) -> jax.Array:
        """Computes (6): what the output's cotangent `[..., rows, Hv]` gives to that of the probabilities."""
        axes = f"...{self.rows}h,...sh->...{self.elements}"
        return self.dropped(self.einsum(axes, dout.astype(self.v.dtype), self.v, **self.product))

    def gradients(
        self, wanted: Any, p: Any, dout: Any, dp: Any, delta: Any, of: Any = (None, None), apart: bool = False
    ) -> dict[str, Any]:
        """Computes what the block gives to the gradients that are `wanted`, in the accumulator's dtype.

        Those of query, key and value have the layout of these, that of the bias has all elements.

        Args:
          wanted: names of operands.
          p: the probabilities.
          dout: `[..., rows, Hv]`, cotangent of the output.
          dp, delta: cotangent of the probabilities, and what the rows' products p dp sum to, over all keys of
            the row; for no more than "value" they may be None.
          of: what `before_score` gave, if there is a score or a soft cap.
          apart: whether each batch entry and head has a gradient of what the score reads.
        """
        # Through the product with the values.
        grads: dict[str, Any] = {}
        if "value" in wanted:
            over_queries = f"...{self.elements},...{self.rows}h->...sh"
            dropped = self.dropped(p).astype(dout.dtype)
            grads["value"] = self.einsum(over_queries, dropped, dout, **self.product)  # (5)
        if not set(wanted) - {"value"}:
            return grads
        return grads | self.gradients_of_logits(wanted, p * (dp - delta), of, apart)  # (8)

    def gradients_of_logits(
        self, wanted: Any, dlogits: Any, of: Any = (None, None), apart: bool = False
    ) -> dict[str, Any]:
        """Computes what (8) gives to the gradients that are `wanted` but the values', as `gradients` does."""
        # Through the score, the bias and the soft cap, in the reverse order of the forward.
        grads: dict[str, Any] = {}
        multiply, (before, tanh) = partial(self.einsum, **self.product), of
        over_queries = f"...{self.elements},...{self.rows}h->...sh"
        is_turned = self.elements == "sgt"
        if self.places is not None:  # (8a)
            given = self.options, before, self.places, self.args, dlogits
            if apart and "mod_args" in wanted:
                dlogits, dargs = mod_functions.pulled_back_apart(*given, groups=-2 if is_turned else -3)
            else:
                dlogits, dargs = mod_functions.pulled_back(*given, "mod_args" in wanted)
            grads |= {} if dargs is None else {"mod_args": dargs}
        if "bias" in wanted:
            grads["bias"] = moved(dlogits, -3, -1) if is_turned else dlogits
        if tanh is not None:
            dlogits = dlogits * (1 - tanh * tanh)  # (10)

        # Back to queries and keys; of transposed elements k^T dx^T, and dq is turned back.
        dx = dlogits.astype(self.dlogits_dtype)
        if "query" in wanted:
            over_keys = f"...{self.elements},...sh->..." + ("hgt" if is_turned else f"{self.rows}h")
            dq = self.options.scale * multiply(over_keys, dx, self.k.astype(dx.dtype))  # (11)
            grads["query"] = moved(dq, -3, -1) if is_turned else dq
        if "key" in wanted:
            q, scale = self.queries
            dk = multiply(over_queries, dx, q.astype(dx.dtype))  # (11)
            grads["key"] = dk if scale is None else scale * dk
        return grads

    @property
    def queries(self) -> tuple[jax.Array, float | None]:
        """The queries, and the scale by which what is made of them is multiplied; None = they are scaled."""
        return self.q, self.options.scale


def scaled_product(block: Block, q: jax.Array, k: jax.Array) -> jax.Array:
    """Computes scale * q k^T of a tile or a strip, in the layout of its elements.

    Wide factors: the scale goes into q. Then the logits are bare sums of products, the same bits in the
    forward and in the backward, and exp(logits - lse) is exact where one logit of 1e5 takes all. (Where
    it multiplies the logits, compilers contract it with the subtraction, and round differently.)
    """
    options, in_q = block.options, q.dtype == block.dtype
    q = q * options.scale if in_q else q
    *lead, S, H = k.shape
    rows = q.shape[len(lead) : -1]  # (G, T), or (n,) of a strip
    q = q.reshape(*lead, math.prod(rows), H)
    # XLA:CPU of JAX 0.10 sums in an order that depends on the width of the second factor, so where that
    # may differ the product is taken as in the forward, and transposed afterwards.
    transposed = block.elements == "sgt"
    swap = transposed and all(isinstance(n, int) and n % 64 == 0 for n in (q.shape[-2], S))
    factors = (k, q) if swap else (q, k)
    logits = product("...ah,...bh->...ab", *factors, **block.product)
    logits = logits.reshape(*lead, *((S, *rows) if swap else (*rows, S)))
    if transposed and not swap:
        logits = moved(logits, -1, -3)
    return logits if in_q else options.scale * logits


class DropoutCounters(NamedTuple):
    """Counters that the dropout bits of an element are a function of."""

    keys: dropout.Words  # each [..., K, G]
    rows: jax.Array  # [T] uint32
    columns: jax.Array  # [S] uint32

    def factors(self, options: Options, dtype: Any, drawn_once: bool) -> jax.Array:
        """Draws the factors of these elements, `[..., K, G, T, S]`."""
        first, second = (x[..., None, None] for x in self.keys)
        rows, columns = to_rank(self.rows[:, None], first.ndim), to_rank(self.columns, first.ndim)
        return dropout.factors((first, second), rows, columns, options.dropout_rate, dtype, drawn_once)


def dropout_counters(options: Options, operands: Operands, block_q: int, block_k: int) -> DropoutCounters:
    """Counts what dropout bits are drawn from, rows and columns padded to whole blocks."""
    # Where the call's block begins; an index may be an array already.
    batch, T, S, K, groups = operands.sizes
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)

    def index(n, start):
        return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)

    # A key for each batch entry and head [..., K, G], or one for all.
    if options.broadcast_dropout:
        batch_index = head_index = jnp.zeros((1,) * (len(batch) + 2), jnp.uint32)
    else:
        batch_index = index(math.prod(batch), offset.batch).reshape(*batch, 1, 1)
        head_index = index(K * groups, offset.head).reshape(K, groups)
        head_index = to_rank(head_index, batch_index.ndim)
    assert operands.dropout_words is not None  # checked with the arguments
    return DropoutCounters(
        dropout.head_keys(operands.dropout_words, batch_index, head_index),
        layout.pad(index(T, offset.row), {0: block_q}),
        layout.pad(index(S, offset.column), {0: block_k}),
    )


def dropout_factors(
    options: Options, operands: Operands, columns: jax.Array | None = None
) -> jax.Array | None:
    """Returns the factors of the plane `[..., K, G, T, S]`, or of other `columns [n]` (uint32).

    None = no dropout.
    """
    if options.dropout_rate == 0:
        return None
    counters = dropout_counters(options, operands, 1, 1)
    if columns is not None:
        counters = counters._replace(columns=columns)
    return counters.factors(options, accumulator_dtype(operands.query.dtype), drawn_once=True)
