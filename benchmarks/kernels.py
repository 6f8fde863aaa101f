"""Count the kernels and synchronizations of one training step on a fake accelerator, for each method and loss.

A small network's step on a GPU takes as long as its launches, so their number is what a method costs there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fake_device, methods
from benchmarks.launches import counted
from benchmarks.script import Script, Training
from benchmarks.steps import say
from benchmarks.workloads import WORKLOADS

WORK = WORKLOADS["mlp-small"]
FIRST, LAST = 20, 119  # the steps, counted from 1, whose kernels are averaged
ALONE = (1, 2, 3, 100)  # the steps that may synchronize: the package looks at some things once in 100 steps
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Loss:
    """What the script's loss is.

    Attributes:
        criterion: makes the loss module.
        micro_batches: backward passes for a step.
        mixed: whether the targets are mixup's distributions.
    """

    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    micro_batches: int = 1
    mixed: bool = False


LOSSES = {
    "hard labels": Loss(),
    "label smoothing 0.1": Loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "class weights": Loss(lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, WORK.classes))),
    "mixup": Loss(mixed=True),
    "4 micro-batches": Loss(micro_batches=4),
}


def write_script(loss: Loss, device: torch.device, dtype: torch.dtype) -> Script:
    """Build the model and its data; all batches are on the device before the first step."""
    batches = [
        (x.to(device, dtype), mixed(y).to(device, dtype) if loss.mixed else y.to(device)) for x, y in WORK.batches()
    ]
    criterion = loss.criterion().to(device, dtype)
    return Script(WORK.model().to(device, dtype), batches, WORK, criterion=criterion, micro_batches=loss.micro_batches)


def mixed(labels: Tensor) -> Tensor:
    """Mixup's targets: 0.7 of a row's class and 0.3 of its neighbor's."""
    shares = F.one_hot(labels, WORK.classes).float()
    return 0.7 * shares + 0.3 * shares.roll(1, 0)


METHODS: dict[str, Callable[[Script], Training]] = {name: row.build for name, row in methods.METHODS.items()}


# ---- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCounts:
    """Kernels and synchronizations of one step."""

    kernels: int
    synchronizations: int


def count(method: str, loss: Loss, dtype: torch.dtype, steps: int) -> list[StepCounts]:
    """Count each of the first steps of a training run."""
    step, found = METHODS[method](write_script(loss, fake_device.register(), dtype)).step, []
    for _ in range(steps):
        with counted() as counts:
            step()
        found.append(StepCounts(counts.kernels.total(), counts.synchronizations.total()))
    return found


def refusal(method: str, loss: Loss, dtype: torch.dtype) -> str:
    """Why a method refuses a loss, as it says on the CPU; empty if it does not."""
    try:
        METHODS[method](write_script(loss, fake_device.CPU, dtype)).step()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def row_of(method: str, loss: str, dtype: str) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"dtype": dtype, "loss": loss, "method": method}
    row["refused"] = refusal(method, LOSSES[loss], DTYPES[dtype])
    if row["refused"]:
        return row
    found = count(method, LOSSES[loss], DTYPES[dtype], LAST)
    averaged = [step for number, step in enumerate(found, 1) if number >= FIRST]
    others = [step for number, step in enumerate(found, 1) if number >= FIRST and number not in ALONE]
    row["kernels"] = sum(step.kernels for step in averaged) / len(averaged)
    row["synchronizations"] = {str(number): found[number - 1].synchronizations for number in ALONE}
    row["synchronizations"]["others"] = sum(step.synchronizations for step in others) / len(others)
    return row


def measure(options: argparse.Namespace, losses: Sequence[str] = tuple(LOSSES)) -> dict[str, Any]:
    """All methods with each loss, in both dtypes of the logits."""
    if not fake_device.available():
        raise SystemExit(f"torch {torch.__version__} does not let Python register a device; install a newer one")
    fake_device.register()
    rows = []
    for dtype, loss, method in itertools.product(DTYPES, losses, METHODS):
        say(f"{dtype}, {loss}: {method}")
        rows.append(row_of(method, loss, dtype))
    return {"model": WORK.title, "kernels": rows}
