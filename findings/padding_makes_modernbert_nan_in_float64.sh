#!/usr/bin/env bash
# Guess first: a small ModernBERT sees 4 tokens to either side. Of 20 tokens the last 10 are padding. In float32 the outputs
# of the first 10 are finite. Is the same model in float64 the more exact one?
#
# Seen with transformers 5.24.0 and attn_implementation="eager": no, the last tokens are NaN. They see padding alone. Hidden
# logits get the least number of their dtype, which keeps a row of them finite; but the softmax is taken in float32, and the
# least float64 is -inf there. Full attention in the next layer takes NaN times 0 to all tokens of that text.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import ModernBertConfig, ModernBertModel

special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
config = ModernBertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=11,
                          local_attention=8, layer_types=["sliding_attention", "full_attention"], **special)
model = ModernBertModel._from_config(config, attn_implementation="eager").eval()
tokens, mask = torch.arange(20)[None] % 11, (torch.arange(20) < 10)[None].long()
found = {str(x): model.to(x)(tokens, attention_mask=mask).last_hidden_state[0, :10] for x in (torch.float32, torch.float64)}
nan = {name: bool(x.isnan().any()) for name, x in found.items()}
print(f"NaN among the tokens that are not padding: {nan}")
assert nan == {"torch.float32": False, "torch.float64": True}, nan
PYTHON
