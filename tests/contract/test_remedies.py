"""Mistakes of a first hour: what is said of them, and what is simply taken."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn_bwd as jab
from jax_attn_bwd.ops.graph.edge_ops import edge_softmax_bwd

GRAPH = jab.BipartiteCSC.from_edge_index(np.array([[0, 1], [1, 2]]), 3)
X = jnp.ones((3, 4))
Q, SEEN = jnp.ones((2, 4, 3, 4)), jnp.ones((2, 1, 4, 4), bool)
Tensor = type("Tensor", (), {"__module__": "torch"})


def dense(**options):
    return jab.dot_product_attention(Q, Q, Q, **options)


def deformable(value):
    points = jnp.ones((1, 1, 4, 1, 1, 2))
    return jab.multi_scale_deformable_attention(value, ((2, 3),), points, points[..., 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jab.dot_product_attention(Tensor(), X, X), r"pass query\.detach\(\)\.cpu\(\)\.numpy\(\)"),
        (lambda: jab.graph_attention(GRAPH, X, None, jnp.ones((1, 2, 4)), num_heads=2), "write .*ravel"),
        (
            lambda: jab.multi_head_attention(jab.MultiHeadAttentionParams(query_kernel=X.T), X),
            r"params.query_kernel must have shape \[Eq, N, H\], .* write kernel.reshape\(Eq, N, H\)",
        ),
        (
            lambda: jab.graph_attention(
                GRAPH.with_self_loops(), X, None, jnp.ones(12), num_heads=2, edge=jnp.ones((2, 4))
            ),
            r"the graph has self-loops: add them by graph.with_self_loops\(edge\)",
        ),
        (
            lambda: jab.multi_scale_deformable_attention(
                [jnp.ones((1, 2, 3, 1, 1))],
                ((3, 2),),
                jnp.ones((1, 1, 1, 1, 1, 2)),
                jnp.ones((1, 1, 1, 1, 1)),
            ),
            r"spatial_shapes holds \(H, W\), height before width",
        ),
        (lambda: jab.explain(jnp.dot, X), "calls no operator of jax_attn_bwd"),
        (lambda: jab.explain(X), r"f must be a function, got .*; explain\(f, \*args"),
        (lambda: dense(bias=SEEN), "what is True or False goes in mask=bias"),
        (lambda: jab.dot_product_attention(Q, Q, Q, None, None, 0.1, True), "torch calls .* told by mask="),
        (lambda: dense(bias=jnp.ones((4, 4, 3))), r"write jnp.moveaxis\(bias, -1, -3\)"),
        (lambda: dense(local_window_size=(-1, -1)), "None is no window"),
        (lambda: dense(key_value_seq_lengths=jnp.array([0, 2, 4])), "from a running sum, cu_seqlens, write"),
        (lambda: dense(logits_soft_cap=0.0), "None is no cap"),
        (lambda: dense(mask_mod=SEEN), "an array goes in mask$"),
        (lambda: dense(score_mod=jab.mods.alibi), "write a tuple of the slopes of alibi"),
        (lambda: jab.multi_head_attention(X, jab.MultiHeadAttentionParams()), "params come first"),
        (lambda: jab.multi_head_attention({}, X), r"write MultiHeadAttentionParams\(\*\*params\)"),
        (lambda: deformable(jnp.ones((1, 6, 8))), r"write value.reshape\(B, S, M, D\)"),
        (lambda: deformable([jnp.ones((1, 8, 2, 3))]), r"from \[B, C, H, W\] write x.transpose"),
        (lambda: jab.BipartiteCSC.from_edge_index(np.zeros((5, 2), int), 3), "write edge_index.T"),
        (lambda: jab.batch_graphs(GRAPH, GRAPH), r"batch_graphs\(\[a, b\]\)"),
        (lambda: jab.edge_softmax(jab.batch_graphs([GRAPH]), X[0]), r"got GraphBatch; write batch\.graph$"),
        (lambda: dense(key_value_seq_lengths=SEEN[:, 0, 0]), r"write key_value_seq_lengths\.sum\(-1\)"),
        (
            lambda: dense(key_value_seq_lengths=np.ones((2, 4), int)),
            r"_seq_lengths\.sum\(-1\), with the padd",
        ),
        (lambda: dense(is_causal=SEEN), "an array of who attends goes in mask$"),
        (lambda: dense(score_mod=jab.mods.causal), "a function of who attends is mask_mod$"),
        (lambda: jab.dot_product_attention([1.0], Q, Q), r"write jnp\.asarray\(query\)"),
        (lambda: jab.dot_product_attention(Q, Q[:, :, :2], Q[:, :, :2]), r"K = 2; .* x\.swapaxes\(-3, -2\)"),
        (lambda: jab.gated_linear_attention(Q, Q, Q, None, X), "a beta is the fifth of gated_delta_rule"),
        (lambda: jab.scaled_masked_softmax(X, 0.5), "a number is given by name: scale=$"),
        (lambda: jab.parallel.attention_fn("data"), "mesh must be a jax.sharding.Mesh, got 'data'; axes are"),
    ],
)
def test_the_remedy_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    "told",
    [
        {"mask": jnp.ones((4, 1, 1, 32), bool)},
        {"bias": jnp.ones((3, 32, 32))},
        {"query_segment_ids": jnp.ones((4, 32), int), "key_value_segment_ids": jnp.ones((4, 32), int)},
        {"key_value_positions": jnp.arange(32)},
    ],
    ids=lambda told: next(iter(told)),
)
def test_what_fits_only_if_heads_precede_tokens_is_told_the_layout(told):
    x = jnp.ones((4, 3, 32, 2))  # [B, N, T, H]
    with pytest.raises(ValueError, match=r"must broadcast to .*; the layout is \[\.\.\., T, N, H\]; from"):
        jab.dot_product_attention(x, x, x, **told)
    with pytest.raises(ValueError, match=r"must broadcast to [^;]*$"):
        jab.dot_product_attention(x, x, x, mask=jnp.ones((4, 1, 1, 31), bool))


def test_what_jax_says_of_a_jvp_is_found_in_the_readme():
    call = lambda x: jab.dot_product_attention(x, x, x)
    with pytest.raises(TypeError) as caught:
        jax.jvp(call, (X[:, None],), (X[:, None],))
    of_jax, _ = str(caught.value).split("\n")  # the other line is ours
    assert of_jax.rstrip(".") in (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        (jab, "flash_attention", "write jax_attn_bwd.dot_product_attention"),
        (jab, "GATConv", "write jax_attn_bwd.layers.<framework>.GATConv"),
        (jab.layers, "nnx", "layers stand in equinox, flax_linen, flax_nnx"),
    ],
)
def test_names_of_other_libraries(module, name, ours):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; {ours}"):
        getattr(module, name)


def test_heads_in_the_place_of_tokens_warn():
    x = jnp.ones((1, 4, 64, 2))  # [B, N, T, H]
    with pytest.warns(UserWarning, match=r"T = 4 tokens and N = 64 heads.*swapaxes\(-3, -2\)"):
        jab.dot_product_attention(x, x, x)
    step = jnp.ones((1, 1, 64, 2))
    jab.dot_product_attention(step, x, x)  # many heads and one query: a step of decoding


def test_what_is_taken():
    assert jab.BipartiteCSC.from_edge_index(np.zeros((2, 0)), 3).capacity == 0
    scores, dweights = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    weights = jab.edge_softmax(GRAPH, scores)
    np.testing.assert_array_equal(weights, jab.edge_softmax(GRAPH, scores[:, None])[:, 0])
    by_columns = edge_softmax_bwd(dweights[:, None], GRAPH, weights[:, None])[:, 0]
    np.testing.assert_array_equal(edge_softmax_bwd(dweights, GRAPH, weights), by_columns)
    layer = jab.multi_head_attention(jab.MultiHeadAttentionParams(), X, num_heads=2, average_weights=True)
    np.testing.assert_array_equal(
        layer, jab.multi_head_attention(jab.MultiHeadAttentionParams(), X, num_heads=2)
    )


def test_a_mask_of_numbers_in_haiku():
    hk = pytest.importorskip("haiku")
    from jax_attn_bwd.layers.haiku import MultiHeadAttention

    mask, x = np.tri(3), X[None].astype(np.float32)
    call = hk.transform(
        lambda mask: MultiHeadAttention(2, 2, w_init=hk.initializers.Constant(0.1))(x, x, x, mask)
    )
    params = call.init(jax.random.key(0), mask)
    np.testing.assert_array_equal(call.apply(params, None, mask), call.apply(params, None, mask != 0))


def test_check_compiles_and_may_be_cut_short():
    """`JAX_DISABLE_JIT=1 python -m jax_attn_bwd.check ... | head -1`: the reader leaves at the first line."""
    command = [sys.executable, "-m", "jax_attn_bwd.check", "edge_mean", "--dtypes", "float32", "--json"]
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_DISABLE_JIT": "1"}
    )
    os.close(write)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr
