"""`MultiHeadAttention` and `GroupedQueryAttention` for Keras beside Keras' own, and `use_attention`."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import arrays, assert_all_close, assert_tangents_agree, jitted, values_and_gradients

from jax_attn_bwd import Rotary

keras = pytest.importorskip("keras")

from keras.src import backend  # noqa: E402

from jax_attn_bwd.layers import keras as ours  # noqa: E402

# What NumPy says of the arrays of Keras' own variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

B, T, S, N, K, E = 2, 6, 9, 4, 2, 8
THEIRS = {"multi_head": keras.layers.MultiHeadAttention, "grouped": keras.layers.GroupQueryAttention}
OURS = {"multi_head": ours.MultiHeadAttention, "grouped": ours.GroupedQueryAttention}
SIZES = {
    "multi_head": dict(num_heads=N, key_dim=3, value_dim=5),
    "grouped": dict(head_dim=3, num_query_heads=N, num_key_value_heads=K),
}


def made(kind, own, *shapes, **options):
    """A layer in float64, built, with random weights that ours and theirs share."""
    options = dict(dtype="float64", kernel_initializer="zeros") | options  # whose draws take long to compile
    layer = (OURS if own else THEIRS)[kind](**SIZES[kind], **options)
    layer.build(*shapes)
    layer.set_weights([0.5 * x for x in arrays(*(w.shape for w in layer.trainable_variables))])
    return layer


def run(layer, *inputs, scores=True, **told):
    """Outputs and gradients by weights and inputs, compiled."""
    rest = [w.value for w in layer.non_trainable_variables]

    def call(weights, *inputs):
        outputs = layer.stateless_call(weights, rest, *inputs, **told)[0]
        return outputs if scores else outputs[0]

    weights = [w.value for w in layer.trainable_variables]
    return jitted(partial(values_and_gradients, call))(weights, *inputs)


def sees_a_key(*shape):
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


CASES = {  # kind, axes of tokens of queries and keys, options, what a call tells
    "causal, scores": ("multi_head", [T], [S], {}, dict(use_causal_mask=True, return_attention_scores=True)),
    "mask, gate": ("multi_head", [T], [S], dict(use_gate=True), dict(attention_mask=sees_a_key(B, T, S))),
    "window": ("multi_head", [T], [T], dict(sliding_window=2), dict(use_causal_mask=True)),
    "head mask": ("multi_head", [T], [S], {}, dict(attention_mask=sees_a_key(B, N, T, S))),
    "two axes": (
        "multi_head", [2, 3], [2, 2], {},
        dict(attention_mask=sees_a_key(B, 2, 3, 2, 2), return_attention_scores=True),
    ),
    "one axis of two": ("multi_head", [2, T], [2, S], dict(attention_axes=2), {}),
    "grouped, causal": ("grouped", [T], [T], {}, dict(use_causal_mask=True)),
    "grouped, window, scores": (
        "grouped", [T], [S], dict(sliding_window=4),
        dict(attention_mask=sees_a_key(T, S), return_attention_scores=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=thorough)], ids=["layer", "in_place"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "grouped, window, scores" else thorough) for c in CASES]
)
def test_as_keras_own(case, in_place):
    kind, rows, columns, options, told = CASES[case]
    inputs = arrays((B, *rows, E), (B, *columns, E), (B, *columns, E - (kind == "multi_head")))
    shapes = [x.shape for x in inputs]
    # Without scores Keras computes in float32, and knows one size of heads alone.
    theirs = made(kind, False, *shapes, **options)
    expected = run(
        theirs, *inputs, **{**told, "return_attention_scores": True}, scores="return_attention_scores" in told
    )
    if in_place:
        with ours.use_attention():
            got = run(made(kind, False, *shapes, **options), *inputs, **told)
    else:
        got = run(made(kind, True, *shapes, **options), *inputs, **told)
    assert_all_close(got, expected, 1e-11)


def padded(kind, own, **options):
    """A layer between masks that Keras carries along: its output for padded tokens, and the explicit mask."""
    (x,) = arrays((B, T, E))
    real = jnp.asarray([[True] * 4 + [False] * 2, [True] * T])
    layer = made(kind, own, x.shape, x.shape, **options)
    return layer, x, real


@pytest.mark.parametrize("kind", [pytest.param("multi_head", marks=thorough), "grouped"])
def test_padding_is_left_out(kind):
    """As with the mask of T x S; rows that see nothing give the output bias, and no gradient."""
    layer, x, real = padded(kind, True)
    told = dict(query_mask=real, value_mask=real)
    if kind == "multi_head":  # Keras reads the masks of queries off the array alone
        told = {"value_mask": real}
    out, (_, dquery, dvalue) = run(layer, x, x, **told, use_causal_mask=True)
    seen = real[:, None] & (real[:, :, None] if kind == "grouped" else True)
    expected, grads = run(layer, x, x, attention_mask=seen, use_causal_mask=True)
    assert_close(out, expected, 1e-12)
    assert_all_close([dquery, dvalue], list(grads[1:]), 1e-12)
    if kind == "grouped":
        bias = layer.trainable_variables[-1].value
        np.testing.assert_array_equal(out[0, 4:], np.broadcast_to(bias, (2, E)))
        np.testing.assert_array_equal(dquery[0, 4:], 0)


@thorough
@pytest.mark.parametrize("own", [False, True])
def test_a_model_with_embeddings_that_mask(own):
    """Keras hands the masks on by itself, in `use_attention` as in the layer."""
    tokens = np.array([[1, 2, 3, 0, 0], [3, 3, 1, 1, 2]])
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(4, E, mask_zero=True)(inputs)
    model = keras.Model(inputs, (OURS if own else THEIRS)["multi_head"](2, 4)(x, x))
    plain = keras.Model(inputs, THEIRS["multi_head"](2, 4)(x, x))
    plain.set_weights(model.get_weights())
    with ours.use_attention():
        got = model(tokens)
    assert_close(got[tokens > 0], plain(tokens)[tokens > 0], 1e-5)


@thorough
def test_tokens_are_as_a_mask():
    (x,) = arrays((B, T, E))
    ids = jnp.asarray([[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]])
    layer = made("grouped", True, x.shape, x.shape, logits_soft_cap=1.5)
    mask = ids[:, :, None] == ids[:, None]
    got = run(layer, x, x, query_segment_ids=ids, key_value_segment_ids=ids)
    assert_all_close(got, run(layer, x, x, attention_mask=mask), 1e-12)


def test_nothing_of_size_T_x_S_is_kept():
    """With dropout, a window and padding, too; Keras keeps weights."""
    x, real = jnp.zeros((1, 512, E)), jnp.ones((1, 512), bool)

    def kept(own, **told):
        layer = made("grouped", own, x.shape, x.shape, dropout=0.1, sliding_window=64)
        rest = [w.value for w in layer.non_trainable_variables]
        weights = [w.value for w in layer.trainable_variables]
        call = lambda w, x: layer.stateless_call(w, rest, x, x, training=True, **told)[0]
        run = lambda *a: jax.vjp(call, *a)[1]
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run, weights, x)))

    told = dict(value_mask=real, use_causal_mask=True)
    assert kept(True, **told) < 512 * 64 < N * 512 * 512 < kept(False, **told)


@thorough
def test_dropout_keeps_the_mean():
    """The weights that are returned are those before it; the same state gives the same mask."""
    (x,) = arrays((1, T, E))
    layer = made("multi_head", True, x.shape, x.shape, dropout=0.25, seed=3)
    weights = [w.value for w in layer.trainable_variables]
    still, scores = layer(x, x, return_attention_scores=True)

    @jitted
    @jax.vmap
    def draw(seed):
        told = dict(training=True, return_attention_scores=True)
        return layer.stateless_call(weights, [jnp.stack([seed, seed])], x, x, **told)[0]

    draws, same = draw(jnp.arange(300, dtype=jnp.uint32))
    error = draws.std(0) / np.sqrt(len(draws))
    assert (error > 0).all()
    assert np.abs((draws.mean(0) - still) / error).max() < 5
    assert_close(same[7], scores, 1e-12)
    assert_close(draw(jnp.full(3, 5, "uint32"))[0][0], draws[5], 1e-12)


@thorough
def test_forward_mode():
    (x,) = arrays((1, T, E))
    layer = made("multi_head", True, x.shape, x.shape, forward_mode=True, rotary=Rotary(size=2))
    weights = [w.value for w in layer.trainable_variables]
    call = lambda w, x: layer.stateless_call(w, [], x, x, use_causal_mask=True)[0]
    outputs, gradients = jitted(partial(values_and_gradients, call))(weights, x)
    assert_tangents_agree(call, (weights, x), outputs, gradients)


def test_configurations_and_names_of_weights_are_keras_own():
    (x,) = arrays((1, T, E))
    theirs, layer = (made("multi_head", own, x.shape, x.shape, name="attention") for own in (False, True))
    assert theirs.get_config() == layer.get_config()
    assert [w.path for w in theirs.weights] == [w.path for w in layer.weights]
    assert type(keras.layers.MultiHeadAttention.from_config(layer.get_config())) is THEIRS["multi_head"]


@thorough
def test_files_of_either_load_into_the_other(tmp_path):
    """Options of ours are saved where they are given."""
    (x,) = arrays((1, T, E))
    inputs = keras.Input((T, E), dtype="float64")
    outputs = THEIRS["multi_head"](N, 3, dtype="float64")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    swapped = keras.models.clone_model(model, clone_function=_ours)
    assert [type(layer) for layer in swapped.layers] == [keras.layers.InputLayer, OURS["multi_head"]]
    for source, target in ((model, swapped), (swapped, model)):
        source.save_weights(tmp_path / "x.weights.h5")
        target.set_weights([0 * w for w in target.get_weights()])
        target.load_weights(tmp_path / "x.weights.h5")
        assert_close(target(x), source(x), 1e-6)  # theirs computes in float32
    options = dict(
        scale=0.7, rotary=Rotary(size=2), logits_soft_cap=2.0, local_window_size=(2, 0), score_mod=shifted
    )
    outputs = ours.GroupedQueryAttention(4, 2, 1, **options, dtype="float64")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    model.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    assert {name: getattr(loaded.layers[1], name) for name in options} == options
    assert_close(loaded(x), model(x), 1e-12)


@keras.saving.register_keras_serializable("tests")
def shifted(logits, batch, head, row, column):
    return logits - jnp.abs(row - column)


def _ours(layer):
    cls = ours.MultiHeadAttention if type(layer) is keras.layers.MultiHeadAttention else type(layer)
    return cls.from_config(layer.get_config())


@thorough
def test_the_seam_of_keras_stays():
    """A `_compute_attention` of the caller's is handed Keras' mask; tokens it would not see are an error."""
    found = []

    class Sub(ours.MultiHeadAttention):
        def _compute_attention(
            self, query, key, value, attention_mask=None, training=None, return_attention_scores=False
        ):
            found.append(attention_mask)
            return super()._compute_attention(query, key, value, attention_mask, training)

    (x,) = arrays((1, T, E), dtype="float32")
    layer = Sub(2, 4)
    out = layer(x, x, use_causal_mask=True)
    np.testing.assert_array_equal(found[0], np.tril(np.ones((1, T, T), bool)))
    mask = np.tril(np.ones((T, T), bool))
    assert_close(out, layer(x, x, attention_mask=mask), 1e-5)
    with pytest.raises(TypeError, match="Sub: query_positions must be left out with a _compute_attention"):
        layer(x, x, query_positions=jnp.arange(T))


def test_in_place_errors_are_raised_and_nothing_stays():
    (x,) = arrays((1, T, 1, E), dtype="float32")
    held = [cls._compute_attention for cls in THEIRS.values()]
    with ours.use_attention(implementation="nothing"):
        assert THEIRS["multi_head"]._compute_attention is not held[0]
        with pytest.raises(ValueError, match="implementation must be None or one of"):
            keras.ops.dot_product_attention(x, x, x)
    assert [cls._compute_attention for cls in THEIRS.values()] == held
    first, second = (ours.use_attention() for _ in range(2))  # of two threads
    for step in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        step()
    assert THEIRS["multi_head"]._compute_attention is not held[0]
    second.__exit__(None, None, None)
    assert [cls._compute_attention for cls in THEIRS.values()] == held
    with ours.use_attention(), pytest.raises(NotImplementedError, match="attn_logits_soft_cap must be None"):
        backend.nn.dot_product_attention(x, x, x, attn_logits_soft_cap=2.0)  # what a TPU lets through
    with ours.use_attention():
        with pytest.raises(TypeError, match="additive values are a bias: pass them as bias="):
            keras.ops.dot_product_attention(x, x, x, mask=np.full((T, T), -1e9))
        got = keras.ops.dot_product_attention(x, x, x, is_causal=True)
    assert_close(got, keras.ops.dot_product_attention(x, x, x, is_causal=True), 1e-5)


def test_errors(monkeypatch):
    (x,) = arrays((1, 2, T, E), dtype="float32")
    additive = np.where(np.tril(np.ones((T, T))), 0, -1e9)
    layer = ours.MultiHeadAttention(2, 4)
    with pytest.raises(TypeError, match=r"MultiHeadAttention: mask must be boolean.* -1e\+09 in it.*bias"):
        layer(x[:, 0], x[:, 0], attention_mask=additive)
    call = lambda mask: layer(x[:, 0], x[:, 0], attention_mask=mask)
    assert np.isnan(jitted(call)(additive.astype("float32"))).all()
    assert np.isfinite(jitted(call)((additive == 0).astype("float32"))).all()
    with pytest.raises(ValueError, match="local_window_size must be left out beside sliding_window"):
        ours.MultiHeadAttention(2, 4, sliding_window=2, local_window_size=1)
    with pytest.raises(NotImplementedError, match=r"query must be \[B, T, E\] where"):
        ours.MultiHeadAttention(2, 4)(x, x, value_mask=np.ones((1, T), bool))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'query_position'\. Did you mean"):
        layer(x[:, 0], x[:, 0], query_position=jnp.arange(T))
    with pytest.raises(ValueError, match="Unrecognized keyword arguments passed to MultiHeadAttention"):
        ours.MultiHeadAttention(2, 4, nobodys_word=2.0)
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ImportError, match=r"needs the JAX backend of Keras, got 'torch'; set .*=jax"):
        importlib.reload(ours)
