"""The contract tests see every operator."""

from helpers import OPERATORS


def test_every_operator_is_discovered():
    assert {operator.name for operator in OPERATORS} == {
        "dot_product_attention",
        "edge_max",
        "edge_mean",
        "edge_softmax",
        "edge_sum",
        "gated_delta_rule",
        "gated_linear_attention",
        "graph_attention",
        "graph_attention_v2",
        "graph_transformer_attention",
        "multi_head_attention",
        "multi_scale_deformable_attention",
        "scaled_masked_softmax",
    }
