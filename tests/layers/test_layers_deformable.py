"""`MultiScaleDeformableAttention` of each framework, against the definition and against PyTorch."""

import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.layers.deformable import from_torch

LEVELS = ((3, 5), (4, 1), (2, 3))  # not square: swapped axes show
M, C, L, Q, B, S = 2, 6, 3, 7, 2, 25
FRAMEWORKS = ("flax_linen", "flax_nnx", "haiku", "equinox")
NAMES = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
HAIKU_PATH = "multi_scale_deformable_attention/~/"


def linen(width=C, **options):
    pytest.importorskip("flax")
    from jax_attn_bwd.layers.flax_linen import MultiScaleDeformableAttention

    layer = MultiScaleDeformableAttention(features=width, **options)

    def init(key):
        query, value = jnp.zeros((1, 1, width), "float32"), jnp.zeros((1, S, width), "float32")
        return layer.init(key, query, jnp.zeros((1, 1, 2)), value, LEVELS)["params"]

    def call(params, *inputs, method=None):
        return layer.apply({"params": params}, *inputs, method=method)

    return SimpleNamespace(init=init, call=call)


def nnx(width=C, **options):
    pytest.importorskip("flax")
    from flax import nnx

    from jax_attn_bwd.layers.flax_nnx import MultiScaleDeformableAttention

    def layer(key):
        return MultiScaleDeformableAttention(in_features=width, **options, rngs=nnx.Rngs(key))

    def init(key):
        return nnx.to_pure_dict(nnx.state(layer(key), nnx.Param))

    def call(params, *inputs, method="__call__"):
        made = layer(0)
        nnx.update(made, params)
        return getattr(made, method)(*inputs)

    return SimpleNamespace(init=init, call=call)


def haiku(width=C, **options):
    hk = pytest.importorskip("haiku")
    from jax_attn_bwd.layers.haiku import MultiScaleDeformableAttention

    def transformed(method):
        def forward(*inputs):
            layer = MultiScaleDeformableAttention(model_size=width, **options)
            return getattr(layer, method)(*inputs)

        return hk.without_apply_rng(hk.transform(forward))

    def init(key):
        inputs = jnp.zeros((1, 1, width)), jnp.zeros((1, 1, 2)), jnp.zeros((1, S, width))
        params = transformed("__call__").init(key, *inputs, LEVELS)
        assert all(path.startswith(HAIKU_PATH) for path in params)
        names = {path.removeprefix(HAIKU_PATH): x for path, x in params.items()}
        return {name: {"kernel": x["w"], "bias": x["b"]} for name, x in names.items()}

    def call(params, *inputs, method="__call__"):
        dense = {name: {"w": x["kernel"], "b": x["bias"]} for name, x in params.items()}
        params = {HAIKU_PATH + name: x for name, x in dense.items()}
        return transformed(method).apply(params, *inputs)

    return SimpleNamespace(init=init, call=call)


def equinox(width=C, **options):
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention

    def init(key):
        layer = MultiScaleDeformableAttention(query_size=width, **options, key=key)
        linears = {name: getattr(layer, name) for name in NAMES}
        return {name: {"kernel": x.weight.T, "bias": x.bias} for name, x in linears.items()}

    def call(params, *inputs, method="__call__"):
        layer = MultiScaleDeformableAttention(query_size=width, **options, key=jax.random.key(0))
        for name, x in params.items():
            where = lambda layer: (getattr(layer, name).weight, getattr(layer, name).bias)  # noqa: B023, E731
            layer = eqx.tree_at(where, layer, (x["kernel"].T, x["bias"]))

        def picture(b):
            own = (x[b] if isinstance(x, jax.Array) else x for x in inputs)
            return getattr(layer, method)(*own)

        return jnp.stack([picture(b) for b in range(inputs[0].shape[0])])

    return SimpleNamespace(init=init, call=call)


ADAPTERS = dict(zip(FRAMEWORKS, (linen, nnx, haiku, equinox), strict=True))


def build(framework, **options):
    """`init(key) -> params` and `call(params, ...)` of a layer, `params` in the tree of Flax."""
    options = {"num_heads": M, "num_levels": L, "num_points": 2} | options
    return ADAPTERS[framework](**options)


def torch_state(rng, points=2, prefix=""):
    """Random parameters with PyTorch's names and shapes."""
    K = sum(points) if isinstance(points, tuple) else points * L
    rows = dict(zip(NAMES, (2 * M * K, M * K, C, C), strict=True))
    state = {f"{prefix}{name}.weight": rng.standard_normal((n, C)) for name, n in rows.items()}
    return state | {f"{prefix}{name}.bias": rng.standard_normal(n) for name, n in rows.items()}


def inputs(rng, points=(L, 2), masked=False):
    """(query, reference_points [B, Q, *points], value, mask)."""
    reference_points = rng.uniform(0.05, 0.95, (B, Q, *points))
    mask = jnp.asarray(rng.random((B, S)) < 0.7) if masked else None
    arrays = rng.standard_normal((B, Q, C)), reference_points, rng.standard_normal((B, S, C))
    return *map(jnp.asarray, arrays), mask


def definition(params, query, points, value, mask, num_points=2, **options):
    """The module written out level by level around the operator."""
    counts = (num_points,) * L if isinstance(num_points, int) else num_points
    dense = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]  # noqa: E731
    offsets = dense("sampling_offsets", query).reshape(B, Q, M, sum(counts), 2)
    points = points if points.ndim == 4 else points[:, :, None]
    locations, first = [], 0
    for level, ((H, W), P) in enumerate(zip(LEVELS, counts, strict=True)):
        at = points[:, :, min(level, points.shape[2] - 1)][:, :, None, None]  # [B, Q, 1, 1, 2 or 4]
        shift = offsets[:, :, :, first : first + P]
        unit = at[..., 2:] * 0.5 / P if at.shape[-1] == 4 else 1 / jnp.array([W, H], float)
        locations.append(at[..., :2] + shift * unit)
        first += P
    value = dense("value_proj", value)
    value = value if mask is None else value * mask[..., None]
    weights = jax.nn.softmax(dense("attention_weights", query).reshape(B, Q, M, sum(counts)))
    out = multi_scale_deformable_attention(
        value.reshape(B, S, M, C // M), LEVELS, jnp.concatenate(locations, 3), weights,
        num_points=counts, **options,
    )  # fmt: skip
    return dense("output_proj", out)


def value_and_gradients(function, *arguments):
    """The output, and the gradients of all arguments for a random cotangent."""
    out, pullback = jax.vjp(function, *arguments)
    dout = np.random.default_rng(5).standard_normal(out.shape)
    return out, pullback(jnp.asarray(dout, out.dtype))


def assert_all_close(got, expected, rtol):
    """`assert_close` of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, x), y in zip(leaves, jax.tree.leaves(got), strict=True):
        assert_close(y, x, rtol, jax.tree_util.keystr(path))


CASES = {
    "points": {},
    "boxes_of_all_levels": {"points": (1, 4), "masked": True},
    "ragged": {"num_points": (2, 1, 2), "masked": True},
    "ragged_boxes": {"num_points": (1, 2, 2), "points": (L, 4), "padding_mode": "border"},
    "discrete_points_of_all_levels": {"points": (2,), "method": "discrete"},
}


def arguments_of(case):
    """(options of the layer, parameters, inputs) of a case."""
    options, rng = dict(CASES[case]), np.random.default_rng(0)
    arrays = inputs(rng, options.pop("points", (L, 2)), options.pop("masked", False))
    return options, from_torch(torch_state(rng, options.get("num_points", 2))), arrays


@cache
def expected(case):
    """The definition's output and gradients."""
    options, params, (*arrays, mask) = arguments_of(case)
    function = partial(definition, mask=mask, **options)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.jit(partial(value_and_gradients, function))(params, *arrays)


@pytest.mark.parametrize(
    ("framework", "case"),
    [("flax_linen", case) for case in CASES]
    + [(other, "ragged_boxes") for other in FRAMEWORKS[1:]],
)
def test_output_and_gradients_are_those_of_the_definition(framework, case):
    """The geometry is shared code: one framework shows it, and one case that the others agree."""
    options, params, (*arrays, mask) = arguments_of(case)
    layer = build(framework, **options)
    function = lambda *arrays: layer.call(*arrays, LEVELS, mask)  # noqa: E731
    got = jax.jit(partial(value_and_gradients, function))(params, *arrays)
    assert_all_close(got, expected(case), 1e-12)


def torch_module(torch, counts):
    """Deformable-DETR's module in plain PyTorch: one `grid_sample` for each level."""
    F, nn = torch.nn.functional, torch.nn
    K = sum(counts)

    class MSDeformAttn(nn.Module):
        def __init__(self):
            super().__init__()
            self.sampling_offsets, self.attention_weights = (
                nn.Linear(C, 2 * M * K),
                nn.Linear(C, M * K),
            )
            self.value_proj, self.output_proj = nn.Linear(C, C), nn.Linear(C, C)

        def forward(self, query, points, value, padding):
            value = self.value_proj(value).masked_fill(padding[..., None], 0.0)
            heads = value.view(B, S, M, C // M).permute(0, 2, 3, 1).flatten(0, 1)  # [B M, D, S]
            offsets = self.sampling_offsets(query).view(B, Q, M, K, 2)
            weights = self.attention_weights(query).view(B, Q, M, K).softmax(-1)
            maps = heads.split([H * W for H, W in LEVELS], -1)
            out, shifts, shares = 0, offsets.split(counts, 3), weights.split(counts, 3)
            for level, ((H, W), P) in enumerate(zip(LEVELS, counts, strict=True)):
                at, shift = points[:, :, None, level, None], shifts[level]
                shift = (
                    shift / P * at[..., 2:] * 0.5
                    if at.shape[-1] == 4
                    else shift / torch.tensor([W, H])
                )
                grid = (
                    (2 * (at[..., :2] + shift) - 1).transpose(1, 2).flatten(0, 1)
                )  # [B M, Q, P, 2]
                pixels = F.grid_sample(maps[level].unflatten(-1, (H, W)), grid, align_corners=False)
                share = shares[level].transpose(1, 2).flatten(0, 1)[:, None]  # [B M, 1, Q, P]
                out = out + (pixels * share).sum(-1)  # [B M, D, Q]
            return self.output_proj(out.view(B, C, Q).transpose(1, 2))

    return MSDeformAttn().double()


@pytest.mark.parametrize(
    ("framework", "coordinates", "counts"),
    [
        ("flax_linen", 2, (2, 2, 2)),
        ("flax_nnx", 4, (3, 1, 2)),
        ("haiku", 2, (1, 3, 1)),
        ("equinox", 4, (2, 2, 2)),
    ],
)
def test_as_pytorch_with_its_parameters(rng, framework, coordinates, counts):
    torch = pytest.importorskip("torch", reason="compares with torch's grid_sample")
    module = torch_module(torch, counts)
    prefix = "decoder.layers.0.cross_attn."
    state = torch_state(rng, counts)
    module.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
    query, points, value, mask = inputs(rng, (L, coordinates), masked=True)
    tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in (query, points, value)]
    out = module(
        *tensors, ~torch.tensor(np.asarray(mask))
    )  # its padding mask is our mask's opposite
    dout = rng.standard_normal(out.shape)
    out.backward(torch.tensor(dout))
    slopes = from_torch({name: p.grad for name, p in module.named_parameters()})

    params = from_torch({prefix + name: x for name, x in module.state_dict().items()}, prefix)
    layer = build(framework, num_points=counts)
    function = jax.jit(lambda *arrays: layer.call(*arrays, LEVELS, mask))
    got, pullback = jax.vjp(function, params, query, points, value)
    assert_close(got, out.detach().numpy(), 1e-12)
    dparams, *grads = pullback(jnp.asarray(dout))
    for x, tensor in zip(grads, tensors, strict=True):
        assert_close(x, tensor.grad.numpy(), 1e-11)
    for name in NAMES:
        for part in ("kernel", "bias"):
            assert_close(dparams[name][part], slopes[name][part], 1e-11, f"{name}.{part}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bfloat16_layer_samples_where_the_float32_layer_does(rng, framework):
    """Offsets, locations and logits are float32; only the projections of values are bfloat16."""
    narrow = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)  # noqa: E731
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)  # noqa: E731
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

    out = jax.jit(lambda *arrays: layer.call(*arrays, LEVELS))(narrow_params, query, points, value)
    assert out.dtype == jnp.bfloat16
    wider = jax.jit(lambda *arrays: exact.call(*arrays, LEVELS))
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
    directions = np.array([[1.0, 0.0], [-1.0, 0.0]])[:, None]  # of two heads
    expected = np.asarray(points)[:, :, None, None] + directions / sizes  # [1, Q, M, L, 2]
    assert_close(locations, expected, 1e-6)


def test_padding_is_masked_and_its_nan_reaches_nothing(rng):
    """True = keep. The poison is in the input of `value_proj`: its kernel's gradient multiplies by it."""
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    poisoned = jnp.where(mask[..., None], value, jnp.nan)

    @jax.jit
    def run(value):
        function = lambda *arrays: layer.call(*arrays, LEVELS, mask)  # noqa: E731
        return value_and_gradients(function, params, query, points, value)

    out, grads = run(value)
    assert_all_close(run(poisoned), (out, grads), 1e-14)
    kept = (np.asarray(grads[3]) != 0).any(-1)
    np.testing.assert_array_equal(kept & ~np.asarray(mask), False)
    assert kept.any()


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
    plain = jax.jit(jax.grad(partial(loss, MultiScaleDeformableAttention)))(variables)
    again = jax.jit(jax.grad(partial(loss, rematted)))(variables)
    assert_all_close(again, plain, 1e-12)


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
    assert layer.config.options.deterministic


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
    out = jax.jit(lambda *arrays: mapped(*arrays, LEVELS, mask))(query, points, value)
    assert_close(out[1], layer(query[1], points[1], value[1], LEVELS, mask[1]), 1e-13)


def test_any_batch_axes(rng):
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    call = lambda *arrays: layer.call(params, *arrays[:3], LEVELS, arrays[3])  # noqa: E731
    expected = call(query, points, value, mask)
    assert_close(call(query[0], points[0], value[0], mask[0]), expected[0], 1e-13)
    nested = [x.reshape(B, 1, *x.shape[1:]) for x in (query, points, value, mask)]
    assert_close(call(*nested)[:, 0], expected, 1e-13)


def test_no_queries_and_no_pictures(rng):
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    assert layer.call(params, query[:, :0], points[:, :0], value, LEVELS, mask).shape == (B, 0, C)
    empty = [x[:0] for x in (query, points, value)]
    assert layer.call(params, *empty, LEVELS, mask[:0]).shape == (0, Q, C)


def call_with(framework="flax_linen", options=None, **changed):
    """A call of a layer that is right but for what `changed` says."""
    rng = np.random.default_rng(0)
    query, points, value, mask = inputs(rng, masked=True)
    arguments = dict(query=query, points=points, value=value, shapes=LEVELS, mask=mask) | changed
    return build(framework, **(options or {})).call(
        from_torch(torch_state(rng)), *arguments.values()
    )


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": jnp.zeros((B, Q, C + 1))}, ValueError, r"query must have shape \[..., Q, C\] with C = 6"),
        ({"query": jnp.zeros((B, Q, C), int)}, TypeError, "query must be a floating-point array"),
        ({"points": jnp.zeros((B, Q, 3))}, ValueError, r"reference_points must .* \(2, 7, 3, '2 or 4'\)"),
        ({"points": jnp.zeros((B, Q, 2, 2))}, ValueError, "reference_points must"),
        ({"points": jnp.zeros((1, Q, 3, 2))}, ValueError, "reference_points must"),
        ({"points": jnp.zeros(())}, ValueError, "reference_points must"),
        ({"value": jnp.zeros((B, S + 1, C))}, ValueError, r"value must .* \(2, 25, 6\), got \(2, 26, 6\)"),
        ({"shapes": LEVELS[:2]}, ValueError, "spatial_shapes must hold one .* of the 3 levels"),
        ({"shapes": ((3, 5), (4,), (2, 3))}, ValueError, "spatial_shapes must be a rectangular table"),
        ({"shapes": ((3.9, 5.0), (4, 2), (2, 3))}, TypeError, "spatial_shapes must be integers"),
        ({"shapes": ((0, 5), (4, 2), (2, 3))}, ValueError, "spatial_shapes must be positive"),
        ({"options": {"num_heads": True}}, ValueError, "num_heads must be a positive int, got True"),
        ({"mask": jnp.zeros((B, S))}, TypeError, "mask must be a boolean .*True = keep.* got dtype float"),
        ({"mask": jnp.zeros((B, S, 1), bool)}, ValueError, r"mask must have shape \[..., S\]"),
        ({"options": {"num_heads": 4}}, ValueError, "features must be a multiple of the 4 heads, got 6"),
        ({"options": {"num_points": (1, 2)}}, ValueError, "num_points must .* of the 3 levels"),
        ({"options": {"num_points": 0}}, ValueError, "num_points must be a positive int"),
        ({"options": {"num_levels": 0}}, ValueError, "num_levels must be a positive int"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        call_with(**changed)


def test_traced_spatial_shapes_are_refused():
    with pytest.raises(TypeError, match=r"spatial_shapes must be concrete, got a traced array"):
        jax.jit(lambda shapes: call_with(shapes=shapes))(jnp.array(LEVELS))


def test_array_of_spatial_shapes():
    np.testing.assert_array_equal(call_with(shapes=np.array(LEVELS)), call_with())


@pytest.mark.parametrize(
    ("framework", "width"),
    list(zip(FRAMEWORKS, ("features", "in_features", "model_size", "query_size"), strict=True)),
)
def test_every_framework_passes_on_its_arguments(framework, width):
    """Each wrong value is refused under its own name, the width's in the words of the framework."""
    wrong = {
        width: ({"num_heads": 4}, ValueError),
        "padding_mode": ({"padding_mode": "wrap"}, ValueError),
        "method": ({"method": "nearest"}, ValueError),
        "deterministic": ({"deterministic": 1}, TypeError),
        "'mine'": ({"implementation": "mine"}, ValueError),
    }
    for name, (options, error) in wrong.items():
        with pytest.raises(error, match=name):
            call_with(framework, options)


def test_equinox_asks_for_vmap():
    pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention

    layer = MultiScaleDeformableAttention(M, C, num_levels=L, key=jax.random.key(0))
    query, points, value, _ = inputs(np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"query must have shape \[Q, C\].*use jax.vmap"):
        layer(query, points, value, LEVELS)


def test_from_torch_names_what_is_missing(rng):
    state = torch_state(rng, prefix="encoder.0.")
    with pytest.raises(ValueError, match=r"'sampling_offsets.weight', got \['encoder.0.sampling"):
        from_torch(state)
    del state["encoder.0.value_proj.bias"]
    with pytest.raises(ValueError, match=r"'encoder\.0\.value_proj\.bias'"):
        from_torch(state, "encoder.0.")


def test_a_framework_is_imported_with_its_layers_only():
    """In the order in which none may have come with the one before (Haiku itself imports Flax)."""
    program = """
import sys
def present(): return {"equinox", "haiku", "flax", "torch"} & set(sys.modules)
import jax_attn_bwd, jax_attn_bwd.layers.deformable
assert not present(), present()
import jax_attn_bwd.layers.equinox
assert present() == {"equinox"}, present()
import jax_attn_bwd.layers.flax_linen
assert present() == {"equinox", "flax"}, present()
assert "jax_attn_bwd.layers.flax_nnx" not in sys.modules
"""
    for package in ("equinox", "flax"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)


def test_nan_of_a_reference_box_reaches_no_gradient(rng):
    """As NaN in a reference point: the samples of that query do not count."""
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, boxes, value = inputs(rng, (L, 4))[:3]

    def run(query, boxes):
        function = lambda *arrays: layer.call(*arrays, LEVELS)  # noqa: E731
        return value_and_gradients(function, params, query, boxes, value)

    for part in (slice(0, 2), slice(2, 4)):
        _, grads = run(query, boxes.at[0, 1, :, part].set(jnp.nan))
        assert jnp.isfinite(grads[0]["sampling_offsets"]["kernel"]).all()
        assert jnp.isfinite(grads[1]).all()
        assert (grads[0]["sampling_offsets"]["kernel"] != 0).any()


def test_counts_may_be_numpy_integers(rng):
    params = from_torch(torch_state(rng))
    query, points, value = inputs(rng)[:3]
    expected = build("flax_linen").call(params, query, points, value, LEVELS)
    counts = {"num_heads": np.int64(M), "num_levels": np.int32(L), "num_points": np.array([2] * L)}
    assert_close(
        build("flax_linen", **counts).call(params, query, points, value, LEVELS), expected, 0
    )


def test_from_torch_takes_parameters_and_bfloat16(rng):
    torch = pytest.importorskip("torch", reason="its tensors are the matter")
    state = {name: torch.tensor(x) for name, x in torch_state(rng).items()}
    expected = from_torch(state)
    wanted = {name: torch.nn.Parameter(x) for name, x in state.items()}
    narrow = {name: x.to(torch.bfloat16) for name, x in state.items()}
    for name in NAMES:
        assert_close(from_torch(wanted)[name]["kernel"], expected[name]["kernel"], 0)
        got = from_torch(narrow)[name]["kernel"]
        assert got.dtype == jnp.bfloat16
        assert_close(
            got.astype("float32"),
            expected[name]["kernel"].astype(jnp.bfloat16).astype("float32"),
            0,
        )
