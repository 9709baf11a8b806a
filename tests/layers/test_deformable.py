"""`MultiScaleDeformableAttention` of each framework, by the definition."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.deformable_cases import (
    CASES,
    LEVELS,
    NAMES,
    B,
    C,
    L,
    M,
    Q,
    arguments_of,
    build,
    definition,
    inputs,
    torch_state,
)
from layers.frameworks import (
    FRAMEWORKS,
    assert_all_close,
    assert_tangents_agree,
    frameworks,
    jitted,
    values_and_gradients,
)

from jax_attn_bwd import parallel
from jax_attn_bwd.layers.deformable import from_torch


@cache
def expected(case):
    """The definition's output and gradients."""
    options, params, (*arrays, mask) = arguments_of(case)
    function = partial(definition, mask=mask, **options)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jitted(partial(values_and_gradients, function))(params, *arrays)


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        *(
            pytest.param("flax_linen", case, marks=() if case == "ragged_boxes" else thorough)
            for case in CASES
        ),
        ("flax_nnx", "ragged_boxes"),
        pytest.param("haiku", "ragged_boxes", marks=thorough),
        ("equinox", "ragged_boxes"),
        *(pytest.param(f, "not_projected", marks=thorough) for f in FRAMEWORKS if f != "flax_linen"),
    ],
)
def test_output_and_gradients_are_those_of_the_definition(framework, case):
    """The geometry is shared code: one framework shows it, and one case that the others agree."""
    options, params, (*arrays, mask) = arguments_of(case)
    layer = build(framework, **options)
    function = lambda *arrays: layer.call(*arrays, LEVELS, mask)
    got = jitted(partial(values_and_gradients, function))(params, *arrays)
    assert_all_close(got, expected(case), 1e-12)


@pytest.mark.parametrize("framework", frameworks("flax_linen"))
def test_tangents_agree_with_the_gradients_of_the_definition(framework):
    case = "ragged_boxes"
    options, params, (*arrays, mask) = arguments_of(case)
    layer = build(framework, forward_mode=True, **options)
    assert_tangents_agree(lambda *x: layer.call(*x, LEVELS, mask), (params, *arrays), *expected(case))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_initial_offsets(framework):
    """Two heads look right and left, whatever the query; point p + 1 pixels far."""
    layer = build(framework)
    offsets = jitted(lambda key: layer.init(key)["sampling_offsets"])(jax.random.key(0))
    assert_close(offsets["bias"], np.array([[(x * p, 0) for p in (1, 2)] * L for x in (1, -1)]).ravel(), 1e-7)
    assert not offsets["kernel"].any()


@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_initial_values(framework):
    """Head m looks in the m-th of eight directions, point p + 1 pixels far; the projections are Xavier's."""
    width, counts = 32, (2, 1, 3)
    params = build(framework, num_heads=8, width=width, num_points=counts).init(jax.random.key(1))
    compass = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    steps = [step for P in counts for step in range(1, P + 1)]
    bias = np.array([[(x * step, y * step) for step in steps] for x, y in compass], float)
    assert_close(params["sampling_offsets"]["bias"], bias.ravel(), 1e-7)
    sizes = dict(zip(NAMES, (2 * 8 * 6, 8 * 6, width, width), strict=True))
    for name, size in sizes.items():
        assert params[name]["kernel"].shape == (width, size)
        if name != "sampling_offsets":
            np.testing.assert_array_equal(params[name]["bias"], np.zeros(size))
    for name in ("sampling_offsets", "attention_weights"):
        np.testing.assert_array_equal(params[name]["kernel"], 0)
    bound = np.sqrt(6 / (2 * width))
    kernels = [np.asarray(params[name]["kernel"]) for name in ("value_proj", "output_proj")]
    for kernel in kernels:
        assert 0.95 * bound < np.abs(kernel).max() <= bound
        assert abs(kernel.std() / (bound / np.sqrt(3)) - 1) < 0.05
    assert (kernels[0] != kernels[1]).all()


@pytest.mark.parametrize("framework", frameworks("haiku"))
def test_bfloat16_layer_samples_where_the_float32_layer_does(rng, framework):
    """Offsets, locations and logits are float32; only the projections of values are bfloat16."""
    narrow = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    query, points, value, _ = inputs(rng)
    query, value, points = narrow(query), narrow(value), wide(points)
    params = wide(narrow(from_torch(torch_state(rng))))  # numbers that both dtypes hold
    flax, exact = framework.startswith("flax"), build(framework)
    layer = build(framework, **({"dtype": jnp.bfloat16} if flax else {}))
    narrow_params = params if flax else narrow(params)
    if framework == "haiku":  # makes parameters in the dtype of a layer's input
        narrow_params |= {name: params[name] for name in NAMES[:2]}

    got = layer.call(narrow_params, query, points, LEVELS, method="sampling_locations")
    expected = exact.call(params, wide(query), points, LEVELS, method="sampling_locations")
    assert got.dtype == jnp.float32
    assert got.shape == (B, Q, M, 2 * L, 2)
    np.testing.assert_array_equal(got, expected)
    assert (np.asarray(got.astype(jnp.bfloat16), np.float32) != np.asarray(got)).any()

    out = jitted(lambda *arrays: layer.call(*arrays, LEVELS))(narrow_params, query, points, value)
    assert out.dtype == jnp.bfloat16
    wider = jitted(lambda *arrays: exact.call(*arrays, LEVELS))
    assert_close(out, wider(params, wide(query), points, wide(value)), 3e-2)


def test_haiku_policy_of_a_module_around_leaves_locations_in_float32(rng):
    hk = pytest.importorskip("haiku")
    import jmp

    from jax_attn_bwd.layers.haiku import MultiScaleDeformableAttention

    points = jnp.asarray(rng.uniform(0, 1, (1, Q, 2)), jnp.float32)

    class Model(hk.Module):
        def __call__(self, query):
            layer = MultiScaleDeformableAttention(M, C, num_levels=L, num_points=1)
            return layer.sampling_locations(query, points, LEVELS), query

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    model = hk.without_apply_rng(hk.transform(lambda query: Model()(query)))
    query = jnp.asarray(rng.standard_normal((1, Q, C)), jnp.float32)
    with hk.mixed_precision.push_policy(Model, policy), jax.numpy_dtype_promotion("standard"):
        locations, rounded = model.apply(model.init(jax.random.key(0), query), query)
    assert (rounded != query).any()  # the policy is at work
    sizes = np.array(LEVELS)[:, ::-1]
    directions = np.array([[1.0, 0.0], [-1.0, 0.0]])[:, None]  # one for each of two heads
    expected = np.asarray(points)[:, :, None, None] + directions / sizes  # [1, Q, M, L, 2]
    assert_close(locations, expected, 1e-6)


def test_padding_is_masked_and_its_nan_reaches_nothing(rng):
    """True = keep. The poison is in the input of `value_proj`: its kernel's gradient multiplies by it."""
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    poisoned = jnp.where(mask[..., None], value, jnp.nan)

    @jitted
    def run(value):
        function = lambda *arrays: layer.call(*arrays, LEVELS, mask)
        return values_and_gradients(function, params, query, points, value)

    out, grads = run(value)
    assert_all_close(run(poisoned), (out, grads), 1e-14)
    kept = (np.asarray(grads[3]) != 0).any(-1)
    np.testing.assert_array_equal(kept & ~np.asarray(mask), False)
    assert kept.any()


@thorough
def test_nan_of_a_reference_box_reaches_no_gradient(rng):
    """NaN in a box acts like NaN in a reference point: the samples of that query do not count."""
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, boxes, value = inputs(rng, (L, 4))[:3]

    @jitted
    def run(query, boxes):
        function = lambda *arrays: layer.call(*arrays, LEVELS)
        return values_and_gradients(function, params, query, boxes, value)

    for part in (slice(0, 2), slice(2, 4)):
        _, grads = run(query, boxes.at[0, 1, :, part].set(jnp.nan))
        assert jnp.isfinite(grads[0]["sampling_offsets"]["kernel"]).all()
        assert jnp.isfinite(grads[1]).all()
        assert (grads[0]["sampling_offsets"]["kernel"] != 0).any()


@thorough
def test_flax_linen_transformations(rng):
    flax = pytest.importorskip("flax")
    from jax_attn_bwd.layers.flax_linen import MultiScaleDeformableAttention

    options = dict(num_heads=M, features=C, num_levels=L, num_points=2)
    variables = {"params": from_torch(torch_state(rng))}
    query, points, value, mask = inputs(rng, masked=True)

    def loss(cls, variables):
        out = cls(**options).apply(variables, query, points, value, LEVELS, mask)
        return jnp.sin(out).sum()

    rematted = flax.linen.remat(MultiScaleDeformableAttention, static_argnums=(4,))
    plain = jitted(jax.grad(partial(loss, MultiScaleDeformableAttention)))(variables)
    again = jitted(jax.grad(partial(loss, rematted)))(variables)
    assert_all_close(again, plain, 1e-12)


@thorough
def test_flax_nnx_transformations_and_modes(rng):
    pytest.importorskip("flax")
    from flax import nnx

    from jax_attn_bwd.layers.flax_nnx import MultiScaleDeformableAttention

    layer = MultiScaleDeformableAttention(M, C, num_levels=L, num_points=2, rngs=nnx.Rngs(0))
    nnx.update(layer, from_torch(torch_state(rng)))
    query, points, value, mask = inputs(rng, masked=True)

    def loss(layer):
        return jnp.sin(layer(query, points, value, LEVELS, mask)).sum()

    def rematted(layer):
        function = nnx.remat(lambda layer, query: layer(query, points, value, LEVELS, mask))
        return jnp.sin(function(layer, query)).sum()

    plain = nnx.grad(loss)(layer)
    assert_all_close(nnx.jit(nnx.grad(rematted))(layer), plain, 1e-12)
    before = nnx.graphdef(layer)
    layer.train()  # sets `deterministic` of the modules that have it, for their dropout
    assert nnx.graphdef(layer) == before
    assert layer.config.deterministic_sums is None


@thorough
def test_equinox_transformations(rng):
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention

    layer = MultiScaleDeformableAttention(M, C, num_levels=L, num_points=2, key=jax.random.key(0))
    query, points, value, mask = inputs(rng, masked=True)

    def loss(layer, query, points, value, mask):
        return jnp.sin(layer(query, points, value, LEVELS, mask)).sum()

    def batched(layer):
        function = eqx.filter_checkpoint(partial(loss, layer))
        return jax.vmap(function)(query, points, value, mask).sum()

    single = eqx.filter_jit(eqx.filter_grad(loss))
    one_by_one = [single(layer, *(x[b] for x in (query, points, value, mask))) for b in range(B)]
    summed = jax.tree.map(lambda *x: sum(x), *one_by_one)
    assert_all_close(eqx.filter_jit(eqx.filter_grad(batched))(layer), summed, 1e-12)
    mapped = eqx.filter_vmap(layer, in_axes=(0, 0, 0, None, 0))
    out = jitted(lambda *arrays: mapped(*arrays, LEVELS, mask))(query, points, value)
    assert_close(out[1], layer(query[1], points[1], value[1], LEVELS, mask[1]), 1e-13)


@pytest.mark.parametrize("framework", frameworks("equinox"))
def test_queries_over_a_mesh(framework):
    """The numbers of one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:Q]), ("queries",))
    sharded = partial(parallel.sharded_multi_scale_deformable_attention, mesh=mesh, axis="queries")
    options, params, (*arrays, mask) = arguments_of("ragged_boxes")
    layer = build(framework, **options, attention_fn=sharded)
    function = lambda *arrays: layer.call(*arrays, LEVELS, mask)
    got = jitted(partial(values_and_gradients, function))(params, *arrays)
    assert_all_close(got, expected("ragged_boxes"), 1e-12)
