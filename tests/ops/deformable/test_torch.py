"""`torch.nn.functional.grid_sample`, to which published detectors fall back."""

import numpy as np
import pytest
from helpers import assert_trees_close, thorough
from ops.deformable.calls import evaluate, operator, sample


def grid_sample(torch, value, levels, at, weights, padding_mode):
    """The pure PyTorch form that the published detectors fall back to."""
    B, _, M, D = value.shape
    Q, out, start = at.shape[1], 0, 0
    for level, (H, W) in enumerate(levels):
        plane = value[:, start : start + H * W].permute(0, 2, 3, 1).reshape(B * M, D, H, W)
        grid = 2 * at[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1  # [B * M, Q, P, 2]
        read = torch.nn.functional.grid_sample(
            plane, grid, mode="bilinear", padding_mode=padding_mode, align_corners=False
        )  # [B * M, D, Q, P]
        weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        out = out + (read * weight).sum(-1).reshape(B, M, D, Q)
        start += H * W
    return out.permute(0, 3, 1, 2).flatten(2)


@pytest.mark.parametrize("padding_mode", [pytest.param("zeros", marks=thorough), "border"])
def test_as_grid_sample_of_torch(padding_mode):
    torch = pytest.importorskip("torch")
    levels = ((6, 4), (3, 5), (1, 1), (1, 7))
    arrays = sample(levels, B=2, Q=17, M=3, D=5, P=3)
    dout = np.random.default_rng(9).standard_normal((2, 17, 15))
    options = {"spatial_shapes": levels, "padding_mode": padding_mode}
    got = evaluate(operator.call, arrays, options, dout)
    value, at, weights = (
        torch.tensor(np.asarray(arrays[name]), requires_grad=True)
        for name in ("value", "sampling_locations", "attention_weights")
    )
    out = grid_sample(torch, value, levels, at, weights, padding_mode)
    out.backward(torch.tensor(dout))
    expected = {"out": out.detach(), "value": value.grad}
    expected |= {"sampling_locations": at.grad, "attention_weights": weights.grad}
    assert_trees_close(got, expected, 1e-12)
