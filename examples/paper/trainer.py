"""One training run: built from its configuration, checkpointed, measured after the last iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import metrics
from dcl_optim.schedules import LinearWarmup, RunningAverage
from examples.checkpoint import save_atomically
from examples.paper import datasets, methods, networks
from examples.paper.configuration import Configuration
from examples.paper.datasets import Data
from examples.paper.datasets.base import steps_per_epoch

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adamw": torch.optim.AdamW,
}
# What JSON has no value for, by the name that a configuration gives, from the number of steps in the training and in
# an epoch.
SCHEDULES: dict[str, Callable[[int, int], Callable[[int], float]]] = {
    "running-average": lambda steps, epoch: RunningAverage(),
    "warm-up": lambda steps, epoch: LinearWarmup(1.0, max(1, steps // 2)),
    "frozen-after-first-epoch": lambda steps, epoch: lambda step: 0.97 if step <= epoch else 1.0,  # for DCP's alpha
}


class Run:
    """A configuration and a seed on their way through training.

    Args:
        configuration: what to run.
        seed: of the initial weights, the order of the pictures and their augmentation. Runs of different methods with
            the same seed start from the same weights and see the same batches.
        device: where to run it.
        data: the data set, if it is loaded already.

    Raises:
        ValueError: a name in the configuration is unknown, or a value out of range.
    """

    def __init__(self, configuration: Configuration, seed: int, device: torch.device, data: Data | None = None) -> None:
        if configuration.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={configuration.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        self.configuration, self.seed, self.device = configuration, seed, device
        self.data = data or load_data(configuration)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.method = methods.make(configuration.method, self._setting(), **self._options())
        self.losses: list[float] = []
        self.seconds = 0.0

    def _build(self, name: str) -> nn.Module:
        model = networks.build(name, self.data.classes, self.data.shape).to(self.device)
        # Convolutions over few channels are faster so, on a CPU too.
        return model.to(memory_format=torch.channels_last)

    def _setting(self) -> methods.Setting:
        chosen = self.configuration

        def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
            return OPTIMIZERS[chosen.optimizer](parameters, lr=chosen.lr, weight_decay=chosen.weight_decay)

        return methods.Setting(
            build=lambda: self._build(chosen.network),
            optimizer=optimizer,
            epochs=chosen.epochs,
            steps_per_epoch=self._steps_per_epoch(),
            samples=self.data.train_size(),
            classes=self.data.classes,
            device=self.device,
            scheduler=lambda stepped: CosineAnnealingLR(stepped, chosen.epochs),
            partners=lambda labels: self._moved(self.data.same_class(labels.cpu(), torch.default_generator)),
        )

    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.data.train_size(), self.configuration.batch_size)

    def _options(self) -> dict[str, Any]:
        options = dict(self.configuration.options)
        if isinstance(options.get("companion"), str):
            name = options["companion"]
            options["companion"] = lambda: self._build(name)
        for argument, value in options.items():
            if isinstance(value, str) and value in SCHEDULES:
                epoch = self._steps_per_epoch()
                options[argument] = SCHEDULES[value](epoch * self.configuration.epochs, epoch)
        return options

    def train_epoch(self) -> None:
        """Train on every picture once."""
        begin, total, count = time.perf_counter(), torch.zeros((), device=self.device), 0
        for network in self.method.networks().values():
            network.train()
        for x, y, index in self.data.epoch(self.configuration.batch_size, self.generator):
            loss = self.method.step(self._moved(x), y.to(self.device), index)
            total, count = total + loss * len(y), count + len(y)
        self.method.end_epoch()
        self.losses.append(float(total / count))
        self.seconds += time.perf_counter() - begin

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.device).to(memory_format=torch.channels_last)

    def logits(self, part: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The predictors' names, their logits of a part of the data, and its labels."""
        for name, predict in self.method.predictors().items():
            pairs = [(predict(self._moved(x)).cpu(), y) for x, y in self.data.fixed(part)]
            yield name, torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs])

    def figures(self, part: str) -> dict[str, Any]:
        """Accuracy on a part of each predictor, the deployed one first; consistency and perplexity in training."""
        found: dict[str, Any] = {"accuracy": {}, "consistency": {}, "perplexity": {}}
        for name, z, y in self.logits(part):
            found["accuracy"][name] = float((z.argmax(1) == y).float().mean())
        for name, z, y in self.logits("train"):
            found["consistency"][name] = float(metrics.top_non_target_consistency(z, y).nanmean())
            found["perplexity"][name] = float(metrics.non_target_perplexity(z, y).nanmean())
        return found | {"losses": self.losses, "seconds": self.seconds}

    def save(self, path: Path) -> None:
        """Write everything that a bit-exact continuation needs."""
        state = {"method": self.method.state_dict(), "generator": self.generator.get_state()}
        save_atomically(state | {"losses": self.losses, "seconds": self.seconds}, path)

    def resume(self, path: Path) -> None:
        """Take over what :meth:`save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.generator.set_state(state["generator"].cpu())
        self.losses, self.seconds = state["losses"], state["seconds"]
        self.method.load_state_dict(state["method"])


def load_data(configuration: Configuration) -> Data:
    """The data set of a configuration."""
    chosen = configuration
    return datasets.load(chosen.data, train_size=chosen.train_size, augmentation=chosen.augmentation)


def train(run: Run, checkpoint: Path, progress: Callable[[int], None] = lambda epoch: None) -> None:
    """Train to the last epoch, from the checkpoint if there is one."""
    if checkpoint.exists():
        run.resume(checkpoint)
    while len(run.losses) < run.configuration.epochs:
        run.train_epoch()
        run.save(checkpoint)
        progress(len(run.losses))
