#!/usr/bin/env bash
# Guess first: a Falcon with alibi=True is built twice with the same weights, once with attn_implementation="sdpa" and once
# with "eager". The two are other ways of computing one attention. Do their outputs agree to rounding?
#
# Seen with transformers 5.24.0: no. The model adds ALiBi, divided by sqrt(head size), to the mask that it hands to its
# layers. The sdpa path adds that mask. The eager path adds the mask and then ALiBi once more, so that distances count
# twice.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import FalconConfig, FalconModel
from transformers.models.falcon import modeling_falcon

config = FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=11, alibi=True,
                      multi_query=False, new_decoder_architecture=False, bos_token_id=1, eos_token_id=2)
tokens = torch.arange(40)[None] % 11


def output(attention, slopes):
    original = modeling_falcon.build_alibi_tensor
    modeling_falcon.build_alibi_tensor = lambda *given, **named: slopes * original(*given, **named)
    torch.manual_seed(0)
    model = FalconModel._from_config(config, attn_implementation=attention, dtype=torch.float64).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) / x.shape[-1] ** 0.5)
        out = model(tokens, use_cache=False).last_hidden_state
    modeling_falcon.build_alibi_tensor = original
    return out


eager = output("eager", 1.0)
error = {slopes: float((eager - output("sdpa", slopes)).abs().max()) for slopes in (1.0, 2.0)}
print(f"eager beside sdpa with slopes as they are, and twice as steep: {error}")
assert error[2.0] < 1e-9 < 1e-2 < error[1.0], error
PYTHON
