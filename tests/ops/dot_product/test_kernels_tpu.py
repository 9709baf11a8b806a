"""The TPU kernels of dense attention, in the interpreter: races, two cores, memory that starts as NaN.

Tiles are 128 x 128 here, so that a few hundred queries and keys make every kind of tile: full, mixed and
skipped, first and last.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Case, assert_close, thorough
from jax.sharding import AxisType
from ops.dot_product.kernel_calls import BF16, OPERATOR, measured

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention, mods
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.dot_product.kernels import tpu_backward as mosaic_tpu_backward
from jax_attn_bwd.ops.dot_product.kernels import tpu_forward as mosaic_tpu_forward
from jax_attn_bwd.ops.dot_product.kernels import tpu_tiles as tiles

NAME = "mosaic_tpu"
SMALL = tiles.Tiling(128, 128, 128, 128)
PARTS = tiles.Tiling(256, 512, 128, 128, apart=3)
pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    set_tiling(monkeypatch, SMALL)
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def set_tiling(monkeypatch, tiling):
    for module in (mosaic_tpu_forward, mosaic_tpu_backward):
        monkeypatch.setattr(module, "default_tiling", lambda *_: tiling)
    monkeypatch.setattr(mosaic_tpu_backward, "bias_tiling", lambda *_: tiling)


def long_case(name, extra, *, B=1, T=300, S=270, N=2, K=1, H=16, Hv=16, **options):
    def build(rng):
        shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
        return {n: rng.standard_normal(shape) for n, shape in shapes.items()} | extra(rng)

    return Case(name, build, options)


def ids(*counts):
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


def by_batch_and_head(batch, head, row, column):
    """Tiles of every kind, and rows that see nothing."""
    return (jnp.abs(row - column) <= 20 * head + 130 * batch) & ((head < 1) | (row > 7))


def bent(logits, batch, head, row, column):
    batch, head, row, column = (x.astype(logits.dtype) for x in (batch, head, row, column))
    return jnp.tanh(logits * (1 + batch + head)) - 0.1 * jnp.abs(row - column)


def nan_where_hidden(logits, batch, head, row, column):
    """NaN where causality hides it, and in the rows of padding."""
    row, column = row.astype(logits.dtype), column.astype(logits.dtype)
    return jnp.tanh(logits) * jnp.log(row - column + jnp.sqrt(140 - row) - 0.5)


def score_of_arrays(logits, batch, head, row, column, width, by_row, by_column):
    """Reads values of heads, of rows of each batch entry, and of columns."""
    distance = jnp.abs(row - column).astype(logits.dtype) / width[head].astype(logits.dtype)
    return jnp.tanh(logits + by_row[batch, row]) * by_column[column] - by_row[batch, row] * distance


def bucket(distance):
    """T5's: exact below 8, then logarithmic; those of the future apart."""
    near = jnp.abs(distance)
    far = 8 + (jnp.log(jnp.maximum(near, 1).astype(jnp.float32) / 8) * 3.0).astype(jnp.int32)
    return jnp.where(near < 8, near, jnp.minimum(far, 15)) + jnp.where(distance > 0, 16, 0)


def by_bucket(logits, batch, head, row, column, allowed, table, by_row):
    """A learned bias of heads and distances, which each row scales."""
    return logits + table[head, bucket(column - row)].astype(logits.dtype) * by_row[row]


def allowed_at(batch, head, row, column, allowed, *_):
    """Tiles of every kind by an array of distances, not the same for the batch entries."""
    return allowed[batch, jnp.abs(row - column)]


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
    long_case(
        "functions", lambda rng: {"bias": rng.standard_normal((2, 1, 150))},
        B=2, T=200, S=150, mask_mod=by_batch_and_head, score_mod=bent, is_causal=True, logits_soft_cap=3.0,
    ),
    long_case(
        "functions of arrays",
        lambda rng: {
            "bias": rng.standard_normal((2, 200, 1)), "query_seq_lengths": np.array([200, 90], np.int32),
            "mod_args_0": np.array([60, 11], np.int32),
            "mod_args_1": rng.standard_normal((2, 200)), "mod_args_2": rng.random(150),
        },
        B=2, T=200, S=150, mask_mod=lambda b, h, r, c, width, *_: jnp.abs(r - c) <= width[h] + 9 * b,
        score_mod=score_of_arrays,
    ),
    long_case(
        "functions of distances",
        lambda rng: {
            "bias": rng.standard_normal((2, 2, 200, 140)), "query_seq_lengths": np.array([200, 90], np.int32),
            "mod_args_0": np.stack([np.arange(200) < 110, np.arange(200) % 140 > 3]),
            "mod_args_1": rng.standard_normal((2, 32)), "mod_args_2": rng.random(200),
        },
        B=2, T=200, S=140, mask_mod=allowed_at, score_mod=by_bucket,
    ),
    long_case(
        "functions of positions",
        lambda rng: {"query_positions": rng.permutation(250)[:140].astype(np.int32)},
        T=140, S=200, mask_mod=mods.sliding_window(90, 20) | mods.global_tokens(9),
        score_mod=mods.soft_cap(2.0),
    ),
)  # fmt: skip


@thorough
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_tiles_against_definition(case):
    measured(OPERATOR, NAME, case)


@thorough
@pytest.mark.parametrize("name", ["bias_lowest", "bias_batch", "large_logits"])
def test_short_cases_against_definition(name):
    (case,) = (case for case in OPERATOR.cases if case.name == name)
    measured(OPERATOR, NAME, case, "float32" if name == "bias_lowest" else "bfloat16")


@thorough
def test_parts_of_a_tile_and_chunks_of_queries(monkeypatch):
    """Eight parts a tile, in stages; dq is too much for the memory it is given, so queries are cut."""
    set_tiling(monkeypatch, PARTS)
    monkeypatch.setattr(mosaic_tpu_backward, "RESIDENT", 1)
    table = lambda rng: {"mod_args_0": rng.standard_normal((4, 81))}
    window = {"local_window_size": (60, 20), "score_mod": mods.relative_bias(40)}
    measured(OPERATOR, NAME, long_case("window", table, T=400, S=257, N=4, K=2, **window))


@thorough
@pytest.mark.parametrize("forward", ["mosaic_tpu", "xla"])
def test_a_forward_pairs_with_any_backward(forward, rng):
    """The residuals of one implementation, the backward of the other; empty rows among them."""
    shapes = {"query": (2, 30, 2, 8), "key": (2, 40, 1, 8), "value": (2, 40, 1, 8)}
    arrays = {n: jnp.asarray(rng.standard_normal(s), np.float32) for n, s in shapes.items()}
    arrays["sink"] = jnp.asarray([1.5, -2.0], np.float32)
    arrays["mask"] = jnp.asarray(rng.random((2, 1, 30, 40)) < 0.1).at[:, :, 3:6].set(False)
    other = {"mosaic_tpu": "xla", "xla": "mosaic_tpu"}[forward]
    dout, dlse = (jnp.asarray(rng.standard_normal(s), np.float32) for s in ((2, 30, 2, 8), (2, 30, 2)))

    def gradients(first, second):
        out, lse = OPERATOR.call(**arrays, implementation=first)
        assert (np.asarray(lse)[:, 3:6] == np.asarray(arrays["sink"])).all()
        bad = dout.at[:, 3:6].set(np.nan)  # rows that see nothing
        return jax_attn_bwd.dot_product_attention_bwd(
            bad,
            **arrays,
            out=out,
            lse=lse,
            dlse=dlse,
            implementation=second,
            wrt=("query", "key", "value", "sink"),
        )

    for got, expected in zip(gradients(forward, other), gradients("xla", "xla"), strict=True):
        if expected is not None:
            assert_close(got, expected, 1e-5)


@thorough
def test_a_value_of_zero_has_a_gradient_under_a_dominant_sink(rng):
    """out = 0 and lse = sink, as in a row that sees nothing; only what is visible tells them apart."""
    q, k, dout = (jnp.asarray(rng.standard_normal((2, n, 2, 8)), np.float32) for n in (30, 40, 30))
    mask = jnp.asarray(rng.random((2, 1, 30, 40)) < 0.5).at[:, :, 3:6].set(False)
    options = {"mask": mask, "sink": jnp.full(2, 20.0, np.float32), "is_causal": True}

    def gradient(implementation):
        def loss(v, dout):
            out, _ = OPERATOR.call(query=q, key=k, value=v, **options, implementation=implementation)
            return jnp.vdot(out, dout)

        return jax.jit(jax.grad(loss))(0 * k, dout.at[:, 3:6].set(np.nan))

    expected = gradient("xla") * 2.0**20
    assert (expected != 0).any()
    assert_close(gradient(NAME) * 2.0**20, expected, 1e-5)


@thorough
def test_nan_in_a_bias_is_no_mask(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), np.float32) for n in (30, 40))
    bias = jnp.zeros((1, 1, 30, 40), np.float32).at[0, 0, 3, 5].set(np.nan)
    out, _ = OPERATOR.call(query=q, key=k, value=k, bias=bias, implementation=NAME)
    assert jnp.isnan(out[0, 3]).all()
    assert jnp.isfinite(jnp.delete(out, 3, axis=1)).all()


@thorough
@pytest.mark.parametrize("hidden", [{"mask_mod": mods.causal}, {"is_causal": True}], ids=list)
def test_a_score_is_nan_where_nothing_is_seen(rng, hidden):
    q, k, dout = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), np.float32) for n in (140, 150, 140))

    def gradients(implementation):
        call = partial(
            dot_product_attention, **hidden, score_mod=nan_where_hidden, implementation=implementation
        )
        return jax.vjp(call, q, k, 2 * k)[1](dout)

    for got, expected in zip(gradients(NAME), gradients("xla"), strict=True):
        assert np.isfinite(expected).all()
        assert_close(got, expected, 1e-4)


@thorough
def test_poison_over_several_tiles_is_as_good_as_zeros():
    """Two runs: the same bits."""
    lengths = {"key_value_seq_lengths": [100, 0], "query_seq_lengths": [140, 150]}
    lengths = {name: np.array(x, np.int32) for name, x in lengths.items()}
    case = long_case(
        "poison", lambda rng: lengths, B=2, T=150, S=140, is_causal=True, local_window_size=(60, 0)
    )
    arrays = case.arrays(BF16)
    hidden = OPERATOR.hidden(arrays, case.options)
    assert hidden["query"].any()
    assert hidden["key"].any()
    names = OPERATOR.differentiated(arrays)

    @jax.jit
    def run(arrays, dout):
        call = lambda inputs: OPERATOR.call(**{**arrays, **inputs}, **case.options, implementation=NAME)
        (out, lse), pullback = jax.vjp(call, {name: arrays[name] for name in names})
        return out, lse, pullback((dout, jnp.ones_like(lse)))

    def filled(fill):
        hide = lambda n, x: jnp.where(hidden[n][..., None], jnp.asarray(fill, BF16), x)
        dout = hide("out", jnp.ones((2, 150, 2, 16), BF16))
        return {n: hide(n, x) if n in names else x for n, x in arrays.items()}, dout

    for a, b in zip(*(jax.tree.leaves(run(*filled(fill))) for fill in (np.nan, 0.0)), strict=True):
        assert not np.isnan(b.astype(np.float32)).any()
        np.testing.assert_array_equal(a, b)


@thorough
def test_vmap_over_lengths(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, n, 1, 8)), BF16) for n in (140, 130))
    run = lambda n: dot_product_attention(
        q, k, k, key_value_seq_lengths=n, return_residual=True, implementation=NAME
    )
    lengths = jnp.array([[130], [0], [40]], np.int32)
    for got, *rows in zip(jax.jit(jax.vmap(run))(lengths), *map(run, lengths), strict=True):
        assert_close(got, jnp.stack(rows), 0.0)


@thorough
@pytest.mark.parametrize("batched", ["arrays", "operands"])
def test_vmap_over_what_functions_are_handed_or_over_all_else(batched, rng):
    """Values and gradients; those of what is not batched are summed."""
    T, S = 60, 50
    shapes = {"query": (1, T, 2, 8), "key": (1, S, 1, 8), "value": (1, S, 1, 8)}
    arrays = {"table": (2, 21), "by_row": (T,), "slopes": (2,)}

    def drawn(shapes, more):
        return {n: jnp.asarray(rng.standard_normal((*more, *s)), np.float32) for n, s in shapes.items()}

    ids = jnp.asarray(np.arange(T) // np.array([[20], [35]]), np.int32)
    if batched == "arrays":
        axes, given = (None, 0, 0), (drawn(shapes, ()), drawn(arrays, (2,)), ids)
    else:
        axes, given = (0, None, None), (drawn(shapes, (2,)), drawn(arrays, ()), ids[0])

    def score(logits, batch, head, row, column, ids, arrays):
        near = arrays["table"][head, jnp.clip(column - row, -10, 10) + 10] * arrays["by_row"][row]
        return mods.alibi(logits + near, batch, head, row, column, arrays["slopes"])

    same = lambda batch, head, row, column, ids, arrays: ids[row] == ids[column]

    def loss(implementation, operands, arrays, ids):
        functions = {"mask_mod": same, "score_mod": score, "mod_args": (ids, arrays)}
        return (dot_product_attention(**operands, **functions, implementation=implementation) ** 2).sum()

    rows = []
    for i in range(2):
        pairs = zip(given, axes, strict=True)
        row = (jax.tree.map(lambda x, i=i: x[i], x) if a == 0 else x for x, a in pairs)
        rows.append(jax.value_and_grad(partial(loss, "xla"), (0, 1))(*row))
    losses, gradients = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    # what is not batched has the sum of both
    gradients = [
        g if a == 0 else jax.tree.map(lambda x: x.sum(0), g) for g, a in zip(gradients, axes[:2], strict=True)
    ]

    def mapped(*given):
        losses = jax.vmap(partial(loss, NAME), axes)(*given)
        return losses.sum(), losses

    (_, got), got_gradients = jax.jit(jax.value_and_grad(mapped, (0, 1), has_aux=True))(*given)
    assert_close(got, losses, 1e-5)
    for a, b in zip(jax.tree.leaves(got_gradients), jax.tree.leaves(gradients), strict=True):
        assert_close(a, b, 1e-5)


@thorough
@pytest.mark.parametrize("where", ["explicit mesh", "shard_map"])
def test_on_shards(where, rng):
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2)
    spec = jax.P("b", None, "n")
    arrays = [jnp.asarray(rng.standard_normal((2, 20, 2, 8)), np.float32) for _ in range(4)]
    ids = jnp.asarray(np.arange(20) // 9, np.int32)
    by_row, by_column = (jnp.asarray(rng.standard_normal(n), np.float32) for n in ((1, 20), 20))

    lead = (2, 2) if where == "explicit mesh" else (1, 1)  # a shard counts its own heads
    chosen = jnp.asarray(rng.random((*lead, 5, 3)) < 0.5)

    def score(logits, batch, head, row, column, ids, by_row, by_column, chosen):
        logits = score_of_arrays(logits, 0 * batch, head, row, column, ids[:2] + 3, by_row, by_column)
        return logits + by_column[jnp.abs(row - column)]

    def visible(batch, head, row, column, ids, by_row, by_column, chosen):
        seen = mods.document(batch, head, row, column, ids) | (ids[jnp.abs(row - column)] == 1)
        return seen & ((row == column) | mods.blocks(4, 8)(batch, head, row, column, chosen))

    def step(implementation, q, k, v, dout):
        functions = {"mask_mod": visible, "score_mod": score, "implementation": implementation}

        def call(q, k, v, *floats):
            return dot_product_attention(
                q, k, v, is_causal=True, mod_args=(ids, *floats, chosen), **functions
            )

        out, pullback = jax.vjp(call, q, k, v, by_row, by_column)
        dq, dk, dv, *dargs = pullback(dout)
        if where == "shard_map" and implementation == NAME:
            assert all(not jax.typeof(x).manual_axis_type.varying for x in dargs)
        return (out, dq, dk, dv), dargs

    expected = step("xla", *arrays)
    run = partial(step, NAME)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays]
        if where == "shard_map":
            run = jax.shard_map(run, in_specs=spec, out_specs=((spec,) * 4, [jax.P()] * 2))
        got = jax.jit(run)(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-5)
