"""Language models of transformers, whole and small: token embeddings go in, gradients come out."""

from functools import partial
from typing import Any

import torch
import transformers

from models.compare import Made, Model

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=11)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
PAIR = dict(encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
PAIR |= dict(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=11)
GEMMA3 = dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=12)
GEMMA3 |= dict(layer_types=["sliding_attention", "full_attention"])
MLA = dict(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


def randomised(module: torch.nn.Module) -> Any:
    """The module in float64 with weights that make logits of the order of 1."""
    module = module.double().eval()
    for x in module.parameters():
        spread = 0.3 if x.ndim == 1 else 1.5 * x.shape[-1] ** -0.5
        x.data = (x.data if x.ndim == 1 else 0) + spread * torch.randn_like(x)
    return module


def tokens(width: int, length: int = 23) -> torch.Tensor:
    return torch.randn(2, length, width, dtype=torch.float64)


def whole(name: str, *, attention: str = "eager", **config: Any) -> Any:
    """A model of transformers by the name of its kind."""
    config = transformers.AutoConfig.for_model(name, **config)
    eager = dict(attn_implementation=attention, experts_implementation="eager")
    return randomised(transformers.AutoModel.from_config(config, **eager))


def decoder(name: str, **config: Any) -> Made:
    config = {**SMALL, "num_key_value_heads": 2, **config}
    return whole(name, **config), {"inputs_embeds": tokens(32)}, {"use_cache": False}


def nothing(module: Any, told: Any) -> dict[str, Any]:
    return {}


def heads(names: Any = nothing, is_ours: Any = lambda module: True) -> Any:
    """What stands in for an `eager_attention_forward`: queries, keys and values are `[B, N, T, H]` there."""

    def adapt(ours, original, module, query, key, value, attention_mask, scaling=None, **told):
        if not is_ours(module):
            return original(module, query, key, value, attention_mask, scaling=scaling, **told)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return ours(q=q, k=k, v=v, scale=scaling, **names(module, told)), None

    return adapt


def interface(name: str, module: str, names: Any = nothing, **config: Any) -> Model:
    place = f"transformers.models.{module}:eager_attention_forward"
    return Model(partial(decoder, name, **config), place, heads(names))


def window_of(module: Any, told: Any) -> dict[str, Any]:
    return {"window": told.get("sliding_window"), "cap": told.get("softcap")}


def gemma3_layer(ours, original, module, hidden_states, *arguments, **told):
    config = module.config
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, module.head_dim)
    sizes += (config.query_pre_attn_scalar, config.sliding_window)
    weights = {name: x.float().numpy() for name, x in module.state_dict().items()}
    return ours(x=hidden_states, is_local=module.is_sliding, sizes=sizes, weights=weights), None


def chunk_of(module: Any, told: Any) -> dict[str, Any]:
    return {"chunk": module.config.attention_chunk_size if module.use_rope else 2**30}


def encoder(name: str, **config: Any) -> Made:
    """The second of two texts is shorter, and each of its tokens, padding too, sees some of it."""
    mask = torch.arange(23) < torch.tensor([[23], [20]])
    return whole(name, **{**SMALL, **config}), {"inputs_embeds": tokens(32)}, {"attention_mask": mask.long()}


def t5() -> Made:
    config = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=11)
    model = whole("t5", **config)
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            first = stack.block[0].layer[0].SelfAttention
            vars(block.layer[0].SelfAttention)["table"] = first.relative_attention_bias.weight
    inputs = {"inputs_embeds": tokens(32, 150), "decoder_inputs_embeds": tokens(32, 140)}
    return model, inputs, {"use_cache": False}


def table_of(module: Any, told: Any) -> dict[str, Any]:
    return {"table": vars(module).get("table")}


def t5_part(is_ours: Any) -> Model:
    place = "transformers.models.t5.modeling_t5:eager_attention_forward"
    return Model(t5, place, heads(table_of, is_ours))


def bart() -> Made:
    """The second of the texts that are read is shorter."""
    mask = torch.arange(23) < torch.tensor([[23], [17]])
    inputs = {"inputs_embeds": tokens(32), "decoder_inputs_embeds": tokens(32, 19)}
    return whole("bart", **PAIR), inputs, {"attention_mask": mask.long(), "use_cache": False}


def seen_in_bart(module: Any, told: Any) -> dict[str, Any]:
    return {"is_causal": module.is_causal, "lengths": None if module.is_causal else torch.tensor([23, 17])}


def whisper() -> Made:
    model = whole("whisper", **PAIR, max_source_positions=20, num_mel_bins=6, pad_token_id=0)
    inputs = {"input_features": torch.randn(2, 6, 40).double(), "decoder_inputs_embeds": tokens(32)}
    return model, inputs, {"use_cache": False}


def seen_in_whisper(module: Any, told: Any) -> dict[str, Any]:
    return {"is_causal": module.is_causal}


def bloom(ours, original, module, hidden, residual, **told):
    q, k, v = (x.transpose(1, 2) for x in module._reshape(module.query_key_value(hidden)))
    out = ours(q=q, k=k, v=v, heads=module.num_heads)
    return module.dense(out.flatten(2)) + residual, None


def mpt(ours, original, module, hidden, **told):
    q, k, v = (x.unflatten(-1, (module.n_heads, -1)) for x in module.Wqkv(hidden).chunk(3, -1))
    return module.out_proj(ours(q=q, k=k, v=v, heads=module.n_heads).flatten(2)), None


def falcon(ours, original, module, hidden, **told):
    q, k, v = module._split_heads(module.query_key_value(hidden))
    return module.dense(ours(q=q, k=k, v=v, heads=module.num_heads).flatten(2)), None


def of_falcon(attention: str) -> Model:
    config = dict(hidden_size=48, num_attention_heads=6, alibi=True, multi_query=False, bias=True)
    config |= dict(new_decoder_architecture=False, num_hidden_layers=2, vocab_size=11, attention=attention)

    def make() -> Made:
        return whole("falcon", **config), {"inputs_embeds": tokens(48, 290)}, {"use_cache": False}

    return Model(make, "transformers.models.falcon.modeling_falcon:FalconAttention.forward", falcon)


def of_bloom() -> Made:
    model = whole("bloom", hidden_size=48, n_layer=2, n_head=6, vocab_size=11)
    return model, {"inputs_embeds": tokens(48)}, {"use_cache": False}


def of_mpt() -> Made:
    model = whole("mpt", d_model=48, n_layers=2, n_heads=6, vocab_size=11)
    return model, {"inputs_embeds": tokens(48)}, {"use_cache": False}


def deberta() -> Made:
    config = dict(position_buckets=8, max_position_embeddings=64, relative_attention=True, share_att_key=True)
    config |= dict(pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_biased_input=False)
    return whole("deberta-v2", **SMALL, **config), {"inputs_embeds": tokens(32, 50)}, {}


def in_deberta(ours, original, module, hidden_states, *arguments, rel_embeddings, **told):
    heads = lambda layer, x: layer(x).unflatten(-1, (module.num_attention_heads, -1))
    q, k, v = (heads(f, hidden_states) for f in (module.query_proj, module.key_proj, module.value_proj))
    pos_q, pos_k = (heads(f, rel_embeddings) for f in (module.query_proj, module.key_proj))
    sizes = {"buckets": module.position_buckets, "longest": module.max_relative_positions}
    return ours(q=q, k=k, v=v, pos_q=pos_q, pos_k=pos_k, **sizes).flatten(2), None


MODELS: dict[str, Model] = {
    "gpt-oss": interface(
        "gpt_oss", "gpt_oss.modeling_gpt_oss",
        lambda module, told: {"sinks": module.sinks, "window": module.sliding_window},
        **EXPERTS, sliding_window=6, head_dim=8,
    ),
    "Gemma 2": interface(
        "gemma2", "gemma2.modeling_gemma2", window_of, head_dim=8,
        sliding_window=6, query_pre_attn_scalar=12, attn_logit_softcapping=2.0,
    ),
    "Gemma 3": interface(
        "gemma3_text", "gemma3.modeling_gemma3", window_of, **GEMMA3
    ),
    "Gemma 3, the layer": Model(
        partial(decoder, "gemma3_text", **GEMMA3),
        "transformers.models.gemma3.modeling_gemma3:Gemma3Attention.forward", gemma3_layer, is_layer=True,
    ),
    "Llama 3": interface("llama", "llama.modeling_llama", head_dim=8),
    "Qwen3": interface("qwen3", "qwen3.modeling_qwen3", head_dim=8),
    "Mistral": interface("mistral", "mistral.modeling_mistral", window_of, sliding_window=6),
    "Llama 4": interface(
        "llama4_text", "llama4.modeling_llama4", chunk_of, head_dim=8, intermediate_size_mlp=48,
        **EXPERTS, attention_chunk_size=8, no_rope_layers=[1, 0], floor_scale=4, attn_temperature_tuning=True,
    ),
    "DeepSeek-V3 (MLA)": interface(
        "deepseek_v3", "deepseek_v3.modeling_deepseek_v3", **MLA, first_k_dense_replace=2,
        num_key_value_heads=4,
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, rope_theta=1e4,
            original_max_position_embeddings=16,
        ),
    ),
    "T5, encoder": t5_part(lambda module: hasattr(module, "table") and not module.is_decoder),
    "T5, decoder": t5_part(lambda module: hasattr(module, "table") and module.is_decoder),
    "T5, across": t5_part(lambda module: not hasattr(module, "table")),
    "BLOOM": Model(of_bloom, "transformers.models.bloom.modeling_bloom:BloomAttention.forward", bloom),
    "MPT": Model(of_mpt, "transformers.models.mpt.modeling_mpt:MptAttention.forward", mpt),
    "Falcon with ALiBi, sdpa": of_falcon("sdpa"),
    "Falcon with ALiBi, eager": of_falcon("eager"),
    "Whisper": Model(
        whisper, "transformers.models.whisper.modeling_whisper:eager_attention_forward",
        heads(seen_in_whisper),
    ),
    "BART": Model(
        bart, "transformers.models.bart.modeling_bart:eager_attention_forward", heads(seen_in_bart)
    ),
    "ModernBERT": Model(
        partial(encoder, "modernbert", local_attention=8, global_attn_every_n_layers=2, pad_token_id=0),
        "transformers.models.modernbert.modeling_modernbert:eager_attention_forward",
        heads(
            lambda module, told: {
                "local_attention": module.sliding_window and module.config.local_attention,
                "lengths": torch.tensor([23, 20]),
            }
        ),
    ),
    "DeBERTa v3": Model(
        deberta, "transformers.models.deberta_v2.modeling_deberta_v2:DisentangledSelfAttention.forward",
        in_deberta,
    ),
}  # fmt: skip
