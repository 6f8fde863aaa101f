"""The training script that every method is put into, and what a method makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.setting import Setting
from benchmarks.workloads import Batches, Workload

Penalty = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Script:
    """A model, its batches, the workload they were made for and the setting they run in.

    Attributes:
        criterion: the loss of logits and targets.
        micro_batches: backward passes in each step.
    """

    model: nn.Module
    batches: Batches
    work: Workload
    setting: Setting = field(default_factory=Setting)
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    micro_batches: int = 1

    def steps(self) -> Iterator[Batches]:
        """The micro-batches of one step after the other, without end."""
        endless = itertools.cycle(self.batches)
        while True:
            yield list(itertools.islice(endless, self.micro_batches))

    def loss(self, x: Tensor, y: Tensor, penalty: Penalty | None = None) -> Tensor:
        """Forward and loss, in the setting's precision; with a penalty of logits and labels, if it is a term."""
        with self.setting.autocast():
            z = self.model(x)
            loss = self.criterion(z, y)
            return loss if penalty is None else loss + penalty(z, y)

    def backward(self, loss: Tensor) -> None:
        """Backward through a micro-batch's share of the loss."""
        (loss / self.micro_batches if self.micro_batches > 1 else loss).backward()

    def loop(self, optimizer: Optimizer, penalty: Penalty | None = None) -> Callable[[], None]:
        """One step of the loop of any script.

        Args:
            optimizer: what the script steps.
            penalty: what the script adds to its loss.
        """
        steps = self.steps()

        def step() -> None:
            optimizer.zero_grad()
            for x, y in next(steps):
                self.backward(self.loss(x, y, penalty))
            optimizer.step()

        return step


@dataclass
class Training:
    """A model in training by one method, ready to take steps and to be weighed.

    Attributes:
        step: one training step.
        model: what it trains.
        optimizers: every optimizer that holds state.
        second: the second network (a companion, an average), where the method has one.
        others: gives further tensors that the method keeps from step to step.
    """

    step: Callable[[], None]
    model: nn.Module
    optimizers: list[Optimizer]
    second: nn.Module | None = None
    others: Callable[[], Iterable[Tensor]] = list

    def parameters_added(self) -> int:
        """Parameters of the second network that are not the model's own."""
        theirs = {id(parameter) for parameter in self.model.parameters()}
        second = self.second.parameters() if self.second is not None else ()
        return sum(parameter.numel() for parameter in second if id(parameter) not in theirs)

    def state_bytes(self) -> int:
        """Bytes that stay allocated between steps beside the model; complete once a step has made optimizers' state."""
        kept = [*tensors_in([dict(optimizer.state) for optimizer in self.optimizers]), *self.others()]
        if self.second is not None:
            kept += [*self.second.parameters(), *self.second.buffers()]
        unique = {id(tensor): tensor for tensor in kept}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            unique.pop(id(tensor), None)
        return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from tensors_in(part)


def sgd(parameters: Iterable[nn.Parameter], **options: Any) -> SGD:
    """The base optimizer of every method; the rate is low so that noise with random labels stays finite."""
    return SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, **options)
