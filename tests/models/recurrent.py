"""Linear attention of published models: transformers' modules, and the naive forms of FLA."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch
from flax import nnx
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from jax_attn_bwd.layers.flax_nnx import GatedDeltaNet, KimiDeltaAttention, load_torch
from models.compare import Made, Model
from models.language import EXPERTS, MLA, decoder, randomised, tokens, whole

LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6
)
LINEAR |= dict(hidden_size=32, num_hidden_layers=1, num_experts=0)


def qwen3_next() -> Made:
    """A layer of linear attention."""
    config = qwen.Qwen3NextConfig(**LINEAR)
    return randomised(qwen.Qwen3NextGatedDeltaNet(config, 0)), {"hidden_states": tokens(32, 70)}, {}


def by_layer(ours, original, module, hidden_states, **told):
    sizes = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    layer = GatedDeltaNet(32, *sizes, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    load_torch(layer, module.state_dict())
    return ours(x=hidden_states, layer=layer)


def delta_rule(ours, original, query, key, value, g, beta, **told):
    return ours(q=query, k=key, v=value, g=g, beta=beta), None


KIMI = dict(linear_num_heads=4, linear_head_dim=8)


def kimi_layer() -> Made:
    """A layer of linear attention."""
    config = dict(hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], **KIMI)
    module = kimi_linear.KimiLinearDeltaAttention(kimi_linear.KimiLinearConfig(**config), 0)
    torch.nn.init.zeros_(module.forget_gate.dt_bias)  # the whole model fills it
    return randomised(module), {"hidden_states": tokens(32, 70)}, {}


def by_kimi_layer(ours, original, module, hidden_states, **told):
    sizes = module.num_heads, module.head_dim
    layer = KimiDeltaAttention(32, *sizes, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    load_torch(layer, module.state_dict())
    return ours(x=hidden_states, layer=layer)


def kimi() -> Made:
    config = dict(num_local_experts=2, num_experts_per_tok=1, **KIMI, **MLA)
    config |= dict(layer_types=["linear_attention", "full_attention"], moe_intermediate_size=16)
    model, _, options = decoder("kimi_linear", **config, num_key_value_heads=4, pad_token_id=0)
    return model, {"inputs_embeds": tokens(32, 70)}, options


def mamba2(ours, original, x, dt, A, B, C, D=None, dt_bias=None, dt_limit=(0, 0), **told):
    return ours(x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, dt_limit=dt_limit)


def of_mamba2() -> Made:
    config = dict(hidden_size=32, num_heads=8, head_dim=8, n_groups=2, state_size=6, chunk_size=16)
    model = whole("mamba2", **config, num_hidden_layers=2, vocab_size=11, time_step_limit=(0.05, 2.0))
    return model, {"inputs_embeds": tokens(32, 40)}, {"use_cache": False}


def of_bamba() -> Made:
    config = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16)
    model, _, options = decoder("bamba", **config, attn_layer_indices=[])
    return model, {"inputs_embeds": tokens(32, 40)}, options


def minimax() -> Made:
    config = dict(layer_types=["linear_attention", "linear_attention"], block_size=16, head_dim=8, **EXPERTS)
    model, _, options = decoder("minimax", **config)
    return model, {"inputs_embeds": tokens(32, 40)}, options


def lightning(ours, original, module, hidden_states, *arguments, **told):
    states = module.act_fn(module.qkv_proj(hidden_states))
    q, k, v = states.unflatten(-1, (module.num_attention_heads, -1)).split(module.head_dim, -1)
    out = module.norm(ours(q=q, k=k, v=v, slopes=module.slope_rate[:, 0, 0]).flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def naive(path: str, name: str) -> Any:
    """A function of FLA that needs no Triton, from its file: importing the package wants a GPU."""
    file = Path(os.environ["FLA_CORE"]) / "fla" / "ops" / path / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{path}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Retention(torch.nn.Module):
    """FLA's definition of retention; heads come before the length there."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return naive("retention", "naive_retention")(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class GLA(torch.nn.Module):
    """FLA's definition of gated linear attention, a decay for each channel."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor
    ) -> torch.Tensor:
        return naive("gla", "naive_recurrent_gla")(q, k, v, log_decay)[0]


class GDN2(torch.nn.Module):
    """FLA's definition of Gated DeltaNet 2: a gate for each channel that is erased, and that is written."""

    def forward(self, q, k, v, log_decay, b, w) -> torch.Tensor:
        return naive("gdn2", "naive_recurrent_gdn2")(q, k, v, log_decay, b, w)[0].double()


class DPLR(torch.nn.Module):
    """FLA's definition of what RWKV-7 computes; heads come before the length there."""

    def forward(self, q, k, v, a, b, log_decay) -> torch.Tensor:
        rule = naive("generalized_delta_rule/dplr", "dplr_recurrence")
        out, _ = rule(*(x.float().transpose(1, 2) for x in (q, k, v, a, b, log_decay)))
        return out.transpose(1, 2).double()


def drawn(module: type, *names: str, size: float = 1.0) -> Made:
    """Numbers by name; decays are negative."""
    inputs = {name: size * torch.randn(2, 40, 4, 8, dtype=torch.float64) for name in names}
    return module(), {name: -x.exp() if name == "log_decay" else x for name, x in inputs.items()}, {}


def by_name(ours, original, module, **inputs):
    return ours(**inputs)


MODELS: dict[str, Model] = {
    "Qwen3-Next": Model(
        qwen3_next, f"{qwen.__name__}:Qwen3NextGatedDeltaNet.forward", by_layer, is_layer=True
    ),
    "Qwen3-Next, the rule": Model(qwen3_next, f"{qwen.__name__}:torch_chunk_gated_delta_rule", delta_rule),
    "Kimi Linear": Model(
        kimi_layer, f"{kimi_linear.__name__}:KimiLinearDeltaAttention.forward", by_kimi_layer, is_layer=True
    ),
    "Kimi Linear, the rule": Model(kimi, f"{kimi_linear.__name__}:chunk_kimi_delta_attention", delta_rule),
    "Mamba-2": Model(of_mamba2, "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan", mamba2),
    "Bamba": Model(of_bamba, "transformers.models.bamba.modeling_bamba:mamba2_chunk_scan", mamba2),
    "MiniMax (lightning attention)": Model(
        minimax, "transformers.models.minimax.modeling_minimax:MiniMaxLightningAttention.forward", lightning
    ),
    "RetNet": Model(partial(drawn, Retention, "q", "k", "v"), "models.recurrent:Retention.forward", by_name),
    "GLA": Model(partial(drawn, GLA, "q", "k", "v", "log_decay"), "models.recurrent:GLA.forward", by_name),
    "Gated DeltaNet 2": Model(
        partial(drawn, GDN2, "q", "k", "v", "log_decay", "b", "w", size=0.4),
        "models.recurrent:GDN2.forward",
        by_name,
    ),
    "RWKV-7, the rule": Model(
        partial(drawn, DPLR, "q", "k", "v", "a", "b", "log_decay", size=0.4),
        "models.recurrent:DPLR.forward",
        by_name,
    ),
}
