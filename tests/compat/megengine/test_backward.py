"""The backward as a plain function against `jax.vjp` of the forward, and the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.megengine.calls import ALL, E, H, L, N, S, draw
from compat.programs import QUICK
from helpers import assert_close, thorough

from jax_attn_bwd.compat import megengine

FLAGS = dict(zip(("qbias", "kbias", "vbias", "obias"), ALL, strict=True))
CALLS = {
    "everything": dict(
        rows=True, need_weights=True, average_attn_weights=True, attn_drop=0.4, out_drop=0.3,
        add_zero_attn=True, reslink=True, attn_mask=(N * H, L, S), key_padding_mask=(N, S),
    ),
    "per_head": dict(need_weights=True, attn_drop=0.4, attn_mask=(L, S)),
    "unbatched": dict(batch=1, need_weights=True, average_attn_weights=True, key_padding_mask=(S,)),
    "not_projected": dict(sizes=(0, 0, 6, 0), flags=(False, False, True, False), k_size=E),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("everything", "not_projected") else thorough) for n in CALLS]
)
def test_as_the_gradient_of_the_forward(name):
    options = dict(CALLS[name])
    how = {n: options.pop(n) for n in ("sizes", "flags", "k_size", "rows", "batch") if n in options}
    moving = draw(**how)
    rng = np.random.default_rng(5)
    if how.get("batch") == 1:
        moving = {n: x if n == "io_weight_bias" else x[0] for n, x in moving.items()}
    for mask in ("attn_mask", "key_padding_mask"):
        if mask in options:
            moving[mask] = jnp.asarray(rng.standard_normal(options.pop(mask)))
    names = ("qproj_size", "kproj_size", "vproj_size", "oproj_size")
    options |= dict(zip(names, how.get("sizes", (E,) * 4), strict=True))
    options |= dict(zip(FLAGS, how.get("flags", ALL), strict=True))
    options = {"attn_drop": 0.0, "out_drop": 0.0, **options}
    options |= {"embed_dim": E, "num_heads": H, "dropout_key": jax.random.key(1)}

    @jax.jit
    def both(moving, cotangents):
        _, pullback = jax.vjp(lambda x: megengine.multi_head_attention(**x, **options), moving)
        dout, dweights = cotangents
        by_hand = megengine.multi_head_attention_backward(
            dout, **moving, **options, grad_weights=dweights, wrt=tuple(moving)
        )
        return pullback(cotangents)[0], by_hand

    shapes = jax.eval_shape(lambda x: megengine.multi_head_attention(**x, **options), moving)
    cotangents = jax.tree.map(lambda x: rng.standard_normal(x.shape), shapes)
    expected, got = both.lower(moving, cotangents).compile(QUICK)(moving, cotangents)
    for argument, x in got._asdict().items():
        assert (x is None) == (argument not in moving), argument
        if x is not None:
            assert_close(x, expected[argument], 1e-11, argument)


def test_gradients_to_choose():
    given, dout = draw(), np.ones((N, L, E))
    call = {**given, **FLAGS, "embed_dim": E, "num_heads": H, "attn_drop": 0.0, "out_drop": 0.0}
    run = lambda **more: megengine.multi_head_attention_backward(dout, **call, **more)
    chosen = jax.eval_shape(lambda: run(wrt=("key",)))
    assert [n for n, x in chosen._asdict().items() if x is not None] == ["key"]
    mask = np.zeros((L, S), bool)
    all_of_them = jax.eval_shape(lambda: run(attn_mask=mask))
    assert [n for n, x in all_of_them._asdict().items() if x is not None] == list(given)
    with pytest.raises(ValueError, match="wrt must name arguments that were given, got 'attn_mask'"):
        run(attn_mask=mask, wrt="attn_mask")
    with pytest.raises(ValueError, match="grad_weights must be None without need_weights"):
        run(grad_weights=np.ones((N * H, L, S)))


def test_the_layer_is_the_function():
    layer = megengine.MultiHeadAttn(E, H, attn_dropout=0.5, add_bias_kv=True, kdim=6, vdim=10)
    params = layer.init(jax.random.key(0), jnp.float64)
    given = draw()
    q, k, v = (given[n] for n in ("query", "key", "value"))
    key = jax.random.key(2)

    def run():
        options = dict(need_weights=True, dropout_key=key)
        function = megengine.multi_head_attention
        of_function = function(q, k, v, E, H, 0.5, 0.0, **params, **FLAGS, **options)
        layers = (layer(params, q, k, v, training=training, **options) for training in (True, False))
        return *layers, of_function

    of_layer, without_dropout, of_function = jax.jit(run, compiler_options=QUICK)()
    jax.tree.map(np.testing.assert_array_equal, of_layer, of_function)
    assert not np.array_equal(of_layer[1], without_dropout[1])
    sizes = {n: x.shape for n, x in params.items()}
    assert sizes == {
        "io_weight_bias": (1, (2 * E + 16) * E + 4 * E),
        "bias_k": (1, 1, E),
        "bias_v": (1, 1, E),
    }
    np.testing.assert_array_equal(params["io_weight_bias"][0, -4 * E :], 0)
    with pytest.raises(ValueError, match=r"megengine\.MultiHeadAttn: params must be a dictionary of"):
        layer({"io_weight_bias": params["io_weight_bias"]}, q, k, v)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads = 3, got 8"):
        megengine.MultiHeadAttn(E, 3)
