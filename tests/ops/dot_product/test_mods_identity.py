"""Masks and scores are static arguments: equal ones, their copies and their pickles are one and the same."""

import copy
import pickle
import pydoc
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jax_attn_bwd import dot_product_attention, mods, parallel
from jax_attn_bwd.ops.dot_product.mod_functions import by_value


@mods.Mask
def below(batch, head, row, column):
    """A mask from the caller's own module."""
    return column < row


MADE = {
    "causal": lambda: mods.causal,
    "of the caller": lambda: below,
    "window": lambda: mods.sliding_window(4),
    "joined": lambda: mods.causal & ~mods.dilated(2) | mods.document,
    "prefix": lambda: mods.prefix_lm | mods.static_prefix_lm(3) & mods.global_tokens(2),
    "tree": lambda: mods.tree,
    "alibi": lambda: mods.alibi,
    "relative": lambda: mods.relative_bias(3),
    "soft_cap": lambda: mods.soft_cap(2.0),
    "static_alibi": lambda: mods.static_alibi(6),
    "attention over a mesh": lambda: parallel.attention_fn(
        jax.sharding.Mesh(jax.devices()[:2], ("s",)), sequence="s"
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_equal_ones_and_copies_are_one_static_argument(name):
    one, other = MADE[name](), MADE[name]()
    copies = [other, copy.copy(one), copy.deepcopy(one)]
    if name != "attention over a mesh":  # JAX's meshes are of this process
        copies += [pickle.loads(pickle.dumps(one))]
    for found in copies:
        assert found == one
        assert hash(found) == hash(one)


def test_other_numbers_are_another_static_argument():
    assert mods.sliding_window(4) != mods.sliding_window(5)
    assert mods.causal & mods.document != mods.causal | mods.document


def test_help_says_what_is_read():
    assert "Reads `ids`, int `[T]`" in pydoc.render_doc(mods.document, renderer=pydoc.plaintext)


def test_a_function_made_anew_for_each_call_is_told_once():
    """At the third one, where each was compiled; under jit they are compiled with the rest."""
    x = jnp.ones((1, 3, 1, 2))
    call = lambda: dot_product_attention(x, x, x, mask_mod=lambda b, h, r, c: c <= r)
    jax.jit(lambda: [call() for _ in range(4)])()
    call(), call()
    with pytest.warns(
        UserWarning, match="mask_mod must be defined once: .*, got the third one that .*py:.*; hand"
    ):
        call()
    call()
    for _ in range(4):
        dot_product_attention(x, x, x, mask_mod=mods.sliding_window(2), score_mod=mods.soft_cap(2.0))


def test_a_partial_made_anew_is_the_same_static_argument():
    calls = []

    def within(batch, head, row, column, reach, *, back):
        calls.append(reach)
        return (column <= row + reach) & (row - column <= back)

    made = lambda reach: partial(partial(within, back=2), reach=reach)
    x = jnp.ones((1, 3, 1, 2))
    dot_product_attention(x, x, x, mask_mod=made(0))
    first = len(calls)
    dot_product_attention(x, x, x, mask_mod=made(0))
    assert len(calls) - first < first  # checked again, and not compiled again
    assert by_value(made(0)) is by_value(made(0))
    assert len({by_value(made(reach)) for reach in (1, 1.0, True, 0.0, -0.0)}) == 5
    of_array = partial(within, jnp.ones(()))
    assert by_value(of_array) is of_array
