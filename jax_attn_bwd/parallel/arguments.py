"""From the arguments of a call inside `jax.shard_map` to checked `Exchange`, `Options` and `Operands`.

Whatever depends on where a token lies in the whole sequence is said here of the tokens themselves, so that
blocks of them can be computed on any device: positions as arrays, lengths as segments, the rows and columns
of dropout as index arrays. The index of a token is its position where positions are given, else that of the
contiguous layout, device after device.

`check_axis` and `run_on_parts` are for the functions that take a mesh and wrap themselves in `jax.shard_map`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks, dropout, numerics
from jax_attn_bwd._core.sharding import vary_over, varying
from jax_attn_bwd._core.types import SequenceLayout
from jax_attn_bwd.ops.dot_product import arguments as dot_product
from jax_attn_bwd.ops.dot_product.arguments import Like, both_or_neither, plane
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.parallel import layouts

Axes = str | tuple[str, ...]
HIDDEN_QUERY, HIDDEN_KEY = 2**31 - 1, -(2**31)  # segments that no token of the other side has


@dataclass(frozen=True)
class Exchange:
    """Tells how keys meet queries, known at trace time."""

    axis_name: str  # the mesh axis that holds the sequence
    size: int  # number of devices along it
    offsets: tuple[int, ...]  # device i is to see keys of the devices i - offset
    of_keys: tuple[str, ...]  # "bias" or "elements" (of the mask) where they travel with a device's own keys


def axis_size(operator: str, axis_name: Any) -> int:
    """Returns the number of devices along a mesh axis of the `jax.shard_map` around the call."""
    bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if axis_name not in bound:
        remedy = f"call it inside jax.shard_map over that axis; axes bound here: {bound}"
        expected = "name an axis bound here"
        raise ValueError(checks.message(operator, "axis_name", expected, repr(axis_name), remedy))
    if not varying(lax.axis_index(axis_name)):
        around, remedy = (
            "jax.shard_map around it",
            "without it, gradients of what several devices share are wrong",
        )
        raise ValueError(checks.message(operator, around, "have check_vma=True", False, remedy))
    return lax.axis_size(axis_name)


def prepare(
    operator: str, query, key, value, bias, mask, *, axis_name, query_seq_lengths, key_value_seq_lengths,
    query_segment_ids, key_value_segment_ids, query_positions, key_value_positions,
    layout, **others,
) -> tuple[Exchange, Options, Operands]:  # fmt: skip
    """Checks every argument of `ring_attention`; raises as its docstring says."""
    # positions: given, or told by the layout
    n = axis_size(operator, axis_name)
    positions = {"query_positions": query_positions, "key_value_positions": key_value_positions}
    both_or_neither(operator, positions, "both are laid out and sharded like their tokens")
    device = lax.axis_index(axis_name)
    if checks.choice(operator, "layout", layout, get_args(SequenceLayout)) != "contiguous":
        query_positions, key_value_positions = _of_layout(operator, layout, n, device, positions, query, key)
    # segment ids that fit int32 alike on all devices; lengths need two that no token has
    ids = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    given = [x for x in ids.values() if x is not None]
    if len(given) == 2 and not all(map(numerics.fits_int32, given)):
        query_segment_ids, key_value_segment_ids = _narrow(operator, ids, (query, key), axis_name)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        for argument, x in (("query", query_segment_ids), ("key_value", key_value_segment_ids)):
            if x is not None:  # lengths take the outermost two segment ids
                name = f"{argument}_segment_ids with lengths"
                checks.integers(operator, name, x, HIDDEN_KEY + 1, HIDDEN_QUERY - 1)
    # the rest is checked as that of one device; planes are cut to its rows, or are of its keys
    T, S = (np.shape(x)[-3] if np.ndim(x) > 2 else 1 for x in (query, key))
    options, operands = dot_product.prepare(
        operator, query, key, value, None, None, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, query_positions=query_positions,
        key_value_positions=key_value_positions, counted=(T * n, S * n), **others,
    )  # fmt: skip
    planes, of_keys = _planes(operator, operands, bias, mask, n, device)
    operands, given_mask = operands.with_arrays(planes), operands.mask

    # Every token is told its index in the whole sequence; lengths become segments that nothing else is in.
    batch_rank = operands.query.ndim - 3
    rows = token_index(given_mask.query_positions, T, batch_rank, device)
    columns = token_index(given_mask.key_value_positions, S, batch_rank, device)
    lengths = (
        (query_seq_lengths, T * n, "query_seq_lengths"),
        (key_value_seq_lengths, S * n, "key_value_seq_lengths"),
    )
    ends = [_lengths(operator, x, size, name, operands.query.shape[:-3]) for x, size, name in lengths]
    segments = given_mask.query_segment_ids, given_mask.key_value_segment_ids
    if segments[0] is not None or any(x is not None for x in ends):
        segments = (
            _segments(segments[0], rows, ends[0], HIDDEN_QUERY),
            _segments(segments[1], columns, ends[1], HIDDEN_KEY),
        )
    # The dropout mask is that of one device: its rows and columns are the tokens' indices.
    offset = None
    if operands.dropout_words is not None:
        offset = dropout.or_origin(operands.dropout_offset)
        row, column = places(operator, offset.row, rows), places(operator, offset.column, columns)
        offset = offset._replace(row=row, column=column)
    # Positions travel only where causality, a window or a function reads them.
    reads_rows = given_mask.is_banded or given_mask.batch_number is not None
    contiguous = query_positions is None and T == S
    exchange = Exchange(axis_name, n, _offsets(given_mask, n, T, contiguous), of_keys)
    mask = operands.mask.replace(
        query_segment_ids=segments[0],
        key_value_segment_ids=segments[1],
        query_positions=rows if reads_rows else None,
        key_value_positions=columns if reads_rows else None,
    )
    return exchange, options, operands._replace(mask=mask, dropout_offset=offset)


def _planes(
    operator: str, operands: Operands, bias: Any, mask: Any, n: int, device: jax.Array
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns (bias and elements of the mask, checked; the names of those that belong to a device's keys)."""
    T, S = operands.sizes.T, operands.sizes.S
    planes: dict[str, Any] = {
        "bias": None if bias is None else checks.floating(operator, "bias", bias),
        "elements": None if mask is None else checks.boolean_mask(operator, mask),
    }
    of_keys = []
    for name, argument in (("bias", "bias"), ("elements", "mask")):
        if planes[name] is not None:
            x, own = _plane(operator, argument, planes[name], T, S, n, device)
            sizes = operands.sizes._replace(S=S if own else S * n)
            planes[name] = plane(operator, argument, x, sizes, Like(operands.query, -3, -2))
            of_keys += [name] * own
    return planes, tuple(of_keys)


def _of_layout(operator: str, layout: str, n: int, device, given, *tokens: Any) -> list[jax.Array]:
    """Returns the positions of this device's queries and keys in a sequence that lies as `layout` says."""
    if any(x is not None for x in given.values()):
        expected = f"be left out with layout={layout!r}, which tells them"
        raise ValueError(checks.message(operator, "positions", expected, "both"))
    lengths = [np.shape(x)[-3] if np.ndim(x) > 2 else 0 for x in tokens]
    return [layouts.positions(operator, layout, n, device, length) for length in lengths]


def _narrow(operator: str, ids: dict[str, Any], tokens: tuple[Any, Any], axis_name: str) -> list[jax.Array]:
    """Ranks traced segment ids of a wider dtype: int32 that are equal where they are, on all devices."""
    device, rows, lengths = lax.axis_index(axis_name), [], []
    for (argument, x), of in zip(ids.items(), tokens, strict=True):
        x, length = checks.integers(operator, argument, x), np.shape(of)[-3] if np.ndim(of) > 2 else 1
        checks.broadcasts(operator, argument, x, "[..., length]", (*np.shape(of)[:-3], length))
        rows.append(whole_rows(axis_name, jnp.broadcast_to(x, (*np.shape(of)[:-3], length))))
        lengths.append(length)
    found = zip(numerics.ranks(*rows), lengths, strict=True)
    return [lax.dynamic_slice_in_dim(x, device * length, length, x.ndim - 1) for x, length in found]


def _plane(operator: str, argument: str, x, T: int, S: int, n: int, device) -> tuple[jax.Array, bool]:
    """Returns (mask or bias with this device's rows; whether it belongs to this device's keys)."""
    rows, columns = (1, 1, *x.shape)[-2:]
    if rows == 1 and columns == S:
        return x, True
    if columns not in (1, S * n) or rows not in (1, T, T * n):
        by_rows = f"have T = {T} rows, those of this device's queries, and all {S * n} columns"
        expected = f"{by_rows}, or 1 row and S = {S} columns"
        remedy = "what is cut otherwise would have to be gathered whole"
        raise ValueError(checks.message(operator, argument, expected, x.shape, remedy))
    if rows == T * n and n > 1:
        x = lax.dynamic_slice_in_dim(x, device * T, T, axis=-2)
    return x, False


def whole_rows(axis_name: str, x: jax.Array) -> jax.Array:
    """Gathers `[..., length]` of all devices: `[..., n * length]`."""
    return lax.all_gather(vary_over(x, {axis_name}), axis_name, axis=x.ndim - 1, tiled=True)


def token_index(positions: jax.Array | None, length: int, batch_rank: int, device: jax.Array) -> jax.Array:
    """Returns the index of each token in the whole sequence, int32 `[..., length]`."""
    if positions is None:
        contiguous = device * length + jnp.arange(length, dtype=jnp.int32)
        return numerics.to_rank(contiguous, batch_rank + 1)
    return jnp.broadcast_to(positions, (*positions.shape[:-1], length))


def _lengths(operator: str, x: Any, size: int, argument: str, batch: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = checks.integers(operator, argument, x, least=0, greatest=size)
    checks.broadcasts(operator, argument, x, "[...]", batch)
    return numerics.to_rank(numerics.saturated(x, 0, size), len(batch))


def _segments(ids: jax.Array | None, index: jax.Array, length: jax.Array | None, hidden: int) -> jax.Array:
    ids = jnp.zeros_like(index) if ids is None else jnp.broadcast_to(ids, (*ids.shape[:-1], index.shape[-1]))
    return ids if length is None else jnp.where(index < length[..., None], ids, hidden)


def places(operator: str, start: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows or columns of tokens in a dropout mask, uint32; `start` may be they themselves."""
    if start.ndim:
        return start
    if index.size != index.shape[-1]:
        expected = "be the same for the whole batch with dropout"
        remedy = "give the rows and columns of the mask as index arrays in dropout_offset"
        raise ValueError(checks.message(operator, "positions", expected, index.shape, remedy))
    return start + index.reshape(-1).astype(jnp.uint32)


def _offsets(mask: Mask, n: int, T: int, contiguous: bool) -> tuple[int, ...]:
    """Finds the devices whose keys may be seen, as `Exchange.offsets`; a narrow band leaves few of them."""
    if mask.window is None or not contiguous or T == 0:
        return tuple(range(n))
    left, right = mask.window
    behind, ahead = -(-left // T), 0 if mask.is_causal else -(-right // T)
    return tuple(range(n)) if behind + ahead + 1 >= n else tuple(range(-ahead, behind + 1))


@dataclass(frozen=True)
class _Moved:
    """Counts entries and heads from others than 0, which it reads of its arguments."""

    function: Callable[..., Any]
    leading: int  # arguments before batch, head, row and column

    def __call__(self, *given: Any) -> Any:
        first, (batch, head, row, column, begin, *args) = given[: self.leading], given[self.leading :]
        entry, number = begin
        return self.function(*first, batch + entry, head + number, row, column, *args)


def beginning_at(entry: Any, head: Any, mask_mod: Any, score_mod: Any, mod_args: Any) -> dict[str, Any]:
    """Returns the three arguments where the first batch entry is number `entry`, the first head `head`."""
    if mask_mod is None and score_mod is None:
        return {}
    begin = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (entry, head))
    return {
        "mask_mod": None if mask_mod is None else _Moved(mask_mod, 0),
        "score_mod": None if score_mod is None else _Moved(score_mod, 1),
        "mod_args": (begin, *mod_args),
    }


def check_axis(operator: str, mesh: Any, axis: Any) -> int:
    """Returns the number of devices of `mesh` along `axis`, a name or several."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        expected, remedy = "be a jax.sharding.Mesh", "jax.make_mesh makes one"
        raise TypeError(checks.message(operator, "mesh", expected, type(mesh).__name__, remedy))
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not names or not set(names) <= set(mesh.axis_names):
        expected = f"name axes of the mesh, {mesh.axis_names}"
        raise ValueError(checks.message(operator, "axis", expected, repr(axis)))
    return math.prod(mesh.shape[name] for name in names)


def run_on_parts(
    function: Any, mesh: Mesh, axis: Axes, specs: tuple, out_specs: Any, arguments: tuple
) -> Any:
    """Runs `jax.shard_map` of `function` over `axis`; specs name no other axis of the mesh.

    Other Auto axes stay with the partitioner. On an Explicit mesh they hold copies (JAX 0.12 cannot lower a
    reduce-scatter where some axes are Explicit and some Manual), and arguments are brought to their specs.
    """
    # an Explicit mesh is taken whole
    names = {axis} if isinstance(axis, str) else set(axis)
    if AxisType.Explicit in mesh.axis_types:
        names = set(mesh.axis_names)
        lay = lambda spec, part: jax.sharding.reshard(part, NamedSharding(mesh, spec))
        is_spec = lambda x: isinstance(x, PartitionSpec)
        arguments = jax.tree.map(lay, specs, arguments, is_leaf=is_spec)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=names, check_vma=True
    )
    return jax.jit(mapped, inline=True)(*arguments)  # shard_map alone does not run rules with symbolic zeros
