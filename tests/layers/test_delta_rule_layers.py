"""`GatedDeltaNet` and `KimiDeltaAttention` of each framework, by the published layers written out."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from jax.sharding import AxisType, PartitionSpec
from layers.delta_rule_cases import CASES, GATED, TAPS, E, build, numbers, of_zeros, torch_state, tree_of
from layers.frameworks import (
    FRAMEWORKS,
    assert_all_close,
    assert_tangents_agree,
    imported,
    jitted,
    lenient,
    values_and_gradients,
)

T = 9
# Tokens 5 and 69 of `Qwen3NextGatedDeltaNet` and `KimiLinearDeltaAttention` (5.24), computed in float64.
# fmt: off
TRANSFORMERS = {
    "gated": [
        [-3.743760622618281, 3.733260997555592, -2.592107998458536, 0.665910595491073,
         1.4619641244628547, -3.147069193132432, 3.8790546155022536],
        [6.177700802967436, -2.329827422130076, -2.2236562113721927, 6.103684546751269,
         -8.135154334698349, 7.702815751669035, -4.937606623319605],
    ],
    "kimi": [
        [0.013967743411601452, -0.2297812392188241, -0.4428843494750093, -0.596920073304427,
         -0.6713447007436419, -0.6562322359117183, -0.5535982248561646],
        [0.27169066257337926, 0.14338659158148448, -0.004040916992705146, -0.15092948937326006,
         -0.27768862958360396, -0.3674124995041368, -0.408134646713174],
    ],
}
# fmt: on


def layers_of(gated=(), kimi=()):
    """Both layers in all frameworks as parameters; what is not named is left to the thorough tier."""
    named = {"gated": gated, "kimi": kimi}
    return pytest.mark.parametrize(
        ("layer", "framework"),
        [
            pytest.param(layer, framework, marks=() if framework in default else thorough)
            for layer, default in named.items()
            for framework in FRAMEWORKS
        ],
    )


@cache
def drawn(layer):
    """(parameters, tokens [3, T, E])."""
    rng = np.random.default_rng(0)
    return tree_of(torch_state(CASES[layer], rng)), jnp.asarray(rng.standard_normal((3, T, E)))


@cache
def expected(layer):
    """(outputs, gradients) of the definition, for all rows and all tokens."""
    of_rows = jax.vmap(CASES[layer].definition, (None, 0))
    with lenient():
        return jitted(partial(values_and_gradients, of_rows))(*drawn(layer))


def alone(layer, *rows):
    """What the definition makes of each of some stretches of tokens."""
    params = jax.tree.map(np.asarray, drawn(layer)[0])
    return [CASES[layer].definition(params, np.asarray(row), np) for row in rows]


def decoded(layer, framework, pieces, **options):
    return jitted(build(CASES[layer], framework, **options).decode)(drawn(layer)[0], pieces)


@pytest.mark.parametrize("layer", CASES)
def test_the_definition_is_the_layer_of_transformers(layer):
    case = CASES[layer]
    state = {name: numbers(shape, 100 * i) for i, (name, shape) in enumerate(case.shapes.items())}
    tree = jax.tree.map(np.asarray, tree_of(state))
    out = case.definition(tree, numbers((70, E), 50), np)
    assert_close(out[[5, 69]], TRANSFORMERS[layer], 1e-12)


@layers_of(gated=("flax_linen",), kimi=("haiku",))
def test_outputs_and_gradients_are_those_of_the_definition(layer, framework):
    call = build(CASES[layer], framework).call
    got = jitted(partial(values_and_gradients, call))(*drawn(layer))
    assert_all_close(got, expected(layer), 1e-11)


@layers_of()
def test_tangents_agree_with_the_gradients_of_the_definition(layer, framework):
    call = build(CASES[layer], framework, forward_mode=True).call
    assert_tangents_agree(call, drawn(layer), *expected(layer))


@layers_of(gated=("flax_linen",))
def test_what_follows_moves_no_bit(layer, framework):
    params, x = drawn(layer)
    call = jitted(build(CASES[layer], framework).call)
    np.testing.assert_array_equal(call(params, x.at[:, 5:].multiply(-9.0))[:, :5], call(params, x)[:, :5])


@layers_of(kimi=("flax_nnx",))
def test_a_prompt_and_then_token_by_token_is_the_whole(layer, framework):
    _, x = drawn(layer)
    outs = decoded(layer, framework, [(x[:, :4], {}), *((x[:, t : t + 1], {}) for t in (4, 5))])
    assert_close(jnp.concatenate(outs, 1), np.stack(alone(layer, *x))[:, :6], 1e-11)


@layers_of(gated=("equinox",))
def test_rows_of_different_length_are_filled_together_and_decoded_on(layer, framework):
    """What stands beyond a row's length is read by none, NaN included; a row may have nothing new."""
    _, x = drawn(layer)
    whole = alone(layer, *x)
    lengths = np.array([[3, 1, 0], [1, 0, 1]])  # of each call, of each row
    begins = np.cumsum(np.concatenate([np.zeros((1, 3), int), lengths]), 0)
    pieces = []
    for begin, length, size in zip(begins, lengths, (4, 1), strict=False):
        rows = [row[b : b + size] for row, b in zip(x, begin, strict=True)]
        real = (np.arange(size)[None] < length[:, None])[..., None]
        pieces.append((jnp.where(real, jnp.stack(rows), jnp.nan), {"seq_lengths": jnp.asarray(length)}))
    outs = decoded(layer, framework, pieces)
    for row in range(3):
        kept = [out[row, : length[row]] for out, length in zip(outs, lengths, strict=True)]
        assert_close(np.concatenate(kept), whole[row][: lengths[:, row].sum()], 1e-11)
        for out, length in zip(outs, lengths, strict=True):
            np.testing.assert_array_equal(out[row, length[row] :], 0)


@layers_of(gated=("flax_nnx",))
def test_each_document_is_as_if_it_were_alone(layer, framework):
    """Also the last one of a call, which the next call goes on with."""
    x = drawn(layer)[1][:2]
    ids = jnp.broadcast_to(jnp.asarray([3, 3, 3, 3, 5, 6, 6, 3, 3]), (2, T))
    rows = [np.concatenate(alone(layer, row[:4], row[4:5], row[5:7], row[7:])) for row in x]
    pieces = [(x[:, :6], {"segment_ids": ids[:, :6]}), (x[:, 6:], {"segment_ids": ids[:, 6:]})]
    assert_close(np.concatenate(decoded(layer, framework, pieces), 1), np.stack(rows), 1e-11)


@layers_of()
def test_documents_of_rows_of_different_length(layer, framework):
    """The cache of a row holds what its last document has within its length."""
    _, x = drawn(layer)
    ids, lengths = jnp.asarray([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]), jnp.asarray([4, 2, 0])
    told = {"seq_lengths": lengths, "segment_ids": ids}
    last = jnp.stack([x[0, 4:6], x[1, 2:4], x[2, :2]])
    outs = decoded(layer, framework, [(x[:, :5], told), (last, {})])
    rows = alone(layer, x[0, 2:6], x[1, 1:4], x[2, :2])
    assert_close(outs[1], np.stack([row[-2:] for row in rows]), 1e-11)


@layers_of()
def test_documents_without_a_cache(layer, framework):
    params, x = drawn(layer)
    ids = jnp.broadcast_to(jnp.asarray([3, 3, 3, 3, 5, 6, 6, 3, 3]), (3, T))
    rows = [np.concatenate(alone(layer, row[:4], row[4:5], row[5:7], row[7:])) for row in x]
    call = build(CASES[layer], framework).call
    assert_close(jitted(call)(params, x, segment_ids=ids), np.stack(rows), 1e-11)


@thorough
@pytest.mark.parametrize("layer", CASES)
def test_what_lies_beyond_the_lengths_reaches_no_gradient(layer):
    params, x = drawn(layer)
    lengths, call = jnp.asarray([T, 5, 0]), build(CASES[layer], "flax_linen").call
    real = (jnp.arange(T)[None] < lengths[:, None])[..., None]
    run = jitted(partial(values_and_gradients, lambda params, x: call(params, x, seq_lengths=lengths)))
    got = run(params, jnp.where(real, x, jnp.nan))
    assert_all_close(got, run(params, jnp.where(real, x, 3.0)), 1e-13)
    np.testing.assert_array_equal(jnp.where(real, 0, got[1][1]), 0)


@layers_of(gated=("flax_nnx",))
def test_bfloat16(layer, framework):
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    params, x = narrow(drawn(layer))
    flax, definition = framework.startswith("flax"), CASES[layer].definition
    decode = build(CASES[layer], framework, **({"dtype": jnp.bfloat16} if flax else {})).decode
    given = jax.tree.map(lambda x: x.astype(jnp.float32), params) if flax else params
    exact = [definition(jax.tree.map(np.asarray, wide(params)), np.asarray(row), np) for row in wide(x)]
    (out,) = jitted(decode)(given, [(x, {})])
    assert out.dtype == jnp.bfloat16
    assert_close(out, np.stack(exact), 2e-2)


@layers_of()
def test_without_x64(layer, framework):
    """Strict promotion finds a stray float64 or int64 constant."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32), drawn(layer))
    with jax.enable_x64(False):
        got = jitted(partial(values_and_gradients, build(CASES[layer], framework).call))(*narrow)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_all_close(got, expected(layer), 1e-4)


@layers_of()
def test_initial_parameters(layer, framework):
    case, options = CASES[layer], {"dtype": jnp.float32} if framework == "equinox" else {}
    params = jitted(build(case, framework, **options).init)(jax.random.key(1))
    shapes = jax.tree.map(jnp.shape, tree_of({name: np.zeros(shape) for name, shape in case.shapes.items()}))
    assert jax.tree.map(jnp.shape, params) == shapes
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    norm, projection, least = {"gated": ("norm", "in_proj_ba", 0.01), "kimi": ("o_norm", "k_proj", 1)}[layer]
    np.testing.assert_array_equal(params[norm]["scale"], 1)
    step, rate = jax.nn.softplus(params["dt_bias"]), jnp.exp(params["A_log"])
    assert step.min() > 0.9e-3
    assert step.max() < 0.101
    assert rate.min() > 0.9 * least
    assert rate.max() < 16.1
    assert 0.4 < jnp.abs(params["conv1d"]["kernel"]).max() <= TAPS**-0.5
    kernel = params[projection]["kernel"]
    bound = float(np.sqrt(6 / sum(kernel.shape)))
    assert 0.8 * bound < jnp.abs(kernel).max() < 1.001 * bound


@thorough
@pytest.mark.parametrize("framework", ["flax_linen", "haiku"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_cache_is_empty(case, framework):
    """Also where it is made of tokens."""
    theirs, layers = imported(framework)
    x = drawn("gated")[1].astype(jnp.float32)
    made = lambda: getattr(layers, case.layer)(*case.sizes, decode=True)
    if framework == "flax_linen":
        cache = jitted(made().init)(jax.random.key(0), x)["cache"]
    else:
        cache = jitted(theirs.transform_with_state(lambda x: made()(x)).init)(jax.random.key(0), x)[1]
    shapes = {(3, TAPS - 1, *case.row), (3, *case.state)}
    assert {x.shape for x in jax.tree.leaves(cache)} == shapes
    for held in jax.tree.leaves(cache):
        np.testing.assert_array_equal(held, 0)


@thorough
@pytest.mark.parametrize("framework", ["flax_linen", "flax_nnx", "haiku"])
@pytest.mark.parametrize("layer", CASES)
def test_a_batch_over_an_explicit_mesh(layer, framework):
    params, x = drawn(layer)
    x, ids = jnp.concatenate([x, x[:1]]), jnp.broadcast_to(jnp.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2]), (4, T))
    decode, lengths = build(CASES[layer], framework).decode, jnp.asarray([T, 5, 3, 0])
    told = {"segment_ids": ids, "seq_lengths": lengths}
    run = jitted(lambda x: decode(params, [(x, told), (x[:, :1], {})]))
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
    layer, x = _nnx_layer("gated", GATED.sizes, decode=True), drawn("gated")[1]
    layer.init_cache(x.shape, x.dtype)
    step = nnx.jit(lambda layer, x: layer(x))
    outs = [step(layer, x[:, :4]), *(step(layer, x[:, t : t + 1]) for t in (4, 5))]
    assert_close(jnp.concatenate(outs, 1), np.stack(alone("gated", *x))[:, :6], 1e-11)


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


OF_KIMI = {
    "num_heads must be a positive int, got 0": dict(sizes=(0, 4)),
    "head_dim must be a positive int, got float": dict(sizes=(2, 2.5)),
    "rms_norm_eps must be positive, got 0": dict(rms_norm_eps=0.0),
    r"seq_lengths must lie in \[0, 9\], got 10 to 10": dict(seq_lengths=[10]),
    r"__call__\(\) got an unexpected keyword argument 'causal'; leave it out": dict(causal=True),
}
ERRORS = [*(("gated", message, given) for message, given in WRONG.items())]
ERRORS += [("kimi", message, given) for message, given in OF_KIMI.items()]


@pytest.mark.parametrize(
    ("layer", "message", "given"), ERRORS, ids=lambda x: "" if isinstance(x, dict) else x
)
def test_errors(layer, message, given):
    given = {"sizes": CASES[layer].sizes, "x": np.zeros((1, T, E)), **given}
    sizes, x = given.pop("sizes"), given.pop("x")
    tokens = {n: given.pop(n) for n in ("seq_lengths", "segment_ids", "causal") if n in given}
    with pytest.raises((TypeError, ValueError), match=f"{CASES[layer].layer}.*{message}"):
        _nnx_layer(layer, sizes, **given)(x, **tokens)


def _nnx_layer(layer, sizes, **options):
    nnx, layers = imported("flax_nnx")
    kind = getattr(layers, CASES[layer].layer)
    made = nnx.eval_shape(lambda: kind(E, *sizes, **options, rngs=nnx.Rngs(0)))
    nnx.update(made, drawn(layer)[0])
    return made


@pytest.mark.parametrize("layer", CASES)
def test_errors_of_a_cache(layer):
    case = CASES[layer]
    with pytest.raises(ValueError, match=f"{case.layer}: the cache must be there to decode, got None; call"):
        _nnx_layer(layer, case.sizes)(jnp.zeros((1, T, E)), decode=True)
    _, layers = imported("equinox")
    made = of_zeros(lambda: getattr(layers, case.layer)(E, *case.sizes, key=jax.random.key(0)))
    x, cache = jnp.zeros((T, E)), made.init_cache()
    assert cache.conv_state.shape == (TAPS - 1, *case.row)
    with pytest.raises(TypeError, match=rf"cache must be a {case.layer}Cache, got tuple; begin with"):
        made.decode(x, (1, 2))
    with pytest.raises(ValueError, match=r"cache\.recurrent_state must have shape that of the rows of x"):
        made.decode(x, cache._replace(recurrent_state=jnp.zeros((3, 2, 2))))
    with pytest.raises(
        ValueError, match=r"x must have shape \[T, 7\], got \(1, 9, 7\); for a batch use jax\.vmap"
    ):
        made(x[None])
    with pytest.raises(TypeError, match="dtype must be a floating dtype, got"):
        made.init_cache(jnp.int32)
