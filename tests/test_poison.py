"""NaN and Inf where nothing attends reach no output and no gradient, of first or second order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close

from jax_attn_bwd import (
    MultiHeadAttentionParams,
    dot_product_attention,
    dot_product_attention_bwd,
    multi_head_attention,
    scaled_masked_softmax,
    scaled_masked_softmax_bwd,
)

POISON = np.array([np.nan, np.inf, -np.inf])


def poisoned(x, where, seed=3):
    """`x` with NaN, +Inf and -Inf in turns `where`."""
    pick = POISON[np.random.default_rng(seed).integers(0, 3, x.shape)]
    return np.where(where, pick.astype(x.dtype), x)


def spread(x, like):
    """`x` with axes behind until it has as many as `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def in_pairs(arrays):
    """(floating, the rest): what is differentiated, and what is not."""
    floating = {n: x for n, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
    return floating, {n: x for n, x in arrays.items() if n not in floating}


def first_order(function, options):
    """`(arrays, cts) -> outputs and gradients by name`, one compiled program for all poisons."""

    @jax.jit
    def run(arrays, cts):
        inputs, rest = in_pairs(arrays)
        out, pullback = jax.vjp(lambda i: function(**i, **rest, **options), inputs)
        out = {f"output {i}": x for i, x in enumerate(jax.tree.leaves(out))}
        return out | {f"d{name}": x for name, x in pullback(cts)[0].items()}

    return run


def second_order(function, options):
    """`(arrays, cts) -> gradients of a random linear form of the gradient`, by name."""

    def form(inputs, cts, rest):
        _, pullback = jax.vjp(lambda i: function(**i, **rest, **options), inputs)
        (gradients,) = pullback(cts)
        rng = np.random.default_rng(9)
        return sum(jnp.vdot(x, rng.standard_normal(x.shape)) for x in gradients.values())

    @jax.jit
    def run(arrays, cts):
        inputs, rest = in_pairs(arrays)
        by_input, by_ct = jax.grad(form, (0, 1))(inputs, cts, rest)
        return by_input | {f"ct {i}": x for i, x in enumerate(jax.tree.leaves(by_ct))}

    return run


# ---------------------------------------------------------------------- dense attention
# A case gives the arguments that hide something; who sees whom follows from them by definition.

B, N, K, H, HV = 2, 4, 2, 8, 6


def some(rng, *shape, keep):
    return {"mask": rng.random(shape) < keep}


def mask_keys(rng, t, s):
    return some(rng, B, 1, 1, s, keep=0.5), {}


def mask_one_key_head(rng, t, s):
    """Columns hidden from the heads of one group are seen by those of the other."""
    mask = rng.random((B, N, t, s)) < 0.7
    mask[:, :2, :, ::3] = False
    mask[:, 2:, :, 1::3] = False
    return {"mask": mask}, {}


def mask_rows(rng, t, s):
    return some(rng, B, 1, t, 1, keep=0.5), {}


def mask_rows_of_heads(rng, t, s):
    return some(rng, 1, N, t, 1, keep=0.5), {}


def mask_everything(rng, t, s):
    return {"mask": np.zeros((1, 1), bool)}, {}


def key_lengths(rng, t, s):
    return {"key_value_seq_lengths": np.array([s // 2, 0], np.int32)}, {}


def both_lengths(rng, t, s):
    lengths = {"key_value_seq_lengths": np.array([s - 1, 2], np.int32)}
    return lengths | {"query_seq_lengths": np.array([t // 3, t - 1], np.int32)}, {}


def causal(rng, t, s):
    return {}, {"is_causal": True}


def window(rng, t, s):
    return {}, {"local_window_size": (2, 1)}


def window_of_positions(rng, t, s):
    """Queries far to the right of most keys, some beyond the reach of every key."""
    positions = {"query_positions": (np.arange(t) + s - 3).astype(np.int32)}
    return positions, {"local_window_size": (2, 0), "is_causal": True}


def causal_positions(rng, t, s):
    """The first queries precede every key; the last keys follow every query."""
    return {
        "query_positions": np.arange(t, dtype=np.int32),
        "key_value_positions": np.arange(s, dtype=np.int32) + t // 2,
    }, {"is_causal": True}


def segments(rng, t, s):
    return {
        "query_segment_ids": np.sort(rng.integers(0, 3, (B, t)), -1).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(1, 5, (B, s)), -1).astype(np.int32),
    }, {}


def bias_minus_inf(rng, t, s):
    bias = rng.standard_normal((1, N, 1, s))
    bias[..., rng.random(s) < 0.4] = -np.inf
    return {"bias": bias}, {}


def bias_minus_inf_rows(rng, t, s):
    bias = rng.standard_normal((B, 1, t, s))
    bias[:, :, ::3] = -np.inf
    return {"bias": bias}, {"logits_soft_cap": 2.0}


def mask_and_causal(rng, t, s):
    """Neither hides column 3 alone: the rows that the mask lets see it come before it."""
    mask = rng.random((B, 1, t, s)) < 0.8
    mask[:, :, 3:, 3] = False
    return {"mask": mask}, {"is_causal": True}


def mask_and_lengths(rng, t, s):
    """Column 1 is seen by rows beyond the query length only."""
    mask = np.ones((B, 1, t, s), bool)
    mask[:, :, : t - 2, 1] = False
    return {"mask": mask, "query_seq_lengths": np.array([t - 2, t - 3], np.int32)}, {}


def bias_and_window(rng, t, s):
    """Column 2 is within the window of rows 1 to 4, to all of which the bias hides it."""
    bias = rng.standard_normal((1, 1, t, s))
    bias[:, :, 1:5, 2] = -np.inf
    return {"bias": bias}, {"local_window_size": (2, 1)}


def sink_and_rows(rng, t, s):
    mask = {"mask": rng.random((B, 1, t, s)) < 0.3}
    mask["mask"][:, :, 1::3] = False
    return mask | {"sink": 3 * rng.standard_normal(N)}, {}


def sink_and_lengths(rng, t, s):
    arrays, options = both_lengths(rng, t, s)
    return arrays | {"sink": 3 * rng.standard_normal(N)}, {"is_causal": True}


def dropout(rng, t, s):
    arrays, _ = both_lengths(rng, t, s)
    options = {"dropout_rate": 0.4, "is_causal": True}
    return arrays | {"dropout_key": np.array([3, 4], np.uint32)}, options


CASES = (
    mask_keys, mask_one_key_head, mask_rows, mask_rows_of_heads, mask_everything, key_lengths,
    both_lengths, causal, window, window_of_positions, causal_positions, segments, bias_minus_inf,
    bias_minus_inf_rows, mask_and_causal, mask_and_lengths, bias_and_window, sink_and_rows,
    sink_and_lengths, dropout,
)  # fmt: skip


def visibility(t, s, arrays, options):
    """Who sees whom `[B, N, T, S]`, by the definition."""
    seen = np.ones((B, N, t, s), bool)
    if "mask" in arrays:
        seen &= arrays["mask"]
    if "bias" in arrays:
        seen &= arrays["bias"] > -np.inf
    if "query_seq_lengths" in arrays:
        seen &= np.arange(t)[:, None] < arrays["query_seq_lengths"][:, None, None, None]
    if "key_value_seq_lengths" in arrays:
        seen &= np.arange(s) < arrays["key_value_seq_lengths"][:, None, None, None]
    if "query_segment_ids" in arrays:
        rows = arrays["query_segment_ids"][:, None, :, None]
        seen &= rows == arrays["key_value_segment_ids"][:, None, None, :]
    row = arrays.get("query_positions", np.arange(t))[:, None]
    column = arrays.get("key_value_positions", np.arange(s))
    if options.get("is_causal"):
        seen &= column <= row
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        seen &= (row - column <= left) & (column - row <= right)
    return seen


def attention_case(case, t, s):
    """(clean arrays, poisoned arrays, clean cotangents, poisoned ones, options)."""
    rng = np.random.default_rng(11)
    extra, options = case(rng, t, s)
    seen = visibility(t, s, extra, options)
    clean = {
        "query": rng.standard_normal((B, t, N, H)),
        "key": rng.standard_normal((B, s, K, H)),
        "value": rng.standard_normal((B, s, K, HV)),
    } | extra
    blind = ~seen.any(-1).transpose(0, 2, 1)  # [B, T, N]
    unseen = ~seen.reshape(B, K, N // K, t, s).any((2, 3)).transpose(0, 2, 1)  # [B, S, K]
    assert blind.any() or unseen.any()  # else the case proves nothing
    bad = dict(clean)
    for name, hidden in (("query", blind), ("key", unseen), ("value", unseen)):
        bad[name] = poisoned(clean[name], spread(hidden, clean[name]))
    dout, dlse = rng.standard_normal((B, t, N, HV)), rng.standard_normal((B, t, N))
    # with a sink a row that sees nothing still has an lse, whose cotangent counts
    bad_dlse = dlse if "sink" in clean else poisoned(dlse, blind)
    return clean, bad, (dout, dlse), (poisoned(dout, blind[..., None]), bad_dlse), options, blind


def attend(**arguments):
    return dot_product_attention(**arguments, return_residual=True)


def over(*cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.__name__)


@over(*CASES)
def test_attention_outputs_and_gradients(case):
    clean, bad, cts, bad_cts, options, blind = attention_case(case, 9, 13)
    run = first_order(attend, options)
    expected = run(clean, cts)
    got = run(bad, bad_cts)
    assert_trees_close(got, expected, 1e-12)

    out, lse = got["output 0"], got["output 1"]
    np.testing.assert_array_equal(out[blind], 0)
    np.testing.assert_array_equal(got["dquery"][blind], 0)
    empty = np.broadcast_to(clean.get("sink", -np.inf), lse.shape)
    np.testing.assert_array_equal(lse[blind], empty[blind])
    for name, x in got.items():
        if name != "output 1":
            assert np.isfinite(x).all(), name


@over(
    mask_one_key_head, mask_rows, key_lengths, window_of_positions, segments, bias_minus_inf_rows,
    sink_and_rows, dropout,
)  # fmt: skip
def test_attention_at_second_order(case):
    clean, bad, cts, bad_cts, options, _ = attention_case(case, 9, 13)
    run = second_order(attend, options)
    expected = run(clean, cts)
    got = run(bad, bad_cts)
    for name, x in got.items():
        assert np.isfinite(x).all(), name
    assert_trees_close(got, expected, 1e-12)


@over(key_lengths, both_lengths, causal, segments, mask_and_causal, sink_and_lengths, window)
def test_attention_over_several_tiles(case):
    clean, bad, cts, bad_cts, options, _ = attention_case(case, 300, 700)
    run = first_order(attend, options)
    expected = run(clean, cts)
    assert_trees_close(run(bad, bad_cts), expected, 1e-12)


@over(both_lengths, causal)
def test_attention_over_several_tiles_at_second_order(case):
    clean, bad, cts, bad_cts, options, _ = attention_case(case, 300, 700)
    run = second_order(attend, options)
    expected = run(clean, cts)
    assert_trees_close(run(bad, bad_cts), expected, 1e-12)


@over(mask_one_key_head, both_lengths, causal_positions, bias_minus_inf_rows, sink_and_rows)
def test_attention_plain_backward(case):
    """`dot_product_attention_bwd` called by hand, as a user with saved out and lse calls it."""
    clean, bad, cts, bad_cts, options, _ = attention_case(case, 9, 13)

    def gradients(arrays, cts):
        outputs = attend(**arrays, **options)
        wrt = tuple(in_pairs(arrays)[0])
        grads = dot_product_attention_bwd(
            cts[0], **arrays, **options, out=outputs[0], lse=outputs[1], dlse=cts[1], wrt=wrt
        )
        return {name: getattr(grads, name) for name in wrt}

    assert_trees_close(gradients(bad, bad_cts), gradients(clean, cts), 1e-12)


@over(mask_keys, mask_one_key_head, both_lengths, causal, window, segments)
def test_attention_bias_at_hidden_places(case):
    """A bias added to a logit that is masked anyway takes no part, whatever it holds."""
    clean, _, cts, _, options, _ = attention_case(case, 9, 13)
    bias = np.random.default_rng(6).standard_normal((B, N, 9, 13))
    hidden = ~visibility(9, 13, clean, options)
    clean, bad = clean | {"bias": bias}, clean | {"bias": poisoned(bias, hidden)}
    run = first_order(attend, options)
    expected = run(clean, cts)
    assert_trees_close(run(bad, cts), expected, 1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_attention_with_logits_of_1e4_in_float32(rng, sign):
    """Small integers make the logits exact, so that float32 has no excuse."""
    t, s = 9, 13
    shapes = {"query": (B, t, N, H), "key": (B, s, K, H)}
    arrays = {n: rng.integers(-4, 5, shape).astype(np.float32) for n, shape in shapes.items()}
    arrays["value"] = rng.standard_normal((B, s, K, HV)).astype(np.float32)
    cts = (rng.standard_normal((B, t, N, HV)), rng.standard_normal((B, t, N)))
    options = {"scale": sign * 1e4 / 64, "is_causal": True}
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    logits = np.einsum("btkgh,bskh->bkgts", wide["query"].reshape(B, t, K, 2, H), wide["key"])
    assert np.abs(logits * options["scale"]).max() > 1e4
    run = first_order(attend, options)
    got = run(arrays, tuple(ct.astype(np.float32) for ct in cts))
    expected = run(wide, cts)
    for name, x in got.items():
        assert np.isfinite(x).all(), name
        # the backward starts from lse, whose float32 neighbours near 1e4 lie 1e-3 apart
        assert_close(x, expected[name], 1e-6 if name.startswith("output") else 1e-3, name)


# ---------------------------------------------------------------------- softmax

SHAPE = (2, 3, 9, 13)


def rows_and_columns(rng, *, columns=True):
    """A mask with hidden columns, scattered holes and rows that see nothing."""
    mask = rng.random((2, 1, 9, 13)) < 0.7
    mask[:, :, 2::4] = False
    if columns:
        mask[..., ::5] = False
    return mask


SOFTMAX = {
    "scale": lambda rng: ({"mask": rows_and_columns(rng)}, {"scale": -0.5}),
    "scale_zero": lambda rng: ({"mask": rows_and_columns(rng)}, {"scale": 0.0}),
    "mask_columns": lambda rng: ({"mask": rng.random((2, 1, 1, 13)) < 0.5}, {}),
    "scale_of_heads": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal((3, 1, 1))}, {}),
    "scale_of_columns": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal(13)}, {}),
    "scale_of_rows": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal((9, 1))}, {}),
    "scale_bias_sink": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal(()),
         "bias": rng.standard_normal((3, 1, 13)), "sink": rng.standard_normal((3, 1))}, {}),
    "bias_minus_inf": lambda rng: (
        {"bias": np.where(rows_and_columns(rng), rng.standard_normal(SHAPE), -np.inf)}, {}),
    "bias_minus_inf_scale": lambda rng: (
        {"bias": np.where(rows_and_columns(rng), rng.standard_normal(SHAPE), -np.inf),
         "scale": rng.standard_normal((3, 1, 1))}, {}),
    "sink": lambda rng: ({"mask": rows_and_columns(rng), "sink": rng.standard_normal(())}, {}),
    "uniform": lambda rng: ({"mask": rows_and_columns(rng)}, {"fully_masked": "uniform"}),
    "uniform_scale_sink": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal(13),
         "sink": rng.standard_normal((9,))}, {"fully_masked": "uniform"}),
    "nan": lambda rng: (
        {"mask": rows_and_columns(rng), "scale": rng.standard_normal((9, 1))},
        {"fully_masked": "nan"}),
    "causal": lambda rng: ({}, {"is_causal": True}),
    "causal_scale": lambda rng: ({"scale": rng.standard_normal(())}, {"is_causal": True}),
    "window": lambda rng: ({"mask": rows_and_columns(rng)}, {"local_window_size": (1, 2)}),
    "axis_0": lambda rng: ({"mask": rows_and_columns(rng)}, {"axis": 0}),
    "axis_1_sink": lambda rng: (
        {"mask": rng.random(SHAPE) < 0.5, "sink": rng.standard_normal((9, 13)),
         "scale": rng.standard_normal((3, 1, 1))}, {"axis": 1}),
}  # fmt: skip
softmaxes = pytest.mark.parametrize("name", SOFTMAX)


def softmax_case(name):
    """(clean arrays, poisoned arrays, dy, poisoned dy, options, hidden places)."""
    rng = np.random.default_rng(13)
    extra, options = SOFTMAX[name](rng)
    seen = np.ones(SHAPE, bool) & extra.get("mask", True) & (extra.get("bias", 0.0) > -np.inf)
    row, column = np.arange(9)[:, None], np.arange(13)
    if options.get("is_causal"):
        seen &= column <= row
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        seen &= (row - column <= left) & (column - row <= right)
    assert not seen.all()
    clean = {"x": rng.standard_normal(SHAPE)} | extra
    bad = clean | {"x": poisoned(clean["x"], ~seen)}
    dy = rng.standard_normal(SHAPE)
    return clean, bad, dy, poisoned(dy, ~seen), options, ~seen


@softmaxes
def test_softmax_output_and_gradients(name):
    clean, bad, dy, bad_dy, options, hidden = softmax_case(name)
    run = first_order(scaled_masked_softmax, options)
    expected = run(clean, dy)
    got = run(bad, bad_dy)
    assert_trees_close(got, expected, 1e-12)
    np.testing.assert_array_equal(got["dx"][hidden], 0)
    for key, x in got.items():
        if not (key == "output 0" and options.get("fully_masked") == "nan"):
            assert np.isfinite(x).all(), key


@pytest.mark.parametrize(
    "name",
    ["scale", "scale_of_columns", "scale_bias_sink", "bias_minus_inf_scale", "uniform_scale_sink",
     "nan", "causal_scale", "axis_1_sink"],
)  # fmt: skip
def test_softmax_at_second_order(name):
    clean, bad, dy, bad_dy, options, _ = softmax_case(name)
    run = second_order(scaled_masked_softmax, options)
    expected = run(clean, dy)
    got = run(bad, bad_dy)
    for key, x in got.items():
        assert np.isfinite(x).all(), key
    assert_trees_close(got, expected, 1e-12)


@pytest.mark.parametrize("name", ["scale_bias_sink", "uniform", "causal"])
def test_softmax_bias_at_hidden_places(name):
    clean, _, dy, _, options, hidden = softmax_case(name)
    bias = np.random.default_rng(6).standard_normal(SHAPE)
    clean, bad = clean | {"bias": bias}, clean | {"bias": poisoned(bias, hidden)}
    run = first_order(scaled_masked_softmax, options)
    expected = run(clean, dy)
    assert_trees_close(run(bad, dy), expected, 1e-12)


@pytest.mark.parametrize(
    ("name", "with_mask"),
    [("scale", True), ("mask_columns", False), ("uniform", True), ("axis_0", False)],
)
def test_softmax_plain_backward(name, with_mask):
    """y = 0 tells what was masked; only rows filled with "uniform" need the mask itself."""
    clean, bad, dy, bad_dy, options, hidden = softmax_case(name)
    y = scaled_masked_softmax(**bad, **options)
    mask = clean["mask"] if with_mask else None
    static = {k: v for k, v in options.items() if k in ("scale", "axis")}
    got = scaled_masked_softmax_bwd(bad_dy, y, mask, **static)
    expected = first_order(scaled_masked_softmax, options)(clean, dy)["dx"]
    assert_close(got, expected, 1e-12)


def test_softmax_in_row_blocks(rng):
    """Large enough for the loop over blocks of rows."""
    shape = (1, 2, 517, 1031)
    mask = rng.random((1, 1, 1, 1031)) < 0.7
    hidden = np.broadcast_to(~mask, shape)
    clean = {"x": rng.standard_normal(shape).astype(np.float32), "mask": mask}
    dy = rng.standard_normal(shape).astype(np.float32)
    clean["scale"] = np.float32([[0.5]])
    bad = clean | {"x": poisoned(clean["x"], hidden)}
    run = first_order(scaled_masked_softmax, {})
    expected, got = run(clean, dy), run(bad, poisoned(dy, hidden))
    assert_trees_close(got, expected, 1e-6)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3.0])
def test_softmax_with_logits_of_1e4_in_float32(rng, scale):
    """Integers, so that the logits are exact and the answer is known."""
    x = 1e4 + rng.integers(-5, 6, (3, 9, 13))
    x[0, :, :4] *= -1
    dy = rng.standard_normal(x.shape)
    run = first_order(scaled_masked_softmax, {"scale": scale})
    got = run({"x": x.astype(np.float32)}, dy.astype(np.float32))
    z = scale * x
    e = np.exp(z - z.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    expected = {"output 0": y, "dx": scale * y * (dy - (dy * y).sum(-1, keepdims=True))}
    assert_trees_close(got, expected, 2e-6)


# ---------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bias_that_is_not_a_number_is_not_a_mask(poison):
    """Only -inf hides: a bias that has diverged shows in the output of its row, and of no other."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((B, 5, N, H))) for _ in range(3))
    bias = jnp.zeros((5, 5)).at[1, 2].set(poison)
    out = dot_product_attention(q, k, v, bias)
    weights = scaled_masked_softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), bias=bias)
    layer = multi_head_attention(MultiHeadAttentionParams(), q[:, :, 0], num_heads=2, bias=bias)
    for x, row in ((out, 1), (weights, 2), (layer, 1)):
        broken = np.isnan(np.moveaxis(np.asarray(x), row, 0)).reshape(5, -1)
        assert broken[1].all(), poison
        assert not broken[[0, 2, 3, 4]].any(), poison
