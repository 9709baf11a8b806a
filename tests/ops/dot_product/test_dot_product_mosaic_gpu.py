"""The Mosaic GPU kernels of dense attention, in the interpreter.

Kernels that do not depend on each other are kept from running at once (`block_until_ready`): the interpreter
has one state for all.
"""

import contextlib
import dataclasses
import inspect
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, Case, assert_close, assert_trees_close, finite_loss, interpreted
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from test_poison import CASES as HIDING
from test_poison import POISON, visibility

import jax_attn_bwd
from jax_attn_bwd import check, dot_product_attention
from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.cases import cotangents
from jax_attn_bwd.ops.dot_product import arguments, mosaic_gpu_backward, mosaic_gpu_forward
from jax_attn_bwd.ops.dot_product import backward as portable_backward
from jax_attn_bwd.ops.dot_product import forward as portable_forward
from jax_attn_bwd.ops.dot_product import mosaic_gpu_key_gradients as by_key
from jax_attn_bwd.ops.dot_product import mosaic_gpu_query_gradients as by_query
from jax_attn_bwd.ops.dot_product import mosaic_gpu_tiles as kernel_tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Residuals, Wanted
from jax_attn_bwd.ops.dot_product.tiling import Tiling as PortableTiling

NAME = "mosaic_gpu"
BF16 = jnp.bfloat16
(OPERATOR,) = (o for o in OPERATORS if o.name == "dot_product_attention")
ANY_ORDER = dataclasses.replace(OPERATOR, call=partial(OPERATOR.call, deterministic=False))


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


@contextlib.contextmanager
def gpu(kind="NVIDIA H200"):
    """Programs are for that GPU, which is not there: they are traced, and not run."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    types = (AxisType.Explicit,)
    mesh = AbstractMesh((1,), ("x",), axis_types=types, abstract_device=device)
    with pallas.interpreting(), jax.sharding.use_abstract_mesh(mesh):
        yield


def kernels(function, *args):
    """The names of the kernels that a program runs, sorted."""
    with gpu():
        program = str(jax.make_jaxpr(function)(*args))
    return sorted(re.findall(r"\bname=attention_(d\w+|forward)\b", program))


# ---------------------------------------------------------------------- against the definition


def quarter(case):
    """A sharded case with half of its batch entries and half of its heads."""
    if "shard" not in case.tags:
        return case

    def build(rng):
        arrays = case.build(rng)
        for name, x in arrays.items():
            letters = OPERATOR.axes.get(name, "")[-np.ndim(x) :]
            index = [slice(n // 2 if a in "BN" and n > 1 else n)
                     for a, n in zip(letters, np.shape(x), strict=bool(letters))]  # fmt: skip
            arrays[name] = x[tuple(index)]
        return arrays

    return dataclasses.replace(case, build=build)


CASES = [quarter(case) for case in OPERATOR.tagged("ci", "edge", "second", "shard")]
NAMED = {case.name: case for case in CASES}


def explained(case, dtype="bfloat16"):
    with pallas.interpreting(NAME):
        return jax_attn_bwd.explain(OPERATOR.call, **case.arrays(dtype), **case.options)[NAME]


RUN = [case for case in CASES if explained(case) == "ok"]


def test_every_case_runs_but_the_empty_ones():
    refused = {case.name: explained(case) for case in CASES if explained(case) != "ok"}
    empty = ("T0_S0", "T0_S1", "T0_S3", "T1_S0", "T5_S0")
    assert refused == dict.fromkeys(empty, "there is nothing to compute")
    assert len(RUN) == len(CASES) - len(empty) >= 42
    for case in CASES:
        assert "not float32" in explained(case, "float32")


def measured(operator, implementation, case, dtype="bfloat16"):
    rows = check.measure(operator, implementation, case, dtype)
    wanted = {f"d{name}" for name in operator.differentiated(case.arrays(dtype))}
    assert {row.quantity for row in rows} == wanted | {"out", "lse"}
    for row in rows:
        assert row.ok, row


@interpreted
@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_cases_against_definition(case):
    measured(OPERATOR, NAME, case)


@interpreted
@pytest.mark.parametrize("name", ["causal_window_cap", "segments_causal", "second_dropout"])
def test_float16_against_definition(name):
    measured(OPERATOR, NAME, NAMED[name], "float16")


def tiled(head, name, T=300, S=270, Hv=None):
    """A case of several tiles of queries and of keys."""
    extra, options = {
        "full": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "window": ({}, {"local_window_size": (70, 9)}),
        "segments": ({"query_segment_ids": np.repeat([0, 1, 4], 100).astype(np.int32),
                      "key_value_segment_ids": np.repeat([0, 1, 3], 90).astype(np.int32)},
                     {"is_causal": True}),
        "lengths": ({"query_seq_lengths": np.int32(140), "key_value_seq_lengths": np.int32(131)}, {}),
        "both_lengths": ({"query_seq_lengths": np.array([300, 7], np.int32),
                          "key_value_seq_lengths": np.array([0, 260], np.int32)}, {}),
    }[name]  # fmt: skip
    batch, N, K = (2, 2, 2) if name == "both_lengths" else (1, 2, 1)

    def build(rng):
        q, k, v = (
            rng.standard_normal((batch, n, heads, size))
            for n, heads, size in ((T, N, head), (S, K, head), (S, K, Hv or head))
        )
        return {"query": q, "key": k, "value": v} | extra

    return Case(f"{name}_{head}", build, options)


TILED = ("full", "causal", "window", "segments", "lengths")


@interpreted
@pytest.mark.parametrize("name", [*TILED, "both_lengths"])
@pytest.mark.parametrize("head", [16, 96])
def test_fused_backward_against_definition(head, name, monkeypatch):
    """The interpreter takes additions of different blocks to one place for races: not looked for here."""
    params = getattr(plgpu, "InterpretGPUParams")(detect_races=False)  # noqa: B009 (absent before 0.12)
    monkeypatch.setattr(mosaic_gpu, "_interpreter", lambda: params)
    measured(ANY_ORDER, NAME, tiled(head, name))


@interpreted
@pytest.mark.parametrize("head", [16, 96])
def test_fused_backward_has_no_races_within_a_block(head):
    measured(ANY_ORDER, NAME, tiled(head, "causal", S=100))


@interpreted
@pytest.mark.parametrize(("head", "Hv"), [(72, 72), (160, 160), (256, 256), (150, 250), (256, 192)])
def test_wide_heads_against_definition(head, Hv):
    measured(OPERATOR, NAME, tiled(head, "causal", T=100, S=140, Hv=Hv))


# ---------------------------------------------------------------------- which kernels run


def shapes(T=40, S=70, N=4, K=2, H=16, Hv=None, dtype=BF16):
    sizes = {"query": (2, T, N, H), "key": (2, S, K, H), "value": (2, S, K, Hv or H)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}


def backward_kernels(wanted, arrays, **options):
    def gradients(arrays):
        def loss(inputs):
            out = dot_product_attention(**{**arrays, **inputs}, **options, implementation=NAME)
            return out.astype(np.float32).sum()

        return jax.grad(loss)({name: arrays[name] for name in wanted.split()})

    forward, *rest = reversed(kernels(gradients, arrays))
    assert forward == "forward"
    return sorted(rest)


PAIR = ["dkey_dvalue", "dq"]
FUSED = PAIR if jax.__version_info__ < (0, 11) else ["dkey_dquery_dvalue"]  # see `can_fuse`


@pytest.mark.parametrize("head", [16, 64, 96, 128])
def test_the_fused_kernel_runs(head):
    assert backward_kernels("query key value", shapes(H=head), deterministic=False) == FUSED
    for name in TILED:
        if name == "segments" and head > 64:
            continue  # for these registers do not suffice
        case = tiled(head, name)
        arrays, options = case.arrays(BF16), {**case.options, "deterministic": False}
        assert backward_kernels("query key value", arrays, **options) == FUSED


@pytest.mark.parametrize("batched", [("query", "key", "value"), ("key",)], ids=str)
def test_under_vmap_the_pair_runs(batched):
    def loss(arrays):
        out = dot_product_attention(**arrays, deterministic=False, implementation=NAME)
        return out.astype(np.float32).sum()

    axes = {n: 0 if n in batched else None for n in shapes()}
    arrays = {
        n: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) if n in batched else x
        for n, x in shapes().items()
    }
    for gradients in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert kernels(jax.vmap(gradients, (axes,)), arrays) == ["dkey_dvalue", "dq", "forward"]


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {"deterministic": True}, PAIR),
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
    options = {"deterministic": False} | options
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
    assert backward_kernels(wanted, arrays, deterministic=deterministic) == expected


def test_nothing_differentiated_runs_the_forward_alone():
    assert kernels(lambda a: OPERATOR.call(**a, implementation=NAME), shapes()) == ["forward"]


# ---------------------------------------------------------------------- the portable twin


def prepared(case, dtype=BF16):
    """(options, operands, cotangents) of a case."""
    given = {**case.arrays(dtype), **case.options}
    defaults = inspect.signature(dot_product_attention).parameters
    names = inspect.signature(arguments.prepare).parameters
    options, operands = arguments.prepare(
        **{n: given.get(n, defaults[n].default) for n in names if n != "operator"},
        operator="dot_product_attention",
    )
    q = operands.query
    outputs = jnp.zeros((*q.shape[:-1], operands.value.shape[-1]), dtype), jnp.zeros(q.shape[:-1])
    dout, dlse = cotangents(OPERATOR, outputs)
    return options, operands, (dout, dlse.astype(np.float32))


def portable(tiling):
    return PortableTiling(tiling.block_q, tiling.block_k, "bfloat16")


@pytest.fixture
def products(monkeypatch):
    """XLA:CPU refuses some products of bfloat16: factors are rounded, and multiplied in float32."""
    einsum = jnp.einsum

    def widened(spec, *factors, **options):
        narrow = [x.dtype == BF16 for x in factors]
        rounded = jax.lax.optimization_barrier(
            [
                jax.lax.reduce_precision(x.astype(np.float32), 8, 7) if is_bf16 else x
                for x, is_bf16 in zip(factors, narrow, strict=True)
            ]
        )
        return einsum(spec, *rounded, **options)

    monkeypatch.setattr(jnp, "einsum", widened)


TWINS = ["causal_window_cap", "bias_key", "sink", "dropout", "tiles"]


def gradients_of_twin(options, residuals, cts):
    """With the tiles of each kernel."""
    operands, wanted = residuals.operands, residuals.wanted.names
    head = kernel_tiles.whole(max(operands.query.shape[-1], operands.value.shape[-1]), 64)
    saved = SimpleNamespace(
        head=head,
        refs=SimpleNamespace(
            bias=operands.bias, mask=operands.mask, row_segment=operands.query_segment_ids
        ),
    )
    made = {}
    for names, file in ((wanted & {"query"}, by_query), (wanted - {"query"}, by_key)):
        part = residuals._replace(wanted=Wanted(names))
        blocks = portable(file.default_tiling(options, saved))
        grads = portable_backward._backward(options, blocks, part, *cts)._asdict()
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
    tiling = mosaic_gpu_forward.default_tiling(options, operands)
    result = portable_forward._forward(options, portable(tiling), operands)
    kernel = jax.block_until_ready(mosaic_gpu_forward.forward(options, operands))
    wanted = frozenset(
        n for n in OPERATOR.differentiable if getattr(operands, n) is not None and n != "sink"
    )
    residuals = Residuals(operands, result, Wanted(wanted))
    expected = gradients_of_twin(options, residuals, cts) | {"out": result.out}
    got = mosaic_gpu_backward.backward(options, residuals, *cts)._asdict() | {"out": kernel.out}
    assert_close(kernel.lse, result.lse, 1e-6, "lse")
    assert expected.keys() == wanted | {"out"}
    for n, x in expected.items():
        a, b = (np.asarray(y.astype(np.float64)) for y in (got[n], x))
        assert_close(a, b, 2 * float(jnp.finfo(BF16).eps), n)
        if (name, n) != ("dropout", "out"):  # the kernel multiplies by the survivors' factor last
            assert (a != b).mean() <= 0.02, n


@pytest.mark.parametrize("name", [case.name for case in OPERATOR.tagged("check")])
def test_twin_against_definition(name, monkeypatch, products):
    def tiling(options, operands):
        return portable(mosaic_gpu_forward.default_tiling(options, operands))

    monkeypatch.setattr(PortableTiling, "default_for", tiling)
    measured(OPERATOR, "xla", NAMED[name])


# ---------------------------------------------------------------------- which tiles are visited


def visited(options, operands, rows, columns, by_key):
    """[B, tiles of one side, 4]; all and all full where the kernels are told nothing."""
    refs = kernel_tiles.inputs(options, operands, None)
    found = kernel_tiles.bounds(options, refs, rows, columns, by_key)
    n_q, n_k = refs.q.shape[1] // rows, refs.k.shape[1] // columns
    outer, inner = (n_k, n_q) if by_key else (n_q, n_k)
    found = np.array([[[0, 0, inner, inner]] * outer]) if found is None else np.asarray(found)
    assert found.shape[1:] == (outer, 4)
    return np.broadcast_to(found, (refs.q.shape[0], outer, 4)), (n_q, n_k)


def tile_flags(seen, rows, columns, grid, T):
    """(some, every) element of each tile of a plane `[B, T, S]`; rows that are thrown away count not."""
    (B, t, S), (n_q, n_k) = seen.shape, grid
    padded = np.zeros((2, B, n_q * rows, n_k * columns), bool)
    padded[:, :, :t, :S] = seen
    for b in range(B):
        padded[1, b, T[b] :] = True
    cut = padded.reshape(2, B, n_q, rows, n_k, columns)
    return cut[0].any((2, 4)), cut[1].all((2, 4))


BLOCKS = [(128, 64, False), (128, 128, False), (64, 128, True), (32, 128, True)]


@pytest.mark.parametrize("seed", range(24))
def test_bounds_miss_nothing_and_call_nothing_full_that_is_not(seed):
    rng = np.random.default_rng(seed)
    B, T, S = 3, *((300, 500), (500, 131), (128, 256))[seed % 3]
    q, k = jnp.zeros((B, T, 1, 2), BF16), jnp.zeros((B, S, 1, 2), BF16)
    window = (None, None, None, (90, 20), (0, 200))[rng.integers(5)]
    options = Options(scale=1.0, is_causal=bool(rng.random() < 0.3), window=window)
    given = {}
    for side, n in (("query", T), ("key_value", S)):
        if rng.random() < 0.5:
            given[f"{side}_seq_lengths"] = rng.integers(0, n + 1, B)
        if rng.random() < 0.4:
            given[f"{side}_positions"] = np.sort(rng.integers(0, 600, (B, n)), -1)
    if rng.random() < 0.4:
        for side, n in (("query", T), ("key_value", S)):
            given[f"{side}_segment_ids"] = np.sort(rng.integers(0, 4, (B, n)), -1)
    operands = Operands(q, k, k, **{n: jnp.asarray(x, np.int32) for n, x in given.items()})
    local = {"is_causal": options.is_causal} | ({"local_window_size": window} if window else {})
    seen = np.stack([
        visibility(T, S, {n: x[b] if "pos" in n else x[b : b + 1] for n, x in given.items()}, local)[0, 0]
        for b in range(B)
    ])  # fmt: skip
    ends = given.get("query_seq_lengths", [T] * B)
    for rows, columns, by_key_ in BLOCKS:
        found, grid = visited(options, operands, rows, columns, by_key_)
        some, every = tile_flags(seen, rows, columns, grid, ends)
        if by_key_:
            some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
        step = np.arange(some.shape[-1])
        first, full_first, full_end, end = (found[..., i, None] for i in range(4))
        within = (first <= step) & (step < end)
        assert not (some & ~within).any()
        assert not (within & (full_first <= step) & (step < full_end) & ~every).any()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(512, 512), (256, 640), (640, 256)])
@pytest.mark.parametrize("window", [None, (64, 64), (0, 0), (127, 1), (200, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bounds_of_fixed_shapes_are_exact(shape, window, is_causal, blocks):
    (T, S), (rows, columns, order) = shape, blocks
    operands = Operands(*(jnp.zeros((1, n, 1, 2), BF16) for n in (T, S, S)))
    options = Options(scale=1.0, is_causal=is_causal, window=window)
    found, grid = visited(options, operands, rows, columns, order)
    local = {"is_causal": is_causal} | ({"local_window_size": window} if window else {})
    seen = visibility(T, S, {}, local)[:1, 0]
    some, every = (
        x.swapaxes(1, 2) if order else x for x in tile_flags(seen, rows, columns, grid, [T])
    )
    first, full_first, full_end, end = (found[..., i] for i in range(4))
    np.testing.assert_array_equal(end - first, some.sum(-1))
    full = np.minimum(full_end, end) - np.maximum(full_first, first)
    np.testing.assert_array_equal(np.maximum(full, 0), every.sum(-1))


# ---------------------------------------------------------------------- poison


POISONED = (
    "mask_one_key_head", "mask_rows", "both_lengths", "causal", "window_of_positions", "segments",
    "bias_minus_inf_rows", "sink_and_lengths",
)  # fmt: skip


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's products
@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        (c, deterministic)
        for c in HIDING
        for deterministic in (True, False)
        if c.__name__ in (POISONED if deterministic else ("both_lengths", "causal"))
    ],
)
def test_poison_is_as_good_as_zeros(case, deterministic):
    rng = np.random.default_rng(11)
    T, S = 9, 13
    extra, options = case(rng, T, S)
    seen = visibility(T, S, extra, options)
    blind = ~seen.any(-1).transpose(0, 2, 1)[..., None]
    unseen = ~seen.reshape(2, 2, 2, T, S).any((2, 3)).transpose(0, 2, 1)[..., None]
    assert blind.any() or unseen.any()

    def run(fill):
        rng = np.random.default_rng(5)

        def array(hidden):
            x = rng.standard_normal((*hidden.shape[:-1], 8))
            poison = np.broadcast_to(fill[rng.integers(0, 3, x.shape)], x.shape)
            return jnp.asarray(np.where(hidden, poison, x), BF16)

        q, k, v, dout = (array(h) for h in (blind, unseen, unseen, blind))
        fixed = {n: jnp.asarray(x) for n, x in extra.items() if n not in ("bias", "sink")}
        inputs = {n: jnp.asarray(extra[n], BF16) for n in ("bias", "sink") if n in extra}
        inputs |= {"query": q, "key": k, "value": v}
        call = partial(OPERATOR.call, **fixed, **options, deterministic=deterministic)
        (out, lse), pullback = jax.vjp(lambda x: call(**x, implementation=NAME), inputs)
        return jax.block_until_ready(
            {"out": out, "lse": lse} | pullback((dout, jnp.ones_like(lse)))[0]
        )

    poisoned, clean = run(POISON), run(np.zeros(3))
    assert poisoned.keys() == clean.keys()
    for name, x in clean.items():
        assert not np.isnan(x.astype(np.float32)).any(), name
        np.testing.assert_array_equal(poisoned[name], x, name)


# ---------------------------------------------------------------------- transformations


@interpreted
@pytest.mark.parametrize(
    ("batched", "deterministic"),
    [
        (("query",), True),
        (("bias",), True),
        (("query", "key", "value", "bias", "sink"), True),
        (("query",), False),
        (("query", "key", "value"), False),
    ],
    ids=str,
)
def test_vmap_and_nested_vmap(batched, deterministic):
    """In any order the fused kernel is compared with the pair, which runs under vmap."""
    case = NAMED["second_causal"]
    arrays, options = case.arrays(BF16), {**case.options, "implementation": NAME}
    if not deterministic:  # what the fused kernel takes
        del arrays["bias"]
        options |= {"logits_soft_cap": None, "deterministic": False}
    rng = np.random.default_rng(3)
    for n in batched:
        noise = rng.standard_normal((2, 2, *arrays[n].shape))
        arrays[n] = (arrays[n][None, None] + noise.astype(BF16)).astype(BF16)

    def step(inputs):
        (out, lse), pullback = jax.vjp(lambda i: OPERATOR.call(**i, **options), inputs)
        return {"out": out, "lse": lse} | pullback((jnp.cos(out), jnp.sin(lse)))[0]

    axes = ({n: 0 if n in batched else None for n in arrays},)
    pick = lambda *i: {n: x[i] if n in batched else x for n, x in arrays.items()}  # noqa: E731
    rows = jax.block_until_ready(jax.vmap(step, axes)(pick(0)))
    both = jax.block_until_ready(jax.vmap(jax.vmap(step, axes), axes)(arrays))
    for b in range(2):
        expected = jax.block_until_ready(step(pick(0, b)))
        for got in (
            jax.tree.map(lambda x, b=b: x[b], rows),
            jax.tree.map(lambda x, b=b: x[0, b], both),
        ):
            assert_trees_close(got, expected, 2 * float(jnp.finfo(BF16).eps))


@interpreted
@pytest.mark.parametrize("name", ["second_causal", "second_lengths"])
def test_second_order_under_jit(name):
    case = NAMED[name]
    arrays = case.arrays(BF16)
    inputs = {n: arrays[n] for n in OPERATOR.differentiated(arrays)}

    def curvature(implementation):
        options = {**case.options, "implementation": implementation}
        gradient = jax.grad(finite_loss(OPERATOR.call, OPERATOR, arrays, options))

        @jax.jit
        def both(inputs):
            square = lambda i: sum((g.astype(np.float32) ** 2).sum() for g in gradient(i).values())  # noqa: E731
            forward = jax.jvp(gradient, (inputs,), (inputs,))[1]
            return jax.grad(square)(inputs), forward

        return jax.block_until_ready(both(inputs))

    for got, expected in zip(curvature(NAME), curvature("xla"), strict=True):
        assert_trees_close(got, expected, 0.03)


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


@interpreted
def test_two_runs_give_the_same_bits():
    case = tiled(16, "causal")
    arrays = case.arrays(BF16)

    def run():
        out, pullback = jax.vjp(
            lambda a: OPERATOR.call(**a, **case.options, implementation=NAME), arrays
        )
        return jax.block_until_ready(jax.tree.leaves((out, pullback(out))))

    for a, b in zip(run(), run(), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ---------------------------------------------------------------------- what is supported

REFUSED = {
    "float32": (shapes(dtype=np.float32), {}, "not float32"),
    "float64": (shapes(dtype=np.float64), {}, "not float64"),
    "H": (shapes(H=257, Hv=8), {}, "H = 257 and Hv = 8"),
    "Hv": (shapes(Hv=264), {}, "H = 16 and Hv = 264"),
    "no queries": (shapes(T=0), {}, "nothing to compute"),
    "no keys": (shapes(S=0), {}, "nothing to compute"),
    "no values": ({**shapes(), "value": jax.ShapeDtypeStruct((2, 70, 2, 0), BF16)}, {},
                  "nothing to compute"),
    "symbolic": (shapes(T=jax.export.symbolic_shape("t")[0]), {}, "static shapes"),
    "precision": (shapes(), {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32},
                  "one product algorithm"),
    "float64 bias": ({**shapes(), "bias": jax.ShapeDtypeStruct((70,), np.float64)}, {}, "float64 bias"),
}  # fmt: skip


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
        ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA B200", False), ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True), ("NVIDIA GH200 480GB", True),
    ],
)  # fmt: skip
def test_which_gpus(kind, runs):
    with gpu(kind):
        got = jax_attn_bwd.explain(dot_product_attention, **shapes())
    assert list(got)[-2:] == [NAME, "xla"]
    assert got["xla"] == "ok"
    assert got[NAME] == (
        "ok" if runs else f"it needs a Hopper GPU (compute capability 9.0), not {kind}"
    )
