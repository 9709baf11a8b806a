"""What travels, what is held, and who computes what."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, thorough
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, KINDS, LAYOUTS, TOKENS, draw, mesh

from jax_attn_bwd import dot_product_attention, parallel
from jax_attn_bwd.ops.dot_product import blockwise, visibility
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.visibility import Tokens
from jax_attn_bwd.parallel import ring

COLLECTIVE = re.compile(
    r"= [^=]*? (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def training_step(kind, n, positions=False, **options):
    """Gradients of all three, over n devices; positions are an argument where there are any."""
    attend = functools.partial(KINDS[kind], axis_name=AXIS, **options)

    def run(q, k, v, *at):
        at = dict.fromkeys(("query_positions", "key_value_positions"), *at) if at else {}
        return attend(q, k, v, **at)

    specs = (*(TOKENS,) * 3, *(P(AXIS),) * positions)
    sharded = jax.shard_map(run, mesh=mesh(n), in_specs=specs, out_specs=TOKENS)
    return jax.grad(lambda *x: sharded(*x).sum(), (0, 1, 2))


def collectives(kind, positions=False, **options) -> list[str]:
    x = jax.ShapeDtypeStruct((1, 32, 8, 4), jnp.float32)
    at = [jax.ShapeDtypeStruct((32,), jnp.int32)] * positions
    step = jax.jit(training_step(kind, 4, positions, **options), compiler_options=QUICK)
    return sorted(COLLECTIVE.findall(step.lower(x, x, x, *at).compile().as_text()))


def test_ring_moves_from_neighbour_to_neighbour_alone():
    """Forward: keys, values and positions. Backward: those, twice; dk and dv round, and home."""
    assert collectives("ring", positions=True, is_causal=True) == ["collective-permute"] * (3 + 6 + 4)


@thorough
def test_collectives_of_the_others():
    """One each way and array: keys and values, then again, and their gradients. A sum needs no `out`."""
    again = 2 if jax.__version_info__ >= (0, 11) else 0  # older XLA:CPU drops the barrier, and keeps them
    assert collectives("all_gather") == ["all-gather"] * (2 + again) + ["reduce-scatter"] * 2
    assert collectives("ulysses") == ["all-to-all"] * 7


@thorough
@pytest.mark.parametrize(("window", "steps"), [((3, 0), 2), ((9, 0), 3), ((2, 1), 3), ((0, 0), 1)])
def test_a_window_limits_the_steps(window, steps, rng):
    """Over the contiguous layout: keys of devices out of reach do not set out."""
    x = draw(rng, 1, 64, 2, 3)
    attend = functools.partial(KINDS["ring"], axis_name=AXIS, local_window_size=window)
    run = jax.shard_map(attend, mesh=mesh(8), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    text = str(jax.make_jaxpr(run)(x, x, x))
    lengths = [int(n) for n in re.findall(r"length=(\d+)", text.split("ppermute", 1)[-1])]
    assert ("ppermute" in text) == (steps > 1)
    assert not lengths or steps - 1 in [int(n) for n in re.findall(r"length=(\d+)", text)]


def temporary(step, T):
    x = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.float32)
    compiled = jax.jit(step, compiler_options=QUICK).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_sums_that_travel_are_wide(kind):
    """Gradients of narrow keys and values leave a device in float32; keys and values do not."""
    x = jax.ShapeDtypeStruct((1, 32, 2, 3), jnp.bfloat16)
    program = str(jax.make_jaxpr(training_step(kind, 4))(x, x, x))
    travelling = re.findall(r"^.*= (?:ppermute|reduce_scatter)\b", program, re.MULTILINE)
    assert any("f32[" in line for line in travelling)
    assert kind == "all_gather" or any("bf16[" in line for line in travelling)


@thorough
def test_memory_is_that_of_a_part():
    """Twice the devices hold twice the sequence, and each as much as before; far less than one would."""
    half, whole = (temporary(training_step("ring", n, is_causal=True), 2048 * n) for n in (4, 8))
    one = jax.grad(lambda *x: dot_product_attention(*x, is_causal=True).sum(), (0, 1, 2))
    assert abs(whole - half) <= 0.01 * half
    assert whole < 0.45 * temporary(one, 8 * 2048)  # 16 MiB of tiles on both sides


def executed(monkeypatch, layout, n=4, **options):
    """[device: (forward blocks, backward blocks) that ran]."""
    counts = np.zeros((n, 2), int)

    def counting(direction, function):
        def run(*args, **kwargs):
            def note(device):
                counts[device, direction] += 1

            jax.debug.callback(note, jax.lax.axis_index(AXIS))
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(ring.blockwise, "forward", counting(0, blockwise.forward))
    monkeypatch.setattr(ring.blockwise, "backward", counting(1, blockwise.backward))
    lay, _ = LAYOUTS[layout]
    jax.clear_caches()  # nothing is traced again that was without these
    x = np.random.default_rng(0).standard_normal((1, 8 * n, 2, 3))
    step = training_step("ring", n, True, **options)
    jax.block_until_ready(jax.jit(step)(x, x, x, lay(np.arange(8 * n), n=n, axis=0)))
    jax.effects_barrier()
    jax.clear_caches()
    return counts.tolist()


def test_steps_that_nothing_sees_are_skipped(monkeypatch):
    assert executed(monkeypatch, "contiguous", is_causal=True) == [[i + 1] * 2 for i in range(4)]


@thorough
def test_no_step_is_skipped_where_all_see_something(monkeypatch):
    assert executed(monkeypatch, "zigzag", is_causal=True) == [[4, 4]] * 4


@pytest.mark.parametrize(("layout", "spread"), [("zigzag", 0.1), ("striped", 0.1), ("contiguous", 1.0)])
def test_tiles_that_each_device_visits(layout, spread):
    """Causal, 8 devices, 256 tokens each in tiles of 32: those that the conditions call seen."""
    n, length, tile = 8, 256, 32
    lay, _ = LAYOUTS[layout]
    parts = lay(np.arange(n * length, dtype=np.int32), n=n, axis=0).reshape(n, length)

    def visited(rows, columns):
        some, _ = visibility.of_tiles(
            Mask(is_causal=True), Tokens(length, rows), Tokens(length, columns), tile, tile
        )
        return int(some.sum())

    tiles = [sum(visited(parts[i], parts[j]) for j in range(n)) for i in range(n)]
    mean = sum(tiles) / n
    assert max(abs(x - mean) for x in tiles) <= spread * mean
    if layout == "contiguous":
        assert max(tiles) > 1.7 * mean
    if layout == "zigzag":  # and no more than the triangle, with its diagonal, has
        side = n * length // tile
        assert sum(tiles) == side * (side + 1) // 2


def test_a_ring_weighs_the_keys_of_its_devices_where_logits_are_huge_and_alike():
    """lse rounds to 1e9 beside one key and beside three: what rounding took tells them apart."""
    bias = jnp.where(np.array([1, 0, 0, 0, 0, 1, 1, 1]) == 1, 1e9, -jnp.inf).astype(jnp.float32)
    attend = lambda q, k, v: parallel.ring_attention(q, k, v, bias[None, None, None], axis_name=AXIS)
    q, v = jnp.zeros((1, 2, 1, 1), jnp.float32), jnp.arange(8, dtype=jnp.float32)[None, :, None, None]
    run = jax.jit(jax.shard_map(attend, mesh=mesh(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS))
    np.testing.assert_allclose(run(q, jnp.zeros_like(v), v), (0 + 5 + 6 + 7) / 4, rtol=1e-6)
