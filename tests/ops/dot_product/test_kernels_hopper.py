"""The Hopper kernels of dense attention, in the interpreter, beyond the contract: tiles, orders, vmap.

Kernels that do not depend on each other are kept from running at once (`block_until_ready`): the interpreter
has one state for all.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, interpreted, thorough
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.dot_product.kernel_calls import BF16, OPERATOR, measured, tiled

import jax_attn_bwd
from jax_attn_bwd._core import mosaic_gpu, pallas

NAME = "mosaic_gpu"
NAMED = {case.name: case for case in OPERATOR.tagged("ci", "edge", "second", "shard")}
FUNCTIONS = {name for name, case in NAMED.items() if {"mask_mod", "score_mod"} & case.options.keys()}
ANY_ORDER = dataclasses.replace(OPERATOR, call=partial(OPERATOR.call, deterministic_sums=False))
pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


@thorough
def test_every_case_runs_but_the_empty_ones_and_functions():
    def explained(case, dtype="bfloat16"):
        return jax_attn_bwd.explain(OPERATOR.call, **case.arrays(dtype), **case.options)[NAME]

    refused = {name: reason for name, case in NAMED.items() if (reason := explained(case)) != "ok"}
    empty = ("T0_S0", "T0_S1", "T0_S3", "T1_S0", "T5_S0")
    of_functions = [refused.pop(name) for name in [*refused] if name in FUNCTIONS]
    assert refused == dict.fromkeys(empty, "there is nothing to compute")
    reasons = ("it cannot lower 'sin'", "score_mod reads an array at", "there is nothing to")
    assert all(reason.startswith(reasons) for reason in of_functions)
    assert "not float32" in explained(NAMED["plain"], "float32")


@thorough
@interpreted
def test_float16_against_definition():
    measured(OPERATOR, NAME, NAMED["dropout"], "float16")


@thorough
@interpreted
@pytest.mark.parametrize(
    ("head", "name"),
    [
        *((16, name) for name in ("full", "segments", "both_lengths")),
        *((96, name) for name in ("causal", "window", "lengths")),
    ],
)
def test_fused_backward_against_definition(head, name, monkeypatch):
    """The interpreter takes additions of different blocks to one place for races: not looked for here."""
    params = getattr(plgpu, "InterpretGPUParams")(detect_races=False)  # noqa: B009 (absent before 0.12)
    monkeypatch.setattr(mosaic_gpu, "_interpreter", lambda: params)
    measured(ANY_ORDER, NAME, tiled(head, name))


@thorough
@interpreted
@pytest.mark.parametrize("head", [16, 96])
def test_fused_backward_has_no_races_within_a_block(head):
    measured(ANY_ORDER, NAME, tiled(head, "causal", S=100))


@thorough
@interpreted
@pytest.mark.parametrize(
    ("head", "name"),
    [(16, "function"), (160, "function"), (96, "arrays"), (72, "score"), (16, "bias of keys")],
)
def test_over_several_tiles_against_definition(head, name):
    measured(OPERATOR, NAME, tiled(head, name, T=200, S=140))


def nan_where_hidden(logits, batch, head, row, column):
    """NaN where causality hides it, and in the rows of padding."""
    row, column = row.astype(logits.dtype), column.astype(logits.dtype)
    shift = (140 - row) / (140 - row) + jnp.where(column <= row, 0.0, jnp.nan)
    return jnp.tanh(logits) * shift


@thorough
@interpreted
def test_a_score_is_nan_where_nothing_is_seen():
    rng = np.random.default_rng(0)
    q, k, dout = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), BF16) for n in (140, 150, 140))

    def gradients(implementation):
        options = {"is_causal": True, "score_mod": nan_where_hidden, "implementation": implementation}
        call = lambda *given: jax_attn_bwd.dot_product_attention(*given, **options)
        return jax.block_until_ready(jax.vjp(call, q, k, 2 * k)[1](dout))

    expected = gradients("xla")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in expected)
    for got, wanted in zip(gradients(NAME), expected, strict=True):
        assert_close(got, wanted, 4 * float(jnp.finfo(BF16).eps))


@thorough
@interpreted
@pytest.mark.parametrize(("head", "Hv"), [(150, 250), (256, 192)])  # 72: over several tiles
def test_wide_heads_against_definition(head, Hv):
    measured(OPERATOR, NAME, tiled(head, "causal", T=100, S=140, Hv=Hv))


@interpreted
@thorough
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter multiplies NaN
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_in_any_order_poison_is_as_good_as_zeros(name):
    case = NAMED[name]
    arrays, options = case.arrays(BF16), {**case.options, "implementation": NAME}
    hidden = OPERATOR.hidden(arrays, options)
    assert any(where.any() for where in hidden.values())

    def run(fill):
        given = {
            n: jnp.where(hidden[n][..., None], jnp.asarray(fill, BF16), x) if n in hidden else x
            for n, x in arrays.items()
        }
        inputs = {n: given[n] for n in OPERATOR.differentiated(given)}
        out, pullback = jax.vjp(lambda i: ANY_ORDER.call(**{**given, **i}, **options), inputs)
        dout = jnp.where(hidden["out"][..., None], jnp.asarray(fill, BF16), jnp.ones_like(out[0]))
        return jax.block_until_ready((out, pullback((dout, jnp.ones_like(out[1])))[0]))

    for got, expected in zip(*(jax.tree.leaves(run(fill)) for fill in (np.nan, 0.0)), strict=True):
        np.testing.assert_array_equal(got, expected)


@thorough
@interpreted
@pytest.mark.parametrize(
    ("batched", "deterministic"),
    [
        (("query",), True),
        (("bias",), True),
        (("query", "key", "value", "bias", "sink"), True),
        (("query",), False),
        (("query", "key", "value"), False),
    ],
    ids=str,
)
def test_nested_vmap(batched, deterministic):
    """The rule of one level makes what the second maps over; in any order the fused kernel is compared with
    the pair, which runs under vmap.
    """
    case = NAMED["second_causal"]
    arrays, options = case.arrays(BF16), {**case.options, "implementation": NAME}
    if not deterministic:  # what the fused kernel takes
        del arrays["bias"]
        options |= {"logits_soft_cap": None, "deterministic_sums": False}
    rng = np.random.default_rng(3)
    for n in batched:
        noise = rng.standard_normal((2, 2, *arrays[n].shape))
        arrays[n] = (arrays[n][None, None] + noise.astype(BF16)).astype(BF16)

    def step(inputs):
        (out, lse), pullback = jax.vjp(lambda i: OPERATOR.call(**i, **options), inputs)
        return {"out": out, "lse": lse} | pullback((jnp.cos(out), jnp.sin(lse)))[0]

    axes = ({n: 0 if n in batched else None for n in arrays},)
    both = jax.block_until_ready(jax.vmap(jax.vmap(step, axes), axes)(arrays))
    for i in ((0, 1), (1, 0)):
        one = {n: x[i] if n in batched else x for n, x in arrays.items()}
        got = jax.tree.map(lambda x, i=i: x[i], both)
        assert_trees_close(got, jax.block_until_ready(step(one)), 2 * float(jnp.finfo(BF16).eps))
