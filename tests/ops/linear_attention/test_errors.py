"""Mistakes in a call of linear attention, and meshes on which it is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import check, ones, rows
from helpers import QUICK, assert_close, assert_trees_close, quick_jit, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn_bwd as jab
from jax_attn_bwd.ops.linear_attention import reference
from jax_attn_bwd.ops.linear_attention.cases import case

B, T, K, N, H, HV = 2, 5, 2, 4, 3, 6


def call(**changes):
    tokens = {"query": ones(B, T, K, H), "key": ones(B, T, K, H), "value": ones(B, T, N, HV)}
    gates = {"log_decay": -ones(B, T, N), "beta": ones(B, T, N)}
    return jab.gated_delta_rule(**(tokens | gates | changes))


SWAPPED = r"swapaxes\(-2, -1\)"
MISTAKES = rows(
    ("decay's shape", ValueError, r"log_decay must have shape \[\.\.\., T, N\]", {"log_decay": ones(B, T)}),
    ("swapped decay", ValueError, SWAPPED, {"log_decay": ones(B, N, T)}),
    ("swapped beta", ValueError, SWAPPED, {"beta": ones(B, N, T)}),
    ("beta's rank", ValueError, r"beta must have shape \[\.\.\., T, N\]", {"beta": ones(B, T, N, H)}),
    ("integers", TypeError, "query must be a floating-point array", {"query": ones(B, T, K, H, dtype=int)}),
    ("mixed", TypeError, "must have one dtype", {"key": ones(B, T, K, H, dtype=np.float64)}),
    ("state's shape", ValueError, "initial_state must have shape", {"initial_state": ones(B, N, HV, H)}),
    (
        "state's dtype", TypeError, r"initial_state must have dtype float32, .*astype\('float32'\)",
        {"initial_state": ones(B, N, H, HV, dtype=np.float64)},
    ),
    ("heads", ValueError, "value heads N must be a positive multiple", {"value": ones(B, T, 3, HV)}),
    ("lengths", ValueError, r"seq_lengths must lie in \[0, 5\]", {"seq_lengths": [6, 1]}),
    ("segments", TypeError, "segment_ids must be integers", {"segment_ids": ones(B, T)}),
    ("epsilon", ValueError, "l2_norm_epsilon must be positive", {"l2_norm_epsilon": 0.0}),
    ("flag", TypeError, "return_final_state must be a Python bool", {"return_final_state": 1}),
    ("kernel", NotImplementedError, "mosaic_gpu", {"implementation": "mosaic_gpu"}),
    ("name", ValueError, "implementation must be", {"implementation": "triton"}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "changes"), MISTAKES)
def test_mistakes(exception, words, changes):
    check(call, "gated_delta_rule", exception, words, changes)


def test_a_traced_scale_is_told_to_multiply_the_output():
    """Not the query, of which a norm would take it away again."""
    with pytest.raises(TypeError, match=r"scale must be .*; pass scale=1\.0, and multiply out by"):
        jax.eval_shape(lambda scale: call(scale=scale, l2_norm_epsilon=1e-6), jnp.ones((), "float32"))


def test_heads_in_the_place_of_tokens_warn():
    x = jnp.ones((1, 4, 64, 2))
    with pytest.warns(UserWarning, match=r"T = 4 tokens and N = 64 heads.*swapaxes\(-3, -2\)"):
        jab.gated_linear_attention(x, x, x)


@pytest.mark.parametrize("decay", [(B, T, N), pytest.param((B, T, N, H), marks=thorough)], ids=str)
def test_growth_is_taken_with_a_warning_where_it_may_be_a_decay(decay, rng):
    """One meaning: outside jit what is known to look like decays is told, and the same is computed."""
    given = {"query": (B, T, K, H), "key": (B, T, K, H), "value": (B, T, N, HV), "beta": (B, T, N)}
    arrays = {name: rng.standard_normal(shape) for name, shape in given.items()} | {
        "log_decay": np.full(decay, 0.5)
    }
    with pytest.warns(UserWarning, match=r"values from 0\.5 to 0\.5, .* write jnp\.log\(decay\)"):
        known = jab.gated_delta_rule(**arrays)
    expected = reference.gated_delta_rule(**{name: jnp.asarray(x) for name, x in arrays.items()})[0]
    for out in (known, quick_jit(lambda x: jab.gated_delta_rule(**x))(arrays)):
        assert_close(out, expected, 1e-12)


def test_what_erases_has_the_heads_of_keys_or_of_values():
    q, v = ones(B, T, K, H), ones(B, T, N, HV)
    erase = partial(jab.dplr_linear_attention, q, q, v, None, erase_query=q)
    name = "dplr_linear_attention"
    words = r"erase_key must have shape \[\.\.\., T, K, H\] = \(2, 5, 2, 3\) or .*\(2, 5, 4, 3\)"
    check(erase, name, ValueError, words, {"erase_key": ones(B, T, 3, H)})
    check(erase, name, TypeError, "must have one dtype", {"erase_key": ones(B, T, K, H, dtype=np.float64)})


def test_a_plain_backward_is_checked():
    tokens = [ones(B, T, K, H), ones(B, T, K, H), ones(B, T, N, HV)]
    backward = partial(jab.gated_linear_attention_bwd, query=tokens[0], key=tokens[1], value=tokens[2])
    name = "gated_linear_attention_bwd"
    check(backward, name, ValueError, "dout must have shape", {"dout": ones(B, T, K, HV)})
    wrong = {"dout": tokens[2], "wrt": ("beta",)}
    check(backward, name, ValueError, "wrt must name some of", wrong)
    state = {"dout": tokens[2], "dfinal_state": ones(B, N, HV, H)}
    check(backward, name, ValueError, "dfinal_state must have shape", state)


def test_a_sequence_that_is_cut_is_refused_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((1, 8, 2, 4)), NamedSharding(mesh, P(None, "t")))
        words = r"query must not be sharded along T, .*; jax_attn_bwd\.parallel\.gated_linear_attention"
        with pytest.raises(ValueError, match=words):
            jab.gated_linear_attention(x, x, x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_channels_on_a_mesh(axis_type):
    """Batch and heads cut: nothing is exchanged. On an Auto mesh the sequence may be cut, too."""
    arrays = case("", B=(2,), T=8, K=2, N=4, decay="channel", state=True).arrays()
    step = jax.grad(lambda x: (jab.gated_delta_rule(**x, l2_norm_epsilon=0.1) ** 2).sum())
    expected = quick_jit(step)(arrays)
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(axis_type,) * 2)
    heads = lambda n: P("b", "h") if n == "initial_state" else P("b", None, "h")
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, heads(n))) for n, x in arrays.items()}
        compiled = jax.jit(step).lower(placed).compile(QUICK)
        assert_trees_close(compiled(placed), expected, 1e-12)
        text = compiled.as_text()
        assert not [c for c in ("all-gather", "all-reduce", "collective-permute", "all-to-all") if c in text]
        if axis_type == AxisType.Auto:
            cut = lambda n: P("h") if n == "initial_state" else P(None, "b")
            placed = {n: jax.device_put(x, NamedSharding(mesh, cut(n))) for n, x in arrays.items()}
            assert_trees_close(quick_jit(step)(placed), expected, 1e-12)
