"""Gradients that sum over rows, in narrow dtypes: what rounding takes from the output does not reach them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, interpreted, quick_jit, thorough
from ops.dot_product.kernel_calls import tpu

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, multi_head_attention
from jax_attn_bwd._core import pallas, targets
from jax_attn_bwd._core.numerics import narrowed
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product.kernels import cudnn
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

T, N, H = 192, 4, 8
STRENGTHS = jnp.asarray([2.0, -0.2, 0.4, -0.6], jnp.float32)


def score(logits, batch, head, row, column, strengths):
    """Its gradient gets an error that a row of dlogits shares as often as the distances add up to."""
    s, distance = strengths[head], jnp.abs(row - column).astype(logits.dtype)
    return logits * jnp.cos(s) - s * distance / 10


def plain(q, k, v, strengths):
    """The formula as one writes it, products and probabilities in the dtype of the operands."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) / jnp.sqrt(
        jnp.float32(H)
    )
    index = lambda axis, n: np.arange(n, dtype=np.int32).reshape([n if i == axis else 1 for i in range(4)])
    p = jax.nn.softmax(score(logits, 0, index(1, N), index(2, T), index(3, T), strengths))
    return jnp.einsum("bnts,bsnh->btnh", p.astype(q.dtype), v)


def ours(q, k, v, strengths):
    return dot_product_attention(q, k, v, score_mod=score, mod_args=(strengths,))


def layer(q, k, v, strengths):
    """Its heads are those arrays, side by side."""
    x = jnp.concatenate([y.reshape(*y.shape[:2], N * H) for y in (q, k, v)], -1)
    one = np.eye(3 * N * H, dtype=x.dtype).reshape(3 * N * H, 3, N, H)
    kernels = {f"{name}_kernel": one[:, i] for i, name in enumerate(("query", "key", "value"))}
    params = MultiHeadAttentionParams(*(None,) * len(MultiHeadAttentionParams._fields))._replace(**kernels)
    out = multi_head_attention(params, x, num_heads=N, score_mod=score, mod_args=(strengths,))
    return out.reshape(*q.shape)


def test_what_rounding_takes_is_told_on_a_gpu(monkeypatch):
    """Behind a barrier: its compiler takes a conversion there and back for nothing."""
    q, rest = jnp.zeros((1, 8, 2, 8), jnp.bfloat16), jnp.zeros((1, 8, 2), jnp.float32)
    of_delta = lambda rest: cudnn._rest_of_delta(cudnn.Arrays(q, q, q), rest)
    for platform, barriers in (("gpu", 3), ("cpu", 0)):
        monkeypatch.setattr(targets, "platform", lambda platform=platform: platform)
        text = str(jax.make_jaxpr(lambda x: of_delta(x))(rest))
        assert len(re.findall(r"= optimization_barrier\b", text)) == barriers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_summed_over_is_not_rounded(dtype):
    """Whatever the compiler fuses it with, in one program or two; the first is what a conversion gives.

    Also below the least normal number.
    """
    rng, tiny = np.random.default_rng(0), float(jnp.finfo(dtype).smallest_normal)
    normal, small = rng.standard_normal(1000), np.linspace(-1.01, 1.01, 999) * tiny / 3
    split = lambda x: narrowed(x * 3, dtype)  # a product, for the compiler to fuse with it
    for x in (jnp.asarray(x, jnp.float32) for x in (normal, small)):
        narrow, wide = jax.jit(split)(x)
        np.testing.assert_array_equal(np.asarray(narrow), np.asarray(x * 3).astype(dtype))
        for whole in (wide, jax.jit(lambda x: split(x)[1])(x)):
            np.testing.assert_array_equal(whole, x * 3)
    assert narrowed(narrow, dtype)[1] is None


@pytest.mark.parametrize(
    ("form", "platform", "dtype"),
    [
        pytest.param(*form, dtype, marks=thorough if form[1] == "cpu" and dtype == "float16" else [])
        for form in ((ours, "cpu"), (layer, "cpu"), (ours, "gpu"))
        for dtype in ("bfloat16", "float16")
    ],
)
def test_what_a_score_reads(form, platform, dtype, tiles, monkeypatch):
    """Its gradient is at most twice as far from float32's as the plain formula's is, all heads together.

    For a GPU the factors of products are narrow.
    """
    monkeypatch.setattr(targets, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.standard_normal((2, T, N, H)), dtype) for _ in range(4))

    def gradient(form, dtype):
        def loss(strengths):
            out = form(*(x.astype(dtype) for x in (q, k, v)), strengths)
            return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss), compiler_options=QUICK)(STRENGTHS)

    exact, of_plain = gradient(plain, jnp.float32), gradient(plain, dtype)
    assert np.abs(gradient(form, dtype) - exact).sum() <= 2 * np.abs(of_plain - exact).sum()


def falling(logits, batch, head, row, column, slopes):
    return logits - slopes[head] * jnp.abs(row - column).astype(logits.dtype)


class Rows:
    """A call whose gradients of slopes, and of a bias of rows beside a sink, sum over rows; in float64."""

    def __init__(self, dtype):
        rng, (B, T, S, N, H) = np.random.default_rng(0), (2, 70, 150, 2, 16)
        sizes = ((B, T, N, H), (B, S, 1, H), (B, S, 1, H), (B, T, N, H))
        *self.qkv, self.dout = (jnp.asarray(rng.standard_normal(size), dtype) for size in sizes)
        self.slopes, self.bias = np.array([0.02, 0.1]), rng.standard_normal((N, T, 1))
        self.options = {"sink": np.array([-1.0, 1.0], np.float32), "score_mod": falling}
        q, k, v, dout = (np.asarray(x.astype(jnp.float64)) for x in (*self.qkv, self.dout))
        self.distance = np.abs(np.arange(T)[:, None] - np.arange(S))
        logits = np.einsum("btnh,bskh->bnts", q, k) / np.sqrt(H) + self.bias
        weights = np.exp(logits - self.slopes[:, None, None] * self.distance)
        self.p = weights / (weights.sum(-1, keepdims=True) + np.exp(self.options["sink"])[:, None, None])
        self.dp = np.einsum("btnh,bskh->bnts", dout, v)

    def gradients(self, dp, delta):
        dlogits = self.p * (dp - delta)
        return -(dlogits * self.distance).sum((0, 2, 3)), dlogits.sum((0, 3))[..., None]

    def compare(self, slopes, bias):
        """At most twice as far off as those of the plain formula, whose dp are narrow."""
        narrow = np.asarray(jnp.asarray(self.dp, self.dout.dtype).astype(jnp.float64))
        exact, plain = (self.gradients(dp, (self.p * dp).sum(-1, keepdims=True)) for dp in (self.dp, narrow))
        for got, right, by_plain in zip((slopes, bias), exact, plain, strict=True):
            assert np.abs(got - right).sum() <= 2 * np.abs(by_plain - right).sum()


KERNELS = [
    pytest.param("mosaic_tpu", "bfloat16", marks=pytest.mark.kernel),
    pytest.param("mosaic_gpu", "float16", marks=[pytest.mark.kernel, interpreted]),
]


@pytest.mark.parametrize(("implementation", "dtype"), KERNELS)
def test_what_rounding_takes_in_forward_kernels(implementation, dtype):
    """From out, and from p: it would be an error of delta."""
    call = Rows(dtype)
    bias = jnp.asarray(call.bias - call.slopes[:, None, None] * call.distance, jnp.float32)
    operands = Operands(*call.qkv, bias, jnp.asarray(call.options["sink"]))
    with pallas.interpreting(implementation):
        plan = blockwise.plan("", implementation, Options(scale=0.25), operands)
        run = partial(blockwise.forward, blockwise.differentiated(plan, ("bias",)))
        out = np.asarray(quick_jit(run)(operands).widest_out(), np.float64)
    delta = (np.asarray(call.dout.astype(jnp.float64)) * out).sum(-1)
    call.compare(*call.gradients(call.dp, np.swapaxes(delta, 1, 2)[..., None]))


@thorough
@pytest.mark.parametrize(("implementation", "dtype"), KERNELS)
def test_what_rounding_takes_in_kernels(implementation, dtype):
    call = Rows(dtype)

    def run(slopes, bias):
        given = {"mod_args": (slopes,), "implementation": implementation}
        return dot_product_attention(*call.qkv, bias, **given, **call.options)

    pulled = quick_jit(lambda *rows: jax.vjp(run, *rows)[1](call.dout))
    with pallas.interpreting(implementation):
        call.compare(*map(np.asarray, pulled(*(x.astype(np.float32) for x in (call.slopes, call.bias)))))


def test_what_rounding_takes_is_kept_for_these_gradients_alone():
    """In the TPU kernel; for the Hopper kernel see `test_kernels_hopper_launched.py`."""
    arrays = (
        jnp.zeros((2, 16, 2, 16), jnp.bfloat16),
        jnp.zeros((16, 16), jnp.float32),
        jnp.ones(2, jnp.float32),
    )

    def run(x, bias, slopes):
        given = {"score_mod": falling, "mod_args": (slopes,), "implementation": "mosaic_tpu"}
        return dot_product_attention(x, x, x, bias, **given).astype(jnp.float32).sum()

    def forward(function):
        with tpu():
            program = str(jax.make_jaxpr(function)(*arrays))
        (name,) = re.findall(r"\bname=attention_(forward(?:_low)?)", program)
        return name

    assert forward(run) == forward(jax.grad(run)) == "forward"
    assert forward(jax.grad(run, 1)) == forward(jax.grad(run, (0, 2))) == "forward_low"
