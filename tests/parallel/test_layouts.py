"""Orders of tokens, and back."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, KINDS, LAYOUTS, mesh

from jax_attn_bwd import Rotary, attention_fn, dot_product_attention, parallel
from jax_attn_bwd.parallel.layouts import positions


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize(
    ("shape", "n", "axis"), [((3, 24, 2), 4, 1), ((24,), 1, 0), ((2, 5, 36), 6, -1), ((0,), 2, 0)]
)
def test_inverses(layout, shape, n, axis):
    lay, back = LAYOUTS[layout]
    x = np.arange(np.prod(shape)).reshape(shape)
    assert isinstance(lay(x, n, axis), np.ndarray)
    np.testing.assert_array_equal(back(lay(x, n, axis), n, axis), x)
    np.testing.assert_array_equal(lay(back(x, n, axis), n, axis), x)
    on_device = jax.jit(lambda x: lay(x, n, axis))(jnp.asarray(x))
    np.testing.assert_array_equal(on_device, lay(x, n, axis))


def test_parts():
    tokens = np.arange(12)
    assert parallel.zigzag(tokens, 3).reshape(3, 4).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert parallel.striped(tokens, 3).reshape(3, 4).tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_layout_is_told_by_the_word_that_makes_it(kind, layout, rng):
    """The bits are those of positions laid out alike, queries and keys of other lengths among them."""
    n, (lay, back), tokens = 4, LAYOUTS[layout], P(None, AXIS)
    q, k = (jnp.asarray(rng.standard_normal((1, length, 4, 3))) for length in (16, 24))
    at = [lay(np.arange(x.shape[1], dtype=np.int32), n) for x in (q, k)]
    options = dict(axis_name=AXIS, is_causal=True, key_value_seq_lengths=jnp.array([19]))

    def run(*args, **told):
        attend = lambda q, k, *at: KINDS[kind](
            q,
            k,
            k,
            **options,
            **told,
            **dict(zip(("query_positions", "key_value_positions"), at)),  # noqa: B905
        )
        specs = (tokens, tokens, P(AXIS), P(AXIS))[: 2 + len(args)]
        attend = jax.shard_map(attend, mesh=mesh(n), in_specs=specs, out_specs=tokens)
        return jax.jit(attend)(lay(q, n, 1), lay(k, n, 1), *args)

    got = run(layout=layout)
    np.testing.assert_array_equal(got, run(*at))
    expected = dot_product_attention(q, k, k, is_causal=True, key_value_seq_lengths=jnp.array([19]))
    assert_close(back(got, n, 1), expected, 1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("layout", [parallel.zigzag, parallel.striped], ids=lambda layout: layout.__name__)
def test_positions_are_those_of_the_tokens(layout, n):
    parts = layout(np.arange(4 * n), n).reshape(n, 4)
    for device in range(n):
        np.testing.assert_array_equal(positions("test", layout.__name__, n, device, 4), parts[device])


def test_a_device_holds_two_whole_pieces():
    with pytest.raises(ValueError, match=r"the sequence must have a multiple of 2n tokens .* got 12; pad it"):
        positions("ring_attention", "zigzag", 4, 0, 3)


def test_a_layout_over_a_mesh_turns_and_hides_by_positions(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, 16, 2, 4))) for _ in range(2))
    attend = parallel.attention_fn(mesh(4), sequence=AXIS, layout="zigzag")
    options = dict(is_causal=True, rotary=Rotary(), deterministic=True)
    lay = partial(parallel.zigzag, n=4, axis=1)
    got = parallel.unzigzag(attend(lay(q), lay(k), lay(k), **options), 4, 1)
    assert_close(got, attention_fn(q, k, k, **options), 1e-12)
    with pytest.raises(ValueError, match="query_positions must be left out with layout='zigzag'"):
        attend(q, k, k, query_positions=jnp.arange(16))
    with pytest.raises(ValueError, match="rope must be left out with layout='zigzag'"):
        attend(q, k, k, rope=lambda x, at: x)
    with pytest.raises(ValueError, match="sequence must be given with layout='striped'"):
        parallel.attention_fn(mesh(4), batch=AXIS, layout="striped")
    with pytest.raises(ValueError, match="layout must be one of"):
        parallel.attention_fn(mesh(4), sequence=AXIS, layout="zig-zag")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: parallel.zigzag(np.arange(12), 4),
            ValueError,
            r"zigzag: x must have a multiple of 2n = 8 tokens",
        ),
        (
            lambda: parallel.unstriped(np.arange(12), 5),
            ValueError,
            r"unstriped: x must have a multiple of n = 5",
        ),
        (lambda: parallel.striped(np.arange(12), 0), ValueError, r"striped: n must be a positive int, got 0"),
        (
            lambda: parallel.unzigzag(np.arange(12), 2, 1),
            ValueError,
            r"unzigzag: axis must be one of the 1 axes",
        ),
        (
            lambda: parallel.zigzag(np.arange(12), 2.0),
            TypeError,
            r"zigzag: n must be a positive int, got float",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
