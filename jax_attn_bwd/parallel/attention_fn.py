"""`parallel.attention_fn`: attention over a mesh for those who are not inside `jax.shard_map`."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import ExchangeKind, SequenceLayout
from jax_attn_bwd.layers import attention_fn as layers
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.ops.dot_product.arguments import drop_leading_ones
from jax_attn_bwd.ops.dot_product.mask import AXES
from jax_attn_bwd.parallel import layouts
from jax_attn_bwd.parallel.arguments import beginning_at
from jax_attn_bwd.parallel.sequence import all_gather_attention, ring_attention, ulysses_attention

_NAME = "attention_fn"
_MESH = "axes are told by batch=, heads= and sequence="
_KINDS = {"ring": ring_attention, "all_gather": all_gather_attention, "ulysses": ulysses_attention}
_OF_TOKENS = tuple(name for name, axes in AXES.items() if axes in ("t", "s"))  # ids, then positions
_OF_BATCH = tuple(name for name, axes in AXES.items() if not axes and name != "batch_number")
_Names = str | tuple[str, ...] | None


@keywords.known
def attention_fn(
    mesh: Any,
    *,
    batch: _Names = None,
    heads: _Names = None,
    sequence: str | None = None,
    kind: ExchangeKind = "ring",
    layout: SequenceLayout = "contiguous",
) -> Callable[..., jax.Array]:
    """`jax_attn_bwd.attention_fn` over a mesh: what the attention layers of Flax call, sharded.

        attend = parallel.attention_fn(mesh, batch="data", heads="model", sequence="sequence")
        nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attend)
        nnx.MultiHeadAttention(8, 64, attention_fn=attend, decode=False, rngs=rngs)

    It wraps itself in `jax.shard_map`: call it on whole arrays, under `jax.jit` or not, on a mesh of Auto or
    Explicit axes (as all that JAX does with the latter, under `jax.set_mesh`). Each device attends to its
    part of batch and heads, and exchanges its part of the sequence with the others.

    Args:
      mesh: a `jax.sharding.Mesh` (or AbstractMesh) over all whose axes the attention runs.
      batch: the axis, or axes, that shard the first batch axis; None = not sharded.
      heads: likewise for the heads, those of keys and values too.
      sequence: the axis that shards queries and keys; None = not sharded.
      kind: "ring", "all_gather" or "ulysses": how the devices along `sequence` exchange what they hold.
      layout: "contiguous", or in which order tokens, and what they are told, have been brought by `zigzag` or
        `striped`; then no positions are given.

    Returns:
      A function with the arguments of `jax_attn_bwd.attention_fn`, which see. A mask or bias is sharded by
      rows and held with all its columns (one of a single row: by columns; with "ulysses" one that all heads
      share is held whole); mod_args are held whole. Positions tell a layout as in `ring_attention`. On an
      Explicit mesh the output is sharded as the query is. Dropout draws the mask of one device. Two that are
      built alike are equal: layers that hold them are traced once.

    Gradients:
      query, key, value, bias, mod_args: as in `dot_product_attention`.

    Raises:
      ValueError: an axis is not in the mesh; one that does not divide what it shards; and when called, as
        `jax_attn_bwd.attention_fn` and the exchange.
      NotImplementedError: when called: weights to be sown.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> from jax_attn_bwd import parallel
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("sequence",))
      >>> attend = parallel.attention_fn(mesh, sequence="sequence")
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attend)
      >>> x = jax.random.normal(jax.random.key(0), (1, 8, 8), "float32")
      >>> out, _ = layer.init_with_output(jax.random.key(1), x, mask=nn.make_causal_mask(x[..., 0]))
      >>> out.shape
      (1, 8, 8)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(checks.message(_NAME, "mesh", "be a jax.sharding.Mesh", repr(mesh), _MESH))
    axes = _Axes(
        _names("batch", mesh, batch), _names("heads", mesh, heads), _names("sequence", mesh, sequence)
    )
    layout = checks.choice(_NAME, "layout", layout, get_args(SequenceLayout))
    if layout != "contiguous" and sequence is None:
        raise ValueError(checks.message(_NAME, "sequence", f"be given with layout={layout!r}", None))
    return _Sharded(mesh, axes, checks.choice(_NAME, "kind", kind, tuple(_KINDS)), layout)


@dataclass(frozen=True)
class _Axes:
    """Holds the mesh axes that shard each kind of axis."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...]

    def spec(self, x: jax.Array, batch_rank: int, tail: tuple[Any, ...]) -> PartitionSpec:
        """Returns the spec of an array whose axes are those of the batch, then `tail`, or the last ones."""
        names = [*(self.batch, *((),) * batch_rank)[:batch_rank], *tail]
        sizes = zip(names[len(names) - x.ndim :], x.shape, strict=True)
        return PartitionSpec(*(axis or None if n > 1 else None for axis, n in sizes))


@dataclass(frozen=True)
class _Sharded(layers.AttentionFn):
    """`jax_attn_bwd.attention_fn` over a mesh; layers hold it, so its identity is its value."""

    mesh: Any
    axes: _Axes
    kind: str
    layout: str = "contiguous"
    __signature__ = inspect.signature(layers.attention_fn)  # linen hands over what it names

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        given = self.__signature__.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["module"] is not None:
            remedy = "weights are T x S numbers; sow them from a model on one device"
            raise NotImplementedError(checks.message(_NAME, "module", "be None over a mesh", "one", remedy))
        forward_mode = checks.flag(_NAME, "forward_mode", given.arguments.pop("forward_mode"))
        if self.layout != "contiguous":
            self._place(given.arguments)
        attend = functools.partial(_attend, self.mesh, self.axes, self.kind, forward_mode=forward_mode)
        return layers.attention_by(attend, **given.arguments)

    def _place(self, arguments: dict[str, Any]) -> None:
        """Says where the tokens lie, in the place of positions."""
        for name in (*_OF_TOKENS[2:], "rope"):
            if arguments[name] is not None:
                expected = f"be left out with layout={self.layout!r}"
                remedy = "rotary turns by the positions of the layout" if name == "rope" else ""
                raise ValueError(checks.message(_NAME, name, expected, "one", remedy))
        order = getattr(layouts, self.layout)
        for name, tokens in zip(_OF_TOKENS[2:], ("query", "key"), strict=True):
            n = self.mesh.shape[self.axes.sequence[0]]
            arguments[name] = order(np.arange(arguments[tokens].shape[-3], dtype=np.int32), n)


def _names(argument: str, mesh: Any, axis: Any) -> tuple[str, ...]:
    names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    expected = "name an axis of the mesh" if argument == "sequence" else "name axes of the mesh"
    if (argument == "sequence" and len(names) > 1) or any(name not in mesh.shape for name in names):
        raise ValueError(checks.message(_NAME, argument, expected, repr(axis), f"it has {tuple(mesh.shape)}"))
    return names


def _attend(mesh: Any, axes: _Axes, kind: str, query, key, value, bias, mask, **options: Any) -> jax.Array:
    """Runs `dot_product_attention` on whole arrays, sharded."""
    # the arrays that are given, each with its place on the mesh
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays |= {name: options.pop(name) for name in (*_OF_TOKENS, *_OF_BATCH, "dropout_key")}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    _check_sizes(mesh, axes, query, key)
    rank = query.ndim - 3
    specs = {}
    for name, x in arrays.items():
        if name in ("bias", "mask"):
            arrays[name] = x = drop_leading_ones(x, query.ndim)
        of_array = name != "dropout_key"
        specs[name] = axes.spec(x, rank, _tail(axes, kind, name, x)) if of_array else PartitionSpec()
        if AxisType.Explicit in mesh.axis_types:
            arrays[name] = jax.sharding.reshard(arrays[name], NamedSharding(mesh, specs[name]))
    # functions are static; what they read lies whole on every device
    functions = (options.pop("mask_mod", None), options.pop("score_mod", None))
    args: tuple[Any, ...] = options.pop("mod_args", ())
    if any(function is not None for function in functions):
        arrays["mod_args"] = jax.tree.map(jnp.asarray, args)
        specs["mod_args"] = jax.tree.map(lambda x: PartitionSpec(), arrays["mod_args"])
    else:
        options["mod_args"] = args
    # each device attends to its part; the result lies as the queries did
    run = functools.partial(_on_device, axes, kind, options, functions)
    run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs["query"])
    out = jax.jit(run)(arrays)  # outside of jit, jax.shard_map cannot run a rule like that of attention
    return reshard_like(out, query, tuple(range(query.ndim)))


def _tail(axes: _Axes, kind: str, name: str, x: jax.Array) -> tuple[Any, ...]:
    """Tells what shards the axes of an argument behind those of the batch."""
    if name in ("query", "key", "value"):
        return axes.sequence, axes.heads, ()
    if name not in ("bias", "mask"):
        return (axes.sequence,) if name in _OF_TOKENS else ()
    heads, rows, _ = (1, 1, 1, *x.shape)[-3:]
    if rows == 1:
        return axes.heads, (), axes.sequence
    return axes.heads, () if kind == "ulysses" and heads == 1 else axes.sequence, ()


def _check_sizes(mesh: Any, axes: _Axes, query: jax.Array, key: jax.Array) -> None:
    sizes = [("query heads N", query.shape[-2], axes.heads), ("key heads K", key.shape[-2], axes.heads)]
    sizes += [("the queries T", query.shape[-3], axes.sequence), ("the keys S", key.shape[-3], axes.sequence)]
    if query.ndim > 3:
        sizes += [("the batch", query.shape[0], axes.batch)]
    elif axes.batch:
        expected = "have a batch axis, which `batch` shards"
        raise ValueError(checks.message(_NAME, "query", expected, query.shape))
    for name, size, names in sizes:
        n = math.prod(mesh.shape[axis] for axis in names)
        if size % n:
            expected, shown = f"be a multiple of {n}", names[0] if len(names) == 1 else names
            remedy = f"mesh axis {shown!r} shards it: pad it, or choose another mesh"
            raise ValueError(checks.message(_NAME, name, expected, size, remedy))


def _on_device(
    axes: _Axes, kind: str, options: Mapping[str, Any], functions: tuple[Any, Any], arrays: Mapping[str, Any]
) -> jax.Array:
    """Attends to the parts of a device, inside `jax.shard_map`."""
    *batch, _, N, _ = arrays["query"].shape
    more, arrays = dict(options), dict(arrays)
    entry, head = (lax.axis_index(names) if names else 0 for names in (axes.batch, axes.heads))
    first = (entry * math.prod(batch), head * N)
    if more["dropout_rate"]:
        more["dropout_offset"] = (*first, 0, 0)
    more |= beginning_at(*first, *functions, arrays.pop("mod_args", ()))
    if not axes.sequence:
        return dot_product_attention(**arrays, **more)
    return _KINDS[kind](**arrays, **more, axis_name=axes.sequence[0])
