"""Deformable attention beside Deformable-DETR's module in PyTorch, with its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.deformable_cases import LEVELS, NAMES, B, C, L, M, Q, S, build, inputs, torch_state
from layers.frameworks import jitted

from jax_attn_bwd.layers.deformable import from_torch


def torch_module(torch, counts):
    """Deformable-DETR's module in plain PyTorch: one `grid_sample` for each level."""
    F, nn = torch.nn.functional, torch.nn
    K = sum(counts)

    class MSDeformAttn(nn.Module):
        def __init__(self):
            super().__init__()
            self.sampling_offsets, self.attention_weights = (nn.Linear(C, 2 * M * K), nn.Linear(C, M * K))
            self.value_proj, self.output_proj = nn.Linear(C, C), nn.Linear(C, C)

        def forward(self, query, points, value, padding):
            value = self.value_proj(value).masked_fill(padding[..., None], 0.0)
            heads = value.view(B, S, M, C // M).permute(0, 2, 3, 1).flatten(0, 1)  # [B M, D, S]
            offsets = self.sampling_offsets(query).view(B, Q, M, K, 2)
            weights = self.attention_weights(query).view(B, Q, M, K).softmax(-1)
            maps = heads.split([H * W for H, W in LEVELS], -1)
            out, shifts, shares = 0, offsets.split(counts, 3), weights.split(counts, 3)
            for level, ((H, W), P) in enumerate(zip(LEVELS, counts, strict=True)):
                at, shift = points[:, :, None, level, None], shifts[level]
                shift = shift / P * at[..., 2:] * 0.5 if at.shape[-1] == 4 else shift / torch.tensor([W, H])
                grid = (2 * (at[..., :2] + shift) - 1).transpose(1, 2).flatten(0, 1)  # [B M, Q, P, 2]
                pixels = F.grid_sample(maps[level].unflatten(-1, (H, W)), grid, align_corners=False)
                share = shares[level].transpose(1, 2).flatten(0, 1)[:, None]  # [B M, 1, Q, P]
                out = out + (pixels * share).sum(-1)  # [B M, D, Q]
            return self.output_proj(out.view(B, C, Q).transpose(1, 2))

    return MSDeformAttn().double()


@pytest.mark.parametrize(
    ("framework", "coordinates", "counts"),
    [
        ("flax_linen", 2, (2, 2, 2)),
        pytest.param("flax_nnx", 4, (3, 1, 2), marks=thorough),
        pytest.param("haiku", 2, (1, 3, 1), marks=thorough),
        pytest.param("equinox", 4, (2, 2, 2), marks=thorough),
    ],
)
def test_as_pytorch_with_its_parameters(rng, framework, coordinates, counts):
    torch = pytest.importorskip("torch", reason="compares with torch's grid_sample")
    module = torch_module(torch, counts)
    prefix = "decoder.layers.0.cross_attn."
    state = torch_state(rng, counts)
    module.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
    query, points, value, mask = inputs(rng, (L, coordinates), masked=True)
    tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in (query, points, value)]
    out = module(*tensors, ~torch.tensor(np.asarray(mask)))  # its padding mask is our mask's opposite
    dout = rng.standard_normal(out.shape)
    out.backward(torch.tensor(dout))
    slopes = from_torch({name: p.grad for name, p in module.named_parameters()})

    params = from_torch({prefix + name: x for name, x in module.state_dict().items()}, prefix)
    layer = build(framework, num_points=counts)

    @jitted
    def run(dout, *arrays):
        out, pullback = jax.vjp(lambda *arrays: layer.call(*arrays, LEVELS, mask), *arrays)
        return out, pullback(dout)

    got, (dparams, *grads) = run(jnp.asarray(dout), params, query, points, value)
    assert_close(got, out.detach().numpy(), 1e-12)
    for x, tensor in zip(grads, tensors, strict=True):
        assert_close(x, tensor.grad.numpy(), 1e-11)
    for name in NAMES:
        for part in ("kernel", "bias"):
            assert_close(dparams[name][part], slopes[name][part], 1e-11, f"{name}.{part}")


def test_from_torch_names_what_is_missing(rng):
    state = torch_state(rng, prefix="encoder.0.")
    with pytest.raises(ValueError, match=r"'sampling_offsets.weight', got \['encoder.0.sampling"):
        from_torch(state)
    del state["encoder.0.value_proj.bias"]
    with pytest.raises(ValueError, match=r"'encoder\.0\.value_proj\.bias'"):
        from_torch(state, "encoder.0.")


def test_from_torch_takes_parameters_and_bfloat16(rng):
    torch = pytest.importorskip("torch", reason="its tensors are the matter")
    state = {name: torch.tensor(x) for name, x in torch_state(rng).items()}
    expected = from_torch(state)
    wanted = {name: torch.nn.Parameter(x) for name, x in state.items()}
    narrow = {name: x.to(torch.bfloat16) for name, x in state.items()}
    for name in NAMES:
        assert_close(from_torch(wanted)[name]["kernel"], expected[name]["kernel"], 0)
        got = from_torch(narrow)[name]["kernel"]
        assert got.dtype == jnp.bfloat16
        assert_close(
            got.astype("float32"), expected[name]["kernel"].astype(jnp.bfloat16).astype("float32"), 0
        )
