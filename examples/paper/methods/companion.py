"""Deep Companion Learning, Deep Companion Prototype, and both: plain training with a penalty as a term of the loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import AutoWeight, DCLOptimizer, DCPOptimizer, distances
from examples.paper.methods.base import Predictor, Setting, check_range, ensemble, keywords_of
from examples.paper.methods.plain import Plain, Wrapper
from examples.paper.methods.prototypes import Prototypes
from examples.paper.methods.weight_rules import Rule

SHARED = ("weight", "alpha", "distance", "temperature", "rule")


class _Regularized(Plain):
    """Plain training with a penalty.

    Args:
        setting: what to train with.
        wrapper: what to wrap the optimizer in, given it and the network; None for nothing.
        rule: what the weight follows.
        prototypes: those of the experiments; None for none.
        options: those of :class:`Plain`.
    """

    def __init__(
        self,
        setting: Setting,
        wrapper: Wrapper | None = None,
        *,
        rule: Rule | None = None,
        prototypes: Prototypes | None = None,
        **options: Any,
    ) -> None:
        super().__init__(setting, wrapper, **options)
        self._rule, self.prototypes = rule, prototypes
        if prototypes is not None:
            self.kept["prototypes"] = prototypes.to(next(self.main.network.parameters()))

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        return 0.0 if self.prototypes is None else self.prototypes.penalty(z, target)

    def _evaluate(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        z, loss = super()._evaluate(x, target)
        if self._rule is not None:
            self._rule.update(z, target, loss)
        return z, loss

    def _learn(self, z: Tensor, y: Tensor, target: Tensor) -> None:
        super()._learn(z, y, target)
        if self.prototypes is not None:
            self.prototypes.learn(z, target)

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | ({} if self._rule is None else {"rule": self._rule})


class _WithCompanion(_Regularized):
    """A method with a companion; beside model and companion it reports the mean of their softmaxes."""

    cost = 2.0

    def __init__(self, setting: Setting, wrapper: Wrapper, **options: Any) -> None:
        super().__init__(setting, wrapper, **options)
        if self._rho:
            self.cost += 1 / 3  # the forecast at the ascended weights

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "companion": self.main.optimizer.companion}

    def predictors(self) -> dict[str, Predictor]:
        both = [self.main.network, self.main.optimizer.companion]
        return {**super().predictors(), "mean of both": ensemble(both)}

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        term: Tensor = self.main.optimizer.penalty(z)
        return term + super()._penalty(z, target)


def standardized(z: Tensor, c: Tensor) -> Tensor:
    """The mean squared distance of logits less their mean and divided by their standard deviation, row by row."""
    z, c = ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-6) for rows in (z, c))
    return distances.squared(z, c)


class CompanionLearning(_WithCompanion):
    """Deep Companion Learning (R. Zhu and V. Saligrama, ECCV 2024): the penalty of :class:`DCLOptimizer`.

    A ``companion_every`` above the number of steps gives a companion that never learns, a control. An alpha of 1 does
    not: the gradient is zero then, but the weight decay goes on.

    Args:
        setting: what to train with.
        options: DCLOptimizer's weight, alpha, distance, companion_lr_scale, companion_every and companion_fraction;
            companion, a function that builds the network; temperature, of a distance by name; rule, the arguments of a
            :class:`~examples.paper.methods.weight_rules.Rule` in place of a weight; and those of :class:`Plain`. A
            distance "standardized" is :func:`standardized`.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, **options: Any) -> None:
        arguments, rule, others = _split(options)
        build = arguments.pop("companion", None)

        def wrap(base: Optimizer, model: nn.Module) -> Optimizer:
            return DCLOptimizer(base, model, companion=None if build is None else build(), **arguments)

        super().__init__(setting, wrap, rule=rule, **others)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        own = ("companion", "companion_lr_scale", "companion_every", "companion_fraction")
        return (*SHARED, *own, *super().options())


class CompanionPrototype(_Regularized):
    r"""Deep Companion Prototype (the same paper's appendix): the penalty of :class:`DCPOptimizer`.

    Args:
        setting: what to train with.
        prototypes: a name of :data:`~examples.paper.methods.prototypes.UPDATES`; None for DCPOptimizer's own.
        random_prototypes: a control: the standard deviation :math:`\ge 0` of prototypes that are drawn from a Gaussian
            at the start, of torch's global generator, and stay: alpha is 1. Default 0 for those that learn.
        options: DCPOptimizer's weight, alpha, distance and update; temperature and rule as in
            :class:`CompanionLearning`; and those of :class:`Plain`.

    Raises:
        ValueError: an option out of range, or another alpha with ``random_prototypes``.
    """

    def __init__(
        self, setting: Setting, *, prototypes: str | None = None, random_prototypes: float = 0.0, **options: Any
    ) -> None:
        check_range("random_prototypes", random_prototypes, 0)
        arguments, rule, others = _split(options)
        if prototypes is None and not random_prototypes:
            wrap = partial(DCPOptimizer, num_classes=setting.classes, **arguments)
            super().__init__(setting, wrap, rule=rule, **others)
            return
        if random_prototypes and arguments.get("alpha", 1) != 1:
            raise ValueError(f"alpha={arguments['alpha']!r} but random_prototypes stay as they are: leave alpha out")
        arguments["update"] = prototypes or "batch"
        weight = arguments.get("weight")
        if isinstance(weight, AutoWeight):
            rule = arguments["weight"] = Rule("accuracy", weight.power, weight.floor)
        own = Prototypes(setting.classes, **arguments)
        super().__init__(setting, rule=rule, prototypes=own, **others)
        if random_prototypes:
            own.fix(random_prototypes * torch.randn(setting.classes, setting.classes))

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*SHARED, "update", *keywords_of(cls.__init__), *super().options())

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        if self.prototypes is not None:
            return super()._penalty(z, target)
        term: Tensor = self.main.optimizer.penalty(z, target)
        return term


class CompanionLearningPrototype(_WithCompanion):
    r"""Both penalties summed: the model is held to a companion and to its classes' prototypes.

    The companion learns as in :class:`~dcl_optim.DCLOptimizer`, and the prototypes as in
    :class:`~dcl_optim.DCPOptimizer` with ``update="batch"``; both distances are squared, the paper's.

    Args:
        setting: what to train with.
        dcl_weight, dcl_alpha: the companion's.
        dcp_weight, dcp_alpha: the prototypes'.
        options: those of :class:`Plain`.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        dcl_weight: float = 0.1,
        dcl_alpha: float = 0.6,
        dcp_weight: float = 0.1,
        dcp_alpha: float = 0.97,
        **options: Any,
    ) -> None:
        for name, weight in (("dcl_weight", dcl_weight), ("dcp_weight", dcp_weight)):
            check_range(name, weight, 0)
        for name, alpha in (("dcl_alpha", dcl_alpha), ("dcp_alpha", dcp_alpha)):
            check_range(name, alpha, 0, 1)
        wrap = partial(DCLOptimizer, weight=dcl_weight, alpha=dcl_alpha, distance="squared")
        super().__init__(setting, wrap, prototypes=Prototypes(setting.classes, dcp_weight, dcp_alpha), **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*keywords_of(cls.__init__), *super().options())


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], Rule | None, dict[str, Any]]:
    """The wrapper's arguments, the rule that the weight among them follows, and the options of plain training."""
    others = {name: value for name, value in options.items() if name in Plain.options()}
    arguments = {name: value for name, value in options.items() if name not in others}
    rule = None
    if "rule" in arguments:
        rule = arguments["weight"] = Rule(**arguments.pop("rule"))
    if arguments.get("distance") == "standardized":
        arguments["distance"] = standardized
    if "temperature" in arguments:
        function = getattr(distances, arguments["distance"])
        arguments["distance"] = partial(function, temperature=arguments.pop("temperature"))
    return arguments, rule, others
