"""Which tiles the TPU kernels of dense attention visit, which kernels a call runs, what they refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from ops.dot_product.kernel_calls import BF16, shapes, tpu

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import pallas, targets
from jax_attn_bwd.ops.dot_product.cases import seen
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tile_flags as tiles_known
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import tile_flags
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

NAME = "mosaic_tpu"
SMALL = tiles.Tiling(128, 128, 128, 128)
pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def visited(schedule, b):
    """{(row, column): is_mixed} of the live steps of batch entry b, and the steps in order."""
    words = np.asarray(schedule.steps)[min(b, schedule.steps.shape[0] - 1)]
    steps = [tpu_tiles.Step.at(words[None], 1, 0, 0, 0, p) for p in range(len(words))]
    live = {(s.row, s.column): s.flag(tpu_tiles._MIXED) for s in steps if s.flag(tpu_tiles._LIVE)}
    return live, steps


def test_batch_entries_share_a_schedule_where_each_has_too_many_steps(monkeypatch):
    """A tile that one of them sees is visited, and compared unless all see all of it."""
    monkeypatch.setattr(tpu_tiles, "_MOST_STEPS", 1)
    some, every = (np.array(x, bool)[:, None] for x in ([[1, 0, 1], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]]))
    schedule = tpu_tiles.schedule(tiles_known.Flags(some, every, some.any(0, keepdims=True)))
    assert visited(schedule, 0)[0] == {(0, 0): False, (0, 1): True, (0, 2): True}


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("seed", [pytest.param(i, marks=[thorough] * (i not in (0, 3, 7))) for i in range(8)])
def test_a_schedule_misses_nothing_and_visits_in_runs(seed, by_key):
    rng = np.random.default_rng(seed)
    B, T, S = 2, *((300, 500), (500, 131), (128, 256))[seed % 3]
    is_causal, window = seed % 2 == 0, (None, (90, 20))[seed % 4 // 2]
    given = {}
    if seed > 1:
        given["key_value_seq_lengths"] = rng.integers(0, S + 1, B)
    if seed > 3:
        for side, n in (("query", T), ("key_value", S)):
            given[f"{side}_segment_ids"] = np.sort(rng.integers(0, 4, (B, n)), -1)
    q, k = jnp.zeros((B, T, 1, 2), BF16), jnp.zeros((B, S, 1, 2), BF16)
    options = KernelOptions.of(Options(scale=1.0), Mask(is_causal, window))

    def steps_of(given):
        operands = Operands(q, k, k, mask=Mask(is_causal, window, **given))
        refs = kernel_inputs.inputs(options, operands, None, SMALL.padding)
        return tpu_tiles.schedule(tile_flags(options, refs, 128, 128), by_key=by_key).steps

    if given:
        steps = np.asarray(jax.jit(steps_of)({n: x.astype(np.int32) for n, x in given.items()}))
    else:
        steps = steps_of({})
        assert isinstance(steps, np.ndarray)
    schedule = tpu_tiles.Schedule(steps, True, True)
    up = lambda n: n + -n % 128
    local = {"is_causal": options.is_causal}
    local |= {"local_window_size": options.window} if options.window else {}
    for b in range(B):
        plane = seen({n: x[b : b + 1] for n, x in given.items()}, local, (1, 1, T, S))[0, 0]
        padded = np.zeros((up(T), up(S)), bool)
        padded[:T, :S] = plane
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
            assert (schedule.has_full, schedule.has_mixed) == (False in live.values(), True in live.values())
        major = [s.column if by_key else s.row for s in steps]
        assert major == sorted(major)
        assert set(major) == set(range(some.shape[by_key]))
        for flag in ("first", "last"):
            assert sorted(s[3 + by_key] for s in steps if getattr(s, flag)) == sorted(set(major))


def test_a_window_visits_what_it_sees(capsys):
    """T = S = 16384, window 1024: steps of the grid beside the tiles that hold a visible pair."""
    q = jax.ShapeDtypeStruct((1, 16384, 1, 128), BF16)
    options = KernelOptions(scale=1.0, is_causal=True, window=(1024, 0))
    for name, tiling in (("forward", tiles.Tiling(1024, 1024, 128, 128)), ("backward", SMALL)):
        bq, bk = tiling.block_q, tiling.block_k
        refs = jax.eval_shape(
            lambda q, p=tiling.padding: kernel_inputs.inputs(options, Operands(q, q, q), None, p).q, q
        )
        empty = kernel_inputs.Inputs(*(None,) * len(kernel_inputs.Inputs._fields))
        flags = tile_flags(options, empty._replace(q=refs, k=refs), bq, bk)
        count = tpu_tiles.schedule(flags, by_key=name == "backward").length
        row, column = np.arange(0, 16384, bq)[:, None], np.arange(0, 16384, bk)
        ideal = ((column <= row + bq - 1) & (row - (column + bk - 1) <= 1024)).sum()
        with capsys.disabled():
            print(f"{name}, tiles {bq} x {bk}: {count} steps, ideal {ideal}")
        assert ideal <= count <= 1.15 * ideal


REFUSED = {
    "float16": (shapes(dtype=np.float16), {}, "not float16"),
    "float64": (shapes(dtype=np.float64), {}, "not float64"),
    "H": (shapes(H=257, Hv=8), {}, "H = 257 and Hv = 8"),
    "no keys": (shapes(S=0), {}, "nothing to compute"),
    "symbolic": (shapes(T=jax.export.symbolic_shape("t")[0]), {}, "static shapes"),
    "long": (shapes(T=2**17 + 1), {}, "up to 131072"),
    "precision": (shapes(), {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, "one product algorithm"),
}


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
        assert targets.device_kind() == kind
    needs = "it needs a TPU v5e, v5p, v6e or TPU7x, not TPU v4"
    assert got.refused.get(NAME) == (needs if kind == "TPU v4" else None)
    assert kind == "TPU v4" or f"it is not proven on {kind}: " in got[NAME]


def test_only_what_is_asked_is_computed():
    def kernels(*wanted):
        def loss(inputs, arrays):
            out = dot_product_attention(**{**arrays, **inputs}, implementation=NAME)
            return out.astype(np.float32).sum()

        arrays = shapes() | {"bias": jax.ShapeDtypeStruct((4, 40, 70), BF16)}
        with tpu():
            program = str(jax.make_jaxpr(jax.grad(loss))({n: arrays[n] for n in wanted}, arrays))
        return sorted(re.findall(r"\bname=attention_(d\w+?)_\d+x\d+_(?:full|mixed|both)\b", program))

    assert kernels("query", "key", "value") == ["dkey_dquery_dvalue"]
    assert kernels("value") == ["dvalue"]
    assert kernels("bias") == ["dbias"]
    assert kernels("query", "bias") == ["dbias", "dquery"]
