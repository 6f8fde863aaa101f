"""The wrapper's own time on steps of a millisecond, where it shows: plain, hand-written DCL and both optimizers.

    python -m benchmarks.small_steps --out benchmarks/results/small-steps.json   # about two minutes, one thread

One interleaved run; a ratio is taken within its round. The steps of the CNN are above ten milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import machine, versions
from benchmarks.networks import cnn, perceptron
from benchmarks.timing import interleaved, ratios, steps_per_slot
from dcl_optim import DCLOptimizer, DCPOptimizer

CLASSES, BATCH = 10, 128
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 64-256-256-10": (lambda: perceptron((64, 256, 256, CLASSES)), (64,)),
    "CNN 28x28": (cnn, (1, 28, 28)),
}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(build: Callable[[], nn.Module], x: Tensor, y: Tensor, wrap: Any = None) -> Callable[[], None]:
    """The plain loop; ``wrap`` is the line that is new."""
    model, criterion = build(), nn.CrossEntropyLoss()
    optimizer: Any = sgd(model) if wrap is None else wrap(sgd(model), model, criterion)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def handwritten(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Callable[[], None]:
    """Deep Companion Learning written into the loop."""
    model = build()
    companion = copy.deepcopy(model)
    optimizer, companion_optimizer, criterion = sgd(model), sgd(companion), nn.CrossEntropyLoss()

    def step() -> None:
        z, c = model(x), companion(x)
        loss = criterion(z, y) + 0.1 * F.mse_loss(z, c.detach())
        companion_loss = F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        companion_optimizer.zero_grad()
        companion_loss.backward()
        companion_optimizer.step()

    return step


METHODS: dict[str, Callable[[Callable[[], nn.Module], Tensor, Tensor], Callable[[], None]]] = {
    "plain": plain,
    "handwritten": handwritten,
    "DCLOptimizer": lambda *given: plain(*given, wrap=lambda base, model, _: DCLOptimizer(base, model)),
    "DCLOptimizer, criterion=": lambda *given: plain(
        *given, wrap=lambda base, model, criterion: DCLOptimizer(base, model, criterion=criterion)
    ),
    "DCPOptimizer": lambda *given: plain(
        *given, wrap=lambda base, model, criterion: DCPOptimizer(base, model, CLASSES, criterion=criterion)
    ),
}


def measure(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Time all methods on one workload; quartiles of milliseconds and of the ratios to plain and hand-written steps."""
    build, shape = WORKLOADS[name]
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, *shape), torch.randint(CLASSES, (BATCH,))
    steps = {method: make(build, x, y) for method, make in METHODS.items()}
    for step in steps.values():
        step()
    times = interleaved(steps, rounds, steps_per_slot(steps, slot_seconds=0.05))
    return {
        method: {
            "milliseconds": ratios(values, [1e-3] * len(values)),
            "over plain": ratios(values, times["plain"]),
            "over handwritten": ratios(values, times["handwritten"]),
        }
        for method, values in times.items()
    }


def show(name: str, found: dict[str, dict[str, Any]]) -> None:
    columns = list(found["plain"])
    print(f"{name + f', {BATCH}':<26}" + "".join(f"{column:>24}" for column in columns))
    for method, row in found.items():
        cells = (f"{q['median']:.3f} ({q['lower']:.3f}-{q['upper']:.3f})" for q in row.values())
        print(f"{method:<26}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {"machine": machine(), "versions": versions(), "rounds": options.rounds}
    print(result)
    result["workloads"] = {}
    for name in WORKLOADS:
        result["workloads"][name] = measure(name, options.rounds)
        show(name, result["workloads"][name])
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
