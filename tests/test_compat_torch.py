"""`compat.torch` against torch itself in float64: outputs and the gradients of every array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat_helpers import QUICK, outputs_and_gradients
from helpers import assert_close

from jax_attn_bwd.compat import torch as compat

N, L, S, E, H = 2, 4, 5, 6, 3
D = E // H
CAUSAL = np.triu(np.full((L, S), -np.inf), 1)


def hides(*shape):
    """A boolean mask, True = not allowed, that leaves column 1 to every row."""
    mask = np.random.default_rng(5).random(shape) < 0.4
    mask[..., 1] = False
    return mask


def added(*shape):
    """A floating mask with some -inf."""
    return np.where(hides(*shape), -np.inf, np.random.default_rng(6).standard_normal(shape))


def arrays(case, dtype=np.float64):
    """Every array of a call, by the argument it is given as."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    n = 1 if "unbatched" in case else N
    kdim, vdim = (3, 7) if "separate" in case else (E, E)
    given = {"query": draw(L, n, E), "key": draw(S, n, kdim), "value": draw(S, n, vdim)}
    if "separate" in case:
        given |= {"q_proj_weight": draw(E, E), "k_proj_weight": draw(E, kdim)}
        given |= {"v_proj_weight": draw(E, vdim)}
    else:
        given["in_proj_weight"] = draw(3 * E, E)
    given["out_proj_weight"] = draw(E, E)
    if "no_bias" not in case:
        given |= {"in_proj_bias": draw(3 * E), "out_proj_bias": draw(E)}
    if "rows" in case:
        given |= {"bias_k": draw(1, 1, E), "bias_v": draw(1, 1, E)}
    for name in ("static_k", "static_v"):
        if name in case:
            given[name] = draw(n * H, S, D)
    shapes = {"key_padding_mask": (n, S), "attn_mask": (L, S)}
    if "heads" in case:
        shapes["attn_mask"] = (n * H, L, S)
    for name, of in (("key_padding_mask", "padding"), ("attn_mask", "attn")):
        for kind, make in (("bool", hides), ("float", added)):
            if f"{of}_{kind}" in case:
                given[name] = make(*shapes[name])
    if "causal" in case:
        given["attn_mask"] = CAUSAL
    if "wrong_hint" in case:
        given["attn_mask"] = hides(L, S)
    if "unbatched" in case:
        for name in ("query", "key", "value"):
            given[name] = given[name][:, 0]
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"][0]
    return given


def options(case):
    return dict(
        add_zero_attn="zero" in case, need_weights="no_weights" not in case,
        average_attn_weights="per_head" not in case, is_causal="causal" in case or "wrong_hint" in case,
        use_separate_proj_weight="separate" in case,
    )  # fmt: skip


POSITIONAL = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k",
    "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip


def call(function, given, **more):
    """`function` with the 13 arguments that have no default in place, the others by name."""
    given = {
        "embed_dim_to_check": E,
        "num_heads": H,
        "dropout_p": 0.0,
        "add_zero_attn": False,
    } | given
    given |= more
    positional = [given.pop(name, None) for name in POSITIONAL]
    return function(*positional, **given)


def assert_as_torch(case, rtol=1e-12):
    torch = pytest.importorskip("torch")
    given, more = arrays(case), options(case)
    floats = sorted(name for name, x in given.items() if x.dtype != bool)
    tensors = {name: torch.tensor(x, requires_grad=name in floats) for name, x in given.items()}
    expected = call(torch.nn.functional.multi_head_attention_forward, tensors, **more)
    rng = np.random.default_rng(8)
    cotangents = tuple(None if y is None else rng.standard_normal(y.shape) for y in expected)
    pairs = [(y, g) for y, g in zip(expected, cotangents, strict=True) if y is not None]
    sum((y * torch.tensor(g)).sum() for y, g in pairs).backward()

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving}, **more)

    moving = {name: jnp.asarray(given[name]) for name in floats}
    got, gradients = outputs_and_gradients(run, moving, lambda outputs: cotangents)
    for name, x, y in zip(("attn_output", "attn_output_weights"), got, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert_close(x, y.detach().numpy(), rtol, name)
    for name in floats:
        reached = tensors[name].grad  # None: torch found no path
        expect = np.zeros_like(given[name]) if reached is None else reached.numpy()
        assert_close(gradients[name], expect, 10 * rtol, name)


CASES = (
    "plain", "no_weights per_head no_bias", "unbatched per_head attn_float heads padding_bool",
    "unbatched no_weights padding_float", "separate per_head rows zero padding_bool attn_bool",
    "separate no_weights rows attn_bool heads", "padding_float attn_float", "causal rows per_head",
    "causal no_weights padding_bool", "causal no_weights rows zero", "wrong_hint no_weights",
    "static_k static_v per_head zero padding_bool", "separate static_v no_weights attn_float heads",
    "static_k static_v causal no_weights zero", "static_k",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # masks of two kinds
@pytest.mark.parametrize("case", CASES)
def test_as_torch(case):
    assert_as_torch(frozenset(case.split()))


def test_one_array_for_query_key_and_value():
    """Self-attention: the array's gradient is the sum of its three."""
    torch = pytest.importorskip("torch")
    given = arrays(frozenset({"no_bias"}))
    x = given["query"]
    weights = {name: given[name] for name in ("in_proj_weight", "out_proj_weight")}
    tensor = torch.tensor(x, requires_grad=True)
    fixed = {name: torch.tensor(w) for name, w in weights.items()}
    inputs = dict.fromkeys(("query", "key", "value"), tensor)
    expected, _ = call(torch.nn.functional.multi_head_attention_forward, inputs | fixed)
    dout = np.random.default_rng(8).standard_normal(x.shape)
    expected.backward(torch.tensor(dout))

    def run(x):
        return call(
            compat.multi_head_attention_forward,
            {**dict.fromkeys(("query", "key", "value"), x), **weights}, need_weights=False,
        )[0]  # fmt: skip

    out, gradient = outputs_and_gradients(run, jnp.asarray(x), lambda outputs: dout)
    assert_close(out, expected.detach().numpy(), 1e-12)
    assert_close(gradient, tensor.grad.numpy(), 1e-11)


def test_a_query_that_may_attend_to_nothing_gets_zero():
    """torch gives NaN with the weights; without them it gives what is expected here."""
    torch = pytest.importorskip("torch")
    given = arrays(frozenset({"attn_bool"}))
    given["attn_mask"][2] = True
    floats = sorted(name for name, x in given.items() if x.dtype != bool)
    tensors = {name: torch.tensor(x, requires_grad=name in floats) for name, x in given.items()}
    source = torch.nn.functional.multi_head_attention_forward
    assert call(source, tensors)[0][2].isnan().all()
    expected, _ = call(source, tensors, need_weights=False)
    dout = np.random.default_rng(8).standard_normal(expected.shape)
    expected.backward(torch.tensor(dout))

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving})

    moving = {name: jnp.asarray(given[name]) for name in floats}
    (out, weights), gradients = outputs_and_gradients(
        run, moving, lambda outputs: (dout, np.zeros(outputs[1].shape))
    )
    assert_close(out, expected.detach().numpy(), 1e-12)
    np.testing.assert_array_equal(out[2], np.broadcast_to(given["out_proj_bias"], (N, E)))
    np.testing.assert_array_equal(weights[:, 2], 0)
    for name in floats:
        assert_close(gradients[name], tensors[name].grad.numpy(), 1e-11, name)


def test_nan_that_nothing_sees_reaches_nothing():
    """Also where one of keys and values is given and the other projected."""
    case = frozenset({"static_v", "padding_bool", "attn_bool"})
    given = arrays(case)
    given["attn_mask"][1] = True
    poisoned = {name: given[name].copy() for name in ("query", "key", "static_v")}
    poisoned["query"][1] = np.nan
    hidden = given["key_padding_mask"]
    poisoned["key"][hidden.T] = np.nan
    poisoned["static_v"].reshape(N, H, S, D).swapaxes(1, 2)[hidden] = np.nan
    floats = sorted(name for name, x in given.items() if x.dtype != bool)

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving})

    def everything(given):
        moving = {name: jnp.asarray(given[name]) for name in floats}
        return outputs_and_gradients(
            run, moving, lambda outputs: tuple(np.ones(x.shape) for x in outputs)
        )

    assert np.isnan(poisoned["key"]).any()
    expected, got = everything(given), everything({**given, **poisoned})
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-13), got, expected)


@pytest.mark.parametrize("static", [(), ("static_k", "static_v")], ids=["projected", "static"])
def test_weights_are_those_after_dropout(static):
    case = frozenset({"no_bias", "per_head", "zero", *static})
    given = arrays(case)

    def run(seed, need_weights):
        return call(
            compat.multi_head_attention_forward, given, dropout_p=0.5, need_weights=need_weights,
            average_attn_weights=False, add_zero_attn=True, dropout_key=jax.random.key(seed),
        )  # fmt: skip

    (out, weights), (without, none), (_, other) = jax.jit(
        lambda: (run(1, True), run(1, False), run(2, True)), compiler_options=QUICK
    )()
    weights = np.asarray(weights)
    if static:
        v = given["static_v"].reshape(N, H, S, D)
    else:
        v = given["value"] @ given["in_proj_weight"][2 * E :].T
        v = v.reshape(S, N, H, D).transpose(1, 2, 0, 3)
    v = np.concatenate([v, np.zeros((N, H, 1, D))], 2)
    expected = (weights @ v).transpose(2, 0, 1, 3).reshape(L, N, E) @ given["out_proj_weight"].T
    assert none is None
    assert_close(out, expected, 1e-12)
    assert_close(without, expected, 1e-12)
    assert 0.3 < (weights == 0).mean() < 0.7
    assert (np.asarray(other) != weights).any()
    assert len({weights[n, h].tobytes() for n in range(N) for h in range(H)}) == N * H


def test_no_dropout_outside_training():
    given = arrays(frozenset({"plain"}))
    expected = call(compat.multi_head_attention_forward, given)
    got = call(compat.multi_head_attention_forward, given, dropout_p=0.5, training=False)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_exports_with_symbolic_lengths():
    t, s = jax.export.symbolic_shape("t, s")
    w, w_o = arrays(frozenset({"plain"}))["in_proj_weight"], np.eye(E)

    def run(q, k, v):
        return compat.multi_head_attention_forward(
            q, k, v, E, H, w, None, None, None, False, 0.0, w_o, None
        )

    exported = jax.export.export(jax.jit(run))(
        *(jax.ShapeDtypeStruct((n, N, E), np.float64) for n in (t, s, s))
    )
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.standard_normal((n, N, E))) for n in (L, S, S)]
    for got, expected in zip(exported.call(*given), run(*given), strict=True):
        assert_close(got, expected, 1e-12)


def test_causal_static_keys_have_a_length_of_their_own():
    """`is_causal` hides what the mask hides, where keys of another length are handed over projected."""
    given = arrays(frozenset({"plain"}))
    rng = np.random.default_rng(0)
    static = {n: rng.standard_normal((N * H, S, D)) for n in ("static_k", "static_v")}
    empty = {n: np.zeros((0, N, E)) for n in ("key", "value")}
    more = dict(static, attn_mask=np.triu(np.ones((L, S), bool), 1), training=False)
    masked, _ = call(compat.multi_head_attention_forward, {**given, **empty}, **more)
    hinted, _ = call(
        compat.multi_head_attention_forward, {**given, **empty}, **more, is_causal=True,
        need_weights=False,
    )  # fmt: skip
    assert_close(hinted, masked, 1e-12)


ERRORS = {
    "heads": (dict(num_heads=4), ValueError, "embed_dim_to_check must be a multiple of num_heads = 4, got 6"),
    "embed_dim": (dict(embed_dim_to_check=9), ValueError, r"query must have shape \(L, N, E\) = \(4, 2, 9\)"),
    "query_rank": (dict(query=np.zeros((1, 2, 3, 6))), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 6))), ValueError, r"key must have shape \(S, N, E\), got \(5, 6\)"),
    "key_width": (dict(key=np.zeros((5, 2, 3))), ValueError, r"key must have shape \(S, N, E\)"),
    "value_length": (dict(value=np.zeros((4, 2, 6))), ValueError, "value must have shape"),
    "packed": (dict(in_proj_weight=np.zeros((6, 6))), ValueError, "in_proj_weight must have shape"),
    "no_weight": (dict(in_proj_weight=None), TypeError, "in_proj_weight must be a floating"),
    "no_separate_weight": (dict(use_separate_proj_weight=True), TypeError, "q_proj_weight must be"),
    "bias_k_alone": (dict(bias_k=np.zeros((1, 1, 6))), ValueError, "bias_v must be given together"),
    "bias_v_alone": (dict(bias_v=np.zeros((1, 1, 6))), ValueError, "bias_k must be given together"),
    "row_shape": (dict(bias_k=np.zeros(6), bias_v=np.zeros(6)), ValueError, "bias_k must have shape"),
    "static_and_row": (
        dict(bias_k=np.zeros((1, 1, 6)), bias_v=np.zeros((1, 1, 6)), static_v=np.zeros((6, 5, 2))),
        ValueError, "static_v must be None together with bias_k and bias_v",
    ),
    "static_shape": (dict(static_v=np.zeros((6, 5, 3))), ValueError, "static_v must have shape"),
    "static_length": (dict(static_k=np.zeros((6, 7, 2))), ValueError, "value must have the length S = 7"),
    "hint_alone": (dict(is_causal=True), ValueError, "attn_mask must be given with is_causal=True"),
    "mask_shape": (dict(attn_mask=np.zeros((5, 4), bool)), ValueError, r"attn_mask must have shape \(L, S\)"),
    "mask_heads": (dict(attn_mask=np.zeros((3, 4, 5))), ValueError, r"shape \(N \* num_heads, L, S\)"),
    "padding_shape": (dict(key_padding_mask=np.zeros((5, 2), bool)), ValueError, r"shape \(N, S\)"),
    "integers": (dict(attn_mask=np.zeros((4, 5), int)), TypeError, "attn_mask must be boolean"),
    "dtypes": (dict(key=np.zeros((5, 2, 6), np.float32)), TypeError, "must have one dtype"),
    "no_key": (dict(dropout_p=0.5), ValueError, "dropout_key must be given in training with dropout_p = 0.5"),
    "seed_unused": (dict(training=False, dropout_key=17), TypeError, "dropout_key must be one JAX"),
    "seed": (dict(dropout_p=0.5, dropout_key=17), TypeError, "dropout_key must be one JAX"),
    "rate": (dict(dropout_p=1.5), ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
    "flag": (dict(need_weights=1), TypeError, "need_weights must be a Python bool, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    with pytest.raises(error, match=f"^torch.multi_head_attention_forward: .*{words}"):
        call(compat.multi_head_attention_forward, {**arrays(frozenset({"plain"})), **wrong})
