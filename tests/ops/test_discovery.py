"""The contract tests see every operator."""

from helpers import OPERATORS

import jax_attn_bwd


def test_every_operator_is_discovered():
    """Each is a public function with a backward of its own."""
    with_backward = {name.removesuffix("_bwd") for name in jax_attn_bwd.__all__ if name.endswith("_bwd")}
    assert {operator.name for operator in OPERATORS} == with_backward
