"""The training script, and the methods that are put into it: plain training, and DCL and DCP by hand, line and term.

All train the very same model on the same batches with the same SGD.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.workloads import Batches, Setting, Workload
from dcl_optim import DCLOptimizer, DCPOptimizer

# ---- the script ------------------------------------------------------------------------------------------------------

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
    """A model in training by one method.

    Attributes:
        step: one training step.
        model: what it trains.
        second: the second network, a companion, where the method has one.
    """

    step: Callable[[], None]
    model: nn.Module
    second: nn.Module | None = None


Build = Callable[[Script], Training]


def sgd(parameters: Iterable[nn.Parameter], **options: Any) -> SGD:
    """The base optimizer of every method; the rate is low so that noise with random labels stays finite."""
    return SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, **options)


# ---- the methods -----------------------------------------------------------------------------------------------------

WEIGHT, ALPHA = 1.0, 0.6  # of the loops by hand: the paper's


def plain(script: Script) -> Training:
    """SGD alone."""
    optimizer = sgd(script.model.parameters())
    return Training(script.loop(optimizer), script.model)


def companion_by_hand(script: Script) -> Training:
    """Deep Companion Learning written into the loop by someone who knows it: what the wrapper must not exceed."""
    model, setting = script.model, script.setting
    companion = copy.deepcopy(model)
    optimizer, companion_optimizer = sgd(model.parameters()), sgd(companion.parameters())
    steps = script.steps()
    is_first = True

    def step() -> None:
        nonlocal is_first
        optimizer.zero_grad()
        companion_optimizer.zero_grad()
        for x, y in next(steps):
            with setting.autocast():
                z, c = model(x), companion(x)
                loss = script.criterion(z, y) + WEIGHT * F.mse_loss(z, c.detach())
                learning = F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach())
            script.backward(loss)
            script.backward(learning)
        optimizer.step()
        if not is_first:  # the copy's gradient is zero in the first step, and weight decay alone would move it
            companion_optimizer.step()
        is_first = False

    return Training(step, model, companion)


class PrototypesByHand:
    """Class prototypes as a careful script would keep them: no synchronization, no more than a batch's rows touched.

    It does not ask which classes were seen: an unseen class pulls to zero, where the package leaves it out.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.rows = torch.zeros(classes, classes, device=device)

    def learn(self, z: Tensor, y: Tensor, alpha: float) -> None:
        """Move to the class means."""
        numbers = self.rows.new_zeros(len(self.rows)).index_add_(0, y, self.rows.new_ones(len(y)))
        self.rows.index_add_(0, y, (z - self.rows[y]) / numbers[y][:, None], alpha=1 - alpha)


def prototypes_by_hand(script: Script) -> Training:
    """Deep Companion Prototype written into the loop."""
    model, setting = script.model, script.setting
    optimizer = sgd(model.parameters())
    prototypes = PrototypesByHand(script.work.classes, script.batches[0][0].device)
    steps = script.steps()

    def step() -> None:
        optimizer.zero_grad()
        logits, labels = [], []
        for x, y in next(steps):
            with setting.autocast():
                z = model(x)
                if z.ndim > 2:
                    z = z.movedim(1, -1).flatten(0, -2)
                    y = y.flatten()
                loss = script.criterion(z, y) + WEIGHT * F.mse_loss(z.float(), prototypes.rows[y])
            script.backward(loss)
            logits.append(z.detach().float())
            labels.append(y)
        optimizer.step()
        z, y = (logits[0], labels[0]) if len(logits) == 1 else (torch.cat(logits), torch.cat(labels))
        prototypes.learn(z, y, ALPHA)

    return Training(step, model)


def companion_learning(script: Script, term: bool = False, **settings: Any) -> Training:
    """The same by wrapping the optimizer.

    Args:
        script: what trains.
        term: whether the penalty is a term of the script's loss.
        settings: the wrapper's arguments.
    """
    optimizer = DCLOptimizer(sgd(script.model.parameters()), script.model, **settings)
    step = script.loop(optimizer, penalty=(lambda z, y: optimizer.penalty(z)) if term else None)
    return Training(step, script.model, optimizer.companion)


def companion_prototype(script: Script, term: bool = False, **settings: Any) -> Training:
    """Class prototypes in the companion's place; the arguments are those of :func:`companion_learning`."""
    optimizer = DCPOptimizer(sgd(script.model.parameters()), script.model, **settings)
    step = script.loop(optimizer, penalty=optimizer.penalty if term else None)
    return Training(step, script.model)


# By hand with the paper's settings, by the line and by the term with the defaults; DCL with all rows, as by hand, and
# with a half and a quarter of them.
METHODS: dict[str, Build] = {
    "plain": plain,
    "DCP, by hand": prototypes_by_hand,
    "DCP, line": companion_prototype,
    "DCP, term": partial(companion_prototype, term=True),
    "DCL, by hand": companion_by_hand,
    "DCL, line": partial(companion_learning, companion_fraction=1),
    "DCL, term": partial(companion_learning, companion_fraction=1, term=True),
    "DCL, line, half": partial(companion_learning, companion_fraction=0.5),
    "DCL, term, half": partial(companion_learning, companion_fraction=0.5, term=True),
    "DCL, line, quarter": partial(companion_learning, companion_fraction=0.25),
}


def start(build: Build, work: Workload, setting: Setting | None = None, warm_up: int = 2) -> Training:
    """Set a method up and take its first steps, which allocate what later ones reuse."""
    setting = setting or Setting()
    training = build(Script(setting.model(work.model()), setting.batches(work.batches()), work, setting))
    for _ in range(warm_up):
        training.step()
    return training
