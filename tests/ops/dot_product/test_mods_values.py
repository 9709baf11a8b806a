"""What named masks and scores give for each element, by themselves; and which batch entry is which number."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import dot_product_attention, mods


@pytest.mark.parametrize("heads", [4, 6])
def test_static_alibi_has_the_slopes_of_the_paper(heads):
    logits, *at = (jnp.asarray(x) for x in np.ix_([0.5], [0], np.arange(heads), np.arange(5), np.arange(3)))
    expected = mods.alibi(logits, *at, mods.alibi_slopes(heads).astype(logits.dtype))
    assert_close(mods.static_alibi(heads)(logits, *at), expected, 1e-7)


def test_trees_and_documents_are_those_of_the_entry():
    trees = [mods.tree_intervals(parents) for parents in ([-1, 0, 1, 1, 0, 4], [-1, -1, 1, 0, 2, 2])]
    documents = [(np.array(ids, np.int32),) for ids in ([0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2])]
    for mask, entries in ((mods.tree, trees), (mods.document, documents)):
        at = np.ix_(range(2), range(1), range(6), range(6))
        together = mask(*at, *(np.stack(x) for x in zip(*entries, strict=True)))
        for seen, own in zip(together, entries, strict=True):
            np.testing.assert_array_equal(seen, mask(*at, *own)[0])


def test_entries_of_two_batch_axes_are_counted_row_by_row():
    v = jnp.arange(12.0).reshape(2, 3, 2, 1, 1)
    chosen = np.array([0, 1, 1, 0, 0, 1], np.int32)
    one = lambda batch, head, row, column, chosen: column == chosen[batch]
    out = dot_product_attention(0 * v, 0 * v, v, mask_mod=one, mod_args=(chosen,))
    np.testing.assert_array_equal(out[:, :, 1].ravel(), 2 * np.arange(6) + chosen)
