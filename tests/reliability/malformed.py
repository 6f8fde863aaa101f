"""Values that each argument must not have, and others that it may have beside a wrong one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import CLASSES, linear_growth, mlp

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = ["0.5", "", b"1", [0.5], {}, (1,), 1j, object(), nn.ReLU, torch.zeros(3)]
NO_FLAGS = ["yes", 1, 0.0, None, [], {}]
NO_INTEGERS = [1.5, "1", NAN, [], {}, True, 1j]

WRONG: dict[str, list[Any]] = {
    "weight": [-1, -0.1, NAN, INF, -INF, True, None, "0.5", b"1", [0.5], {}, 1j, lambda: 0.1, lambda step, more: 0.1],
    "alpha": [-0.1, 1.01, NAN, INF, -INF, False, None, "0.6", b"1", [0.5], {}, 1j, lambda: 0.1, lambda step, more: 0.1],
    "distance": ["mes", "", "MSE", 3, None, [], 1.5, b"mse", {}, nn.MSELoss],
    "logits": [3, "logits", [0], {}, 1.5],
    "process_group": ["world", "", "Auto", 3, True, [], {}, object()],
    "strict": NO_FLAGS,
    "wieght": [0.1],
    "Alpha": [0.6],
    "lambda_": [0.1],
    "base_optimizer": [None, "sgd", 3, torch.optim.SGD, mlp(), [], lambda parameters: None],
    "model": [None, "mlp", 3, nn.Linear, nn.Linear(3, 3), F.relu, [mlp()], torch.zeros(3)],
}
WRONG_DCL: dict[str, list[Any]] = {
    "companion": ["resnet", 3, [], mlp, nn.Linear, nn.ReLU()],
    "companion_optimizer": [3, "sgd", [], torch.optim.SGD(mlp().parameters(), lr=0.1)],
    "companion_fraction": [0, -0.1, 1.5, NAN, True, None, *NO_NUMBERS],
    "companion_lr_scale": [0, -1, NAN, INF, True, None, *NO_NUMBERS],
    "companion_every": [0, -3, None, *NO_INTEGERS],
    "num_classes": [CLASSES],
    "update": ["rows", "batch"],
}
WRONG_DCP: dict[str, list[Any]] = {
    "update": ["row", "", "Rows", None, 3, [], {}],
    "num_classes": [0, -1, *(value for value in NO_INTEGERS if value is not None)],
    "companion_every": [2],
}
RIGHT: dict[str, list[Any]] = {
    "weight": [0.0, 0.1, 2, linear_growth],
    "alpha": [0.0, 0.6, 1],
    "distance": ["mse", "l1"],
    "process_group": ["auto", None],
    "strict": [True, False],
}
RIGHT_DCL: dict[str, list[Any]] = {
    "companion": [None],
    "companion_fraction": [0.5, 1.0],
    "companion_lr_scale": [0.5, 1],
    "companion_every": [1, 2],
}
RIGHT_DCP: dict[str, list[Any]] = {"update": ["rows", "batch"]}
# What a schedule must not give; the error comes in the backward that asks for it.
WRONG_RETURNS = [-0.1, NAN, INF, -INF, "0.5", None, [], {}, 1j, b"1"]
NO_LOGITS = [None, 3, "logits", [0.5], {}, NAN, nn.ReLU()]
NO_LABELS = [None, 3, "labels", [0, 1], {}, NAN, nn.ReLU(), torch.zeros(3, dtype=torch.long), torch.zeros(16)]
NO_STATES = [None, 3, "state", [], {}, NAN, {"state": {}}, {"param_groups": []}, torch.zeros(3), ({},)]
NO_CLOSURES = [3, "closure", [], {}, NAN, torch.zeros(3)]
