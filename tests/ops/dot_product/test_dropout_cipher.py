"""The cipher behind dropout: another one would draw other masks for the same key."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn_bwd._core import dropout

ONES = 0xFFFFFFFF
KNOWN = [  # Threefry-2x32 of Random123: rounds, counter, key, cipher
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (ONES, ONES), (ONES, ONES), (0xFD36D048, 0x2D17272C)),
    (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("rounds", [13, 20])
def test_known_answers(rounds):
    cases = np.array([case[1:] for case in KNOWN if case[0] == rounds], np.uint32)
    counter, key, expected = (tuple(jnp.asarray(word) for word in x.T) for x in cases.transpose(1, 0, 2))
    np.testing.assert_array_equal(dropout.threefry(key, counter, rounds), expected)
