"""Plain training: cross-entropy and nothing else."""

from __future__ import annotations

from torch import Tensor, nn

from examples.paper.methods.base import Method, Setting, Trained, check_range


class Plain(Method):
    """Minimise the cross-entropy.

    Args:
        setting: what to train with.
        label_smoothing: as in :class:`torch.nn.CrossEntropyLoss`, in [0, 1]. Default 0. The loss that ``step`` returns
            has it too.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, *, label_smoothing: float = 0.0) -> None:
        check_range("label_smoothing", label_smoothing, 0, 1)
        super().__init__(setting, model=Trained(setting))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = self.criterion(self.main.network(x), y)
        self.main.update(loss)
        return loss.detach()
