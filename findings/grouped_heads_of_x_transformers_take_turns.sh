#!/usr/bin/env bash
# Guess first: a decoder of x-transformers has 4 query heads and 2 key heads (attn_kv_heads=2). Llama, Mistral and all
# that share key heads (grouped queries) give the first two query heads the first key head, and the other two the second.
# Does x-transformers?
#
# Seen with x-transformers 2.31.10: no. Its heads take turns: query head n reads key head n % 2, so heads 0 and 2 share
# one. Weights that move between the two must have their query heads reordered; shapes say nothing of it.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "x-transformers==2.31.10"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from x_transformers.attend import Attend

q, (k, v) = torch.randn(1, 4, 5, 8), torch.randn(2, 1, 2, 5, 8)
out, _ = Attend(heads=4)(q, k, v)


def shared(order):
    """What attention gives where query head n reads key head order[n]."""
    return torch.nn.functional.scaled_dot_product_attention(q, k[:, order], v[:, order])


error = {str(order): float((out - shared(order)).abs().max()) for order in ([0, 0, 1, 1], [0, 1, 0, 1])}
print(f"key head of each query head, and how far the output is from it: {error}")
assert error["[0, 1, 0, 1]"] < 1e-5 < 0.1 < error["[0, 0, 1, 1]"], error
PYTHON
