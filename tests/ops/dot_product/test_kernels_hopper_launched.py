"""Which Hopper kernels of dense attention a call runs, what they refuse and why, and what remat saves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted, thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.dot_product.kernel_calls import BF16, OPERATOR, TILED, gpu, kernels, shapes, tiled

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention, mods
from jax_attn_bwd._core import pallas

NAME = "mosaic_gpu"
pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def backward_kernels(wanted, arrays, **options):
    def gradients(arrays):
        def loss(inputs):
            out = dot_product_attention(**{**arrays, **inputs}, **options, implementation=NAME)
            return out.astype(np.float32).sum()

        return jax.grad(loss)({name: arrays[name] for name in wanted.split()})

    *rest, forward = kernels(gradients, arrays)
    sum_rows = {"bias", "mod_args"} & set(wanted.split())  # what rounding takes is kept for them alone
    assert forward == ("forward_low" if sum_rows else "forward")
    return rest


PAIR = ["dkey_dvalue", "dq"]
FUSED = PAIR if jax.__version_info__ < (0, 11) else ["dkey_dquery_dvalue"]  # see `can_fuse`


@pytest.mark.parametrize("head", [16, pytest.param(64, marks=thorough), 96, 128])
def test_the_fused_kernel_runs(head):
    assert backward_kernels("query key value", shapes(H=head), deterministic_sums=False) == FUSED
    for name in TILED:
        if name == "segments" and head > 64:
            continue  # for these registers do not suffice
        case = tiled(head, name)
        arrays, options = case.arrays(BF16), {**case.options, "deterministic_sums": False}
        assert backward_kernels("query key value", arrays, **options) == FUSED


@pytest.mark.parametrize("batched", [("query", "key", "value"), ("key",)], ids=str)
def test_under_vmap_the_pair_runs(batched):
    def loss(arrays):
        out = dot_product_attention(**arrays, deterministic_sums=False, implementation=NAME)
        return out.astype(np.float32).sum()

    axes = {n: 0 if n in batched else None for n in shapes()}
    arrays = {
        n: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) if n in batched else x for n, x in shapes().items()
    }
    for gradients in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert kernels(jax.vmap(gradients, (axes,)), arrays) == ["dkey_dvalue", "dq", "forward"]


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {"deterministic_sums": True}, PAIR),
        ({"H": 128, "Hv": 64}, {}, PAIR),
        ({"H": 129}, {}, ["dkey", "dq", "dvalue"]),
        ({"H": 65, "query_segment_ids": (40,), "key_value_segment_ids": (70,)}, {}, PAIR),
        ({}, {"logits_soft_cap": 3.0}, PAIR),
        ({"bias": (2, 1, 1, 70)}, {}, PAIR),
        ({"mask": (1, 1, 40, 70)}, {}, PAIR),
        ({"query_positions": (40,)}, {"is_causal": True}, PAIR),
        ({}, {"dropout_rate": 0.5, "dropout_key": np.array([1, 2], np.uint32)}, PAIR),
    ],
    ids=str,
)
def test_the_fused_kernel_leaves_other_calls_to_the_pair(change, options, expected):
    dtypes = {"bias": BF16, "mask": bool, "query_positions": np.int32}
    dtypes |= {"query_segment_ids": np.int32, "key_value_segment_ids": np.int32}
    given = {n: jax.ShapeDtypeStruct(change[n], dtypes[n]) for n in change if n in dtypes}
    arrays = shapes(**{n: x for n, x in change.items() if n not in dtypes}) | given
    options = {"deterministic_sums": False} | options
    assert backward_kernels("query key value", arrays, **options) == expected


@pytest.mark.parametrize(
    ("wanted", "bias", "expected"),
    [
        ("query", None, ["dq"]),
        ("key", None, ["dkey"]),
        ("value", None, ["dvalue"]),
        ("key value", None, ["dkey_dvalue"]),
        ("query value", None, ["dq", "dvalue"]),
        ("query key value", (4, 40, 70), PAIR),
        ("bias", (4, 40, 70), ["dbias"]),
        ("bias", (4, 1, 70), ["dbias"]),
        ("bias", (1, 40, 1), ["dbias_rows"]),
        ("value bias", (1, 40, 1), ["dbias_rows", "dvalue"]),
        ("sink", None, []),
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_only_what_is_asked_is_computed(wanted, bias, expected, deterministic):
    arrays = shapes() | {"sink": jax.ShapeDtypeStruct((4,), BF16)}
    if bias is not None:
        arrays["bias"] = jax.ShapeDtypeStruct(bias, BF16)
    assert backward_kernels(wanted, arrays, deterministic_sums=deterministic) == expected


def by_lines(logits, batch, head, row, column, slopes, by_row, by_column, by_head):
    near = slopes[head] * jnp.abs(row - column).astype(logits.dtype)
    return (logits + by_row[batch, row]) * by_column[column] * by_head[head, column] - near


def by_column(logits, batch, head, row, column, values):
    return logits + values[column]


def quotient(logits, batch, head, row, column, divisors):
    """Its derivative has a power of what it reads."""
    return logits / divisors[head]


ALIBI = mods.alibi, ((4,),)
LINES = by_lines, ((4,), (2, 40), (70,), (4, 70))
COLUMN = by_column, ((70,),)


@pytest.mark.parametrize(
    ("wanted", "score", "options", "expected"),
    [
        ("query key value mod_args", ALIBI, {}, ["dkey_dvalue", "dq_drows"]),
        ("query key value", ALIBI, {}, PAIR),
        ("key mod_args", ALIBI, {"H": 160}, ["dkey", "drows"]),
        ("mod_args", ALIBI, {}, ["drows"]),
        ("mod_args", (quotient, ((4,),)), {}, ["drows"]),
        # heads that share keys have sums of their own
        ("query key value mod_args", LINES, {}, ["dcolumns", "dkey_dvalue", "dq_drows"]),
        ("query key value mod_args", LINES, {"K": 4}, ["dcolumns_dkey_dvalue", "dq_drows"]),
        ("query key value mod_args", COLUMN, {}, ["dcolumns_dkey_dvalue", "dq"]),
        ("query key value mod_args", COLUMN, {"H": 160}, ["dcolumns_dkey", "dq", "dvalue"]),
        ("value mod_args", COLUMN, {}, ["dcolumns", "dvalue"]),
    ],
    ids=lambda x: str(x[1] if isinstance(x, tuple) else x),  # a score is named by its shapes: no addresses
)
@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=thorough)])
def test_gradients_of_what_a_score_reads_are_summed_beside_others(
    wanted, score, options, expected, deterministic
):
    function, sizes = score
    arrays = shapes(**options) | {"mod_args": tuple(jax.ShapeDtypeStruct(x, np.float32) for x in sizes)}
    assert backward_kernels(wanted, arrays, score_mod=function, deterministic_sums=deterministic) == expected


def test_nothing_differentiated_runs_the_forward_alone():
    assert kernels(lambda a: OPERATOR.call(**a, implementation=NAME), shapes()) == ["forward"]


@pytest.mark.parametrize("names", [("attention_out", "attention_lse"), ()], ids=["saved", "not"])
def test_remat_by_name_saves_the_forward(names):
    def layer(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, implementation=NAME)
        return jnp.sin(out.astype(np.float32)).sum()

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    remat = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))
    with gpu():  # the interpreter has effects, which remat refuses
        program = str(jax.make_jaxpr(remat)(*shapes().values()))
    assert program.count("name=_forward") == (1 if names else 2)


REFUSED = {
    "float32": (shapes(dtype=np.float32), {}, "not float32"),
    "float64": (shapes(dtype=np.float64), {}, "not float64"),
    "H": (shapes(H=257, Hv=8), {}, "H = 257 and Hv = 8"),
    "Hv": (shapes(Hv=264), {}, "H = 16 and Hv = 264"),
    "no queries": (shapes(T=0), {}, "nothing to compute"),
    "no keys": (shapes(S=0), {}, "nothing to compute"),
    "no values": ({**shapes(), "value": jax.ShapeDtypeStruct((2, 70, 2, 0), BF16)}, {}, "nothing to compute"),
    "symbolic": (shapes(T=jax.export.symbolic_shape("t")[0]), {}, "static shapes"),
    "precision": (shapes(), {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, "one product algorithm"),
    "float64 bias": ({**shapes(), "bias": jax.ShapeDtypeStruct((70,), np.float64)}, {}, "float64 bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    arrays, options, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' cannot run this call: .*{reason}"):
        jax.eval_shape(lambda a: dot_product_attention(**a, **options, implementation=NAME), arrays)
    with gpu():
        got = jax_attn_bwd.explain(dot_product_attention, **arrays, **options)
    assert reason in got[NAME]
    assert got["xla"] == "ok"


def test_elsewhere_the_reason_is_the_platform():
    with pallas.interpreting():
        got = jax_attn_bwd.explain(dot_product_attention, **shapes())
    assert got[NAME] == "it is a gpu kernel and the target platform is cpu"
    assert got["xla"] == "ok"


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA B200", False),
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
    ],
)
def test_which_gpus(kind, runs, unproven):
    """Where the kernels can run, they are passed over until they are proven."""
    refused = f"it needs a Hopper GPU (compute capability 9.0), not {kind}"
    with gpu(kind):
        got = jax_attn_bwd.explain(dot_product_attention, **shapes())
    assert list(got)[-1] == "xla"
    assert got["xla"] == "ok"
    assert got.refused.get(NAME) == (None if runs else refused)
    assert (f"it is not proven on {kind}: " if runs else refused) in got[NAME]


@interpreted
def test_gradients_of_what_devices_share_are_summed_over_them():
    """In `shard_map` over queries; the kernels' outputs must say that they differ from device to device."""
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
    queries, keys = jnp.ones((2, 64, 1, 64), BF16), jnp.ones((1, 64, 1, 64), BF16)

    def gradients(query, key, bias):
        call = lambda key, bias: dot_product_attention(query, key, query, bias, implementation=NAME)
        out, pullback = jax.vjp(call, key, bias)
        return pullback(out)

    specs = (P("b"), P(), P())
    run = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs[1:])
    program = str(jax.make_jaxpr(run)(queries, keys, jnp.ones((1, 1, 64, 64), np.float32)))
    assert len(re.findall(r"= psum", program)) == 2
