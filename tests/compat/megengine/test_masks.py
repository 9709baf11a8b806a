"""Masks of every style, merged by the rules of the source."""

import jax
import numpy as np
import pytest
from compat.megengine.calls import ALL, E, H, L, N, S, assert_as_source, draw
from compat.programs import outputs_and_gradients

from jax_attn_bwd.compat import megengine


def bands():
    """name -> (masks and flags of the call, what they add to the logits (N, H, L, S))."""
    rng = np.random.default_rng(5)
    hidden = rng.random((N, S)) < 0.5
    hidden[:, 1] = False
    floats = rng.standard_normal((N * H, L, S))
    minus = lambda x: np.where(x, -np.inf, 0.0)
    row, column = np.arange(L)[:, None], np.arange(S)
    window = np.array([[0, 1, 0], [2, 5, 4]], np.int32)
    counts = np.array([[L, L], [4, 3]], np.int32)  # queries, keys
    outside = (column < window[0][:, None]) | (column >= window[1][:, None])
    outside = outside[None] | (column >= counts[1][:, None, None])
    return {
        "causal": ({"is_causal": True}, minus(column > row)[None, None]),
        "both": (
            {"attn_mask": floats, "key_padding_mask": hidden},
            floats.reshape(N, H, L, S) + minus(hidden)[:, None, None],
        ),
        "cudnn": (
            {"attn_mask": window, "key_padding_mask": counts, "maybe_cudnn_style_mask": True},
            minus(outside)[:, None],
        ),
    }


@pytest.mark.parametrize("name", ["causal", "both", "cudnn"])
def test_masks_are_merged_by_the_rules(name):
    masks, added = bands()[name]
    rows = name == "cudnn"
    assert_as_source((E,) * 4, ALL, draw(rows=rows), added, masks)


def test_indices_of_a_narrow_dtype_do_not_wrap():
    """There are 300 keys, and uint8 tells 256 apart."""
    window, lengths = np.array([[0, 1, 2], [4, 5, 6]]), np.array([[3], [250]])
    query, key = np.ones((1, 3, 4)), np.random.default_rng(0).standard_normal((1, 300, 4))

    def weights(dtype):
        return megengine.multi_head_attention(
            query, key, key, 4, 2, 0.0, 0.0, np.ones(64), 4, 4, 4, 4, need_weights=True,
            maybe_cudnn_style_mask=True, attn_mask=window.astype(dtype),
            key_padding_mask=lengths.astype(dtype),
        )[1]  # fmt: skip

    np.testing.assert_array_equal(weights(np.uint8), weights(np.int32))


@pytest.mark.parametrize(
    "masks", [("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")], ids="+".join
)
def test_beside_a_mask_is_causal_changes_nothing(masks):
    """Nor does the hint do any harm: it is the same program."""
    given = draw(flags=(False,) * 4)
    every = {"attn_mask": np.eye(L, S, dtype=bool), "key_padding_mask": np.zeros((N, S))}
    masks = {name: every[name] for name in masks}

    def program(is_causal):
        return str(
            jax.make_jaxpr(
                lambda q, k, v, w: megengine.multi_head_attention(
                    q, k, v, E, H, 0.0, 0.0, w, is_causal=is_causal, **masks
                )
            )(*given.values())
        )

    assert program(True) == program(False)


def test_a_query_that_sees_nothing_gives_the_output_bias():
    given = draw()
    masks = {
        "attn_mask": np.array([[0, 1, 0], [2, 1, 4]]),
        "key_padding_mask": np.array([[L, 1], [S, 3]]),
        "maybe_cudnn_style_mask": True,
    }

    def run(given):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, 0.0, 0.0, given["io_weight_bias"],
            qbias=True, kbias=True, vbias=True, obias=True, need_weights=True, **masks,
        )  # fmt: skip

    cotangents = lambda outputs: tuple(np.ones(x.shape) for x in outputs)
    (out, weights), gradients = outputs_and_gradients(run, given, cotangents)
    empty = np.array([[False, True, False], [False, True, True]])
    bias = np.asarray(given["io_weight_bias"])[0, -E:]
    np.testing.assert_array_equal(np.asarray(out)[empty], np.broadcast_to(bias, (3, E)))
    np.testing.assert_array_equal(np.asarray(weights).reshape(N, H, L, S).swapaxes(1, 2)[empty], 0)
    np.testing.assert_array_equal(np.asarray(gradients["query"])[empty], 0)
    assert all(np.isfinite(g).all() for g in gradients.values())
