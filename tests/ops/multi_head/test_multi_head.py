"""What is peculiar to the multi-head layer: what it saves, poison, shards of heads, `_bwd`, errors."""

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import (
    MultiHeadAttentionParams,
    explain,
    multi_head_attention,
    multi_head_attention_bwd,
)
from jax_attn_bwd.ops.multi_head import reference
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionResidual

B, T, S, N, K, H, HV, EQ, EK, EV, EO = 2, 5, 7, 4, 2, 3, 5, 6, 7, 8, 9
SHAPES = {
    "query_kernel": (EQ, N, H), "query_bias": (N, H), "key_kernel": (EK, K, H), "key_bias": (K, H),
    "value_kernel": (EV, K, HV), "value_bias": (K, HV), "out_kernel": (N, HV, EO), "out_bias": (EO,),
    "bias_k": (K, H), "bias_v": (K, HV), "sink": (N,),
}  # fmt: skip


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def layer(*without, **replaced):
    """Parameters with every piece but those in `without`."""
    params = MultiHeadAttentionParams(**{n: draw(*s, seed=1) for n, s in SHAPES.items()})
    return params._replace(**dict.fromkeys(without), **replaced)


def inputs():
    return draw(B, T, EQ), draw(B, S, EK), draw(B, S, EV)


def vjp(function, *args):
    out, pullback = jax.vjp(function, *args)
    return out, pullback(draw(*out.shape, seed=9))


def leaves_close(got, expected, rtol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, rtol)


@pytest.mark.parametrize("save", ["inputs", "qkv", "probs"])
def test_what_is_saved(save):
    """The inputs, the heads' output and lse with its rounding; heads and probabilities only where asked."""
    params, x = layer(), inputs()
    _, pullback = jax.vjp(partial(multi_head_attention, save=save), params, *x)
    kept = Counter(a.shape for a in jax.tree.leaves(pullback))
    kept -= Counter(a.shape for a in jax.tree.leaves((params, x)))
    sizes = sorted(math.prod(shape) for shape in kept.elements())
    expected = [B * T * N * HV, B * T * N, B * T * N]
    if save != "inputs":
        expected += [B * T * N * H, B * S * K * H, B * S * K * HV]
    if save == "probs":
        expected += [B * N * T * S]
    assert sizes == sorted(expected)


def test_nothing_of_size_t_times_s():
    long = dict(
        zip(
            ("query", "key", "value"),
            (draw(1, 640, 4), draw(1, 704, 4), draw(1, 704, 4)),
            strict=True,
        )
    )
    params = MultiHeadAttentionParams(draw(4, 1, 4), None, draw(4, 1, 4), None, draw(4, 1, 4), None,
                                      draw(1, 4, 4), None, draw(1, 4), draw(1, 4), draw(1))  # fmt: skip

    def loss(params, arrays, **options):
        return jnp.sin(multi_head_attention(params, **arrays, is_causal=True, **options)).sum()

    jaxpr = lambda **o: str(jax.make_jaxpr(jax.grad(partial(loss, **o)))(params, long))  # noqa: E731
    whole = "640,704]"
    assert whole not in jaxpr()
    assert whole in jaxpr(save="probs")


def test_the_output_is_the_same_with_weights_residual_and_save():
    params, x = layer(), inputs()
    dropped = dict(dropout_rate=0.3, out_dropout_rate=0.2, dropout_key=jax.random.key(4))
    run = partial(multi_head_attention, params, *x, add_zero_attn=True, **dropped)
    out = run()
    for options in (
        dict(return_weights=True),
        dict(return_residual=True),
        dict(return_weights=True, save="probs"),
    ):
        assert_close(run(**options)[0], out, 1e-14)
    assert_close(jax.jit(run)(), out, 1e-14)


def test_weights_are_those_before_dropout_and_sum_to_one_with_the_sink():
    params, x = layer("sink"), inputs()
    dropped = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
    _, weights = multi_head_attention(
        params, *x, add_zero_attn=True, return_weights=True, **dropped
    )
    assert weights.shape == (B, N, T, S + 2)
    assert_close(weights.sum(-1), jnp.ones((B, N, T)), 1e-14)
    _, mean = multi_head_attention(
        params, *x, add_zero_attn=True, return_weights=True, average_weights=True
    )
    assert_close(mean, weights.mean(1), 1e-14)


@pytest.mark.parametrize("save", ["inputs", "qkv", "probs"])
def test_plain_backward_with_the_residual_of_the_forward(save):
    params, x = layer(), inputs()
    options = dict(save=save, is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(1))
    out, residual = multi_head_attention(params, *x, return_residual=True, **options)
    dout = draw(*out.shape, seed=9)
    again = multi_head_attention_bwd(dout, params, *x, **options)
    got = multi_head_attention_bwd(dout, params, *x, residual=residual, **options)
    _, expected = vjp(partial(multi_head_attention, **options), params, *x)
    for grads in (got, again):
        leaves_close((grads.params, grads.query, grads.key, grads.value), expected)


def test_plain_backward_puts_shared_inputs_together():
    params = layer(key_kernel=draw(EQ, K, H), value_kernel=draw(EQ, K, HV))
    x = draw(B, T, EQ)
    out, (_, dx) = vjp(partial(multi_head_attention), params, x)
    dout = draw(*out.shape, seed=9)
    lone = multi_head_attention_bwd(dout, params, x)
    apart = multi_head_attention_bwd(dout, params, x, x, x)
    assert lone.key is None
    assert lone.value is None
    assert_close(lone.query, dx, 1e-12)
    assert_close(apart.query + apart.key + apart.value, dx, 1e-12)
    some = multi_head_attention_bwd(dout, params, x, wrt=("params",))
    assert some.query is None
    leaves_close(some.params, lone.params)


@pytest.mark.parametrize("save", ["inputs", "qkv", "probs"])
def test_a_loss_of_the_weights_alone(save):
    """The output projection, to which no cotangent leads, has the gradient 0."""
    params, x = layer(), inputs()
    dweights = draw(B, N, T, S + 1, seed=3)

    def loss(function, params, **options):
        return (function(params, *x, is_causal=True, **options)[1] * dweights).sum()

    got = jax.grad(partial(loss, multi_head_attention))(params, return_weights=True, save=save)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.grad(partial(loss, reference.multi_head_attention))(params)
    leaves_close(got, expected)
    plain = multi_head_attention_bwd(
        None, params, *x, is_causal=True, dweights=dweights, save=save, wrt="params"
    )
    leaves_close(plain.params, expected)
    assert not any(jnp.any(g) for g in jax.tree.leaves(multi_head_attention_bwd(None, params, *x)))


@pytest.mark.parametrize(
    ("wrt", "most"), [("out_bias", 0), ("out_kernel", 1), (("out_kernel", "out_bias"), 1)], ids=str
)
def test_gradients_of_the_output_projection_alone_take_no_other_product(wrt, most):
    params, x = layer(), inputs()
    *_, residual = multi_head_attention(params, *x, return_residual=True)
    backward = partial(multi_head_attention_bwd, residual=residual, wrt=wrt)
    program = str(jax.make_jaxpr(lambda dout: backward(dout, params, *x))(draw(B, T, EO)))
    assert program.count("dot_general") == most


def test_poison_in_queries_that_have_no_keys():
    params, query = layer("bias_k", "bias_v"), draw(B, T, EQ).at[0, 0].set(jnp.nan)
    grads = multi_head_attention_bwd(
        draw(B, T, EO), params, query, jnp.zeros((B, 0, EK)), jnp.zeros((B, 0, EV)), wrt="params"
    )
    for name, x in zip(grads.params._fields, grads.params, strict=True):
        assert x is None or jnp.isfinite(x).all(), name


def test_output_dropout_exports_with_a_symbolic_batch():
    (b,) = jax.export.symbolic_shape("b")
    run = partial(
        multi_head_attention, layer(), out_dropout_rate=0.5, dropout_key=jax.random.key(0)
    )
    shapes = (jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in inputs())
    exported = jax.export.export(jax.jit(run))(*shapes)
    assert_close(exported.call(*inputs()), run(*inputs()), 1e-12)


def test_output_dropout_without_a_kernel_multiplies_by_the_same_factor_in_both_directions():
    """In bfloat16: 1 / (1 - 0.1) rounds to 1.109 there."""
    x = jnp.ones((1, 64, 64), jnp.bfloat16)

    def run(value):
        return multi_head_attention(
            MultiHeadAttentionParams(), x, x, value, num_heads=1, local_window_size=0,
            out_dropout_rate=0.1, dropout_key=jax.random.key(1),
        )  # fmt: skip

    value = (draw(1, 64, 64) + 3).astype(jnp.bfloat16)
    out, pullback = jax.vjp(run, value)
    np.testing.assert_array_equal(out, pullback(value)[0])


def test_num_heads_may_be_an_integer_of_numpy():
    x = draw(B, T, EQ)
    out = multi_head_attention(MultiHeadAttentionParams(), x, num_heads=np.int64(2))
    assert_close(out, multi_head_attention(MultiHeadAttentionParams(), x, num_heads=2), 0)


def test_a_residual_has_no_gradient():
    params, x = layer(), inputs()

    def loss(params):
        return multi_head_attention(params, *x, return_residual=True)[1].lse.sum()

    with pytest.raises(NotImplementedError, match="residual of return_residual has no gradient"):
        jax.grad(loss)(params)


HIDDEN = {
    "mask of keys": dict(mask=np.arange(S) < 4),
    "mask of queries and keys": dict(mask=(np.arange(T)[:, None] != 2) & (np.arange(S) < 4)),
    "bias": dict(bias=np.where(np.arange(S) < 4, 0.5, -np.inf)),
    "window": dict(is_causal=True, local_window_size=(0, 0)),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("save", ["inputs", "probs"])
@pytest.mark.parametrize("name", HIDDEN)
def test_poison_in_rows_that_nothing_sees(name, save, order):
    options = {
        k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in HIDDEN[name].items()
    }
    params = layer("bias_k", "bias_v")
    seen = np.arange(S) < (4 if name != "window" else T)
    live = np.arange(T) != (2 if name == "mask of queries and keys" else T)
    clean = inputs()

    def gradients(q, k, v):
        def loss(params, q, k, v):
            out = multi_head_attention(params, q, k, v, save=save, **options)
            return jnp.where(live[:, None], jnp.sin(out), 0).sum()

        first = jax.grad(loss, argnums=(0, 1, 2, 3))
        if order == 1:
            return first(params, q, k, v)
        square = lambda *a: sum((g**2).sum() for g in jax.tree.leaves(first(*a)))  # noqa: E731
        return jax.grad(square, argnums=(0, 1, 2, 3))(params, q, k, v)

    q, k, v = clean
    expected = gradients(
        jnp.where(live[:, None], q, 0), *(jnp.where(seen[:, None], x, 0) for x in (k, v))
    )
    got = gradients(
        jnp.where(live[:, None], q, jnp.nan),
        *(jnp.where(seen[:, None], x, poison) for x, poison in ((k, jnp.inf), (v, jnp.nan))),
    )
    leaves_close(got, expected, 1e-10)


def test_weights_of_a_query_that_sees_nothing_beside_a_sink_of_minus_infinity():
    params = layer("bias_k", "bias_v", sink=jnp.asarray([-jnp.inf, 1.0, 2.0, 3.0]))
    mask = jnp.asarray(np.arange(T)[:, None] != 2)

    def weights(sink):
        given = params._replace(sink=sink)
        return multi_head_attention(given, *inputs(), mask=mask, return_weights=True)[1]

    out, (dsink,) = vjp(weights, params.sink)
    assert dsink[0] == 0
    assert jnp.isfinite(dsink).all()
    assert not out[:, :, 2].any()


def test_shards_of_heads_hold_shares_of_the_output():
    """Inside shard_map the caller sums the shares; JAX sums gradients of what every shard reads."""
    params = layer(
        "out_bias",
        query_kernel=draw(EQ, 8, H),
        query_bias=draw(8, H),
        sink=draw(8),
        key_kernel=draw(EK, 4, H),
        key_bias=draw(4, H),
        value_kernel=draw(EV, 4, HV),
        value_bias=draw(4, HV),
        out_kernel=draw(8, HV, EO),
        bias_k=draw(4, H),
        bias_v=draw(4, HV),
    )
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    specs = MultiHeadAttentionParams(
        query_kernel=P(None, "h"), query_bias=P("h"), key_kernel=P(None, "h"), key_bias=P("h"),
        value_kernel=P(None, "h"), value_bias=P("h"), out_kernel=P("h"), bias_k=P("h"), bias_v=P("h"),
        sink=P("h"),
    )  # fmt: skip

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P())
    def sharded(params, q, k, v):
        return jax.lax.psum(multi_head_attention(params, q, k, v, is_causal=True), "h")

    out, grads = vjp(jax.jit(sharded), params, *inputs())
    expected_out, expected = vjp(partial(multi_head_attention, is_causal=True), params, *inputs())
    assert_close(out, expected_out, 1e-12)
    leaves_close(grads, expected)


def test_explain_tells_of_the_attention_inside():
    reasons = explain(multi_head_attention, layer(), *inputs())
    assert reasons["xla"] == "ok"
    assert "gpu" in reasons["mosaic_gpu"]


def error(words, exception=ValueError, id=None, **changes):
    return pytest.param(words, exception, changes, id=id or words)


ERRORS = [
    error("params must be a MultiHeadAttentionParams, got dict", TypeError, params={}),
    error("params.query_bias must be None where params.query_kernel is None",
          params=layer("query_kernel")),
    error("params.out_bias must be None where params.out_kernel is None", params=layer("out_kernel")),
    error("params.bias_v must be given together with params.bias_k", params=layer("bias_v")),
    error("params.bias_k must be given together with params.bias_v", params=layer("bias_k")),
    error("params.key_kernel must have shape [Ek, K, H], got", params=layer(key_kernel=draw(EK, 6))),
    error("params.key_kernel must have H = 3, as params.query_kernel, got 4",
          params=layer("key_bias", "bias_k", "bias_v", key_kernel=draw(EK, K, 4))),
    error("params.key_kernel must have Ek = 7, as key, got 6", params=layer(key_kernel=draw(6, K, H))),
    error("query heads N must be a positive multiple of the key heads K, got 4; params.key_kernel has K = 3",
          params=layer("key_bias", "value_bias", "bias_k", "bias_v", key_kernel=draw(EK, 3, H),
                       value_kernel=draw(EV, 3, HV))),
    error("params.query_kernel must have N = 3, as num_heads, got 4", num_heads=3),
    error("num_heads must be given where neither query nor the output is projected",
          params=MultiHeadAttentionParams(), key=None, value=None),
    error("key, which has no kernel, must have H = 3, as params.query_kernel, got 7",
          params=layer("key_kernel", "key_bias")),
    error("value must have shape [..., S, Ev] = (2, 7, 8), got (2, 6, 8)", value=draw(B, 6, EV)),
    error("mask must be boolean (True = attend), got dtype float64; pass additive values as bias", TypeError,
          mask=draw(T, S)),
    error("mask must broadcast to [..., N, T, S] = (2, 4, 5, 7), got (7, 5)", mask=draw(S, T) > 0),
    error("bias must be a floating-point array", TypeError, bias=draw(T, S) > 0),
    error("must have one dtype", TypeError, query=draw(B, T, EQ).astype("float32")),
    error("the output, with add_residual, must have the width 6 of query", add_residual=True),
    error("average_weights must be given together with return_weights=True", average_weights=True),
    error("dropout_key must be given when dropout_rate = 0.0, out_dropout_rate = 0.1", out_dropout_rate=0.1),
    error("dropout_key must be one JAX random key, got int", TypeError, dropout_key=0),
    error("dropout_offset must be (batch, head, row, column), got 3", dropout_offset=3),
    error("save must be one of ('inputs', 'qkv', 'probs'), got 'all'", save="all"),
    error("scale must be a Python float", TypeError, scale=jnp.ones(())),
    error("is_causal must be a Python bool", TypeError, is_causal=1),
]  # fmt: skip


@pytest.mark.parametrize(("words", "exception", "changes"), ERRORS)
def test_one_clear_error(words, exception, changes):
    q, k, v = inputs()
    arguments = {"params": layer(), "query": q, "key": k, "value": v} | changes
    with pytest.raises(exception) as raised:
        multi_head_attention(**arguments)
    assert str(raised.value).startswith("multi_head_attention: ")
    assert words in str(raised.value)


BWD_ERRORS = [
    error("dout must have shape [..., T, Eo] = (2, 5, 9), got (2, 5, 8)", dout=draw(B, T, 8)),
    error("wrt must name some of", wrt=("kernel",)),
    error("wrt must name arguments that were given, got 'bias', which is None", wrt=("bias",)),
    error("dweights must have shape", dweights=draw(B, N, T, S)),
    error("residual must be what the forward of the same arguments and save='qkv' returned", save="qkv",
          residual=MultiHeadAttentionResidual(draw(B, T, N, HV), draw(B, T, N), draw(B, T, N), None, None)),
    error("residual must be what the forward of the same arguments and save='inputs' returned",
          residual=MultiHeadAttentionResidual(
              draw(B, T, N, HV).astype("float32"), draw(B, T, N), draw(B, T, N), None, None)),
    error("residual must be what the forward", residual=(draw(B, T, N, HV),) * 5),
]  # fmt: skip


@pytest.mark.parametrize(("words", "exception", "changes"), BWD_ERRORS)
def test_one_clear_error_of_the_backward(words, exception, changes):
    q, k, v = inputs()
    arguments = {"dout": draw(B, T, EO), "params": layer(), "query": q, "key": k, "value": v}
    with pytest.raises(exception) as raised:
        multi_head_attention_bwd(**{**arguments, **changes})
    assert str(raised.value).startswith("multi_head_attention_bwd: ")
    assert words in str(raised.value)
