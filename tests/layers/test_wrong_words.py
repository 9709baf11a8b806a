"""The words of other libraries: a wrong keyword, or a call in another's order, is answered with ours."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_attn_bwd as jab
from jax_attn_bwd import layers, parallel
from jax_attn_bwd._core import keywords

NAMES = ("equinox", "flax_linen", "flax_nnx", "haiku")
KEY = jax.random.key(0)
X, Q = jnp.ones((3, 5, 16), "float32"), jnp.ones((3, 5, 4, 8), "float32")


def nnx_layer(**options):
    return layers.flax_nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options)


def linen_call(layer, **options):
    return jax.eval_shape(lambda: layer.init_with_output(KEY, X, **options))


def equinox_layer(**options):
    return layers.equinox.MultiheadAttention(4, 16, dtype="float32", key=KEY, **options)


def nnx_call(**options):
    return nnx_layer()(X, **options)


def equinox_call(**options):
    return equinox_layer()(X[0], X[0], X[0], **options)


def haiku_call(call=None, **options):
    hk = pytest.importorskip("haiku")
    attend = lambda: layers.haiku.MultiHeadAttention(4, 4, w_init=drawn, **options)(X, X, X, **(call or {}))
    return hk.transform(attend).init(KEY)


def keras_layer(**options):
    return layers.keras.MultiHeadAttention(**options)


def keras_call(**options):
    return layers.keras.MultiHeadAttention(2, 4)(X, X, **options)


def test_every_answer_names_an_argument():
    """Each name in the table is one of a public function or layer, at construction or in the call."""
    keras = pytest.importorskip("keras")
    functions = [f for m in (jab, parallel) for f in vars(m).values() if inspect.isfunction(f)]
    for framework in NAMES:
        for layer in vars(getattr(layers, framework)).values():
            if inspect.isclass(layer) and issubclass(layer, keywords.ChecksNames):
                functions += [layer.__init__, layer.__call__]
    functions += [layers.keras.MultiHeadAttention.call, keras.layers.MultiHeadAttention.__init__]
    functions += [keras.layers.GroupQueryAttention.__init__, jab.Rotary.__init__]
    known = {"", "sliding_window"}.union(*(inspect.signature(f).parameters for f in functions))
    known = known.union(*(keywords.names_of(f) for f in functions))
    for word, answers in keywords.ELSEWHERE.items():
        assert {ours for ours, _ in answers} <= known, word


@pytest.mark.parametrize(
    ("call", "word", "answer"),
    [
        (jab.dot_product_attention, "attn_mask", "write mask=: True attends"),
        (jab.dot_product_attention, "dropout_p", "write dropout_rate=dropout_p"),
        (jab.dot_product_attention, "softmax_scale", "write scale=softmax_scale"),
        (jab.dot_product_attention_bwd, "causal", "write is_causal=causal"),
        (jab.dot_product_attention, "attention_mask", "(attention_mask != 0)[:, None, None, :]"),
        (jab.dot_product_attention, "key_padding_mask", "mask=~key_padding_mask[:, None, None, :]"),
        (parallel.ring_attention, "window_size", "write local_window_size=(left, right)"),
        (parallel.ulysses_attention, "softcap", "write logits_soft_cap=softcap"),
        (jab.gated_delta_rule, "g", "write log_decay=g"),
        (jab.gated_delta_rule, "head_first", "leave it out"),
        (jab.gated_delta_rule, "attention_mask", "seq_lengths=attention_mask.sum(-1)"),
        (jab.graph_attention, "edge_index", "BipartiteCSC.from_edge_index(edge_index"),
        (jab.graph_attention_bwd, "negative_slope", "write alpha=negative_slope"),
        (jab.graph_attention, "dtype", "results have the dtype of the nodes"),
        (jab.multi_scale_deformable_attention, "training", "nothing is dropped"),
        (jab.scaled_masked_softmax, "dim", "write axis=dim"),
        (jab.multi_head_attention, "need_weights", "write return_weights=need_weights"),
        (jab.multi_head_attention, "is_casual", "Did you mean 'is_causal'?"),
        (jab.dot_product_attention, "block_mask", "write mask_mod="),
        (jab.dot_product_attention, "q_offset", "write query_positions=q_offset + jnp.arange(T)"),
        (jab.scaled_masked_softmax, "temperature", "write scale=1 / temperature"),
        (jab.multi_head_attention, "in_proj_weight", "compat.torch.multi_head_attention_forward takes"),
        (jab.gated_delta_rule, "mode", "what is fastest is chosen here"),
        (jab.configured_attention_fn, "window_size", "write local_window_size=(left, right)"),
        (nnx_layer, "causal", "write is_causal=causal"),
        (nnx_layer, "mask", "it is told in the call"),
        (nnx_call, "local_window_size", "it is told at construction"),
        (nnx_call, "softcap", "write logits_soft_cap=softcap, at construction"),
        (equinox_layer, "head_dim", "write qk_size=head_dim, vo_size=head_dim"),
        (equinox_call, "training", "write inference=not training"),
        (haiku_call, "dropout", "takes dropout_rate= in the call"),
        (keras_layer, "causal", "write use_causal_mask=causal, in the call"),
        (keras_call, "mask", "; write attention_mask=: True attends"),
        (keras_call, "is_causal", "write use_causal_mask=is_causal"),
        (keras_layer, "num_attention_heads", "write num_heads=num_attention_heads"),
        (lambda **x: layers.keras.GroupedQueryAttention(**x), "num_heads", "write num_query_heads=num_heads"),
        (jab.Rotary, "theta", "write base=theta"),
        (nnx_layer, "rope_theta", "write rotary=jax_attn_bwd.Rotary(base=rope_theta)"),
        (jab.gated_delta_rule, "reverse", "turn the tokens of all inputs"),
        (layers.flax_linen.GATConv, "num_heads", "write heads=num_heads"),
        (layers.flax_linen.GATConv, "in_features", "the width is read off the input"),
        (layers.flax_nnx.GATConv, "out_features", "write out_channels=out_features"),
        (layers.flax_linen.MultiHeadDotProductAttention, "embed_dim", "write qkv_features=embed_dim"),
        (layers.flax_linen.GatedDeltaNet, "causal", "linear attention is causal always"),
        (layers.flax_nnx.KimiDeltaAttention, "causal", "linear attention is causal always"),
        (layers.haiku.KimiDeltaAttention, "cache_params", "decode=True in Flax and Haiku"),
        (layers.equinox.KimiDeltaAttention, "conv_size", "write conv_kernel_dim=conv_size"),
        (layers.flax_linen.KimiDeltaAttention, "scale", "queries are scaled by 1 / sqrt(size of a head)"),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", "layer"),
)
def test_a_wrong_word_is_answered(call, word, answer):
    with pytest.raises(TypeError) as caught:
        call(**{word: 1})
    assert f"() got an unexpected keyword argument {word!r}" in str(caught.value)
    assert answer in str(caught.value)


@pytest.mark.parametrize("attention_fn", [jab.dot_product_attention, jab.configured_attention_fn])
def test_what_a_layer_of_flax_is_handed_in_the_place_of_attention_fn(attention_fn):
    words = "attention_fn=jax_attn_bwd.attention_fn|write attention_fn=configured_attention_fn\\(is_causal"
    layer = nnx.MultiHeadAttention(4, 16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=words):
        layer(X)
    warned = pytest.warns(DeprecationWarning, match="attention_fn=jax_attn_bwd.attention_fn")
    raised = pytest.raises(TypeError, match=words)
    with raised if attention_fn is jab.configured_attention_fn else warned:
        linen_call(nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn), deterministic=True)


def test_a_mask_without_its_axes():
    key = jnp.ones((3, 7, 4, 8), "float32")
    for shape, remedy in (((3, 7), r"\[:, None, None, :\]"), ((3, 5, 7), r"\[:, None\]$")):
        with pytest.raises(ValueError, match=rf"write mask{remedy}"):
            jab.dot_product_attention(Q, key, key, mask=jnp.ones(shape, bool))
    with pytest.raises(ValueError, match=r"write mask\[:, None, None, :\]"):
        nnx_layer()(X, mask=jnp.ones((3, 5), bool))
    with pytest.raises(ValueError, match=r"write jnp.broadcast_to\(mask, \(5, 5\)\)"):
        equinox_layer()(X[0], X[0], X[0], jnp.ones(5, bool))


def test_deformable_attention_in_the_order_of_torch():
    words = "number of heads comes first"
    with pytest.raises(TypeError, match=words):
        layers.flax_nnx.MultiScaleDeformableAttention(32, 1, 4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=words):
        layers.equinox.MultiScaleDeformableAttention(32, 1, 4, 2, key=KEY)
    with pytest.raises(ValueError, match=words):
        layers.flax_nnx.MultiScaleDeformableAttention(256, 8, rngs=nnx.Rngs(0))
    layer = layers.flax_linen.MultiScaleDeformableAttention(32, 1, 4, 2)
    points, value = jnp.full((1, 5, 2), 0.5), jnp.ones((1, 12, 32))
    with pytest.raises(ValueError, match=words):
        layer.init(KEY, jnp.ones((1, 5, 32)), points, value, ((3, 4),))


def test_the_order_of_torch_in_a_layer():
    words = r"num_heads must divide the width, 4, got 64; .*: write \(4, 64\)"
    with pytest.raises(ValueError, match=words):
        layers.flax_nnx.MultiHeadAttention(64, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=words):
        layers.equinox.MultiheadAttention(64, 4, key=KEY)
    nnx_layer(qkv_features=32)


def test_tokens_in_the_place_of_sizes_and_a_key_in_that_of_rngs():
    words = r"MultiHeadAttention.__init__\(\) makes a layer and takes no tokens; write layer = "
    for layer in (layers.flax_nnx.MultiHeadAttention, layers.flax_linen.MultiHeadAttention):
        with pytest.raises(TypeError, match=words):
            layer(X)
    for key in (KEY, 0):
        with pytest.raises(
            TypeError, match=r"GATConv: rngs must be nnx.Rngs, got .*; write rngs=nnx.Rngs\(key"
        ):
            layers.flax_nnx.GATConv(8, 4, rngs=key)
    with pytest.raises(TypeError, match=r"write key=jax\.random\.key\(3\)"):
        layers.equinox.GATConv(8, 4, key=3)
    with pytest.raises(TypeError, match=r"inputs_k must be numbers, .* a mask is given by name: mask=mask"):
        nnx_layer()(X, jnp.ones((3, 1, 1, 5), bool))
    with pytest.raises(TypeError, match=r"input_shape must be a shape, .* write x\.shape"):
        layers.flax_nnx.KimiDeltaAttention(16, 2, 4, rngs=nnx.Rngs(0)).init_cache(2)


def test_a_context_that_is_called_with_a_model():
    pytest.importorskip("keras")
    with pytest.raises(TypeError, match=r"it is a context, .*: with use_attention\(\)"):
        layers.keras.use_attention(nnx_layer())


def test_several_tokens_in_a_step_of_nnx():
    layer = nnx_layer()
    layer.init_cache(X.shape)
    with pytest.raises(ValueError, match=r"inputs_q must be one token, to decode, got .*x\[:, t : t \+ 1\]"):
        layer(X, decode=True)


def test_a_name_in_the_place_of_an_attention_function():
    words = "attention_fn must be a function like jax_attn_bwd.attention_fn, got str"
    with pytest.raises(TypeError, match=words):
        nnx_layer(attention_fn="flash")
    with pytest.raises(TypeError, match=words):
        linen_call(layers.flax_linen.MultiHeadDotProductAttention(4, attention_fn="flash"))


def test_locations_in_bfloat16_warn():
    shapes = (1, 64 * 64, 1, 1), (1, 1, 1, 1, 1, 2), (1, 1, 1, 1, 1)
    arrays = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    call = lambda value, *others: jab.multi_scale_deformable_attention(value, ((64, 64),), *others)
    with pytest.warns(UserWarning, match=r"W / 256 pixels, 0.25 on .* in float32, beside a bfloat16 value"):
        call(*arrays)
    call(arrays[0], *(x.astype(jnp.float32) for x in arrays[1:]))


def of_nnx(built, called):
    return nnx_layer(is_causal=built)(INPUTS, is_causal=called)


def of_linen(built, called):
    layer = layers.flax_linen.MultiHeadDotProductAttention(4, is_causal=built)
    return layer.init_with_output(KEY, INPUTS, is_causal=called)[0]


def of_equinox(built, called):
    return equinox_layer(is_causal=built)(INPUTS[0], INPUTS[0], INPUTS[0], is_causal=called)


def of_haiku(built, called):
    hk = pytest.importorskip("haiku")
    layer = lambda: layers.haiku.MultiHeadAttention(4, 4, w_init=drawn, is_causal=built)
    call = hk.transform(lambda: layer()(INPUTS, INPUTS, INPUTS, is_causal=called))
    return call.apply(call.init(KEY), None)


drawn = lambda shape, dtype: jax.random.normal(KEY, shape, dtype)
INPUTS = np.random.default_rng(0).standard_normal((1, 4, 16), "float32")


@pytest.mark.parametrize("call", [of_nnx, of_linen, of_equinox, of_haiku])
def test_causality_at_construction_and_in_the_call(call):
    causal = call(False, True)
    assert (call(True, None) == causal).all()
    assert (call(True, True) == causal).all()
    assert (call(False, None) != causal).any()
    assert (call(False, False) == call(False, None)).all()
    with pytest.raises(ValueError, match="is_causal must agree with the layer's own, True, got False"):
        call(True, False)


def test_causality_in_the_call_is_checked_with_a_cache():
    hk = pytest.importorskip("haiku")

    def call(called):
        layer = layers.haiku.MultiHeadAttention(4, 4, w_init=drawn, is_causal=True, cache_length=8)
        return layer(INPUTS, INPUTS, INPUTS, is_causal=called)

    for called, error in ((False, ValueError), ("no", TypeError)):
        with pytest.raises(error, match="MultiHeadAttention: is_causal must"):
            hk.transform_with_state(call).init(KEY, called)


def test_a_layer_derived_from_ours_may_annotate_its_options():
    class Derived(layers.equinox.MultiheadAttention):
        def __init__(self, *sizes: int, **options: float | jax.Array):
            super().__init__(*sizes, **options)

    assert Derived(4, 16, dropout_p=0.5, key=KEY).dropout.p == 0.5


def test_what_help_shows_of_a_layer():
    begins = {
        "(num_heads, in_features, ": layers.flax_nnx.MultiHeadAttention,
        "(out_channels, heads=1, ": layers.flax_linen.GATConv,
        "(inputs_q, ": nnx_layer(),
    }
    for begin, shown in begins.items():
        signature = str(inspect.signature(shown))
        assert signature.startswith(begin), signature
        assert len(signature) <= 900, begin


@pytest.mark.parametrize("framework", NAMES)
def test_what_help_shows_fits_a_tooltip(framework):
    for name, layer in vars(getattr(layers, framework)).items():
        if inspect.isclass(layer) and issubclass(layer, keywords.ChecksNames) and name[0] != "_":
            signature = str(inspect.signature(layer))
            assert len(signature) <= 900, name
            assert " at 0x" not in signature, name


def test_no_word_is_answered_with_self():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'self_attn'$"):
        nnx_layer(self_attn=True)
