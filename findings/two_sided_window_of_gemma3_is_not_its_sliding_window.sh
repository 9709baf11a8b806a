#!/usr/bin/env bash
# Guess first: Gemma 3 with sliding_window=4 lets a token see 4 keys, its own among them. With
# use_bidirectional_attention=True (as EmbeddingGemma has it) a token sees keys to both sides. How many, and what does
# config.sliding_window say?
#
# Seen with transformers 5.24.0: five keys, two to either side, and the config that was made with 4 says 3. A window is half
# as wide to either side there, and its own token comes on top.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel


def keys_seen(two_sided):
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        vocab_size=11, sliding_window=4, layer_types=["sliding_attention"], use_bidirectional_attention=two_sided,
    )
    model = Gemma3TextModel._from_config(config, attn_implementation="eager").eval()
    x = torch.randn(1, 21, 32, requires_grad=True)
    model(inputs_embeds=x, use_cache=False).last_hidden_state[0, 10].sin().sum().backward()
    return int((x.grad[0].abs().amax(-1) > 0).sum()), config.sliding_window


found = {two_sided: keys_seen(two_sided) for two_sided in (False, True)}
print(f"two-sided: (keys that token 10 sees, sliding_window of the config): {found}")
assert found == {False: (4, 4), True: (5, 3)}, found
PYTHON
