"""The Mosaic GPU kernels of dense attention fit the shared memory of a block, whatever the call."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd.ops.dot_product.cases import with_mod_args

NAME = "mosaic_gpu"
B, T, S, N, K = 3, 130, 190, 4, 2
pytestmark = pytest.mark.kernel
ALIGNMENT = 1024  # bytes at which each array begins
REDUCTIONS = 2048  # what the row maximum and the row sum take
HEADS = [*itertools.product((64, 128, 192, 256), repeat=2)]
ARRAYS = {
    "bias": ((1, N, T, S), jnp.float32),
    "mask": ((B, 1, T, S), jnp.bool_),
    "sink": ((N,), jnp.float32),
    "dropout_key": ((2,), jnp.uint32),
    "query_positions": ((B, T), jnp.int32),
    "key_value_positions": ((B, S), jnp.int32),
    "query_segment_ids": ((B, T), jnp.int32),
    "key_value_segment_ids": ((B, S), jnp.int32),
    "mod_args_0": ((B, T), jnp.float32),
    "mod_args_1": ((S,), jnp.float32),
}
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")
DROPOUT = {"dropout_rate": 0.1}


def lines(logits, batch, head, row, column, by_row, by_column):
    """Its gradients are sums over keys and over queries."""
    return logits * by_row[batch, row] + by_column[column]


CALLS = {
    "plain": ((), {}),
    "any order": ((), {"deterministic_sums": False}),
    "segments, any order": (SEGMENTS, {"deterministic_sums": False}),
    "soft cap": ((), {"logits_soft_cap": 5.0}),
    "segments and soft cap": (SEGMENTS, {"logits_soft_cap": 5.0, "is_causal": True}),
    "dropout": (("dropout_key",), DROPOUT),
    "bias": (("bias",), {}),
    "everything": (tuple(ARRAYS), {**DROPOUT, "logits_soft_cap": 5.0, "is_causal": True, "score_mod": lines}),
}


def scratch_bytes(scratch):
    """Shared memory of a kernel's scratch; a barrier takes 8 bytes."""
    total = 0
    is_leaf = lambda x: not isinstance(x, dict | list | tuple)
    for x in jax.tree.leaves(scratch, is_leaf=is_leaf):
        if isinstance(x, plgpu.Barrier):
            total += 8 * int(np.prod(x.num_barriers))  # a tuple from JAX 0.12 on
        else:
            size = math.prod(x.shape) * np.dtype(x.dtype).itemsize
            total += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return total


@pytest.fixture
def launched(monkeypatch):
    """{kernel: bytes} of what is traced."""
    found, launch = {}, mosaic_gpu.launch

    def record(body, name, *, scratch, **more):
        found[name] = scratch_bytes(scratch) + (REDUCTIONS if name.startswith("attention_forward") else 0)
        return launch(body, name, scratch=scratch, **more)

    monkeypatch.setattr(mosaic_gpu, "launch", record)
    return found


ALL_HEADS = ("everything", "any order", "segments, any order")  # those that hold most, for each way back


@pytest.mark.parametrize(
    ("H", "Hv", "call"),
    [
        pytest.param(H, Hv, call, marks=[] if call == "everything" and Hv == H else [thorough])
        for call in CALLS
        for H, Hv in HEADS
        if call in ALL_HEADS or Hv == H
    ],
)
def test_scratch_fits_shared_memory(H, Hv, call, launched):
    names, options = CALLS[call]
    given = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
    types = {name: (shape, jnp.bfloat16) for name, shape in given.items()}
    types |= {name: ARRAYS[name] for name in names}
    arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in types.items()}

    def gradients(arrays):
        inputs = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def loss(inputs):
            given = with_mod_args({**arrays, **inputs})
            out = dot_product_attention(**given, **options, implementation=NAME)
            return out.astype(np.float32).sum()

        return jax.grad(loss)(inputs)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with pallas.interpreting(), jax.sharding.use_abstract_mesh(mesh), jax.enable_x64(False):
        jax.eval_shape(gradients, arrays)
    assert any(name.startswith("attention_forward") for name in launched)
    assert len(launched) >= 2
    too_large = {n: size for n, size in launched.items() if size > mosaic_gpu.SHARED_MEMORY}
    assert not too_large, f"of {mosaic_gpu.SHARED_MEMORY} bytes"
