"""`compat.bnns` against the formulas of the source written out in NumPy float64, forward and backward."""

from functools import partial

import jax
import numpy as np
import pytest
from compat_helpers import QUICK
from helpers import assert_close

from jax_attn_bwd.compat import bnns

B, L, S, H, DK, DV, DM = 2, 3, 5, 2, 4, 3, 6
Triple = bnns.BNNSMHAProjectionParameters
ALL = Triple(True, True, True)


def layer(case=(), dtype=np.float64):
    """A layer with every bias; `case` may name "no_bias", "rows" and "zero"."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731

    def projection(weights, bias):
        return Triple(None, draw(*weights), None if "no_bias" in case else draw(*bias))

    rows = (draw(DK, H), draw(DV, H)) if "rows" in case else (None, None)
    return bnns.BNNSLayerParametersMultiheadAttention(
        projection((DM, DK, H), (DK, H)), projection((DM, DK, H), (DK, H)),
        projection((DM, DV, H), (DV, H)), "zero" in case, *rows,
        projection((H * DV, DM), (DM,)),
    )  # fmt: skip


def inputs(case=(), dtype=np.float64):
    rng = np.random.default_rng(2)
    batch = () if "unbatched" in case else (B,)
    query, key, value, dout = (
        rng.standard_normal((*batch, n, DM)).astype(dtype) for n in (L, S, S, L)
    )
    return query, key, value, dout


def key_mask(*shape):
    """True = ignored; key 2 stays."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    mask[..., 2] = False
    return mask


def added(case, *shape):
    """`add_to_attention`, boolean (True = -inf, never on key 2) or floating."""
    rng = np.random.default_rng(4)
    return key_mask(*shape) if "bool" in case else rng.standard_normal(shape)


def source(F, query, key, key_mask, value, x, dout):
    """The header's formulas, head by head, and their derivatives; unbatched input has no batch axis."""
    if query.ndim == 2:
        found = source(F, query[None], key[None], key_mask, value[None], x, dout[None])
        drop = ("output", "query.target_desc", "key.target_desc", "value.target_desc")
        return {name: g[0] if name in drop else g for name, g in found.items()}
    zero = lambda x: 0.0 if x is None else x  # noqa: E731
    grads = {
        f"{n}.target_desc": np.zeros_like(a)
        for n, a in zip(("query", "key", "value"), (query, key, value), strict=True)
    }
    for n in ("query", "key", "value", "output"):
        t = getattr(F, n)
        grads[f"{n}.weights"] = np.zeros_like(t.weights)
        if t.bias is not None:
            grads[f"{n}.bias"] = np.zeros_like(t.bias)
    if F.key_attn_bias is not None:
        grads |= {"key_attn_bias": np.zeros((DK, H)), "value_attn_bias": np.zeros((DV, H))}
    out = np.zeros_like(dout)
    for b in range(len(query)):
        heads = []
        for h in range(H):
            at = lambda t: zero(None if t is None else t[:, h])  # noqa: E731, B023
            q = query[b] @ F.query.weights[:, :, h] + at(F.query.bias)
            k = key[b] @ F.key.weights[:, :, h] + at(F.key.bias)
            v = value[b] @ F.value.weights[:, :, h] + at(F.value.bias)
            if F.key_attn_bias is not None:
                k, v = (
                    np.vstack([k, F.key_attn_bias[:, h]]),
                    np.vstack([v, F.value_attn_bias[:, h]]),
                )
            if F.add_zero_attn:
                k, v = np.vstack([k, np.zeros(DK)]), np.vstack([v, np.zeros(DV)])
            r = q @ k.T / np.sqrt(DK)
            if x is not None:
                plane = {2: lambda: x, 3: lambda: x[h], 4: lambda: x[b, h]}[x.ndim]()  # noqa: B023
                r[:, :S] += np.where(plane, -np.inf, 0.0) if x.dtype == bool else plane
            if key_mask is not None:
                r[:, :S][:, key_mask if key_mask.ndim == 1 else key_mask[b]] = -np.inf
            p = np.exp(r - r.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            heads.append((q, k, v, p))
        z = np.hstack([p @ v for *_, v, p in heads])
        out[b] = z @ F.output.weights + zero(F.output.bias)
        grads["output.weights"] += z.T @ dout[b]
        if F.output.bias is not None:
            grads["output.bias"] += dout[b].sum(0)
        dz = np.split(dout[b] @ F.output.weights.T, H, 1)
        for h, (q, k, v, p) in enumerate(heads):
            dp = dz[h] @ v.T
            dr = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(DK)
            parts = {"query": dr @ k, "key": dr.T @ q, "value": p.T @ dz[h]}
            if F.key_attn_bias is not None:
                grads["key_attn_bias"][:, h] += parts["key"][S]
                grads["value_attn_bias"][:, h] += parts["value"][S]
            for n, a in (("query", query), ("key", key), ("value", value)):
                g, t = parts[n][: a.shape[1]], getattr(F, n)
                grads[f"{n}.target_desc"][b] += g @ t.weights[:, :, h].T
                grads[f"{n}.weights"][:, :, h] += a[b].T @ g
                if t.bias is not None:
                    grads[f"{n}.bias"][:, h] += g.sum(0)
    return {"output": out} | grads


def by_name(deltas):
    """Every delta that is not None, by the source's names."""
    found = {
        "key_attn_bias": deltas.key_attn_bias_delta,
        "value_attn_bias": deltas.value_attn_bias_delta,
    }
    for name in ("query", "key", "value", "output"):
        triple = getattr(deltas, f"{name}_param_delta")
        found |= {f"{name}.{field}": x for field, x in triple._asdict().items()}
    return {name: x for name, x in found.items() if x is not None}


def backward(F, query, key, mask, value, x, dout, **more):
    asked = dict(
        batch_size=None, query_param_delta=ALL, key_param_delta=ALL, value_param_delta=ALL,
        key_attn_bias_delta=True, value_attn_bias_delta=True, output=None,
        output_param_delta=Triple(dout, True, True),
    )  # fmt: skip
    return bnns.apply_multihead_attention_backward(
        F=F,
        query=query,
        key=key,
        key_mask=mask,
        value=value,
        add_to_attention=x,
        **{**asked, **more},
    )


CASES = {
    "plain": ((), (), ()),
    "no_bias masked": ((S,), (L, S), ("float",)),
    "rows zero": ((B, S), (B, H, L, S), ("bool",)),
    "zero": ((B, S), (H, L, S), ("float",)),
    "rows no_bias": ((), (L, S), ("bool",)),
    "unbatched rows": ((S,), (H, L, S), ("bool",)),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_as_the_formulas(name):
    case = name.split()
    mask_shape, x_shape, kind = CASES[name]
    F, (query, key, value, dout) = layer(case), inputs(case)
    mask = key_mask(*mask_shape) if mask_shape else None
    x = added(kind, *x_shape) if x_shape else None
    expected = source(F, query, key, mask, value, x, dout)
    batch_size = None if "unbatched" in case else B

    def run(F, query, key, value, dout):
        out, cache = bnns.apply_multihead_attention(F, batch_size, query, key, mask, value, x, True)
        return out, backward(F, query, key, mask, value, x, dout, output=out, backprop_cache=cache)

    out, deltas = jax.jit(run, compiler_options=QUICK)(F, query, key, value, dout)
    got = {"output": out} | by_name(deltas)
    assert got.keys() == expected.keys()
    for argument, gradient in expected.items():
        assert_close(got[argument], gradient, 1e-12, argument)


def test_differentiating_the_forward_gives_the_deltas():
    F, (query, key, value, dout) = layer(("rows", "zero")), inputs()
    mask, x = key_mask(B, S), added(("float",), L, S)

    def both(F, query, key, value):
        run = lambda *a: bnns.apply_multihead_attention(a[0], B, a[1], a[2], mask, a[3], x)  # noqa: E731
        _, pullback = jax.vjp(run, F, query, key, value)
        return pullback(dout), by_name(backward(F, query, key, mask, value, x, dout))

    (dF, *dx), deltas = jax.jit(both, compiler_options=QUICK)(F, query, key, value)
    for name, gradient in zip(("query", "key", "value"), dx, strict=True):
        assert_close(gradient, deltas[f"{name}.target_desc"], 1e-12, name)
    for name in ("query", "key", "value", "output"):
        for field in ("weights", "bias"):
            gradient = getattr(getattr(dF, name), field)
            assert_close(gradient, deltas[f"{name}.{field}"], 1e-12, f"{name}.{field}")
    assert_close(dF.key_attn_bias, deltas["key_attn_bias"], 1e-12)
    assert_close(dF.value_attn_bias, deltas["value_attn_bias"], 1e-12)
    assert (dF.add_zero_attn, dF.dropout, dF.seed) == (True, 0.0, 0)


def test_a_target_of_numbers_is_no_leaf():
    x, w = np.ones((2, 5, 8)), np.ones((8, 4, 2))
    triple = bnns.BNNSMHAProjectionParameters((5, 8), w)
    F = bnns.BNNSLayerParametersMultiheadAttention(
        triple, triple, triple, output=bnns.BNNSMHAProjectionParameters((5, 8), w.reshape(8, 8))
    )
    run = lambda F: bnns.apply_multihead_attention(F, 2, x, x, None, x)  # noqa: E731
    np.testing.assert_allclose(jax.jit(run)(F), run(F), rtol=1e-12)
    gradient = jax.grad(lambda F: run(F).sum())(F)
    assert gradient.query.target_desc == (5, 8)
    assert gradient.query.weights.shape == w.shape


@pytest.mark.parametrize("shared", ["query key value", "key value", "query key", "query value"])
def test_one_array_for_several_inputs_gets_the_sum_in_each(shared):
    F, (query, key, value, dout) = layer(), inputs()
    query = np.ascontiguousarray(key[:, ::-1])  # as long as the keys
    dout = np.random.default_rng(6).standard_normal(query.shape)
    given = {"query": query, "key": key, "value": value}
    names = shared.split()
    given |= dict.fromkeys(names, given[names[0]])
    expected = source(F, *list(given.values())[:2], None, given["value"], None, dout)
    deltas = by_name(backward(F, given["query"], given["key"], None, given["value"], None, dout))
    total = sum(expected[f"{name}.target_desc"] for name in names)
    for name in given:
        expect = total if name in names else expected[f"{name}.target_desc"]
        assert_close(deltas[f"{name}.target_desc"], expect, 1e-12, name)


def test_the_sum_is_of_the_deltas_asked_for():
    F, (_, x, _, _) = layer(), inputs()
    dout = np.random.default_rng(6).standard_normal(x.shape)
    expected = source(F, x, x, None, x, None, dout)
    deltas = backward(F, x, x, None, x, None, dout, value_param_delta=None)
    total = expected["query.target_desc"] + expected["key.target_desc"]
    assert_close(deltas.query_param_delta.target_desc, total, 1e-12)
    assert_close(deltas.key_param_delta.target_desc, total, 1e-12)
    assert deltas.value_param_delta == Triple()


@pytest.mark.parametrize(
    "asked", ["query.weights", "key.target_desc", "value.bias", "output.weights", "key_attn_bias"]
)
def test_only_what_is_asked_for_comes_back(asked):
    F, (query, key, value, dout) = layer(("rows",)), inputs()
    part, _, field = asked.partition(".")
    flags = {f"{n}_param_delta": None for n in ("query", "key", "value")}
    flags |= {
        "output_param_delta": Triple(dout),
        "key_attn_bias_delta": None,
        "value_attn_bias_delta": False,
    }
    if not field:
        flags[f"{part}_delta"] = True
    elif part == "output":
        flags["output_param_delta"] = Triple(dout, True, False)
    else:
        flags[f"{part}_param_delta"] = Triple()._replace(**{field: True})
    shapes = jax.eval_shape(lambda: backward(F, query, key, None, value, None, dout, **flags))
    deltas = by_name(shapes)
    assert list(deltas) == [asked]
    assert deltas[asked].shape == source(F, query, key, None, value, None, dout)[asked].shape


def test_dropout_of_the_forward_is_that_of_the_backward():
    """The output is linear in the value, so two outputs tell the slope that its delta must give."""
    F = layer(("rows", "zero"))._replace(dropout=0.5, seed=7)
    query, key, value, dout = inputs()

    @partial(jax.jit, compiler_options=QUICK)
    def forward(F, value):
        return bnns.apply_multihead_attention(F, B, query, key, None, value)

    @partial(jax.jit, compiler_options=QUICK)
    def of_value(F):
        flags = dict(query_param_delta=None, key_param_delta=None, output_param_delta=Triple(dout))
        return backward(F, query, key, None, value, None, dout, **flags).value_param_delta

    step = np.random.default_rng(6).standard_normal(value.shape)
    out, other = forward(F, value), forward(F._replace(seed=8), value)
    moved = forward(F, value + step) - forward(F, value - step)
    plain = source(F, query, key, None, value, None, dout)["output"]
    assert np.abs(out - plain).max() > 0.1
    assert np.abs(out - other).max() > 0.1
    slope = (np.asarray(moved) * dout).sum() / 2
    assert_close(slope, (np.asarray(of_value(F).target_desc) * step).sum(), 1e-12)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, 3.0])
def test_dropout_outside_of_0_to_1_is_none(rate):
    F, (query, key, value, dout) = layer(), inputs()
    out = bnns.apply_multihead_attention(F._replace(dropout=rate), B, query, key, None, value)
    assert_close(out, source(F, query, key, None, value, None, dout)["output"], 1e-12)


def test_everything_ignored_gives_the_output_bias():
    F, (query, key, value, dout) = layer(), inputs()
    mask = np.array([[True] * S, [False] * S])
    out, deltas = jax.jit(
        lambda: (bnns.apply_multihead_attention(F, B, query, key, mask, value),
                 by_name(backward(F, query, key, mask, value, None, dout))), compiler_options=QUICK,
    )()  # fmt: skip
    np.testing.assert_array_equal(out[0], np.broadcast_to(F.output.bias, (L, DM)))
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(deltas[f"{name}.target_desc"][0], 0)


F, (Q, K, V, DOUT) = layer(), inputs()
ERRORS = {
    "layer": (dict(F=(1, 2)), TypeError, "F must be a BNNSLayer"),
    "triple": (dict(F=F._replace(key=None)), TypeError, "F.key must be a BNNSMHAProjectionParameters"),
    "no_weights": (dict(F=F._replace(key=Triple())), TypeError, "F.key.weights must be a floating-point"),
    "weights": (
        dict(F=F._replace(key=F.key._replace(weights=F.key.weights[:, 1:]))), ValueError,
        r"F.key.weights must have shape \(d_model, d_key, num_heads\) = \(6, 4, 2\)",
    ),
    "bias": (dict(F=F._replace(value=F.value._replace(bias=np.zeros(6)))), ValueError, "F.value.bias must"),
    "output": (
        dict(F=F._replace(output=F.output._replace(weights=np.zeros((7, 6))))), ValueError,
        r"F.output.weights must have shape \(num_heads \* d_value, d_model\)",
    ),
    "one_row": (dict(F=F._replace(key_attn_bias=np.zeros((4, 2)))), ValueError, "F.value_attn_bias must be"),
    "target": (
        dict(F=F._replace(query=F.query._replace(target_desc=(9, 6)))), ValueError,
        r"F.query.target_desc must be None or of shape \(3, 6\), got \(9, 6\)",
    ),
    "batch_size": (dict(batch_size=3), ValueError, "batch_size must be 2, that of query, got 3"),
    "rank": (dict(query=np.zeros(6)), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 6))), ValueError, "key must have the rank 3 of query"),
    "length": (dict(value=np.zeros((2, 4, 6))), ValueError, r"shape \(batch_size, S, d_model\)"),
    "mask_kind": (dict(key_mask=np.zeros(5)), TypeError, r"key_mask must be boolean"),
    "mask_shape": (dict(key_mask=np.zeros((3, 5), bool)), ValueError, r"shape \(batch_size, S\)"),
    "added_kind": (dict(add_to_attention=np.zeros((3, 5), int)), TypeError, "add_to_attention must be"),
    "added_rank": (dict(add_to_attention=np.zeros(5)), ValueError, "add_to_attention must have shape"),
    "added_heads": (dict(add_to_attention=np.zeros((3, 3, 5))), ValueError, r"shape \(num_heads, L, S\)"),
    "dtypes": (dict(key=K.astype(np.float32)), TypeError, "must have one dtype"),
    "zero": (dict(F=F._replace(add_zero_attn=1)), TypeError, "F.add_zero_attn must be a Python bool"),
    "seed": (dict(F=F._replace(dropout=0.5, seed=0.5)), ValueError, "F.seed must be an int"),
    "long_seed": (dict(F=F._replace(dropout=0.5, seed=2**32)), ValueError, "F.seed must fit 32 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    given = (
        dict(F=F, batch_size=B, query=Q, key=K, key_mask=None, value=V, add_to_attention=None)
        | wrong
    )
    with pytest.raises(error, match=f"^bnns.apply_multihead_attention: .*{words}"):
        bnns.apply_multihead_attention(**given)


BACKWARD_ERRORS = {
    "delta": (dict(query_param_delta=True), TypeError, "query_param_delta must be a BNNSMHA"),
    "none": (dict(output_param_delta=None), TypeError, "output_param_delta must be a BNNSMHA"),
    "no_cotangent": (dict(output_param_delta=Triple()), TypeError, "target_desc must be a floating"),
    "cotangent": (dict(output_param_delta=Triple(Q[:, 1:])), ValueError, "target_desc must have shape"),
    "array": (dict(key_param_delta=Triple(K)), TypeError, "key_param_delta.target_desc must be a"),
    "row": (dict(key_attn_bias_delta=1), TypeError, "key_attn_bias_delta must be a Python bool"),
    "result": (dict(output=Q[:1]), ValueError, "output must have shape"),
    "cache": (dict(backprop_cache=(Q,)), TypeError, "backprop_cache must be None or the cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD_ERRORS)
def test_bad_input_of_the_backward_gets_one_clear_error(name):
    wrong, error, words = BACKWARD_ERRORS[name]
    with pytest.raises(error, match=words):
        backward(F, Q, K, None, V, None, DOUT, **wrong)
