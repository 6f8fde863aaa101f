"""Count the kernels and synchronizations of one training step on a fake accelerator, for each method and loss.

    python -m benchmarks kernels --name kernels-before

A small network's step on a GPU takes as long as its launches, so their number is what a method costs there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fake_device, report, table
from benchmarks.launches import counted
from benchmarks.measure import say
from benchmarks.networks import perceptron
from benchmarks.script import sgd
from benchmarks.workloads import Batches, Workload
from dcl_optim import DCLOptimizer, DCPOptimizer

WORK = Workload("MLP 64-256-256-10", lambda: perceptron((64, 256, 256, 10)), (64,), 128)
WEIGHT, ALPHA = 0.1, 0.6
FIRST, LAST = 20, 119  # the steps, counted from 1, whose kernels are averaged
ALONE = (1, 2, 3, 100)  # the steps that may synchronize: the package looks at some things once in 100 steps
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Step = Callable[[Batches], None]


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


@dataclass(frozen=True)
class Script:
    """A model with its loss on a device, and the batches of a step at a time."""

    model: nn.Module
    criterion: nn.Module
    loss: Loss
    batches: Batches

    def steps(self) -> Iterator[Batches]:
        """The micro-batches of one step after the other, without end."""
        endless = itertools.cycle(self.batches)
        while True:
            yield list(itertools.islice(endless, self.loss.micro_batches))

    def backward(self, loss: Tensor) -> None:
        """Backward through a micro-batch's share of the loss."""
        (loss / self.loss.micro_batches if self.loss.micro_batches > 1 else loss).backward()


def write_script(loss: Loss, device: torch.device, dtype: torch.dtype) -> Script:
    """Build the model and its data; all batches are on the device before the first step."""
    batches = [
        (x.to(device, dtype), mixed(y).to(device, dtype) if loss.mixed else y.to(device)) for x, y in WORK.batches()
    ]
    return Script(WORK.model().to(device, dtype), loss.criterion().to(device, dtype), loss, batches)


def mixed(labels: Tensor) -> Tensor:
    """Mixup's targets: 0.7 of a row's class and 0.3 of its neighbor's."""
    shares = F.one_hot(labels, WORK.classes).float()
    return 0.7 * shares + 0.3 * shares.roll(1, 0)


# ---- the methods -----------------------------------------------------------------------------------------------------


def loop(script: Script, optimizer: Any, targets: Callable[[Tensor], Any] = lambda y: None) -> Step:
    """The loop of any script."""

    def step(batches: Batches) -> None:
        optimizer.zero_grad()
        for x, y in batches:
            targets(y)
            script.backward(script.criterion(script.model(x), y))
        optimizer.step()

    return step


def plain(script: Script) -> Step:
    """SGD alone."""
    return loop(script, sgd(script.model.parameters()))


def companion_by_hand(script: Script) -> Step:
    """Deep Companion Learning written into the loop."""
    model, companion = script.model, copy.deepcopy(script.model)
    optimizer, companion_optimizer = sgd(model.parameters()), sgd(companion.parameters())

    def step(batches: Batches) -> None:
        optimizer.zero_grad()
        companion_optimizer.zero_grad()
        for x, y in batches:
            z, c = model(x), companion(x)
            script.backward(script.criterion(z, y) + WEIGHT * F.mse_loss(z, c.detach()))
            script.backward(F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach()))
        optimizer.step()
        companion_optimizer.step()

    return step


class PrototypesByHand:
    """Class prototypes as a careful script would keep them: no synchronization, no more than a batch's rows touched.

    It does not ask which classes were seen: an unseen class pulls to zero, where the package leaves it out.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.rows = torch.zeros(classes, classes, device=device)

    def of(self, y: Tensor) -> Tensor:
        """What each row is held to, by its class or its shares of all classes."""
        return self.rows[y] if y.ndim == 1 else y.to(self.rows.dtype) @ self.rows

    def learn(self, z: Tensor, y: Tensor, alpha: float) -> None:
        """Move to the class means."""
        if y.ndim == 1:
            numbers = self.rows.new_zeros(len(self.rows)).index_add_(0, y, self.rows.new_ones(len(y)))
            self.rows.index_add_(0, y, (z - self.rows[y]) / numbers[y][:, None], alpha=1 - alpha)
        else:
            shares = y.to(z.dtype)
            numbers = shares.sum(0)[:, None]
            self.rows.add_((shares.T @ z - numbers * self.rows) / numbers.clamp(min=1e-6), alpha=1 - alpha)


def prototypes_by_hand(script: Script) -> Step:
    """Deep Companion Prototype written into the loop."""
    optimizer = sgd(script.model.parameters())
    prototypes = PrototypesByHand(WORK.classes, script.batches[0][0].device)

    def step(batches: Batches) -> None:
        optimizer.zero_grad()
        logits = []
        for x, y in batches:
            z = script.model(x)
            script.backward(script.criterion(z, y) + WEIGHT * F.mse_loss(z.float(), prototypes.of(y)))
            logits.append(z.detach().float())
        optimizer.step()
        several = len(batches) > 1
        z, y = (torch.cat(logits), torch.cat([y for _, y in batches])) if several else (logits[0], batches[0][1])
        prototypes.learn(z, y, ALPHA)

    return step


def companion_learning(script: Script) -> Step:
    """Deep Companion Learning by wrapping the optimizer, as it is by default."""
    return loop(script, DCLOptimizer(sgd(script.model.parameters()), script.model))


def companion_prototype(script: Script, gives_targets: bool = False) -> Step:
    """Deep Companion Prototype by wrapping the optimizer, as it is by default."""
    optimizer = DCPOptimizer(sgd(script.model.parameters()), script.model)
    return loop(script, optimizer, optimizer.set_targets) if gives_targets else loop(script, optimizer)


METHODS: dict[str, Callable[[Script], Step]] = {
    "plain": plain,
    "handwritten DCL": companion_by_hand,
    "DCLOptimizer": companion_learning,
    "handwritten DCP": prototypes_by_hand,
    "DCPOptimizer": companion_prototype,
    "DCPOptimizer, set_targets": lambda script: companion_prototype(script, gives_targets=True),
}


# ---- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCounts:
    """Kernels and synchronizations of one step."""

    kernels: int
    synchronizations: int


def count(method: str, loss: Loss, dtype: torch.dtype, steps: int) -> list[StepCounts]:
    """Count each of the first steps of a training run."""
    script = write_script(loss, fake_device.register(), dtype)
    step, found = METHODS[method](script), []
    for batches in itertools.islice(script.steps(), steps):
        with counted() as counts:
            step(batches)
        found.append(StepCounts(counts.kernels.total(), counts.synchronizations.total()))
    return found


def refusal(method: str, loss: Loss, dtype: torch.dtype) -> str:
    """Why a method refuses a loss, as it says on the CPU; empty if it does not."""
    script = write_script(loss, fake_device.CPU, dtype)
    try:
        METHODS[method](script)(next(script.steps()))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def measure(method: str, loss: str, dtype: str) -> dict[str, Any]:
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


def main(arguments: list[str]) -> None:
    """Count, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
                        help=", ".join(METHODS))  # fmt: skip
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="NAME",
                        help=", ".join(LOSSES))  # fmt: skip
    report.add_options(parser, "kernels")
    options = parser.parse_args(arguments)
    if not fake_device.available():
        parser.error(f"torch {torch.__version__} does not let Python register a device; install a newer one")
    torch.set_num_threads(1)
    fake_device.register()
    rows = []
    for dtype, loss, method in itertools.product(DTYPES, options.losses, options.methods):
        if LOSSES[loss].mixed or not method.endswith("set_targets"):
            say(f"{dtype}, {loss}: {method}")
            rows.append(measure(method, loss, dtype))
    results = report.results(options, "kernels", arguments) | {"model": WORK.title, "kernels": rows}
    report.write(options, results)
    print(table.markdown(results))
