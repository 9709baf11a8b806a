"""What the tests of the attention kernels share: devices that are not there, cases of many tiles."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from helpers import OPERATORS, Case
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import check
from jax_attn_bwd._core import pallas

BF16 = jnp.bfloat16
(OPERATOR,) = (o for o in OPERATORS if o.name == "dot_product_attention")
TILED = ("full", "causal", "window", "segments", "lengths")


@contextlib.contextmanager
def device(kind, platform):
    """Programs are for that device, which is not there: they are traced, and not run."""
    about = AbstractDevice(device_kind=kind, num_cores=132 if platform == "gpu" else 1, platform=platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=about)
    with pallas.interpreting(), jax.sharding.use_abstract_mesh(mesh):
        yield


def gpu(kind="NVIDIA H200"):
    return device(kind, "gpu")


def tpu(kind="TPU v6 lite"):
    return device(kind, "tpu")


def kernels(function, *args):
    """The names of the kernels that a program runs, sorted."""
    with gpu():
        program = str(jax.make_jaxpr(function)(*args))
    return sorted(re.findall(r"\bname=attention_(d\w+|forward\w*)\b", program))


def near_or_first(batch, head, row, column):
    """Tiles of every kind; not the same for all heads."""
    near = (row - column <= 90 - 40 * head) & (column - row <= 20) & ~((row - column) % 3 == 1)
    return near | (column < 5) | (row == 7)


def near_in_document(batch, head, row, column, ids, width):
    """The same by arrays: of rows, of columns, and of heads."""
    near = (ids[0, row] == ids[1, column]) & (jnp.abs(row - column) <= width[head])
    return near | (column < 5) | (row == 7)


def bent(logits, batch, head, row, column, ids):
    """Not monotone in the logits, of heads, columns and distances."""
    distance = jnp.abs(row - column).astype(logits.dtype)
    factor = jnp.where(ids[1, column] > 2, 1.0, 0.5).astype(logits.dtype)
    return jnp.tanh(logits * (1.0 + head.astype(logits.dtype))) * factor - 0.01 * distance


def tiled(head, name, T=300, S=270, Hv=None):
    """A case of several tiles of queries and of keys."""
    documents = np.stack([np.repeat([0, 1, 4], 100), np.repeat([0, 1, 3, 4], [90, 90, 90, 30])])
    documents = documents.astype(np.int32)
    extra, options = {
        "full": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "window": ({}, {"local_window_size": (70, 9)}),
        "bias of keys": ({"bias": np.cos(np.arange(2.0 * S)).reshape(2, 1, S)}, {}),
        "function": ({}, {"mask_mod": near_or_first}),
        "arrays": (
            {"mod_args_0": documents, "mod_args_1": np.array([90, 50], np.int32)},
            {"mask_mod": near_in_document},
        ),
        "score": (
            {"mod_args_0": documents, "bias": np.cos(np.arange(2.0 * T)).reshape(2, T, 1)},
            {"score_mod": bent, "is_causal": True, "logits_soft_cap": 3.0},
        ),
        "segments": (
            {
                "query_segment_ids": np.repeat([0, 1, 4], 100).astype(np.int32),
                "key_value_segment_ids": np.repeat([0, 1, 3], 90).astype(np.int32),
            },
            {"is_causal": True},
        ),
        "lengths": ({"query_seq_lengths": np.int32(140), "key_value_seq_lengths": np.int32(131)}, {}),
        "both_lengths": (
            {
                "query_seq_lengths": np.array([300, 7], np.int32),
                "key_value_seq_lengths": np.array([0, 260], np.int32),
            },
            {},
        ),
    }[name]
    batch, N, K = (2, 2, 2) if name == "both_lengths" else (1, 2, 1)

    def build(rng):
        q, k, v = (
            rng.standard_normal((batch, n, heads, size))
            for n, heads, size in ((T, N, head), (S, K, head), (S, K, Hv or head))
        )
        return {"query": q, "key": k, "value": v} | extra

    return Case(f"{name}_{head}", build, options)


def measured(operator, implementation, case, dtype="bfloat16"):
    rows = check.measure(operator, implementation, case, dtype)
    wanted = {f"d{name}" for name in operator.differentiated(case.arrays(dtype))}
    assert {row.quantity for row in rows} == wanted | {"out", "lse"}
    for row in rows:
        assert row.ok, row


def shapes(T=40, S=70, N=4, K=2, H=16, Hv=None, dtype=BF16):
    sizes = {"query": (2, T, N, H), "key": (2, S, K, H), "value": (2, S, K, Hv or H)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}
