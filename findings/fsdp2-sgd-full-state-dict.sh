#!/usr/bin/env bash
# torch 2.14.1: set_state_dict(full_state_dict=True) on an FSDP2 model fails for SGD without momentum.
# The state of such an optimizer has no tensors, and torch.distributed.checkpoint takes the device from these. With momentum
# the same script works; so it does without full_state_dict.
#
# Output seen:
# momentum 0.9: loaded
# momentum 0.0: AssertionError: Expected device to be set
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
results = []
for momentum in (0.9, 0.0):
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    try:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
        results.append("loaded")
    except AssertionError as error:
        results.append(f"AssertionError: {error}")
    print(f"momentum {momentum}: {results[-1]}")
dist.destroy_process_group()
raise SystemExit(results != ["loaded", "AssertionError: Expected device to be set"])
PYTHON
