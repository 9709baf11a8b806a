#!/usr/bin/env bash
# Guess first: LocalAttention(window_size=6, autopad=True) of local-attention pads 21 tokens to 24, and cuts the output back
# to 21. Attention goes both ways and no mask is given. Are the first 21 outputs those of the 21 tokens alone?
#
# Seen with local-attention 1.11.2: no. The three zeros at the end are keys like any others: their logits are 0, they take
# probability, and they give nothing. The last tokens' outputs are too small. With mask=torch.ones(1, 21, dtype=torch.bool),
# which hides no token, the padding is hidden and the outputs are right.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "local-attention==1.11.2"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from local_attention import LocalAttention

torch.manual_seed(0)
layer = LocalAttention(window_size=6, autopad=True, exact_windowsize=True, use_rotary_pos_emb=False)
q, k, v = torch.randn(3, 1, 1, 21, 8)
i = torch.arange(21)
near = (i[:, None] - i).abs() <= 6
right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near)
plain = (layer(q, k, v) - right).abs().amax((0, 1, 3))
masked = (layer(q, k, v, mask=torch.ones(1, 21, dtype=torch.bool)) - right).abs().max()
print(f"error of each token without a mask: {[round(float(x), 2) for x in plain]}; with one: {masked:.0e}")
assert masked < 1e-5 and plain[:12].max() < 1e-5 and plain[-1] > 0.05
PYTHON
