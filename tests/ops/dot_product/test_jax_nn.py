"""`dot_product_attention` stands in for `jax.nn.dot_product_attention`: same call, same numbers."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, assert_trees_close, thorough

from jax_attn_bwd import dot_product_attention

B, T, S, N, K, H = 2, 7, 11, 6, 3, 8
PEER = inspect.signature(jax.nn.dot_product_attention).parameters
OURS = inspect.signature(dot_product_attention).parameters


def normal(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mask(*shape):
    """Every row sees the first key: jax.nn gives a mean for a row that sees nothing."""
    result = np.random.default_rng(6).random(shape) < 0.6
    result[..., 0] = True
    return result


LENGTHS = {
    "query_seq_lengths": np.array([4, 7], np.int32),
    "key_value_seq_lengths": np.array([9, 1], np.int32),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"bias": normal(B, N, T, S)},
    "bias_broadcast": {"bias": normal(1, N, 1, S), "is_causal": True},
    "mask": {"mask": mask(B, N, T, S)},
    "mask_broadcast": {"mask": mask(B, 1, 1, S), "bias": normal(1, 1, T, S)},
    "scale": {"scale": 0.7},
    "scale_negative": {"scale": -0.3, "is_causal": True},
    "key_lengths": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]},
    "window_int": {"local_window_size": 2},
    "window_pair": {"local_window_size": (3, 1)},
    "window_causal": {"local_window_size": (2, 4), "is_causal": True},
    "everything": {
        "bias": normal(B, 1, T, S),
        "mask": mask(B, N, 1, S),
        "scale": 0.2,
        "is_causal": True,
        "key_value_seq_lengths": np.array([9, 5], np.int32),
        "local_window_size": (6, 0),
    },
}
OTHERS = [call for call in CALLS if call not in ("plain", "scale_negative", "everything")]
GROUPS = {"as_many": (N, N), "grouped": (N, K), "one": (N, 1)}


def outputs_and_gradients(function, arrays, cts, options):
    """The outputs, and the gradients of what is floating by name, with the options that the caller writes."""
    inputs = {name: x for name, x in arrays.items() if x.dtype == np.float32}
    rest = {name: x for name, x in arrays.items() if name not in inputs}

    @partial(jax.jit, compiler_options=QUICK)
    def run(inputs, cts):
        out, pullback = jax.vjp(lambda i: function(**i, **rest, **options), inputs)
        return out, pullback(cts)[0]

    # jax.nn itself promotes ranks and dtypes
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out, gradients = run(inputs, cts)
    return {"out": out} | gradients


def split(options):
    """(arrays, static options) of a call."""
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in options.items() if name not in arrays}


def operands(heads=(N, K), batch=(B,)):
    n, k = heads
    return {
        "query": normal(*batch, T, n, H, seed=1),
        "key": normal(*batch, S, k, H, seed=2),
        "value": normal(*batch, S, k, H, seed=3),
    }


def assert_same(arrays, options, dout=None):
    dout = normal(*arrays["query"].shape, seed=4) if dout is None else dout
    got = outputs_and_gradients(dot_product_attention, arrays, dout, options)
    expected = outputs_and_gradients(jax.nn.dot_product_attention, arrays, dout, options)
    assert_trees_close(got, expected, 2e-6)


@pytest.mark.parametrize(
    "heads",
    [pytest.param(heads, marks=[thorough] * (name != "one"), id=name) for name, heads in GROUPS.items()],
)
@pytest.mark.parametrize("call", [pytest.param("plain", marks=thorough), "everything"])
def test_same_numbers_with_grouped_heads(call, heads):
    arrays, options = split(CALLS[call])
    assert_same(operands(heads) | arrays, options)


@pytest.mark.parametrize("call", ["scale_negative", *(pytest.param(c, marks=thorough) for c in OTHERS)])
def test_same_numbers(call):
    arrays, options = split(CALLS[call])
    assert_same(operands() | arrays, options)


@thorough
def test_same_numbers_where_queries_are_padded():
    """jax.nn gives padded queries a mean; both agree on the rest, which alone has a cotangent."""
    valid = np.arange(T)[None] < LENGTHS["query_seq_lengths"][:, None]
    arrays = operands() | LENGTHS
    dout = np.where(valid[..., None, None], normal(B, T, N, H, seed=4), np.float32(0))
    got = outputs_and_gradients(dot_product_attention, arrays, dout, {})
    expected = outputs_and_gradients(jax.nn.dot_product_attention, arrays, dout, {})
    for result in (got, expected):
        result["out"] = np.asarray(result["out"])[valid]
    assert_trees_close(got, expected, 2e-6)


@thorough
def test_positional_bias_and_mask():
    arrays = operands()
    call = (*arrays.values(), normal(B, N, T, S), mask(B, 1, T, S))
    assert_close(dot_product_attention(*call), jax.nn.dot_product_attention(*call), 2e-6)


@thorough
@pytest.mark.parametrize("call", ["plain", "causal", "window_pair"])
def test_three_axes(call):
    arrays, options = split(CALLS[call])
    assert_same(operands(batch=()) | arrays, options)


@pytest.mark.parametrize("argument", ["bias", pytest.param("mask", marks=thorough)])
def test_three_axes_with_a_full_bias_or_mask(argument):
    extra = {"bias": normal(N, T, S), "mask": mask(N, T, S)}[argument]
    assert_same(operands(batch=()) | {argument: extra}, {})


@pytest.mark.parametrize(
    "argument", [*(pytest.param(n, marks=thorough) for n in ("bias", "mask")), "key_value_seq_lengths"]
)
def test_three_axes_with_the_batch_axis_of_one_that_jax_nn_asks_for(argument):
    """Its documentation: bias and mask "must be 4D", lengths `(B)`, also for `TNH` inputs."""
    extra = {
        "bias": normal(1, N, T, S),
        "mask": mask(1, 1, T, S),
        "key_value_seq_lengths": np.array([S - 4], np.int32),
    }[argument]
    assert_same(operands(batch=()) | {argument: extra}, {})


@pytest.mark.parametrize("call", ["plain", pytest.param("everything", marks=thorough)])
def test_log_sum_exp(call):
    arrays, options = split(CALLS[call])
    arrays = operands() | arrays
    options = options | {"return_residual": True}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out, lse = jax.jit(partial(dot_product_attention, **options))(**arrays)
        peer = jax.jit(partial(jax.nn.dot_product_attention, **options))(**arrays)
    assert lse.shape == peer[1].shape == (B, T, N)
    assert_close(out, peer[0], 2e-6)
    assert_close(lse, peer[1], 2e-6)


def test_log_sum_exp_is_not_rounded_to_the_dtype_of_key():
    """A stated difference: jax.nn rounds it to bfloat16."""
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in operands().items()}
    out, lse = dot_product_attention(**arrays, return_residual=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_row_that_sees_nothing_gives_zero_not_a_mean():
    """A stated difference: jax.nn gives the mean of value, and sends gradient into it."""
    arrays = operands() | {"mask": mask(B, 1, T, S)}
    arrays["mask"][0, 0, 3] = False
    dout = np.zeros((B, T, N, H), np.float32)
    dout[0, 3] = normal(N, H)
    got = outputs_and_gradients(dot_product_attention, arrays, dout, {})
    np.testing.assert_array_equal(got["out"][0, 3], 0)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(got[name], 0, err_msg=name)
    expected = outputs_and_gradients(jax.nn.dot_product_attention, arrays, dout, {})
    assert np.abs(expected["out"][0, 3]).max() > 0.1
    assert np.abs(expected["value"]).max() > 0.01


@thorough
def test_a_numpy_float_scales():
    """`scale=1 / np.sqrt(H)` is what jax.nn computes itself; np.float64 is a Python float."""
    assert_same(operands(), {"scale": 1 / np.sqrt(np.float64(H))})


def test_every_argument_of_jax_nn_exists_with_its_default():
    """`implementation` has the same name and default, and other choices."""
    for name, parameter in PEER.items():
        assert name in OURS, name
        assert OURS[name].default == parameter.default, name
        assert OURS[name].kind == parameter.kind, name


def test_positional_arguments_come_in_the_order_of_jax_nn():
    def positional(parameters):
        return [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(OURS) == positional(PEER)


def test_what_jax_nn_does_not_have_is_off_by_default():
    off = (None, False, 0.0, ())
    for name in OURS.keys() - PEER.keys():
        assert OURS[name].default in off, name
