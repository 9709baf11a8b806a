"""Construction and call of `MultiHeadAttention`: what is traced once, and what is refused by name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers import multi_head_cases
from layers.frameworks import FRAMEWORKS, arrays, frameworks, jitted, lenient, multi_head, random_params
from layers.multi_head_cases import inputs_of

E, T, S = 8, 5, 7


def nnx_layer(num_heads=2, **options):
    nnx = pytest.importorskip("flax.nnx")
    from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention

    options = {"decode": False, "param_dtype": "float64", "rngs": nnx.Rngs(0)} | options
    return MultiHeadAttention(num_heads, E, **options)


def equinox_layer(num_heads=2, **options):
    pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiheadAttention

    return MultiheadAttention(num_heads, E, **options, key=jax.random.key(0))


def linen_init(x, num_heads=2, **options):
    pytest.importorskip("flax.linen")
    from jax_attn_bwd.layers.flax_linen import MultiHeadAttention

    return MultiHeadAttention(num_heads, param_dtype="float64", **options).init(jax.random.key(0), x)


def haiku_transformed(own=True, num_heads=2, key_size=4, **options):
    """`x [..., T, E]` and a rate -> self-attention."""
    hk = pytest.importorskip("haiku")
    from jax_attn_bwd.layers import haiku as ours

    def forward(x, **call):
        normal = hk.initializers.RandomNormal()
        cls = (ours if own else hk).MultiHeadAttention
        return cls(num_heads, key_size, w_init=normal, b_init=normal, **options)(x, x, x, **call)

    return hk.transform(forward)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"implementation": "xla"}, marks=thorough),
        {"local_window_size": 2},
        pytest.param({}, marks=thorough),
    ],
    ids=lambda options: "-".join(options),
)
def test_equal_layers_of_nnx_trace_once(options):
    nnx = pytest.importorskip("flax.nnx")
    (x,) = arrays((1, T, E))
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(1)
        return layer(x)

    layers = [nnx_layer(**options, rngs=nnx.Rngs(i)) for i in range(3)]
    outs = [run(layer, x) for layer in layers]
    assert len(traces) == 1
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    for out, layer in zip(outs, layers, strict=True):
        assert_close(out, layer(x), 1e-12)


@pytest.mark.parametrize("framework", ["flax_nnx", pytest.param("equinox", marks=thorough)])
def test_windows_of_numpy_integers_compare_with_others(framework):
    (x,) = arrays((1, T, E))
    if framework == "flax_nnx":
        layer, jit = nnx_layer, pytest.importorskip("flax.nnx").jit
        run = jit(lambda layer, x: layer(x))
    else:
        layer, jit = equinox_layer, pytest.importorskip("equinox").filter_jit
        run = jit(lambda layer, x: layer(x[0], x[0], x[0]))
    windows = ((2, 1), np.int64(2), [2, 1], 2)
    pair, number, listed, plain = (run(layer(local_window_size=w), x) for w in windows)
    np.testing.assert_array_equal(pair, listed)
    np.testing.assert_array_equal(number, plain)
    assert (np.asarray(pair) != np.asarray(number)).any()


@pytest.mark.parametrize("num_heads", [0, -2, 2.0, True], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_number_of_heads_is_a_positive_int(framework, num_heads):
    (x,) = arrays((1, T, E))
    make = {
        "flax_linen": lambda: linen_init(x, num_heads),
        "flax_nnx": lambda: nnx_layer(num_heads),
        "haiku": lambda: haiku_transformed(num_heads=num_heads).init(jax.random.key(0), x),
        "equinox": lambda: equinox_layer(num_heads),
    }[framework]
    error = ValueError if type(num_heads) is int else TypeError
    with pytest.raises(error, match=r"Multi[Hh]eadAttention: num_heads must be a positive int, got"):
        make()


def test_the_number_of_heads_where_flax_s_projections_run():
    (x,) = arrays((1, T, E))
    with pytest.raises(ValueError, match="num_heads must be a positive int, got 0"):
        linen_init(x, 0, decode=True)


@thorough
def test_heads_of_size_0_in_haiku():
    """The output is the output bias, as Haiku's own layer has it."""
    (x,) = arrays((1, T, E))
    outs = []
    for own in (False, True):
        model = haiku_transformed(own, key_size=0, model_size=6)
        with lenient():
            params = model.init(jax.random.key(0), x)
            outs.append(model.apply(params, None, x))
    assert_close(outs[1], outs[0], 1e-12)
    assert (np.asarray(outs[1]) != 0).all()


def test_a_traced_dropout_rate_is_refused():
    (x,) = arrays((1, T, E))
    init = jax.jit(lambda key, rate: haiku_transformed().init(key, x, dropout_rate=rate))
    with pytest.raises(TypeError, match=r"dropout_rate must be a Python float, got a traced"):
        init(jax.random.key(0), 0.1)
    layer = equinox_layer(dropout_p=0.5)
    call = jax.jit(lambda layer: layer(x[0], x[0], x[0], key=jax.random.key(0), inference=False))
    with pytest.raises(TypeError, match=r"dropout\.p must be a Python float, got a traced"):
        call(layer)


def test_a_key_is_no_rngs_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    (x,) = arrays((1, T, E))
    layer = nnx_layer(dropout_rate=0.5)
    call = partial(layer, x, deterministic=False)
    with pytest.raises(TypeError, match=r"rngs must be nnx\.Rngs .*nnx\.Rngs\(dropout=key\)"):
        call(rngs=jax.random.key(0))
    expected = call(rngs=nnx.Rngs(dropout=3))
    assert_close(call(rngs=nnx.Rngs(dropout=3).dropout), expected, 1e-12)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=thorough), False], ids=["whole", "parts"])
def test_masks_of_equinox_have_the_shapes_of_its_own(whole):
    eqx = pytest.importorskip("equinox")
    x, y = arrays((T, E), (S, E))
    own = eqx.nn.MultiheadAttention(2, E, key=jax.random.key(0))
    heads = {} if whole else {"process_heads": lambda *heads: heads}
    mask = jnp.asarray(np.random.default_rng(0).random((2, T, S)) < 0.7).at[..., 0].set(True)
    for given in (mask, mask[0]):
        with lenient():
            expected = own(x, y, y, given)
        assert_close(equinox_layer()(x, y, y, given, **heads), expected, 1e-12)
    wrong = (mask[:1], mask[0, 0], mask[0, :, :1], mask[0, :1], mask[None], mask[0, :, 1:])
    for given in wrong:
        with pytest.raises((ValueError, TypeError)), lenient():
            own(x, y, y, given)
        with pytest.raises(ValueError, match=r"mask must have shape \[T, S\] = \(5, 7\) or"):
            equinox_layer()(x, y, y, given, **heads)


@pytest.mark.parametrize("framework", frameworks("flax_nnx", "haiku"))
def test_a_window_reaches_the_operator(framework):
    """A window is a mask."""
    inputs, mask = inputs_of("cross", framework)
    T, S = multi_head_cases.T, multi_head_cases.S
    distance = np.arange(T)[:, None] - np.arange(S)[None]
    window = jnp.asarray((distance <= 2) & (distance >= -1))[None, None]
    plain = multi_head(framework, True, implementation="xla")
    params = random_params(plain, inputs)
    narrow = multi_head(framework, True, local_window_size=(2, 1))
    got = jitted(narrow.call)(params, *inputs, mask)
    assert_close(got, jitted(plain.call)(params, *inputs, mask & window), 1e-13)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_wrong_options_reach_the_operator_which_names_them(framework):
    inputs, mask = inputs_of("cross", framework)
    params = random_params(multi_head(framework, True), inputs)
    wrong = {"implementation": "mine", "local_window_size": -1, "save": "all", "logits_soft_cap": -1.0}
    for name, value in (wrong | {"precision": "exact"}).items():
        with pytest.raises(ValueError, match="mine" if value == "mine" else name):
            multi_head(framework, True, **{name: value}).call(params, *inputs, mask)
    for name in ("deterministic_sums", "forward_mode"):
        with pytest.raises(TypeError, match=f"{name} must be (None or )?a Python bool"):
            multi_head(framework, True, **{name: 1}).call(params, *inputs, mask)
