"""Attention of vision models, of transformers and timm, and of pairs of residues."""

from functools import partial

import jax.numpy as jnp
import torch
from boltz.model.layers.attentionv2 import AttentionPairBias
from boltz.model.layers.triangular_attention.attention import TriangleAttention as BoltzTriangle
from flax import nnx
from timm.models import beit as timm_beit
from timm.models import swin_transformer as timm_swin
from transformers import AutoConfig
from transformers.models.d_fine import modeling_d_fine as d_fine
from transformers.models.deformable_detr import modeling_deformable_detr as detr
from transformers.models.esm import modeling_esmfold as esmfold
from transformers.models.rt_detr import modeling_rt_detr as rt_detr
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as rt_detr_v2
from transformers.models.sam import modeling_sam as sam

from jax_attn_bwd.layers.flax_nnx import MultiScaleDeformableAttention, load_torch
from models.compare import Made, Model
from models.language import SMALL, randomised, tokens, whole

LEVELS = ((5, 7), (3, 4), (2, 2))  # (height, width)
PIXELS = sum(height * width for height, width in LEVELS)


def swin() -> Made:
    config = dict(image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    return whole("swin", **config), {"pixel_values": torch.randn(2, 3, 16, 16).double()}, {}


def in_swin(ours, original, module, query, key, value, attention_mask, scaling, **told):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    bias = module.relative_position_bias
    hidden = attention_mask - bias()  # 0 or -100, of windows that the shift put together
    seen = (hidden > -50)[:, :1] if hidden.shape[0] > 1 else None
    side, table = bias.window_size[0], bias.relative_position_bias_table
    return ours(q=q, k=k, v=v, table=table, side=side, seen=seen), None


def beit() -> Made:
    config = dict(image_size=16, patch_size=4, use_relative_position_bias=True)
    model = whole("beit", **SMALL | config)
    for layer in model.layers:
        vars(layer.attention)["bias"] = layer.relative_position_bias
    return model, {"pixel_values": torch.randn(2, 3, 16, 16).double()}, {}


def in_beit(ours, original, module, query, key, value, attention_mask, scaling, **told):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    owner = vars(module)["bias"]
    index = owner.generate_relative_position_index((4, 4))
    return ours(q=q, k=k, v=v, table=owner.relative_position_bias_table, index=index), None


def swin_of_timm() -> Made:
    config = dict(img_size=16, patch_size=2, embed_dim=16, depths=(2,), num_heads=(2,), window_size=4)
    model = randomised(timm_swin.SwinTransformer(**config, num_classes=3))
    return model, {"x": torch.randn(2, 3, 16, 16).double()}, {}


def in_swin_of_timm(ours, original, module, x, mask=None):
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).unbind(2)
    seen = None if mask is None else (mask == 0).repeat(len(x) // len(mask), 1, 1)[:, None]
    table, side = module.relative_position_bias_table, module.window_size[0]
    return module.proj(ours(q=q, k=k, v=v, table=table, side=side, seen=seen).flatten(2))


def beit_of_timm() -> Made:
    config = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3)
    model = randomised(timm_beit.Beit(**config, use_rel_pos_bias=True))
    return model, {"x": torch.randn(2, 3, 16, 16).double()}, {}


def in_beit_of_timm(ours, original, module, x, shared_rel_pos_bias=None):
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    qkv = torch.nn.functional.linear(x, module.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, module.num_heads, -1)).unbind(2)
    table, index = module.relative_position_bias_table, module.relative_position_index
    return module.proj(ours(q=q, k=k, v=v, table=table, index=index).flatten(2))


def sam_window() -> Made:
    config = AutoConfig.for_model("sam").vision_config
    for name, x in dict(hidden_size=32, num_attention_heads=4, image_size=16, patch_size=2).items():
        setattr(config, name, x)
    layer = randomised(sam.SamVisionAttention(config, window_size=5))
    return layer, {"hidden_states": torch.randn(3, 5, 5, 32).double()}, {}


def in_sam(ours, original, module, hidden_states, output_attentions=None):
    height, width = hidden_states.shape[1:3]
    q, k, v = module.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, 4, -1)).unbind(2)
    out = ours(q=q, k=k, v=v, rel_pos_h=module.rel_pos_h, rel_pos_w=module.rel_pos_w, width=width)
    return module.proj(out.flatten(2).unflatten(1, (height, width))), None


def samples(layer: torch.nn.Module, width: int) -> Made:
    """Queries that look around boxes, or points, also beyond the border."""
    points = torch.rand(2, 9, 1 if width == 4 else 3, width).double() * 1.2 - 0.1
    inputs = {"hidden_states": tokens(32, 9), "encoder_hidden_states": tokens(32, PIXELS)}
    inputs |= {"reference_points": points}
    starts = torch.tensor([0, *torch.tensor([h * w for h, w in LEVELS]).cumsum(0)[:-1]])
    told = {"spatial_shapes": torch.tensor(LEVELS), "spatial_shapes_list": LEVELS}
    told |= (
        {} if isinstance(layer, d_fine.DFineMultiscaleDeformableAttention) else {"level_start_index": starts}
    )
    return randomised(layer), inputs, told


def deformable_detr() -> Made:
    config = AutoConfig.for_model("deformable_detr", d_model=32, num_feature_levels=3)
    return samples(detr.DeformableDetrMultiscaleDeformableAttention(config, 4, 4), 2)


def first_rt_detr() -> Made:
    config = AutoConfig.for_model("rt_detr", d_model=32, num_feature_levels=3)
    points = torch.rand(2, 9, 3, 4).double()
    module, inputs, told = samples(rt_detr.RTDetrMultiscaleDeformableAttention(config, 4, 4), 4)
    return module, inputs | {"reference_points": points}, told


def second_rt_detr(method: str) -> Made:
    config = dict(d_model=32, decoder_n_levels=3, decoder_n_points=4, decoder_attention_heads=4)
    config = AutoConfig.for_model("rt_detr_v2", **config, decoder_method=method)
    layer = rt_detr_v2.RTDetrV2MultiscaleDeformableAttention(config)
    return samples(layer, 4)


def of_d_fine() -> Made:
    config = dict(d_model=32, num_feature_levels=3, decoder_n_points=[3, 6, 2], decoder_attention_heads=4)
    return samples(d_fine.DFineMultiscaleDeformableAttention(AutoConfig.for_model("d_fine", **config)), 4)


def at_points(ours, original, module, value, shapes, levels, starts, locations, weights, step):
    return ours(value=value, levels=tuple(levels), locations=locations, weights=weights)


def by_layer(ours, original, module, hidden_states, encoder_hidden_states, reference_points, **told):
    layer = MultiScaleDeformableAttention(4, 32, num_levels=3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    load_torch(layer, module.state_dict())
    given = dict(query=hidden_states, value=encoder_hidden_states, reference_points=reference_points)
    return ours(**given, layer=layer, levels=told["spatial_shapes_list"]), None


def at_counts(ours, original, value, levels, locations, weights, counts, method="default"):
    return ours(value=value, levels=tuple(levels), locations=locations, weights=weights, counts=tuple(counts))


def triangle(starting: bool) -> Made:
    """The pairs of 7 residues, of which some are padding."""
    layer = randomised(esmfold.EsmFoldTriangleAttention(16, 8, 4, starting=starting))
    mask = (torch.rand(2, 7, 7) > 0.3) | torch.eye(7).bool()
    return layer, {"x": torch.randn(2, 7, 7, 16).double()}, {"mask": mask.double()}


def of_pairs(ours, original, module, q_x, kv_x, biases, **told):
    linears = (module.linear_q, module.linear_k, module.linear_v)
    q, k, v = (
        f(x).unflatten(-1, (module.no_heads, -1)) for f, x in zip(linears, (q_x, kv_x, kv_x), strict=True)
    )
    mask, bias = biases
    return module._wrap_up(ours(q=q, k=k, v=v, bias=bias, mask=mask > -1), q_x)


def triangle_of_boltz(starting: bool) -> Made:
    _, inputs, told = triangle(starting)
    return randomised(BoltzTriangle(16, 8, 4, starting=starting)), inputs, told


def of_boltz(ours, original, module, q_x, kv_x, bias, mask_bias, mask, **told):
    return of_pairs(ours, original, module, q_x, kv_x, (mask_bias, bias))


def single_of_boltz() -> Made:
    """Residues, of which some are padding, with a bias that is read from their pairs."""
    inputs = {"s": tokens(32, 9), "z": torch.randn(2, 9, 9, 16).double(), "k_in": tokens(32, 9)}
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    return randomised(AttentionPairBias(32, 16, 4)), inputs, {"mask": mask.double()}


def of_single(ours, original, module, s, z, mask, k_in):
    linears = (module.proj_q, module.proj_k, module.proj_v)
    q, k, v = (f(x).unflatten(-1, (4, -1)) for f, x in zip(linears, (s, k_in, k_in), strict=True))
    out = ours(q=q, k=k, v=v, bias=module.proj_z(z), mask=mask[:, None, None] > 0)
    return module.proj_o(module.proj_g(s).sigmoid() * out.flatten(2))


KIND, BOLTZ = "transformers.models", "boltz.model.layers"
MODELS: dict[str, Model] = {
    "Swin": Model(swin, f"{KIND}.swin.modeling_swin:eager_attention_forward", in_swin),
    "BEiT": Model(beit, f"{KIND}.beit.modeling_beit:eager_attention_forward", in_beit),
    "Swin of timm": Model(swin_of_timm, f"{timm_swin.__name__}:WindowAttention.forward", in_swin_of_timm),
    "BEiT of timm": Model(beit_of_timm, f"{timm_beit.__name__}:Attention.forward", in_beit_of_timm),
    "SAM": Model(sam_window, f"{sam.__name__}:SamVisionAttention.forward", in_sam),
    "Deformable-DETR": Model(
        deformable_detr, f"{detr.__name__}:MultiScaleDeformableAttention.forward", at_points
    ),
    "Deformable-DETR, the layer": Model(
        deformable_detr,
        f"{detr.__name__}:DeformableDetrMultiscaleDeformableAttention.forward",
        by_layer,
        is_layer=True,
    ),
    "RT-DETR": Model(first_rt_detr, f"{rt_detr.__name__}:MultiScaleDeformableAttention.forward", at_points),
    "RT-DETRv2": Model(
        partial(second_rt_detr, "default"),
        f"{rt_detr_v2.__name__}:multi_scale_deformable_attention_v2",
        at_counts,
    ),
    "RT-DETRv2, discrete": Model(
        partial(second_rt_detr, "discrete"),
        f"{rt_detr_v2.__name__}:multi_scale_deformable_attention_v2",
        at_counts,
    ),
    "D-FINE": Model(of_d_fine, f"{d_fine.__name__}:multi_scale_deformable_attention_v2", at_counts),
    "AlphaFold triangle attention, starting node": Model(
        partial(triangle, True), f"{esmfold.__name__}:EsmFoldAttention.forward", of_pairs
    ),
    "AlphaFold triangle attention, ending node": Model(
        partial(triangle, False), f"{esmfold.__name__}:EsmFoldAttention.forward", of_pairs
    ),
    "Boltz, triangle attention, starting node": Model(
        partial(triangle_of_boltz, True),
        f"{BOLTZ}.triangular_attention.primitives:Attention.forward",
        of_boltz,
    ),
    "Boltz, triangle attention, ending node": Model(
        partial(triangle_of_boltz, False),
        f"{BOLTZ}.triangular_attention.primitives:Attention.forward",
        of_boltz,
    ),
    "Boltz, pair bias": Model(single_of_boltz, f"{BOLTZ}.attentionv2:AttentionPairBias.forward", of_single),
}
