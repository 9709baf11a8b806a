"""What MegEngine itself computed, and its formulas written out for what it refuses."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.megengine.calls import ALL, NONE, E, H, L, S, assert_as_source, draw
from compat.programs import QUICK, outputs_and_gradients
from helpers import assert_close, thorough

from jax_attn_bwd.compat import megengine

GOLDEN = Path(
    os.environ.get("JAX_ATTN_BWD_MEGENGINE_GOLDEN")
    or Path(__file__).parents[4] / "shared/golden/megengine_multi_head_attention.npz"
)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the outputs of MegEngine 1.13 are not on this machine")
def test_as_megengine_itself():
    """Every recorded call: output, weights, gradients of query, key, value and the packed weights."""
    arrays = np.load(GOLDEN)
    cases = json.loads(str(arrays["meta"]))
    assert cases
    for c in cases:
        name = c["name"]
        masks = ("attn_mask", "key_padding_mask")
        masks = {m: arrays[f"{name}/{m}"] for m in masks if f"{name}/{m}" in arrays.files}

        def run(x, c=c, masks=masks):
            return megengine.multi_head_attention(
                *x[:3], c["E"], c["H"], 0.0, 0.0, x[3], c["qp"], c["kp"], c["vp"], c["op"], c["qb"],
                c["kb"], c["vb"], c["ob"], need_weights=c["need"], average_attn_weights=c["avg"],
                is_causal=c["causal"], **masks,
            )  # fmt: skip

        def cotangents(outputs, dy=arrays[f"{name}/dy"]):
            return dy, None if outputs[1] is None else np.zeros(outputs[1].shape, np.float32)

        moving = [jnp.asarray(arrays[f"{name}/{x}"]) for x in "qkvw"]
        (out, weights), gradients = outputs_and_gradients(run, moving, cotangents)
        assert_close(out, arrays[f"{name}/out"], 1e-5, f"{name}: out")
        assert (weights is None) == (f"{name}/weights" not in arrays.files)
        if weights is not None:
            assert_close(weights, arrays[f"{name}/weights"], 1e-5, f"{name}: weights")
        for x, gradient in zip("qkvw", gradients, strict=True):
            assert_close(gradient, arrays[f"{name}/d{x}"], 1e-5, f"{name}: d{x}")


@pytest.mark.parametrize(
    ("sizes", "flags", "widths"),
    [
        ((E, E, E, E), ALL, (6, 10)),
        pytest.param((0, 0, 6, 5), (False, False, True, False), (E, 3), marks=thorough),
        ((0, 0, 0, 0), (False,) * 4, (E, 3)),
    ],
    ids=["projected", "value_and_output", "none"],
)
def test_what_megengine_refuses(sizes, flags, widths):
    """Appended rows beside projections of every kind, and the residual link where the widths allow it."""
    given = draw(sizes, flags, *widths, rows=True)
    of_source = {"add_zero_attn": True, "reslink": sizes[3] == E}
    assert_as_source(sizes, flags, given, NONE, {}, of_source=of_source, **of_source)


@pytest.mark.parametrize("average", [pytest.param(False, marks=thorough), True], ids=["per_head", "averaged"])
def test_unbatched_input_is_a_batch_of_one_without_its_axis(average):
    given = draw(batch=1)
    mask, padding = np.triu(np.ones((L, S), bool), 3), np.arange(S) > 3

    def run(given, mask, padding):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, 0.0, 0.0, given["io_weight_bias"],
            qbias=True, kbias=True, vbias=True, obias=True, need_weights=True,
            average_attn_weights=average, attn_mask=mask, key_padding_mask=padding,
        )  # fmt: skip

    alone = {name: x if name == "io_weight_bias" else x[0] for name, x in given.items()}
    both = jax.jit(
        lambda: (run(alone, mask, padding), run(given, mask, padding[None])), compiler_options=QUICK
    )
    (out, weights), (batched, of_batch) = both()
    assert out.shape == (L, E)
    assert weights.shape == ((L, S) if average else (H, L, S))
    assert_close(out, batched[0], 1e-13)
    assert_close(weights, of_batch[0] if average else of_batch, 1e-13)
