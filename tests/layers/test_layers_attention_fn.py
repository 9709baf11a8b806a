"""`attention_fn` in Flax's layers, and those options of the Flax layers that run around it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from test_layers_multi_head import (
    arrays,
    assert_all_close,
    jitted,
    lenient,
    random_params,
    some_mask,
    value_and_gradients,
)

from jax_attn_bwd import attention_fn, dot_product_attention

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402

N, T, S, E = 4, 6, 9, 12


def heads(keys=N):
    return arrays((2, T, N, 3), (2, S, keys, 3), (2, S, keys, 5))


def linen_call(cls, params=None, **options):
    """`(params, x, y) -> out` of a linen layer over x, and keys y."""
    kwargs = {name: options.pop(name) for name in ("sow_weights", "mask") if name in options}
    layer = cls(N, param_dtype="float64", **options)
    return lambda params, x, y: layer.apply({"params": params}, x, y, **kwargs)


def linen_params(**options):
    layer = nn.MultiHeadDotProductAttention(N, param_dtype="float64", **options)
    init = lambda key, *inputs: layer.init(key, *inputs)["params"]  # noqa: E731
    return random_params(
        type("Layer", (), {"init": staticmethod(init)}), arrays((2, T, E), (2, S, E))
    )


def double(x, kernel, dims, **options):
    """A dot_general of the caller's: twice the product."""
    return 2 * jax.lax.dot_general(x, kernel, dims, precision=options.get("precision"))


def uniform_attention(query, key, value, mask=None):
    """An attention of the caller's, which takes no more than these names."""
    return jnp.broadcast_to(value.mean(-3, keepdims=True), query.shape)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_fn": "ours"},
        {"normalize_qk": True},
        {"precision": "highest"},
        {"qkv_dot_general": double, "out_dot_general_cls": lambda: double},
        dict.fromkeys(
            ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: jnp.einsum
        ),
        {"attention_fn": uniform_attention},
        {"force_fp32_for_softmax": True, "use_bias": False},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_every_option_of_linen(options):
    """As Flax's layer; `attention_fn` = ours goes into Flax's own layer."""
    x, y = arrays((2, T, E), (2, S, E))
    mask = some_mask(2, 1, T, S)
    cls = flax_linen.MultiHeadDotProductAttention
    if options == {"attention_fn": "ours"}:
        options, cls = {}, partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn)
    params = linen_params(**options)
    with lenient():
        theirs = linen_call(nn.MultiHeadDotProductAttention, mask=mask, **options)
        expected = jitted(partial(value_and_gradients, theirs))(params, x, y)
        ours = jitted(partial(value_and_gradients, linen_call(cls, mask=mask, **options)))
        # Theirs computes the softmax in float32 there.
        rtol = 1e-5 if "force_fp32_for_softmax" in options else 1e-11
        assert_all_close(ours(params, x, y), expected, rtol)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_fn": "ours"},
        {"normalize_qk": True},
        {"precision": "highest"},
        {"qkv_dot_general": double},
        {"qkv_promote_dtype": lambda args, dtype=None: args},
        {"attention_fn": lambda q, k, v, **_: uniform_attention(q, k, v)},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_of_nnx(options):
    x, y = arrays((2, T, E), (2, S, E))
    mask = some_mask(2, N, T, S)
    cls = flax_nnx.MultiHeadAttention
    if options == {"attention_fn": "ours"}:
        options, cls = {}, partial(nnx.MultiHeadAttention, attention_fn=attention_fn)
    exact = {"dropout_rate": 0.5, "deterministic": True, "decode": False, "param_dtype": "float64"}

    def run(cls):
        layer = cls(N, E, **exact, **options, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)
        call = lambda params, x, y: nnx.merge(graph, params, rest)(x, y, mask=mask)  # noqa: E731
        out, (dparams, *grads) = jitted(partial(value_and_gradients, call))(params, x, y)
        return out, nnx.to_pure_dict(dparams), grads

    with lenient():
        assert_all_close(run(cls), run(nnx.MultiHeadAttention), 1e-11)


@pytest.mark.parametrize("layer", ["own", "flax"])
def test_sown_weights(layer):
    """Where Flax puts them, as Flax computes them, and with a gradient."""
    x, y = arrays((2, T, E), (2, S, E))
    params, mask = linen_params(), some_mask(2, 1, T, S)
    ours = (
        flax_linen.MultiHeadDotProductAttention
        if layer == "own"
        else partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn)
    )
    results = []
    for cls in (nn.MultiHeadDotProductAttention, ours):

        def weights(x, cls=cls):
            made = cls(N, param_dtype="float64")
            sown = {"mask": mask, "sow_weights": True, "mutable": ["intermediates"]}
            _, state = made.apply({"params": params}, x, y, **sown)
            (found,) = state["intermediates"]["attention_weights"]
            return found

        with lenient():
            results.append(jitted(partial(value_and_gradients, weights))(x))
    assert_all_close(results[1], results[0], 1e-12)


class Recorder(nnx.Module):
    def sow(self, kind, name, weights):
        self.weights = nnx.data(weights)


def test_nan_of_a_hidden_key_reaches_no_gradient_of_sown_weights():
    q, k, ct = arrays((2, T, N, 3), (2, S, 2, 3), (2, N, T, S))
    mask = jnp.asarray(np.arange(S) < S - 2).reshape(1, 1, 1, S)
    bias = jnp.zeros((1, 1, T, 1)).at[:, :, 1].set(-jnp.inf)  # query 1 sees nothing

    def loss(q, k):
        module = Recorder()
        attention_fn(q, k, k, bias, mask, module=module, is_causal=True, deterministic=True)
        return jnp.vdot(module.weights, ct)

    clean = jax.grad(loss, (0, 1))(q, k)
    hidden = jnp.asarray(np.arange(S) >= S - 2)[:, None, None]
    poisoned = q.at[:, 1].set(jnp.nan), jnp.where(hidden, jnp.nan, k)
    assert_all_close(jax.grad(loss, (0, 1))(*poisoned), clean, 0)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("layer", ["own", "flax"])
def test_sown_weights_of_nnx(layer):
    x, y = arrays((2, T, E), (2, S, E))
    options = {"num_kv_heads": 2, "decode": False, "param_dtype": "float64"}
    ours = (
        flax_nnx.MultiHeadAttention
        if layer == "own"
        else partial(nnx.MultiHeadAttention, attention_fn=attention_fn)
    )
    found = []
    for cls in (nnx.MultiHeadAttention, ours):
        made = cls(N, E, **options, rngs=nnx.Rngs(0))
        with lenient():
            made(x, y, sow_weights=True, is_causal=True)
        (weights,) = nnx.pop(made, nnx.Intermediate)["attention_weights"]
        found.append(weights)
    assert_close(found[1], found[0], 1e-12)


LINEN = {
    "theirs": nn.MultiHeadDotProductAttention,
    "flax": partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn),
    "flax_causal": partial(
        nn.MultiHeadDotProductAttention, attention_fn=partial(attention_fn, is_causal=True)
    ),
    "own": flax_linen.MultiHeadDotProductAttention,
    "own_causal": partial(flax_linen.MultiHeadDotProductAttention, is_causal=True),
    "window": partial(flax_linen.MultiHeadDotProductAttention, local_window_size=2),
}


@pytest.mark.parametrize("name", list(LINEN)[1:])
def test_decoding_in_linen(name):
    """Step by step as the causal pass over the whole sequence; the cache is Flax's."""
    (x,) = arrays((2, T, E))
    options = {"param_dtype": "float64"}
    cls = LINEN[name]
    layer = cls(N, decode=True, **options)
    params = linen_params()
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["cache"]
    with lenient():
        theirs = LINEN["theirs"](N, decode=True, **options)
        assert shapes == jax.eval_shape(theirs.init, jax.random.key(0), x)["cache"]
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    variables = lambda cache: {"params": params, "cache": cache}  # noqa: E731
    step = jitted(lambda cache, x: layer.apply(variables(cache), x, mutable=["cache"]))
    steps = []
    for t in range(T):
        with lenient():  # Flax's own part mixes int32 and int64
            out, state = step(cache, x[:, t : t + 1])
        cache = state["cache"]
        steps.append(out)
    causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
    mask = causal & ~jnp.tril(causal, -3) if name == "window" else causal
    with lenient():
        expected = jitted(LINEN["theirs"](N, **options).apply)({"params": params}, x, mask=mask)
    assert_close(jnp.concatenate(steps, 1), expected, 1e-12)
    assert int(cache["cache_index"]) == T


def test_weights_of_a_causal_step_of_decoding():
    """What is sown are the weights that were used."""
    (x,) = arrays((2, T, E))
    layer = LINEN["flax_causal"](N, decode=True, param_dtype="float64")
    variables = jitted(layer.init)(jax.random.key(0), x)
    for t in range(3):
        with lenient():
            _, state = layer.apply(
                variables, x[:, t : t + 1], sow_weights=True, mutable=["cache", "intermediates"]
            )
        variables = {**variables, "cache": state["cache"]}
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.arange(T) < 3, weights.shape))


@pytest.mark.parametrize("name", ["flax", "own", "window"])
def test_decoding_in_nnx(name):
    """Grouped heads; `is_causal` at the call changes nothing, and `decode` is told to constructor or call."""
    (x,) = arrays((2, T, E))
    kind = {"flax": partial(nnx.MultiHeadAttention, attention_fn=attention_fn)}
    cls = kind.get(name, flax_nnx.MultiHeadAttention)
    window = {"local_window_size": 2} if name == "window" else {}
    layer = cls(N, E, num_kv_heads=2, param_dtype="float64", **window, rngs=nnx.Rngs(0))
    layer.init_cache(x.shape, "float64")
    step = nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=name != "window"))
    with lenient():
        steps = [step(layer, x[:, t : t + 1]) for t in range(T)]
    expected = layer(x, decode=False, is_causal=True)
    assert_close(jnp.concatenate(steps, 1), expected, 1e-12)
    assert int(layer.cache_index[...]) == T


def test_a_float_mask_for_decoding_is_of_zeros_and_ones():
    """Flax's own are float32. Other numbers are an error, or where they are traced, NaN."""
    query, key, value = heads()
    query, mask = query[:, :1], some_mask(2, 1, 1, S)
    expected = attention_fn(query, key, value, mask=mask)
    call = lambda mask: attention_fn(query, key, value, mask=mask)  # noqa: E731
    np.testing.assert_array_equal(call(mask.astype("float32")), expected)
    np.testing.assert_array_equal(jax.jit(call)(mask.astype("float32")), expected)
    with pytest.raises(ValueError, match=r"local_window_size must be None in a step .*flax_linen"):
        attention_fn(query, key, value, mask=mask.astype("float32"), local_window_size=2)
    additive = jnp.where(mask, 0.0, -1e9)
    with pytest.raises(TypeError, match=r"mask must be boolean .*bias"):
        call(additive)
    assert jnp.isnan(jax.jit(call)(additive)).all()


@pytest.mark.parametrize("shared", [True, False])
def test_dropout(shared):
    """The probabilities, seen through values of 1: each is 0 or 1 / keep of itself."""
    query, key, _ = heads()
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (2, S, N, S))
    rate, mask = 0.3, some_mask(2, 1, T, S)
    plain = np.asarray(attention_fn(query, key, value, mask=mask))
    drop = dict(mask=mask, dropout_rate=rate, broadcast_dropout=shared)
    run = jitted(lambda rng: attention_fn(query, key, value, dropout_rng=rng, **drop))
    draws = np.stack([run(rng) for rng in jax.random.split(jax.random.key(0), 200)])
    kept = draws != 0
    np.testing.assert_allclose(draws[kept], (draws * 0 + plain / (1 - rate))[kept], rtol=1e-12)
    seen = np.broadcast_to(plain != 0, draws.shape)
    independent = 200 * T * S * (1 if shared else 2 * N)
    assert abs(kept[seen].mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / independent)
    zeros = ~kept & seen
    one = zeros | ~seen  # where unseen, whatever the others draw
    agree = (one[:, :1, :, :1] == one) | ~seen | ~seen[:, :1, :, :1]
    assert agree.all() == shared
    same = attention_fn(query, key, value, **drop, deterministic=True)
    np.testing.assert_array_equal(same, plain)


def test_the_whole_layer_and_the_parts_draw_one_mask():
    """Dropout of `multi_head_attention` and of `attention_fn` in the same linen layer."""
    x, y = arrays((2, T, E), (2, S, E))
    params, outs = linen_params(), []
    for options in ({}, {"precision": "highest"}):
        layer = flax_linen.MultiHeadAttention(
            N, param_dtype="float64", dropout_rate=0.5, deterministic=False, **options
        )
        rngs = {"dropout": jax.random.key(3)}
        outs.append(layer.apply({"params": params}, x, y, rngs=rngs))
    assert_close(outs[1], outs[0], 1e-12)


def test_dropout_under_remat_draws_the_same_mask():
    x, y = arrays((2, T, E), (2, S, E))
    params = linen_params()

    def loss(cls, params):
        layer = cls(N, param_dtype="float64", dropout_rate=0.5, deterministic=False)
        rngs = {"dropout": jax.random.key(3)}
        return jnp.sin(layer.apply({"params": params}, x, y, rngs=rngs)).sum()

    cls = flax_linen.MultiHeadAttention
    plain, again = (jitted(jax.grad(partial(loss, c)))(params) for c in (cls, nn.remat(cls)))
    assert_all_close(again, plain, 1e-12)


def test_grouped_heads_bias_and_dtype():
    query, key, value = heads(keys=2)
    (bias,) = arrays((N, T, S))
    got = attention_fn(query, key, value, bias, is_causal=True, local_window_size=3)
    expected = dot_product_attention(query, key, value, bias, is_causal=True, local_window_size=3)
    np.testing.assert_array_equal(got, expected)
    narrow = attention_fn(query, key.astype("float32"), value, dtype="bfloat16")
    assert narrow.dtype == "bfloat16"
    promoted = attention_fn(
        query, key, value, dtype="float32", promote_dtype=lambda x, dtype: [a.astype(dtype) for a in x]
    )  # fmt: skip
    assert promoted.dtype == "float32"


def test_rotary_embedding_and_its_positions():
    query, key, value = arrays((2, T, N, 4), (2, T, N, 4), (2, T, N, 4))
    angle = lambda positions: positions[:, None] * jnp.array([[1.0, 0.1]])  # noqa: E731

    def rope(x, positions=None):
        positions = jnp.arange(x.shape[-2]) if positions is None else positions
        cos, sin = (f(angle(positions.astype(x.dtype)))[None] for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    turn = lambda x: jnp.swapaxes(rope(jnp.swapaxes(x, -2, -3)[0])[None], -2, -3)  # noqa: E731
    turned = [jnp.concatenate([turn(x[:1]), turn(x[1:])]) for x in (query, key)]
    expected = dot_product_attention(*turned, value)
    assert_close(attention_fn(query, key, value, rope=rope), expected, 1e-13)
    shifted = attention_fn(query, key, value, rope=rope, input_positions=jnp.arange(T) + 50)
    assert_close(shifted, expected, 1e-12)
    with pytest.raises(ValueError, match=r"input_positions must be given together with rope"):
        attention_fn(query, key, value, input_positions=jnp.arange(T))


@pytest.mark.parametrize("options", [{"normalize_qk": True}, {"decode": True}, {}], ids=str)
def test_an_interceptor_of_linen_acts_once(options):
    """Where Flax's projections run and where one rule does; one `__call__` is captured."""
    (x,) = arrays((2, T, E))
    layer = flax_linen.MultiHeadDotProductAttention(N, param_dtype="float64", **options)
    with lenient():
        variables = jitted(layer.init)(jax.random.key(0), x)
    x, seen = x[:, :1], []

    def plus_one(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if context.module.path:
            return out
        seen.append(context.method_name)
        return out + 1

    with lenient():
        plain, state = layer.apply(
            variables, x, capture_intermediates=True, mutable=["cache", "intermediates"]
        )
        with nn.intercept_methods(plus_one):
            changed, _ = layer.apply(variables, x, mutable=["cache"])
    assert_close(changed, plain + 1, 1e-13)
    assert seen == ["__call__"]
    assert len(state["intermediates"]["__call__"]) == 1
    assert layer.attention_fn is attention_fn


def test_options_need_our_attention():
    x, y = arrays((2, T, E), (2, S, E))
    layer = flax_linen.MultiHeadAttention(
        N, attention_fn=uniform_attention, is_causal=True, param_dtype="float64"
    )
    with pytest.raises(ValueError, match=r"is_causal must be left out with an attention_fn"):
        layer.init(jax.random.key(0), x, y)
    with pytest.raises(ValueError, match=r"local_window_size, implementation must be left out"):
        flax_nnx.MultiHeadAttention(
            N, E, attention_fn=uniform_attention, local_window_size=1, rngs=nnx.Rngs(0)
        )


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask": jnp.zeros((T, S))}, TypeError, r"attention_fn: mask must be boolean .*bias"),
        ({"mask": jnp.ones((T, S), int)}, TypeError, r"mask must be boolean .*write mask != 0"),
        ({"dropout_rate": 0.5}, ValueError, "dropout_rng must be given"),
        ({"dropout_rate": 0.5, "dropout_rng": 17}, TypeError, "attention_fn: dropout_rng must be one JAX"),
        ({"dropout_rate": 1.5}, ValueError, r"dropout_rate must lie in \[0, 1\]"),
        ({"deterministic": jnp.array(True)}, TypeError, "deterministic must be a Python bool"),
        ({"qk_attn_weights_einsum": jnp.einsum}, NotImplementedError, "qk_attn_weights_einsum must be None"),
        ({"einsum_dot_general": jax.lax.dot_general}, NotImplementedError, "einsum_dot_general"),
        ({"module": object()}, TypeError, "module must be the Flax module"),
        ({"implementation": "mine"}, ValueError, "mine"),
        ({"bias": jnp.zeros((2, 2, T, S))}, ValueError, "bias must broadcast"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        attention_fn(*heads(), **changed)


def test_flax_s_own_checks_of_the_call():
    """The older names of linen, and what must be told to NNX."""
    x, y = arrays((2, T, E), (2, S, E))
    params = linen_params()
    layer = flax_linen.MultiHeadAttention(N, param_dtype="float64")
    call = partial(layer.apply, {"params": params}, x)
    with pytest.warns(DeprecationWarning, match="inputs_kv"):
        assert_close(call(inputs_kv=y), call(y), 1e-13)
    with pytest.raises(ValueError, match="`inputs_k` cannot be None"):
        call(inputs_v=y)
    with pytest.raises(ValueError, match="qkv_features must be a multiple of the 4 heads, got 6"):
        flax_linen.MultiHeadAttention(N, qkv_features=6).init(jax.random.key(0), x)
    undecided = flax_nnx.MultiHeadAttention(N, E, rngs=nnx.Rngs(0), param_dtype="float64")
    with pytest.raises(ValueError, match="`decode`"):
        undecided(x)
    drops = flax_nnx.MultiHeadAttention(N, E, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0))
    with lenient(), pytest.raises(ValueError, match="`deterministic`"):
        drops(x)


def test_names_of_unnamed_modules_are_flax_s():
    """A checkpoint names them after their class."""
    (x,) = arrays((2, T, E))
    for name in ("MultiHeadAttention", "MultiHeadDotProductAttention"):
        trees = []
        for source in (nn, flax_linen):

            class Model(nn.Module):
                cls: type

                @nn.compact
                def __call__(self, x):
                    return self.cls(N, param_dtype=x.dtype)(x)

            with lenient():
                model = Model(getattr(source, name))
                trees.append(jax.eval_shape(model.init, jax.random.key(0), x))
        assert trees[0] == trees[1]
