"""Whatever a checkpoint policy saves, it is nothing of the size of a tile of the T x S plane."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jax_attn_bwd import dot_product_attention

POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_tile_is_saved(policy, capsys):
    query = jnp.ones((1, 2048, 2, 4))

    @partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def block(query):
        return dot_product_attention(query, 2 * query, 3 * query, is_causal=True)

    print_saved_residuals(lambda query: jnp.sin(block(query)).sum(), query)
    shapes = re.findall(r"^\w+\[([\d,]*)\]", capsys.readouterr().out, re.MULTILINE)
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
    assert sizes
    assert max(sizes) <= query.size
