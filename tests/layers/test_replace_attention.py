"""`replace_attention`: a model of the framework's layers, and the same with ours, weights kept."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, thorough
from jax import lax
from layers.frameworks import lenient

import jax_attn_bwd as jab
from jax_attn_bwd import layers

OURS = layers.equinox.MultiheadAttention
KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 16)))
MASK = jnp.arange(6) < 5
KINDS = ["listed", pytest.param("scanned", marks=thorough)]


class Block(eqx.Module):
    """As in Equinox's examples of BERT and ViT: attention and a perceptron, each with a norm."""

    attention: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(
            2, 16, use_query_bias=True, use_output_bias=True, dtype=X.dtype, key=key
        )
        self.norms = [eqx.nn.LayerNorm(16, dtype=X.dtype), eqx.nn.LayerNorm(16, dtype=X.dtype)]
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, dtype=X.dtype, key=key)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.broadcast_to(MASK, (6, 6)))
        return x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)


def listed(model, x):
    return jax.vmap(lambda x: model[1](model[0](x)))(x)


def scanned(model, x):
    arrays, static = eqx.partition(model, eqx.is_array)
    step = lambda x, arrays: (jax.vmap(eqx.combine(arrays, static))(x), None)
    return lax.scan(step, x, arrays)[0]


EQUINOX = {
    "listed": (lambda: [Block(KEY), Block(jax.random.key(1))], listed),
    "scanned": (lambda: eqx.filter_vmap(Block)(jax.random.split(KEY, 2)), scanned),
}


def values_and_gradients(run, model):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    along = jnp.asarray(np.random.default_rng(1).standard_normal(X.shape))
    loss = lambda arrays, x: (run(eqx.combine(arrays, static), x) * along).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays, X)


def assert_agree(got, expected, rtol):
    """All leaves as one array: the gradient of a bias of keys is 0, and rounding."""
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    assert_close(flat(got), flat(expected), rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_equinox(kind):
    make, run = EQUINOX[kind]
    model = make()
    new = layers.equinox.replace_attention(model)
    found = jax.tree.leaves(new, is_leaf=lambda x: isinstance(x, OURS))
    assert sum(isinstance(x, OURS) for x in found) == (2 if kind == "listed" else 1)
    assert not any(isinstance(x, OURS) for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, OURS)))
    assert_agree(values_and_gradients(run, new), values_and_gradients(run, model), 1e-10)
    assert eqx.tree_equal(layers.equinox.replace_attention(new), new)


class NNXBlock(nnx.Module):
    """As in the transformers of NNX's examples; decoding has a cache."""

    def __init__(self, rngs, **options):
        kinds = dict(param_dtype=X.dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(16, **kinds), nnx.LayerNorm(16, **kinds)])
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, **kinds, **options)
        self.mlp = nnx.Linear(16, 16, **kinds)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=MASK, is_causal=True)
        return x + nnx.relu(self.mlp(self.norms[1](x)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(NNXBlock))(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, block: (block(x), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return run(x, self.blocks)[0]


NNX = {
    "listed": lambda: nnx.Sequential(NNXBlock(nnx.Rngs(0)), NNXBlock(nnx.Rngs(1))),
    "scanned": lambda: Stack(nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_nnx(kind):
    def gradients(model):
        along = jnp.asarray(np.random.default_rng(1).standard_normal(X.shape))
        call = nnx.value_and_grad(lambda model, x: (model(x) * along).sum(), argnums=(0, 1))
        with lenient():
            return nnx.jit(call)(model, X)

    model = NNX[kind]()
    new = layers.flax_nnx.replace_attention(model)
    kinds = [type(x) for _, x in nnx.iter_graph(new) if isinstance(x, nnx.MultiHeadAttention)]
    assert kinds == [layers.flax_nnx.MultiHeadAttention] * len(kinds)
    assert len(kinds) == (2 if kind == "listed" else 1)
    assert_agree(gradients(new), gradients(model), 1e-6)  # theirs has a softmax in float32
    again = nnx.state(layers.flax_nnx.replace_attention(new))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again, nnx.state(new)))


def test_what_may_attend_otherwise_is_refused_by_its_path():
    class Other(eqx.nn.MultiheadAttention):
        pass

    model = {"blocks": [None, Other(2, 8, key=KEY)]}
    with pytest.raises(TypeError, match=r"model\['blocks'\]\[1\] must be an equinox.* itself, got Other"):
        layers.equinox.replace_attention(model)
    with pytest.raises(ValueError, match=r"model must hold an equinox\.nn\.MultiheadAttention, got Linear"):
        layers.equinox.replace_attention(eqx.nn.Linear(2, 2, key=KEY))

    options = dict(decode=False, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(2, 8, attention_fn=lambda *args, **options: args[0], **options)
    with pytest.raises(TypeError, match=r"model\.layers\.1 must have .* attention_fn, .* got <f"):
        layers.flax_nnx.replace_attention(nnx.Sequential(nnx.relu, theirs))


def test_what_attends_by_ours_keeps_its_attention_fn():
    causal = jab.configured_attention_fn(is_causal=True)
    over_mesh = jab.parallel.attention_fn(jax.sharding.Mesh(jax.devices()[:1], ("sequence",)))
    for attend in (causal, over_mesh):
        kinds = dict(attention_fn=attend, param_dtype=X.dtype, decode=False, rngs=nnx.Rngs(0))
        ours = nnx.MultiHeadAttention(2, 16, **kinds)
        assert_close(layers.flax_nnx.replace_attention(ours)(X), ours(X), 1e-12)
