"""Kernels that all members of a `vmap` share, as in Equinox: their gradients are summed over the members."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, quick_jit

from jax_attn_bwd import MultiHeadAttentionParams, Rotary, multi_head_attention

MEMBERS, B, T, S, E, N, K, H = 3, 2, 7, 5, 24, 4, 2, 6
KERNELS = {
    "query_kernel": (E, N, H),
    "key_kernel": (E, K, H),
    "value_kernel": (E, K, H),
    "out_kernel": (N, H, E),
}
OPTIONS = {
    "masked": {"key_value_seq_lengths": jnp.array([0, 4]), "rotary": Rotary()},
    "dropout": {"out_dropout_rate": 0.5, "dropout_key": jax.random.key(0), "add_residual": True},
}


def numbers(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


@pytest.fixture
def kernels(rng):
    return {name: numbers(rng, *shape) for name, shape in KERNELS.items()}


def assert_same(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, 1e-12)


def loss(kernels, x, memory, dout, options):
    out = multi_head_attention(MultiHeadAttentionParams(**kernels), x, memory, **options)
    return (out * dout).sum()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mapped_as_member_by_member(kernels, options, rng):
    """The sum of losses, each loss for itself, and with one kernel for each member."""
    given = numbers(rng, MEMBERS, B, T, E), numbers(rng, MEMBERS, B, S, E), numbers(rng, MEMBERS, B, T, E)
    own = lambda kernels, x, memory, dout: loss(kernels, x, memory, dout, options)
    each = [quick_jit(jax.grad(own, (0, 1, 2)))(kernels, *(x[i] for x in given)) for i in range(MEMBERS)]
    alone = jax.tree.map(lambda *x: jnp.stack(x), *each)

    shared = lambda kernels, *given: jax.vmap(own, (None, 0, 0, 0))(kernels, *given).sum()
    dkernels, *dinputs = quick_jit(jax.grad(shared, (0, 1, 2)))(kernels, *given)
    assert_same((dkernels, dinputs), (jax.tree.map(lambda x: x.sum(0), alone[0]), alone[1:]))

    mapped = jax.vmap(jax.grad(own, (0, 1, 2)), (None, 0, 0, 0))
    assert_same(quick_jit(mapped)(kernels, *given), alone)

    axes = dict.fromkeys(kernels, None) | {"key_kernel": 0, "out_kernel": 0}
    repeated = {name: x if axes[name] is None else jnp.stack([x] * MEMBERS) for name, x in kernels.items()}
    some = lambda kernels, *given: jax.vmap(own, (axes, 0, 0, 0))(kernels, *given).sum()
    expected = {name: x.sum(0) if axes[name] is None else x for name, x in alone[0].items()}
    assert_same(quick_jit(jax.grad(some))(repeated, *given), expected)


def test_kernels_that_are_not_differentiated_take_no_product(kernels, rng):
    """As those of a frozen layer, which `jax.jit` hands over."""
    x, memory, dout = numbers(rng, B, T, E), numbers(rng, B, S, E), numbers(rng, B, T, E)

    def products(wrt):
        gradients = lambda kernels: jax.grad(loss, wrt)(kernels, x, memory, dout, {})
        return str(jax.make_jaxpr(gradients)(kernels)).count("dot_general")

    assert products((0, 1, 2)) == products((1, 2)) + len(KERNELS)
