"""`attention_fn` by itself: dropout, bias, dtypes, rotary embedding, sown weights, errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import arrays, assert_all_close, jitted, lenient, random_params, values_and_gradients
from layers.multi_head_cases import E, N, S, T, some_mask

from jax_attn_bwd import attention_fn, dot_product_attention

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402


def heads(keys=N):
    return arrays((2, T, N, 3), (2, S, keys, 3), (2, S, keys, 5))


def linen_params(**options):
    layer = nn.MultiHeadDotProductAttention(N, param_dtype="float64", **options)
    init = lambda key, *inputs: layer.init(key, *inputs)["params"]
    return random_params(type("Layer", (), {"init": staticmethod(init)}), arrays((2, T, E), (2, S, E)))


@pytest.mark.parametrize("layer", ["own", "flax"])
def test_sown_weights(layer):
    """Where Flax puts them, as Flax computes them, with a gradient and a tangent."""
    x, y = arrays((2, T, E), (2, S, E))
    params, mask = linen_params(), some_mask(2, 1, T, S)
    ours = (
        partial(flax_linen.MultiHeadDotProductAttention, forward_mode=True)
        if layer == "own"
        else partial(nn.MultiHeadDotProductAttention, attention_fn=partial(attention_fn, forward_mode=True))
    )
    results = []
    for cls in (nn.MultiHeadDotProductAttention, ours):

        def weights(x, cls=cls):
            made = cls(N, param_dtype="float64")
            sown = {"mask": mask, "sow_weights": True, "mutable": ["intermediates"]}
            _, state = made.apply({"params": params}, x, y, **sown)
            (found,) = state["intermediates"]["attention_weights"]
            return found

        def derived(x, weights=weights):
            return values_and_gradients(weights, x), jax.jvp(weights, (x,), (x,))[1]

        with lenient():
            results.append(jitted(derived)(x))
    assert_all_close(results[1], results[0], 1e-12)


class Recorder(nnx.Module):
    def sow(self, kind, name, weights):
        self.weights = nnx.data(weights)


@thorough
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


@thorough
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


@pytest.mark.parametrize("shared", [pytest.param(True, marks=thorough), False])
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
    )
    assert promoted.dtype == "float32"


def test_rotary_embedding_and_its_positions():
    query, key, value = arrays((2, T, N, 4), (2, T, N, 4), (2, T, N, 4))
    angle = lambda positions: positions[:, None] * jnp.array([[1.0, 0.1]])

    def rope(x, positions=None):
        positions = jnp.arange(x.shape[-2]) if positions is None else positions
        cos, sin = (f(angle(positions.astype(x.dtype)))[None] for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    turn = lambda x: jnp.swapaxes(rope(jnp.swapaxes(x, -2, -3)[0])[None], -2, -3)
    turned = [jnp.concatenate([turn(x[:1]), turn(x[1:])]) for x in (query, key)]
    expected = dot_product_attention(*turned, value)
    assert_close(attention_fn(query, key, value, rope=rope), expected, 1e-13)
    shifted = attention_fn(query, key, value, rope=rope, input_positions=jnp.arange(T) + 50)
    assert_close(shifted, expected, 1e-12)
    with pytest.raises(ValueError, match=r"input_positions must be given together with rope"):
        attention_fn(query, key, value, input_positions=jnp.arange(T))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask": jnp.full((T, S), -1e9)}, TypeError, r"attention_fn: mask must be boolean.*bias"),
        ({"dropout_rate": 0.5}, ValueError, "dropout_rng must be given"),
        ({"dropout_rate": 0.5, "dropout_rng": 17}, TypeError, "attention_fn: dropout_rng must be one JAX"),
        ({"dropout_rate": 1.5}, ValueError, r"dropout_rate must lie in \[0, 1\]"),
        ({"deterministic": jnp.array(True)}, TypeError, "deterministic must be a Python bool"),
        ({"qk_attn_weights_einsum": jnp.einsum}, NotImplementedError, "qk_attn_weights_einsum must be None"),
        ({"einsum_dot_general": jax.lax.dot_general}, NotImplementedError, "einsum_dot_general"),
        ({"module": object()}, TypeError, "module must be the Flax module"),
        ({"implementation": "mine"}, ValueError, "mine"),
        ({"forward_mode": 1}, TypeError, "attention_fn: forward_mode must be a Python bool"),
        ({"bias": jnp.zeros((2, 2, T, S))}, ValueError, "bias must broadcast"),
        (
            {"mod_args": (np.ones(3),)},
            ValueError,
            "mod_args must be given together with mask_mod or score_mod",
        ),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        attention_fn(*heads(), **changed)
