#!/usr/bin/env bash
# deepspeed 0.19.8 with torch 2.14.1, CPU: ZeRO 1 calls the optimizer's step once for each parameter group.
# With two groups (weight decay and none, as most scripts have) an optimizer that counts its steps by calls, for a warm-up
# or a bias correction of its own, counts twice as many as the engine. In each call param_groups has one group.
#
# Output seen:
# 1 group: 3 steps of the engine, 3 calls of the optimizer's step, which saw 1 group each
# 2 groups: 3 steps of the engine, 6 calls of the optimizer's step, which saw 1 group each
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy setuptools
"$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cd "$folder"
export DS_ACCELERATOR=cpu RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517
"$folder/venv/bin/python" - 2> errors <<'PYTHON' || { tail -n 20 errors; exit 1; }
import logging

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        seen.append(len(self.param_groups))
        return super().step(closure)


calls = {}
for number in (1, 2):
    seen = []
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    parameters = [[model.weight, model.bias]] if number == 1 else [[model.weight], [model.bias]]
    optimizer = Counting([{"params": group} for group in parameters], lr=0.1)
    config = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(3):
        x, y = torch.randn(16, 8), torch.randint(5, (16,))
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    calls[number] = seen
    groups = "group" if number == 1 else "groups"
    print(
        f"{number} {groups}: {engine.global_steps} steps of the engine, {len(seen)} calls of the optimizer's step, "
        f"which saw {max(seen)} group each"
    )
raise SystemExit(not (len(calls[1]) == 3 and len(calls[2]) == 6))
PYTHON
