"""The Hopper kernels of dense attention beside a portable twin with the same tiles."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, interpreted, thorough
from ops.dot_product.kernel_calls import BF16, OPERATOR, measured

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.cases import cotangents
from jax_attn_bwd.ops.dot_product import arguments, backward, block, forward
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.kernels import hopper_backward as mosaic_gpu_backward
from jax_attn_bwd.ops.dot_product.kernels import hopper_forward as mosaic_gpu_forward
from jax_attn_bwd.ops.dot_product.kernels import hopper_key as by_key
from jax_attn_bwd.ops.dot_product.kernels import hopper_query as by_query
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles
from jax_attn_bwd.ops.dot_product.portable import tiles
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Residuals, Wanted

NAME = "mosaic_gpu"
NAMED = {case.name: case for case in OPERATOR.tagged("ci")}
pytestmark = [pytest.mark.kernel, thorough]


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def prepared(case, dtype=BF16):
    """(options, operands, cotangents) of a case."""
    given = {**case.arrays(dtype), **case.options}
    defaults = inspect.signature(dot_product_attention).parameters
    taken = {
        *inspect.signature(arguments.prepare).parameters,
        *inspect.signature(arguments.mask_of).parameters,
    }
    options, operands = arguments.prepare(
        **{n: given.get(n, parameter.default) for n, parameter in defaults.items() if n in taken},
        operator="dot_product_attention",
    )
    q = operands.query
    outputs = jnp.zeros((*q.shape[:-1], operands.value.shape[-1]), dtype), jnp.zeros(q.shape[:-1])
    dout, dlse = cotangents(OPERATOR, outputs)
    return options, operands, (dout, dlse.astype(np.float32))


def portable_tiles(tiling):
    return Tiles(tiling.block_q, tiling.block_k, "bfloat16")


def planned(options, tiling):
    return Plan(options, "xla", portable_tiles(tiling))


@pytest.fixture
def products(monkeypatch):
    """Factors are rounded as for a GPU, and multiplied in float32."""
    product = block.product

    def widened(spec, *factors, **options):
        narrow = [x.dtype == BF16 for x in factors]
        rounded = jax.lax.optimization_barrier(
            [
                jax.lax.reduce_precision(x.astype(np.float32), 8, 7) if is_bf16 else x
                for x, is_bf16 in zip(factors, narrow, strict=True)
            ]
        )
        return product(spec, *rounded, **options)

    for module in (block, tiles):
        monkeypatch.setattr(module, "product", widened)
    monkeypatch.setattr(block.Block, "dlogits_dtype", BF16)


TWINS = ["causal_window_cap", "bias_key", "sink", "dropout", "tiles"]


def gradients_of_twin(options, residuals, cts):
    """With the tiles of each kernel."""
    operands, wanted = residuals.operands, residuals.wanted.names
    head = kernel_inputs.whole(max(operands.query.shape[-1], operands.value.shape[-1]), 64)
    mask = operands.mask
    given = {"bias": operands.bias, "mask": mask.elements, "row_segment": mask.query_segment_ids}
    refs = SimpleNamespace(**given, mask_values=(), score_values=())
    saved = SimpleNamespace(head=head, refs=refs, has_blocks=False)
    made = {}
    for names, file in ((wanted & {"query"}, by_query), (wanted - {"query"}, by_key)):
        part = residuals._replace(wanted=Wanted(names))
        tiling = file.default_tiling(KernelOptions.of(options, mask), saved)
        grads = backward.backward(planned(options, tiling), part, *cts)._asdict()
        made |= {n: grads[n] for n in names}
    return made


@interpreted
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("name", TWINS)
def test_kernels_equal_their_twin(name):
    """Bits of float32 differ (exp2 for exp), and seldom turn the rounding of a factor or of the result.

    A turned result is off by one unit in its own last place, at most eps of the largest entry; a turned
    factor adds eps of one term of a sum. So: two units of the largest entry, and 49 of 50 entries equal.
    """
    options, operands, cts = prepared(NAMED[name])
    tiling = mosaic_gpu_forward.default_tiling(KernelOptions.of(options, operands.mask), operands)
    plan = planned(options, tiling)
    result = forward.forward(plan, operands)
    kernel = jax.block_until_ready(mosaic_gpu_forward.forward(plan, operands))
    given = (n for n in OPERATOR.differentiable if getattr(operands, n, None) is not None)
    wanted = frozenset(given) - {"sink"}
    residuals = Residuals(operands, result, Wanted(wanted))
    expected = gradients_of_twin(options, residuals, cts) | {"out": result.out}
    got = mosaic_gpu_backward.backward(plan, residuals, *cts)._asdict() | {"out": kernel.out}
    assert_close(kernel.lse, result.lse, 1e-6, "lse")
    assert expected.keys() == wanted | {"out"}
    for n, x in expected.items():
        a, b = (np.asarray(y.astype(np.float64)) for y in (got[n], x))
        assert_close(a, b, 2 * float(jnp.finfo(BF16).eps), n)
        if (name, n) != ("dropout", "out"):  # the kernel multiplies by the survivors' factor last
            assert (a != b).mean() <= 0.02, n


@pytest.mark.parametrize("name", [*TWINS, "large_logits"])
def test_twin_against_definition(name, monkeypatch, products):
    def tiling(operands, sizes, parts=1):
        options = KernelOptions.of(case_options, operands.mask)
        return portable_tiles(mosaic_gpu_forward.default_tiling(options, operands))

    case_options = prepared(NAMED[name])[0]

    monkeypatch.setattr(planning, "default_schedule", tiling)
    measured(OPERATOR, "xla", NAMED[name])
