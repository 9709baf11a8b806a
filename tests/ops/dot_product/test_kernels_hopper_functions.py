"""Functions in the Hopper kernels: gradients of what scores read, and holes that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Case, interpreted, thorough
from ops.dot_product.kernel_calls import BF16, OPERATOR, measured

import jax_attn_bwd
from jax_attn_bwd._core import pallas

NAME = "mosaic_gpu"
pytestmark = [pytest.mark.kernel, thorough, interpreted]


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def score_of_arrays(logits, batch, head, row, column, slopes, by_row, by_column):
    """Reads values of heads, of rows of each batch entry, and of columns, some of each head."""
    distance = jnp.abs(row - column).astype(logits.dtype)
    factor = by_column[head % by_column.shape[0], column]
    return jnp.tanh(logits + by_row[batch, row]) * factor - slopes[head] * distance


def case(name, H, T, S, heads_of_columns=1, extra=lambda rng: {}, **options):
    """Two heads that share keys, unless columns differ from head to head and they do not."""

    def build(rng):
        sizes = {"query": (1, T, 2, H), "key": (1, S, 1, H), "value": (1, S, 1, H)}
        return {n: rng.standard_normal(size) for n, size in sizes.items()} | extra(rng)

    return Case(name, build, options)


def lines(T, S, heads):
    return lambda rng: {
        "mod_args_0": 0.02 * rng.random(2),
        "mod_args_1": rng.standard_normal((1, T)),
        "mod_args_2": rng.standard_normal((heads, S)),
    }


@pytest.mark.parametrize(
    ("H", "heads", "options"),
    [(16, 2, {"is_causal": True}), (96, 1, {"logits_soft_cap": 3.0}), (160, 1, {"is_causal": True})],
    ids=str,
)
def test_gradients_of_what_a_score_reads(H, heads, options):
    T, S = 140, 200
    measured(
        OPERATOR, NAME, case("lines", H, T, S, extra=lines(T, S, heads), score_mod=score_of_arrays, **options)
    )


def negated_score(logits, batch, head, row, column):
    """Its slope is negative."""
    return -logits


def divided(logits, batch, head, row, column, divisors):
    return logits / divisors[head]


@pytest.mark.parametrize("score", [negated_score, divided])
def test_dropout_of_a_score_that_falls(score):
    def extra(rng):
        arrays = {"dropout_key": np.array([3, 4], np.uint32), "bias": rng.standard_normal((2, 20, 30))}
        return arrays | ({"mod_args_0": np.array([-1.0, 0.5])} if score is divided else {})

    measured(OPERATOR, NAME, case("falling", 16, 20, 30, extra=extra, score_mod=score, dropout_rate=0.4))


def near(row, column):
    return (row >= column) & (row - column <= 60)


def poisoned(mask, name):
    """Outputs and gradients of 512 tokens of which `name` is NaN from 128 to 255."""
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((1, 512, 1, 16)) for n in ("query", "key", "value", "dout")}
    given[name][:, 128:256] = np.nan
    q, k, v, dout = (jnp.asarray(x, BF16) for x in given.values())
    bias = jnp.zeros((1, 512, 512), jnp.float32)
    call = lambda *x: jax_attn_bwd.dot_product_attention(*x, mask_mod=mask, implementation=NAME)
    out, pull = jax.vjp(call, q, k, v, bias)
    return jax.block_until_ready((out, *pull(dout)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter multiplies NaN
def test_no_tile_of_keys_in_a_hole_is_visited():
    """One that is visited and hidden multiplies its values by p = 0, and NaN stays NaN."""
    out, dq, _, _, dbias = poisoned(lambda b, h, row, column: near(row, column) | (column < 5), "value")
    for x in (out, dq):
        assert np.isnan(x.astype(np.float32)[:, 128:256]).any()
        assert np.isfinite(x.astype(np.float32)[:, 384:]).all()
    assert np.isnan(dbias[:, 128:256]).any()
    assert np.isfinite(dbias[:, 384:]).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_no_tile_of_queries_in_a_hole_is_visited():
    _, _, dk, dv, _ = poisoned(lambda b, h, row, column: near(row, column) | (row < 5), "dout")
    for x in (dk, dv):
        assert np.isnan(x.astype(np.float32)[:, 128:256]).any()
        assert np.isfinite(x.astype(np.float32)[:, 384:]).all()
