"""Dropout whose mask is a function of (key, batch, head, row, column) and of nothing else.

A Threefry-2x32 cipher maps a 64-bit counter, two uint32 words, to pseudo-random bits. The key of each
(batch, head) is the cipher of that pair under the caller's key; the bits of an element are the cipher
of (row, column) under the key of its (batch, head). So every implementation, tiling, rematerialisation
and shard of one call draws the same mask, and no mask is ever stored.

References:
  Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, doi:10.1145/2063384.2063405
  (13 rounds of Threefry-2x32 pass BigCrush; 20 are its default).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, fusion

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_KEY_ROUNDS, _ELEMENT_ROUNDS = 20, 13

Words = tuple[jax.Array, jax.Array]


def threefry(key: Words, counter: Words, rounds: int = 20) -> Words:
    """Returns Threefry-2x32 of `counter` under `key`; all are pairs of uint32 arrays that broadcast."""
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for r in range(rounds):
        rotation = _ROTATIONS[r % 8]
        x = x + y
        y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
        y = y ^ x
        if r % 4 == 3:
            injection = r // 4 + 1
            x = x + schedule[injection % 3]
            y = y + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return x, y


def check_key(operator: str, key: Any, argument: str = "dropout_key") -> None:
    """Checks that `key` is one JAX random key, of any type, or None."""
    if key is None:
        return
    typed = checks.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = checks.is_array(key) and key.dtype == jnp.uint32 and key.shape in ((2,), (4,))
    if not raw and not (typed and key.ndim == 0):
        got = f"{key.dtype}{list(key.shape)}" if checks.is_array(key) else type(key).__name__
        several = checks.is_array(key) and key.ndim > (not typed)
        remedy = "pass one of them, or call under jax.vmap" if several else "pass jax.random.key(0)"
        raise TypeError(checks.message(operator, argument, "be one JAX random key", got, remedy))


def key_words(key: jax.Array) -> jax.Array:
    """Returns two uint32 words `[2]` that stand for a key which `check_key` passed."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key).ravel() if typed else jnp.asarray(key)
    first, second = words[0], words[1]
    for i in range(2, words.size, 2):  # longer keys (rbg) are folded in, two words at a time
        first, second = threefry((first, second), (words[i], words[min(i + 1, words.size - 1)]))
    return jnp.stack([first, second])


class Offset(NamedTuple):
    """Where this call's block lies in the global array; row and column may be index arrays."""

    batch: Any  # uint32 [], or [...] of all batch axes
    head: Any  # [] or [N]
    row: Any  # [] or [T]
    column: Any  # [] or [S]


def or_origin(offset: Offset | None) -> Offset:
    """Returns `offset`; the beginning of the array where there is none."""
    return offset or Offset(*[jnp.uint32(0)] * 4)


def offset(operator: str, value: Any, rows: int, columns: int) -> Offset | None:
    """Checks `dropout_offset` and returns it as uint32 arrays."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 4:
        expected = "be (batch, head, row, column)"
        raise ValueError(checks.message(operator, "dropout_offset", expected, repr(value)))
    parts = []
    sizes = {"batch": None, "head": None, "row": rows, "column": columns}
    for part, (name, size) in zip(value, sizes.items(), strict=True):
        array = checks.integers(operator, f"dropout_offset {name}", part, least=0)
        if array.shape not in ((), (size,)):
            expected = "be a scalar" if size is None else f"be a scalar or of shape ({size},)"
            raise ValueError(checks.message(operator, f"dropout_offset {name}", expected, array.shape))
        parts.append(array.astype(jnp.uint32))
    return Offset(*parts)


def words_and_offset(
    operator: str, rates: dict[str, float], key: Any, at: Any, rows: int, columns: int
) -> tuple[jax.Array | None, Offset | None]:
    """Checks `dropout_key` and `dropout_offset`; returns (words, offset), both None where every rate is 0."""
    check_key(operator, key)
    place = offset(operator, at, rows, columns)
    if not any(rates.values()):
        return None, None
    if key is None:
        given = (f"{name} = {rate}{' > 0' if rate else ''}" for name, rate in rates.items())
        expected = f"be given when {', '.join(given)}"
        raise ValueError(checks.message(operator, "dropout_key", expected, None, "pass jax.random.key(0)"))
    return key_words(key), place


def head_keys(words: jax.Array, batch: jax.Array, head: jax.Array) -> Words:
    """Returns the key of each (batch, head); `batch` and `head` are uint32 indices that broadcast."""
    return threefry((words[0], words[1]), (batch, head), _KEY_ROUNDS)


def keep(keys: Words, row: jax.Array, column: jax.Array, rate: float) -> jax.Array:
    """Tells whether each element survives; `keys`, `row` and `column` are uint32 and broadcast."""
    bits, _ = threefry(keys, (row, column), _ELEMENT_ROUNDS)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def factors(
    keys: Words, row: jax.Array, column: jax.Array, rate: float, dtype: Any, drawn_once: bool = True
) -> jax.Array:
    """Returns the factor of each element: 1 / (1 - rate) for those that `keep` passes, else 0.

    Drawn once, the cipher is not computed again in every fusion that reads the factors: derivatives of high
    order read them so often that their programs compiled for minutes. A tile that is walked over has one
    reader, and is faster for holding no mask.
    """
    survivor, kept = jnp.asarray(survivor_factor(rate), dtype), keep(keys, row, column, rate)
    return jnp.where(fusion.barrier(kept) if drawn_once else kept, survivor, 0)


def survivor_factor(rate: float) -> float:
    """Returns the factor of a surviving probability, which keeps its expectation."""
    return 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
