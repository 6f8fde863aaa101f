"""The methods that are compared: plain training, DCL and DCP by hand and by the wrapper, and their neighbors.

All train the very same model on the same batches with the same SGD, but for Schedule-Free, which is an SGD of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.script import Script, Training, sgd, tensors_in, trained
from benchmarks.setting import Setting
from benchmarks.variants import write_script
from benchmarks.workloads import Workload
from dcl_optim import DCLOptimizer, DCPOptimizer

WEIGHT, ALPHA = 1.0, 0.6
EMA_DECAY = 0.999
LOOKAHEAD_STEPS = 5


def plain(script: Script) -> Training:
    """SGD alone."""
    optimizer = sgd(trained(script.model))
    return Training(script.loop(optimizer), script.model, [optimizer])


def companion_by_hand(script: Script) -> Training:
    """Deep Companion Learning written into the loop by someone who knows it: what the wrapper must not exceed."""
    model, setting = script.model, script.setting
    companion = setting.compile(copy.deepcopy(model))
    optimizer, companion_optimizer = sgd(model.parameters()), sgd(companion.parameters())
    steps = script.steps()

    def step() -> None:
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
        companion_optimizer.step()

    return Training(step, model, [optimizer, companion_optimizer], companion)


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
                loss = script.criterion(z, y) + WEIGHT * F.mse_loss(z.float(), prototypes.of(y))
            script.backward(loss)
            logits.append(z.detach().float())
            labels.append(y)
        optimizer.step()
        z, y = (logits[0], labels[0]) if len(logits) == 1 else (torch.cat(logits), torch.cat(labels))
        prototypes.learn(z, y, ALPHA)

    return Training(step, model, [optimizer], others=lambda: [prototypes.rows])


PAPER: dict[str, Any] = {"weight": WEIGHT, "alpha": ALPHA, "distance": "squared"}  # as the loops by hand


def companion_learning(
    script: Script,
    finish: Callable[[DCLOptimizer], Any] | None = None,
    settings: dict[str, Any] = PAPER,
    term: bool = False,
    **options: Any,
) -> Training:
    """The same by wrapping the optimizer.

    Args:
        script: what trains.
        finish: what the script does to the wrapper before it trains.
        settings: the wrapper's arguments.
        term: whether the penalty is a term of the script's loss.
        options: further arguments of the wrapper.
    """
    optimizer = DCLOptimizer(sgd(trained(script.model)), script.model, **settings | options)
    if finish is not None:
        finish(optimizer)
    state = [optimizer.base, optimizer.companion_optimizer]
    step = script.loop(optimizer, penalty=(lambda z, y: optimizer.penalty(z)) if term else None)
    return Training(step, script.model, state, optimizer.companion)


def companion_prototype(
    script: Script, settings: dict[str, Any] = PAPER | {"update": "batch"}, term: bool = False
) -> Training:
    """Class prototypes in the companion's place; the arguments are those of :func:`companion_learning`."""
    optimizer = DCPOptimizer(sgd(trained(script.model)), script.model, **settings)
    step = script.loop(optimizer, penalty=optimizer.penalty if term else None)
    own = f"dcl_optim.{DCPOptimizer.__name__}"
    return Training(step, script.model, [optimizer.base], others=lambda: tensors_in(optimizer.state_dict()[own]))


def sharpness_aware(script: Script) -> Training:
    """SAM: a second forward and backward at perturbed weights; it builds the same SGD from the same arguments."""
    from pytorch_optimizer import SAM

    like = sgd(trained(script.model)).defaults
    optimizer = SAM(trained(script.model), SGD, rho=0.05, **{k: like[k] for k in ("lr", "momentum", "weight_decay")})
    steps = script.steps()

    def step() -> None:
        ((x, y),) = next(steps)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = script.loss(x, y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    return Training(step, script.model, [optimizer.base_optimizer])


def lookahead(script: Script) -> Training:
    """Lookahead: slow weights that follow the fast ones every fifth step."""
    from pytorch_optimizer import Lookahead

    base = sgd(trained(script.model))
    optimizer = Lookahead(base, k=LOOKAHEAD_STEPS, alpha=0.5)
    return Training(script.loop(optimizer), script.model, [base, optimizer])


def weight_average(script: Script) -> Training:
    """An exponential moving average of the weights, updated at each step."""
    optimizer = sgd(trained(script.model))
    average = AveragedModel(script.model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    step = script.loop(optimizer, after=lambda: average.update_parameters(script.model))
    return Training(step, script.model, [optimizer], average)


def schedule_free(script: Script) -> Training:
    """Schedule-Free SGD, which keeps its average itself; it cannot wrap another SGD."""
    from schedulefree import SGDScheduleFree

    optimizer = SGDScheduleFree(trained(script.model), lr=0.01, momentum=0.9, weight_decay=5e-4)
    optimizer.train()
    return Training(script.loop(optimizer), script.model, [optimizer])


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: what it is called there.
        build: puts the method into a script.
        variant: what the script itself does to its model; the row is divided by plain training that does it too.
        package: the optional package it needs.
        period: the steps after which its costs repeat.
        by_hand: the name of the row that is the same method written into the loop.
    """

    name: str
    build: Callable[[Script], Training]
    variant: str = ""
    package: str = ""
    period: int = 1
    by_hand: str = ""

    @property
    def reference(self) -> str:
        """The name of the row that this one is divided by."""
        return plain_row(self.variant).name


def plain_row(variant: str = "") -> Row:
    """Plain training in a variant of the script."""
    return Row(f"plain, {variant}" if variant else "plain", plain, variant)


def _wrapped(method: str, build: Callable[..., Training]) -> list[Row]:
    """By the line and by the term, each with the paper's settings, which the loop by hand has, and the defaults."""
    rows = []
    for name, term in ((f"{method}Optimizer", False), (f"{method}, by the term", True)):
        rows.append(Row(name, partial(build, term=term), by_hand=f"handwritten {method}"))
        rows.append(Row(f"{name}, defaults", partial(build, term=term, settings={})))
    return rows


METHODS: dict[str, Row] = {
    row.name: row
    for row in (
        plain_row(),
        Row("handwritten DCL", companion_by_hand),
        *_wrapped("DCL", companion_learning),
        Row("handwritten DCP", prototypes_by_hand),
        *_wrapped("DCP", companion_prototype),
        Row("SAM", sharpness_aware, package="pytorch_optimizer"),
        Row("Lookahead", lookahead, package="pytorch_optimizer", period=LOOKAHEAD_STEPS),
        Row("EMA of the weights", weight_average),
        Row("Schedule-Free SGD", schedule_free, package="schedulefree"),
    )
}

# Plain training, and the two methods by hand and by the wrapper: the rows of the narrower tables.
BY_HAND_AND_WRAPPED = ("plain", "handwritten DCL", "DCLOptimizer", "handwritten DCP", "DCPOptimizer")


def missing(packages: set[str]) -> str:
    """Name the optional packages that are not installed and what installs them; empty if all are."""
    absent = sorted(package for package in packages if package and find_spec(package) is None)
    return f"{', '.join(absent)} is missing: pip install -e '.[integrations]'" if absent else ""


def start(row: Row, work: Workload, setting: Setting | None = None, warm_up: int = 2) -> Training:
    """Set a method up and take its first steps, which allocate what later ones reuse.

    Raises:
        RuntimeError: its weights are not finite after them.
    """
    training = row.build(write_script(work, setting or Setting(), row.variant))
    for _ in range(warm_up):
        training.step()
    if not all(bool(parameter.isfinite().all()) for parameter in training.model.parameters()):
        raise RuntimeError(f"{row.name} diverged while warming up: its times would mean nothing")
    return training
