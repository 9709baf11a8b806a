"""Tools that replace `jax.lax.dot_general` (qwix: for int8, for LoRA) see the projections of every layer."""

import types

import jax
import jax.numpy as jnp
import pytest
from helpers import thorough
from jax import lax
from layers.frameworks import (
    FRAMEWORKS,
    arrays,
    assert_all_close,
    imported,
    multi_head,
    random_params,
    values_and_gradients,
)
from layers.multi_head_cases import E, N

T = 3


def replace_function(monkeypatch, tool):
    monkeypatch.setattr(lax, "dot_general", lambda *x, own=lax.dot_general, **k: tool(own, *x, **k))


def replace_code(monkeypatch, tool):
    """What qwix does: whoever holds the function calls the tool."""
    function = lax.dot_general
    own = types.FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__

    def called(*x, **k):
        import jax

        return jax.the_tool(*x, **k)

    monkeypatch.setattr(jax, "the_tool", lambda *x, **k: tool(own, *x, **k), raising=False)
    monkeypatch.setattr(function, "__code__", called.__code__)


CASES = [(f, replace_function) for f in FRAMEWORKS] + [("flax_nnx", replace_code), ("haiku", replace_code)]


@pytest.mark.parametrize(
    ("framework", "replace"),
    [pytest.param(f, r, marks=() if f in ("flax_nnx", "haiku") else thorough) for f, r in CASES],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_tool_that_doubles_what_kernels_give(framework, replace, monkeypatch):
    """Output and gradients are those of kernels twice as large, also where the layer ran before."""
    inputs, is_kernel = arrays(*[(2, T, E)] * 3), lambda x: x.size == E * E
    layer = multi_head(framework, True)
    params = random_params(layer, inputs)
    run = lambda params: values_and_gradients(lambda *x: layer.call(params, *x), *inputs)
    expected = run(jax.tree.map(lambda x: 2 * x if is_kernel(x) else x, params))

    def tool(own, x, y, *more, **options):
        found = own(x, y, *more, **options)
        return 2 * found if is_kernel(x) or is_kernel(y) else found

    replace(monkeypatch, tool)
    known = slice(1) if replace is replace_code else slice(2)  # JAX's own transposition calls the tool, too
    assert_all_close(run(params)[known], expected[known], 1e-12)


@thorough
@pytest.mark.parametrize("framework", ["haiku", "equinox"])
def test_a_tool_sees_what_decoding_projects(framework, monkeypatch):
    theirs, ours = imported(framework)
    (x,), seen = arrays((T, E)), []
    if framework == "equinox":
        layer = ours.MultiheadAttention(N, E, dtype=jnp.float64, key=jax.random.key(0))
        decode = lambda: layer.decode(x, x, x, layer.init_cache(T))
    else:
        made = lambda x: ours.MultiHeadAttention(
            N, E // N, w_init=theirs.initializers.Constant(0.5), cache_length=T
        )(x, x, x)
        model = theirs.transform_with_state(made)
        params, state = model.init(jax.random.key(0), x)
        decode = lambda: model.apply(params, state, None, x)
    decode()
    replace_function(monkeypatch, lambda own, *x, **k: (seen.append(0), own(*x, **k))[1])
    decode()
    assert len(seen) >= 4
