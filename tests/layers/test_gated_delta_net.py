"""`GatedDeltaNet` of each framework, by the published layer written out."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from jax.sharding import AxisType, PartitionSpec
from layers.frameworks import (
    FRAMEWORKS,
    assert_all_close,
    assert_tangents_agree,
    frameworks,
    imported,
    jitted,
    lenient,
    values_and_gradients,
)
from layers.gated_delta_net_cases import (
    HV,
    SHAPES,
    SIZES,
    TAPS,
    C,
    E,
    H,
    K,
    N,
    build,
    definition,
    numbers,
    of_zeros,
    torch_state,
    tree_of,
)

T = 9
TRANSFORMERS = [  # of four of the tokens
    [
        -7.018336285401204,
        9.099019290028068,
        -8.423978313017507,
        5.197655893685573,
        -0.3971742668636711,
        -4.523595340145813,
        8.074351348467456,
    ],
    [
        -8.470955899439536,
        9.5087722619323,
        -7.666767082904511,
        3.5028090385673942,
        1.7220078261542469,
        -6.425298347009293,
        9.182626541635246,
    ],
    [
        -3.743760622618281,
        3.733260997555592,
        -2.592107998458536,
        0.665910595491073,
        1.4619641244628547,
        -3.147069193132432,
        3.8790546155022536,
    ],
    [
        6.177700802967436,
        -2.329827422130076,
        -2.2236562113721927,
        6.103684546751269,
        -8.135154334698349,
        7.702815751669035,
        -4.937606623319605,
    ],
]


@cache
def drawn():
    """(parameters, tokens [3, T, E])."""
    rng = np.random.default_rng(0)
    return tree_of(torch_state(rng)), jnp.asarray(rng.standard_normal((3, T, E)))


@cache
def expected():
    """(outputs, gradients) of the definition, for all rows and all tokens."""
    with lenient():
        return jitted(partial(values_and_gradients, jax.vmap(definition, (None, 0))))(*drawn())


def alone(*rows):
    """What the definition makes of each of some stretches of tokens."""
    params = jax.tree.map(np.asarray, drawn()[0])
    return [definition(params, np.asarray(row), np) for row in rows]


def decoded(framework, pieces, **options):
    return jitted(build(framework, **options).decode)(drawn()[0], pieces)


def test_the_definition_is_the_layer_of_transformers():
    """Of its `Qwen3NextGatedDeltaNet` (5.24) in float64, with the same numbers."""
    state = {name: numbers(shape, 100 * i) for i, (name, shape) in enumerate(SHAPES.items())}
    tree = jax.tree.map(np.asarray, tree_of(state))
    out = definition(tree, numbers((70, E), 50), np)
    assert_close(out[[0, 1, 5, 69]], TRANSFORMERS, 1e-12)


@pytest.mark.parametrize("framework", frameworks("flax_linen", "haiku"))
def test_outputs_and_gradients_are_those_of_the_definition(framework):
    layer = build(framework)
    assert_all_close(jitted(partial(values_and_gradients, layer.call))(*drawn()), expected(), 1e-11)


@pytest.mark.parametrize("framework", frameworks())
def test_tangents_agree_with_the_gradients_of_the_definition(framework):
    layer = build(framework, forward_mode=True)
    assert_tangents_agree(layer.call, drawn(), *expected())


@pytest.mark.parametrize("framework", frameworks("flax_linen"))
def test_what_follows_moves_no_bit(framework):
    params, x = drawn()
    call = jitted(build(framework).call)
    np.testing.assert_array_equal(call(params, x.at[:, 5:].multiply(-9.0))[:, :5], call(params, x)[:, :5])


@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_a_prompt_and_then_token_by_token_is_the_whole(framework):
    _, x = drawn()
    outs = decoded(framework, [(x[:, :4], {}), *((x[:, t : t + 1], {}) for t in (4, 5))])
    assert_close(jnp.concatenate(outs, 1), np.stack(alone(*x))[:, :6], 1e-11)


@pytest.mark.parametrize("framework", frameworks("equinox"))
def test_rows_of_different_length_are_filled_together_and_decoded_on(framework):
    """What stands beyond a row's length is read by none, NaN included; a row may have nothing new."""
    _, x = drawn()
    whole = alone(*x)
    lengths = np.array([[3, 1, 0], [1, 0, 1]])  # of each call, of each row
    begins = np.cumsum(np.concatenate([np.zeros((1, 3), int), lengths]), 0)
    pieces = []
    for begin, length, size in zip(begins, lengths, (4, 1), strict=False):
        rows = [row[b : b + size] for row, b in zip(x, begin, strict=True)]
        real = (np.arange(size)[None] < length[:, None])[..., None]
        pieces.append((jnp.where(real, jnp.stack(rows), jnp.nan), {"seq_lengths": jnp.asarray(length)}))
    outs = decoded(framework, pieces)
    for row in range(3):
        kept = [out[row, : length[row]] for out, length in zip(outs, lengths, strict=True)]
        assert_close(np.concatenate(kept), whole[row][: lengths[:, row].sum()], 1e-11)
        for out, length in zip(outs, lengths, strict=True):
            np.testing.assert_array_equal(out[row, length[row] :], 0)


@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_each_document_is_as_if_it_were_alone(framework):
    """Also the last one of a call, which the next call goes on with."""
    x = drawn()[1][:2]
    ids = jnp.broadcast_to(jnp.asarray([3, 3, 3, 3, 5, 6, 6, 3, 3]), (2, T))
    rows = [np.concatenate(alone(row[:4], row[4:5], row[5:7], row[7:])) for row in x]
    pieces = [(x[:, :6], {"segment_ids": ids[:, :6]}), (x[:, 6:], {"segment_ids": ids[:, 6:]})]
    assert_close(np.concatenate(decoded(framework, pieces), 1), np.stack(rows), 1e-11)


@thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_documents_of_rows_of_different_length(framework):
    """The cache of a row holds what its last document has within its length."""
    _, x = drawn()
    ids, lengths = jnp.asarray([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]), jnp.asarray([4, 2, 0])
    told = {"seq_lengths": lengths, "segment_ids": ids}
    last = jnp.stack([x[0, 4:6], x[1, 2:4], x[2, :2]])
    outs = decoded(framework, [(x[:, :5], told), (last, {})])
    rows = alone(x[0, 2:6], x[1, 1:4], x[2, :2])
    assert_close(outs[1], np.stack([row[-2:] for row in rows]), 1e-11)


@thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_documents_without_a_cache(framework):
    params, x = drawn()
    ids = jnp.broadcast_to(jnp.asarray([3, 3, 3, 3, 5, 6, 6, 3, 3]), (3, T))
    rows = [np.concatenate(alone(row[:4], row[4:5], row[5:7], row[7:])) for row in x]
    assert_close(jitted(build(framework).call)(params, x, segment_ids=ids), np.stack(rows), 1e-11)


@thorough
def test_what_lies_beyond_the_lengths_reaches_no_gradient():
    params, x = drawn()
    lengths, layer = jnp.asarray([T, 5, 0]), build("flax_linen")
    real = (jnp.arange(T)[None] < lengths[:, None])[..., None]
    run = jitted(partial(values_and_gradients, lambda params, x: layer.call(params, x, seq_lengths=lengths)))
    got = run(params, jnp.where(real, x, jnp.nan))
    assert_all_close(got, run(params, jnp.where(real, x, 3.0)), 1e-13)
    np.testing.assert_array_equal(jnp.where(real, 0, got[1][1]), 0)


@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_bfloat16(framework):
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    params, x = narrow(drawn())
    flax = framework.startswith("flax")
    layer = build(framework, **({"dtype": jnp.bfloat16} if flax else {}))
    given = jax.tree.map(lambda x: x.astype(jnp.float32), params) if flax else params
    exact = [definition(jax.tree.map(np.asarray, wide(params)), np.asarray(row), np) for row in wide(x)]
    (out,) = jitted(layer.decode)(given, [(x, {})])
    assert out.dtype == jnp.bfloat16
    assert_close(out, np.stack(exact), 2e-2)


@thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_x64(framework):
    """Strict promotion finds a stray float64 or int64 constant."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32), drawn())
    with jax.enable_x64(False):
        layer = build(framework)
        got = jitted(partial(values_and_gradients, layer.call))(*narrow)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_all_close(got, expected(), 1e-4)


@pytest.mark.parametrize("framework", frameworks())
def test_initial_parameters(framework):
    options = {"dtype": jnp.float32} if framework == "equinox" else {}
    params = jitted(build(framework, **options).init)(jax.random.key(1))
    shapes = jax.tree.map(jnp.shape, tree_of({name: np.zeros(shape) for name, shape in SHAPES.items()}))
    assert jax.tree.map(jnp.shape, params) == shapes
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(params["norm"]["scale"], 1)
    step, rate = jax.nn.softplus(params["dt_bias"]), jnp.exp(params["A_log"])
    assert step.min() > 0.9e-3
    assert step.max() < 0.101
    assert rate.min() > 0.009
    assert rate.max() < 16.1
    assert 0.4 < jnp.abs(params["conv1d"]["kernel"]).max() <= TAPS**-0.5
    bound = float(np.sqrt(6 / (E + 2 * N)))
    assert 0.8 * bound < jnp.abs(params["in_proj_ba"]["kernel"]).max() < 1.001 * bound


@thorough
@pytest.mark.parametrize("framework", ["flax_linen", "haiku"])
def test_the_first_cache_is_empty(framework):
    """Also where it is made of tokens."""
    theirs, layers = imported(framework)
    x = drawn()[1].astype(jnp.float32)
    if framework == "flax_linen":
        cache = jitted(layers.GatedDeltaNet(*SIZES, decode=True).init)(jax.random.key(0), x)["cache"]
    else:
        model = theirs.transform_with_state(lambda x: layers.GatedDeltaNet(*SIZES, decode=True)(x))
        cache = jitted(model.init)(jax.random.key(0), x)[1]
    assert sorted(x.size for x in jax.tree.leaves(cache)) == sorted((3 * (TAPS - 1) * C, 3 * N * H * HV))
    for held in jax.tree.leaves(cache):
        np.testing.assert_array_equal(held, 0)


@thorough
@pytest.mark.parametrize("framework", ["flax_linen", "flax_nnx", "haiku"])
def test_a_batch_over_an_explicit_mesh(framework):
    params, x = drawn()
    x, ids = jnp.concatenate([x, x[:1]]), jnp.broadcast_to(jnp.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2]), (4, T))
    layer, lengths = build(framework), jnp.asarray([T, 5, 3, 0])
    told = {"segment_ids": ids, "seq_lengths": lengths}
    run = jitted(lambda x: layer.decode(params, [(x, told), (x[:, :1], {})]))
    on_one = run(x)
    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, PartitionSpec("batch"))
        outs = run(sharded)
    assert outs[0].sharding.spec[0] == "batch"
    assert_all_close(outs, on_one, 1e-11)


@thorough
def test_nnx_jit_goes_on_with_its_cache():
    nnx, _ = imported("flax_nnx")
    layer, x = _nnx_layer(SIZES, decode=True), drawn()[1]
    layer.init_cache(x.shape, x.dtype)
    step = nnx.jit(lambda layer, x: layer(x))
    outs = [step(layer, x[:, :4]), *(step(layer, x[:, t : t + 1]) for t in (4, 5))]
    assert_close(jnp.concatenate(outs, 1), np.stack(alone(*x))[:, :6], 1e-11)


WRONG = {
    "num_value_heads must be a multiple of num_key_heads = 2, got 3": dict(sizes=(2, 3, 4, 4)),
    "num_key_heads must be a positive int, got 0": dict(sizes=(0, 4, 4, 4)),
    "conv_kernel_dim must be a positive int, got 0": dict(conv_kernel_dim=0),
    "rms_norm_eps must be positive, got 0": dict(rms_norm_eps=0.0),
    "forward_mode must be a Python bool, got str": dict(forward_mode="no"),
    r"x must have shape \[\.\.\., T, 7\], got \(1, 9, 6\)": dict(x=np.zeros((1, T, 6))),
    r"x must have shape \[\.\.\., T, 7\], got \(7,\)": dict(x=np.zeros(7)),
    "x must be a floating-point array, got dtype int64": dict(x=np.zeros((1, T, E), int)),
    r"seq_lengths must lie in \[0, 9\], got 10 to 10": dict(seq_lengths=[10]),
    r"seq_lengths must broadcast to \[\.\.\.\] = \(1,\), got \(2,\)": dict(seq_lengths=np.array([1, 2])),
    r"segment_ids must broadcast to \[\.\.\., T\] = \(1, 9\), got \(8,\)": dict(segment_ids=np.zeros(8, int)),
    "segment_ids must be integers, got dtype float64": dict(segment_ids=np.zeros(T)),
    r"__init__\(\) got an unexpected keyword argument 'conv_size'": dict(conv_size=3),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    given = {"sizes": SIZES, "x": np.zeros((1, T, E)), **WRONG[message]}
    sizes, x = given.pop("sizes"), given.pop("x")
    tokens = {name: given.pop(name) for name in ("seq_lengths", "segment_ids") if name in given}
    with pytest.raises((TypeError, ValueError), match="GatedDeltaNet.*" + message):
        _nnx_layer(sizes, **given)(x, **tokens)


def _nnx_layer(sizes, **options):
    nnx, layers = imported("flax_nnx")
    layer = nnx.eval_shape(lambda: layers.GatedDeltaNet(E, *sizes, **options, rngs=nnx.Rngs(0)))
    nnx.update(layer, drawn()[0])
    return layer


def test_errors_of_a_cache():
    layer = _nnx_layer(SIZES)
    with pytest.raises(ValueError, match="GatedDeltaNet: the cache must be there to decode, got None; call"):
        layer(jnp.zeros((1, T, E)), decode=True)
    _, layers = imported("equinox")
    layer = of_zeros(lambda: layers.GatedDeltaNet(E, *SIZES, key=jax.random.key(0)))
    x, cache = jnp.zeros((T, E)), layer.init_cache()
    assert cache.conv_state.shape == (TAPS - 1, K, C // K)
    with pytest.raises(TypeError, match=r"cache must be a GatedDeltaNetCache, got tuple; begin with"):
        layer.decode(x, (1, 2))
    with pytest.raises(ValueError, match=r"cache\.recurrent_state must have shape that of the rows of x"):
        layer.decode(x, cache._replace(recurrent_state=jnp.zeros((N, HV, HV))))
    with pytest.raises(
        ValueError, match=r"x must have shape \[T, 7\], got \(1, 9, 7\); for a batch use jax\.vmap"
    ):
        layer(x[None])
    with pytest.raises(TypeError, match="dtype must be a floating dtype, got"):
        layer.init_cache(jnp.int32)
