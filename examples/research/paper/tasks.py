"""The tasks beyond classification, each as a method: distillation, FixMatch, masked autoencoders, their fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from dcl_optim import DCLOptimizer
from examples.research.applications.distillation import methods as distilling
from examples.research.applications.distillation import stages
from examples.research.applications.fixmatch import cosine, fixmatch_loss, groups
from examples.research.methods.averages import moving_average
from examples.research.methods.base import Method, Predictor, Trained, logits_of, predictor
from examples.research.paper.session import alone

if TYPE_CHECKING:
    from examples.research.paper.training import Training


WARMUP = 0.05  # He et al., Tables 8 and 9: of both trainings, 40 of 800 epochs being as large a part as 5 of 100


class Given(Trained):
    """A network with the optimizer and the schedule that a task builds for it."""

    def __init__(self, network: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.network, self.optimizer, self.scheduler = network, optimizer, scheduler


class Task(Method):
    """A method whose loss is not that of a classifier: one step, with DCL's penalty where the optimizer has one.

    Args:
        training: what it is of.
        given: what is trained.
        each_step: whether the schedule advances after each step; else after each epoch.
    """

    def __init__(self, training: Training, given: Given, each_step: bool = False) -> None:
        super().__init__(training.setting(), model=given)
        self._each_step, self._bfloat16 = each_step, training.configuration.precision == "bfloat16"

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the outputs that DCL holds to those of the companion."""
        raise NotImplementedError

    def networks(self) -> dict[str, nn.Module]:
        optimizer = self.main.optimizer
        companion = {"companion": optimizer.companion} if isinstance(optimizer, DCLOptimizer) else {}
        return {"model": self.main.network, **companion}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        optimizer = self.main.optimizer
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bfloat16):
            loss, outputs = self.loss(x, y)
        if isinstance(optimizer, DCLOptimizer):
            loss = loss + optimizer.penalty(outputs)
        loss.backward()
        optimizer.step()
        if self._each_step:
            self.main.scheduler.step()
        return loss.detach()

    def end_epoch(self) -> None:
        if self._each_step:
            self.epoch += 1
        else:
            super().end_epoch()


class Distilled(Task):
    """A student, with or without a teacher."""

    def __init__(self, training: Training, given: Given, warmup: int) -> None:
        super().__init__(training, given)
        self._warmup = warmup

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, z = self.main.network(x, y, min(1.0, (self.epoch + 1) / max(1, self._warmup)))
        return loss, z

    def predictors(self) -> dict[str, Predictor]:
        networks = self.networks() | {"model": self.main.network.model}
        return {name: _attribute(network) for name, network in networks.items()}


class FixMatch(Task):
    """FixMatch; the moving average of the weights is deployed."""

    def __init__(self, training: Training, given: Given, details: Any) -> None:
        super().__init__(training, given, each_step=True)
        self._details = details
        self._average = self.kept["average"] = moving_average(given.network, details["average"], warm_up=True)

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z, unlabelled = self.main.network(x), self._details["ratio"] * len(y)
        known, weak, strong = z.split([len(y), unlabelled, unlabelled])
        loss, _ = fixmatch_loss(known, y, weak, strong, self._details["threshold"], self._details["unlabelled_weight"])
        return loss, z

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = super().step(x, y, index)
        self._average.update_parameters(self.main.network)
        return loss

    def predictors(self) -> dict[str, Predictor]:
        return {"average": predictor(self._average.module), **super().predictors()}


class Reconstruction(Task):
    """A masked autoencoder, which predicts no classes."""

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self.main.network(pixel_values=x)
        return output.loss, output.logits

    def predictors(self) -> dict[str, Predictor]:
        return {}


class Tuning(Task):
    """The encoder of an autoencoder with a linear layer, trained as a classifier."""

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self.main.network(pixel_values=x, labels=y)
        return output.loss, output.logits

    def predictors(self) -> dict[str, Predictor]:
        return {"model": _attribute(self.main.network)}


def _attribute(network: nn.Module) -> Predictor:
    """A predictor of a network that gives the logits among others."""
    return lambda x: attrgetter("logits")(logits_of(network, x))


def in_steps(optimizer: Optimizer, epochs: int) -> MultiStepLR:
    """The schedule of the distillation literature: a tenth after 5/8, 3/4 and 7/8 of the epochs."""
    return MultiStepLR(optimizer, [round(share * epochs) for share in (5 / 8, 3 / 4, 7 / 8)])


def distill(training: Training) -> Method:
    """One of the distillation methods, or the teacher itself."""
    work, data, chosen = training.work, training.data, training.configuration
    teacher = None
    if work.needs is not None:
        teacher = stages.cut(stages.build(work.needs.configuration.network, data.classes, data.shape))
        training.take_over(teacher)
        torch.manual_seed(training.seed)
    student = stages.cut(stages.build(chosen.network, data.classes, data.shape))
    network = distilling.make(work.details["kind"], student, teacher, data.shape).to(training.device)
    network = network.to(memory_format=torch.channels_last)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    base = torch.optim.SGD(trained, lr=chosen.lr, momentum=0.9, weight_decay=chosen.weight_decay)
    optimizer = training.wrapped(base, network.model)
    given = Given(network, optimizer, in_steps(optimizer, chosen.epochs))
    return Distilled(training, given, work.details["warmup"])


def fixmatch(training: Training) -> Method:
    """FixMatch with its optimizer: no weight decay on biases and batch norm, a cosine of 7/16 of a period."""
    chosen, steps = training.configuration, training.steps_in_all()
    network = training.network()
    base = torch.optim.SGD(groups(network, chosen.weight_decay), lr=chosen.lr, momentum=0.9, nesterov=True)
    optimizer = training.wrapped(base, network)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
    return FixMatch(training, Given(network, optimizer, scheduler), training.work.details)


def reconstruct(training: Training) -> Method:
    """A masked autoencoder of the size ViT-B."""
    from timm.optim import param_groups_weight_decay

    chosen = training.configuration
    network = training.placed(_autoencoder(training, training.work.details["mask_ratio"]))
    weights = param_groups_weight_decay(alone(network), chosen.weight_decay)
    base = torch.optim.AdamW(weights, lr=chosen.lr, betas=(0.9, 0.95))
    optimizer = training.wrapped(base, network, logits=attrgetter("logits"))
    return Reconstruction(training, Given(network, optimizer, _warm_up(training, optimizer)), True)


def tune(training: Training) -> Method:
    """The encoder that a training needs, as a classifier."""
    from timm.optim import param_groups_layer_decay

    from examples.research.applications.masked_autoencoder.networks import classifier

    encoder, chosen = _autoencoder(training, 0.75), training.configuration
    training.take_over(encoder)
    torch.manual_seed(training.seed)
    model = classifier(encoder, training.data.classes)
    weights = param_groups_layer_decay(model, chosen.weight_decay, layer_decay=training.work.details["layer_decay"])
    for group in weights:
        group["lr"] = chosen.lr * group.pop("lr_scale")
    network, optimizer = training.placed(model), torch.optim.AdamW(weights)
    return Tuning(training, Given(network, optimizer, _warm_up(training, optimizer)), True)


def _autoencoder(training: Training, mask_ratio: float) -> Any:
    from examples.research.applications.masked_autoencoder.networks import autoencoder

    return autoencoder(training.data.shape, mask_ratio)


def _warm_up(training: Training, optimizer: Optimizer) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    steps = training.steps_in_all()
    return get_cosine_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)


TASKS: dict[str, Callable[[Any], Method]] = {
    "distill": distill,
    "fixmatch": fixmatch,
    "reconstruct": reconstruct,
    "tune": tune,
}
