"""Every kernel on the GPU at hand: right to the dtype's rounding, deaf to poison, the same bits each time.

`python -m pytest tests/gpu`; see `conftest.py`. float64 is computed on the CPU, by the definition.
"""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.conftest import INTERPRETED, absent
from gpu.losses import launching
from helpers import OPERATORS, count_gradients

from jax_attn_bwd import check
from jax_attn_bwd._core import backend, pallas
from jax_attn_bwd._core.cases import Case, Operator, cotangents, value_and_gradients

if reason := absent():
    pytest.skip(reason, allow_module_level=True)

REPEATS = 3 if INTERPRETED else 20
# Of each operator: {kernel: the gradients that launch it after the forward}; None = all.
PIECES = {
    "dot_product_attention": {
        "forward": (),
        "dq": ("query",),
        "dk dv": ("key", "value"),
        "dbias": ("bias",),
        "any order": ("query", "key", "value"),
    },
    "scaled_masked_softmax": {"forward": (), "backward": ("x",)},
    "graph_attention": {"forward": (), "dsrc": ("src",)},
    "graph_attention_v2": {"forward": (), "dsrc": ("src",), "ddst": ("dst",)},
    "graph_transformer_attention": {"forward": (), "dsrc": ("key", "value"), "ddst": ("query",)},
    "multi_scale_deformable_attention": {
        "dvalue": ("value",),
        "products": ("sampling_locations", "attention_weights"),
    },
}
FAMILY = {"multi_head_attention": "dot_product_attention"}  # whose kernels it launches


class Call(NamedTuple):
    """A case of an operator by one implementation; `wanted`: the gradients asked for, None = all."""

    operator: Operator
    implementation: str
    case: Case
    dtype: str
    wanted: tuple[str, ...] | None = None


def kernels():
    return [(o, i.name) for o in OPERATORS for i in o.implementations if i.platform == "gpu"]


def pieces(operator):
    return PIECES.get(FAMILY.get(operator.name, operator.name), {"forward": (), "backward": None})


def named(operator, piece):
    return f"{FAMILY.get(operator.name, operator.name)} {piece}"


def param(call, launched, *before):
    """`launched`: the pieces of the operator, the one to prove last."""
    names = [named(call.operator, piece) for piece in launched]
    name = f"{call.operator.name}[{call.implementation}]-{call.case.name}-{call.dtype}"
    probe = "" if call.wanted is None else f"{launched[-1]}-"
    return pytest.param(*before, call, id=probe + name, marks=pytest.mark.launches(*names))


def size(operator, *tags):
    """The cases of these tags, or the smallest where they are interpreted."""
    return list(operator.tagged(*(("second", "kernel") if INTERPRETED else tags)))


def probed():
    """Each kernel by itself, first, so that one that hangs or is wrong is known by name."""
    for operator, implementation in kernels():
        if operator.name in FAMILY:
            continue
        for piece, wanted in pieces(operator).items():
            cases = size(operator, "any_order" if piece == "any order" else "large")
            if piece == "dbias":
                cases = [case for case in cases if "bias" in case.shapes()]
            for case in cases[:2]:
                launched = [p for p in pieces(operator) if p == "forward" != piece] + [piece]
                yield param(Call(operator, implementation, case, "bfloat16", wanted), launched)


def compared():
    """Outputs and all gradients: every named case in bfloat16, some in the other dtypes."""
    for operator, implementation in kernels():
        takes_float32 = FAMILY.get(operator.name, operator.name) != "dot_product_attention"

        def made(case, dtype, launched, of=(operator, implementation)):
            return param(Call(*of, case, dtype), launched, *of)

        for dtype in ("bfloat16", "float16", *(("float32",) if takes_float32 else ())):
            tags = ("large", "check") if dtype != "bfloat16" else ("large", "ci", "edge", "second")
            for case in size(operator, *tags):
                launched = [p for p in pieces(operator) if p != "any order"]
                if "dbias" in launched and "bias" not in case.shapes():
                    launched.remove("dbias")
                yield made(case, dtype, launched)
        for case in operator.tagged("any_order") if not INTERPRETED else ():
            yield made(case, "bfloat16", ("forward", "any order"))


def tagged(tag):
    """Cases of one tag in bfloat16."""
    for operator, implementation in kernels():
        launched = [p for p in pieces(operator) if p not in ("any order", "dbias")]
        for case in size(operator, tag):
            yield param(Call(operator, implementation, case, "bfloat16"), launched)


@pytest.fixture(autouse=True)
def _precision():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        if INTERPRETED:
            stack.enter_context(pallas.interpreting("mosaic_gpu"))
        yield


def compiled(call, arrays, cts):
    """`(arrays, cts) -> {output or d<argument>: array}`, compiled: what follows is a launch."""
    operator, options = call.operator, {**call.case.options, "implementation": call.implementation}
    refused = backend.explain(lambda: operator.call(**arrays, **call.case.options)).refused
    if call.implementation in refused:
        pytest.skip(refused[call.implementation])
    names = operator.differentiated(arrays) if call.wanted is None else call.wanted

    def run(arrays, cts):
        outputs, gradients = value_and_gradients(operator.call, names, arrays, options)(cts)
        found = dict(zip(operator.outputs, outputs, strict=True))
        return found | {f"d{name}": x for name, x in gradients.items()}

    return jax.jit(run).lower(arrays, cts).compile()


def launched(program, *args):
    """The results as NumPy arrays, those narrower than float32 as float32."""
    with launching(600) if INTERPRETED else launching():
        results = jax.block_until_ready(program(*args))
        return {n: np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for n, x in results.items()}


def wrong_entries(got, expected, limit):
    """The pattern of wrong entries tells of the cause."""
    largest = max(np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0), 1e-2)
    with np.errstate(invalid="ignore"):
        off = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, np.abs(got - expected))
    off = np.where(np.isnan(off), np.inf, off / largest)
    worst, wrong = np.unravel_index(off.argmax(), off.shape), off > limit
    rows = [np.flatnonzero(wrong.any(tuple(set(range(off.ndim)) - {axis}))) for axis in range(off.ndim)]
    spans = ", ".join(f"{r[0]}..{r[-1]} ({r.size})" if r.size else "none" for r in rows)
    where = f"worst at {tuple(map(int, worst))}: {got[worst]:.6g}, expected {expected[worst]:.6g}"
    return f"{wrong.mean():.1%} wrong, {np.isnan(got).sum()} NaN, {where}; along {got.shape}: {spans}"


@pytest.mark.parametrize("call", list(probed()))
def test_a_kernel_by_itself(call):
    against_float64(call)


@pytest.mark.gradients
@pytest.mark.parametrize(("operator", "implementation", "call"), list(compared()))
def test_values_and_gradients(operator, implementation, call):
    against_float64(call)
    count_gradients(operator, implementation)


def against_float64(call):
    """The error of every output and gradient is within the limit of `jax_attn_bwd.check`."""
    aim = check.target(call.operator, call.case, call.dtype)
    got = launched(compiled(call, aim.arrays, aim.cotangents), aim.arrays, aim.cotangents)
    wrong = {}
    assert set(aim.expected) == set(got) or call.wanted is not None
    for name in got:
        expected = aim.expected[name]
        error, limit = check.relative_error(got[name], expected), aim.limits[name]
        if not error <= limit:
            entries = wrong_entries(got[name], expected, limit)
            wrong[name] = f"error {error:.2g}, limit {limit:.2g}: {entries}"
    assert not wrong


def behind(where, x):
    """`where` with axes behind, until it has as many as `x`."""
    return np.reshape(where, np.shape(where) + (1,) * (x.ndim - np.ndim(where)))


@pytest.mark.parametrize("call", list(tagged("poison")))
def test_poison_reaches_nothing(call):
    """NaN where nothing looks: the results are those with numbers there, and gradients there are 0."""
    operator, case = call.operator, call.case
    arrays = case.arrays(call.dtype)
    hidden = {n: x for n, x in operator.hidden(arrays, case.options).items() if np.any(x)}
    if not hidden and INTERPRETED:
        pytest.skip("this small case hides nothing")
    assert hidden, "the case hides nothing"
    outputs = jax.eval_shape(lambda: operator.call(**arrays, **case.options))
    cts = dict(zip(operator.outputs, cotangents(operator, outputs), strict=True))
    cts |= {name: 0 * ct for name, ct in cts.items() if name not in (operator.outputs[0], *hidden)}
    program = compiled(call, arrays, tuple(cts.values()))

    def fill(x, where):
        return jnp.where(behind(where, x), np.nan, x).astype(x.dtype)

    filled, poisoned = (
        {n: fill(x, hidden[n]) if n in hidden else x for n, x in group.items()} for group in (arrays, cts)
    )
    clean = launched(program, arrays, tuple(cts.values()))
    got = launched(program, filled, tuple(poisoned.values()))
    for name in clean:
        np.testing.assert_array_equal(got[name], clean[name], name)
        assert not np.isnan(got[name]).any(), name
    for name in set(hidden) & set(arrays):
        assert not np.where(behind(hidden[name], arrays[name]), got[f"d{name}"], 0).any(), name


@pytest.mark.parametrize("call", list(tagged("repeat")))
def test_every_run_gives_the_same_bits(call):
    """One compiled program, run many times: a race does not."""
    arrays = call.case.arrays(call.dtype)
    outputs = jax.eval_shape(lambda: call.operator.call(**arrays, **call.case.options))
    cts = cotangents(call.operator, outputs)
    program = compiled(call, arrays, cts)
    first = launched(program, arrays, cts)
    for _ in range(REPEATS):
        again = launched(program, arrays, cts)
        assert not [name for name in first if first[name].tobytes() != again[name].tobytes()]
