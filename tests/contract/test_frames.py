"""Between a public call and its first product stand at most eight functions of the package, its own included.

Counted are the Python frames in files of the package when the product is bound, in a call that is traced
anew; comprehensions are no calls, and the guard of keywords stands before the call. The product is a
`dot_general`; of an operator without one what reads rows or adds them up, or the exponential.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import case_params, first_of_each
from jax.extend.core import Primitive

import jax_attn_bwd as jab

ROOT = Path(jab.__file__).parent
MOST = 8
PRODUCTS = ("dot_general", "gather", "scatter-add", "scatter-max", "exp")  # the first that there is
CASES = [p for p in case_params("check") if p.values[0].call.__module__.startswith("jax_attn_bwd.ops.")]


def frames() -> list[str]:
    """The functions of the package that are being called, outermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        counts = path.name not in ("cases.py", "keywords.py") and (name[0] != "<" or name == "<lambda>")
        if ROOT in path.parents and counts:
            found.append(f"{path.relative_to(ROOT)}: {name}")
        frame = frame.f_back
    return found[::-1]


@pytest.fixture
def to_first_product(monkeypatch):
    """`call -> the functions` between it and its first product."""
    found, bind = {}, Primitive.bind

    def noted(primitive, *args, **params):
        if primitive.name in PRODUCTS and (stack := frames()):
            found.setdefault(primitive.name, stack)
        return bind(primitive, *args, **params)

    monkeypatch.setattr(Primitive, "bind", noted)

    def of(call, *args):
        jax.clear_caches()
        jax.make_jaxpr(call)(*args)
        return next(found[name] for name in PRODUCTS if name in found)

    return of


@pytest.mark.parametrize(("operator", "implementation", "case"), first_of_each(CASES))
def test_of_each_operator(to_first_product, operator, implementation, case):
    options = {**case.options, "implementation": implementation}
    found = to_first_product(lambda arrays: operator.call(**arrays, **options), case.arrays(np.float32))
    assert 0 < len(found) <= MOST, found


@pytest.mark.parametrize("shape", [(1, 4096, 1, 64), (64, 512, 8, 64)], ids=["tiles", "slices"])
def test_of_large_dense_calls(to_first_product, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = to_first_product(lambda x: jab.dot_product_attention(x, x, x, is_causal=True), x)
    assert 0 < len(found) <= MOST, found
