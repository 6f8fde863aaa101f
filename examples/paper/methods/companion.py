"""Deep Companion Learning, Deep Companion Prototype, and both: plain training with the optimizer wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import squared
from examples.paper.methods.base import Predictor, Setting, check_range, ensemble, keywords_of
from examples.paper.methods.companion_and_prototypes import CompanionPrototypeOptimizer
from examples.paper.methods.plain import Plain
from examples.paper.methods.weight_rules import OPTIMIZERS, Rule


class _Wrapped(Plain):
    """Plain training with a wrapped optimizer.

    Args:
        setting: what to train with.
        wrapper: the optimizer's class.
        classes: its further positional arguments.
        rule: the arguments of a :class:`~examples.paper.methods.weight_rules.Rule` in place of a weight.
        options: its own keywords and those of :class:`Plain`.
    """

    def __init__(
        self,
        setting: Setting,
        wrapper: Callable[..., Optimizer],
        *classes: int,
        rule: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._rule = None if rule is None else Rule(**rule)
        if self._rule is not None:
            options["weight"] = self._rule
        shared = {name: options.pop(name) for name in Plain.options() if name in options}

        def wrap(base: Optimizer, model: nn.Module) -> Optimizer:
            return wrapper(base, model, *classes, loss_scale=1.0, **options)

        super().__init__(setting, wrap, **shared)

    def _evaluate(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        z, loss = super()._evaluate(x, target)
        if self._rule is not None:
            self._rule.update(z, target, loss)
        return z, loss

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | ({} if self._rule is None else {"rule": self._rule})


class _WithCompanion(_Wrapped):
    """A wrapper that has a companion; beside model and companion it reports the mean of their softmaxes."""

    cost = 2.0

    def __init__(self, setting: Setting, wrapper: Callable[..., Optimizer], *classes: int, **options: Any) -> None:
        super().__init__(setting, wrapper, *classes, **options)
        if self._rho:
            self.cost += 1 / 3  # the forecast at the ascended weights

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "companion": self.main.optimizer.companion}

    def predictors(self) -> dict[str, Predictor]:
        both = [self.main.network, self.main.optimizer.companion]
        return {**super().predictors(), "mean of both": ensemble(both)}


class _WithPrototypes(_Wrapped):
    """A wrapper that has prototypes; it is given the labels, which not every loss shows."""

    def _evaluate(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.main.optimizer.set_targets(target)
        return super()._evaluate(x, target)


def standardized(z: Tensor, c: Tensor) -> Tensor:
    """The mean squared distance of logits less their mean and divided by their standard deviation, row by row."""
    z, c = ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-6) for rows in (z, c))
    return squared(z, c)


class CompanionLearning(_WithCompanion):
    """Deep Companion Learning (R. Zhu and V. Saligrama, ECCV 2024): the optimizer in :class:`DCLOptimizer`.

    A ``companion_every`` above the number of steps gives a companion that never learns, a control. An alpha of 1 does
    not: the gradient is zero then, but the weight decay goes on.

    Args:
        setting: what to train with.
        options: the wrapper's own keywords, but for ``loss_scale``: weight, alpha, distance, companion (a callable that
            builds the network), companion_lr_scale, companion_every and so on; and those of :class:`Plain`. A distance
            "standardized" is :func:`standardized`.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, **options: Any) -> None:
        if options.get("distance") == "standardized":
            options["distance"] = standardized
        super().__init__(setting, DCLOptimizer, **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*_keywords_of(DCLOptimizer), "rule", *super().options())


class CompanionPrototype(_WithPrototypes):
    r"""Deep Companion Prototype (the same paper's appendix): the optimizer in :class:`DCPOptimizer`.

    Args:
        setting: what to train with.
        prototypes: a name of :data:`~examples.paper.methods.weight_rules.OPTIMIZERS`; None for DCPOptimizer's own.
        random_prototypes: a control: the standard deviation :math:`\ge 0` of prototypes that are drawn from a Gaussian
            at the start, of torch's global generator, and stay: alpha is 1. Default 0 for those that learn.
        options: the wrapper's own keywords, but for ``targets`` and ``loss_scale``: weight, alpha, distance and so on;
            and those of :class:`Plain`.

    Raises:
        ValueError: an option out of range, or another alpha with ``random_prototypes``.
    """

    def __init__(
        self, setting: Setting, *, prototypes: str | None = None, random_prototypes: float = 0.0, **options: Any
    ) -> None:
        check_range("random_prototypes", random_prototypes, 0)
        if random_prototypes and options.setdefault("alpha", 1.0) != 1:
            raise ValueError(f"alpha={options['alpha']!r} but random_prototypes stay as they are: leave alpha out")
        super().__init__(setting, OPTIMIZERS[prototypes], setting.classes, **options)
        if random_prototypes:
            values = random_prototypes * torch.randn(setting.classes, setting.classes)
            state = {"values": values, "numbers": torch.full((setting.classes,), torch.inf)}
            self.main.optimizer.forecaster.load_state_dict(state)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*_keywords_of(DCPOptimizer), "rule", *keywords_of(cls.__init__), *super().options())


class CompanionLearningPrototype(_WithPrototypes, _WithCompanion):
    """Both penalties summed: the optimizer in :class:`CompanionPrototypeOptimizer`.

    Args:
        setting: what to train with.
        options: the wrapper's own keywords, but for ``loss_scale``: dcl_weight, dcl_alpha, dcp_weight, dcp_alpha and
            so on; and those of :class:`Plain`.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, **options: Any) -> None:
        super().__init__(setting, CompanionPrototypeOptimizer, setting.classes, **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*_keywords_of(CompanionPrototypeOptimizer), *super().options())


def _keywords_of(wrapper: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in keywords_of(wrapper.__init__) if name not in ("targets", "loss_scale"))
