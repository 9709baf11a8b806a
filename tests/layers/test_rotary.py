"""Rotary embeddings inside the layers: as the frameworks' own layers with the heads turned in between."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import (
    arrays,
    assert_all_close,
    frameworks,
    jitted,
    lenient,
    multi_head,
    random_params,
    values_and_gradients,
)
from layers.multi_head_cases import N, S, T

from jax_attn_bwd import MultiHeadAttentionParams, Rotary, attention_fn, multi_head_attention
from jax_attn_bwd._core.rotary import rotate

E = 16  # heads of 4
AT = {
    "query_positions": jnp.asarray(np.add.outer([3, 0], np.arange(T))),
    "key_value_positions": jnp.asarray(np.add.outer([0, 5], np.arange(S))),
}
KINDS = {
    "half": Rotary(),
    "interleaved": Rotary(interleaved=True, base=100.0),
    "part": Rotary(size=2, frequencies=np.array([0.4])),
}


def turned_as_complex(rotary, x, positions):
    """`x [..., L, N, H]`, as complex numbers."""
    H = x.shape[-1]
    n = H if rotary.size is None else rotary.size
    a = np.arange(0, n, 2) if rotary.interleaved else np.arange(n // 2)
    b = a + (1 if rotary.interleaved else n // 2)
    frequency = np.asarray(rotary.frequencies or rotary.base ** (-2 * np.arange(n // 2) / n))
    z = (x[..., a] + 1j * x[..., b]) * jnp.exp(1j * positions[..., None, None] * frequency)
    return x.at[..., a].set(z.real).at[..., b].set(z.imag)


def turning(attend, rotary, query, key, value, **options):
    """What `attention_fn=` of Flax's own layers is handed."""
    query = turned_as_complex(rotary, query, AT["query_positions"])
    return attend(query, turned_as_complex(rotary, key, AT["key_value_positions"]), value, **options)


def haiku_layer_by_the_operator(rotary, params, query, key, value):
    """Haiku's layer by the operator."""
    (root,) = {name.rsplit("/", 1)[0] for name in params}
    leaves = []
    for name in ("query", "key", "value"):
        w, b = (params[f"{root}/{name}"][x] for x in "wb")
        leaves += [w.reshape(w.shape[0], N, -1), b.reshape(N, -1)]
    w, b = (params[f"{root}/linear"][x] for x in "wb")
    layer = MultiHeadAttentionParams(*leaves, w.reshape(N, -1, w.shape[-1]), b)
    return multi_head_attention(layer, query, key, value, rotary=rotary, **AT)


@pytest.mark.parametrize(
    "kind", ["half", *(pytest.param(x, marks=thorough) for x in ("interleaved", "part"))]
)
@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_as_heads_turned_in_between(framework, kind):
    """Values and gradients; positions differ from row to row."""
    rotary, inputs = KINDS[kind], tuple(arrays((2, T, E), (2, S, E), (2, S, E)))
    sizes = {"haiku": {"key_size": 4}}.get(framework, {})
    ours = multi_head(framework, True, rotary=rotary, **sizes)
    params = random_params(ours, inputs)
    if framework == "haiku":
        theirs = partial(haiku_layer_by_the_operator, rotary)
    elif framework == "equinox":
        eqx = pytest.importorskip("equinox")
        layer = eqx.nn.MultiheadAttention(
            N,
            E,
            E,
            E,
            **{f"use_{x}_bias": True for x in ("query", "key", "value", "output")},
            key=jax.random.key(0),
        )
        tree = jax.tree.structure(eqx.filter(layer, eqx.is_array))

        def theirs(params, *inputs):
            own = eqx.combine(jax.tree.unflatten(tree, params), layer)
            turn = lambda at, x: turned_as_complex(rotary, x, at)
            one = lambda q, k, v, at, to: own(
                q, k, v, process_heads=lambda q, k, v: (turn(at, q), turn(to, k), v), inference=True
            )
            return jax.vmap(one)(*inputs, *AT.values())
    else:
        flax = pytest.importorskip("flax")
        module = {"flax_linen": "linen", "flax_nnx": "nnx"}[framework]
        attend = partial(turning, getattr(flax, module).dot_product_attention, rotary)
        theirs = multi_head(
            framework, False, attention_fn=attend, **{"num_kv_heads": N} if module == "nnx" else {}
        )
        theirs = theirs.call
        if module == "nnx":
            ours = multi_head(framework, True, rotary=rotary, num_kv_heads=N)
            params = random_params(ours, inputs)
    with lenient():
        expected = jitted(partial(values_and_gradients, theirs))(params, *inputs)
    got = jitted(partial(values_and_gradients, partial(ours.call, **AT)))(params, *inputs)
    assert_all_close(got, expected, 1e-12)


def test_a_part_of_a_head_is_turned_as_a_head_of_that_size():
    (x,) = arrays((T, 1, 8))
    turned = rotate(Rotary(size=4), x, None)
    np.testing.assert_array_equal(turned[..., :4], rotate(Rotary(), x[..., :4], None))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])


@thorough
def test_the_half_split_is_that_of_equinox_and_nnx():
    (x,) = arrays((T, 2, 8))
    rotary = Rotary(base=10_000.0)
    with lenient():
        ours = turned_as_complex(rotary, x, jnp.arange(T))
    eqx = pytest.importorskip("equinox")
    rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(8), in_axes=1, out_axes=1)
    with lenient():
        assert_close(rope(x), ours, 1e-6)
    nnx = pytest.importorskip("flax.nnx")
    if hasattr(nnx, "RoPE"):
        with lenient():
            assert_close(jax.vmap(nnx.RoPE(), in_axes=1, out_axes=1)(x), ours, 1e-6)


def test_rows_of_a_cache_that_begin_at_different_places():
    """Left-padded rows, each decoded at its own offset, as each alone."""
    nnx = pytest.importorskip("flax.nnx")
    from jax_attn_bwd.layers import flax_nnx

    (x,) = arrays((2, T, E))
    padding = np.array([[2], [0]])
    rotary = Rotary(base=10.0, interleaved=True)
    layer = flax_nnx.MultiHeadAttention(
        N, E, num_kv_heads=2, rotary=rotary, param_dtype="float64", rngs=nnx.Rngs(0)
    )
    layer.init_cache(x.shape, "float64")
    keys = dict(
        key_value_positions=jnp.asarray(np.arange(T) - padding),
        key_value_segment_ids=jnp.asarray(np.arange(T) < padding, int),
        query_segment_ids=jnp.zeros((2, 1), int),
    )
    step = nnx.jit(lambda layer, x, at: layer(x, decode=True, query_positions=at, **keys))
    with lenient():
        steps = [step(layer, x[:, t : t + 1], jnp.asarray(t - padding)) for t in range(T)]
    out = jnp.concatenate(steps, 1)
    for row, start in enumerate([2, 0]):
        alone = layer(x[row : row + 1, start:], decode=False, is_causal=True)
        assert_close(out[row, start:], alone[0], 1e-12)


ERRORS = {
    "kind": (
        dict(rotary=10_000.0),
        TypeError,
        r"rotary must be a Rotary, got float; write rotary=Rotary\(base",
    ),
    "odd": (
        dict(rotary=Rotary()),
        ValueError,
        r"rotary\.size must be even and at most the head size 3, got 3",
    ),
    "large": (
        dict(rotary=Rotary(size=4)),
        ValueError,
        r"rotary\.size must be even and at most the head size 3",
    ),
    "count": (
        dict(rotary=Rotary(size=2, frequencies=(1.0, 2.0))),
        ValueError,
        r"rotary\.frequencies must have length size / 2 = 1",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, error, words = ERRORS[name]
    w = jnp.ones((6, 2, 3))
    params = MultiHeadAttentionParams(query_kernel=w, key_kernel=w)
    with pytest.raises(error, match=f"multi_head_attention: {words}"):
        multi_head_attention(params, jnp.ones((4, 6)), **options)


def test_errors_of_rotary_and_attention_fn():
    for arguments, error, words in (
        (dict(base=1), ValueError, "base must be above 1"),
        (dict(size=3), ValueError, "size must be even"),
        (dict(frequencies=jnp.ones(2)), TypeError, "frequencies must be Python floats, got a JAX array"),
        (dict(interleaved=1), TypeError, "interleaved must be a Python bool"),
    ):
        with pytest.raises(error, match=f"Rotary: {words}"):
            Rotary(**arguments)
    with pytest.raises(ValueError, match=r"base must have its name.*got Rotary\(64\).*Rotary\(size=64\)"):
        Rotary(64)  # elsewhere the size of a head comes first
    assert Rotary(64.0) == Rotary(base=64) == Rotary(base=64.0)
    assert Rotary(10_000) == Rotary()
    q, k = jnp.ones((1, 2, 4)), jnp.ones((5, 2, 4))
    with pytest.raises(ValueError, match="query_positions must be given with rotary"):
        attention_fn(q, k, k, rotary=Rotary(), deterministic=True)
    with pytest.raises(ValueError, match="rotary must be None beside rope"):
        attention_fn(k, k, k, rotary=Rotary(), rope=lambda x, at: x, deterministic=True)
