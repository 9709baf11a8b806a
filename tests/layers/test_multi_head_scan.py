"""`MultiHeadAttention` in each framework's own scan over layers, with remat."""

import jax
import jax.numpy as jnp
import pytest
from layers.frameworks import arrays, assert_all_close, frameworks, jitted, lenient
from layers.multi_head_cases import E, N, T


def stacked(framework, own):
    """Two residual layers by the framework's own scan and remat: `(params, x) -> out`, and the params."""
    (x,) = arrays((2, T, E))
    causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
    if framework == "flax_linen":
        nn = pytest.importorskip("flax.linen")
        from jax_attn_bwd.layers import flax_linen as ours

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                layer = (ours if own else nn).MultiHeadAttention(N, param_dtype=x.dtype)
                return x + layer(x, mask=causal), None

        axes = {"params": 0}
        scanned = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=2)()
        return lambda params, x: scanned.apply(params, x, None)[0], lambda: scanned.init(
            jax.random.key(0), x, None
        )
    if framework == "flax_nnx":
        nnx = pytest.importorskip("flax.nnx")
        from jax_attn_bwd.layers import flax_nnx as ours

        def make(rng):
            cls = (ours if own else nnx).MultiHeadAttention
            return cls(
                N,
                E,
                param_dtype=x.dtype,
                decode=False,
                dropout_rate=0.5,
                deterministic=True,
                keep_rngs=False,
                rngs=nnx.Rngs(rng),
            )

        many = nnx.vmap(make)
        step = nnx.remat(lambda x, layer: x + layer(x, is_causal=True))

        def run(params, x):
            layers = many(jax.random.split(jax.random.key(0), 2))
            nnx.update(layers, params)
            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

        def init():
            made = many(jax.random.split(jax.random.key(0), 2))
            return nnx.to_pure_dict(nnx.state(made, nnx.Param))

        return run, init
    if framework == "haiku":
        hk = pytest.importorskip("haiku")
        from jax_attn_bwd.layers import haiku as ours

        def forward(x):
            def block(x):
                init = hk.initializers.RandomUniform()
                layer = (ours if own else hk).MultiHeadAttention(N, E // N, w_init=init)
                return x + layer(x, x, x, causal)

            return hk.experimental.layer_stack(2)(hk.remat(block))(x)

        model = hk.without_apply_rng(hk.transform(forward))
        return model.apply, lambda: model.init(jax.random.key(0), x)
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers import equinox as ours

    cls = (ours if own else eqx.nn).MultiheadAttention

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        return eqx.partition(eqx.filter_vmap(lambda key: cls(N, E, key=key))(keys), eqx.is_array)

    def run(params, x):
        static = make()[1]

        def block(x, params):
            layer = eqx.combine(params, static)
            return x + jax.vmap(lambda x: layer(x, x, x, causal[0, 0]))(x), None

        return jax.lax.scan(jax.checkpoint(block), x, params)[0]

    return run, lambda: make()[0]


@pytest.mark.parametrize("framework", frameworks("equinox"))
def test_scan_over_layers_with_remat(framework):
    """Each layer's gradients are those of the framework's own, scanned and recomputed alike."""
    (x,) = arrays((2, T, E))
    results = []
    for own in (False, True):
        with lenient():
            run, init = stacked(framework, own)
            leaves, tree = jax.tree.flatten(jax.eval_shape(init))
            params = [0.3 * p for p in arrays(*(leaf.shape for leaf in leaves))]
            loss = lambda p, x: jnp.sin(run(jax.tree.unflatten(tree, p), x)).sum()  # noqa: B023
            results.append(jitted(jax.value_and_grad(loss, (0, 1)))(params, x))
    assert_all_close(results[1], results[0], 1e-11)
