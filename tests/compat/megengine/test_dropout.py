"""Dropout of weights and output, and the residual link."""

import jax
import numpy as np
from compat.megengine.calls import ALL, E, H, L, N, S, draw
from compat.programs import QUICK
from helpers import assert_close

from jax_attn_bwd.compat import megengine


def test_dropout_of_weights_and_output():
    """Weights come back as they multiply the values; the output is dropped after its bias; reslink is not."""
    given = draw((E, E, E, E), ALL)

    def run(training, attn_drop, out_drop, reslink=False):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, attn_drop, out_drop,
            given["io_weight_bias"], qbias=True, kbias=True, vbias=True, obias=True,
            need_weights=True, training=training, reslink=reslink, dropout_key=jax.random.key(1),
        )  # fmt: skip

    program = jax.jit(
        lambda: (
            run(True, 0.5, 0.0),
            run(True, 0.5, 0.4),
            run(True, 0.5, 0.4, True),
            run(False, 0.5, 0.4),
            run(True, 0.0, 0.0),
        ),
        compiler_options=QUICK,
    )
    (out, weights), (dropped, _), (linked, _), evaluated, plain = program()
    for x, y in zip(evaluated, plain, strict=True):
        np.testing.assert_array_equal(x, y)
    parts = megengine.unpack_io_weight_bias(
        given["io_weight_bias"], E, H, qbias=True, kbias=True, vbias=True, obias=True, k_size=6, v_size=10
    )
    v = np.asarray(given["value"] @ parts.value_weight + parts.value_bias[None, None])
    v = np.moveaxis(v.reshape(N, S, H, E // H), 2, 1)
    z = np.moveaxis(np.asarray(weights).reshape(N, H, L, S) @ v, 1, 2).reshape(N, L, E)
    assert_close(out, z @ parts.out_weight + parts.out_bias[None, None], 1e-12)
    kept = np.asarray(weights) != 0
    assert_close(np.asarray(weights)[kept], 2 * np.asarray(plain[1])[kept], 1e-12)
    assert 0.3 < kept.mean() < 0.7
    kept = np.asarray(dropped) != 0
    assert 0.4 < kept.mean() < 0.8
    assert_close(np.asarray(dropped)[kept], np.asarray(out)[kept] / 0.6, 1e-12)
    assert_close(linked, dropped + given["query"], 1e-12)
