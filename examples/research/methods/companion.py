"""Deep Companion Learning and Deep Companion Prototype: plain training with a penalty as a term of the loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from examples.research.methods.base import Predictor, Setting, check_range, ensemble, keywords_of
from examples.research.methods.plain import Plain

SHARED = ("weight", "alpha", "distance")


def half_squared(z: Tensor, c: Tensor) -> Tensor:
    r"""The paper's distance as Section 3.2 writes it: :math:`\lVert z_i - c_i\rVert^2/2`."""
    return distances.squared(z, c) * (0.5 * z.shape[1])


class CompanionLearning(Plain):
    """Deep Companion Learning (R. Zhu and V. Saligrama, ECCV 2024): the penalty of :class:`DCLOptimizer`.

    Beside model and companion it reports the mean of their softmaxes. With a ``companion_every`` above 1, as the
    records name it, the companion never learns, a control: with alpha = 1 its target is its own prediction.

    Args:
        setting: what to train with.
        options: DCLOptimizer's weight, alpha, distance (or "half-squared"), companion_lr_scale and
            companion_fraction; companion_every; companion, a function that builds the network; and those of
            :class:`Plain`.

    Raises:
        ValueError: an option out of range.
    """

    cost = 2.0

    def __init__(self, setting: Setting, **options: Any) -> None:
        arguments, others = _split(options)
        build = arguments.pop("companion", None)
        arguments.setdefault("companion_fraction", 1.0)  # what a run has must not change when a default does
        if arguments.pop("companion_every", 1) > 1:
            arguments["alpha"] = 1.0

        def wrap(base: Optimizer, model: nn.Module) -> Optimizer:
            return DCLOptimizer(base, model, companion=None if build is None else build(), **arguments)

        super().__init__(setting, wrap, **others)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        own = ("companion", "companion_lr_scale", "companion_every", "companion_fraction")
        return (*SHARED, *own, *super().options())

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "companion": self.main.optimizer.companion}

    def predictors(self) -> dict[str, Predictor]:
        both = [self.main.network, self.main.optimizer.companion]
        return {**super().predictors(), "mean of both": ensemble(both)}

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        term: Tensor = self.main.optimizer.penalty(z)
        return term


class CompanionPrototype(Plain):
    r"""Deep Companion Prototype (the same paper's appendix): the penalty of :class:`DCPOptimizer`.

    Args:
        setting: what to train with.
        random_prototypes: a control: the standard deviation :math:`\ge 0` of prototypes that are drawn from a Gaussian
            at the start, of torch's global generator, and stay. It takes a weight and the distance "squared". Default
            0 for those that learn.
        class_means: Equation 5 as it is written, the sum over the classes of the batch of their rows' mean distance;
            by default the mean over all rows. It takes a number as weight.
        options: DCPOptimizer's weight, alpha, distance (or "half-squared") and update, and those of :class:`Plain`.

    Raises:
        ValueError: an option out of range, or of prototypes that learn with ``random_prototypes``.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        random_prototypes: float = 0.0,
        class_means: bool = False,
        **options: Any,
    ) -> None:
        check_range("random_prototypes", random_prototypes, 0)
        arguments, others = _split(options)
        self._drawn: nn.Embedding | None = None
        self._class_means = class_means
        distance = arguments.get("distance", "mse")
        self._distance = getattr(distances, distance) if isinstance(distance, str) else distance
        self._weight = arguments.get("weight", 1.0)
        if not random_prototypes:
            if class_means:
                arguments["weight"] = 0.0  # the optimizer's own term then adds nothing, and learns
            super().__init__(setting, partial(DCPOptimizer, num_classes=setting.classes, **arguments), **others)
            return
        arguments.pop("weight", None)
        check_range("weight", self._weight, 0)
        if (arguments.pop("distance", "squared"), arguments.pop("update", "batch")) != (
            "squared",
            "batch",
        ) or arguments:
            raise ValueError("random_prototypes stay and have the distance squared: leave the prototypes' options out")
        super().__init__(setting, **others)
        rows = random_prototypes * torch.randn(setting.classes, setting.classes)
        self._drawn = nn.Embedding.from_pretrained(rows).to(next(self.main.network.parameters()))
        self.kept["prototypes"] = self._drawn

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*SHARED, "update", *keywords_of(cls.__init__), *super().options())

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        if self._drawn is not None:
            return self._weight * distances.squared(z, self._drawn(target)).mean()
        term: Tensor = self.main.optimizer.penalty(z, target)
        return term + self._weight * self._sum_of_means(z, target) if self._class_means else term

    def _sum_of_means(self, z: Tensor, target: Tensor) -> Tensor:
        prototypes = self.main.optimizer.prototypes
        if not len(prototypes):  # before the first step
            return z.new_zeros(())
        apart = self._distance(z, prototypes[target])
        apart = torch.where(prototypes.any(1)[target], apart, 0.0)  # a class that was not seen has zeros
        rows = torch.bincount(target, minlength=len(prototypes))
        return (apart / rows[target]).sum()


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The wrapper's arguments, and the options of plain training."""
    others = {name: value for name, value in options.items() if name in Plain.options()}
    arguments = {name: value for name, value in options.items() if name not in others}
    if arguments.get("distance") == "half-squared":
        arguments["distance"] = half_squared
    return arguments, others
