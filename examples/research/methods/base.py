"""What all training methods share: the setting they train in, the interface, a trained network, predictions."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from examples.research.checkpoint import random_state, restore_random_state

Predictor = Callable[[Tensor], Tensor]
Wrap = Callable[[Optimizer, nn.Module], Any]


@dataclass(frozen=True)
class Setting:
    """What a method is given to train with.

    Attributes:
        build: gives a fresh network, drawn from torch's global generator.
        optimizer: builds the optimizer of some parameters.
        classes: number of classes.
        epochs: how many will be trained.
        samples: size of the training set; the ``index`` of a sample is in 0..samples - 1.
        device: where the networks and the batches are.
        scheduler: builds the learning-rate schedule of an optimizer; stepped once an epoch.
        partners: gives a random training sample of the class of each label (B,): augmented inputs (B, C, H, W) on the
            device. All its draws are of torch's global generator, so that a method that asks sees the others' batches.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    classes: int
    epochs: int
    samples: int
    device: torch.device
    scheduler: Callable[[Optimizer], LRScheduler]
    partners: Callable[[Tensor], Tensor]


class Trained:
    """A fresh network with its optimizer and its learning-rate schedule.

    Args:
        setting: what to build them from.
        wrap: what to do to the optimizer, given it and the network. None leaves it.
    """

    def __init__(self, setting: Setting, wrap: Wrap | None = None) -> None:
        self.network = setting.build().to(setting.device)
        base = setting.optimizer(self.network.parameters())
        self.optimizer: Any = base if wrap is None else wrap(base, self.network)
        self.scheduler = setting.scheduler(self.optimizer)

    def update(self, loss: Tensor) -> None:
        """Take one step down the gradient of a loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of all three."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"network": self.network, "optimizer": self.optimizer, "scheduler": self.scheduler}


class Method(ABC):
    """A way to train a classifier, batch by batch.

    Attributes:
        cost: forward and backward passes a batch, plain training being 1: theory, a forward alone counted as 1/3.
        epoch: epochs finished so far.
        trained: the networks that an optimizer trains, the main one first and under the name "model".
        kept: further modules that belong to the state.
    """

    cost: float = 1.0

    def __init__(self, setting: Setting, **trained: Trained) -> None:
        self.setting, self.trained, self.epoch = setting, trained, 0
        self.kept: dict[str, nn.Module] = {}
        self.criterion: nn.Module = nn.CrossEntropyLoss()

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the options that the constructor takes."""
        return keywords_of(cls.__init__)

    @property
    def main(self) -> Trained:
        """The network under the name "model", with its optimizer."""
        return self.trained["model"]

    def networks(self) -> dict[str, nn.Module]:
        """What is saved and switched between training and evaluation."""
        return {name: trained.network for name, trained in self.trained.items()}

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Train on one batch.

        Args:
            x: network inputs, (B, C, H, W), on the setting's device.
            y: class indices, (B,), there too.
            index: which training samples they are, (B,), on any device.

        Returns:
            The task loss before the step, detached: cross-entropy, or what a method's options make of it, without
            what the method adds.
        """

    def end_epoch(self) -> None:
        """Step the schedules and do what the method does between epochs."""
        for trained in self.trained.values():
            trained.scheduler.step()
        self.epoch += 1

    def predict(self, x: Tensor) -> Tensor:
        """Give the logits (B, K) of what the method deploys: the first of :meth:`predictors`."""
        return next(iter(self.predictors().values()))(x)

    def predictors(self) -> dict[str, Predictor]:
        """All predictors worth reporting, in evaluation mode; the one to deploy comes first."""
        return {name: predictor(network) for name, network in self.networks().items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resumption needs, torch's random streams included."""
        return {
            "epoch": self.epoch,
            "random": random_state(self.setting.device),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave; sets torch's random streams too."""
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        self.epoch = state["epoch"]
        restore_random_state(state["random"], self.setting.device)

    def _parts(self) -> dict[str, Any]:
        return {**self.trained, **self.kept}


class Buffers(nn.Module):
    """Named tensors that belong to a method's state."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's keyword-only arguments."""
    return tuple(
        name
        for name, argument in inspect.signature(function).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY
    )


def check_range(name: str, value: float, lowest: float, highest: float = math.inf) -> None:
    """Raise a ValueError unless lowest <= value <= highest."""
    if not lowest <= value <= highest:
        raise ValueError(f"{name}={value!r} must be in [{lowest:g}, {highest:g}]")


def check_count(name: str, value: int, lowest: int, highest: float = math.inf) -> None:
    """Raise a ValueError unless the value is an integer in [lowest, highest]."""
    if not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    check_range(name, value, lowest, highest)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Inside the block batch norm normalises by the batch, as in training, but leaves its running statistics alone."""
    tracking = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    try:
        for module in tracking:
            module.track_running_stats = False
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def logits_of(network: nn.Module, x: Tensor) -> Tensor:
    """A network's logits in evaluation mode."""
    with evaluating(network):
        return network(x)


def mean_prediction(networks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The logarithm of the mean of the networks' softmaxes, (B, K)."""
    each = torch.stack([F.log_softmax(logits_of(network, x), dim=1) for network in networks])
    return each.logsumexp(0) - math.log(len(networks))


def predictor(network: nn.Module) -> Predictor:
    """A network as a predictor."""
    return functools.partial(logits_of, network)


def ensemble(networks: Sequence[nn.Module]) -> Predictor:
    """The mean of several networks as a predictor."""
    return functools.partial(mean_prediction, networks)


def divergence(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(target / T) || softmax(logits / T)) of each row, (B,); no gradient reaches the target."""
    log_target = F.log_softmax(target.detach() / temperature, dim=1)
    log_softmax = F.log_softmax(logits / temperature, dim=1)
    return F.kl_div(log_softmax, log_target, reduction="none", log_target=True).sum(1)
