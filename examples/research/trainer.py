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

from examples.research import datasets, measures, methods, networks, non_targets
from examples.research.checkpoint import save_atomically
from examples.research.configuration import Configuration
from examples.research.datasets import Data
from examples.research.datasets.base import InMemory, steps_per_epoch
from examples.research.methods.averages import moving_average
from examples.research.methods.base import Predictor, predictor
from examples.research.networks.weights import lites

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adamw": torch.optim.AdamW,
}
PRECISIONS = ("float32", "bfloat16")
SIDE = 64  # pixels of what is fine-tuned from ImageNet's weights: features are 32 times smaller
SECONDS_BETWEEN_SAVES = 30.0
AVERAGED_EVERY = 5  # steps: the averages of the weights are as good, and a fifth of the time
# What JSON has no value for, by the name that a configuration gives, from the number of steps in the training and in
# an epoch.
SCHEDULES: dict[str, Callable[[int, int], Any]] = {
    "running-average": lambda steps, epoch: lambda step: (step - 1) / step,
    "frozen-after-first-epoch": lambda steps, epoch: lambda step: 0.97 if step <= epoch else 1.0,  # for DCP's alpha
}


class InBfloat16(nn.Module):
    """A network whose forward pass runs under autocast, and whose logits are in float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.network(x)
        return logits.float()


def in_precision(network: nn.Module, precision: str) -> nn.Module:
    """Run a network's forward pass in one of PRECISIONS.

    Raises:
        ValueError: the precision is none of them.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return InBfloat16(network) if precision == "bfloat16" else network


class Run:
    """A configuration and a seed on their way through training.

    Args:
        configuration: what to run.
        seed: of the initial weights, the order of the images and their augmentation. Runs of different methods with
            the same seed start from the same weights and see the same batches.
        device: where to run it.
        data: the data set, if it is loaded already.

    Raises:
        ValueError: a name in the configuration is unknown, or a value out of range.
    """

    def __init__(self, configuration: Configuration, seed: int, device: torch.device, data: Data | None = None) -> None:
        if configuration.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={configuration.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        for decay in configuration.averages:
            if not 0 <= decay < 1:
                raise ValueError(f"averages={configuration.averages!r} are decays in [0, 1), which {decay!r} is not")
        if configuration.pretrained and configuration.network != "efficientnet-lite0":
            raise ValueError(f"pretrained=True needs network='efficientnet-lite0', not {configuration.network!r}")
        self.configuration, self.seed, self.device = configuration, seed, device
        self.data = data or load_data(configuration, seed)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.method = self._method()
        network = self.method.main.network
        self.averages = nn.ModuleDict(
            {
                _name(decay): moving_average(network, decay**AVERAGED_EVERY, warm_up=True)
                for decay in configuration.averages
            }
        )
        self.losses: list[float] = []
        self.seconds = self.waited = 0.0
        self.batches, self.images, self.total = 0, 0, torch.zeros((), device=device)  # of the epoch that is not over

    def _build(self, name: str) -> nn.Module:
        network = networks.build(name, self.data.classes, self.data.shape, self._weights(name))
        model = in_precision(network, self.configuration.precision).to(self.device)
        # Convolutions over few channels are faster so, on a CPU too.
        return model.to(memory_format=torch.channels_last)

    def _weights(self, name: str) -> Path | None:
        """The file of the weights that a network starts from; None: random ones."""
        return lites() if self.configuration.pretrained else None

    def _setting(self) -> methods.Setting:
        chosen = self.configuration

        def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
            return OPTIMIZERS[chosen.optimizer](parameters, lr=chosen.lr, weight_decay=chosen.weight_decay)

        return methods.Setting(
            build=lambda: self._build(chosen.network),
            optimizer=optimizer,
            classes=self.data.classes,
            epochs=chosen.epochs,
            samples=self.data.train_size(),
            device=self.device,
            scheduler=lambda stepped: CosineAnnealingLR(stepped, chosen.epochs),
            partners=lambda labels: self._moved(self.data.same_class(labels.cpu(), torch.default_generator)),
        )

    def _method(self) -> methods.Method:
        return methods.make(self.configuration.method, self._setting(), **self._options())

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
        """Train on every image once."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """Train on the images of an epoch that are left, a batch between two results."""
        for network in self.method.networks().values():
            network.train()
        first, clock = len(self.losses) * self._steps_per_epoch(), time.perf_counter()
        for x, y, index in self.data.epoch(self.configuration.batch_size, self.generator, self.batches):
            self.waited += time.perf_counter() - clock
            loss = self.method.step(self._moved(x), y.to(self.device), index)
            for average in self.averages.values() if (first + self.batches) % AVERAGED_EVERY == 0 else ():
                average.update_parameters(self.method.main.network)
            self.total, self.images, self.batches = self.total + loss * len(y), self.images + len(y), self.batches + 1
            self.seconds += time.perf_counter() - clock
            yield
            clock = time.perf_counter()
        self.method.end_epoch()
        self.losses.append(float(self.total / self.images))
        self.seconds += time.perf_counter() - clock
        self.batches, self.images, self.total = 0, 0, torch.zeros_like(self.total)

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.device).to(memory_format=torch.channels_last)

    def predictors(self) -> dict[str, Predictor]:
        """The method's predictors, the deployed one first, and the moving averages of the weights."""
        return {**self.method.predictors(), **{name: predictor(found) for name, found in self.averages.items()}}

    def logits(self, part: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The predictors' names, their logits of a part of the data, and its labels."""
        for name, predict in self.predictors().items():
            pairs = [(predict(self._moved(x)).cpu(), y) for x, y in self.data.fixed(part)]
            yield name, torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs])

    def figures(self, part: str) -> dict[str, Any]:
        """What each predictor, the deployed one first, reaches on a part of the data and on the training part.

        The temperature of the scaled likelihood is fitted on the validation part, also where that is the part; the
        training part's labels are those that were trained on, noise included. For "both" there are accuracies alone,
        see :class:`~examples.research.configuration.Experiment`.
        """
        if part == "both":
            return {
                "accuracy": {name: _accuracy(z, y) for name, z, y in self.logits("test")},
                "validation_accuracy": {name: _accuracy(z, y) for name, z, y in self.logits("validation")},
                "seconds": round(self.seconds, 3),
            }
        keys = ("accuracy", "quality", "train_accuracy", "consistency", "perplexity")
        found: dict[str, dict[str, Any]] = {key: {} for key in keys}
        validation = list(self.logits("validation"))
        temperatures = {name: measures.fit_temperature(z, y) for name, z, y in validation}
        for name, z, y in validation if part == "validation" else self.logits(part):
            found["accuracy"][name] = _accuracy(z, y)
            found["quality"][name] = measures.quality(z, y, temperatures[name])
        for name, z, y in self.logits("train"):
            found["train_accuracy"][name] = _accuracy(z, y)
            found["consistency"][name] = float(non_targets.top_non_target_consistency(z, y).nanmean())
            found["perplexity"][name] = float(non_targets.non_target_perplexity(z, y).nanmean())
        return found | {"seconds": round(self.seconds, 3)}

    def save(self, path: Path) -> None:
        """Write everything that a bit-exact continuation needs."""
        state = {"method": self.method.state_dict(), "averages": self.averages.state_dict()}
        state["generator"] = self.generator.get_state()
        save_atomically(state | {"losses": self.losses, "seconds": self.seconds}, path)

    def resume(self, path: Path) -> None:
        """Take over what :meth:`save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.generator.set_state(state["generator"].cpu())
        self.losses, self.seconds = state["losses"], state["seconds"]
        self.method.load_state_dict(state["method"])
        self.averages.load_state_dict(state["averages"])


def load_data(configuration: Configuration, seed: int) -> Data:
    """The data set of a configuration with its wrong labels, the same for every seed unless ``shots`` are drawn."""
    chosen = configuration
    if not 0 <= chosen.label_noise <= 1:
        raise ValueError(f"label_noise={chosen.label_noise!r} must be in [0, 1]")
    data = datasets.load(chosen.data, train_size=chosen.train_size, augmentation=chosen.augmentation)
    if not chosen.label_noise and chosen.shots is None and not chosen.pretrained:
        return data
    if not isinstance(data, InMemory):
        given = f"label_noise={chosen.label_noise}, shots={chosen.shots}, pretrained={chosen.pretrained}"
        raise ValueError(f"{given} are for data sets in memory, not {chosen.data}")
    if chosen.shots is not None:
        data.limit(chosen.shots, seed)
    if chosen.pretrained:
        data.enlarge(SIDE)
    data.relabel(chosen.label_noise, torch.Generator().manual_seed(0 if chosen.shots is None else seed))
    return data


def _accuracy(z: Tensor, y: Tensor) -> float:
    return float((z.argmax(1) == y).float().mean())


def _name(decay: float) -> str:
    """Name an average by its horizon: a module's name has no dot, which a decay has."""
    return f"EMA over {1 / (1 - decay):.0f} steps"


def train(run: Run, checkpoint: Path, progress: Callable[[int], None] = lambda epoch: None) -> None:
    """Train to the last epoch, from the checkpoint if there is one; save at the end, and every half a minute."""
    if checkpoint.exists():
        run.resume(checkpoint)
    saved = time.monotonic()
    while (epoch := len(run.losses)) < run.configuration.epochs:
        run.train_epoch()
        if epoch + 1 == run.configuration.epochs or time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
            run.save(checkpoint)
            saved = time.monotonic()
        progress(len(run.losses))
