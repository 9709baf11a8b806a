"""Products of bfloat16 as they are, on CPUs that have instructions for them.

Elsewhere XLA widens the factors of the same programs, so that these tests pass there, too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import targets
from jax_attn_bwd._core.products import einsum, product
from jax_attn_bwd.ops.dot_product.plan import product_dtype
from jax_attn_bwd.ops.dot_product.spec import Operands

B = jnp.bfloat16


def test_which_factors_are_narrow(monkeypatch):
    """By the platform aimed at, what its CPU has, whether arrays may lie on several devices, and sizes."""

    def chosen(size=64, rows=8):
        q = jnp.zeros((1, rows, 2, size))
        of = lambda dtype: Operands(*[q.astype(dtype)] * 3)
        return [str(jnp.dtype(product_dtype(of(dtype)))) for dtype in ("bfloat16", "float16", "float64")]

    wide, narrow = ["float32", "float32", "float64"], ["bfloat16", "float32", "float64"]
    for has, devices, expected in ((True, 1, narrow), (True, 8, wide), (False, 1, wide)):
        monkeypatch.setattr(targets, "_cpu_has_bfloat16", lambda has=has: has)
        monkeypatch.setattr(targets, "is_one_cpu", lambda devices=devices: devices == 1)
        assert chosen() == chosen(128) == expected
        assert chosen(32) == chosen(rows=1) == wide
    with targets.aimed_at("H100"):
        assert chosen() == ["bfloat16", "float16", "float64"]


@pytest.mark.parametrize("listed", ["flags : fma avx512_bf16 avx512_fp16", "Features : fp asimd bf16", None])
def test_what_the_cpu_has(listed, monkeypatch):
    """As Linux lists it; where nothing is listed there is nothing."""

    def read(path):
        if listed is None:
            raise FileNotFoundError(path)
        return listed

    monkeypatch.setattr(targets.pathlib.Path, "read_text", read)
    targets._cpu_has_bfloat16.cache_clear()
    assert targets._cpu_has_bfloat16() == ("avx512_bf16" in (listed or ""))
    targets._cpu_has_bfloat16.cache_clear()


# Factors with the summed axis first, in the middle and last; a size of 1 makes a transposition a reshape.
TERMS = ["...ab,...bc->...ac", "...ba,...cb->...ac", "...gts,...gth->...sh", "...te,enh->...tnh"]


@pytest.mark.parametrize("a", [1, 20])
@pytest.mark.parametrize("terms", TERMS)
def test_products_whose_factors_and_results_are_turned(terms, a):
    """XLA merges transpositions into a product, and refused to run some that came of it."""
    sizes = dict(a=a, b=24, c=17, g=2, t=a, s=40, h=16, e=24, n=3)
    rng, turn = np.random.default_rng(0), partial(jnp.swapaxes, axis1=-1, axis2=-2)
    x, y = (
        jnp.asarray(rng.standard_normal([2] * ("." in term) + [sizes[n] for n in term.strip(".")]), B)
        for term in terms.split("->")[0].split(",")
    )
    want = np.einsum(terms, *(np.asarray(z, np.float64) for z in (x, y)))
    stacked = [jnp.stack([z, -z], -1) for z in (x, y)]

    for multiply in (product, einsum):
        call = partial(multiply, terms, precision=None, preferred_element_type=jnp.float32)
        found = jax.jit(lambda x, y, call=call: turn(call(turn(x), turn(y))))(turn(x), turn(y))
        of_vmap = jax.jit(jax.vmap(call, in_axes=-1, out_axes=-1))(*stacked)
        tangent = jax.jit(lambda x, y, call=call: jax.jvp(call, (x, y), (x, y))[1])(x, y)
        pulled = jax.jit(lambda x, y, call=call: jax.vjp(call, x, y)[1](call(x, y)))(x, y)
        assert_close(turn(found), want, 1e-6)
        assert_close(of_vmap[..., 1], want, 1e-6)
        assert_close(tangent, 2 * want, 1e-6)
        for z, cotangent in zip((x, y), pulled, strict=True):
            assert_close(
                np.vdot(*(np.asarray(n, np.float64) for n in (z, cotangent))), np.vdot(want, want), 1e-2
            )


@pytest.mark.parametrize("is_small", [True, False])
def test_attention_between_transpositions(is_small, narrow_products, request):
    """In the order of axes of their users, batched over the last axis."""
    if not is_small:
        request.getfixturevalue("tiles")
    rng, (T, S, N, H) = np.random.default_rng(0), (100, 70, 2, 16)
    q, k, v, dout = (jnp.asarray(rng.standard_normal((N, n, H, 2)), B) for n in (T, S, S, T))

    def attended(*arrays):
        return jnp.swapaxes(dot_product_attention(*(jnp.swapaxes(x, 0, 1) for x in arrays)), 0, 1)

    def plain(q, k, v):
        p = jax.nn.softmax(jnp.einsum("nth,nsh->nts", q, k) / np.sqrt(H))
        return jnp.einsum("nts,nsh->nth", p, v)

    def step(call, dtype):
        run = jax.vmap(lambda q, k, v, dout: (call(q, k, v), jax.vjp(call, q, k, v)[1](dout)), -1, -1)
        return jax.jit(run)(*(x.astype(dtype) for x in (q, k, v, dout)))

    got, want = step(attended, B), step(plain, jnp.float64)
    for x, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x.astype(jnp.float64), exact, 1e-2)
