#!/usr/bin/env bash
# torch 2.14.1: Optimizer.load_state_dict rounds float32 state to the dtype of a bfloat16 parameter.
# NAdam keeps the product of its momenta in float32, whatever the parameter. Saving and loading the state changes it, so a
# resumed run is not the uninterrupted one bit for bit. Only what is named "step" is kept (ASGD's eta and mu are rounded too).
#
# Output seen:
# saved  torch.float32 0.091214
# loaded torch.bfloat16 0.091309
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import copy

import torch

weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
optimizer = torch.optim.NAdam([weight], lr=0.01)
for _ in range(3):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
saved = copy.deepcopy(optimizer.state_dict())
resumed = torch.optim.NAdam([weight], lr=0.01)
resumed.load_state_dict(saved)
before, after = (state["state"][0]["mu_product"] for state in (saved, resumed.state_dict()))
print(f"saved  {before.dtype} {before.item():.6f}")
print(f"loaded {after.dtype} {after.item():.6f}")
raise SystemExit(not (before.dtype is torch.float32 and after.dtype is torch.bfloat16))
PYTHON
