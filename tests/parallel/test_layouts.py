"""Orders of tokens, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel.sequences import LAYOUTS

from jax_attn_bwd import parallel


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize(
    ("shape", "n", "axis"), [((3, 24, 2), 4, 1), ((24,), 1, 0), ((2, 5, 36), 6, -1), ((0,), 2, 0)]
)
def test_inverses(layout, shape, n, axis):
    lay, back = LAYOUTS[layout]
    x = np.arange(np.prod(shape)).reshape(shape)
    assert isinstance(lay(x, n, axis), np.ndarray)
    np.testing.assert_array_equal(back(lay(x, n, axis), n, axis), x)
    np.testing.assert_array_equal(lay(back(x, n, axis), n, axis), x)
    on_device = jax.jit(lambda x: lay(x, n, axis))(jnp.asarray(x))
    np.testing.assert_array_equal(on_device, lay(x, n, axis))


def test_parts():
    tokens = np.arange(12)
    assert parallel.zigzag(tokens, 3).reshape(3, 4).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert parallel.striped(tokens, 3).reshape(3, 4).tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: parallel.zigzag(np.arange(12), 4),
            ValueError,
            r"zigzag: x must have a multiple of 2n = 8 tokens",
        ),
        (
            lambda: parallel.unstriped(np.arange(12), 5),
            ValueError,
            r"unstriped: x must have a multiple of n = 5",
        ),
        (lambda: parallel.striped(np.arange(12), 0), ValueError, r"striped: n must be a positive int, got 0"),
        (
            lambda: parallel.unzigzag(np.arange(12), 2, 1),
            ValueError,
            r"unzigzag: axis must be one of the 1 axes",
        ),
        (
            lambda: parallel.zigzag(np.arange(12), 2.0),
            TypeError,
            r"zigzag: n must be a positive int, got float",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
