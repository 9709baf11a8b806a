"""Fixtures of the tests of dense attention."""

import jax
import pytest

from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.plan import Tiles, product_dtype


@pytest.fixture
def tiles(monkeypatch):
    """Cuts every call into tiles of 64 x 64."""

    def small(operands, sizes, parts=1):
        return Tiles(64, 64, str(product_dtype(operands)), parts=parts)

    jax.clear_caches()  # what was traced with other tiles
    monkeypatch.setattr(planning, "default_schedule", small)
    yield
    jax.clear_caches()
