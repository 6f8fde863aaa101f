#!/usr/bin/env bash
# torchvision 0.29.1, torch 2.14.1: the head of a VisionTransformer begins with zeros, so the first backward pass reaches no other layer.
# All first logits are 0, the loss is log K whatever the images are, and the gradients of all 150 parameters of the encoder are
# exactly 0. A gradient norm, a test that every parameter has a gradient, and a learning-rate finder see the head alone. Losses
# cannot be told apart either: the first gradient of a focal loss is 1.5 times that of the cross-entropy. ResNet-18 has none of this.
#
# Output seen:
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


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def focal(logits, labels):
    nll = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - nll.neg().exp()) ** 2 * nll).mean()


def first_gradients(build, loss):
    torch.manual_seed(0)
    model = build(num_classes=12)
    images, labels = torch.randn(4, 3, 224, 224), torch.arange(4)
    logits = model(images)
    logits.retain_grad()
    value = loss(logits, labels)
    value.backward()
    zeros = sum(not parameter.grad.any() for parameter in model.parameters())
    return value.item(), zeros, len(list(model.parameters())), logits.grad.flatten()


found = {}
for build in (vit_b_16, resnet18):
    loss, zeros, number, plain = first_gradients(build, cross_entropy)
    other = first_gradients(build, focal)[-1]
    angle = torch.nn.functional.cosine_similarity(plain, other, dim=0).item()
    found[build.__name__] = loss, zeros, number, angle
    print(
        f"{build.__name__}: first loss {loss:.4f} (log 12 is {math.log(12):.4f}), {zeros} of {number} gradients are 0, "
        f"cosine of the gradients of cross-entropy and focal loss {angle:.4f}"
    )
vit, resnet = found["vit_b_16"], found["resnet18"]
raise SystemExit(not (vit[1] == vit[2] - 2 and vit[3] > 0.9999 and resnet[1] == 0 and resnet[3] < 0.999))
PYTHON
