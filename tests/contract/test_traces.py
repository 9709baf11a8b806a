"""A changed input, graph, mask, length, key or step of the same shapes does not trace an operator again."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, case_params, differentiated, finite_loss, first_of_each, thorough

import jax_attn_bwd as jab

CASE = ("operator", "implementation", "case")


@pytest.fixture(autouse=True)
def _fresh_counters():
    chex.clear_trace_counter()


def changed(x):
    """Other entries of the same kind: what was hidden is seen, lengths are shorter, ids and keys differ."""
    if x.dtype == bool:
        return ~x
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sin(3 * x)
    return jnp.maximum(x, 1) - jnp.asarray(1, x.dtype)


@pytest.mark.parametrize(CASE, first_of_each(case_params("second")))
def test_changed_arrays(operator, implementation, case):
    arrays = case.arrays(np.float64)
    names = tuple(differentiated(operator, arrays))
    options = {**case.options, "implementation": implementation}

    def gradients(arrays):
        loss = finite_loss(operator.call, operator, arrays, options)
        return jax.value_and_grad(loss)({name: arrays[name] for name in names})

    step = jax.jit(chex.assert_max_traces(gradients, n=1), compiler_options=QUICK)
    first, _ = step(arrays)
    second, _ = step(jax.tree.map(changed, arrays))
    assert first != second


@pytest.mark.parametrize("capacity", [8, 13])
def test_changed_graphs_of_one_capacity(capacity):
    """Other edges and fewer of them; the structure is an argument of the program."""

    def loss(x, graph):
        weights = jnp.ones(8, x.dtype)
        return jnp.sin(jab.graph_attention(graph, x, x[:3], weights, num_heads=2)).sum()

    def gradient(x, graph):
        return jax.value_and_grad(loss)(x, graph)

    step = jax.jit(chex.assert_max_traces(gradient, n=1), compiler_options=QUICK)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4)))
    found = []
    for src, dst in (([0, 1, 2, 3], [0, 0, 1, 2]), ([4, 1], [2, 2]), ([], [])):
        src, dst = np.array(src, np.int32), np.array(dst, np.int32)
        graph = jab.BipartiteCSC.from_coo(src, dst, 5, 3, capacity=capacity)
        found.append(float(step(x, graph)[0]))
    assert len(set(found)) == 3


def test_a_loop_of_steps_traces_once():
    """Decoding: the position and the number of keys grow with a traced step."""

    def decode(step, query, key):
        out = jab.dot_product_attention(
            query, key, key, is_causal=True, query_positions=step[None], key_value_seq_lengths=step + 1
        )
        return out.sum()

    run = jax.jit(chex.assert_max_traces(decode, n=1), compiler_options=QUICK)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, n, 2, 4))) for n in (1, 6))
    assert len({float(run(jnp.int32(i), query, key)) for i in range(6)}) == 6


PRINT_PROGRAMS = """
import jax
from jax_attn_bwd.check.__main__ import discover
from jax_attn_bwd._core.cases import cotangents, value_and_gradients

for operator in discover():
    if operator.name in ("multi_head_attention", "ring_attention", "all_gather_attention"):
        case = next(case for case in operator.cases if "check" in case.tags and case.name != "plain")
        arrays, names = case.arrays("bfloat16"), operator.differentiable
        step = value_and_gradients(operator.call, [n for n in names if n in arrays], arrays, case.options)
        outputs = jax.eval_shape(lambda: operator.call(**arrays, **case.options))
        print(jax.jit(step).lower(cotangents(operator, outputs)).as_text())
"""


@thorough
def test_every_process_makes_the_same_program():
    """The order of a set of words differs: hosts would wait for one another, and compile what was kept."""
    texts = set()
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_NUM_CPU_DEVICES": "2"}
        command = [sys.executable, "-c", PRINT_PROGRAMS]
        texts.add(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    assert len(texts) == 1
