"""A batch in parts gives what the whole batch gives."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_trees_close, thorough
from jax.sharding import AxisType, PartitionSpec

from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.plan import plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

BATCH, T, S, N, K, H = (4, 2), 24, 40, 4, 2, 8
OPTIONS = {"logits_soft_cap": 3.0, "dropout_rate": 0.3, "return_residual": True}


@pytest.fixture
def in_parts(monkeypatch):
    """Cuts every batch into the given number of parts."""

    def set_count(count):
        monkeypatch.setattr(jax, "device_count", lambda platform: 1)
        monkeypatch.setattr(planning, "_batch_slices", lambda batch, logits: count)
        monkeypatch.setattr(planning, "TILE_LOGITS", 0)  # no batch counts as small

    return set_count


def arrays(rng, bias, tokens):
    """(what is differentiated, the rest); `bias` and `tokens` are the batch axes of those operands."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    q, k, v = draw(*BATCH, T, N, H), draw(*BATCH, S, K, H), draw(*BATCH, S, K, 2 * H)
    segments = [jnp.asarray(rng.integers(0, 2, (*tokens, n)), jnp.int32) for n in (T, S)]
    rest = {
        "mask": jnp.asarray(rng.random((*bias, 1, T, S)) < 0.8),
        "key_value_seq_lengths": jnp.asarray(rng.integers(0, S + 1, BATCH), jnp.int32),
        "query_seq_lengths": jnp.asarray(rng.integers(1, T + 1, tokens), jnp.int32),
        "query_segment_ids": segments[0],
        "key_value_segment_ids": segments[1],
        "query_positions": jnp.asarray(rng.permutation(T)[None], jnp.int32),
        "dropout_key": jax.random.key(3),
        "dropout_offset": (jnp.int32(5), 1, jnp.arange(T), 7),
    }
    inputs = {"query": q, "key": k, "value": v, "bias": 2 * draw(*bias, N, 1, S), "sink": draw(N)}
    return inputs, rest


def results(inputs, rest, cts):
    def call(inputs):
        return dot_product_attention(**inputs, **rest, **OPTIONS)

    out, pullback = jax.vjp(call, inputs)
    finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), out)
    return dict(zip(("out", "lse"), finite, strict=True)) | {
        f"d{name}": x for name, x in pullback(cts)[0].items()
    }


@thorough
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("bias", "tokens"),
    [((), (1, 2)), ((4, 1), (4, 1)), ((1, 2), (1, 1))],
    ids=["bias_shared", "bias_first", "bias_second"],
)
def test_parts_give_what_the_whole_gives(count, bias, tokens, rng, in_parts):
    inputs, rest = arrays(rng, bias, tokens)
    cts = tuple(jnp.asarray(rng.standard_normal(s)) for s in ((*BATCH, T, N, 2 * H), (*BATCH, T, N)))
    expected = jax.jit(results)(inputs, rest, cts)
    in_parts(count)
    got = jax.jit(lambda *args: results(*args))(inputs, rest, cts)
    assert_trees_close(got, expected, 1e-13)


@thorough
def test_second_order_and_vmap_in_parts(rng, in_parts):
    inputs, rest = arrays(rng, (4, 1), (1, 1))
    ct = jnp.asarray(rng.standard_normal((*BATCH, T, N, 2 * H)))
    mixed = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}

    def form(inputs):
        loss = lambda i: jnp.vdot(dot_product_attention(**i, **rest, **OPTIONS)[0], ct)
        return sum(jnp.vdot(x, mixed[n]) for n, x in jax.grad(loss)(inputs).items())

    def second(inputs):
        return jax.grad(form)(inputs) | {
            "mapped": jax.vmap(lambda key: form({**inputs, "key": key}))(
                jnp.stack([inputs["key"], 2 * inputs["key"]])
            )
        }

    expected = jax.jit(second)(inputs)
    in_parts(2)
    assert_trees_close(jax.jit(lambda i: second(i))(inputs), expected, 1e-11)


def test_vmap_turns_no_operand_to_the_order_of_the_parts(in_parts):
    in_parts(2)
    x = jnp.ones((3, *BATCH, T, N, H))
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda x: dot_product_attention(x, x, x)))(x))
    before, scan, _ = jaxpr.partition("scan[")
    assert scan
    assert "transpose" not in before


@thorough
def test_values_without_width_in_parts(in_parts):
    in_parts(2)
    q, v = jnp.ones((4, 8, 2, 3)), jnp.ones((4, 8, 2, 0))
    grads = jax.grad(lambda *x: dot_product_attention(*x).sum(), (0, 1, 2))(q, q, v)
    assert [g.shape for g in grads] == [q.shape, q.shape, v.shape]


def default_parts(batch, heads, T, S, head_size=1):
    x = Operands(*(jax.ShapeDtypeStruct((*batch, n, heads, head_size), jnp.float32) for n in (T, S, S)))
    return plan("xla", Options(scale=1.0), x).batch_slices


def test_few_keys_are_one_plane_of_a_few_entries(monkeypatch):
    """As many as four for each channel of a head, and not too many logits of an entry."""
    monkeypatch.setattr(jax, "device_count", lambda platform: 1)

    def schedule(batch, heads, T, S, H):
        x = (jax.ShapeDtypeStruct((batch, n, heads, H), jnp.float32) for n in (T, S, S))
        return plan("xla", Options(scale=1.0), Operands(*x)).schedule

    few = schedule(64, 8, 2048, 27, 80)
    assert isinstance(few, planning.Materialized)
    assert few.batch_slices == 32
    assert isinstance(schedule(64, 8, 2048, 320, 80), planning.Materialized)
    assert isinstance(schedule(64, 8, 2048, 328, 80), planning.Tiles)
    assert isinstance(schedule(1, 64, 2048, 128, 80), planning.Tiles)


def test_explicit_mesh_of_one_device(rng, monkeypatch):
    """Where the batch is sharded, if over one device, it stays whole; inside shard_map it is cut."""
    monkeypatch.setattr(jax, "device_count", lambda platform: 1)
    monkeypatch.setattr(planning, "TILE_LOGITS", 1 << 8)
    x = jnp.asarray(rng.standard_normal((3, 4, 16, 2, 8)))
    expected = jax.jit(dot_product_attention)(*x)
    mesh = jax.make_mesh((1, 1), ("x", "y"), devices=jax.devices()[:1], axis_types=2 * (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = PartitionSpec("x", None, "y")
        x = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a in x]
        whole = jax.jit(dot_product_attention)(*x)
        shards = jax.shard_map(lambda *x: dot_product_attention(*x), in_specs=spec, out_specs=spec)
        assert_trees_close(
            {"whole": whole, "parts": jax.jit(shards)(*x)}, {"whole": expected, "parts": expected}, 1e-13
        )


def test_how_many_parts(monkeypatch):
    assert default_parts((4,), 8, 512, 512) == 1  # a batch may be sharded over the devices here
    monkeypatch.setattr(jax, "device_count", lambda platform: 1)
    assert default_parts((4,), 8, 512, 512) == 4
    assert default_parts((24,), 8, 128, 128) == 3
    assert default_parts((16,), 8, 128, 128) == 1  # two parts would save nothing
    assert default_parts((6, 8), 1, 4096, 4096) == 6
    assert default_parts((), 8, 512, 512) == default_parts((1,), 64, 2048, 2048) == 1
    assert default_parts((10007,), 1, 4, 4) == default_parts((0,), 8, 512, 512) == 1
    assert default_parts((31,), 2, 256, 512) == 31
    assert default_parts((64,), 8, 16, 512, head_size=15) == 4
    assert default_parts((64,), 8, 16, 512, head_size=16) == 1  # as many numbers of keys as logits
