"""Deep Mutual Learning: two networks that teach each other."""

from __future__ import annotations

from torch import Tensor

from examples.research.methods.base import Method, Setting, Trained, check_range, divergence


class MutualLearning(Method):
    r"""DML (Zhang et al., CVPR 2018) with two networks of the same architecture.

    .. math:: \ell_i = \text{CE}(z_i, y) + w\,\text{KL}(p_j \,\Vert\, p_i), \quad (i, j) \in \{(1, 2), (2, 1)\}

    at temperature 1, p the softmax of the logits z. Both losses come from the same two forwards and both networks are
    updated from them; Algorithm 1 of the paper recomputes the predictions between the two updates, which costs a
    further forward of each.

    Args:
        setting: what to train with; each network gets an initialisation of its own.
        weight: :math:`w \ge 0`. Default 1, as in the paper.

    Raises:
        ValueError: an option out of range.
    """

    cost = 2.0

    def __init__(self, setting: Setting, *, weight: float = 1.0) -> None:
        check_range("weight", weight, 0)
        super().__init__(setting, model=Trained(setting), peer=Trained(setting))
        self._weight = weight

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        model, peer = self.trained.values()
        z, c = model.network(x), peer.network(x)
        loss = self.criterion(z, y)
        model.update(loss + self._weight * divergence(c, z).mean())
        peer.update(self.criterion(c, y) + self._weight * divergence(z, c).mean())
        return loss.detach()
