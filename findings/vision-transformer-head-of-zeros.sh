#!/usr/bin/env bash
# torchvision 0.29.1, torch 2.14.1: the head of a VisionTransformer begins with zeros, so the first backward pass reaches no
# other layer. All first logits are 0, and the first loss is log K, whatever the images are. The first gradients of all 150 other
# parameters exist, and are exactly 0: a norm of the gradients, a test that each layer gets a gradient, and the first point of a
# learning-rate range test see the head alone. ResNet-18 has no such gradient.
#
# Output seen:
# vit_b_16: first loss 2.4849 (log 12 is 2.4849), 150 of 152 gradients are 0
# resnet18: first loss 2.4962 (log 12 is 2.4849), 0 of 62 gradients are 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math

import torch
import torch.nn.functional as F
from torchvision.models import resnet18, vit_b_16

zeros = {}
for build in (vit_b_16, resnet18):
    torch.manual_seed(0)
    model = build(num_classes=12)
    loss = F.cross_entropy(model(torch.randn(4, 3, 224, 224)), torch.arange(4))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    zeros[build.__name__] = sum(not gradient.any() for gradient in gradients)
    print(
        f"{build.__name__}: first loss {loss.item():.4f} (log 12 is {math.log(12):.4f}), "
        f"{zeros[build.__name__]} of {len(gradients)} gradients are 0"
    )
raise SystemExit(zeros != {"vit_b_16": 150, "resnet18": 0})
PYTHON
