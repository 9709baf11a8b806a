"""Every kernel on the GPU at hand: right to the dtype's rounding, deaf to poison, the same bits each time.

On the first GPU of a generation, in this order, 15 minutes in all:

1. `nvidia-smi -L`, then `pip install -e .[test] "jax[cuda13]"`. Kernels of graphs and deformable attention
   need JAX 0.12 or later.
2. `timeout 180 python -m jax_attn_bwd.check`: the portable path, and `"cudnn"` where it is supported,
   against float64. What misses here is no matter of our kernels.
3. `python -m jax_attn_bwd.check --enable`, which ends itself after five minutes: every kernel in a process
   that may be lost, then its time beside `"xla"` and `"cudnn"`. Keep the table, and the records that it
   names. This machine picks what is right and faster from then on.
4. `timeout 400 python -m pytest tests/gpu -n 14 --maxfail=20`, with workers for all cores but two (on 16
   cores 411 tests took 201 s): all kernels in all dtypes, each by itself first, then on every tagged case. A
   failure names kernel, case and wrong entries; a kernel that was lost twice is not tried again.

Where the kernels of a generation pass 4 without a failure, its line in `GENERATIONS`, in
`jax_attn_bwd/_core/targets.py`, is changed: `ran=""` becomes `ran="<date>, <commit>"`, with the oldest JAX on
which they passed, and with the digest that `gpu.traces --write` prints. From then on its kernels are picked
on such GPUs without a record; where there is a record, it still decides. Where some fail, change nothing: the
record of 3 serves that machine, and what 4 printed goes to whoever mends the kernels.
`tests/bench/results/nvidia_h100.md` tells what was found on an H100.

`conftest.py` says how these tests are run without a GPU. float64 is computed on the CPU, by the definition.
"""

import contextlib

import jax
import pytest
from cases import shapes
from gpu.conftest import INTERPRETED, absent
from gpu.losses import launching
from helpers import OPERATORS, count_gradients

from jax_attn_bwd import check
from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.cases import cotangents
from jax_attn_bwd.check import worker
from jax_attn_bwd.check.worker import Call

if reason := absent():
    pytest.skip(reason, allow_module_level=True)

REPEATS = 3 if INTERPRETED else 20
CUDNN = "cudnn"
# {operator: {kernel: the gradients that launch it after the forward}}; None = all.
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


def kernels():
    return [(o, i.name) for o in OPERATORS for i in o.implementations if i.platform == "gpu"]


def portable():
    """What has kernels is tried without them, too."""
    return [(o, "xla") for o in dict.fromkeys(o for o, _ in kernels()) if o.name not in FAMILY]


def pieces(operator):
    return PIECES.get(FAMILY.get(operator.name, operator.name), {"forward": (), "backward": None})


def named(call, piece):
    return f"{FAMILY.get(call.operator.name, call.operator.name)} {call.implementation} {piece}"


def param(call, launched, *before):
    """`launched`: the pieces of the operator, the one to prove last."""
    names = [named(call, piece) for piece in launched]
    name = f"{call.operator.name}[{call.implementation}]-{call.case.name}-{call.dtype}"
    probe = "" if call.wanted is None else f"{launched[-1]}-"
    return pytest.param(*before, call, id=probe + name, marks=pytest.mark.launches(*names))


def size(operator, implementation, *tags):
    """The cases of these tags, or the smallest where they are interpreted."""
    smallest = "second", "kernel", *([CUDNN] if implementation == CUDNN else [])
    return list(operator.tagged(*(smallest if INTERPRETED else tags)))


def probed():
    """Each kernel by itself, first, so that one that hangs or is wrong is known by name."""
    for operator, implementation in kernels():
        if operator.name in FAMILY:
            continue
        for piece, wanted in pieces(operator).items():
            cases = size(operator, implementation, "any_order" if piece == "any order" else "large")
            if piece == "dbias":
                cases = [case for case in cases if "bias" in shapes(case)]
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
            for case in size(operator, implementation, *tags):
                launched = [p for p in pieces(operator) if p != "any order"]
                if "dbias" in launched and "bias" not in shapes(case):
                    launched.remove("dbias")
                yield made(case, dtype, launched)
        for case in operator.tagged("any_order") if not INTERPRETED else ():
            yield made(case, "bfloat16", ("forward", "any order"))
    for operator, implementation in portable():
        for case in size(operator, implementation, "large"):
            call = Call(operator, implementation, case, "bfloat16")
            yield param(call, ["all"], operator, implementation)


def tagged(tag):
    """Cases of one tag in bfloat16."""
    for operator, implementation in kernels():
        launched = [p for p in pieces(operator) if p not in ("any order", "dbias")]
        for case in size(operator, implementation, tag):
            yield param(Call(operator, implementation, case, "bfloat16"), launched)


@pytest.fixture(autouse=True)
def _precision():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        if INTERPRETED:
            stack.enter_context(pallas.interpreting("mosaic_gpu", CUDNN))
        yield


def compiled(call, arrays, cts):
    """The program of a call; what its implementation cannot run is skipped."""
    try:
        return worker.compiled(call, arrays, cts)
    except worker.Refused as refused:
        pytest.skip(str(refused))


def given(call):
    """(arrays, cotangents) of a call."""
    arrays = call.case.arrays(call.dtype)
    outputs = jax.eval_shape(lambda: call.operator.call(**arrays, **call.case.options))
    return arrays, cotangents(call.operator, outputs)


def launched(program, *args):
    """Its results; a launch that hangs ends the process."""
    with launching(600) if INTERPRETED else launching():
        return worker.launched(program, *args)


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
    assert set(aim.expected) == set(got) or call.wanted is not None
    assert not worker.wrong_values(aim, got)


@pytest.mark.parametrize("call", list(tagged("poison")))
def test_poison_reaches_nothing(call):
    """NaN where nothing looks: the results are those with numbers there, and gradients there are 0."""
    poison = worker.poisoned(call.operator, call.case, *given(call))
    if poison is None and INTERPRETED:
        pytest.skip("this small case hides nothing")
    assert poison is not None, "the case hides nothing"
    program = compiled(call, *poison.clean)
    clean, got = launched(program, *poison.clean), launched(program, *poison.filled)
    assert not poison.reached(clean, got, call.in_any_order)


@pytest.mark.parametrize("call", [param for param in tagged("repeat") if not param.values[0].in_any_order])
def test_every_run_gives_the_same_bits(call):
    """One compiled program, run many times: a race does not."""
    arrays, cts = given(call)
    program = compiled(call, arrays, cts)
    first = launched(program, arrays, cts)
    for _ in range(REPEATS):
        again = launched(program, arrays, cts)
        assert not [name for name in first if first[name].tobytes() != again[name].tobytes()]
