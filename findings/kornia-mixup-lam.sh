#!/usr/bin/env bash
# kornia 0.9.0: the third column of RandomMixUpV2's labels is the weight of the *other* image.
# In the paper of mixup and in most training scripts lam weighs the first label: lam * loss(z, a) + (1 - lam) * loss(z, b).
# Written so with kornia's columns (a, b, lam), labels are exchanged, and training learns little from the loss.
#
# Output seen:
# image of 0 mixed with one of 3, lam = 0.3: pixels 0.9 = 0 * 0.7 + 3 * 0.3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy kornia==0.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import kornia.augmentation as augmentation
import torch

torch.manual_seed(1)
labels = torch.arange(4)
images = labels.float().view(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
mixup = augmentation.RandomMixUpV2(p=1.0, data_keys=["input", "class"], lambda_val=torch.tensor([0.3, 0.3]))
mixed, columns = mixup(images, labels)
first, other, lam = columns[0].tolist()
pixel = mixed[0, 0, 0, 0].item()
print(
    f"image of {first:.0f} mixed with one of {other:.0f}, lam = {lam:.1f}: "
    f"pixels {pixel:.1f} = {first:.0f} * {1 - lam:.1f} + {other:.0f} * {lam:.1f}"
)
is_of_other = abs(pixel - ((1 - lam) * first + lam * other)) < 1e-5
raise SystemExit(not (first != other and lam != 0.5 and is_of_other))
PYTHON
