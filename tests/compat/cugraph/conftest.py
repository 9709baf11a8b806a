"""The edges of every test here."""

import pytest
from compat.cugraph.calls import N_SRC, NNZ


@pytest.fixture
def edges(rng):
    """(source, destination) of each edge in the caller's order; node 2 has none, one edge is there twice."""
    dst = rng.choice([0, 1, 3, 4, 5], NNZ)
    src = rng.integers(0, N_SRC, NNZ)
    src[3], dst[3] = src[9], dst[9]
    return src, dst
