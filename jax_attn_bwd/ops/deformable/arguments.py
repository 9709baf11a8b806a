"""The arguments of multi-scale deformable attention, checked and brought to one form."""

from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, sharding
from jax_attn_bwd._core.types import PaddingMode, SamplingMethod
from jax_attn_bwd.ops.deformable.spec import Operands, Options


def prepare(
    name: str, value, spatial_shapes, sampling_locations, attention_weights, *, level_start_index, num_points,
    padding_mode, method, normalize, deterministic_sums, deterministic,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of a call and returns its options and operands."""
    # the levels, the value [B, S, M, D], and the numbers of points on each level
    shapes = level_shapes(name, "spatial_shapes", spatial_shapes)
    check_level_starts(name, level_start_index, shapes)
    value = _value(name, value, shapes)
    locations = checks.floating(name, "sampling_locations", sampling_locations)
    weights = checks.floating(name, "attention_weights", attention_weights)
    points = _num_points(name, num_points, weights, len(shapes))

    # locations [B, Q, M, L, P, 2] or [B, Q, M, K, 2], weights alike
    layout = (sum(points),) if num_points is not None else (len(points), points[0])
    letters = "[B, Q, M, sum of num_points" if num_points is not None else "[B, Q, M, L, P"
    B, _, M, _ = value.shape
    checks.rank(name, "attention_weights", weights, f"{letters}]", 3 + len(layout))
    Q = weights.shape[1]
    expected = (B, Q, M, *layout)
    checks.shape(name, "attention_weights", weights, f"{letters}]", expected)
    checks.shape(name, "sampling_locations", locations, f"{letters}, 2]", (*expected, 2))
    known = checks.known(locations)
    if known is not None and _are_far_outside(known[:1, :1]) and _are_far_outside(known):
        checks.warn(
            f"{name}: sampling_locations all lie outside [-1, 2]: they are (x, y) from 0 to 1 across each"
            " level; from pixels write (pixels + 0.5) / (W, H)"
        )
    widest = max(max(shape) for shape in shapes)
    if locations.dtype == jnp.bfloat16 and widest >= 32:  # an eighth of a pixel and more
        checks.warn(
            f"{name}: sampling_locations in bfloat16 are off by up to W / 256 pixels, {widest / 256:g} on the"
            f" widest of these levels; compute and pass them in float32, beside a {value.dtype} value"
        )

    # how they lie on an Explicit mesh
    value, locations, weights = map(sharding.without_ones, (value, locations, weights))
    arrays = {"value": value, "sampling_locations": locations, "attention_weights": weights}
    _check_explicit_sharding(name, arrays, heads=2)

    # the options; from here on levels and points are one axis, K
    if normalize is not None and normalize != "softmax":
        raise ValueError(checks.message(name, "normalize", "be None or 'softmax'", repr(normalize)))
    options = Options(
        shapes,
        points,
        checks.choice(name, "padding_mode", padding_mode, get_args(PaddingMode)),
        checks.choice(name, "method", method, get_args(SamplingMethod)),
        normalize,
        checks.repeatable_sums(name, deterministic_sums, deterministic),
    )
    K = sum(points)
    locations, weights = locations.reshape(B, Q, M, K, 2), weights.reshape(B, Q, M, K)
    operands = Operands(value, locations, sharding.reshard_like(weights, locations, (0, 1, 2, 3)))
    return options, operands


def _are_far_outside(points: np.ndarray) -> bool:
    """Tells whether all points `[..., 2]` lie further from the levels than these are wide."""
    points = points[np.isfinite(points).all(-1)]
    return bool(points.size and ((points < -1) | (points > 2)).any(-1).all())


def per_level(shapes: Sequence[tuple[int, int]], x: jax.Array) -> tuple[jax.Array, ...]:
    """Splits `x [B, S, M, D]` into one `[B, H_l, W_l, M, D]` for each level."""
    ends = np.cumsum([height * width for height, width in shapes])
    parts = jnp.split(x, ends[:-1], axis=1)
    return tuple(
        part.reshape(x.shape[0], *shape, *x.shape[2:]) for part, shape in zip(parts, shapes, strict=True)
    )


def level_shapes(name: str, argument: str, shapes: Any) -> tuple[tuple[int, int], ...]:
    """Checks the table `shapes` and returns ((H_1, W_1), ..., (H_L, W_L))."""
    table = _concrete(name, argument, shapes, "pass ((H, W), ...), known at trace time")
    if table.ndim != 2 or table.shape[1] != 2 or not len(table):
        expected = "hold one (H, W) for each level, shape [L, 2]"
        raise ValueError(checks.message(name, argument, expected, f"shape {table.shape}"))
    found = tuple((int(height), int(width)) for height, width in table)
    if table.min() < 1:
        raise ValueError(checks.message(name, argument, "be positive", found))
    if sum(height * width for height, width in found) > np.iinfo(np.int32).max:
        expected = "hold fewer than 2**31 pixels in all"
        raise ValueError(checks.message(name, argument, expected, found))
    return found


def check_level_starts(name: str, starts: Any, shapes: Sequence[tuple[int, int]]) -> None:
    """Checks that `starts`, the level_start_index, is what follows from `shapes`; None passes."""
    if starts is None:
        return
    remedy = "None will do, it follows from the shapes of the levels"
    got = _concrete(name, "level_start_index", starts, remedy)
    sizes = [height * width for height, width in shapes]
    expected = [sum(sizes[:level]) for level in range(len(sizes))]
    if got.tolist() != expected:
        running = f"be the running sum {expected} of H * W"
        raise ValueError(checks.message(name, "level_start_index", running, got.tolist(), remedy))


def _concrete(name: str, argument: str, x: Any, remedy: str) -> np.ndarray:
    """Returns `x` as a NumPy array of integers; refuses tracers."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        raise TypeError(checks.message(name, argument, "be concrete", "a traced array", remedy))
    try:
        table = np.asarray(x)
    except ValueError:  # rows of different lengths
        raise ValueError(checks.message(name, argument, "be a rectangular table", repr(x), remedy)) from None
    if not np.issubdtype(table.dtype, np.integer) and table.size:
        raise TypeError(checks.message(name, argument, "be integers", f"dtype {table.dtype}"))
    return table


def _value(name: str, value: Any, shapes: Sequence[tuple[int, int]]) -> jax.Array:
    """Checks `value`, and returns it as `[B, S, M, D]`; it may come as one feature map for each level."""
    # one array of all levels
    total = sum(height * width for height, width in shapes)
    if not isinstance(value, list | tuple):
        value = checks.floating(name, "value", value)
        if value.ndim != 4 or value.shape[1] != total:
            expected = f"have shape [B, S, M, D] with S = {total}, the pixels of spatial_shapes"
            remedy = "write value.reshape(B, S, M, D)" if value.ndim == 3 and value.shape[1] == total else ""
            raise ValueError(checks.message(name, "value", expected, value.shape, remedy))
        return value

    # or a map [B, H, W, M, D] of each, of one dtype and sharded alike
    if len(value) != len(shapes):
        expected = f"hold one feature map for each of the {len(shapes)} levels"
        raise ValueError(checks.message(name, "value", expected, len(value)))
    maps = [checks.floating(name, f"value[{level}]", x) for level, x in enumerate(value)]
    if maps[0].ndim != 5:
        expected = f"have shape [B, H, W, M, D] with [H, W] = {shapes[0]}"
        H, W = shapes[0]
        is_of_torch = maps[0].ndim == 4 and maps[0].shape[2:] == (H, W)
        remedy = (
            "from [B, C, H, W] write x.transpose(0, 2, 3, 1).reshape(B, H, W, M, D)" if is_of_torch else ""
        )
        raise ValueError(checks.message(name, "value[0]", expected, maps[0].shape, remedy))
    B, M, D = (maps[0].shape[0], *maps[0].shape[3:])
    for level, (x, shape) in enumerate(zip(maps, shapes, strict=True)):
        swapped = x.shape == (B, *reversed(shape), M, D) != (B, *shape, M, D)
        remedy = "spatial_shapes holds (H, W), height before width" if swapped else ""
        checks.shape(name, f"value[{level}]", x, "[B, H, W, M, D]", (B, *shape, M, D), remedy)
    arrays = {f"value[{level}]": x for level, x in enumerate(maps)}
    checks.same_dtype(name, **arrays)
    _check_explicit_sharding(name, arrays, heads=3)
    return jnp.concatenate([x.reshape(B, H * W, M, D) for x, (H, W) in zip(maps, shapes, strict=True)], 1)


def _num_points(name: str, num_points: Any, weights: jax.Array, levels: int) -> tuple[int, ...]:
    """Returns the number of points on each level."""
    if num_points is None:
        if weights.ndim != 5 or weights.shape[3] != levels:
            expected = f"have shape [B, Q, M, L, P] with L = {levels}"
            remedy = "for a ragged [B, Q, M, sum P] give num_points=(P_1, ..., P_L)"
            raise ValueError(checks.message(name, "attention_weights", expected, weights.shape, remedy))
        return (weights.shape[4],) * levels
    points = _concrete(name, "num_points", num_points, "pass (P_1, ..., P_L)")
    if points.shape != (levels,) or points.min() < 0:
        expected = f"hold a count, 0 or more, for each of the {levels} levels"
        raise ValueError(checks.message(name, "num_points", expected, repr(num_points)))
    return tuple(int(count) for count in points)


def _check_explicit_sharding(name: str, arrays: dict[str, jax.Array], heads: int) -> None:
    """Checks how arrays lie on an Explicit mesh: batch and `heads` may be sharded, alike in all arrays.

    Queries and pixels may be sharded too, but not the pixels of a sequence of feature maps, whose heads are
    axis 3.
    """
    first, *_ = arrays
    allowed, alike = {0, heads} | ({1} if heads == 2 else set()), None
    for argument, x in arrays.items():
        spec = sharding.explicit_spec(x)
        if any(axis is not None for i, axis in enumerate(spec) if i not in allowed):
            expected = "be sharded along batch, heads, and queries or pixels alone"
            raise ValueError(checks.message(name, argument, expected, spec, "reshard it"))
        alike = alike or (spec[0], spec[heads])
        if (spec[0], spec[heads]) != alike:
            expected = f"be sharded like {first}, {alike}, in batch and heads"
            raise ValueError(checks.message(name, argument, expected, spec, "reshard it"))
