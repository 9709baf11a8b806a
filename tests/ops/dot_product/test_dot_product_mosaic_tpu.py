"""The TPU kernels of dense attention, in the interpreter: races, two cores, memory that starts as NaN.

Tiles are 128 x 128 here, so that a few hundred queries and keys make every kind of tile: full, mixed and
skipped, first and last.
"""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, Case, assert_close, finite_loss
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from test_poison import POISON, visibility

import jax_attn_bwd
from jax_attn_bwd import check, dot_product_attention
from jax_attn_bwd._core import backend, pallas
from jax_attn_bwd.ops.dot_product import kernel_inputs, mosaic_tpu_forward, mosaic_tpu_gradients
from jax_attn_bwd.ops.dot_product import mosaic_tpu_bias_gradient as full_bias
from jax_attn_bwd.ops.dot_product import mosaic_tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

NAME = "mosaic_tpu"
BF16 = jnp.bfloat16
(OPERATOR,) = (o for o in OPERATORS if o.name == "dot_product_attention")
SMALL = tiles.Tiling(128, 128, 128, 128)
PARTS = tiles.Tiling(256, 512, 128, 128, apart=3)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    set_tiling(monkeypatch, SMALL)
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def set_tiling(monkeypatch, tiling):
    for module in (mosaic_tpu_forward, mosaic_tpu_gradients, full_bias):
        monkeypatch.setattr(module, "default_tiling", lambda *_: tiling)


@contextlib.contextmanager
def tpu(kind="TPU v6 lite"):
    """Programs are for that TPU, which is not there: they are traced, and not run."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with pallas.interpreting(), jax.sharding.use_abstract_mesh(mesh):
        yield


# ---------------------------------------------------------------------- against the definition


def long_case(name, extra, *, B=1, T=300, S=270, N=2, K=1, H=16, Hv=16, **options):
    def build(rng):
        shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
        return {n: rng.standard_normal(shape) for n, shape in shapes.items()} | extra(rng)

    return Case(name, build, options)


def ids(*counts):
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


LONG = (
    long_case("causal", lambda rng: {}, is_causal=True),
    long_case(
        "everything of the index",
        lambda rng: {
            "query_segment_ids": ids(100, 110, 90), "key_value_segment_ids": ids(90, 0, 180),
            "query_seq_lengths": np.array([300, 130], np.int32),
            "key_value_seq_lengths": np.array([0, 260], np.int32),
            "bias": rng.standard_normal((2, 1, 270)), "sink": 20.0 * rng.standard_normal(2),
        },
        B=2, H=72, Hv=40, is_causal=True, local_window_size=(70, 9), logits_soft_cap=3.0,
    ),
    long_case(
        "planes and dropout",
        lambda rng: {
            "bias": rng.standard_normal((1, 2, 200, 150)),
            "mask": rng.random((2, 1, 200, 150)) < 0.6,
            "dropout_key": np.array([3, 4], np.uint32),
        },
        B=2, T=200, S=150, dropout_rate=0.3,
    ),
    long_case(
        "positions and rows",
        lambda rng: {
            "bias": rng.standard_normal((2, 140, 1)), "mask": rng.random((140, 1)) < 0.8,
            "query_positions": rng.permutation(200)[:140].astype(np.int32),
        },
        T=140, S=200, is_causal=True, local_window_size=(80, 0),
    ),
)  # fmt: skip


def measured(case, dtype="bfloat16"):
    rows = check.measure(OPERATOR, NAME, case, dtype)
    wanted = {f"d{name}" for name in OPERATOR.differentiated(case.arrays(dtype))}
    assert {row.quantity for row in rows} == wanted | {"out", "lse"}
    for row in rows:
        assert row.ok, row


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_tiles_against_definition(case):
    measured(case)


@pytest.mark.parametrize("name", ["bias_lowest", "bias_batch", "large_logits"])
def test_short_cases_against_definition(name):
    (case,) = (case for case in OPERATOR.cases if case.name == name)
    measured(case, "float32" if name == "bias_lowest" else "bfloat16")


def test_parts_of_a_tile_and_chunks_of_queries(monkeypatch):
    """Eight parts a tile, in stages; dq is too much for the memory it is given, so queries are cut."""
    set_tiling(monkeypatch, PARTS)
    monkeypatch.setattr(mosaic_tpu_gradients, "RESIDENT", 1)
    measured(long_case("window", lambda rng: {}, T=200, S=257, local_window_size=(60, 20)))


@pytest.mark.parametrize("forward", ["mosaic_tpu", "xla"])
def test_a_forward_pairs_with_any_backward(forward, rng):
    """The residuals of one implementation, the backward of the other; empty rows among them."""
    shapes = {"query": (2, 30, 2, 8), "key": (2, 40, 1, 8), "value": (2, 40, 1, 8)}
    arrays = {n: jnp.asarray(rng.standard_normal(s), np.float32) for n, s in shapes.items()}
    arrays["sink"] = jnp.asarray([1.5, -2.0], np.float32)
    arrays["mask"] = jnp.asarray(rng.random((2, 1, 30, 40)) < 0.1).at[:, :, 3:6].set(False)
    other = {"mosaic_tpu": "xla", "xla": "mosaic_tpu"}[forward]
    dout, dlse = (
        jnp.asarray(rng.standard_normal(s), np.float32) for s in ((2, 30, 2, 8), (2, 30, 2))
    )

    def gradients(first, second):
        out, lse = OPERATOR.call(**arrays, implementation=first)
        assert (np.asarray(lse)[:, 3:6] == np.asarray(arrays["sink"])).all()
        bad = dout.at[:, 3:6].set(np.nan)  # rows that see nothing
        return jax_attn_bwd.dot_product_attention_bwd(
            bad, **arrays, out=out, lse=lse, dlse=dlse, implementation=second,
            wrt=("query", "key", "value", "sink"),
        )  # fmt: skip

    for got, expected in zip(gradients(forward, other), gradients("xla", "xla"), strict=True):
        if expected is not None:
            assert_close(got, expected, 1e-5)


def test_a_value_of_zero_has_a_gradient_under_a_dominant_sink(rng):
    """out = 0 and lse = sink, as in a row that sees nothing; only what is visible tells them apart."""
    q, k, dout = (jnp.asarray(rng.standard_normal((2, n, 2, 8)), np.float32) for n in (30, 40, 30))
    mask = jnp.asarray(rng.random((2, 1, 30, 40)) < 0.5).at[:, :, 3:6].set(False)
    options = {"mask": mask, "sink": jnp.full(2, 20.0, np.float32), "is_causal": True}

    def gradient(implementation):
        def loss(v, dout):
            out, _ = OPERATOR.call(
                query=q, key=k, value=v, **options, implementation=implementation
            )
            return jnp.vdot(out, dout)

        return jax.jit(jax.grad(loss))(0 * k, dout.at[:, 3:6].set(np.nan))

    expected = gradient("xla") * 2.0**20
    assert (expected != 0).any()
    assert_close(gradient(NAME) * 2.0**20, expected, 1e-5)


def test_nan_in_a_bias_is_no_mask(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), np.float32) for n in (30, 40))
    bias = jnp.zeros((1, 1, 30, 40), np.float32).at[0, 0, 3, 5].set(np.nan)
    out, _ = OPERATOR.call(query=q, key=k, value=k, bias=bias, implementation=NAME)
    assert jnp.isnan(out[0, 3]).all()
    assert jnp.isfinite(jnp.delete(out, 3, axis=1)).all()


def test_poison_is_as_good_as_zeros():
    T, S = 150, 140
    extra = {"key_value_seq_lengths": np.array([100, 0], np.int32),
             "query_seq_lengths": np.array([140, 150], np.int32)}  # fmt: skip
    options = {"is_causal": True, "local_window_size": (60, 0)}
    seen = visibility(T, S, extra, options)
    blind = ~seen.any(-1).transpose(0, 2, 1)[..., None]
    unseen = ~seen.reshape(2, 2, 2, T, S).any((2, 3)).transpose(0, 2, 1)[..., None]
    assert blind.any()
    assert unseen.any()
    lengths = {n: jnp.asarray(x) for n, x in extra.items()}

    @jax.jit
    def run(q, k, v, dout):
        call = lambda q, k, v: OPERATOR.call(  # noqa: E731
            query=q, key=k, value=v, **lengths, **options, implementation=NAME
        )
        (out, lse), pullback = jax.vjp(call, q, k, v)
        return out, lse, *pullback((dout, jnp.ones_like(lse)))

    def filled(fill):
        rng = np.random.default_rng(5)

        def array(hidden):
            x = rng.standard_normal((*hidden.shape[:-1], 8))
            poison = np.broadcast_to(fill[rng.integers(0, 3, x.shape)], x.shape)
            return jnp.asarray(np.where(hidden, poison, x), BF16)

        return [array(h) for h in (blind, unseen, unseen, blind)]

    clean = run(*filled(np.zeros(3)))
    for a, b in zip(run(*filled(POISON)), clean, strict=True):
        assert not np.isnan(b.astype(np.float32)).any()
        np.testing.assert_array_equal(a, b)  # two runs: the same bits


# ---------------------------------------------------------------------- transformations


def test_vmap_and_second_order_under_jit():
    """Grad of grad under vmap of the query alone, beside the portable path."""
    (case,) = (case for case in OPERATOR.cases if case.name == "second_lengths")
    arrays = case.arrays(np.float32)
    queries = jnp.stack([arrays["query"], arrays["query"][:, ::-1]])

    def curvature(implementation):
        options = {**case.options, "implementation": implementation}
        gradient = jax.grad(finite_loss(OPERATOR.call, OPERATOR, arrays, options))

        def both(query):
            first = gradient({"query": query})["query"]
            return first, jax.grad(lambda q: (gradient({"query": q})["query"] ** 2).sum())(query)

        return jax.jit(jax.vmap(both))(queries)

    for a, b in zip(curvature(NAME), curvature("xla"), strict=True):
        assert_close(a, b, 1e-5)


def test_vmap_over_lengths(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), BF16) for n in (140, 130))
    run = lambda n: dot_product_attention(  # noqa: E731
        q, k, k, key_value_seq_lengths=n, return_residual=True, implementation=NAME
    )
    lengths = jnp.array([[130], [0], [40]], np.int32)
    for got, *rows in zip(jax.jit(jax.vmap(run))(lengths), *map(run, lengths), strict=True):
        assert_close(got, jnp.stack(rows), 0.0)


@pytest.mark.parametrize("where", ["explicit mesh", "shard_map"])
def test_on_shards(where, rng):
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)
    spec = jax.P("b", None, "n")
    arrays = [jnp.asarray(rng.standard_normal((2, 20, 2, 8)), np.float32) for _ in range(4)]

    def step(implementation, q, k, v, dout):
        call = partial(dot_product_attention, is_causal=True, implementation=implementation)
        out, pullback = jax.vjp(call, q, k, v)
        return out, *pullback(dout)

    expected = step("xla", *arrays)
    run = partial(step, NAME)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays]
        if where == "shard_map":
            run = jax.shard_map(run, in_specs=spec, out_specs=spec)
        got = jax.jit(run)(*placed)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-5)


# ---------------------------------------------------------------------- which tiles are visited


def visited(schedule, b):
    """{(row, column): is_mixed} of the live steps of batch entry b, and the steps in order."""
    words = np.asarray(schedule.steps)[min(b, schedule.steps.shape[0] - 1)]
    steps = [tiles.Step.at(words[None], 1, 0, 0, 0, p) for p in range(len(words))]
    live = {(s.row, s.column): s.flag(tiles._MIXED) for s in steps if s.flag(tiles._LIVE)}
    return live, steps


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_misses_nothing_and_visits_in_runs(seed, by_key):
    rng = np.random.default_rng(seed)
    B, T, S = 2, *((300, 500), (500, 131), (128, 256))[seed % 3]
    options = Options(scale=1.0, is_causal=seed % 2 == 0, window=(None, (90, 20))[seed % 4 // 2])
    given = {}
    if seed > 1:
        given["key_value_seq_lengths"] = rng.integers(0, S + 1, B)
    if seed > 3:
        for side, n in (("query", T), ("key_value", S)):
            given[f"{side}_segment_ids"] = np.sort(rng.integers(0, 4, (B, n)), -1)
    q, k = jnp.zeros((B, T, 1, 2), BF16), jnp.zeros((B, S, 1, 2), BF16)
    operands = Operands(q, k, k, **{n: jnp.asarray(x, np.int32) for n, x in given.items()})
    refs = kernel_inputs.inputs(options, operands, None, SMALL.padding)
    flags = kernel_inputs.tile_flags(options, refs, 128, 128)
    schedule = tiles.schedule(*flags, by_key=by_key)
    assert isinstance(schedule.steps, np.ndarray) == (seed <= 1)
    local = {"is_causal": options.is_causal}
    local |= {"local_window_size": options.window} if options.window else {}
    for b in range(B):
        seen = visibility(T, S, {n: x[b : b + 1] for n, x in given.items()}, local)[0, 0]
        padded = np.zeros((refs.q.shape[1], refs.k.shape[1]), bool)
        padded[:T, :S] = seen
        some = padded.reshape(-1, 128, padded.shape[1] // 128, 128).any((1, 3))
        padded[T:] = True
        every = padded.reshape(-1, 128, padded.shape[1] // 128, 128).all((1, 3))
        live, steps = visited(schedule, b)
        for place in np.argwhere(some):
            assert tuple(place) in live
        for place, is_mixed in live.items():
            assert is_mixed or every[place]
        if seed <= 1:
            assert len(live) == some.sum()
        major = [s.column if by_key else s.row for s in steps]
        assert major == sorted(major)
        assert set(major) == set(range(some.shape[by_key]))
        for flag in ("first", "last"):
            assert sorted(s[3 + by_key] for s in steps if getattr(s, flag)) == sorted(set(major))


def test_a_window_visits_what_it_sees(capsys):
    """T = S = 16384, window 1024: steps of the grid beside the tiles that hold a visible pair."""
    q = jax.ShapeDtypeStruct((1, 16384, 1, 128), BF16)
    options = Options(scale=1.0, is_causal=True, window=(1024, 0))
    for name, tiling in (("forward", tiles.Tiling(1024, 1024, 128, 128)), ("backward", SMALL)):
        bq, bk = tiling.block_q, tiling.block_k
        refs = jax.eval_shape(
            lambda q, p=tiling.padding: kernel_inputs.inputs(options, Operands(q, q, q), None, p).q,
            q,
        )
        empty = kernel_inputs.Inputs(*(None,) * len(kernel_inputs.Inputs._fields))
        some, every = kernel_inputs.tile_flags(options, empty._replace(q=refs, k=refs), bq, bk)
        count = tiles.schedule(some, every, by_key=name == "backward").length
        row, column = np.arange(0, 16384, bq)[:, None], np.arange(0, 16384, bk)
        ideal = ((column <= row + bq - 1) & (row - (column + bk - 1) <= 1024)).sum()
        with capsys.disabled():
            print(f"{name}, tiles {bq} x {bk}: {count} steps, ideal {ideal}")
        assert ideal <= count <= 1.15 * ideal


# ---------------------------------------------------------------------- what is supported


def shapes(T=40, S=70, N=4, K=2, H=16, Hv=None, dtype=BF16):
    sizes = {"query": (2, T, N, H), "key": (2, S, K, H), "value": (2, S, K, Hv or H)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}


REFUSED = {
    "float16": (shapes(dtype=np.float16), {}, "not float16"),
    "float64": (shapes(dtype=np.float64), {}, "not float64"),
    "H": (shapes(H=257, Hv=8), {}, "H = 257 and Hv = 8"),
    "no keys": (shapes(S=0), {}, "nothing to compute"),
    "symbolic": (shapes(T=jax.export.symbolic_shape("t")[0]), {}, "static shapes"),
    "long": (shapes(T=2**17 + 1), {}, "up to 131072"),
    "precision": (shapes(), {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32},
                  "one product algorithm"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    arrays, options, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"'mosaic_tpu' cannot run this call: .*{reason}"):
        jax.eval_shape(lambda a: dot_product_attention(**a, **options, implementation=NAME), arrays)
    with tpu():
        got = jax_attn_bwd.explain(dot_product_attention, **arrays, **options)
    assert reason in got[NAME]
    assert got["xla"] == "ok"


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v4"])
def test_which_tpus(kind):
    with tpu(kind):
        got = jax_attn_bwd.explain(dot_product_attention, **shapes())
        assert backend.target_device_kind() == kind
    needs = "it needs a TPU v5e, v5p, v6e or TPU7x, not TPU v4"
    assert got[NAME] == (needs if kind == "TPU v4" else "ok")


def test_only_what_is_asked_is_computed():
    def kernels(*wanted):
        def loss(inputs, arrays):
            out = dot_product_attention(**{**arrays, **inputs}, implementation=NAME)
            return out.astype(np.float32).sum()

        arrays = shapes() | {"bias": jax.ShapeDtypeStruct((4, 40, 70), BF16)}
        with tpu():
            program = str(jax.make_jaxpr(jax.grad(loss))({n: arrays[n] for n in wanted}, arrays))
        return sorted(
            re.findall(r"\bname=attention_(d\w+?)_\d+x\d+_(?:full|mixed|both)\b", program)
        )

    assert kernels("query", "key", "value") == ["dkey_dquery_dvalue"]
    assert kernels("value") == ["dvalue"]
    assert kernels("bias") == ["dbias"]
    assert kernels("query", "bias") == ["dbias", "dquery"]
