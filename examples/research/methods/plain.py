"""One training step for plain training and for wrapped optimizers, with the options that all of them take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.research.methods.base import Method, Setting, Trained, check_range, frozen_statistics, keywords_of
from examples.research.methods.criterion import Criterion
from examples.research.methods.sharpness import sharpness_aware

Wrapper = Callable[..., Optimizer]


class Plain(Method):
    r"""Minimise the cross-entropy, or what the options make of it; each is off at 0, its default.

    The loss that ``step`` returns is the criterion's, with the options' terms and of the mixed batch.

    Args:
        setting: what to train with.
        wrapper: what to wrap the optimizer in, given it and the network; no option. None for nothing.
        mixup: :math:`\alpha \ge 0` of mixup (Zhang et al., ICLR 2018): with one :math:`r \sim \text{Beta}(\alpha,
            \alpha)` a batch and a permutation π of it, the inputs are :math:`r x_i + (1 - r) x_{\pi(i)}` and the labels
            likewise; since cross-entropy is linear in its target, the loss is their :math:`r\, \text{CE}(z, y_i) +
            (1 - r)\, \text{CE}(z, y_{\pi(i)})`. DCP gets the mixed labels too. They use 0.2 on ImageNet, 1 on CIFAR.
        rho: the radius :math:`\rho \ge 0` of SAM's step:
            :func:`~examples.research.methods.sharpness.sharpness_aware`.
            The criterion learns from the first evaluation, at the unperturbed weights.
        options: see :class:`~examples.research.methods.criterion.Criterion`.

    Raises:
        ValueError: an option out of range, or mixup with a term that needs one class a sample.
        ImportError: ``rho`` is given, and ``pytorch_optimizer`` is not installed.
    """

    criterion: Criterion

    def __init__(
        self,
        setting: Setting,
        wrapper: Wrapper | None = None,
        *,
        mixup: float = 0.0,
        rho: float = 0.0,
        **options: Any,
    ) -> None:
        check_range("mixup", mixup, 0)
        check_range("rho", rho, 0)
        criterion = Criterion(setting.classes, setting.samples, **options)
        if mixup and criterion.one_class:
            raise ValueError(
                f"mixup={mixup!r} gives samples of two classes, and {', '.join(options)} need one class a sample: "
                "leave mixup or these out"
            )

        def wrap(base: Optimizer, model: nn.Module) -> Optimizer:
            base = sharpness_aware(base, rho) if rho else base
            return base if wrapper is None else wrapper(base, model)

        super().__init__(setting, model=Trained(setting, wrap))
        self._mixup, self._rho = mixup, rho
        self.criterion = criterion.to(next(self.main.network.parameters()))
        if criterion.state_dict():
            self.kept["criterion"] = criterion
        if rho:
            self.cost += 1

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (*keywords_of(Criterion.__init__), *keywords_of(Plain.__init__))

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        index = index.to(y.device)
        x, target = self._mixed(x, y) if self._mixup else (x, y)
        z, loss = self._evaluate(x, target, index)
        if self._rho:
            with contextlib.ExitStack() as stack:
                for network in self.networks().values():
                    stack.enter_context(frozen_statistics(network))
                self.main.optimizer.step(lambda: self._evaluate(x, target, index)[1])
        else:
            self.main.optimizer.step()
        self.criterion.learn(z, y, index)
        return loss

    def _evaluate(self, x: Tensor, target: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient; give logits and loss, detached."""
        self.main.optimizer.zero_grad()
        z = self.main.network(x)
        loss = self.criterion(z, target, index)
        (loss + self._penalty(z, target)).backward()
        return z.detach(), loss.detach()

    def end_epoch(self) -> None:
        super().end_epoch()
        self.criterion.end_epoch()

    def _penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        """What a method adds to the loss."""
        return 0.0

    def _mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        alpha = torch.tensor(self._mixup, dtype=torch.float64)
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        other = torch.randperm(len(y)).to(y.device)
        labels = F.one_hot(y, self.setting.classes).to(x.dtype)
        return share * x + (1 - share) * x[other], share * labels + (1 - share) * labels[other]
