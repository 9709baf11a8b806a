#!/usr/bin/env bash
# Guess first: RT-DETRv2's decoder_method="discrete" replaces bilinear sampling, which many chips lack, by reading one pixel.
# Locations lie in [0, 1]; at a pixel's centre, (i + 0.5) / width, bilinear sampling gives that pixel exactly. Which pixel
# does "discrete" read there?
#
# Seen with transformers 5.24.0: the next one, i + 1 (and at the last, the last). It takes trunc(location * width + 0.5),
# where pixel i covers location * width in [i, i + 1): it reads half a pixel further to the right and below. A location
# outside of the picture reads the border, where bilinear sampling gives 0.
# Needs Python 3.10 or newer: python3, or what PYTHON names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import multi_scale_deformable_attention_v2

pixels = torch.arange(4.0)[None, :, None, None]  # one row of four pixels, each holds its number
x = torch.tensor([*((torch.arange(4.0) + 0.5) / 4), 1.5])  # their centres, and a place outside
locations = torch.stack([x, torch.full_like(x, 0.5)], -1)[None, :, None, None]  # [batch, query, head, point, (x, y)]


def read(method):
    weights = torch.ones(1, 5, 1, 1)
    return multi_scale_deformable_attention_v2(pixels, [(1, 4)], locations, weights, [1], method).flatten().tolist()


print(f"discrete reads {read('discrete')}, bilinear {[round(x, 2) for x in read('default')]}")
assert read("discrete") == [1, 2, 3, 3, 3], read("discrete")
PYTHON
