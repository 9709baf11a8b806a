"""Every option of Flax's attention layers, in ours and around `attention_fn` in theirs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, thorough
from layers.frameworks import arrays, assert_all_close, jitted, lenient, random_params, values_and_gradients
from layers.multi_head_cases import E, N, S, T, some_mask

from jax_attn_bwd import attention_fn

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402


def linen_call(cls, params=None, **options):
    """`(params, x, y) -> out` of a linen layer over x, and keys y."""
    kwargs = {name: options.pop(name) for name in ("sow_weights", "mask") if name in options}
    layer = cls(N, param_dtype="float64", **options)
    return lambda params, x, y: layer.apply({"params": params}, x, y, **kwargs)


def linen_params(**options):
    layer = nn.MultiHeadDotProductAttention(N, param_dtype="float64", **options)
    init = lambda key, *inputs: layer.init(key, *inputs)["params"]
    return random_params(type("Layer", (), {"init": staticmethod(init)}), arrays((2, T, E), (2, S, E)))


def double(x, kernel, dims, **options):
    """A dot_general of the caller's: twice the product."""
    return 2 * jax.lax.dot_general(x, kernel, dims, precision=options.get("precision"))


def uniform_attention(query, key, value, mask=None):
    """An attention of the caller's, which takes no more than these names."""
    return jnp.broadcast_to(value.mean(-3, keepdims=True), query.shape)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention_fn": "ours"}, marks=thorough),
        pytest.param({"normalize_qk": True}, marks=thorough),
        pytest.param({"precision": "highest"}, marks=thorough),
        pytest.param({"qkv_dot_general": double, "out_dot_general_cls": lambda: double}, marks=thorough),
        dict.fromkeys(("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: jnp.einsum),
        {"attention_fn": uniform_attention},
        {"force_fp32_for_softmax": True, "use_bias": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_of_linen(options):
    """Our layer computes what Flax's does; `attention_fn` = ours goes into Flax's own layer."""
    x, y = arrays((2, T, E), (2, S, E))
    mask = some_mask(2, 1, T, S)
    cls = flax_linen.MultiHeadDotProductAttention
    if options == {"attention_fn": "ours"}:
        options, cls = {}, partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn)
    params = linen_params(**options)
    with lenient():
        theirs = linen_call(nn.MultiHeadDotProductAttention, mask=mask, **options)
        expected = jitted(partial(values_and_gradients, theirs))(params, x, y)
        ours = jitted(partial(values_and_gradients, linen_call(cls, mask=mask, **options)))
        # Theirs computes the softmax in float32 there.
        rtol = 1e-5 if "force_fp32_for_softmax" in options else 1e-11
        assert_all_close(ours(params, x, y), expected, rtol)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention_fn": "ours"}, marks=thorough),
        {"normalize_qk": True},
        pytest.param({"precision": "highest"}, marks=thorough),
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
    given = {"mask": mask, "is_causal": "normalize_qk" in options}

    def run(cls):
        layer = cls(N, E, **exact, **options, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)
        call = lambda params, x, y: nnx.merge(graph, params, rest)(x, y, **given)
        out, (dparams, *grads) = jitted(partial(values_and_gradients, call))(params, x, y)
        return out, nnx.to_pure_dict(dparams), grads

    with lenient():
        assert_all_close(run(cls), run(nnx.MultiHeadAttention), 1e-11)


@pytest.mark.parametrize("wide", [False, True])
def test_dtype_of_sown_weights(wide):
    """As Flax's own: float32 with `force_fp32_for_softmax`, else that of the computation."""
    options = dict(dtype="bfloat16", force_fp32_for_softmax=wide)
    theirs, inner = (
        nn.MultiHeadDotProductAttention(N, **options, **given)
        for given in ({}, {"attention_fn": attention_fn})
    )
    x = jax.ShapeDtypeStruct((2, T, E), jnp.float32)
    for layer in (theirs, inner, flax_linen.MultiHeadDotProductAttention(N, **options)):
        run = lambda x, layer=layer: layer.init_with_output(
            jax.random.key(0), x, sow_weights=True, mutable=True
        )[1]
        with lenient():
            (weights,) = jax.eval_shape(run, x)["intermediates"]["attention_weights"]
        assert weights.dtype == ("float32" if wide else "bfloat16")


def test_the_whole_layer_and_the_parts_draw_one_mask():
    """Dropout of `multi_head_attention` and of `attention_fn` in the same linen layer."""
    x, y = arrays((2, T, E), (2, S, E))
    params, outs = linen_params(), []
    layer = flax_linen.MultiHeadAttention(N, param_dtype="float64", dropout_rate=0.5, deterministic=False)
    for sow in (False, True):
        rngs = {"dropout": jax.random.key(3)}
        outs.append(layer.apply({"params": params}, x, y, rngs=rngs, sow_weights=sow))
    assert_close(outs[1], outs[0], 1e-12)


@thorough
@pytest.mark.parametrize("options", [{}, {"normalize_qk": True}], ids=str)
def test_dropout_under_remat_draws_the_same_mask(options):
    x, y = arrays((2, T, E), (2, S, E))
    params = linen_params(**options)

    def loss(cls, params):
        layer = cls(N, param_dtype="float64", dropout_rate=0.5, deterministic=False, **options)
        rngs = {"dropout": jax.random.key(3)}
        return jnp.sin(layer.apply({"params": params}, x, y, rngs=rngs)).sum()

    cls = flax_linen.MultiHeadAttention
    with lenient():
        plain, again = (jitted(jax.grad(partial(loss, c)))(params) for c in (cls, nn.remat(cls)))
    assert_all_close(again, plain, 1e-12)


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(x, marks=thorough) for x in ({"normalize_qk": True}, {"decode": True})), {}],
    ids=str,
)
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
            assert context.module.parent.attention_fn is attention_fn  # unchanged during the call
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
    with pytest.raises(ValueError, match=r"local_window_size, .*, deterministic_sums, .* must be left out"):
        flax_nnx.MultiHeadAttention(
            N, E, attention_fn=uniform_attention, local_window_size=1, rngs=nnx.Rngs(0)
        )


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


def test_tabulate_of_nnx_has_rows_for_the_projections():
    """It finds the linear layers by wrapping their calls, which one rule over the layer does without."""
    layer = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    table = nnx.tabulate(layer, jnp.ones((1, 3, 4), "float32"), console_kwargs={"width": 200})
    assert all(f" {name} " in table for name in ("query", "key", "value", "out")), table
    assert layer._is_whole()
