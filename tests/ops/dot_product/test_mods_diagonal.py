"""What a mask's jaxpr tells of rows that see the column of their own position."""

import jax.numpy as jnp
import numpy as np
from ops.dot_product.test_mods import IDS, NAMED, N, evaluated

from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Sizes


def strictly_below(batch, head, row, column, ids):
    return (ids[row] == ids[column]) & (column < row)


def equal(batch, head, row, column, x):
    return x[row] == x[column]


NAN = np.where(np.arange(N) % 3 == 1, np.nan, 1.0)
OTHERS = {
    "strict": (strictly_below, (IDS,)),
    "floats": (equal, (NAN,)),
    "complex": (equal, (NAN.astype(np.complex64),)),
}


def test_what_the_jaxpr_tells_of_the_diagonal():
    """That all see themselves is told of all masks of which it holds for any array; of others never."""
    told = {}
    for name, (mask, args) in (NAMED | OTHERS).items():
        given = Mask(
            mask_mod=mask,
            mod_args=tuple(map(jnp.asarray, args)),
            batch_number=jnp.arange(2, dtype=jnp.int32),
            head_number=jnp.arange(4, dtype=jnp.int32),
        )
        found = visibility.used_queries_and_keys(given, None, Sizes((1,), N, N, 1, 1))
        told[name] = found == (None, None)
        assert not told[name] or evaluated(mask, args).diagonal().all()
    assert {name for name, is_told in told.items() if not is_told} == {
        "global_tokens",
        "tree",
        "not",
        *OTHERS,
    }
