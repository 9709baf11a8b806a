"""Cases of what runs over several devices that tests alone read."""

from typing import Any

from cases import deformable, dot_product, graph, linear_attention, multi_head
from jax_attn_bwd._core.cases import shared_segments, sink
from jax_attn_bwd.parallel.cases import sequence_case

_SECOND: dict[str, Any] = dict(B=1, T=4, N=2, K=2, H=2, Hv=1, is_causal=True, tags=("second",))
_SEQUENCE = (
    sequence_case("second", extra=sink(2, spread=1.0), **_SECOND),
    sequence_case("second_packed", extra=shared_segments, **_SECOND),
)


def _named(cases, *names):
    return tuple(case for case in cases if case.name in names)


CASES = {
    "ring_attention": _SEQUENCE,
    "all_gather_attention": _SEQUENCE,
    "ulysses_attention": _SEQUENCE,
    "parallel.gated_delta_rule": _named(linear_attention.CASES["gated_delta_rule"], "second"),
    "parallel.gated_linear_attention": _named(
        linear_attention.CASES["gated_linear_attention"], "second_channels"
    ),
    "parallel.dplr_linear_attention": _named(linear_attention.CASES["dplr_linear_attention"], "second"),
    "tensor_parallel_multi_head_attention": _named(
        multi_head.CASES["multi_head_attention"], "packed_alone", "second"
    ),
    "sharded_graph_attention": _named(graph.CASES["graph_attention"], "second_dropout"),
    "sharded_multi_scale_deformable_attention": _named(
        deformable.CASES["multi_scale_deformable_attention"], "second_softmax"
    ),
}


_BACKWARD = ("backward", "backward_wrt")  # there is no plain backward of what runs over several devices
_LIKE = {
    "ring_attention": dot_product.TRAITS["dot_product_attention"],
    "all_gather_attention": dot_product.TRAITS["dot_product_attention"],
    "ulysses_attention": dot_product.TRAITS["dot_product_attention"],
    "parallel.gated_delta_rule": linear_attention.TRAITS["gated_delta_rule"],
    "parallel.gated_linear_attention": linear_attention.TRAITS["gated_linear_attention"],
    "parallel.dplr_linear_attention": linear_attention.TRAITS["dplr_linear_attention"],
    "tensor_parallel_multi_head_attention": multi_head.TRAITS["multi_head_attention"],
    "sharded_graph_attention": graph.TRAITS["graph_attention"],
    "sharded_multi_scale_deformable_attention": deformable.TRAITS["multi_scale_deformable_attention"],
}
TRAITS = {
    name: {key: x for key, x in traits.items() if key not in _BACKWARD} for name, traits in _LIKE.items()
}
