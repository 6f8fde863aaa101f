"""A training of the paper: a run of the research on all training images, that goes on at the step where it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer
from examples.research import methods, networks, non_targets
from examples.research.applications.adapters import renew_head
from examples.research.checkpoint import save_atomically
from examples.research.methods.base import Method, Predictor
from examples.research.networks.weights import load
from examples.research.paper.rows import Work
from examples.research.paper.session import Session, alone
from examples.research.paper.tasks import TASKS
from examples.research.trainer import Run

WATCHED = 50  # test images whose logits are kept after each epoch: as many as the paper's figure shows


def weights_file(network: str, folder: Path) -> tuple[Path, str]:
    """Where torchvision's ImageNet weights of a network are looked for, and what brings them there."""
    from torchvision import models

    name = {"shufflenetv2": "shufflenet_v2_x1_0", "efficientnet-b0": "efficientnet_b0"}.get(network, network)
    url = models.get_model_weights(name)["IMAGENET1K_V1"].url
    path = folder / "weights" / Path(url).name
    return path, f"curl --create-dirs -o {path} {url}"


class Training(Run):
    """A training and a seed on their way.

    Args:
        work: what is trained.
        seed: of the initial weights, the order of the images and their augmentation.
        session: where.
        data: its images.

    Attributes:
        history: the test accuracy of what is deployed after each epoch.
        watched: the logits of some test images after each epoch.
    """

    def __init__(self, work: Work, seed: int, session: Session, data: Any) -> None:
        self.work, self.session = work, session
        self.history: list[float] = []
        self.watched: list[Tensor] = []
        super().__init__(work.configuration, seed, session.device, data)
        self._begun = self.generator.get_state()  # when the epoch began

    # What the tasks build from.

    def setting(self) -> methods.Setting:
        """What a method trains with."""
        return replace(self._setting(), build=self.network)

    def network(self) -> nn.Module:
        """The network of the configuration, with the weights to start from, and shared between the processes."""
        network = self._build(self.configuration.network)
        if self.work.pretrained:
            renew_head(network)
        return self.session.parallel(network)

    def placed(self, network: nn.Module) -> nn.Module:
        """A network of a task, on the device and shared between the processes."""
        return self.session.parallel(network.to(self.device))

    def wrapped(self, base: Optimizer, model: nn.Module, **more: Any) -> Optimizer:
        """An optimizer with DCL around it, where the configuration has it."""
        if self.configuration.method != "dcl":
            return base
        return DCLOptimizer(base, model, **{"companion_fraction": 1.0, **self.configuration.options, **more})

    def take_over(self, network: nn.Module) -> None:
        """Load the weights of the training that this one needs."""
        if self.work.needs is not None and not self.session.random_needs:
            load(network, self.kept_weights(self.work.needs), other_classes=False)

    def kept_weights(self, work: Work) -> Path:
        """The file of the weights of a finished training that others need."""
        return self.session.out / "weights" / f"{work.key(0)}.pt"

    def steps_in_all(self) -> int:
        """How many steps the training has."""
        return self.configuration.epochs * self._steps_per_epoch()

    # What differs from a run of the research.

    def _method(self) -> Method:
        if self.work.task in TASKS:
            return TASKS[self.work.task](self)
        return methods.make(self.configuration.method, self.setting(), **self._options())

    def _weights(self, name: str) -> Path | None:
        if not self.work.pretrained or name != self.configuration.network or self.session.random_weights:
            return None
        return weights_file(name, self.session.data)[0]

    def steps(self) -> Iterator[None]:
        """See :meth:`Run.steps`; an epoch that was interrupted goes on with the batches that are left."""
        if self.batches == 0:
            self._begun = self.generator.get_state()
        else:
            self.generator.set_state(self._begun)
        yield from super().steps()
        self.losses[-1] = self.session.mean(self.losses[-1])

    @property
    def epochs(self) -> int:
        """How many epochs are over."""
        return len(self.losses)

    @property
    def diverged(self) -> int | None:
        """The first epoch whose loss is not finite; None while there is none."""
        return next((epoch for epoch, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)

    def predictors(self) -> dict[str, Predictor]:
        """See :meth:`Run.predictors`; the first process predicts alone, so it must not wait for the others' buffers."""
        main = self.method.main
        shared, main.network = main.network, alone(main.network)
        found = super().predictors()
        main.network = shared
        return found

    def measure(self) -> None:
        """Note the test accuracy of what is deployed, and the logits of a few images."""
        for predict in list(self.predictors().values())[:1]:
            right, count = 0, 0
            for number, (x, y) in enumerate(self.data.fixed("test")):
                z = predict(self._moved(x)).float().cpu()
                right, count = right + int((z.argmax(1) == y).sum()), count + len(y)
                if number == 0 and self.draws():
                    self.watched.append(z[:WATCHED].clone())
            self.history.append(right / count)

    def draws(self) -> bool:
        """Whether the paper has figures of it."""
        chosen = self.configuration
        return self.work.task == "classify" and chosen.data == "cifar100" and chosen.method in ("plain", "dcl")

    def figures(self, part: str = "test") -> dict[str, Any]:
        """The accuracy of each predictor, the deployed one first; with :meth:`draws` what the figures show of it."""
        found: dict[str, Any] = {"accuracy": {}, "seconds": round(self.seconds, 3), "waited": round(self.waited, 3)}
        for name, z, y in self.logits(part):
            found["accuracy"][name] = float((z.argmax(1) == y).double().mean())
        if self.draws():
            _, z, y = next(self.logits("train"))
            found["consistency"] = float(non_targets.top_non_target_consistency(z, y).nanmean())
            found["perplexity"] = float(non_targets.non_target_perplexity(z, y).nanmean())
        return found | {"history": self.history}

    def drawings(self) -> dict[str, Tensor]:
        """What the figures are drawn from."""
        _, train, labels = next(self.logits("train"))
        _, test, test_labels = next(self.logits("test"))
        return {
            "counts": non_targets.top_non_target_counts(train, labels),
            "test": test,
            "labels": test_labels,
            "watched": torch.stack(self.watched),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact continuation needs, also in the middle of an epoch."""
        names = ("losses", "seconds", "waited", "batches", "images", "total", "history", "watched")
        found = {name: getattr(self, name) for name in names}
        found |= {"method": self.method.state_dict(), "begun": self._begun, "loader": self.generator.get_state()}
        return found | {"work": self.work.as_dict(), "seed": self.seed, "processes": self.session.processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of another number of processes.
        """
        if state["processes"] != self.session.processes:
            raise ValueError(
                f"the checkpoint is of {state['processes']} processes, not {self.session.processes}: start as many, "
                "or choose another --out"
            )
        for name in ("losses", "seconds", "waited", "batches", "images", "total", "history", "watched"):
            setattr(self, name, state[name])
        self.total = self.total.to(self.device)
        self.method.load_state_dict(state["method"])
        self._begun = state["begun"].cpu()
        self.generator.set_state(state["loader"].cpu())
        if hasattr(self.data, "epochs"):
            self.data.epochs = self.epochs

    def save(self, path: Path) -> None:
        """Write the state."""
        save_atomically(self.state_dict(), path)

    def resume(self, path: Path) -> None:
        """Go on from a state."""
        self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def save_weights(self) -> None:
        """Write the trained weights for the trainings that need them."""
        network = alone(self.method.main.network)
        network = network.model if self.work.task == "distill" else network
        state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
        save_atomically(state, self.kept_weights(self.work))


def fits(work: Work, classes: int, shape: tuple[int, int, int]) -> None:
    """Build the network without its memory.

    Raises:
        ValueError: it is not for images of this size.
    """
    if work.configuration.network in networks.NAMES:
        with torch.device("meta"):
            networks.build(work.configuration.network, classes, shape)
