#!/usr/bin/env bash
# Guess first: torch's nn.MultiheadAttention is given a boolean mask that hides all keys from one query. Does what it returns
# for that query depend on need_weights, which asks for the weights beside the output, and on whether gradients are recorded?
#
# Seen with torch 2.13.0 on a CPU: on both. With need_weights=True the row is NaN. With need_weights=False it is the bias of
# the output projection, since scaled_dot_product_attention gives 0 for such a row. In eval mode without gradients, where
# a fused path runs, it is NaN again, with need_weights=False too.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" numpy
"$work/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
torch.nn.init.normal_(layer.out_proj.bias)
hidden = torch.zeros(3, 3, dtype=torch.bool)
hidden[1] = True


def row(need_weights, fused):
    layer.train(not fused)
    with torch.set_grad_enabled(not fused):
        found = layer(x, x, x, attn_mask=hidden, need_weights=need_weights)[0][0, 1]
    return "NaN" if found.isnan().all() else "bias" if torch.allclose(found, layer.out_proj.bias) else "other"


found = {(w, f): row(w, f) for w in (True, False) for f in (False, True)}
print(f"torch {torch.__version__}: (need_weights, fused path): {found}")
assert found == {(True, False): "NaN", (True, True): "NaN", (False, False): "bias", (False, True): "NaN"}, found
PYTHON
