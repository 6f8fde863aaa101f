"""SAF: predictions are held to those of some epochs ago, which costs memory instead of time."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.research.methods.base import Buffers, Method, Setting, Trained, check_count, check_range, divergence


class SharpnessFree(Method):
    r"""SAF, Sharpness-Aware Training for Free (Du et al., NeurIPS 2022).

    .. math:: \ell = \text{CE}(z, y) + \frac{\lambda \tau^2}{B} \sum_i
        \text{KL}\big(\text{softmax}(z_i^{e - \tilde E} / \tau) \,\Vert\, \text{softmax}(z_i / \tau)\big)

    where :math:`z_i^{e - \tilde E}` are the logits that the training step gave for sample i :math:`\tilde E` epochs ago
    and the second term begins when ``start`` epochs are over. A sample that was not trained on in that epoch adds
    nothing. The logits take lag × samples × classes numbers on the setting's device: for each sample the new ones
    replace those just read, so that lag epochs are enough.

    Args:
        setting: what to train with.
        weight: :math:`\lambda \ge 0`. Default 0.3.
        temperature: :math:`\tau > 0`. Default 5.
        lag: :math:`\tilde E`, in epochs, at least 1. Default 3.
        start: epochs before the term begins, at least ``lag``. Default 5.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self, setting: Setting, *, weight: float = 0.3, temperature: float = 5.0, lag: int = 3, start: int = 5
    ) -> None:
        check_range("weight", weight, 0)
        check_range("temperature", temperature, 1e-6)
        check_count("lag", lag, 1)
        check_count("start", start, lag)
        super().__init__(setting, model=Trained(setting))
        self._weight, self._temperature, self._lag, self._start = weight, temperature, lag, start
        like = next(self.main.network.parameters())
        self._memory = self.kept["memory"] = Buffers(
            logits=like.new_zeros(lag, setting.samples, setting.classes),
            epochs=torch.full((lag, setting.samples), -1, device=like.device),
        )

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        z = self.main.network(x)
        task = loss = self.criterion(z, y)
        past, remembered = self._exchange(index.to(z.device), z.detach())
        if self.epoch >= self._start:
            consistency = (divergence(past, z, self._temperature) * remembered).mean()
            loss = task + self._weight * self._temperature**2 * consistency
        self.main.update(loss)
        return task.detach()

    def _exchange(self, index: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give the logits of ``lag`` epochs ago and which rows have them; remember the new ones."""
        place = (self.epoch % self._lag, index)
        memory, epochs = self._memory.get_buffer("logits"), self._memory.get_buffer("epochs")
        past, remembered = memory[place], epochs[place] == self.epoch - self._lag
        memory[place], epochs[place] = logits, self.epoch
        return past, remembered
