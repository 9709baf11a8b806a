"""`parallel.attention_fn`: models train sharded with the loss and the gradients of one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel.sequences import draw

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention, mods, parallel
from jax_attn_bwd.parallel.arguments import beginning_at

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

SHAPE, AXES = (2, 2, 2), ("data", "model", "sequence")
B, T, E, N = 4, 16, 8, 4


@contextlib.contextmanager
def lenient():
    """Flax promotes dtypes and ranks implicitly."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def mesh(axis_type: str) -> Mesh:
    return jax.make_mesh(SHAPE, AXES, axis_types=(getattr(AxisType, axis_type),) * 3)


def sharded(on, kind="ring", batch="data"):
    return parallel.attention_fn(on, batch=batch, heads="model", sequence="sequence", kind=kind)


def linen_step(attention_fn, x, y):
    """(loss, gradients) with dropout and a mask of T x T."""
    options = dict(num_heads=N, param_dtype="float64", dropout_rate=0.2)
    layer = nn.MultiHeadDotProductAttention(**options, attention_fn=attention_fn)
    params = nn.MultiHeadDotProductAttention(**options).init(
        jax.random.key(0), np.zeros((B, T, E)), deterministic=True
    )

    def loss(params, x, y):
        mask = nn.make_causal_mask(x[..., 0])
        out = layer.apply(params, x, mask=mask, deterministic=False, rngs={"dropout": jax.random.key(3)})
        return ((out - y) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params, x, y)


def nnx_step(attention_fn, x, y):
    """(loss, gradients) with grouped heads, causal."""
    options = dict(num_kv_heads=2, decode=False, param_dtype="float64")
    layer = nnx.MultiHeadAttention(N, E, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)

    def loss(state, x, y):
        return ((nnx.merge(graph, state)(x, is_causal=True) - y) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(state, x, y)


@pytest.mark.parametrize(
    ("step", "axis_type", "kind"),
    [
        pytest.param(linen_step, "Explicit", "ring", marks=thorough),
        (nnx_step, "Auto", "ring"),
        pytest.param(nnx_step, "Explicit", "ring", marks=thorough),
        pytest.param(linen_step, "Auto", "ulysses", marks=thorough),
        pytest.param(linen_step, "Explicit", "all_gather", marks=thorough),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_model_trains_as_on_one_device(step, axis_type, kind, rng):
    x, y, on = draw(rng, B, T, E), draw(rng, B, T, E), mesh(axis_type)
    with lenient():
        expected = step(jax_attn_bwd.attention_fn, x, y)
        with jax.set_mesh(on):
            place = lambda x: jax.device_put(x, NamedSharding(on, P("data")))
            got = step(sharded(on, kind), place(x), place(y))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), got, expected)


@thorough
@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
def test_all_that_tokens_are_told(kind, rng):
    """Each argument is sharded like what it tells of; eagerly, as an init calls it."""
    on = mesh("Auto")
    q, k, v = (draw(rng, B, T, N, 3) for _ in range(3))
    bias = draw(rng, B, N, T, T)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), axis=1))
    told = dict(
        query_segment_ids=ids, key_value_segment_ids=ids, key_value_seq_lengths=jnp.array([16, 9, 12, 1])
    )
    zigzag = functools.partial(parallel.zigzag, n=2)
    lay = lambda x, axis=1: zigzag(x, axis=axis)
    laid = {name: lay(x) if x.ndim > 1 else x for name, x in told.items()}
    at = zigzag(np.arange(T))
    options = dict(is_causal=True, dropout_rng=jax.random.key(0), dropout_rate=0.3, broadcast_dropout=False)
    got = sharded(on, kind)(
        lay(q),
        lay(k),
        lay(v),
        lay(lay(bias, 2), 3),
        **laid,
        query_positions=at,
        key_value_positions=at,
        **options,
    )
    expected = jax_attn_bwd.attention_fn(q, k, v, bias, **told, **options)
    assert_close(parallel.unzigzag(got, 2, 1), expected, 1e-12)


@thorough
def test_several_axes_for_the_batch_and_none_for_the_sequence(rng):
    q = draw(rng, 8, 6, N, 3)
    attend = parallel.attention_fn(mesh("Auto"), batch=("data", "sequence"), heads="model")
    assert_close(attend(q, q, q), dot_product_attention(q, q, q), 1e-13)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda on: parallel.attention_fn(on, batch="rows"),
            ValueError,
            r"batch must name axes of the mesh, got 'rows'",
        ),
        (
            lambda on: parallel.attention_fn(on, sequence="time"),
            ValueError,
            r"sequence must name an axis of the mesh",
        ),
        (
            lambda on: parallel.attention_fn(on, sequence="sequence", kind="rings"),
            ValueError,
            r"kind must be one of",
        ),
        (
            lambda on: sharded(on)(*[jnp.zeros((4, 15, 4, 3))] * 3),
            ValueError,
            r"the queries T must be a multiple of 2, got 15; .*'sequence'",
        ),
        (
            lambda on: sharded(on)(*[jnp.zeros((3, 16, 4, 3))] * 3),
            ValueError,
            r"the batch must be a multiple of 2, got 3",
        ),
        (
            lambda on: sharded(on)(*[jnp.zeros((4, 16, 3, 3))] * 3),
            ValueError,
            r"query heads N must be a multiple of 2",
        ),
        (lambda on: sharded(on)(*[jnp.zeros((16, 4, 3))] * 3), ValueError, r"query must have a batch axis"),
        (
            lambda on: sharded(on)(*[jnp.zeros((4, 16, 4, 3))] * 3, module=object()),
            NotImplementedError,
            r"module must be None over a mesh",
        ),
        (
            lambda on: sharded(on, "ulysses")(*[jnp.zeros((4, 16, 2, 3))] * 3),
            ValueError,
            r"key heads K must be a multiple of the 2 devices along 'sequence', got 1; use ring",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(mesh("Auto"))


def test_functions_count_from_the_first_entry_and_head_of_a_device():
    mask = lambda batch, head, row, column, x: (batch, head, row, column, x)
    score = lambda logits, *at: (logits, *at)
    given = beginning_at(20, 30, mask, score, ("x",))
    assert given["mask_mod"](1, 2, 3, 4, *given["mod_args"]) == (21, 32, 3, 4, "x")
    assert given["score_mod"](0.5, 1, 2, 3, 4, *given["mod_args"]) == (0.5, 21, 32, 3, 4, "x")


def test_entries_of_the_batch_are_counted_over_the_devices():
    v = jnp.arange(8.0).reshape(4, 2, 1, 1)
    chosen = np.array([0, 1, 1, 0], np.int32)
    one = lambda batch, head, row, column, chosen: column == chosen[batch]
    attend = parallel.attention_fn(Mesh(jax.devices()[:2], ("data",)), batch="data")
    out = attend(0 * v, 0 * v, v, mask_mod=one, mod_args=(chosen,))
    np.testing.assert_array_equal(out[:, 1].ravel(), 2 * np.arange(4) + chosen)


@thorough
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_functions_count_in_the_whole(kind, rng):
    """Masks and scores by batch entry and head, as on one device; gradients of what they read."""
    q, k, v, dout = (draw(rng, B, T, N, 3) for _ in range(4))
    slopes, reach = draw(rng, N), jnp.asarray(rng.integers(1, 9, B), jnp.int32)

    def near(batch, head, row, column, reach, slopes):
        return jnp.abs(row - column) <= reach[batch] + head

    functions = dict(mask_mod=near, score_mod=mods.alibi)

    def gradients(attend, slopes):
        out = lambda q, slopes: attend(q, k, v, **functions, mod_args=(reach, slopes))
        result, pullback = jax.vjp(out, q, slopes)
        return result, *pullback(dout)

    attends = sharded(mesh("Auto"), kind), jax_attn_bwd.attention_fn
    got, expected = (
        jax.jit(functools.partial(gradients, attend), compiler_options=QUICK)(slopes) for attend in attends
    )
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-12)
