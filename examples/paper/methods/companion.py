"""Deep Companion Learning and Deep Companion Prototype: plain training with the optimizer wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples.paper.methods.base import Method, Setting, Trained, keywords_of


class _Wrapped(Method):
    """Plain training with a wrapped optimizer."""

    def __init__(self, setting: Setting, wrapper: Callable[..., Optimizer], *classes: int, **options: Any) -> None:
        criterion = nn.CrossEntropyLoss()

        def wrap(base: Optimizer, model: nn.Module) -> Optimizer:
            return wrapper(base, model, *classes, criterion=criterion, **options)

        super().__init__(setting, model=Trained(setting, wrap))
        self.criterion = criterion

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = self.criterion(self.main.network(x), y)
        self.main.update(loss)
        return loss.detach()


class CompanionLearning(_Wrapped):
    """Deep Companion Learning (R. Zhu and V. Saligrama, ECCV 2024): the optimizer in :class:`DCLOptimizer`.

    Args:
        setting: what to train with.
        options: the wrapper's own keywords, but for ``criterion``: weight, alpha, distance, companion (a callable that
            builds the network), companion_lr_scale, companion_fraction and so on.

    Raises:
        ValueError: an option out of range.
    """

    cost = 2.0

    def __init__(self, setting: Setting, **options: Any) -> None:
        super().__init__(setting, DCLOptimizer, **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return tuple(name for name in keywords_of(DCLOptimizer.__init__) if name != "criterion")

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "companion": self.main.optimizer.companion}


class CompanionPrototype(_Wrapped):
    """Deep Companion Prototype (the same paper's appendix): the optimizer in :class:`DCPOptimizer`.

    Args:
        setting: what to train with.
        options: the wrapper's own keywords, but for ``criterion``: weight, alpha, distance and so on.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, **options: Any) -> None:
        super().__init__(setting, DCPOptimizer, setting.classes, **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return tuple(name for name in keywords_of(DCPOptimizer.__init__) if name != "criterion")
