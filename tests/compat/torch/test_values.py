"""`compat.torch` against torch itself, outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.programs import outputs_and_gradients
from compat.torch.calls import E, N, arrays, call, options
from helpers import assert_close, thorough

from jax_attn_bwd.compat import torch as compat


def assert_as_torch(case, rtol=1e-12):
    torch = pytest.importorskip("torch")
    given, more = arrays(case), options(case)
    floats = sorted(name for name, x in given.items() if x.dtype != bool)
    tensors = {name: torch.tensor(x, requires_grad=name in floats) for name, x in given.items()}
    expected = call(torch.nn.functional.multi_head_attention_forward, tensors, **more)
    rng = np.random.default_rng(8)
    cotangents = tuple(None if y is None else rng.standard_normal(y.shape) for y in expected)
    pairs = [(y, g) for y, g in zip(expected, cotangents, strict=True) if y is not None]
    sum((y * torch.tensor(g)).sum() for y, g in pairs).backward()

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving}, **more)

    moving = {name: jnp.asarray(given[name]) for name in floats}
    got, gradients = outputs_and_gradients(run, moving, lambda outputs: cotangents)
    for name, x, y in zip(("attn_output", "attn_output_weights"), got, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert_close(x, y.detach().numpy(), rtol, name)
    for name in floats:
        reached = tensors[name].grad  # None: torch found no path
        expect = np.zeros_like(given[name]) if reached is None else reached.numpy()
        assert_close(gradients[name], expect, 10 * rtol, name)


CASES = (
    "no_weights per_head no_bias",
    "unbatched per_head attn_float heads padding_bool",
    "separate no_weights rows attn_bool heads",
    "padding_float attn_float",
    "causal no_weights padding_bool",
    "wrong_hint no_weights",
    "static_k static_v per_head zero padding_bool",
)
REST = (
    "plain",
    "unbatched no_weights padding_float",
    "separate per_head rows zero padding_bool attn_bool",
    "causal rows per_head",
    "causal no_weights rows zero",
    "separate static_v no_weights attn_float heads",
    "static_k static_v causal no_weights zero",
    "static_k",
)


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # masks of two kinds
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=thorough) for case in REST)])
def test_as_torch(case):
    assert_as_torch(frozenset(case.split()))


def test_one_array_for_query_key_and_value():
    """Self-attention: the array's gradient is the sum of its three."""
    torch = pytest.importorskip("torch")
    given = arrays(frozenset({"no_bias"}))
    x = given["query"]
    weights = {name: given[name] for name in ("in_proj_weight", "out_proj_weight")}
    tensor = torch.tensor(x, requires_grad=True)
    fixed = {name: torch.tensor(w) for name, w in weights.items()}
    inputs = dict.fromkeys(("query", "key", "value"), tensor)
    expected, _ = call(torch.nn.functional.multi_head_attention_forward, inputs | fixed)
    dout = np.random.default_rng(8).standard_normal(x.shape)
    expected.backward(torch.tensor(dout))

    def run(x):
        return call(
            compat.multi_head_attention_forward,
            {**dict.fromkeys(("query", "key", "value"), x), **weights},
            need_weights=False,
        )[0]

    out, gradient = outputs_and_gradients(run, jnp.asarray(x), lambda outputs: dout)
    assert_close(out, expected.detach().numpy(), 1e-12)
    assert_close(gradient, tensor.grad.numpy(), 1e-11)


def test_a_query_that_may_attend_to_nothing_gets_zero():
    """torch gives NaN with the weights; without them it gives what is expected here."""
    torch = pytest.importorskip("torch")
    given = arrays(frozenset({"attn_bool"}))
    given["attn_mask"][2] = True
    floats = sorted(name for name, x in given.items() if x.dtype != bool)
    tensors = {name: torch.tensor(x, requires_grad=name in floats) for name, x in given.items()}
    source = torch.nn.functional.multi_head_attention_forward
    assert call(source, tensors)[0][2].isnan().all()
    expected, _ = call(source, tensors, need_weights=False)
    dout = np.random.default_rng(8).standard_normal(expected.shape)
    expected.backward(torch.tensor(dout))

    def run(moving):
        return call(compat.multi_head_attention_forward, {**given, **moving})

    moving = {name: jnp.asarray(given[name]) for name in floats}
    (out, weights), gradients = outputs_and_gradients(
        run, moving, lambda outputs: (dout, np.zeros(outputs[1].shape))
    )
    assert_close(out, expected.detach().numpy(), 1e-12)
    np.testing.assert_array_equal(out[2], np.broadcast_to(given["out_proj_bias"], (N, E)))
    np.testing.assert_array_equal(weights[:, 2], 0)
    for name in floats:
        assert_close(gradients[name], tensors[name].grad.numpy(), 1e-11, name)


@pytest.mark.parametrize("case", ["separate rows", "static_k static_v zero"])
def test_outputs_have_the_dtype_of_the_query(case):
    case = frozenset(case.split())
    given = {name: jnp.asarray(x, "bfloat16") for name, x in arrays(case).items()}
    run = lambda given: call(compat.multi_head_attention_forward, given, **options(case))
    assert {x.dtype for x in jax.eval_shape(run, given)} == {jnp.dtype("bfloat16")}
