"""Named inputs of what runs over several devices: calls on whole arrays, over as many devices as are at hand.

Each is the operator whose numbers it has to give, called otherwise; where its axes are too short for all
devices, over fewer. Sequences are laid out and brought back, queries are padded to the number of devices.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_attn_bwd._core.cases import Case, Operator, both, shared_segments, sink
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.deformable.cases import OPERATORS as DEFORMABLE
from jax_attn_bwd.ops.dot_product import cases as dense
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.graph.cases import OPERATORS as GRAPH
from jax_attn_bwd.ops.linear_attention.cases import OPERATORS as LINEAR
from jax_attn_bwd.ops.multi_head.cases import OPERATORS as MULTI_HEAD
from jax_attn_bwd.ops.multi_head.spec import PARAMS, MultiHeadAttentionParams
from jax_attn_bwd.parallel.arguments import run_on_parts
from jax_attn_bwd.parallel.deformable import sharded_multi_scale_deformable_attention
from jax_attn_bwd.parallel.graph import sharded_graph_attention
from jax_attn_bwd.parallel.layouts import striped, unstriped, unzigzag, zigzag
from jax_attn_bwd.parallel.linear import dplr_linear_attention, gated_delta_rule, gated_linear_attention
from jax_attn_bwd.parallel.partition import PartitionedGraph, partition_graph
from jax_attn_bwd.parallel.sequence import all_gather_attention, ring_attention, ulysses_attention
from jax_attn_bwd.parallel.tensor import tensor_parallel_multi_head_attention

_AXIS = "devices"
_TOKENS = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")


def _mesh(*sizes: int) -> Mesh:
    """Makes a mesh of one axis: as many of the devices at hand as divide all sizes."""
    n = math.gcd(jax.local_device_count(), *sizes)
    return Mesh(np.array(jax.local_devices()[:n]), (_AXIS,))


def sequence_case(name: str, B=2, T=16, N=8, K=4, H=3, Hv=5, **options) -> Case:
    """Returns a case of self-attention on a sequence that is cut."""
    return dense.case(name, B=(B,), T=T, S=T, N=N, K=K, H=H, Hv=Hv, **options)


_SEQUENCE_CASES = (
    sequence_case(
        "causal_sink", tags=("ci", "check"), extra=sink(8, spread=1.0), is_causal=True, logits_soft_cap=2.0
    ),
    sequence_case(
        "packed_dropout",
        tags=("ci", "check"),
        extra=both(shared_segments, dense.KEY),
        local_window_size=(5, 2),
        dropout_rate=0.3,
    ),
    sequence_case("means", T=64, H=8, Hv=8, means={"value": 3.0}, tags=("means",), is_causal=True),
)


def _sequence(function: Callable[..., Any], lay: Callable | None = None, back: Callable | None = None) -> Any:
    """Makes calls of dense attention: all tokens in order, in and out."""

    def call(*, implementation=None, **arguments):
        # tokens lie along the axis, cut in order or laid out with their positions
        T, K = arguments["query"].shape[-3], arguments["key"].shape[-2]
        mesh = _mesh(T // 2, K)
        n = mesh.size
        arrays = {
            name: arguments.pop(name) for name in (*_TOKENS, "sink", "dropout_key") if name in arguments
        }
        specs = {name: P(None, _AXIS) if name in _TOKENS else P() for name in arrays}
        if lay is not None:
            arrays |= {name: lay(arrays[name], n, 1) for name in _TOKENS if name in arrays}
            both = ("query_positions", "key_value_positions")
            arrays |= dict.fromkeys(both, lay(jnp.arange(T, dtype=jnp.int32), n))
            specs |= dict.fromkeys(both, P(_AXIS))
        # each device calls it on its own tokens; what comes back is put in order
        options = dict(axis_name=_AXIS, return_residual=True, implementation=implementation, **arguments)
        local = lambda arrays: function(**arrays, **options)
        outputs = run_on_parts(local, mesh, _AXIS, (specs,), (P(None, _AXIS),) * 2, (arrays,))
        return outputs if back is None else tuple(back(x, n, 1) for x in outputs)

    return call


_HEADS = dict.fromkeys(("query_kernel", "key_kernel", "value_kernel"), P(None, _AXIS)) | dict.fromkeys(
    ("query_bias", "key_bias", "value_bias", "out_kernel", "bias_k", "bias_v", "sink"), P(_AXIS)
)


def _layer(*, implementation=None, **arguments):
    # heads of the parameters lie along the axis, tokens on all devices
    mesh = _mesh(*(arguments[name].shape[1] for name in ("query_kernel", "key_kernel", "value_kernel")))
    static = ("is_causal", "local_window_size", "logits_soft_cap", "dropout_rate", "add_zero_attn")
    options = {name: arguments.pop(name) for name in static if name in arguments}
    specs = {name: _HEADS.get(name, P()) for name in arguments}

    def local(arrays):
        params = MultiHeadAttentionParams(**{name: arrays.pop(name) for name in PARAMS if name in arrays})
        return tensor_parallel_multi_head_attention(
            params, **arrays, **options, axis_name=_AXIS, reduce="psum", implementation=implementation
        )

    out = run_on_parts(local, mesh, _AXIS, (specs,), P(), (arguments,))
    return out, jnp.zeros(0, out.dtype)


@cache
def _cut(graph: BipartiteCSC, n: int) -> PartitionedGraph:
    with jax.ensure_compile_time_eval():  # whoever calls may be tracing
        return partition_graph(graph, n)


def _graph(*, graph, head_size, src, dst, edge=None, dropout_mask=None, **arguments):
    # arrays in the caller's order are placed in the parts, and collected
    mesh = _mesh()
    cut = _cut(graph, mesh.size)
    out, weights, lse = sharded_graph_attention(
        cut,
        cut.src.place(src),
        cut.dst.place(dst),
        mesh=mesh,
        axis=_AXIS,
        num_heads=src.shape[1] // head_size,
        edge=None if edge is None else cut.edges.place(edge),
        dropout_mask=None if dropout_mask is None else cut.edges.place(dropout_mask.T).T,
        return_attention_weights=True,
        return_residual=True,
        **arguments,
    )
    return cut.dst.collect(out), cut.edges.collect(weights), cut.dst.collect(lse)


def _queries(*, sampling_locations, attention_weights, **arguments):
    mesh, Q = _mesh(), sampling_locations.shape[1]
    fill = lambda x: jnp.pad(x, ((0, 0), (0, -Q % mesh.size), *((0, 0),) * (x.ndim - 2)))
    given = {"sampling_locations": fill(sampling_locations), "attention_weights": fill(attention_weights)}
    out = sharded_multi_scale_deformable_attention(**given, **arguments, mesh=mesh, axis=_AXIS)
    return (out[:, :Q],)


def _linear(function: Callable[..., Any]) -> Any:
    """Makes calls of linear attention: all tokens in order, in and out."""

    def call(*, implementation=None, initial_state=None, log_decay=None, l2_norm_epsilon=None, **arrays):
        arrays |= {"initial_state": initial_state, "log_decay": log_decay}
        arrays = {name: x for name, x in arrays.items() if x is not None}
        if initial_state is not None:
            arrays["initial_state"] = initial_state.astype(accumulator_dtype(initial_state.dtype))
        options = dict(axis_name=_AXIS, return_final_state=True, l2_norm_epsilon=l2_norm_epsilon)
        local = lambda arrays: function(**arrays, **options, implementation=implementation)
        of_tokens = lambda name, x: name not in ("initial_state", "seq_lengths") and x.ndim > 1
        specs = {name: P(None, _AXIS) if of_tokens(name, x) else P() for name, x in arrays.items()}
        mesh = _mesh(arrays["value"].shape[-3])
        return run_on_parts(local, mesh, _AXIS, (specs,), (P(None, _AXIS), P()), (arrays,))

    return call


def _of(operator: Operator, name: str, call: Callable[..., Any], cases: tuple[Case, ...]) -> Operator:
    """Gives `operator` another name, call and cases."""
    return replace(operator, name=name, call=call, cases=cases)


def _named(operator: Operator, *names: str) -> tuple[Case, ...]:
    return tuple(case for case in operator.cases if case.name in names)


_DELTA, _GATED, _ERASING = LINEAR
(_DENSE,), (_MULTI_HEAD,), (_DEFORMABLE,), (_GAT, *_) = dense.OPERATORS, MULTI_HEAD, DEFORMABLE, GRAPH
OPERATORS = (
    _of(_DENSE, "ring_attention", _sequence(ring_attention, zigzag, unzigzag), _SEQUENCE_CASES),
    _of(_DENSE, "all_gather_attention", _sequence(all_gather_attention, striped, unstriped), _SEQUENCE_CASES),
    _of(_DENSE, "ulysses_attention", _sequence(ulysses_attention), _SEQUENCE_CASES),
    _of(
        _DELTA,
        "parallel.gated_delta_rule",
        _linear(gated_delta_rule),
        _named(_DELTA, "plain", "chunks", "means"),
    ),
    _of(
        _GATED,
        "parallel.gated_linear_attention",
        _linear(gated_linear_attention),
        _named(_GATED, "plain", "channels", "means"),
    ),
    _of(
        _ERASING,
        "parallel.dplr_linear_attention",
        _linear(dplr_linear_attention),
        _named(_ERASING, "plain", "chunks", "means"),
    ),
    _of(_MULTI_HEAD, "tensor_parallel_multi_head_attention", _layer, _named(_MULTI_HEAD, "tiles", "means")),
    _of(_GAT, "sharded_graph_attention", _graph, _named(_GAT, "plain", "edge_dropout", "means")),
    _of(
        _DEFORMABLE,
        "sharded_multi_scale_deformable_attention",
        _queries,
        _named(_DEFORMABLE, "plain", "softmax", "means"),
    ),
)
